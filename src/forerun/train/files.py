"""Which text files a corpus has, and which of them are held out."""

import json
import os
import platform
import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from forerun import pretrained
from forerun.core.errors import ConfigError

# Tests repeat themselves; code pages and the pydoc topics are machine-written tables.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
)
SUFFIXES = (".py", ".txt", ".md", ".rst")


def standard_library() -> Path:
    """Folder of the running interpreter's standard library: the corpus of the bundled models."""
    return Path(sysconfig.get_path("stdlib"))


def describe(corpus: Path) -> str:
    """Name of a corpus for the record of a run."""
    return f"standard library of CPython {platform.python_version()}" if corpus == standard_library() else corpus.name


def list_files(corpus: Path) -> list[Path]:
    """Text files of a corpus in a fixed order: a single file, or a folder without its test folders."""
    if corpus.is_file():
        return [corpus]
    if not corpus.is_dir():
        raise ConfigError(f"corpus {corpus} does not exist; give a folder or a text file")
    suffixes = (".py",) if corpus == standard_library() else SUFFIXES
    files = []
    for folder, subfolders, names in os.walk(corpus):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        files += [Path(folder, name) for name in names if name.endswith(suffixes)]
    if not files:
        raise ConfigError(f"corpus {corpus} holds no {', '.join(suffixes)} files")
    return sorted(files)


def read_text(path: Path) -> str:
    """Content of a text file; bytes that are not UTF-8 become replacement characters."""
    return path.read_text(encoding="utf-8", errors="replace")


def split_files(files: Sequence[Path], held_out: int, seed: int) -> tuple[list[Path], list[Path]]:
    """Disjoint (training, held-out) files, the same for the same list, count and seed."""
    if not 0 < held_out < len(files):
        raise ConfigError(f"held_out must be between 1 and {len(files) - 1} for {len(files)} files, not {held_out}")
    chosen = set(random.Random(seed).sample(range(len(files)), held_out))
    train = [path for index, path in enumerate(files) if index not in chosen]
    return train, [files[index] for index in sorted(chosen)]


def held_out_files(corpus: Path | None = None) -> list[Path]:
    """Files that the bundled models never saw, as far as this interpreter's library has them.

    The bundled target's `training.json` names them.
    """
    root = corpus or standard_library()
    record = json.loads((pretrained.path("target") / "training.json").read_text(encoding="utf-8"))
    return [root / name for name in record["held_out_files"] if (root / name).is_file()]

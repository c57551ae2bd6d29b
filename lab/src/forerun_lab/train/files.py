"""The texts of a corpus, which of them are held out, and how a record of a run names a corpus."""

import os
import platform
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.core.errors import ConfigError
from forerun.measure import prompts
from forerun.measure.prompts import standard_library

# Tests repeat themselves; code pages and the pydoc topics are machine-written tables.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
)
SUFFIXES = (".py", ".txt", ".md", ".rst")


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


def describe(corpus: Path) -> str:
    """Name of a corpus for the record of a run."""
    return f"standard library of CPython {platform.python_version()}" if corpus == standard_library() else corpus.name


@dataclass(frozen=True)
class Excerpt:
    """The characters of a text file from ``start`` up to ``end``."""

    path: Path
    start: int
    end: int


Document = Path | Excerpt


def read_text(document: Document) -> str:
    """Content of a text file, or part of it; bytes that are not UTF-8 become replacement characters."""
    if isinstance(document, Excerpt):
        return read_text(document.path)[document.start : document.end]
    return prompts.read_text(document)


def names(documents: Sequence[Document], corpus: Path) -> list[str]:
    """The whole files among ``documents``, as paths within the corpus."""
    return [path.relative_to(corpus).as_posix() for path in documents if isinstance(path, Path)]


def split_files(files: Sequence[Path], held_out: int | None, seed: int) -> tuple[list[Document], list[Document]]:
    """Disjoint (training, held-out) texts, the same for the same list, count and seed. ``held_out`` counts files; None
    means 25, or a tenth of fewer than 250. Of a single file the last tenth is held out."""
    if len(files) == 1:
        if held_out is not None:
            raise ConfigError("held_out counts files and the corpus is one: leave it out; its last tenth is held out")
        return _split_one(files[0])
    count = min(25, max(1, len(files) // 10)) if held_out is None else held_out
    if not 0 < count < len(files):
        raise ConfigError(f"held_out must be between 1 and {len(files) - 1} for {len(files)} files, not {count}")
    chosen = set(random.Random(seed).sample(range(len(files)), count))
    train: list[Document] = [path for index, path in enumerate(files) if index not in chosen]
    return train, [files[index] for index in sorted(chosen)]


def _split_one(path: Path) -> tuple[list[Document], list[Document]]:
    """Nine tenths of a file and the rest, cut where a line ends if it has lines."""
    text = read_text(path)
    cut = text.rfind("\n", 0, len(text) * 9 // 10) + 1 or len(text) * 9 // 10
    if not 0 < cut < len(text):
        raise ConfigError(f"{path} is too short to learn from: {len(text)} characters")
    return [Excerpt(path, 0, cut)], [Excerpt(path, cut, len(text))]

"""Text files to tokens: which files are read, which are held out, and how training sequences are cut from them."""

import json
import os
import platform
import random
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

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


def encode_files(files: Sequence[Path], tokenizer: PreTrainedTokenizerBase, seed: int) -> Tensor:
    """One stream of token ids, int32 [tokens]: the files in shuffled order, each followed by the EOS token."""
    order = random.Random(seed).sample(range(len(files)), len(files))
    stream: list[int] = []
    for index in order:
        stream.extend(tokenizer.encode(read_text(files[index]), add_special_tokens=False, verbose=False))
        stream.append(tokenizer.eos_token_id)
    return torch.tensor(stream, dtype=torch.int32)


def whole_rows(stream: Tensor, length: int) -> Tensor:
    """A stream cut into whole rows, int64 [rows, length]; one short row if that is all there is."""
    length = min(length, len(stream))
    return stream[: len(stream) // length * length].long().view(-1, length)


@dataclass(frozen=True)
class TokenStream:
    """Training sequences cut from a stream of tokens; which ones is a function of the tokens consumed so far.

    There is no state to save: every epoch is a permutation of the stream's windows, keyed by seed, epoch and length,
    with the windows' borders at a new place in every epoch.
    """

    tokens: Tensor  # int32 [tokens]
    seed: int

    def batch(self, consumed: int, rows: int, length: int) -> Tensor:
        """Token ids, int64 [rows, length + 1]: inputs and, one to the right, their labels."""
        windows = (len(self.tokens) - length - 1) // length
        if windows < 1:
            raise ConfigError(f"the corpus has {len(self.tokens)} tokens, too few for sequences of {length}")
        first = consumed // length
        return torch.stack([self._window(number, windows, length) for number in range(first, first + rows)])

    def _window(self, number: int, windows: int, length: int) -> Tensor:
        epoch, index = divmod(number, windows)
        generator = torch.Generator().manual_seed(hash((self.seed, epoch, length)) % 2**63)
        border = int(torch.randint(length, (1,), generator=generator))
        start = border + length * int(torch.randperm(windows, generator=generator)[index])
        return self.tokens[start : start + length + 1].long()

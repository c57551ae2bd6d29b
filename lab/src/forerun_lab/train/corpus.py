"""A corpus: its files, which of them are held out, their tokens, and training sequences cut from them."""

from __future__ import annotations

import os
import platform
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

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
            raise ConfigError(
                "held_out counts files, but the corpus is one file: remove it; the last tenth is held out"
            )
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


def encode_files(files: Sequence[Document], tokenizer: PreTrainedTokenizerBase, seed: int) -> Tensor:
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
    """Training sequences cut from a stream of tokens; which ones is a function of the tokens consumed so far. There is
    no state to save: every epoch is a permutation of the stream's windows, keyed by seed, epoch and length, with the
    windows' borders at a new place in every epoch."""

    tokens: Tensor  # int32 [tokens]
    seed: int

    def batch(self, consumed: int, rows: int, length: int) -> Tensor:
        """Token ids, int64 [rows, length + 1]: inputs and, one to the right, their labels."""
        windows = (len(self.tokens) - length - 1) // length
        if windows < 1:
            raise ConfigError(
                f"the corpus has {len(self.tokens)} tokens, too few for sequences of {length}: give more text, or ask "
                "for shorter ones"
            )
        first = consumed // length
        return torch.stack([self._window(number, windows, length) for number in range(first, first + rows)])

    def _window(self, number: int, windows: int, length: int) -> Tensor:
        epoch, index = divmod(number, windows)
        generator = torch.Generator().manual_seed(hash((self.seed, epoch, length)) % 2**63)
        border = int(torch.randint(length, (1,), generator=generator))
        start = border + length * int(torch.randperm(windows, generator=generator)[index])
        return self.tokens[start : start + length + 1].long()

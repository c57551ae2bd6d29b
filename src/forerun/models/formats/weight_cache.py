"""A disk cache of weights in the kernels' layout: a start maps them as they are, and processes share the memory."""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from forerun.core.errors import ConfigError
from forerun.core.folders import cache_folder, distrust, make_folder, replace_with
from forerun.models.formats.compiled import LINE, arena

log = logging.getLogger(__name__)
LARGE = 64 << 20
"""Bytes of the smallest checkpoint for which it pays."""
VARIABLE, DEFAULT_GB = "FORERUN_KEPT_GB", 8
"""The cache's size in 10^9 bytes; 0: no cache."""
FOLDER = "weights"
HEAD = struct.Struct("<32sQ")
"""The start of a file: the hash of its table, and the table's size."""
PACKAGE = Path(__file__).parents[1]

current: ContextVar[WeightCache | None] = ContextVar("weight_cache", default=None)
"""The cached weights of the model that is being loaded."""


def cached(what: str, nbytes: int, make: Callable[[np.ndarray], None]) -> torch.Tensor:
    """``nbytes`` of weights: cached under ``what``, or else new memory that ``make`` fills."""
    cache = current.get()
    result = None if cache is None else cache.take(what, nbytes)
    if result is None:
        result = arena.allocate(nbytes)
        make(result.numpy())
    if cache is not None:
        cache.pieces.append((what, result))
    return result


class WeightCache:
    """One model's cached weights: pieces in the order in which they are laid out. A piece is used if its name, its size
    and its checksum are those in the file's table."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pieces: list[tuple[str, torch.Tensor]] = []
        self.stale = False
        """Whether this model's pieces differ from the file's."""
        self._table: list[list[object]] = []
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._offset = 0
        try:
            self._open()
        except (OSError, ValueError, struct.error) as error:
            log.debug("no weights of an earlier start: %s", error)

    def _open(self) -> None:
        """Map the file. Raises OSError, ValueError or struct.error for one that is missing or damaged."""
        if (reason := distrust(self.path)) is not None:
            raise PermissionError(reason)
        with self.path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        digest, size = HEAD.unpack_from(mapped)
        text = mapped[HEAD.size : HEAD.size + size]
        if hashlib.sha256(text).digest() != digest:
            raise ValueError(f"{self.path} is damaged")
        table = json.loads(text)
        if len(mapped) != _start(len(text)) + sum(_padded(nbytes) for _, nbytes, _ in table):
            raise ValueError(f"{self.path} is cut short")
        self._table, self._offset = table, _start(len(text))
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        os.utime(self.path)  # the least recently used file is removed first

    def take(self, what: str, nbytes: int) -> torch.Tensor | None:
        """The next piece; None if it has to be laid out."""
        index, start = len(self.pieces), self._offset
        if index < len(self._table) and self._table[index][:2] == [what, nbytes]:
            self._offset += _padded(nbytes)
            result = self._bytes[start : start + nbytes]
            if _checksum(result) == self._table[index][2]:
                return result
        self.stale = True
        return None

    def save(self) -> None:
        """Write the pieces, unless the file has them. Other files are removed to make room, the oldest first."""
        if not self.pieces or not self.stale:
            return
        text = json.dumps([[what, len(piece), _checksum(piece)] for what, piece in self.pieces]).encode()
        size = _start(len(text)) + sum(_padded(len(piece)) for _, piece in self.pieces)
        try:
            folder = make_folder(self.path.parent)
            if size > limit() or 2 * size > shutil.disk_usage(folder).free:
                log.info("no space to keep %d MB of weights for the next start", size / 1e6)
                return
            for old in folder.glob(f"{self.path.name.rpartition('-')[0]}-*"):
                old.unlink()  # this model before its files or the layout changed
            _evict(size)
            replace_with(self.path, lambda file: self._write(file, text), sync=False)
        except OSError as error:
            log.info("weights cannot be kept for the next start: %s", error)

    def _write(self, path: Path, text: bytes) -> None:
        with path.open("wb") as file:
            file.write(HEAD.pack(hashlib.sha256(text).digest(), len(text)) + text)
            file.truncate(_start(len(text)))
            file.seek(0, os.SEEK_END)
            for _, piece in self.pieces:
                file.write(piece.numpy().data)
                file.write(bytes(_padded(len(piece)) - len(piece)))


def _start(size: int) -> int:
    """The offset of the pieces after a table of ``size`` bytes."""
    return -(-(HEAD.size + size) // mmap.PAGESIZE) * mmap.PAGESIZE


def _padded(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE


def _checksum(piece: torch.Tensor) -> int:
    """The sum of 64-bit words and the last bytes: as fast as memory can be read."""
    numbers = piece.numpy()
    end = len(numbers) // 8 * 8
    words = numbers[:end].view(np.uint64).sum(dtype=np.uint64)
    return int(words) + int(numbers[end:].sum(dtype=np.uint64))


def limit() -> int:
    """The cache's size in bytes. Raises ConfigError for a setting that is not a number."""
    setting = os.environ.get(VARIABLE) or str(DEFAULT_GB)
    try:
        result = float(setting)
    except ValueError:
        result = -1.0
    if not 0 <= result < 1e9:
        raise ConfigError(
            f"{VARIABLE} is how many GB of weights are kept for the next start, 0 or more; not {setting!r}"
        )
    return int(result * 1e9)


def files() -> list[Path]:
    """The cache's files, the least recently used first."""
    try:
        result = [path for path in (cache_folder() / FOLDER).glob("*-*-*") if path.is_file()]
    except OSError:
        return []
    return sorted(result, key=lambda path: path.stat().st_mtime)


def _evict(size: int) -> None:
    """Remove the oldest files until ``size`` bytes fit."""
    paths = files()
    total = sum(path.stat().st_size for path in paths)
    for path in paths:
        if total + size <= limit():
            return
        total -= path.stat().st_size
        path.unlink()


def clear(model: Path) -> int:
    """Remove the cached weights of a model's file or folder. Returns the bytes freed."""
    paths = [path for path in files() if path.name.startswith(f"{_hash(str(model))}-")]
    size = sum(path.stat().st_size for path in paths)
    for path in paths:
        path.unlink()
    return size


def _layout() -> str:
    """A text that changes with all code and packages that decide how weights are laid out and rounded."""
    kernels = PACKAGE.with_name("kernels")
    sources = [*sorted(PACKAGE.rglob("*.py")), kernels / "structs.py", kernels / "quants.h"]
    packages = [f"{name} {version(name)}" for name in ("gguf", "numpy", "torch", "transformers")]
    return "\0".join([*(path.read_text(encoding="utf-8") for path in sources), *packages])


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@contextmanager
def caching(model: Path, options: str, state: str) -> Iterator[None]:
    """Within this context, a model is loaded from ``model``, a file or folder, with ``options``. It takes pieces that
    were cached for the same ``state`` of its files, and leaves its own for the next start."""
    try:
        folder = cache_folder() / FOLDER if limit() else None
    except OSError:
        folder = None
    if folder is None:
        yield
        return
    cache = WeightCache(folder / "-".join([_hash(str(model)), _hash(options), _hash(state, _layout())]))
    before = current.set(cache)
    try:
        yield
        cache.save()
    finally:
        current.reset(before)

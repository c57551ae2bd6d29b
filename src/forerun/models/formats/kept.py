"""Weights as the kernels read them, kept in the cache folder: the next start maps them into memory instead of making
them again, and processes share them."""

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
"""Bytes of a checkpoint from which it pays."""
VARIABLE, USUAL = "FORERUN_KEPT_GB", 8
"""How much is kept, in 10^9 bytes; 0: nothing."""
FOLDER = "weights"
HEAD = struct.Struct("<32sQ")
"""What a file begins with: the hash of its table, and the table's size."""
PACKAGE = Path(__file__).parents[1]

kept: ContextVar[Kept | None] = ContextVar("kept", default=None)
"""What the model that is being made has of earlier starts."""


def made(what: str, nbytes: int, make: Callable[[np.ndarray], None]) -> torch.Tensor:
    """``nbytes`` of weights: those that an earlier start has made under ``what``, else room with what ``make`` puts
    there."""
    held = kept.get()
    result = None if held is None else held.take(what, nbytes)
    if result is None:
        result = arena.allocate(nbytes)
        make(result.numpy())
    if held is not None:
        held.pieces.append((what, result))
    return result


class Kept:
    """The weights of one model, in the order of their making. A piece is used if its name, its size and the sum of its
    bytes are those of the file's table."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pieces: list[tuple[str, torch.Tensor]] = []
        self.stale = False
        """Whether the file is not what this model has."""
        self._table: list[list[object]] = []
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._at = 0
        try:
            self._open()
        except (OSError, ValueError, struct.error) as error:
            log.debug("no weights of an earlier start: %s", error)

    def _open(self) -> None:
        """Raises OSError, ValueError or struct.error for a file that is not there or not whole."""
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
        self._table, self._at = table, _start(len(text))
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        os.utime(self.path)  # the oldest goes first

    def take(self, what: str, nbytes: int) -> torch.Tensor | None:
        """The next piece; None if it has to be made."""
        index, at = len(self.pieces), self._at
        if index < len(self._table) and self._table[index][:2] == [what, nbytes]:
            self._at += _padded(nbytes)
            result = self._bytes[at : at + nbytes]
            if _sum(result) == self._table[index][2]:
                return result
        self.stale = True
        return None

    def keep(self) -> None:
        """Write the pieces, unless the file has them: where there is room, older files going first."""
        if not self.pieces or not self.stale:
            return
        text = json.dumps([[what, len(piece), _sum(piece)] for what, piece in self.pieces]).encode()
        size = _start(len(text)) + sum(_padded(len(piece)) for _, piece in self.pieces)
        try:
            folder = make_folder(self.path.parent)
            if size > limit() or 2 * size > shutil.disk_usage(folder).free:
                log.info("there is no room to keep %d MB of weights for the next start", size / 1e6)
                return
            for old in folder.glob(f"{self.path.name.rpartition('-')[0]}-*"):
                old.unlink()  # of this model as it was, or in another layout
            _evict(folder, size)
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
    """Where the pieces begin behind a table of ``size`` bytes."""
    return -(-(HEAD.size + size) // mmap.PAGESIZE) * mmap.PAGESIZE


def _padded(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE


def _sum(piece: torch.Tensor) -> int:
    """Of all bytes in words; memory is read for it about as fast as it can be."""
    numbers = piece.numpy()
    whole = len(numbers) // 8 * 8
    words = numbers[:whole].view(np.uint64).sum(dtype=np.uint64)
    return int(words) + int(numbers[whole:].sum(dtype=np.uint64))


def limit() -> int:
    """Bytes that may be kept. Raises ConfigError for a setting that is no number."""
    said = os.environ.get(VARIABLE) or str(USUAL)
    try:
        result = float(said)
    except ValueError:
        result = -1.0
    if not 0 <= result < 1e9:
        raise ConfigError(f"{VARIABLE} is how many GB of weights are kept for the next start, 0 or more; not {said!r}")
    return int(result * 1e9)


def files() -> list[Path]:
    """What is kept, the oldest first."""
    try:
        result = [path for path in (cache_folder() / FOLDER).glob("*-*-*") if path.is_file()]
    except OSError:
        return []
    return sorted(result, key=lambda path: path.stat().st_mtime)


def _evict(folder: Path, size: int) -> None:
    older = files()
    held = sum(path.stat().st_size for path in older)
    for path in older:
        if held + size <= limit():
            return
        held -= path.stat().st_size
        path.unlink()


def forget(model: Path) -> int:
    """Remove what is kept of a file or folder; the bytes that are free then."""
    gone = [path for path in files() if path.name.startswith(f"{_hash(str(model))}-")]
    size = sum(path.stat().st_size for path in gone)
    for path in gone:
        path.unlink()
    return size


def _layout() -> str:
    """Changes with whatever decides how weights are laid out and rounded."""
    kernels = PACKAGE.with_name("kernels")
    sources = [*sorted(PACKAGE.rglob("*.py")), kernels / "structs.py", kernels / "quants.h"]
    packages = [f"{name} {version(name)}" for name in ("gguf", "numpy", "torch", "transformers")]
    return "\0".join([*(path.read_text(encoding="utf-8") for path in sources), *packages])


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@contextmanager
def keeping(model: Path, options: str, state: str) -> Iterator[None]:
    """The model that is made meanwhile, of the file or folder ``model`` with ``options``, takes what an earlier start
    has made of it in this ``state``, and what is new is kept for the next one."""
    if not limit():
        yield
        return
    try:
        folder = cache_folder() / FOLDER
    except OSError:
        yield
        return
    held = Kept(folder / "-".join([_hash(str(model)), _hash(options), _hash(state, _layout())]))
    before = kept.set(held)
    try:
        yield
        held.keep()
    finally:
        kept.reset(before)

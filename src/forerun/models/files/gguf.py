"""GGUF files: metadata and tensors. Every size that a file states is checked before anything is read by it.

Models may be split into shards, ``NAME-00001-of-00003.gguf`` and so on. The first has the metadata, each has tensors.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from forerun.core.errors import ModelError, shown
from forerun.models.formats.gguf_types import TYPES

SUFFIX = ".gguf"
MAGIC = b"GGUF"
LFS = b"version https://git-lfs"
"""How a pointer of Git LFS begins."""
NO_MODEL, DRAFTERS = ("mmproj", "imatrix"), ("mtp-", "dflash-", "eagle3-")
"""Parts of the names of files that are not language models, and how those of drafters begin that lie beside a model."""
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
"""Bytes, where ``general.alignment`` is missing."""
MAX_KEY_BYTES, MAX_NAME_BYTES, MAX_DIMENSIONS = 65535, 63, 4
MIN_KEY_BYTES, MIN_TENSOR_BYTES = 13, 32
"""The smallest entry of a key, and the smallest description of a tensor."""

SHARD_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
SHARD_NUMBER, SHARD_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"

_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor's type and location. ``shape`` is in torch's order: rows first."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    """Byte of the file."""
    nbytes: int
    content: mmap.mmap = field(repr=False)
    """The whole file."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class GgufMetadata(UserDict[str, Any]):
    """Values by key. Lists of strings are decoded on first access, which raises ModelError if they are no UTF-8."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.path = path

    def __getitem__(self, key: str) -> Any:
        result = self.data[key]
        if callable(result):
            try:
                result = self.data[key] = result()
            except UnicodeDecodeError as error:
                raise _unusable(self.path, f"{key} is not UTF-8 text") from error
        return result


class GGUFFile:
    """An open GGUF file: ``metadata`` by key, ``tensors`` by name. It stays mapped until the last view of it is gone.
    Raises ModelError for another kind of file, a truncated one, and sizes that cannot be."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            reason = error.strerror if isinstance(error, OSError) else "it is empty"
            raise ModelError(f"{self.path} cannot be read: {reason}") from error
        self._maps = [content]
        try:
            values, self.tensors = _HeaderReader(content).read()
        except ValueError as error:
            refuse_pointer(self.path)
            raise _unusable(self.path, error) from error
        self.metadata: Mapping[str, Any] = GgufMetadata(self.path, values)

    def packed(self, name: str) -> np.ndarray:
        """A tensor's bytes as in the file: uint8, read-only, not copied. Raises ModelError."""
        tensor = self._tensor(name)
        return np.frombuffer(tensor.content, np.uint8, tensor.nbytes, tensor.start)

    def rows(self, name: str) -> np.ndarray:
        """The same, as [rows, bytes of a row]."""
        tensor = self._tensor(name)
        return self.packed(name).reshape(-1, tensor.nbytes * tensor.shape[-1] // tensor.numel)

    def values(self, name: str) -> torch.Tensor:
        """A tensor dequantized to float32. Raises ModelError for a type that cannot be dequantized."""
        tensor = self._tensor(name)
        try:
            result = dequantize(self.rows(name), tensor.kind)
        except NotImplementedError as error:
            raise _unusable(self.path, f"{name} is of kind {tensor.kind.name}, which cannot be dequantized") from error
        return torch.from_numpy(np.array(result, dtype=np.float32)).reshape(tensor.shape)

    def types(self) -> dict[str, int]:
        """Bytes of the matrices by type, the largest first."""
        result: dict[str, int] = {}
        for tensor in self.tensors.values():
            if len(tensor.shape) > 1:
                result[tensor.kind.name] = result.get(tensor.kind.name, 0) + tensor.nbytes
        return dict(sorted(result.items(), key=lambda each: -each[1]))

    def release(self) -> None:
        """Drop the file's pages from memory; they are read again on demand."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            for content in self._maps:
                content.madvise(mmap.MADV_DONTNEED)

    def add_shards(self, paths: Sequence[Path]) -> None:
        """Add the tensors of the other shards. ``paths`` are all of them, this file's own first.

        Raises ModelError for a shard that is missing, of another index or model, and for a name that comes twice.
        """
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise ModelError(
                f"{self.path.parent} lacks {missing[0]}, a part of the model that {self.path.name} belongs to"
            )
        owners: dict[str, str] = {}
        for number, shard in enumerate([self, *map(GGUFFile, paths[1:])]):
            stated = shard.metadata.get(SHARD_NUMBER), shard.metadata.get(SHARD_COUNT)
            if stated != (number, len(paths)):
                raise ModelError(
                    f"{shard.path} says that it is part {shown(stated[0])} of {shown(stated[1])}, counted from 0, and "
                    f"its name that it is {number} of {len(paths)}"
                )
            for name in shard.tensors:
                if name in owners:
                    raise ModelError(f"{name} is in {owners[name]} and in {shard.path.name}")
                owners[name] = shard.path.name
            if shard is not self:
                self.tensors |= shard.tensors
                self._maps += shard._maps
        expected = self.metadata.get(SPLIT_TENSORS)
        if expected is not None and expected != len(self.tensors):
            raise ModelError(f"{self.path} says that there are {shown(expected)} tensors, but its parts have "
                             f"{len(self.tensors)}")  # fmt: skip

    def _tensor(self, name: str) -> GGUFTensor:
        if name not in self.tensors:
            raise _unusable(self.path, f"it has no tensor {name}")
        return self.tensors[name]


def _unusable(path: Path, reason: object) -> ModelError:
    return ModelError(f"{path} is not a GGUF file that can be used: {reason}")


class _HeaderReader:
    """Parses the header of a mapped file from its first byte on. Raises ValueError with the reason why it cannot."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content = content
        self.position = 0

    def read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        """The metadata (lists of strings as functions that decode them), and the tensors by name."""
        if self._take(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._u32()
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            raise ValueError("it is big-endian" if swapped in VERSIONS else f"its version is {version}, not 2 or 3")
        tensor_count, key_count = self._u64(), self._u64()
        self._require(key_count * MIN_KEY_BYTES + tensor_count * MIN_TENSOR_BYTES, "its list of keys and tensors")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._name("a key", MAX_KEY_BYTES)
            if key in metadata:
                raise ValueError(f"{key} is there twice")
            metadata[key] = self._value(key, self._u32())
        described = [self._tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {shown(alignment)}, not a power of two")
        data_start = -(-self.position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for tensor in described:
            name, start = tensor.name, data_start + tensor.start
            if name in tensors:
                raise ValueError(f"tensor {name} is there twice")
            if tensor.start % alignment:
                raise ValueError(f"{name} begins at {tensor.start}, not at a multiple of {alignment}")
            if (end := start + tensor.nbytes) > len(self.content):
                raise ValueError(f"it is truncated or damaged: {name} ends at byte {end} of {len(self.content)}")
            tensors[name] = replace(tensor, start=start)
        return metadata, tensors

    def _tensor(self) -> GGUFTensor:
        """A tensor's description, ``start`` counted from the first tensor."""
        name, dimensions = self._name("a tensor's name", MAX_NAME_BYTES), self._u32()
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"{name} has {dimensions} dimensions")
        shape = tuple(reversed([self._u64() for _ in range(dimensions)]))
        if 0 in shape:
            raise ValueError(f"{name} has shape {list(shape)}")
        kind, offset = self._u32(), self._u64()
        if kind not in GGML_QUANT_SIZES:
            raise ValueError(f"{name} is of unknown type {kind}; {', '.join(TYPES)} are read")
        known = GGMLQuantizationType(kind)
        block, size = GGML_QUANT_SIZES[known]
        if shape[-1] % block:
            raise ValueError(f"rows of {name} have {shape[-1]} values, not a multiple of {known.name}'s {block}")
        return GGUFTensor(name, shape, known, offset, math.prod(shape) // block * size, self.content)

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string(key, self._u64())
        if kind in _SCALARS:
            return self._scalars(key, kind, 1)[0]
        if kind != _ARRAY:
            raise ValueError(f"{key} is of unknown type {kind}")
        element, count = self._u32(), self._u64()
        if element in _SCALARS:
            return self._scalars(key, element, count)
        if element != _STRING:
            raise ValueError(f"{key} is an array of type {element}, which is not supported")
        self._require(count * _U64.size, key)
        return self._strings(key, count)

    def _scalars(self, key: str, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(_SCALARS[kind])
        return list(np.frombuffer(self._take(count * dtype.itemsize, key), dtype).tolist())

    def _strings(self, key: str, count: int) -> Callable[[], list[str]]:
        """Skips a list of strings. Returns what decodes it."""
        content, unpack = self.content, _U64.unpack_from
        start = position = self.position
        last = len(content) - _U64.size
        for _ in range(count):
            if position > last:
                break
            position += _U64.size + unpack(content, position)[0]
        self._require(position - start, key)
        self.position = position

        def decode() -> list[str]:
            result, end = [], start
            for _ in range(count):
                first = end + _U64.size
                end = first + unpack(content, end)[0]
                result.append(content[first:end].decode())
            return result

        return decode

    def _string(self, what: str, length: int) -> str:
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{what} is not UTF-8 text") from error

    def _name(self, what: str, longest: int) -> str:
        length = self._u64()
        if length > longest:
            raise ValueError(f"it is truncated or damaged: {what} of {length} bytes")
        result = self._string(what, length)
        if not result.isprintable():  # messages show names
            raise ValueError(f"{what} is {shown(result)}")
        return result

    def _u32(self) -> int:
        return int(_U32.unpack(self._take(_U32.size))[0])

    def _u64(self) -> int:
        return int(_U64.unpack(self._take(_U64.size))[0])

    def _require(self, count: int, what: str) -> None:
        if count > len(self.content) - self.position:
            raise ValueError(f"it is truncated or damaged: {what} ends beyond its {len(self.content)} bytes")

    def _take(self, count: int, what: str = "its header") -> bytes:
        self._require(count, what)
        result = self.content[self.position : self.position + count]
        self.position += count
        return result


def _shards(path: Path) -> Iterator[Path]:
    match = SHARD_NAME.fullmatch(path.name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        yield path
        return
    for number in range(1, int(match[3]) + 1):
        yield path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.gguf")


def shards_of(path: Path) -> list[Path]:
    """Every file of the model that ``path`` belongs to, in order, going by its name alone."""
    return list(_shards(path))


def first_shard(path: Path) -> Path:
    """The first of ``shards_of``, which may be very many."""
    return next(_shards(path))


def find_model(paths: Sequence[Path]) -> Path | None:
    """The first shard of the one model in a folder with these files; None: there are several models, or none."""
    firsts = models_among(set(map(first_shard, paths)))
    return firsts[0] if len(firsts) == 1 else None


def models_among(paths: Iterable[Path]) -> list[Path]:
    """The language models of these files by their names; drafters only where nothing else is there."""
    usual = [path for path in paths if not any(word in str(path).lower() for word in NO_MODEL)]
    return [path for path in usual if not path.name.lower().startswith(DRAFTERS)] or usual


def refuse_pointer(path: Path) -> None:
    """Raise ModelError for a pointer of Git LFS, which is in a file's place after a clone without LFS."""
    with path.open("rb") as file:
        if file.read(len(LFS)) == LFS:
            raise ModelError(f"{path} is a pointer of Git LFS, not the file itself: run `git lfs pull` in its folder")


def is_gguf(path: Path) -> bool:
    """By the file's first bytes; by its name, if there is no such file."""
    if path.suffix == SUFFIX or not path.is_file():
        return path.suffix == SUFFIX
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:  # whoever opens it will report the error
        return False


def open_gguf(path: Path) -> GGUFFile:
    """The file, or all shards of the model that it belongs to. Raises ModelError as ``GGUFFile`` and ``add_shards``."""
    result = GGUFFile(path)
    if result.metadata.get(SHARD_COUNT, 1) in (0, 1):
        return result
    paths = shards_of(path)
    if len(paths) < 2:
        raise ModelError(f"{path} is one of several parts of a model: its name must end in -00001-of-00003.gguf, "
                         "say, and the others lie beside it")  # fmt: skip
    result = GGUFFile(paths[0]) if paths[0].is_file() else result
    result.add_shards(paths)
    return result

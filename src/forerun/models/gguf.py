"""GGUF files: metadata and tensors. Every size that a file states is checked before anything is read by it.

Models may be cut into several files, ``NAME-00001-of-00003.gguf`` and so on: the first has the metadata, each has
tensors of its own.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
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
VERSIONS = (2, 3)
ALIGNMENT = 32
"""Bytes, where ``general.alignment`` does not say."""
LONGEST_KEY, LONGEST_NAME = 65535, 63
DIMENSIONS = 4
SHORTEST_KEY, SHORTEST_TENSOR = 13, 32
"""Bytes of a key with an empty name and a value of one byte, and of a description of a tensor with one dimension."""

PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
PART, PARTS, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
MOST_PARTS = 1000

_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies and what it is. ``shape`` is in torch's order: rows first."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    """Byte of the file."""
    nbytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class GgufMetadata(Mapping[str, Any]):
    """Values by key. Lists of texts are long, and read when they are asked for: then one that is not UTF-8 raises
    ModelError."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        result = self._values[key]
        if callable(result):
            result = self._values[key] = result()
        return result

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class GGUFFile:
    """An open GGUF file: ``metadata`` by key, ``tensors`` by name. Raises ModelError for a file that is none, is
    truncated or states sizes that cannot be. The file stays mapped until the last view of it is gone."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            reason = error.strerror if isinstance(error, OSError) else "it is empty"
            raise ModelError(f"{self.path} cannot be read: {reason}") from error
        self._place = 0
        self.metadata: Mapping[str, Any]
        self.tensors: Mapping[str, GGUFTensor]
        self.metadata, self.tensors = self._header()

    def packed(self, name: str) -> np.ndarray:
        """A tensor's bytes as they lie in the file: uint8, read-only, not copied. Raises ModelError."""
        tensor = self._tensor(name)
        return np.frombuffer(self._bytes, np.uint8, tensor.nbytes, tensor.start)

    def rows(self, name: str) -> np.ndarray:
        """The same [rows, bytes of a row]."""
        tensor = self._tensor(name)
        return self.packed(name).reshape(-1, tensor.nbytes * tensor.shape[-1] // tensor.numel)

    def values(self, name: str) -> torch.Tensor:
        """A tensor's values, exact, float32. Raises ModelError for a kind that cannot be dequantized."""
        tensor = self._tensor(name)
        try:
            result = dequantize(self.rows(name), tensor.kind)
        except NotImplementedError as error:
            raise self._broken(f"{name} is of kind {tensor.kind.name}, which cannot be dequantized") from error
        return torch.from_numpy(np.array(result, dtype=np.float32)).reshape(tensor.shape)

    def types(self) -> dict[str, int]:
        """Of its matrices, and how many bytes of each there are, the most first."""
        result: dict[str, int] = {}
        for tensor in self.tensors.values():
            if len(tensor.shape) > 1:
                result[tensor.kind.name] = result.get(tensor.kind.name, 0) + tensor.nbytes
        return dict(sorted(result.items(), key=lambda each: -each[1]))

    def release(self) -> None:
        """Give the pages back that were read; they are read again where they are asked for again."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            self._bytes.madvise(mmap.MADV_DONTNEED)

    def _tensor(self, name: str) -> GGUFTensor:
        if name not in self.tensors:
            raise self._broken(f"it has no tensor {name}")
        return self.tensors[name]

    def _broken(self, reason: str) -> ModelError:
        return ModelError(f"{self.path} is not a GGUF file that can be used: {reason}")

    def _header(self) -> tuple[Mapping[str, Any], dict[str, GGUFTensor]]:
        if self._take(4) != MAGIC:
            raise self._broken("it does not begin with GGUF")
        version = self._u32()
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            known = "it is big-endian" if swapped in VERSIONS else f"its version is {version}, not 2 or 3"
            raise self._broken(known)
        tensor_count, key_count = self._u64(), self._u64()
        self._need(key_count * SHORTEST_KEY + tensor_count * SHORTEST_TENSOR, "its list of keys and tensors")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._text("a key", LONGEST_KEY)
            if key in metadata:
                raise self._broken(f"{key} is there twice")
            metadata[key] = self._value(key, self._u32())
        tensors = [self._described() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._broken(f"general.alignment is {shown(alignment)}, not a power of two")
        first = -(-self._place // alignment) * alignment
        placed: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in tensors:
            if name in placed:
                raise self._broken(f"tensor {name} is there twice")
            placed[name] = self._checked(name, shape, kind, offset, first, alignment)
        return GgufMetadata(metadata), placed

    def _checked(
        self, name: str, shape: tuple[int, ...], kind: int, offset: int, first: int, alignment: int
    ) -> GGUFTensor:
        try:
            known = GGMLQuantizationType(kind)
        except ValueError as error:
            raise self._broken(f"{name} is of unknown type {kind}; {', '.join(TYPES)} are read") from error
        block, size = GGML_QUANT_SIZES[known]
        if shape[-1] % block:
            raise self._broken(f"rows of {name} have {shape[-1]} values, not a multiple of {known.name}'s {block}")
        length = math.prod(shape) // block * size
        start = first + offset
        if offset % alignment:
            raise self._broken(f"{name} begins at {offset}, not at a multiple of {alignment}")
        if start + length > len(self._bytes):
            raise self._broken(
                f"it is truncated or damaged: {name} ends at byte {start + length} of {len(self._bytes)}"
            )
        return GGUFTensor(name, shape, known, start, length)

    def _described(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text("a tensor's name", LONGEST_NAME)
        dimensions = self._u32()
        if not 1 <= dimensions <= DIMENSIONS:
            raise self._broken(f"{name} has {dimensions} dimensions")
        shape = tuple(reversed([self._u64() for _ in range(dimensions)]))
        if 0 in shape:
            raise self._broken(f"{name} has shape {list(shape)}")
        return name, shape, self._u32(), self._u64()

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._text(key)
        if kind in _SCALARS:
            return self._scalars(key, kind, 1)[0]
        if kind != _ARRAY:
            raise self._broken(f"{key} is of unknown type {kind}")
        element, count = self._u32(), self._u64()
        if element in _SCALARS:
            return self._scalars(key, element, count)
        if element != _STRING:
            raise self._broken(f"{key} is an array of type {element}, which is not supported")
        self._need(count * _U64.size, key)
        first = self._place
        self._pass_texts(key, count)
        return partial(self._texts, key, first, count)

    def _scalars(self, key: str, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize, key), dtype).tolist()

    def _pass_texts(self, key: str, count: int) -> None:
        content, at, unpack = self._bytes, self._place, _U64.unpack_from
        last = len(content) - _U64.size
        for _ in range(count):
            if at > last:
                break
            at += _U64.size + unpack(content, at)[0]
        self._need(at - self._place, key)
        self._place = at

    def _texts(self, key: str, at: int, count: int) -> list[str]:
        content, unpack = self._bytes, _U64.unpack_from
        result = []
        try:
            for _ in range(count):
                first = at + _U64.size
                at = first + unpack(content, at)[0]
                result.append(content[first:at].decode())
        except UnicodeDecodeError as error:
            raise self._broken(f"{key} is not UTF-8 text") from error
        return result

    def _text(self, what: str, longest: int | None = None) -> str:
        length = self._u64()
        if longest is not None and length > longest:
            raise self._broken(f"it is truncated or damaged: {what} of {length} bytes")
        try:
            result = self._take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._broken(f"{what} is not UTF-8 text") from error
        if longest is not None and not result.isprintable():  # messages show names
            raise self._broken(f"{what} is {shown(result)}")
        return result

    def _u32(self) -> int:
        return _U32.unpack(self._take(_U32.size))[0]

    def _u64(self) -> int:
        return _U64.unpack(self._take(_U64.size))[0]

    def _need(self, count: int, what: str) -> None:
        if count > len(self._bytes) - self._place:
            raise self._broken(f"it is truncated or damaged: {what} ends beyond its {len(self._bytes)} bytes")

    def _take(self, count: int, what: str = "its header") -> bytes:
        self._need(count, what)
        result = self._bytes[self._place : self._place + count]
        self._place += count
        return result


def parts_of(path: Path) -> list[Path]:
    """Every file of the model that ``path`` belongs to, in order; by its name alone."""
    match = PART_NAME.fullmatch(path.name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]) <= MOST_PARTS:
        return [path]
    return [path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.gguf") for number in range(1, int(match[3]) + 1)]


def find_model(paths: Sequence[Path]) -> Path | None:
    """The one model that files of a folder are: its only file, or the first of its parts; None: there are several."""
    firsts = {parts_of(path)[0] for path in paths}
    return firsts.pop() if len(firsts) == 1 else None


class SplitGGUF(GGUFFile):
    """The same of a model that is cut into several files. Raises ModelError for one that is missing, out of place or of
    another model, and for a name that comes twice."""

    def __init__(self, path: Path) -> None:
        files = parts_of(path)
        if len(files) < 2:
            raise ModelError(f"{path} is one of several parts of a model: its name must end in -00001-of-00003.gguf, "
                             "say, and the others lie beside it")  # fmt: skip
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelError(f"{path.parent} lacks {missing[0]}, a part of the model that {path.name} belongs to")
        self.path = files[0]
        self.parts = [GGUFFile(file) for file in files]
        self.metadata = {key: value for key, value in self.parts[0].metadata.items() if key != PARTS}
        self._holders: dict[str, GGUFFile] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        for number, part in enumerate(self.parts):
            self._add(number, part)
        asked = self.metadata.get(SPLIT_TENSORS)
        if asked is not None and asked != len(self.tensors):
            raise ModelError(f"{self.path} says that there are {shown(asked)} tensors, but its parts have "
                             f"{len(self.tensors)}")  # fmt: skip

    def _add(self, number: int, part: GGUFFile) -> None:
        says = part.metadata.get(PART), part.metadata.get(PARTS)
        if says != (number, len(self.parts)):
            raise ModelError(
                f"{part.path} says that it is part {shown(says[0])} of {shown(says[1])}, counted from 0, and its name "
                f"that it is {number} of {len(self.parts)}"
            )
        for name, tensor in part.tensors.items():
            if name in self.tensors:
                raise ModelError(f"{name} is in {self._holders[name].path.name} and in {part.path.name}")
            self.tensors[name], self._holders[name] = tensor, part

    def packed(self, name: str) -> np.ndarray:
        return self._holders[name].packed(name) if name in self._holders else super().packed(name)

    def release(self) -> None:
        for part in self.parts:
            part.release()


def is_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX


def open_gguf(path: Path) -> GGUFFile:
    """The file, or all parts of a model that it is one of; headers are read once while files stay the same. Raises
    ModelError."""
    about = []
    for part in parts_of(path):
        try:
            result = part.stat()
            about.append((result.st_mtime_ns, result.st_size))
        except OSError as error:
            if part == path:
                raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    return _opened(path, tuple(about))


@lru_cache(maxsize=2)
def _opened(path: Path, about: tuple[tuple[int, int], ...]) -> GGUFFile:
    file = GGUFFile(path)
    return SplitGGUF(path) if file.metadata.get(PARTS, 1) not in (0, 1) else file

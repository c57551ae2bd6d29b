"""Blocks of weights as GGUF files have them, and as ``kernels/quants.h`` reads them; nothing is rounded in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from forerun.kernels.structs import QUANTS
from forerun.models.formats.base import CHUNK, Rows
from forerun.models.formats.gguf_types import INPUTS, OUTPUTS, PACKED, Bytes, sizes
from forerun.models.formats.rounding import to_blocks


class Raw(Protocol):
    """Rows of bytes, made when they are asked for; every array is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> Bytes: ...


class Rounding:
    """The rows of a weight rounded to ``kind``, with zeros up to whole blocks. Raises ConfigError, when rows are asked
    for, for kinds that only files bring."""

    def __init__(self, weight: Rows, kind: str) -> None:
        self.weight = weight
        self.kind = kind
        self.block, _ = sizes(kind)

    def __len__(self) -> int:
        return self.weight.shape[0]

    def __getitem__(self, rows: slice) -> Bytes:
        result = self.weight[rows].float().numpy()
        return to_blocks(np.pad(result, ((0, 0), (0, -result.shape[1] % self.block))), self.kind)


@dataclass(frozen=True)
class Ordered:
    """Rows in another order."""

    raw: Raw
    order: np.ndarray

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, rows: Any) -> Bytes:
        return self.raw[self.order[rows]]


@dataclass(frozen=True)
class Stacked:
    """One's rows behind the other's."""

    parts: Sequence[Raw]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, rows: slice) -> Bytes:
        first, end, _ = rows.indices(len(self))
        result, start = [], 0
        for part in self.parts:
            here = slice(max(first - start, 0), min(max(end - start, 0), len(part)))
            if here.start < here.stop:
                result.append(part[here])
            start += len(part)
        return result[0] if len(result) == 1 else np.concatenate(result)


@dataclass(frozen=True)
class Blocks:
    """Weights [outputs, inputs] of a kind in ``PACKED``, ``raw`` [outputs, bytes of a row] as in a GGUF file."""

    kind: str
    raw: Raw
    inputs: int

    @classmethod
    def of(cls, weight: torch.Tensor, kind: str) -> Blocks:
        """A weight rounded to ``kind``. Raises ConfigError for kinds that only files bring."""
        return cls(kind, Rounding(weight, kind)[:], weight.shape[1])

    def values(self, rows: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        """Some rows in float32 [outputs, inputs], exact."""
        raw = self.raw[rows if isinstance(rows, slice) else rows.numpy()]
        result = dequantize(raw, GGMLQuantizationType[self.kind.upper()])
        return torch.from_numpy(np.array(result[:, : self.inputs], dtype=np.float32))

    def rows(self, order: torch.Tensor) -> Blocks:
        """Some of its rows, in any order."""
        return Blocks(self.kind, Ordered(self.raw, order.numpy()), self.inputs)


def join(parts: Sequence[Blocks]) -> Blocks:
    """Weights of one kind over the same inputs, one's rows behind the other's."""
    return (
        parts[0] if len(parts) == 1 else Blocks(parts[0].kind, Stacked([part.raw for part in parts]), parts[0].inputs)
    )


def form(kind: str) -> str:
    """As which the kernels read it."""
    return PACKED[kind].form


def record_bytes(kind: str, outputs: int, inputs: int) -> int:
    """Of weights as the kernels read them."""
    of, size = QUANTS[form(kind)]
    return -(-outputs // OUTPUTS) * -(-inputs // of) * size


def pack(blocks: Blocks, to: Bytes) -> None:
    """Lay weights out as the kernels read them, into ``record_bytes`` bytes."""
    raw, at = blocks.raw, 0
    step = max(1, CHUNK // blocks.inputs // OUTPUTS) * OUTPUTS
    for first in range(0, len(raw), step):  # what is unpacked at a time stays small
        part = raw[first : first + step]
        size = record_bytes(blocks.kind, len(part), blocks.inputs)
        _pack(blocks.kind, part, to[at : at + size])
        at += size


def _pack(kind: str, raw: Bytes, to: Bytes) -> None:
    block, size = sizes(kind)
    if len(raw) % OUTPUTS:
        raw = np.concatenate([raw, np.zeros((-len(raw) % OUTPUTS, raw.shape[1]), np.uint8)])
    of, bytes_ = QUANTS[form(kind)]
    tiles, records, inner = len(raw) // OUTPUTS, raw.shape[1] // size * block // of, of // INPUTS
    with np.errstate(invalid="ignore", over="ignore"):  # a file may hold anything: outputs show what is not finite
        result = PACKED[kind].unpack(raw.reshape(len(raw), -1, size))
    record = to.reshape(tiles, records, bytes_)
    behind = 0
    for head in result.heads:
        end = behind + OUTPUTS * head.itemsize
        numbers = record[..., behind:end].view(head.dtype)
        numbers[...] = head.reshape(tiles, OUTPUTS, records).swapaxes(1, 2)
        behind = end
    block_of = record[..., behind:].reshape(tiles, records, inner, -1)
    count = result.levels.shape[-1]
    words = np.ascontiguousarray(result.levels).view("<u4").reshape(tiles, OUTPUTS, records, inner, count // 4)
    levels = block_of[..., : OUTPUTS * count].view("<u4").reshape(*block_of.shape[:3], count // 4, OUTPUTS)
    levels[...] = words.transpose(0, 2, 3, 4, 1)
    behind = OUTPUTS * count
    for scale in result.scales:
        end = behind + OUTPUTS * scale.itemsize
        index = block_of[..., behind:end].view(scale.dtype)
        index[...] = scale.reshape(tiles, OUTPUTS, records, inner).transpose(0, 2, 3, 1)
        behind = end

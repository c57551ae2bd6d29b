"""Blocks of weights as GGUF files have them, and as ``kernels/quants.h`` reads them; nothing is rounded in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from forerun.kernels.structs import QUANTS
from forerun.models.formats.base import CHUNK, Rows
from forerun.models.formats.rounding import to_blocks

OUTPUTS, INPUTS = 16, 32
Bytes = np.ndarray
"""Of dtype uint8."""


@dataclass(frozen=True)
class UnpackedBlocks:
    """What a record is made of. Levels [outputs, blocks, 16 or 32 bytes] of blocks of 32 inputs, in their order, or
    two in a byte, 16 inputs apart; of the scales and minima those of each block [outputs, blocks] and those of each
    record [outputs, records]."""

    levels: Bytes
    scales: tuple[np.ndarray, ...]
    heads: tuple[np.ndarray, ...] = ()


def half(raw: Bytes, at: int) -> np.ndarray:
    """A float16 in every block, as bits."""
    return raw[..., at : at + 2].view("<u2")[..., 0]


def _q4_0(raw: Bytes) -> UnpackedBlocks:
    return UnpackedBlocks(raw[..., 2:], (half(raw, 0),))


def _q4_1(raw: Bytes) -> UnpackedBlocks:
    return UnpackedBlocks(raw[..., 4:], (half(raw, 0), half(raw, 2)))


def _fifth_bits(raw: Bytes, at: int) -> Bytes:
    """Levels of 5 bits in bytes: 32 high bits at ``at``, the low ones behind them."""
    bits = np.unpackbits(raw[..., at : at + 4], axis=-1, bitorder="little")
    low = raw[..., at + 4 :]
    return np.concatenate([low & 15, low >> 4], axis=-1) | bits << 4


def _q5_0(raw: Bytes) -> UnpackedBlocks:
    return UnpackedBlocks(_fifth_bits(raw, 2), (half(raw, 0),))


def _q5_1(raw: Bytes) -> UnpackedBlocks:
    return UnpackedBlocks(_fifth_bits(raw, 4), (half(raw, 0), half(raw, 2)))


def _q8_0(raw: Bytes) -> UnpackedBlocks:
    return UnpackedBlocks(raw[..., 2:] ^ 128, (half(raw, 0),))


def _whole_scales(raw: Bytes) -> tuple[Bytes, Bytes]:
    """The 8 scales and 8 minima of 6 bits in 12 bytes, [outputs, blocks] each."""
    first, second, third = raw[..., :4], raw[..., 4:8], raw[..., 8:12]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    return scales.reshape(len(raw), -1), minima.reshape(len(raw), -1)


def _sides(raw: Bytes) -> Bytes:
    """128 bytes, 32 of them with the levels of two blocks, as [outputs, blocks, 32]."""
    pairs = raw.reshape(*raw.shape[:-1], 4, 1, 32)
    return np.concatenate([pairs & 15, pairs >> 4], axis=-2).reshape(len(raw), -1, 32)


def _q4_k(raw: Bytes) -> UnpackedBlocks:
    halves = raw[..., 16:].reshape(len(raw), -1, 2, 16)
    low, high = halves[..., 0, :], halves[..., 1, :]
    levels = np.stack([low & 15 | high << 4, low >> 4 | high & 240], axis=-2).reshape(len(raw), -1, 16)
    return UnpackedBlocks(levels, _whole_scales(raw[..., 4:16]), (half(raw, 0), half(raw, 2)))


def _q5_k(raw: Bytes) -> UnpackedBlocks:
    bits = np.unpackbits(raw[..., 16:48, None], axis=-1, bitorder="little").swapaxes(-1, -2)
    levels = _sides(raw[..., 48:]) | bits.reshape(len(raw), -1, 32) << 4
    return UnpackedBlocks(levels, _whole_scales(raw[..., 4:16]), (half(raw, 0), half(raw, 2)))


def _q6_k(raw: Bytes) -> UnpackedBlocks:
    low, high = raw[..., :128].reshape(*raw.shape[:-1], 2, 2, 32), raw[..., 128:192].reshape(*raw.shape[:-1], 2, 1, 32)
    fours = np.concatenate([low & 15, low >> 4], axis=-2)
    twos = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=-2)
    scales = raw[..., 192:208].view(np.int8).reshape(len(raw), -1, 2)
    levels = (fours | twos << 4).reshape(len(raw), -1, 32)
    return UnpackedBlocks(levels, (scales[..., 0], scales[..., 1]), (half(raw, 208),))


UNPACK: dict[str, Callable[[Bytes], UnpackedBlocks]] = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q4_k": _q4_k, "q5_0": _q5_0, "q5_1": _q5_1, "q5_k": _q5_k, "q6_k": _q6_k,
    "q8_0": _q8_0,
}  # fmt: skip


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
    """Weights [outputs, inputs] of a kind in ``UNPACK``, ``raw`` [outputs, bytes of a row] as in a GGUF file."""

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


def sizes(kind: str) -> tuple[int, int]:
    """Inputs and bytes of a block."""
    return GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]


def join(parts: Sequence[Blocks]) -> Blocks:
    """Weights of one kind over the same inputs, one's rows behind the other's."""
    return (
        parts[0] if len(parts) == 1 else Blocks(parts[0].kind, Stacked([part.raw for part in parts]), parts[0].inputs)
    )


def record_bytes(kind: str, outputs: int, inputs: int) -> int:
    """Of weights as the kernels read them."""
    of, size = QUANTS[kind]
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
    of, bytes_ = QUANTS[kind]
    tiles, records, inner = len(raw) // OUTPUTS, raw.shape[1] // size * block // of, of // INPUTS
    result = UNPACK[kind](raw.reshape(len(raw), -1, size))
    record = to.reshape(tiles, records, bytes_)
    behind = 0
    for head in result.heads:
        record[..., behind : behind + 32].view("<u2")[...] = head.reshape(tiles, OUTPUTS, records).swapaxes(1, 2)
        behind += 32
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

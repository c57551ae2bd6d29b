"""``q4_0``, ``q8_0`` and so on: weights in 2 to 8 bits with scales by blocks of inputs, multiplied by
``kernels/quants.cpp``. They come from GGUF files without loss, or are rounded while a checkpoint is loaded.

Activations are rounded to 8 bits by blocks of 32 (256 for q4_k and q5_k) with a scale in float32. Sums of products are
exact integers, and blocks are added in one order. So a row's bits depend neither on other rows nor on the processor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from forerun import kernels
from forerun.core.errors import ConfigError
from forerun.kernels.structs import QUANTS
from forerun.models.formats.base import CHUNK, CPU, Format, Rows, concat_rows
from forerun.models.formats.compiled import Compiled, float_bias
from forerun.models.formats.gguf_types import FLOATS, INPUTS, OUTPUTS, PACKED, Bytes, sizes
from forerun.models.formats.tiled import DTYPES, can_tile
from forerun.models.formats.weight_cache import cached
from forerun.models.kinds import BLOCKS


@dataclass(frozen=True)
class LazyBytes:
    """``count`` rows of bytes, which ``make`` computes."""

    count: int
    make: Callable[[Any], Bytes]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, rows: Any) -> Bytes:
        return self.make(rows)


Raw = np.ndarray | LazyBytes


@dataclass(frozen=True)
class Blocks:
    """Weights [outputs, inputs] of a GGUF type. ``raw`` [outputs, bytes of a row] is as in files. As ``Rows`` they are
    exact: float32, or the own dtype of a type that is not quantized."""

    kind: str
    raw: Raw
    inputs: int
    device = CPU

    @classmethod
    def of(cls, weight: Rows, kind: str) -> Blocks:
        """A weight rounded to ``kind`` row by row, padded with zeros to whole blocks. Reading rows raises ConfigError
        for types that weights are not rounded to."""

        def make(rows: slice) -> Bytes:
            result = weight[rows].float().cpu().numpy()
            return to_blocks(np.pad(result, ((0, 0), (0, -result.shape[1] % sizes(kind)[0]))), kind)

        return cls(kind, LazyBytes(weight.shape[0], make), weight.shape[1])

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.raw), self.inputs))

    @property
    def dtype(self) -> torch.dtype:
        return FLOATS.get(self.kind.upper(), torch.float32)

    @property
    def nbytes(self) -> int:
        block, size = sizes(self.kind)
        return len(self.raw) * -(-self.inputs // block) * size

    def __getitem__(self, rows: slice | torch.Tensor) -> torch.Tensor:
        return self.values(rows).to(self.dtype)

    def values(self, rows: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        """Dequantized rows, float32 [outputs, inputs]."""
        raw = self.raw[rows if isinstance(rows, slice) else rows.numpy()]
        result = dequantize(raw, GGMLQuantizationType[self.kind.upper()])
        return torch.from_numpy(np.array(result[:, : self.inputs], dtype=np.float32))

    def rows(self, order: torch.Tensor) -> Blocks:
        """Rows in another order, which may leave some out."""
        raw, indices = self.raw, order.numpy()
        return Blocks(self.kind, LazyBytes(len(indices), lambda rows: raw[indices[rows]]), self.inputs)

    @classmethod
    def join(cls, parts: Sequence[Blocks]) -> Blocks:
        """Weights of one type over the same inputs, their rows concatenated."""
        if len(parts) == 1:
            return parts[0]
        sources, sizes = [part.raw.__getitem__ for part in parts], [len(part.raw) for part in parts]
        raw = LazyBytes(sum(sizes), lambda rows: concat_rows(sources, sizes, rows, np.concatenate))
        return cls(parts[0].kind, raw, parts[0].inputs)


def record_bytes(kind: str, outputs: int, inputs: int) -> int:
    """Size of weights in the kernels' layout."""
    of, size = QUANTS[PACKED[kind].form]
    return -(-outputs // OUTPUTS) * -(-inputs // of) * size


def pack(blocks: Blocks, to: Bytes) -> None:
    """Write weights in the kernels' layout into ``record_bytes`` bytes."""
    raw, offset = blocks.raw, 0
    step = max(1, CHUNK // blocks.inputs // OUTPUTS) * OUTPUTS
    for first in range(0, len(raw), step):  # what is unpacked at a time stays small
        part = raw[first : first + step]
        size = record_bytes(blocks.kind, len(part), blocks.inputs)
        _pack(blocks.kind, part, to[offset : offset + size])
        offset += size


def _pack(kind: str, raw: Bytes, to: Bytes) -> None:
    """Records of 16 outputs by a block of inputs: the records' scales, then levels and scales of 32 inputs at a time,
    always 16 outputs side by side (``kernels/quants.h``)."""
    block, size = sizes(kind)
    if len(raw) % OUTPUTS:
        raw = np.concatenate([raw, np.zeros((-len(raw) % OUTPUTS, raw.shape[1]), np.uint8)])
    of, record_size = QUANTS[PACKED[kind].form]
    tiles, records, inner = len(raw) // OUTPUTS, raw.shape[1] // size * block // of, of // INPUTS
    with np.errstate(invalid="ignore", over="ignore"):  # a file may hold anything: outputs show what is not finite
        unpacked = PACKED[kind].unpack(raw.reshape(len(raw), -1, size))
    record = to.reshape(tiles, records, record_size)
    start = 0
    for head in unpacked.heads:
        end = start + OUTPUTS * head.itemsize
        record[..., start:end].view(head.dtype)[...] = head.reshape(tiles, OUTPUTS, records).swapaxes(1, 2)
        start = end
    block_of = record[..., start:].reshape(tiles, records, inner, -1)
    count = unpacked.levels.shape[-1]
    words = np.ascontiguousarray(unpacked.levels).view("<u4").reshape(tiles, OUTPUTS, records, inner, count // 4)
    levels = block_of[..., : OUTPUTS * count].view("<u4").reshape(*block_of.shape[:3], count // 4, OUTPUTS)
    levels[...] = words.transpose(0, 2, 3, 4, 1)
    start = OUTPUTS * count
    for scale in unpacked.scales:
        end = start + OUTPUTS * scale.itemsize
        columns = scale.reshape(tiles, OUTPUTS, records, inner).transpose(0, 2, 3, 1)
        block_of[..., start:end].view(scale.dtype)[...] = columns
        start = end


FIT_ROUNDS = 3
"""How often levels, and then their best scale and minimum, are chosen. More rounds gain nothing."""


def to_blocks(rows: np.ndarray, kind: str) -> np.ndarray:
    """Quantize float32 [rows, whole blocks of inputs] to uint8 [rows, bytes], as in GGUF files. Raises ConfigError for
    types that weights are not rounded to."""
    if kind == "q4_k":
        return _q4_k(rows)
    try:
        return quantize(rows, GGMLQuantizationType[kind.upper()])
    except NotImplementedError as error:
        raise ConfigError(f"weights are read in {kind}, but not rounded to it") from error


def _q4_k(rows: np.ndarray) -> np.ndarray:
    """Q4_K: 16 levels in blocks of 32 inputs; scales and minima of 6 bits, with common steps of eight blocks."""
    blocks = rows.reshape(len(rows), -1, 8, 32)
    scale, minimum = _fit(blocks)
    scale_steps, scales = _in_64_levels(scale)
    minimum_steps, minima = _in_64_levels(minimum)
    scale = scale_steps[..., None].astype(np.float32) * scales
    minimum = minimum_steps[..., None].astype(np.float32) * minima
    levels = _levels(blocks, scale, minimum)
    pairs = levels.reshape(*levels.shape[:2], 4, 2, 32)
    nibbles = (pairs[..., 0, :] | pairs[..., 1, :] << 4).reshape(*levels.shape[:2], 128)
    halves = np.stack([scale_steps, minimum_steps], -1).view(np.uint8)
    sixes = [
        scales[..., :4] | scales[..., 4:] >> 4 << 6,
        minima[..., :4] | minima[..., 4:] >> 4 << 6,
        scales[..., 4:] & 15 | (minima[..., 4:] & 15) << 4,
    ]
    return np.concatenate([halves, *sixes, nibbles], -1).reshape(len(rows), -1)


def _fit(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each block's scale and minimum (subtracted; neither negative): least squares over the chosen levels."""
    minimum = np.maximum(-blocks.min(-1), 0)
    scale = (np.maximum(blocks.max(-1), 0) + minimum) / 15
    mean = blocks.mean(-1)
    for _ in range(FIT_ROUNDS):
        levels = _levels(blocks, scale, minimum).astype(np.float32)
        mean_level = levels.mean(-1)
        variance = (levels * levels).mean(-1) - mean_level * mean_level
        covariance = (levels * blocks).mean(-1) - mean_level * mean
        slope = np.divide(covariance, variance, out=scale.copy(), where=variance > 1e-6)
        offset = slope * mean_level - mean
        valid = (slope > 0) & (offset >= 0)
        scale, minimum = np.where(valid, slope, scale), np.where(valid, offset, minimum)
    return scale, minimum


def _levels(blocks: np.ndarray, scale: np.ndarray, minimum: np.ndarray) -> np.ndarray:
    shifted = blocks + minimum[..., None]
    result = np.divide(shifted, scale[..., None], out=np.zeros_like(shifted), where=scale[..., None] > 0)
    levels: np.ndarray = np.clip(np.rint(result), 0, 15).astype(np.uint8)
    return levels


def _in_64_levels(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values that are not negative as steps float16 [..., 1 per 8] and levels uint8."""
    steps = (values.max(-1) / 63).astype(np.float16)
    wide = steps.astype(np.float32)[..., None]
    result = np.divide(values, wide, out=np.zeros_like(values), where=wide > 0)
    return steps, np.clip(np.rint(result), 0, 63).astype(np.uint8)


class Blocked(Compiled):
    """A layer with the weights of ``Blocks``, in the kernels' layout."""

    def __init__(self, blocks: Blocks, bias: torch.Tensor | None) -> None:
        self.outputs, self.inputs = len(blocks.raw), blocks.inputs
        if not self.outputs or not self.inputs:
            raise ValueError(f"weights {[self.outputs, self.inputs]} where some [outputs, inputs] are needed")
        self.bias = float_bias(bias, self.outputs)
        size = record_bytes(blocks.kind, self.outputs, self.inputs)
        self.tiles = cached(f"{blocks.kind} {self.outputs} {self.inputs}", size, partial(pack, blocks))
        self._use("linear_quants", DTYPES, PACKED[blocks.kind].form)
        self.kind = blocks.kind.upper()
        self.nbytes = self.tiles.nbytes


def can_run(dtype: torch.dtype = torch.float32) -> bool:
    """Whether the kernels for rows in ``dtype`` are available and give right results."""
    return can_tile(dtype)


def can(dtype: torch.dtype, device: torch.device, kind: str | None = None) -> bool:
    """Whether layers run here; ``kind``: whether those of a type do, whose kernels may have to be compiled."""
    return device.type == "cpu" and can_run(dtype) and (kind is None or kernels.load(PACKED[kind].form))


def make(weight: Rows, bias: torch.Tensor | None, *, name: str) -> Blocked:
    """A weight rounded to ``name``."""
    return Blocked(Blocks.of(weight, name), bias)


NEEDS = "kernels of ours (AVX2 or ARM64, and a C++ compiler)"
FORMATS = tuple(Format(name, partial(can, kind=name), NEEDS, partial(make, name=name)) for name in BLOCKS)

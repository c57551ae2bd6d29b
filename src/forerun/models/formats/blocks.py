"""``q4_0``, ``q8_0`` and so on: weights in 2 to 8 bits with scales by blocks of inputs, through
``kernels/quants.cpp``. They come from GGUF files without loss, or are rounded while a checkpoint is loaded.

Activations are rounded to 8 bits by blocks of 32, or of 256 for q4_k and q5_k, with a step in float32; sums of products
are exact integers, and blocks are added in one order: a row's bits depend on nothing beside it, nor on the processor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from forerun.core.errors import ConfigError
from forerun.kernels import structs
from forerun.kernels.structs import QUANTS
from forerun.models.formats.base import CHUNK, CPU, Format, Rows, concat_rows
from forerun.models.formats.compiled import Compiled, address, kernel, wide_bias
from forerun.models.formats.gguf_types import FLOATS, INPUTS, OUTPUTS, PACKED, Bytes, sizes
from forerun.models.formats.kept import made
from forerun.models.formats.tiled import DTYPES, works
from forerun.models.kinds import BLOCKS


@dataclass(frozen=True)
class LazyBytes:
    """So many rows of bytes, which ``make`` makes."""

    count: int
    make: Callable[[Any], Bytes]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, rows: Any) -> Bytes:
        return self.make(rows)


def rounding(weight: Rows, kind: str) -> LazyBytes:
    """The rows of a weight rounded to ``kind``, with zeros up to whole blocks. Raises ConfigError, when rows are asked
    for, for kinds that only files bring."""

    def make(rows: slice) -> Bytes:
        result = weight[rows].float().numpy()
        return to_blocks(np.pad(result, ((0, 0), (0, -result.shape[1] % sizes(kind)[0]))), kind)

    return LazyBytes(weight.shape[0], make)


Raw = np.ndarray | LazyBytes


@dataclass(frozen=True)
class Blocks:
    """Weights [outputs, inputs] of a type, ``raw`` [outputs, bytes of a row] as in a GGUF file. As ``Rows`` they are
    exact, in the dtype of numbers that are not quantized, else in float32."""

    kind: str
    raw: Raw
    inputs: int
    device = CPU

    @classmethod
    def of(cls, weight: torch.Tensor, kind: str) -> Blocks:
        """A weight rounded to ``kind``. Raises ConfigError for kinds that only files bring."""
        return cls(kind, rounding(weight, kind)[:], weight.shape[1])

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
        """Some rows in float32 [outputs, inputs], exact."""
        raw = self.raw[rows if isinstance(rows, slice) else rows.numpy()]
        result = dequantize(raw, GGMLQuantizationType[self.kind.upper()])
        return torch.from_numpy(np.array(result[:, : self.inputs], dtype=np.float32))

    def rows(self, order: torch.Tensor) -> Blocks:
        """Some of its rows, in any order."""
        raw, places = self.raw, order.numpy()
        return Blocks(self.kind, LazyBytes(len(places), lambda rows: raw[places[rows]]), self.inputs)


def join(parts: Sequence[Blocks]) -> Blocks:
    """Weights of one kind over the same inputs, one's rows behind the other's."""
    if len(parts) == 1:
        return parts[0]
    sides, sizes = [part.raw.__getitem__ for part in parts], [len(part.raw) for part in parts]
    raw = LazyBytes(sum(sizes), lambda rows: concat_rows(sides, sizes, rows, np.concatenate))
    return Blocks(parts[0].kind, raw, parts[0].inputs)


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


TURNS = 3
"""How often levels and then the best scale and minimum for them are chosen; more gain nothing."""


def to_blocks(rows: np.ndarray, kind: str) -> np.ndarray:
    """float32 [rows, whole blocks of inputs] -> uint8 [rows, bytes]. Raises ConfigError for kinds that only files
    bring."""
    if kind == "q4_k":
        return _q4_k(rows)
    try:
        return quantize(rows, GGMLQuantizationType[kind.upper()])
    except NotImplementedError as error:
        raise ConfigError(f"weights are read in {kind}, but not rounded to it") from error


def _q4_k(rows: np.ndarray) -> np.ndarray:
    """16 levels in blocks of 32 inputs, with scales and minima of 6 bits in eight blocks' common steps."""
    blocks = rows.reshape(len(rows), -1, 8, 32)
    scale, least = _fit(blocks)
    steps, scales = _in_64_levels(scale)
    moves, minima = _in_64_levels(least)
    scale = steps[..., None].astype(np.float32) * scales
    least = moves[..., None].astype(np.float32) * minima
    levels = _levels(blocks, scale, least)
    pairs = levels.reshape(*levels.shape[:2], 4, 2, 32)
    nibbles = (pairs[..., 0, :] | pairs[..., 1, :] << 4).reshape(*levels.shape[:2], 128)
    halves = np.stack([steps, moves], -1).view(np.uint8)
    sixes = [
        scales[..., :4] | scales[..., 4:] >> 4 << 6,
        minima[..., :4] | minima[..., 4:] >> 4 << 6,
        scales[..., 4:] & 15 | (minima[..., 4:] & 15) << 4,
    ]
    return np.concatenate([halves, *sixes, nibbles], -1).reshape(len(rows), -1)


def _fit(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A scale and what is to be subtracted, neither negative, for each block: least squares over the levels chosen."""
    least = np.maximum(-blocks.min(-1), 0)
    scale = (np.maximum(blocks.max(-1), 0) + least) / 15
    mean = blocks.mean(-1)
    for _ in range(TURNS):
        levels = _levels(blocks, scale, least).astype(np.float32)
        middle = levels.mean(-1)
        spread = (levels * levels).mean(-1) - middle * middle
        shared = (levels * blocks).mean(-1) - middle * mean
        slope = np.divide(shared, spread, out=scale.copy(), where=spread > 1e-6)
        below = slope * middle - mean
        fits = (slope > 0) & (below >= 0)
        scale, least = np.where(fits, slope, scale), np.where(fits, below, least)
    return scale, least


def _levels(blocks: np.ndarray, scale: np.ndarray, least: np.ndarray) -> np.ndarray:
    moved = blocks + least[..., None]
    result = np.divide(moved, scale[..., None], out=np.zeros_like(moved), where=scale[..., None] > 0)
    return np.clip(np.rint(result), 0, 15).astype(np.uint8)


def _in_64_levels(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Steps float16 [..., 1 per 8] and levels uint8 of values that are not negative."""
    steps = (values.max(-1) / 63).astype(np.float16)
    wide = steps.astype(np.float32)[..., None]
    result = np.divide(values, wide, out=np.zeros_like(values), where=wide > 0)
    return steps, np.clip(np.rint(result), 0, 63).astype(np.uint8)


class Blocked(Compiled):
    """A layer with the weights of ``Blocks``, repacked."""

    __slots__ = ("calls",)

    def __init__(self, blocks: Blocks, bias: torch.Tensor | None) -> None:
        self.outputs, self.inputs = len(blocks.raw), blocks.inputs
        if not self.outputs or not self.inputs:
            raise ValueError(f"weights {[self.outputs, self.inputs]} where some [outputs, inputs] are needed")
        self.bias = wide_bias(bias, self.outputs)
        self.calls = {d: kernel("linear_quants", d) for d in DTYPES}
        size = record_bytes(blocks.kind, self.outputs, self.inputs)
        self.tiles = made(f"{blocks.kind} {self.outputs} {self.inputs}", size, partial(pack, blocks))
        self.number = structs.KINDS.index(form(blocks.kind))
        self.pointers = self.tiles.data_ptr(), address(self.bias), 0, 0
        self.kind = blocks.kind.upper()
        self.nbytes = self.tiles.nbytes
        self.dtype = None

    def run(self, x: torch.Tensor, y: int, add: int | None, rows: int, stride: int) -> None:
        if x.dtype not in self.calls:
            raise TypeError(f"rows in {x.dtype} for weights in {self.kind}")
        weight, bias, _, _ = self.pointers
        self.calls[x.dtype](self.number, weight, x.data_ptr(), y, add, bias, rows, self.outputs, self.inputs, stride,
                            torch.get_num_threads())  # fmt: skip


@cache
def can_run() -> bool:
    """Whether the kernels are here and give right numbers."""

    def make(kind: str, weight: torch.Tensor) -> tuple[Blocked, torch.Tensor]:
        blocks = Blocks.of(weight, kind)
        return Blocked(blocks, None), blocks.values()

    return all(works(partial(make, kind)) for kind in ("q4_0", "q8_0"))


def can(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and dtype in DTYPES and can_run()


def make(weight: Rows, bias: torch.Tensor | None, *, name: str) -> Blocked:
    """A weight rounded to ``name``."""
    return Blocked(Blocks(name, rounding(weight, name), weight.shape[1]), bias)


FORMATS = tuple(
    Format(name, can, "kernels of ours (AVX2 or ARM64, and a C++ compiler)", partial(make, name=name))
    for name in BLOCKS
)

"""``triton``: linear layers on a GPU, whose results for a row do not depend on the number of rows.

One kernel multiplies every matrix with any number of rows, in tiles that are masked at the end. Inputs are split where
the weight's shape alone says; the parts' sums are added in order. A tile's width, warps and stages change no bit; they
are measured once per GPU. The same call computes the inputs' RMS norm, bias, gated activation and residual.

Weights are numbers, 8 bits with a scale per output (``int8_rows``), or blocks of GGUF files (``LEVELS``), in their own
bits. Activations stay in the model's dtype.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from forerun.core.folders import Record
from forerun.kernels import gpu
from forerun.models.formats.base import Linear, Rows, row_chunks, to_tensor
from forerun.models.formats.blocks import Blocks
from forerun.models.formats.gguf_types import PACKED, sizes
from forerun.models.formats.int8 import Levels, quantize_rows
from forerun.models.kinds import KINDS

log = logging.getLogger("forerun")
ROWS = 16
"""Rows of a tile, the fewest that a tensor core multiplies."""
SERIAL_ROWS = 4 * ROWS
"""From more rows on, one program adds all parts of the inputs: there are programs enough."""
GROUP = 32
"""Inputs of a block with a scale of its own."""
WARP_BYTES = 512
"""What the 32 threads of a warp read at once, 16 bytes each."""
GATES = ("", "silu", "gelu_tanh")
"""Activations between a gate and an input."""
NUMBERS, OUTPUTS, FOUR, EIGHT, SIX = range(5)
"""Weights as numbers, as levels with a scale per output, in 4 and 8 bits with a scale for 32 inputs, 6 bits for 16."""


@triton.jit
def _inputs(x, m, live, k, inverse, gain, K: tl.constexpr, NORM: tl.constexpr):
    """A tile [rows, inputs] of x, normed with NORM."""
    inside = k < K
    tile = tl.load(x + m[:, None] * K + k[None, :], mask=live[:, None] & inside[None, :], other=0.0)
    if NORM:
        weight = tl.load(gain + k, mask=inside, other=0.0)
        tile = (tile.to(tl.float32) * inverse[:, None] * weight[None, :]).to(tile.dtype)
    return tile


@triton.jit
def _inverse_norm(x, m, live, epsilon, K: tl.constexpr, BM: tl.constexpr, SUMMED: tl.constexpr):
    """1 / sqrt(mean(x^2) + epsilon) of each row. SUMMED inputs are what one warp reads at once: with more, the order of
    sums would depend on the number of warps."""
    square = tl.zeros([BM, SUMMED], tl.float32)
    for first in tl.range(0, K, SUMMED, loop_unroll_factor=4):
        k = first + tl.arange(0, SUMMED)
        wide = tl.load(x + m[:, None] * K + k[None, :], mask=live[:, None] & (k < K)[None, :], other=0.0)
        square += wide.to(tl.float32) * wide.to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(square, 1) / K + epsilon)


@triton.jit
def _add_numbers(total, tile, w, n, inside, k, K: tl.constexpr):
    """Adds the product with weights that are numbers, or levels whose scale comes later."""
    weight = tl.load(w + n[:, None] * K + k[None, :], mask=inside[:, None] & (k < K)[None, :], other=0)
    if weight.dtype == tl.int8:
        weight = weight.to(tl.float32)  # Triton's interpreter does not turn integers into bfloat16
    return tl.dot(tile, tl.trans(weight.to(tile.dtype)), total, input_precision="ieee")


@triton.jit
def _levels(w, top, pair, columns, n, inside, KIND: tl.constexpr, ZERO: tl.constexpr):
    """The levels [outputs, 32] of a pair of groups. Nibbles of both are in the same bytes. The upper two bits of six
    are apart: those of both groups, and of inputs 16 apart, in a byte."""
    lane = tl.arange(0, 32)
    at, there = (pair * columns + n)[:, None], inside[:, None]
    if KIND == 3:
        where = w + (pair * columns + at) * 32 + lane[None, :]
        low, high = tl.load(where, mask=there, other=0), tl.load(where + columns * 32, mask=there, other=0)
    else:
        both = tl.load(w + at * 32 + lane[None, :], mask=there, other=0)
        low, high = both & 15, both >> 4
    if KIND == 4:
        more = tl.load(top + at * 16 + lane[None, :] % 16, mask=there, other=0) >> (lane // 16 * 2)[None, :]
        low, high = low | (more & 3) << 4, high | (more >> 4 & 3) << 4
    return low.to(tl.float32) - ZERO, high.to(tl.float32) - ZERO


@triton.jit
def _scale(scales, steps, group, columns, n, inside, STEPS: tl.constexpr):
    """The scales, or minima, of one group of inputs; with STEPS integers times a step for this many groups."""
    value = tl.load(scales + group * columns + n, mask=inside, other=0).to(tl.float32)
    if STEPS > 0:
        value *= tl.load(steps + (group // STEPS) * columns + n, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def _add_levels(
    total, tile, levels, group, scales, minima, steps, least_steps, columns, n, inside,
    MINIMA: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Adds the product with a group of levels [outputs, 32], scaled, less its minimum; 16 STEPS: a scale per half."""
    if STEPS == 16:
        half = levels * (tl.arange(0, 32) < 16)[None, :].to(tl.float32)
        product = tl.dot(tile, tl.trans(half.to(tile.dtype)), input_precision="ieee")
        total += product * _scale(scales, steps, 2 * group, columns, n, inside, STEPS)[None, :]
        product = tl.dot(tile, tl.trans((levels - half).to(tile.dtype)), input_precision="ieee")
        total += product * _scale(scales, steps, 2 * group + 1, columns, n, inside, STEPS)[None, :]
    else:
        product = tl.dot(tile, tl.trans(levels.to(tile.dtype)), input_precision="ieee")
        total += product * _scale(scales, steps, group, columns, n, inside, STEPS)[None, :]
    if MINIMA:
        least = _scale(minima, least_steps, group, columns, n, inside, STEPS)
        total -= tl.sum(tile.to(tl.float32), 1)[:, None] * least[None, :]
    return total


@triton.jit
def _add_pair(
    total, first, second, pair, w, top, scales, minima, steps, least_steps, columns, n, inside,
    KIND: tl.constexpr, ZERO: tl.constexpr, MINIMA: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Adds the product with two groups."""
    low, high = _levels(w, top, pair, columns, n, inside, KIND, ZERO)
    group = 2 * pair
    total = _add_levels(total, first, low, group, scales, minima, steps, least_steps, columns, n, inside, MINIMA, STEPS)
    return _add_levels(
        total, second, high, group + 1, scales, minima, steps, least_steps, columns, n, inside, MINIMA, STEPS
    )


@triton.jit
def _scaled(total, scales, bias, n, inside, KIND: tl.constexpr, BIAS: tl.constexpr):
    """Sums with the scale per output, if they have one, and the bias."""
    if KIND == 1:
        total *= tl.load(scales + n, mask=inside, other=0.0)[None, :]
    if BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0)[None, :]
    return total


@triton.jit
def _activate(gate, up, GATE: tl.constexpr):
    if GATE == 1:
        gate = gate / (1.0 + tl.exp(-gate))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate / (1.0 + tl.exp(-2.0 * inner))
    return gate * up


@triton.jit(do_not_specialize=gpu.VARYING)
def _rows_linear(
    x, w, top, scales, minima, steps, least_steps, bias, gain, residual, out, partial, done, rows, N, epsilon,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PER: tl.constexpr, PARTS: tl.constexpr,
    SERIAL: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, MINIMA: tl.constexpr, STEPS: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, RESIDUAL: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """out [rows, N] = x w^T, x [rows, K]. With GATE, w has N gates and then N inputs. The inputs are split into PARTS
    of PER. With SERIAL a program computes all of them; otherwise the last one to finish a tile adds them up."""
    m = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    n = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    live, inside = m < rows, n < N
    columns = N
    if GATE != 0:
        columns = 2 * N
    inverse = tl.full([BM], 1.0, tl.float32)
    if NORM:
        inverse = _inverse_norm(x, m, live, epsilon, K, BM, SUMMED)
    total = tl.zeros([BM, BN], tl.float32)
    upper = tl.zeros([BM, BN], tl.float32)
    first_part = 0
    if not SERIAL:
        first_part = tl.program_id(2)
    for index in range(PARTS if SERIAL else 1):
        start = (first_part + index) * PER
        part = tl.zeros([BM, BN], tl.float32)
        other = tl.zeros([BM, BN], tl.float32)
        for step in range(0, PER, BK):
            if KIND < 2:
                k = start + step + tl.arange(0, BK)
                tile = _inputs(x, m, live, k, inverse, gain, K, NORM)
                part = _add_numbers(part, tile, w, n, inside, k, K)
                if GATE != 0:
                    other = _add_numbers(other, tile, w, n + N, inside, k, K)
            else:
                k = start + step + tl.arange(0, 32)
                one = _inputs(x, m, live, k, inverse, gain, K, NORM)
                two = _inputs(x, m, live, k + 32, inverse, gain, K, NORM)
                pair = (start + step) // 64
                if pair * 64 < K:
                    part = _add_pair(
                        part, one, two, pair, w, top, scales, minima, steps, least_steps, columns, n, inside,
                        KIND, ZERO, MINIMA, STEPS,
                    )  # fmt: skip
                    if GATE != 0:
                        other = _add_pair(
                            other, one, two, pair, w, top, scales, minima, steps, least_steps, columns, n + N,
                            inside, KIND, ZERO, MINIMA, STEPS,
                        )  # fmt: skip
        total += part
        upper += other
    where = m[:, None] * N + n[None, :]
    keep = live[:, None] & inside[None, :]
    last = True
    if PARTS > 1 and not SERIAL:
        tl.store(partial + first_part * rows * N + where, total, mask=keep)
        tl.debug_barrier()
        counter = done + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        last = tl.atomic_add(counter, 1, sem="acq_rel") == PARTS - 1
    if last:
        if PARTS > 1 and not SERIAL:
            tl.debug_barrier()
            total = tl.zeros([BM, BN], tl.float32)
            for index in range(PARTS):
                total += tl.load(partial + index * rows * N + where, mask=keep, other=0.0, cache_modifier=".cg")
            tl.store(counter, 0)
        total = _scaled(total, scales, bias, n, inside, KIND, BIAS)
        if GATE != 0:
            total = _activate(total, _scaled(upper, scales, bias, n + N, inside, KIND, BIAS), GATE)
        if RESIDUAL:
            total += tl.load(residual + where, mask=keep, other=0.0).to(tl.float32)
        tl.store(out + where, total.to(out.dtype.element_ty), mask=keep)


@triton.jit
def _take_rows(
    ids, w, top, scales, minima, steps, least_steps, out, columns, K,
    KIND: tl.constexpr, ZERO: tl.constexpr, MINIMA: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One group of 32 inputs of one row: its numbers."""
    n = tl.load(ids + tl.program_id(0) + tl.arange(0, 1)).to(tl.int64)
    group = tl.program_id(1)
    lane = tl.arange(0, 32)
    low, high = _levels(w, top, group // 2, columns, n, n >= 0, KIND, ZERO)
    value = tl.where(group % 2 == 0, low, high)
    part = group + lane * 0
    if STEPS == 16:
        part = 2 * group + lane // 16
    value *= _scale(scales, steps, part, columns, n, n >= 0, STEPS)[None, :]
    if MINIMA:
        value -= _scale(minima, least_steps, part, columns, n, n >= 0, STEPS)[None, :]
    k = group * 32 + lane
    where = out + tl.program_id(0).to(tl.int64) * K + k
    tl.store(where[None, :], value.to(out.dtype.element_ty), mask=(k < K)[None, :])


class Tile(NamedTuple):
    """How the kernel divides its work. No bit depends on it."""

    outputs: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Cut:
    """How a weight's inputs are split: into ``parts`` of ``per`` inputs, which are read in steps of ``step``. Bits
    depend on it, so it follows from the weight's shape alone."""

    step: int
    per: int
    parts: int

    @classmethod
    def of(cls, outputs: int, inputs: int, *, blocks: bool, gated: bool) -> Cut:
        """Splits the inputs of a weight with few outputs, so that all of a GPU is busy; gates are never split."""
        step = 2 * GROUP if blocks else min(LONGEST_STEP, max(ROWS, triton.next_power_of_2(inputs)))
        steps = -(-inputs // step)
        parts = 1 if gated else max(1, min(MOST_PARTS, round(BUSY / -(-outputs // NARROW)), steps // FEWEST_STEPS))
        per = -(-steps // parts) * step
        return cls(step, per, -(-inputs // per))


LONGEST_STEP, MOST_PARTS, FEWEST_STEPS = 128, 8, 3
BUSY, NARROW = 256, 32
"""Programs that keep a GPU busy, and the outputs of a narrow tile."""


def fits(width: int, _warps: int, stages: int, step_bytes: int, room: int, *, gated: bool) -> bool:
    """Whether ``step_bytes`` per row and output, in all stages but one, fit into ``room`` bytes of shared memory."""
    return (stages - 1) * (ROWS + (2 if gated else 1) * width) * step_bytes <= room


def first_tile(outputs: int, step_bytes: int, room: int, *, gated: bool) -> Tile:
    """A tile that is good on most GPUs and fits."""
    if gpu.interpreted():  # few programs, each of which takes milliseconds
        return Tile(min(256, max(ROWS, triton.next_power_of_2(outputs))), 4, 1)
    width, warps, stages = (4 * NARROW, 8, 3) if outputs > 1 << 15 else (2 * NARROW, 4, 4)
    if outputs <= 1 << 12:
        width = NARROW
    while not fits(width, warps, stages, step_bytes, room, gated=gated):
        stages, width = (stages - 1, width) if stages > 2 else (stages, width // 2)
    return Tile(width, warps, stages)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may use: 99 KB on most GPUs, 227 KB on an H100."""
    if device.type != "cuda":
        return LEAST_SHARED
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", LEAST_SHARED)) - RESERVED_SHARED


LEAST_SHARED, RESERVED_SHARED = 96 << 10, 4 << 10
TILES = ((16, 2, 5), (NARROW, 2, 5), (2 * NARROW, 2, 4), (2 * NARROW, 4, 4), (4 * NARROW, 8, 3))
"""Outputs, warps and stages: the fastest for shapes of small models, by a prototype on an H100."""
TIMED_ROWS = 5
"""Rows of a small verification."""


def autotune(layers: Iterable[Linear], processor: str) -> None:
    """Gives layers their shape's fastest tile on this GPU, which is measured once and kept. No bit depends on it."""
    shapes: dict[str, list[TritonLinear]] = {}
    for layer in layers:
        for part in layer.parts if isinstance(layer, TritonJoined) else (layer,):
            if isinstance(part, TritonLinear):
                key = (part.kind, part.dtype, part.weight.outputs, part.inputs, part.gate)
                shapes.setdefault(repr(key), []).append(part)
    for shape, alike in shapes.items():
        record = Record("gpu_tiles", processor, triton.__version__, shape)
        usable = alike[0].usable_tiles()
        kept = record.read()
        tile = next((each for each in usable if [*each] == kept), None)
        if tile is None:
            tile = min(usable, key=lambda each: _milliseconds(alike, each))
            record.write([*tile])
            log.info("the fastest tile for %s on %s: %s", shape, processor, tile)
        for layer in alike:
            layer.tile = tile


def _milliseconds(layers: Sequence[TritonLinear], tile: Tile) -> float:
    """How long all of them take in a CUDA graph; infinity for a tile that does not fit."""
    first = layers[0]
    x = torch.zeros(TIMED_ROWS, first.inputs, dtype=first.dtype, device=first.weight.levels.device)

    def run() -> None:
        for layer in layers:
            layer.tile = tile
            layer(x)

    try:
        run()
    except triton.runtime.errors.OutOfResources:
        return inf
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times: list[float] = []
    for _ in range(5):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return min(times)


@dataclass
class Weight:
    """A weight [outputs, inputs] on the device, as the kernel reads it: levels of 32 inputs lie together, [groups or
    pairs of them, outputs, 32], and scales [groups, outputs]. The upper bits of six are [pairs, outputs, 16]."""

    kind: int
    name: str
    outputs: int
    inputs: int
    levels: torch.Tensor
    scales: torch.Tensor | None = None
    minima: torch.Tensor | None = None
    steps: torch.Tensor | None = None
    least_steps: torch.Tensor | None = None
    top: torch.Tensor | None = None
    zero: int = 0

    def _sides(self) -> tuple[torch.Tensor | None, ...]:
        return self.top, self.scales, self.minima, self.steps, self.least_steps

    def tensors(self) -> list[torch.Tensor]:
        """The kernel's arguments; the levels stand for what is not there."""
        return [self.levels, *(self.levels if side is None else side for side in self._sides())]

    def constants(self) -> dict[str, int | bool]:
        steps = 0 if self.steps is None else 16 if self.kind == SIX else 8
        return {"KIND": self.kind, "ZERO": self.zero, "MINIMA": self.minima is not None, "STEPS": steps}

    @property
    def nbytes(self) -> int:
        return self.levels.nbytes + sum(side.nbytes for side in self._sides() if side is not None)


def numbers(weight: Rows) -> Weight:
    levels = to_tensor(weight)
    outputs, inputs = levels.shape
    return Weight(NUMBERS, "triton", outputs, inputs, levels)


def in_levels(weight: Rows | Levels, device: torch.device) -> Weight:
    """8 bits with a scale per output."""
    if isinstance(weight, Levels):
        levels, scales = weight.levels, weight.scales
    else:
        scales, levels = (torch.cat(side) for side in zip(*[quantize_rows(rows) for _, rows in row_chunks(weight)]))
    levels, scales = levels.to(device).contiguous(), scales.to(device, torch.float32)
    outputs, inputs = levels.shape
    return Weight(OUTPUTS, KINDS["int8_rows"], outputs, inputs, levels, scales)


def in_blocks(blocks: Blocks, device: torch.device) -> Weight:
    """A weight of a GGUF file, without loss."""
    chunks = [_unpack(blocks.kind, blocks.raw[first : first + CHUNK_ROWS])
              for first in range(0, len(blocks.raw), CHUNK_ROWS)]  # fmt: skip
    levels, *sides = (torch.cat([part.to(device) for part in side], 1).contiguous() for side in zip(*chunks))
    kind = {"q8_0": EIGHT, "q6_k": SIX}.get(blocks.kind, FOUR)
    zero = {"q4_0": 8, "q6_k": 32}.get(blocks.kind, 0)
    names = ("top", "scales", "steps") if kind == SIX else ("scales", "minima", "steps", "least_steps")
    outputs, inputs = blocks.shape
    return Weight(kind, blocks.kind.upper(), outputs, inputs, levels, zero=zero, **dict(zip(names, sides)))


CHUNK_ROWS = 1024
"""Rows that are unpacked at a time."""


def _unpack(kind: str, raw: np.ndarray) -> list[torch.Tensor]:
    """Levels [pairs or groups, rows, 32], then upper bits, scales, minima and the steps of both as the type has them,
    [groups, rows]. There is an even number of groups: the last may be of zeros."""
    unpacked = PACKED[kind].unpack(raw.reshape(len(raw), -1, sizes(kind)[1]))
    if kind == "q6_k":
        first, second = unpacked.levels[:, ::2], unpacked.levels[:, 1::2]
        top = first >> 4 | second >> 4 << 4
        scales = np.stack(unpacked.scales, -1).reshape(len(raw), -1)
        sides = [first & 15 | second << 4, top[..., :16] | top[..., 16:] << 2, scales]
        sides += [side.view(np.float16) for side in unpacked.heads]
        return [torch.from_numpy(np.ascontiguousarray(side.swapaxes(0, 1))) for side in sides]
    levels, odd = unpacked.levels, unpacked.levels.shape[1] % 2
    if kind == "q8_0":
        levels = (levels ^ 128).view(np.int8)
    else:
        levels = np.concatenate([levels & 15, levels >> 4], -1)
    levels = np.pad(levels, ((0, 0), (0, odd), (0, 0)))
    if kind != "q8_0":
        levels = levels[:, ::2] | levels[:, 1::2] << 4
    sides = [*unpacked.scales, *unpacked.heads]
    wide = [side if side.dtype == np.uint8 else side.view(np.float16) for side in sides]
    if kind == "q4_1":  # minima are subtracted
        wide[1] = -wide[1]
    wide = [np.pad(side, ((0, 0), (0, odd if side.shape[1] == unpacked.levels.shape[1] else 0))) for side in wide]
    return [torch.from_numpy(np.ascontiguousarray(side.swapaxes(0, 1))) for side in (levels, *wide)]


class TritonLinear:
    """A layer that the kernel computes. ``norm`` are the weights, in float32, and the epsilon of an RMS norm of its
    inputs; ``gate`` is the activation of its first half of outputs, which multiplies the second."""

    exact = True

    def __init__(self, weight: Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.weight, self.dtype = weight, dtype
        self.bias = None if bias is None else bias.float().contiguous()
        self.kind, self.nbytes = weight.name, weight.nbytes
        self.norm: tuple[torch.Tensor, float] | None = None
        self.gate = ""
        self._plan()

    def _plan(self) -> None:
        self.outputs, self.inputs = self.weight.outputs // (2 if self.gate else 1), self.weight.inputs
        blocks = self.weight.kind in (FOUR, EIGHT, SIX)
        self.cut = Cut.of(self.outputs, self.weight.inputs, blocks=blocks, gated=bool(self.gate))
        self.tile = self.usable_tiles()[0]

    def usable_tiles(self) -> list[Tile]:
        """The tile that is good on most GPUs, then others."""
        room, step_bytes = shared_memory(self.weight.levels.device), self.cut.step * self.dtype.itemsize
        first = first_tile(self.outputs, step_bytes, room, gated=bool(self.gate))
        others = [Tile(*each) for each in TILES if fits(*each, step_bytes, room, gated=bool(self.gate))]
        return [*dict.fromkeys([first, *others])]

    def absorb(self, norm: Any = None, gate: str = "") -> bool:
        """Computes a norm or an activation too, if it can: an RMS norm of whole rows, and ``GATES``."""
        simple = norm is None or (not norm.layer_norm and norm.bias is None and norm.weight.shape == (self.inputs,))
        if not simple or gate not in GATES or (norm is None and not gate):
            return False
        if norm is not None:
            self.norm = norm.weight, norm.eps
        self.gate = gate or self.gate
        self._plan()
        return True

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        shape, K, N = x.shape, self.weight.inputs, self.outputs
        if shape[-1] != K or x.dtype is not self.dtype:
            raise ValueError(f"rows {x.dtype} {[*shape]} for a layer with {K} inputs in {self.dtype}")
        x = x.contiguous().view(-1, K)
        rows, cut, tile = x.shape[0], self.cut, self.tile
        out = x.new_empty(*shape[:-1], N)
        if add is not None and (add.shape != out.shape or add.dtype is not x.dtype):
            raise ValueError(f"cannot add {add.dtype} {[*add.shape]} to {x.dtype} {[*out.shape]}")
        if not rows:
            return out
        serial = cut.parts == 1 or rows > SERIAL_ROWS
        grid = (-(-rows // ROWS), -(-N // tile.outputs), 1 if serial else cut.parts)
        partial = out if serial else torch.empty(cut.parts * rows * N, dtype=torch.float32, device=x.device)
        done = out if serial else gpu.counters(x.device, grid[0] * grid[1])
        gain, epsilon = (x, 0.0) if self.norm is None else self.norm
        _rows_linear[grid](
            x, *self.weight.tensors(), x if self.bias is None else self.bias, gain,
            x if add is None else add.contiguous(), out, partial, done, rows, N, epsilon, K=K, BM=ROWS,
            BN=tile.outputs, BK=cut.step, PER=cut.per, PARTS=cut.parts, SERIAL=serial, **self.weight.constants(),
            NORM=self.norm is not None, BIAS=self.bias is not None, GATE=GATES.index(self.gate),
            RESIDUAL=add is not None, SUMMED=WARP_BYTES // x.element_size(), num_warps=tile.warps,
            num_stages=tile.stages, enable_fp_fusion=False,  # or else ptxas rounds other forms of a sum otherwise
        )  # fmt: skip
        return out

    @property
    def numbers(self) -> torch.Tensor | None:
        """The weights [outputs, inputs], if they are numbers."""
        return self.weight.levels if self.weight.kind == NUMBERS else None

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of a weight in blocks, [ids, inputs]."""
        ids, weight = ids.reshape(-1), self.weight
        result = torch.empty(len(ids), weight.inputs, dtype=dtype, device=ids.device)
        _take_rows[(len(ids), -(-weight.inputs // GROUP))](
            ids, *weight.tensors(), result, weight.outputs, weight.inputs, **weight.constants()
        )
        return result


class TritonJoined:
    """Several layers over the same inputs whose weights have different formats."""

    exact = True

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = tuple(parts)
        self.kind = " and ".join(dict.fromkeys(part.kind for part in parts))
        self.nbytes = sum(part.nbytes for part in parts)

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.cat([part(x) for part in self.parts], -1)
        return y if add is None else y.add_(add)


def make(weight: Rows, bias: torch.Tensor | None) -> TritonLinear:
    """A layer of numbers."""
    return TritonLinear(numbers(weight), bias, weight.dtype)


def quantized(weight: Rows, bias: torch.Tensor | None, *, name: str) -> TritonLinear:
    """A layer rounded to ``name``."""
    if name == "int8_rows":
        return TritonLinear(in_levels(weight, weight.device), bias, weight.dtype)
    return TritonLinear(in_blocks(Blocks.of(weight, name), weight.device), bias, weight.dtype)


def kept(weight: Blocks | Levels, bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device) -> TritonLinear:
    """A layer of a weight in a format of a file."""
    held = in_levels(weight, device) if isinstance(weight, Levels) else in_blocks(weight, device)
    return TritonLinear(held, bias, dtype)

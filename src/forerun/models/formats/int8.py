"""``int8`` and ``int8_rows``: weights in 8 bits.

On CPU weights have one scale per output, activations are quantized on the fly; through our own kernels
(``kernels/linear.cpp``), or where they cannot be had through FBGEMM's.

``int8``: a row's result may depend on the rows beside it (FBGEMM has one activation scale per call). For drafts: any q
is legal as long as it is the one that was sampled from.

``int8_rows``: one activation scale per row. With FBGEMM a row is scaled to the integers by itself, and two constant
columns with zero weights pin the layer's own scale to 1; sums of integers are exact, so a row's bits depend on nothing
else.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from forerun.kernels import structs
from forerun.models.formats.base import Format, Linear, Rows, row_chunks, to_tensor
from forerun.models.formats.compiled import Compiled, address, check_weight, kernel, wide_bias
from forerun.models.formats.tiled import DTYPES, TILE, fill, tiles_for, works
from forerun.models.kinds import KINDS

MOST_INPUTS = 1 << 16
"""Of a layer: products of 8 bits add up in 32."""
LEAST_SIDE, LEAST_WEIGHTS = 256, 1 << 18
"""Without kernels of ours a layer is worth 8 bits if both its sides, or else its weights, are at least so many: an int8
call has some 10 us of fixed cost."""


@dataclass(frozen=True)
class Levels:
    """Weights in 8 bits: levels int8 [outputs, inputs] times scales float32 [outputs]."""

    levels: torch.Tensor
    scales: torch.Tensor
    kind = "int8"

    @property
    def shape(self) -> torch.Size:
        return self.levels.shape

    def rows(self, order: torch.Tensor) -> Levels:
        """Some of its rows, in any order."""
        return Levels(self.levels[order], self.scales[order])

    @classmethod
    def join(cls, parts: Sequence[Levels]) -> Levels:
        """Weights over the same inputs, one's rows behind the other's."""
        return cls(torch.cat([part.levels for part in parts]), torch.cat([part.scales for part in parts]))


class TiledInt8(Compiled):
    """int8 weights with a scale per output; each row of activations in 255 levels of its own; exact integer sums."""

    __slots__ = ("calls", "offsets", "scales")

    def __init__(self, weight: Rows | Levels, bias: torch.Tensor | None, kind: str) -> None:
        rows_of = weight.levels if isinstance(weight, Levels) else weight
        check_weight(rows_of)
        self.outputs, self.inputs = weight.shape
        self.bias = wide_bias(bias, self.outputs)
        if self.inputs > MOST_INPUTS:
            raise ValueError(f"{self.inputs} inputs, where products of 8 bits add up in 32 for {MOST_INPUTS} at most")
        self.scales = torch.empty(self.outputs)
        self.offsets = torch.empty(self.outputs, dtype=torch.int32)
        self.tiles = tiles_for(self.outputs, self.inputs, torch.int8)
        for first, rows in row_chunks(rows_of, TILE):
            here = slice(first, first + len(rows))
            scales, levels = (weight.scales[here], rows) if isinstance(weight, Levels) else rounded(rows)
            self.scales[here] = scales
            self.offsets[here] = levels.sum(dim=1, dtype=torch.int32) * 128
            fill(self.tiles, first, levels)
        self.number = structs.KINDS.index("int8")
        self.pointers = self.tiles.data_ptr(), address(self.bias), self.scales.data_ptr(), self.offsets.data_ptr()
        self.kind = kind
        self.dtype = None
        self.nbytes = self.outputs * self.inputs + self.scales.nbytes
        self.calls = {d: kernel("linear_int8", d) for d in DTYPES}

    def run(self, x: torch.Tensor, y: int, add: int | None, rows: int, stride: int) -> None:
        if x.dtype not in self.calls:
            raise TypeError(f"rows in {x.dtype} for weights in 8 bits")
        weight, bias, scales, offsets = self.pointers
        self.calls[x.dtype](weight, x.data_ptr(), y, add, bias, scales, offsets, rows, self.outputs, self.inputs,
                            stride, torch.get_num_threads())  # fmt: skip


def rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale for each row, and levels int8 of its numbers."""
    rows = rows.float()
    scales = rows.abs().amax(dim=1).clamp_(min=1e-30).div_(127)
    return scales, (rows / scales[:, None]).round_().to(torch.int8)


@cache
def can_run() -> bool:
    """Whether the kernels for 8 bits are here and give right numbers."""
    return works(lambda weight: (TiledInt8(weight, None, "int8"), weight))


def ours(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels of ours run 8-bit layers of a model in ``dtype`` there."""
    return device.type == "cpu" and dtype in DTYPES and can_run()


def _levels() -> int:
    """Largest activation level. Without VNNI, FBGEMM adds products in 16 bits and needs a bit of room."""
    return 127 if torch.cpu._is_vnni_supported() else 63


def _prepack(weight: torch.Tensor, bias: torch.Tensor | None) -> object:
    weight = weight.float()
    scales = weight.abs().amax(dim=1).clamp(min=1e-30).double() / 127
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized tensors are on their way out of torch; the packed layers are not
        zeros = torch.zeros(len(scales), dtype=torch.long)
        quantized = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        return torch.ops.quantized.linear_prepack(quantized, None if bias is None else bias.float())


class FbgemmInt8:
    """int8 weights; activations are scaled per row, or else per call."""

    __slots__ = ("bias", "call", "dtype", "ends", "exact", "kind", "nbytes", "packed", "reduced", "step")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, by_rows: bool) -> None:
        self.dtype, self.exact = weight.dtype, by_rows
        self.kind = KINDS["int8_rows" if by_rows else "int8"]
        self.nbytes = weight.numel() + 4 * weight.shape[0]
        levels = _levels()
        self.reduced = levels < 127
        self.call = torch.ops.quantized.linear_dynamic.default
        if by_rows:
            self.packed = _prepack(torch.cat([weight, weight.new_zeros(weight.shape[0], 2)], dim=1), None)
            self.bias = None if bias is None else bias.float()
            self.step = torch.tensor([1 / levels])
            self.ends = torch.tensor([[-levels - 1.0, float(levels)]])
        else:
            self.packed = _prepack(weight, bias)

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        x = x.float()
        y = (self._by_rows(x) if self.exact else self.call(x, self.packed, self.reduced)).to(self.dtype)
        return y if add is None else y.add_(add)

    def _by_rows(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.linalg.vector_norm(x, float("inf"), -1, True).mul_(self.step).clamp_(min=1e-30)
        levels = torch.cat([x / scale, self.ends.expand(x.shape[0], -1)], dim=1)
        y = self.call(levels, self.packed, self.reduced).mul_(scale)
        return y if self.bias is None else y.add_(self.bias)


def make(weight: Rows, bias: torch.Tensor | None, *, name: str) -> Linear:
    """The layer for ``weight`` [outputs, inputs] in 8 bits."""
    if ours(weight.device, weight.dtype):
        return TiledInt8(weight, bias, KINDS[name])
    return FbgemmInt8(to_tensor(weight), bias, by_rows=name == "int8_rows")


def pays(weight: Rows) -> bool:
    large = min(weight.shape) >= LEAST_SIDE or weight.shape.numel() >= LEAST_WEIGHTS
    return large or ours(weight.device, weight.dtype)


def can(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and (ours(device, dtype) or "fbgemm" in torch.backends.quantized.supported_engines)


FORMATS = tuple(Format(name, can, "FBGEMM, which this torch lacks", partial(make, name=name), pays) for name in KINDS)

"""``int8`` and ``int8_rows``: weights in 8 bits with a scale per output, and on CPU activations in 8 bits too.

They run on our kernels (``kernels/linear.cpp``), or where these are missing on FBGEMM. With FBGEMM, ``int8`` has one
activation scale per call, so a row's result depends on the rows beside it. That is legal for drafts: q may be anything,
if the token was sampled from it. ``int8_rows`` has a scale per row, so that a row's bits depend on that row alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from forerun.models.formats.base import Format, Linear, Rows, row_chunks, to_tensor
from forerun.models.formats.compiled import Compiled, check_weight, float_bias
from forerun.models.formats.tiled import DTYPES, TILE, fill, tiles_for, works
from forerun.models.kinds import KINDS

MOST_INPUTS = 1 << 16
"""Products of 8 bits are summed in 32."""
LEAST_SIDE, LEAST_WEIGHTS = 256, 1 << 18
"""The smallest layers for which FBGEMM pays, by both sides or by number of weights: a call costs some 10 us more."""


@dataclass(frozen=True)
class Levels:
    """Weights as levels int8 [outputs, inputs] times scales float32 [outputs]."""

    levels: torch.Tensor
    scales: torch.Tensor
    kind = "int8"

    @property
    def shape(self) -> torch.Size:
        return self.levels.shape

    def rows(self, order: torch.Tensor) -> Levels:
        """Rows in another order, which may leave some out."""
        return Levels(self.levels[order], self.scales[order])

    @classmethod
    def join(cls, parts: Sequence[Levels]) -> Levels:
        """Weights over the same inputs, their rows concatenated."""
        return cls(torch.cat([part.levels for part in parts]), torch.cat([part.scales for part in parts]))


class TiledInt8(Compiled):
    """int8 weights with a scale per output. Each row of activations has a scale of its own; sums are exact integers."""

    def __init__(self, weight: Rows | Levels, bias: torch.Tensor | None, kind: str) -> None:
        source = weight.levels if isinstance(weight, Levels) else weight
        check_weight(source)
        self.outputs, self.inputs = weight.shape
        self.bias = float_bias(bias, self.outputs)
        if self.inputs > MOST_INPUTS:
            raise ValueError(f"{self.inputs} inputs, where products of 8 bits add up in 32 for {MOST_INPUTS} at most")
        self.scales = torch.empty(self.outputs)
        self.offsets = torch.empty(self.outputs, dtype=torch.int32)
        self.tiles = tiles_for(self.outputs, self.inputs, torch.int8)
        for first, rows in row_chunks(source, TILE):
            outputs = slice(first, first + len(rows))
            scales, levels = (weight.scales[outputs], rows) if isinstance(weight, Levels) else quantize_rows(rows)
            self.scales[outputs] = scales
            self.offsets[outputs] = levels.sum(dim=1, dtype=torch.int32) * 128
            fill(self.tiles, first, levels)
        self._use("linear_int8", DTYPES, "int8", self.scales, self.offsets)
        self.kind = kind
        self.nbytes = self.outputs * self.inputs + self.scales.nbytes


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale for each row, and its numbers as int8 levels."""
    rows = rows.float()
    scales = rows.abs().amax(dim=1).clamp_(min=1e-30).div_(127)
    return scales, (rows / scales[:, None]).round_().to(torch.int8)


@cache
def can_run(dtype: torch.dtype = torch.float32) -> bool:
    """Whether our kernels for rows in ``dtype`` are available and give right results."""
    return dtype in DTYPES and works(lambda weight: (TiledInt8(weight, None, "int8"), weight), dtype)


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether our kernels run 8-bit layers on this device for activations in ``dtype``."""
    return device.type == "cpu" and can_run(dtype)


def _levels() -> int:
    """The largest activation level. Without VNNI, FBGEMM adds products in 16 bits and needs a spare bit."""
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
    """int8 weights through FBGEMM, with an activation scale per call, or ``by_rows``.

    By rows, each row is scaled to integers first, and two constant columns with zero weights pin FBGEMM's own scale
    to 1. Sums of integers are exact, so a row's bits depend on nothing else.
    """

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
        y: torch.Tensor = self.call(levels, self.packed, self.reduced).mul_(scale)
        return y if self.bias is None else y.add_(self.bias)


def make(weight: Rows, bias: torch.Tensor | None, *, name: str) -> Linear:
    """The layer for ``weight`` [outputs, inputs] in 8 bits."""
    if has_kernels(weight.device, weight.dtype):
        return TiledInt8(weight, bias, KINDS[name])
    return FbgemmInt8(to_tensor(weight), bias, by_rows=name == "int8_rows")


def pays(weight: Rows) -> bool:
    large = min(weight.shape) >= LEAST_SIDE or weight.shape.numel() >= LEAST_WEIGHTS
    return large or has_kernels(weight.device, weight.dtype)


def can(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and (
        has_kernels(device, dtype) or "fbgemm" in torch.backends.quantized.supported_engines
    )


FORMATS = tuple(Format(name, can, "FBGEMM, which this torch lacks", partial(make, name=name), pays) for name in KINDS)

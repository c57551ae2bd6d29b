"""``streamed``: weights in the order in which they are read, through ``kernels/linear.cpp``.

A row's bits depend on nothing beside it, for any number of rows. Against oneDNN's packed layers they are read 1.7
times as fast for one row in bfloat16, and float32 verification of five rows costs 1.1 instead of 1.8 decodes.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from forerun import kernels
from forerun.kernels import structs
from forerun.models.formats.base import Format
from forerun.models.formats.compiled import Compiled, address, check_weight, kernel, shelf, wide_bias

TILE, GROUP_BYTES = 32, 4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def to_tiles(weight: torch.Tensor) -> torch.Tensor:
    """weight [outputs, inputs] as the kernels read it: [tiles, groups, 32, numbers in 4 bytes], for float16 [tiles,
    groups, 2, 2, 16] with the numbers of a group before its 16 outputs; padded with zeros."""
    together = GROUP_BYTES // weight.element_size()
    outputs, inputs = weight.shape
    weight = F.pad(weight, (0, -inputs % together, 0, -outputs % TILE))
    view = weight.view(weight.shape[0] // TILE, TILE, weight.shape[1] // together, together).transpose(1, 2)
    if weight.dtype is torch.float16:
        view = view.unflatten(2, (2, TILE // 2)).transpose(3, 4)
    return shelf.room(weight.nbytes).view(weight.dtype).view(view.shape).copy_(view)


class Streamed(Compiled):
    """Weights and rows in one dtype, sums in float32."""

    __slots__ = ("bias", "call", "pointers", "tiles")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        check_weight(weight)
        self.outputs, self.inputs = weight.shape
        self.bias = wide_bias(bias, self.outputs)
        self.call = kernel("linear", weight.dtype)
        self.tiles = to_tiles(weight)
        self.pointers = self.tiles.data_ptr(), address(self.bias)
        self.kind = "streamed"
        self.nbytes = weight.nbytes
        self.dtype = weight.dtype

    def fields(self) -> structs.Linear:
        weight, bias = self.pointers
        return structs.Linear(structs.KINDS.index("own"), weight, bias or 0, 0, 0, self.outputs, self.inputs, 0)

    def run(self, x: torch.Tensor, y: int, add: int | None, rows: int, stride: int) -> None:
        if x.dtype is not self.dtype:
            raise TypeError(f"rows in {x.dtype} for weights in {self.dtype}")
        weight, bias = self.pointers
        self.call(weight, x.data_ptr(), y, add, bias, rows, self.outputs, self.inputs, stride, torch.get_num_threads())


@cache
def can_stream(dtype: torch.dtype) -> bool:
    """Whether the kernels for ``dtype`` are here and give right numbers."""
    if dtype not in DTYPES or kernels.library() is None:
        return False
    with torch.inference_mode():
        weight, x = example()
        weight, x = weight.to(dtype), x.to(dtype)
        return close(Streamed(weight, None)(x), F.linear(x.float(), weight.float()))


def example() -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and rows to try a kernel with."""
    weight = (torch.arange(70 * 64, dtype=torch.float32) * 0.37).sin_().view(70, 64)
    return weight, (torch.arange(15 * 64, dtype=torch.float32) * 0.11).cos_().view(15, 64)


def close(got: torch.Tensor, wanted: torch.Tensor, share: float = 0.02) -> bool:
    return bool((got.float() - wanted).norm() < share * wanted.norm())


FORMAT = Format(
    "streamed",
    lambda dtype, device: device.type == "cpu" and can_stream(dtype),
    "a CPU on which this torch compiles kernels (AVX2 and a C++ compiler)",
    Streamed,
    lambda weight: weight.shape[1] * weight.element_size() % GROUP_BYTES == 0,
)

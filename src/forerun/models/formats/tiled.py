"""``streamed``: weights in the order in which they are read, through ``kernels/linear.cpp``.

A row's bits depend on nothing beside it, for any number of rows. Against oneDNN's packed layers they are read 1.7
times as fast for one row in bfloat16, and float32 verification of five rows costs 1.1 instead of 1.8 decodes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F

from forerun import kernels
from forerun.kernels import structs
from forerun.models.formats.base import Format, Rows, pieces
from forerun.models.formats.compiled import Compiled, address, arena, check_weight, kernel, wide_bias
from forerun.models.formats.kept import kept

TILE, GROUP_BYTES = 32, 4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tiles_for(outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Room for a weight as the kernels read it: [tiles, groups, 32, numbers in 4 bytes], for float16 [tiles, groups, 2,
    2, 16] with the numbers of a group before its 16 outputs."""
    together = GROUP_BYTES // dtype.itemsize
    inner = (2, together, TILE // 2) if dtype is torch.float16 else (TILE, together)
    shape = torch.Size((-(-outputs // TILE), -(-inputs // together), *inner))
    return arena.allocate(shape.numel() * dtype.itemsize).view(dtype).view(shape)


def fill(tiles: torch.Tensor, first: int, rows: torch.Tensor) -> None:
    """Lay rows out from row ``first`` on, a multiple of a tile's; what they leave of the last tile becomes zeros."""
    together = GROUP_BYTES // rows.element_size()
    outputs, inputs = rows.shape
    if inputs % together or outputs % TILE:
        rows = F.pad(rows, (0, -inputs % together, 0, -outputs % TILE))
    tiles = tiles[first // TILE : first // TILE + len(rows) // TILE]
    if rows.dtype is torch.float16:
        view = rows.reshape(len(tiles), TILE, -1, together).transpose(1, 2)
        tiles.copy_(view.unflatten(2, (2, TILE // 2)).transpose(3, 4))
        return
    words = rows.contiguous().view(torch.int32)
    for tile, part in zip(tiles.view(torch.int32).squeeze(-1), words.split(TILE)):
        tile.copy_(part.T)  # torch has a quick way for a matrix alone


def to_tiles(weight: Rows) -> torch.Tensor:
    outputs, inputs = weight.shape
    tiles = tiles_for(outputs, inputs, weight.dtype)
    for first, rows in pieces(weight, TILE):
        fill(tiles, first, rows)
    return tiles


class TiledLinear(Compiled):
    """Weights and rows in one dtype, sums in float32."""

    __slots__ = ("call",)

    def __init__(self, weight: Rows, bias: torch.Tensor | None) -> None:
        check_weight(weight)
        self.outputs, self.inputs = weight.shape
        self.bias = wide_bias(bias, self.outputs)
        self.call = kernel("linear", weight.dtype)
        self.tiles = to_tiles(weight)
        self.number, self.pointers = structs.KINDS.index("own"), (self.tiles.data_ptr(), address(self.bias), 0, 0)
        self.kind = "streamed"
        self.nbytes = weight.shape.numel() * weight.dtype.itemsize
        self.dtype = weight.dtype

    def run(self, x: torch.Tensor, y: int, add: int | None, rows: int, stride: int) -> None:
        if x.dtype is not self.dtype:
            raise TypeError(f"rows in {x.dtype} for weights in {self.dtype}")
        weight, bias, _, _ = self.pointers
        self.call(weight, x.data_ptr(), y, add, bias, rows, self.outputs, self.inputs, stride, kernels.threads())

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Raises TypeError for another dtype than that of the weights."""
        if dtype is not self.dtype:
            raise TypeError(f"rows in {dtype} of weights in {self.dtype}")
        return super().rows(ids, dtype)


@cache
def can_tile(dtype: torch.dtype) -> bool:
    """Whether the kernels for ``dtype`` are here and give right numbers."""
    return dtype in DTYPES and works(
        lambda weight: (TiledLinear(weight.to(dtype), None), weight.to(dtype).float()), dtype
    )


Try = Callable[[torch.Tensor], tuple[Compiled, torch.Tensor]]
"""Makes a layer of a weight, and says which weights in float32 it has."""


@torch.inference_mode()
def works(make: Try, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the kernels are here, and a layer gives right numbers for rows in ``dtype``."""
    if kernels.library() is None:
        return False
    weight = (torch.arange(70 * 64, dtype=torch.float32) * 0.37).sin_().view(70, 64)
    x = (torch.arange(15 * 64, dtype=torch.float32) * 0.11).cos_().view(15, 64).to(dtype)
    before = kept.set(None)  # this is no model's
    layer, held = make(weight)
    kept.reset(before)
    requested = F.linear(x.float(), held)
    return bool((layer(x).float() - requested).norm() < 0.02 * requested.norm())


FORMAT = Format(
    "streamed",
    lambda dtype, device: device.type == "cpu" and can_tile(dtype),
    "a CPU on which this torch compiles kernels (AVX2 or ARM64, and a C++ compiler)",
    TiledLinear,
    lambda weight: weight.shape[1] * weight.dtype.itemsize % GROUP_BYTES == 0,
)

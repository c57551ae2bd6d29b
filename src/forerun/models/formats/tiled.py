"""``streamed``: weights tiled in the order in which ``kernels/linear.cpp`` reads them.

A row's bits do not depend on other rows, however many there are. Against oneDNN's packed layers, one row in bfloat16 is
1.7 times as fast, and float32 verification of five rows costs 1.1 decodes instead of 1.8.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F

from forerun import kernels
from forerun.models.formats.base import Format, Rows, row_chunks
from forerun.models.formats.compiled import Compiled, arena, check_weight, float_bias
from forerun.models.formats.weight_cache import current

TILE, GROUP_BYTES = 32, 4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tiles_for(outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory for a tiled weight: [tiles, groups, 32, numbers in 4 bytes], for float16 [tiles, groups, 2, 2, 16] with
    the numbers of a group before its 16 outputs."""
    in_group = GROUP_BYTES // dtype.itemsize
    inner = (2, in_group, TILE // 2) if dtype is torch.float16 else (TILE, in_group)
    shape = torch.Size((-(-outputs // TILE), -(-inputs // in_group), *inner))
    return arena.allocate(shape.numel() * dtype.itemsize).view(dtype).view(shape)


def fill(tiles: torch.Tensor, first: int, rows: torch.Tensor) -> None:
    """Write rows into ``tiles`` from row ``first``, a multiple of a tile's, on. Zeros fill the last tile."""
    in_group = GROUP_BYTES // rows.element_size()
    outputs, inputs = rows.shape
    if inputs % in_group or outputs % TILE:
        rows = F.pad(rows, (0, -inputs % in_group, 0, -outputs % TILE))
    tiles = tiles[first // TILE : first // TILE + len(rows) // TILE]
    if rows.dtype is torch.float16:
        view = rows.reshape(len(tiles), TILE, -1, in_group).transpose(1, 2)
        tiles.copy_(view.unflatten(2, (2, TILE // 2)).transpose(3, 4))
        return
    for tile, part in zip(tiles.view(torch.int32).squeeze(-1), rows.contiguous().view(torch.int32).split(TILE)):
        tile.copy_(part.T)  # torch has a quick way for a matrix alone


class TiledLinear(Compiled):
    """Weights and activations in one dtype, sums in float32."""

    def __init__(self, weight: Rows, bias: torch.Tensor | None) -> None:
        check_weight(weight)
        if weight.dtype not in DTYPES:
            raise TypeError(f"no tiles for weights in {weight.dtype}")
        self.outputs, self.inputs = weight.shape
        self.bias = float_bias(bias, self.outputs)
        self.tiles = tiles_for(self.outputs, self.inputs, weight.dtype)
        for first, rows in row_chunks(weight, TILE):
            fill(self.tiles, first, rows)
        self._use("linear", (weight.dtype,), "own")
        self.kind = "streamed"
        self.nbytes = weight.shape.numel() * weight.dtype.itemsize
        self.dtype = weight.dtype

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Raises TypeError for another dtype than that of the weights."""
        if dtype is not self.dtype:
            raise TypeError(f"rows in {dtype} of weights in {self.dtype}")
        return super().rows(ids, dtype)


@cache
def can_tile(dtype: torch.dtype) -> bool:
    """Whether the kernels for ``dtype`` are available and give right results."""
    return dtype in DTYPES and works(
        lambda weight: (TiledLinear(weight.to(dtype), None), weight.to(dtype).float()), dtype
    )


@torch.inference_mode()
def works(make: Callable[[torch.Tensor], tuple[Compiled, torch.Tensor]], dtype: torch.dtype = torch.float32) -> bool:
    """Whether the kernels are available and give right results for activations in ``dtype``. ``make`` returns a layer
    for a weight, and the float32 weights that it stands for."""
    if not kernels.load(kernels.dtype_name(dtype)):
        return False
    weight = (torch.arange(70 * 64, dtype=torch.float32) * 0.37).sin_().view(70, 64)
    x = (torch.arange(15 * 64, dtype=torch.float32) * 0.11).cos_().view(15, 64).to(dtype)
    before = current.set(None)  # not part of a model
    layer, exact = make(weight)
    current.reset(before)
    expected = F.linear(x.float(), exact)
    return bool((layer(x).float() - expected).norm() < 0.02 * expected.norm())


FORMAT = Format(
    "streamed",
    lambda dtype, device: device.type == "cpu" and can_tile(dtype),
    "a CPU on which this torch compiles kernels (AVX2 or ARM64, and a C++ compiler)",
    TiledLinear,
    lambda weight: weight.shape[1] * weight.dtype.itemsize % GROUP_BYTES == 0,
)

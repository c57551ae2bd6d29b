"""``q4_0``, ``q8_0`` and so on: weights in 2 to 8 bits with scales by blocks of inputs, through
``kernels/quants.cpp``. They come from GGUF files without loss, or are rounded while a checkpoint is loaded.

Activations are rounded to 8 bits by blocks of 32, or of 256 for q4_k and q5_k, with a step in float32; sums of products
are exact integers, and blocks are added in one order: a row's bits depend on nothing beside it, nor on the processor.
"""

from __future__ import annotations

from functools import cache, partial

import torch

from forerun.kernels import structs
from forerun.models.formats.base import Format, Rows
from forerun.models.formats.compiled import Compiled, address, kernel, wide_bias
from forerun.models.formats.gguf_blocks import Blocks, form, pack, record_bytes, rounding
from forerun.models.formats.kept import made
from forerun.models.formats.tiled import DTYPES, works
from forerun.models.kinds import BLOCKS


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

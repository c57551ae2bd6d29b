"""Linear layers whose weights lie in the order in which they are read, through ``kernels/linear.cpp``.

A row's bits depend on nothing beside it, for any number of rows. Against oneDNN's packed layers they are read 1.7
times as fast for one row in bfloat16, and float32 verification of five rows costs 1.1 instead of 1.8 decodes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F

from forerun import kernels

TILE, GROUP_BYTES = 32, 4
MOST_INT8 = 1 << 16
"""Inputs of a layer in 8 bits."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK, PAGE, LINE = 1 << 26, 1 << 21, 1 << 6
"""Bytes: of address space that layers share, of a large page, of a cache line."""


class _Shelf:
    """Room for weights, layer after layer in the order of their making, which is that of their use: in large pages
    however small the layers, and what the kernels ask for beyond the end of one begins the next."""

    def __init__(self) -> None:
        self.left = torch.empty(0, dtype=torch.uint8)

    def room(self, nbytes: int) -> torch.Tensor:
        if nbytes > len(self.left):
            with torch.inference_mode(False):  # layers are made inside and outside of it
                block = torch.empty(max(BLOCK, nbytes) + PAGE, dtype=torch.uint8)
            self.left = block[-block.data_ptr() % PAGE :]
            found = kernels.library()
            if found is not None:
                found.advise(self.left.data_ptr(), len(self.left))
        taken, self.left = self.left[:nbytes], self.left[-(-nbytes // LINE) * LINE :]
        return taken


shelf = _Shelf()


def _tiles(weight: torch.Tensor) -> torch.Tensor:
    """weight [outputs, inputs] as the kernels read it: [tiles, groups, 32, numbers in 4 bytes], for float16 [tiles,
    groups, 2, 2, 16] with the numbers of a group before its 16 outputs; padded with zeros."""
    together = GROUP_BYTES // weight.element_size()
    outputs, inputs = weight.shape
    weight = F.pad(weight, (0, -inputs % together, 0, -outputs % TILE))
    view = weight.view(weight.shape[0] // TILE, TILE, weight.shape[1] // together, together).transpose(1, 2)
    if weight.dtype is torch.float16:
        view = view.unflatten(2, (2, TILE // 2)).transpose(3, 4)
    return shelf.room(weight.nbytes).view(weight.dtype).view(view.shape).copy_(view)


def _kernel(name: str, dtype: torch.dtype) -> Callable[..., None]:
    """Raises TypeError where there is no such kernel."""
    full = f"{name}_{kernels.dtype_name(dtype)}"
    if not kernels.has(full):
        raise TypeError(f"no kernel {full} here")
    call: Callable[..., None] = getattr(kernels.library(), full)
    return call


def _prepare(
    x: torch.Tensor, add: torch.Tensor | None, inputs: int, outputs: int
) -> tuple[torch.Tensor, torch.Tensor, int | None, int]:
    """x contiguous, room for y, where ``add`` lies, and the number of rows. Raises ValueError for what the kernels
    would misread."""
    shape = x.shape
    if not shape or shape[-1] != inputs:
        raise ValueError(f"rows of {shape[-1] if shape else 0} numbers for a layer with {inputs} inputs")
    if not x.is_cpu:
        raise ValueError(f"rows on {x.device} for a layer on cpu")
    if not x.is_contiguous():
        x = x.contiguous()
    if len(shape) == 2:
        y, rows = x.new_empty(shape[0], outputs), shape[0]
    else:
        y, rows = x.new_empty(*shape[:-1], outputs), x.numel() // inputs
    if add is None:
        return x, y, None, rows
    if add.shape != y.shape or add.dtype is not y.dtype or not add.is_cpu:
        raise ValueError(f"cannot add {add.dtype} {[*add.shape]} on {add.device} to {y.dtype} {[*y.shape]}")
    return x, y, add.contiguous().data_ptr(), rows


def _bias(bias: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor | None:
    """In float32. Raises ValueError for weights and a bias that the kernels would misread."""
    if weight.dim() != 2 or not weight.numel() or not weight.is_cpu:
        raise ValueError(f"weights {[*weight.shape]} on {weight.device} where some [outputs, inputs] on cpu are needed")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"a bias {[*bias.shape]} for {weight.shape[0]} outputs")
    return None if bias is None else bias.float().contiguous()


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class Streamed:
    """Weights and rows in one dtype, sums in float32."""

    __slots__ = ("bias", "call", "dtype", "exact", "inputs", "kind", "nbytes", "outputs", "pointers", "tiles")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.bias = _bias(bias, weight)
        self.call = _kernel("linear", weight.dtype)
        self.outputs, self.inputs = weight.shape
        self.tiles = _tiles(weight)
        self.pointers = self.tiles.data_ptr(), _address(self.bias)
        self.kind = "streamed"
        self.exact = True
        self.nbytes = weight.nbytes
        self.dtype = weight.dtype

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        if x.dtype is not self.dtype:
            raise TypeError(f"rows in {x.dtype} for weights in {self.dtype}")
        x, y, added, rows = _prepare(x, add, self.inputs, self.outputs)
        weight, bias = self.pointers
        self.call(weight, x.data_ptr(), y.data_ptr(), added, bias, rows, self.outputs, self.inputs,
                  torch.get_num_threads())  # fmt: skip
        return y


class StreamedInt8:
    """int8 weights with a scale per output; each row of activations in 255 levels of its own; exact integer sums."""

    __slots__ = (
        "bias",
        "calls",
        "exact",
        "inputs",
        "kind",
        "nbytes",
        "offsets",
        "outputs",
        "pointers",
        "scales",
        "tiles",
    )

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kind: str) -> None:
        self.bias = _bias(bias, weight)
        self.outputs, self.inputs = weight.shape
        if self.inputs > MOST_INT8:
            raise ValueError(f"{self.inputs} inputs, where products of 8 bits add up in 32 for {MOST_INT8} at most")
        weight = weight.float()
        self.scales = weight.abs().amax(dim=1).clamp_(min=1e-30).div_(127)
        levels = (weight / self.scales[:, None]).round_().to(torch.int8)
        self.offsets = levels.sum(dim=1, dtype=torch.int32) * 128
        self.tiles = _tiles(levels)
        self.pointers = self.tiles.data_ptr(), _address(self.bias), self.scales.data_ptr(), self.offsets.data_ptr()
        self.kind = kind
        self.exact = True
        self.nbytes = levels.nbytes + self.scales.nbytes
        self.calls = {d: _kernel("linear_int8", d) for d in DTYPES}

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        x, y, added, rows = _prepare(x, add, self.inputs, self.outputs)
        weight, bias, scales, offsets = self.pointers
        if x.dtype not in self.calls:
            raise TypeError(f"rows in {x.dtype} for weights in 8 bits")
        self.calls[x.dtype](weight, x.data_ptr(), y.data_ptr(), added, bias, scales, offsets, rows, self.outputs,
                            self.inputs, torch.get_num_threads())  # fmt: skip
        return y


class Norm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32; weight [width], or [heads,
    width] for x [rows, heads, width]."""

    __slots__ = ("call", "dtype", "eps", "kinds", "pointer", "weight", "width")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight.float().contiguous()
        self.width = weight.shape[-1]
        self.kinds = weight.numel() // self.width
        self.eps = eps
        self.pointer = self.weight.data_ptr()
        self.dtype = weight.dtype
        self.call = _kernel("norm", weight.dtype)
        if not self.kinds or not weight.is_cpu:
            raise ValueError(f"a norm's weights {[*weight.shape]} on {weight.device}")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not self.dtype:
            raise TypeError(f"rows in {x.dtype} for a norm in {self.dtype}")
        if x.shape[-1:] != self.weight.shape[-1:] or not x.is_cpu:
            raise ValueError(f"rows {[*x.shape]} on {x.device} for a norm of {self.width} numbers on cpu")
        if not x.is_contiguous():
            x = x.contiguous()
        y = torch.empty_like(x)
        self.call(x.data_ptr(), self.pointer, y.data_ptr(), x.numel() // self.width, self.kinds, self.width, self.eps)
        return y


class SiluTimes:
    """silu(gate) * up of rows [gate, up]."""

    __slots__ = ("call", "dtype")

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.call = _kernel("silu_times", dtype)

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        if gate_up.dtype is not self.dtype:
            raise TypeError(f"rows in {gate_up.dtype} for an activation in {self.dtype}")
        if gate_up.dim() != 2 or gate_up.shape[1] % 2 or not gate_up.is_cpu:
            raise ValueError(f"gates and inputs {[*gate_up.shape]} on {gate_up.device}, not [rows, 2 width] on cpu")
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        y = gate_up.new_empty(rows, width)
        self.call(gate_up.data_ptr(), y.data_ptr(), rows, width)
        return y


@cache
def can_stream(dtype: torch.dtype) -> bool:
    """Whether the kernels for ``dtype`` (int8: with rows of every dtype) are here and give right numbers."""
    if (dtype is not torch.int8 and dtype not in DTYPES) or kernels.library() is None:
        return False
    with torch.inference_mode():
        weight = (torch.arange(70 * 64, dtype=torch.float32) * 0.37).sin_().view(70, 64)
        x = (torch.arange(15 * 64, dtype=torch.float32) * 0.11).cos_().view(15, 64)
        if dtype is torch.int8:
            got, wanted = StreamedInt8(weight, None, "int8")(x), F.linear(x, weight)
        else:
            weight, x = weight.to(dtype), x.to(dtype)
            got, wanted = Streamed(weight, None)(x), F.linear(x.float(), weight.float())
        return bool((got.float() - wanted).norm() < 0.02 * wanted.norm())

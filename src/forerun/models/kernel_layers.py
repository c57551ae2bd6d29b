"""Norms, activations, experts and soft caps on kernels of our own."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from forerun import kernels
from forerun.kernels import structs
from forerun.models.formats.compiled import Compiled, kernel


class KernelNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32; weight [width], or [heads,
    width] for x [rows, heads, width]. With ``shift`` a layer norm: x less its mean, and the shift is added."""

    __slots__ = ("call", "dtype", "eps", "kinds", "numbers", "pointer", "subtracts", "weight", "width")

    def __init__(
        self, weight: torch.Tensor, eps: float, dtype: torch.dtype | None = None, shift: torch.Tensor | None = None
    ) -> None:
        """For rows in ``dtype``, the weights' where None."""
        self.weight = weight.float().contiguous()
        self.subtracts = shift is not None
        self.numbers = self.weight if shift is None else torch.cat([self.weight.flatten(), shift.float().flatten()])
        self.width = weight.shape[-1]
        self.kinds = weight.numel() // self.width
        self.eps = eps
        self.pointer = self.numbers.data_ptr()
        self.dtype = dtype or weight.dtype
        self.call = kernel("norm", self.dtype)
        if not self.kinds or not weight.is_cpu or (shift is not None and shift.shape != weight.shape):
            raise ValueError(f"a norm's weights {[*weight.shape]} on {weight.device}")

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """``add``, of x's shape, is added to what is normed before that is rounded."""
        if x.dtype is not self.dtype:
            raise TypeError(f"rows in {x.dtype} for a norm in {self.dtype}")
        if x.shape[-1:] != self.weight.shape[-1:] or not x.is_cpu:
            raise ValueError(f"rows {[*x.shape]} on {x.device} for a norm of {self.width} numbers on cpu")
        if not x.is_contiguous():
            x = x.contiguous()
        y, rows = torch.empty_like(x), x.numel() // self.width
        if add is not None and (add.shape != x.shape or add.dtype is not x.dtype or not add.is_cpu):
            raise ValueError(f"cannot add {add.dtype} {[*add.shape]} on {add.device} to {x.dtype} {[*x.shape]}")
        add = add if add is None else add.contiguous()
        added = None if add is None else add.data_ptr()
        self.call(
            x.data_ptr(), self.pointer, y.data_ptr(), added, rows, self.kinds, self.width, self.eps, self.subtracts
        )
        return y


class KernelGate:
    """activation(gate) * up of rows [gate, up], or, not ``gated``, activation(up); the activation by its name in
    ``structs.py``, with its ``numbers`` if it has some."""

    __slots__ = ("activation", "call", "dtype", "gated", "numbers", "pointer")

    def __init__(
        self, activation: str, dtype: torch.dtype, *, gated: bool = True, numbers: torch.Tensor | None = None
    ) -> None:
        self.activation = structs.ACTIVATIONS.index(activation)
        self.dtype, self.gated = dtype, gated
        self.numbers = None if numbers is None else numbers.float().contiguous()
        self.pointer = 0 if self.numbers is None else self.numbers.data_ptr()
        self.call = kernel("gate", dtype)

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        if gate_up.dtype is not self.dtype:
            raise TypeError(f"rows in {gate_up.dtype} for an activation in {self.dtype}")
        if gate_up.dim() != 2 or (self.gated and gate_up.shape[1] % 2) or not gate_up.is_cpu:
            raise ValueError(f"gates and inputs {[*gate_up.shape]} on {gate_up.device}, not [rows, 2 width] on cpu")
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape[0], gate_up.shape[1] // (2 if self.gated else 1)
        y = gate_up.new_empty(rows, width)
        self.call(self.activation, self.pointer, self.gated, gate_up.data_ptr(), y.data_ptr(), rows, width)
        return y


class KernelMixture:
    """A router and the experts that are here, ``kernels/experts.cpp``."""

    __slots__ = ("address", "call", "dtype", "fields", "inputs", "kept")

    def __init__(
        self,
        sizes: structs.ExpertsStruct,
        router: Compiled,
        layers: Sequence[Compiled],
        dtype: torch.dtype,
        scales: torch.Tensor | None = None,
    ) -> None:
        """``layers``: gate_up and down of each expert; rows are in ``dtype``; ``scales`` float32 [experts], of their
        weights. Raises ValueError for layers of rows in another one, or for other scales."""
        if any(layer.dtype not in (None, dtype) for layer in (router, *layers)):
            raise ValueError(f"experts must all be for rows in {dtype}")
        if scales is not None and (scales.dtype is not torch.float32 or scales.shape != (sizes.size,)):
            raise ValueError(f"scales {scales.dtype} {[*scales.shape]} of {sizes.size} experts")
        scales = None if scales is None else scales.contiguous()
        numbers = array("q", [field for layer in layers for field in layer.fields()])
        at = 0 if scales is None else scales.data_ptr()
        sizes = sizes._replace(layers=numbers.buffer_info()[0] if numbers else 0, scales=at)
        self.fields = array("q", (*sizes, *router.fields()))
        self.address = self.fields.buffer_info()[0]
        self.kept = router, layers, numbers, scales
        self.inputs, self.dtype = router.inputs, dtype
        self.call = kernel("mix", dtype)

    def __call__(self, x: torch.Tensor, scored: torch.Tensor | None = None) -> tuple[torch.Tensor, int]:
        """What the experts here make of rows [rows, inputs], added up in float32; and how many of them were read. The
        router reads ``scored`` if that is given."""
        scored = x if scored is None else scored
        for rows in (x, scored):
            if rows.dtype is not self.dtype:
                raise TypeError(f"rows in {rows.dtype} for experts in {self.dtype}")
            if rows.dim() != 2 or rows.shape[1] != self.inputs or len(rows) != len(x) or not rows.is_cpu:
                raise ValueError(f"rows {[*rows.shape]} on {rows.device} for experts with {self.inputs} inputs on cpu")
        x, scored = x.contiguous(), scored.contiguous()
        total, read = torch.empty(x.shape), array("q", [0])
        self.call(
            self.address, x.data_ptr(), scored.data_ptr(), total.data_ptr(), len(x), kernels.threads(),
            read.buffer_info()[0],
        )  # fmt: skip
        return total, read[0]


class KernelEach:
    """Layers of one size, each for its own part of every row: those of a head. Raises ValueError for others."""

    __slots__ = ("address", "call", "count", "dtype", "fields", "inputs", "layers", "outputs")

    def __init__(self, layers: Sequence[Compiled], dtype: torch.dtype) -> None:
        first = layers[0]
        sizes = {(layer.inputs, layer.outputs, layer.dtype or dtype, layer.fields().next) for layer in layers}
        if sizes != {(first.inputs, first.outputs, dtype, 0)}:
            raise ValueError(f"layers of {sorted(map(str, sizes))}, not of one size for rows in {dtype}")
        self.layers, self.dtype, self.count = layers, dtype, len(layers)
        self.inputs, self.outputs = first.inputs, first.outputs
        self.fields = array("q", [field for layer in layers for field in layer.fields()])
        self.address = self.fields.buffer_info()[0]
        self.call = kernel("project_each", dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, layers, outputs] of [rows, layers, inputs]."""
        if x.dtype is not self.dtype:
            raise TypeError(f"rows in {x.dtype} for layers in {self.dtype}")
        if x.dim() != 3 or x.shape[1:] != (self.count, self.inputs) or not x.is_cpu:
            raise ValueError(f"rows {[*x.shape]} on {x.device} for {self.count} layers with {self.inputs} inputs")
        x, rows = x if x.stride(2) == 1 else x.contiguous(), x.shape[0]
        y = x.new_empty(rows, self.count, self.outputs)
        self.call(
            self.address, self.count, x.data_ptr(), *x.stride()[:2], y.data_ptr(), *y.stride()[:2], rows,
            kernels.threads(),
        )  # fmt: skip
        return y


def softcap(numbers: torch.Tensor, cap: float) -> torch.Tensor:
    """cap tanh(numbers / cap) of float32 on cpu; in place where they are contiguous."""
    if numbers.dtype is not torch.float32 or not numbers.is_cpu:
        raise ValueError(f"a soft cap on {numbers.dtype} {[*numbers.shape]} on {numbers.device}")
    numbers = numbers.contiguous()
    if numbers.numel():
        getattr(kernels.library(), "softcap")(numbers.data_ptr(), numbers.numel(), cap)  # noqa: B009
    return numbers

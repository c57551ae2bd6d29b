"""What comes between linear layers, in torch and on our own kernels: norms, activations and soft caps."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from forerun import kernels
from forerun.kernels import gpu, structs
from forerun.models.architectures.spec import CLAMPED, GELU_TANH, RELU2, SILU, XIELU
from forerun.models.formats.compiled import Compiled
from forerun.models.run import activations

Function = Callable[[torch.Tensor], torch.Tensor]
FAST: dict[str, Function] = {
    SILU: F.silu, GELU_TANH: partial(F.gelu, approximate="tanh"), RELU2: activations.relu2, "relu": torch.relu,
    "gelu": F.gelu,
}  # fmt: skip
STEADY: dict[str, Function] = {
    **FAST, SILU: activations.silu, GELU_TANH: activations.gelu_tanh, "gelu": activations.gelu,
}  # fmt: skip
"""Activations that round alike at every index."""


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32."""

    __slots__ = ("dtype", "eps", "weight")

    def __init__(self, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> None:
        width = weight.shape[-1]
        self.dtype = dtype
        self.weight = weight.float() * width**0.5
        self.eps = torch.tensor([eps * width], device=weight.device)

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """``add`` is added to the norm before that is rounded."""
        half = self.dtype is not torch.float32
        wide = x.float() if half else x
        norm = torch.linalg.vector_norm(wide, 2, -1, True)
        wide = (wide * torch.addcmul(self.eps, norm, norm).rsqrt_()).mul_(self.weight)
        if add is not None:
            wide.add_(add)
        return wide.to(self.dtype) if half else wide


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, in float32; ``bias`` may be None."""

    __slots__ = ("bias", "dtype", "eps", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, dtype: torch.dtype) -> None:
        self.weight, self.eps, self.dtype = weight.float(), eps, dtype
        self.bias = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """``add`` is added to the norm before that is rounded."""
        wide = F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self.eps)
        return (wide if add is None else wide.add_(add)).to(self.dtype)


def make_norm(
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    kernels: bool,
    layer_norm: bool = False,
    bias: torch.Tensor | None = None,
) -> Any:
    """An RMS norm or a ``layer_norm`` for rows in ``dtype``; with ``kernels`` on our own kernel, as on a GPU."""
    if gpu.serves(weight.device):
        from forerun.models.run.rows import TritonNorm

        return TritonNorm(weight, eps, dtype, layer_norm=layer_norm, bias=bias)
    if kernels:
        return KernelNorm(weight, eps, dtype, torch.zeros_like(weight) if layer_norm and bias is None else bias)
    return LayerNorm(weight, bias, eps, dtype) if layer_norm else RMSNorm(weight, eps, dtype)


def gate(rows: torch.Tensor, activation: Function, *, gated: bool) -> torch.Tensor:
    """activation(gate) * up of rows [gate, up], or activation(up) of rows that are not ``gated``."""
    if not gated:
        return activation(rows)
    first, up = rows.chunk(2, -1)
    return activation(first).mul_(up)


def clamped_gate(rows: torch.Tensor, steepness: float, limit: float) -> torch.Tensor:
    """(up + 1) * gate * sigmoid(steepness * gate) of rows [gate, up]: up is limited on both sides, gate from above."""
    first, up = rows.float().chunk(2, -1)
    first, up = first.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1.0) * (first / (1.0 + torch.exp(-steepness * first)))).to(rows.dtype)


def make_gate(
    activation: str,
    dtype: torch.dtype,
    *,
    kernels: bool,
    invariant: bool,
    gated: bool,
    params: torch.Tensor | None = None,
) -> Function:
    """The activation of that name in ``spec.py``, with its ``params`` if it has some; with ``kernels`` on our own."""
    if kernels:
        return KernelGate(activation, dtype, gated=gated, params=params)
    if activation == CLAMPED and params is not None:
        steepness, limit = params.tolist()
        return partial(clamped_gate, steepness=steepness, limit=limit)
    if activation == XIELU and params is not None:
        return partial(gate, activation=partial(activations.xielu, params=params), gated=gated)
    return partial(gate, activation=(STEADY if invariant else FAST)[activation], gated=gated)


class BlockConvolution:
    """A convolution over two rows of a block, the row and the one before it, as DFlash2 has them before and after a
    part of a layer. Its weights are ``base`` [2, 2, size] plus a projection of the row, shared by groups of channels.
    Rows are [blocks * block, size], and any number of rows of padding after them."""

    TAPS = 2

    def __init__(self, base: torch.Tensor, projection: Any, block: int) -> None:
        self.base, self.projection, self.block = base, projection, block

    def enter(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The part's input rows, and the weights for ``leave``."""
        dynamic = self.projection(x).unflatten(1, (2, self.TAPS, -1))
        return self._convolve(x, dynamic[:, 0], self.base[0]), dynamic[:, 1]

    def leave(self, x: torch.Tensor, dynamic: torch.Tensor) -> torch.Tensor:
        return self._convolve(x, dynamic, self.base[1])

    def _convolve(self, x: torch.Tensor, dynamic: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        blocks = F.pad(x, (0, 0, 0, -len(x) % self.block)).unflatten(0, (-1, self.block))
        previous = F.pad(blocks[:, :-1], (0, 0, 1, 0)).flatten(0, 1)[: len(x)]
        weights = dynamic.repeat_interleave(x.shape[1] // dynamic.shape[2], dim=2) + base
        return weights[:, 0] * x + weights[:, 1] * previous


class KernelNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32; weight [width], or [heads,
    width] for x [rows, heads, width]. With ``shift`` a layer norm: x less its mean, and the shift is added."""

    __slots__ = ("call", "count", "dtype", "eps", "numbers", "pointer", "subtracts", "weight", "width")

    def __init__(
        self, weight: torch.Tensor, eps: float, dtype: torch.dtype | None = None, shift: torch.Tensor | None = None
    ) -> None:
        """For rows in ``dtype``, the weights' where None."""
        self.weight = weight.float().contiguous()
        self.subtracts = shift is not None
        self.numbers = self.weight if shift is None else torch.cat([self.weight.flatten(), shift.float().flatten()])
        self.width = weight.shape[-1]
        self.count = weight.numel() // self.width
        self.eps = eps
        self.pointer = self.numbers.data_ptr()
        self.dtype = dtype or weight.dtype
        self.call = kernels.kernel("norm", self.dtype)
        if not self.count or not weight.is_cpu or (shift is not None and shift.shape != weight.shape):
            raise ValueError(f"a norm's weights {[*weight.shape]} on {weight.device}")

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """``add``, of x's shape, is added to the norm before that is rounded."""
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
            x.data_ptr(), self.pointer, y.data_ptr(), added, rows, self.count, self.width, self.eps, self.subtracts
        )
        return y


class KernelGate:
    """activation(gate) * up of rows [gate, up], or activation(up) of rows that are not ``gated``. The activation is
    named as in ``structs.py`` and may have ``params``."""

    __slots__ = ("activation", "call", "dtype", "gated", "params", "pointer")

    def __init__(
        self, activation: str, dtype: torch.dtype, *, gated: bool = True, params: torch.Tensor | None = None
    ) -> None:
        self.activation = structs.ACTIVATIONS.index(activation)
        self.dtype, self.gated = dtype, gated
        self.params = None if params is None else params.float().contiguous()
        self.pointer = 0 if self.params is None else self.params.data_ptr()
        self.call = kernels.kernel("apply_activation", dtype)

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


class KernelEach:
    """Linear layers of one size, one for each head. Raises ValueError if they differ."""

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
        self.call = kernels.kernel("project_each", dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs [rows, layers, outputs] of x [rows, layers, inputs]."""
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
    """cap * tanh(numbers / cap) of float32 numbers on cpu, in place if they are contiguous."""
    if numbers.dtype is not torch.float32 or not numbers.is_cpu:
        raise ValueError(f"a soft cap on {numbers.dtype} {[*numbers.shape]} on {numbers.device}")
    numbers = numbers.contiguous()
    if numbers.numel():
        getattr(kernels.library(), "softcap")(numbers.data_ptr(), numbers.numel(), cap)  # noqa: B009
    return numbers

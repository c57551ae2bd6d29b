"""Norms and gates that torch computes; those on kernels of our own are in ``kernel_layers.py``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from forerun.models import activations, kernel_layers
from forerun.models.architectures.spec import CLAMPED, GELU_TANH, RELU2, SILU, XIELU

Function = Callable[[torch.Tensor], torch.Tensor]
FAST: dict[str, Function] = {
    SILU: F.silu, GELU_TANH: partial(F.gelu, approximate="tanh"), RELU2: activations.relu2, "relu": torch.relu,
    "gelu": F.gelu,
}  # fmt: skip
STEADY: dict[str, Function] = {
    **FAST, SILU: activations.silu, GELU_TANH: activations.gelu_tanh, "gelu": activations.gelu,
}  # fmt: skip
"""Those that round alike wherever a number lies."""


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32."""

    __slots__ = ("dtype", "eps", "weight")

    def __init__(self, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> None:
        width = weight.shape[-1]
        self.dtype = dtype
        self.weight = weight.float() * width**0.5
        self.eps = torch.tensor([eps * width], device=weight.device)

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """``add`` is added to what is normed before that is rounded."""
        half = self.dtype is not torch.float32
        wide = x.float() if half else x
        norm = torch.linalg.vector_norm(wide, 2, -1, True)
        wide = (wide * torch.addcmul(self.eps, norm, norm).rsqrt_()).mul_(self.weight)
        if add is not None:
            wide.add_(add)
        return wide.to(self.dtype) if half else wide


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, computed in float32; ``bias`` None:
    none."""

    __slots__ = ("bias", "dtype", "eps", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, dtype: torch.dtype) -> None:
        self.weight, self.eps, self.dtype = weight.float(), eps, dtype
        self.bias = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """``add`` is added to what is normed before that is rounded."""
        wide = F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self.eps)
        return (wide if add is None else wide.add_(add)).to(self.dtype)


def make_norm(
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    kernels: bool,
    centred: bool = False,
    bias: torch.Tensor | None = None,
) -> RMSNorm | LayerNorm | kernel_layers.KernelNorm:
    """For rows in ``dtype``; ``centred``: a layer norm; on a kernel where ``kernels``."""
    if kernels:
        shift = torch.zeros_like(weight) if centred and bias is None else bias
        return kernel_layers.KernelNorm(weight, eps, dtype, shift)
    return LayerNorm(weight, bias, eps, dtype) if centred else RMSNorm(weight, eps, dtype)


class Gate:
    """activation(gate) * up of rows [gate, up]; not ``gated``: activation(up)."""

    __slots__ = ("activation", "gated")

    def __init__(self, activation: Function, *, gated: bool = True) -> None:
        self.activation, self.gated = activation, gated

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        if not self.gated:
            return self.activation(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return self.activation(gate).mul_(up)


class Clamped:
    """(up + 1) * gate * sigmoid(steepness * gate) of rows [gate, up], up limited on both sides, gate from above."""

    __slots__ = ("limit", "steepness")

    def __init__(self, steepness: float, limit: float) -> None:
        self.steepness, self.limit = steepness, limit

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, -1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return ((up + 1.0) * (gate / (1.0 + torch.exp(-self.steepness * gate)))).to(gate_up.dtype)


def make_gate(
    activation: str,
    dtype: torch.dtype,
    *,
    kernels: bool,
    invariant: bool,
    gated: bool,
    numbers: torch.Tensor | None = None,
) -> Gate | Clamped | kernel_layers.KernelGate:
    """Under its name in ``spec.py``, with its ``numbers`` if it has some; on a kernel where ``kernels``."""
    if kernels:
        return kernel_layers.KernelGate(activation, dtype, gated=gated, numbers=numbers)
    if activation == CLAMPED and numbers is not None:
        return Clamped(*numbers.tolist())
    if activation == XIELU and numbers is not None:
        return Gate(partial(activations.xielu, numbers=numbers), gated=gated)
    return Gate((STEADY if invariant else FAST)[activation], gated=gated)

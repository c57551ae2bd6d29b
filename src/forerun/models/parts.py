"""Norms and gates that torch computes; those on kernels of our own are in ``kernel_layers.py``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from forerun.models import activations, kernel_layers
from forerun.models.architectures.spec import GELU_TANH, SILU
from forerun.models.formats.tiled import TiledLinear, can_tile
from forerun.models.kernel_layers import Norm

Function = Callable[[torch.Tensor], torch.Tensor]
FAST: dict[str, Function] = {SILU: F.silu, GELU_TANH: partial(F.gelu, approximate="tanh")}
STEADY: dict[str, Function] = {SILU: activations.silu, GELU_TANH: activations.gelu_tanh}
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
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, computed in float32. With ``kernels``
    a row's bits depend on the row alone: they add it up and divide it."""

    __slots__ = ("bias", "dtype", "eps", "exact", "norm", "total", "weight")

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor, eps: float, dtype: torch.dtype, *, kernels: bool
    ) -> None:
        self.weight, self.bias, self.eps, self.dtype = weight.float(), bias.float(), eps, dtype
        self.exact = kernels and can_tile(torch.float32)
        if self.exact:
            self.total = TiledLinear(torch.ones(1, len(weight)), None)
            self.norm = Norm(self.weight, eps, torch.float32)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        if not self.exact:
            return F.layer_norm(wide, self.weight.shape, self.weight, self.bias, self.eps).to(self.dtype)
        mean = self.total(wide).div_(wide.shape[-1])
        return self.norm(wide - mean).add_(self.bias).to(self.dtype)


class Gate:
    """activation(gate) * up of rows [gate, up]."""

    __slots__ = ("activation",)

    def __init__(self, activation: Function) -> None:
        self.activation = activation

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return self.activation(gate).mul_(up)


def make_gate(activation: str, dtype: torch.dtype, *, kernels: bool, invariant: bool) -> Gate | kernel_layers.Gate:
    """Under its name in ``spec.py``; on a kernel where that is wished."""
    if kernels:
        return kernel_layers.Gate(activation, dtype)
    return Gate((STEADY if invariant else FAST)[activation])

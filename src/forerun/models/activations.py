"""Activations whose bits do not depend on where in a tensor an element lies.

torch's float32 silu and tanh-gelu round differently in the vector body and in the tail of a loop, so that a row's
bits change with the number of rows beside it; exp and tanh do not.
"""

from __future__ import annotations

import math

import torch
from torch import nn


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x), from exp."""
    if x.dtype != torch.float32:
        return nn.functional.silu(x)
    return x / (1.0 + torch.exp(-x))


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """The tanh form of gelu."""
    if x.dtype != torch.float32:
        return nn.functional.gelu(x, approximate="tanh")
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


class _Silu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return silu(x)


class _GeluTanh(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gelu_tanh(x)


SILU_NAMES = {"SiLU", "SiLUActivation"}
GELU_TANH_NAMES = {"GELUTanh", "PytorchGELUTanh", "NewGELUActivation", "FastGELUActivation"}


def make_row_independent(module: nn.Module) -> None:
    """Replace such activation modules in place, wherever a model keeps them."""
    for parent in module.modules():
        for name, child in parent.named_children():
            kind = type(child).__name__
            if kind in SILU_NAMES:
                setattr(parent, name, _Silu())
            elif kind in GELU_TANH_NAMES:
                setattr(parent, name, _GeluTanh())

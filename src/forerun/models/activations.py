"""Activations whose bits do not depend on where in a tensor an element lies.

torch's silu and tanh-gelu round differently in the vector body and in the tail of a loop, so that a row's bits change
with its place in a call; float32 exp and tanh do not.
"""

from __future__ import annotations

import math

import torch
from torch import nn


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x), from exp."""
    wide = x.float()
    return (wide / (1.0 + torch.exp(-wide))).to(x.dtype)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """The tanh form of gelu."""
    wide = x.float()
    inner = math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (0.5 * wide * (1.0 + torch.tanh(inner))).to(x.dtype)


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

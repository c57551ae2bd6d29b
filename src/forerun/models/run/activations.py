"""Activations whose bits do not depend on an element's index in the tensor.

torch's silu, sigmoid and gelu round differently in the vectorised body and in the tail of a loop, so that a row's bits
change with its index. Here they are made of float32 exp, tanh, erf and log1p, which ``steady`` tests at every index.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

INDICES = 67
"""Lengths and offsets that cover every lane of a vector loop, unrolled four times, and its tail."""
FUNCTIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (torch.exp, torch.tanh, torch.erf, torch.log1p)
UNSTEADY = frozenset(
    ("gelu", "silu", "sigmoid", "softplus", "log_sigmoid_forward", "mish", "elu", "hardswish", "log_sigmoid", "expm1")
)
"""torch's operations whose rounding depends on the index."""


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x), from exp."""
    wide = x.float()
    return (wide / (1.0 + torch.exp(-wide))).to(x.dtype)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x))."""
    return (1.0 / (1.0 + torch.exp(-x.float()))).to(x.dtype)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)), from exp and log1p."""
    wide = x.float()
    return torch.where(wide > 20.0, wide, torch.log1p(torch.exp(wide.clamp(max=20.0)))).to(x.dtype)


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(1.702 x)."""
    wide = x.float()
    return (wide / (1.0 + torch.exp(-1.702 * wide))).to(x.dtype)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x times the normal distribution function, from erf."""
    wide = x.float()
    return (0.5 * wide * (1.0 + torch.erf(wide * math.sqrt(0.5)))).to(x.dtype)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """The tanh form of gelu."""
    wide = x.float()
    inner = math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (0.5 * wide * (1.0 + torch.tanh(inner))).to(x.dtype)


def relu2(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)^2."""
    wide = x.float().clamp(min=0)
    return (wide * wide).to(x.dtype)


def xielu(x: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
    """xIELU (arXiv 2411.13010): positive a x^2 + b x, else c (exp(min(x, eps)) - 1 - x) + b x, of ``params`` a, c, b
    and eps."""
    wide, (rise, fall, slope, eps) = x.float(), params.to(x.device).unbind()
    below = (torch.exp(torch.minimum(wide, eps)) - 1.0 - wide) * fall
    return (torch.where(wide > 0, rise * wide * wide, below) + slope * wide).to(x.dtype)


def steady() -> bool:
    """Whether exp, tanh, erf and log1p give a number the same bits at every index of short tensors, and in a long one
    that threads share."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randn(1021, generator=generator).mul(12.0).exp2()  # from 1e-14 to 1e14
    values = torch.cat([sizes * torch.randn(1021, generator=generator).sign(), torch.linspace(-9.0, 9.0, 1021)])
    many = values.repeat(66)  # more than one thread takes
    few = values[::9]
    for function in FUNCTIONS:
        if function is torch.log1p:
            values, many, few = values.abs(), many.abs(), few.abs()  # elsewhere it is NaN
        requested, alone = function(values), function(few)
        if not torch.equal(function(many), requested.repeat(66)):
            return False
        for index in range(1, INDICES):
            moved = function(values.roll(index)).roll(-index)
            short = torch.cat([function(piece.clone()) for piece in few.split(index)])
            if not (torch.equal(moved, requested) and torch.equal(short, alone)):
                return False
    return True


class _Activation(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


REPLACED = {
    "SiLU": silu, "SiLUActivation": silu, "Sigmoid": sigmoid, "QuickGELUActivation": quick_gelu, "GELUActivation": gelu,
    "GELUTanh": gelu_tanh, "PytorchGELUTanh": gelu_tanh, "NewGELUActivation": gelu_tanh,
    "FastGELUActivation": gelu_tanh,
}  # fmt: skip
"""By the class names of torch's and transformers' modules."""


def make_row_independent(module: nn.Module) -> None:
    """Replace a model's activation modules by those above, in place."""
    for parent in module.modules():
        for name, child in parent.named_children():
            kind = type(child).__name__
            if isinstance(child, nn.GELU):
                setattr(parent, name, _Activation(gelu_tanh if child.approximate == "tanh" else gelu))
            elif kind in REPLACED:
                setattr(parent, name, _Activation(REPLACED[kind]))

"""Small pieces that trained heads are built from, in plain torch."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from forerun.models import kernel_layers
from forerun.models.linear import make_linear


class Norm(nn.Module):
    """RMS norm over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight.to(x.dtype)

    def stream(self) -> None:
        """Run on the CPU kernel from now on."""
        self.forward = kernel_layers.Norm(self.weight.detach(), self.eps).__call__  # type: ignore[method-assign]


class FeedForward(nn.Module):
    """Gated: down(silu(gate x) * up x). ``down`` starts at zero, so that a fresh layer changes nothing."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    def stream(self) -> None:
        """Run on the CPU kernels from now on."""
        weight = torch.cat([self.gate_proj.weight, self.up_proj.weight]).detach()
        gate_up, gate = make_linear(weight, None, "streamed"), kernel_layers.Gate("silu", weight.dtype)
        down = make_linear(self.down_proj.weight.detach(), None, "streamed")

        def forward(x: torch.Tensor) -> torch.Tensor:
            return down(gate(gate_up(x.flatten(0, -2)))).unflatten(0, x.shape[:-1])

        self.forward = forward  # type: ignore[method-assign]


@cache
def _frequencies(width: int, theta: float, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return theta ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding of x [..., positions, heads, width] in the halves convention; positions int64 [..., n]."""
    angle = positions[..., None].float() * _frequencies(x.shape[-1], theta, x.device)
    cos, sin = torch.cos(angle)[..., None, :].to(x.dtype), torch.sin(angle)[..., None, :].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

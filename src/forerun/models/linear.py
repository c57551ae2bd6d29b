"""Linear layers without modules: plain, packed for oneDNN, or streamed (``streamed.py``).

A layer of few rows is bound by reading its weights. Where our own kernels cannot be compiled, oneDNN reads packed
weights faster than plain ones and serves every row count from one packing. Its two operations are private to torch, so
each is tried before it is used and the plain path remains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from forerun.core.errors import ConfigError
from forerun.models.streamed import Streamed, can_stream

WEIGHTS = ("auto", "plain", "packed", "streamed")
PACK_FROM = 256
"""Fewest inputs and outputs for which packing pays: a packed call has some 10 us of fixed cost."""


class Linear(Protocol):
    """y = x W^T + b for x [rows, inputs]; ``add``, of y's shape and contiguous, is added to it."""

    kind: str
    """How the weights are stored, for ``ModelInfo.path``."""
    nbytes: int
    exact: bool
    """Whether a row's bits depend on the row alone, by the order of its sums; otherwise on the shape of the call."""

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor: ...


class Plain:
    """``F.linear``."""

    __slots__ = ("bias", "exact", "kind", "nbytes", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.kind = "plain"
        self.exact = False
        self.nbytes = weight.nbytes

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y if add is None else y.add_(add)


class Packed:
    """oneDNN's own weight layout; the plain copy is not kept."""

    __slots__ = ("bias", "call", "exact", "kind", "nbytes", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = pack(weight)
        self.bias = bias
        self.kind = "packed"
        self.exact = False
        self.nbytes = weight.nbytes
        self.call = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.shape[0]
        step = 1 << max(0, (rows - 1).bit_length() - 4)
        spare = -rows % step if x.dim() == 2 else 0
        if spare:  # oneDNN keeps some 0.5 MB for every row count it has met
            x = F.pad(x, (0, 0, 0, spare))
        y = self.call(x, self.weight, self.bias, "none", [], "")
        y = y[:rows] if spare else y
        return y if add is None else y.add_(add)


def pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch on this processor runs packed layers of ``dtype`` natively and correctly."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    try:
        ops = torch.ops.mkldnn
        if dtype is torch.bfloat16 and not ops._is_mkldnn_bf16_supported():
            return False
        with torch.inference_mode():
            weight = (torch.arange(64 * 32, dtype=torch.float32).view(64, 32) % 7).to(dtype)
            x = (torch.arange(3 * 32, dtype=torch.float32).view(3, 32) % 5).to(dtype)
            got = Packed(weight, None)(x)
            return torch.allclose(got.float(), F.linear(x.float(), weight.float()), rtol=1e-2)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


def choose(dtype: torch.dtype, device: torch.device, weights: str) -> str:
    """``streamed``, ``packed`` or ``plain`` under the option ``weights``; ``auto`` takes the first that can be had
    here, and an explicit wish that cannot be met raises ConfigError."""
    if weights not in WEIGHTS:
        raise ConfigError(f"weights must be one of {', '.join(WEIGHTS)}, not {weights!r}")
    cpu = device.type == "cpu"
    able = {"streamed": lambda: cpu and can_stream(dtype), "packed": lambda: cpu and can_pack(dtype)}
    if weights == "auto":
        return next((kind for kind, can in able.items() if can()), "plain")
    if weights in able and not able[weights]():
        name = str(dtype).removeprefix("torch.")
        means = "compiles kernels (AVX-512 and a C++ compiler)" if weights == "streamed" else "packs"
        raise ConfigError(f"weights={weights!r} needs a CPU on which this torch {means} for {name}; use weights='auto'")
    return weights


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None, how: str) -> Linear:
    """The layer for ``weight`` [outputs, inputs], stored as ``choose`` says; what does not pay stays plain."""
    if how == "streamed" and weight.shape[1] * weight.element_size() % 4 == 0:
        return Streamed(weight, bias)
    if how == "packed" and min(weight.shape) >= PACK_FROM:
        return Packed(weight, bias)
    return Plain(weight.contiguous(), bias)


@torch.no_grad()
def replace_linears(module: nn.Module, parts: Sequence[nn.Linear], how: str) -> list[Linear]:
    """Run streamed or packed layers in place of ``parts`` of a module, and give up the weights that nothing else has a
    share in. Returns the new layers; ``plain`` replaces none."""
    shares = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    made = []
    for part in parts if how != "plain" else ():
        layer = make_linear(part.weight.detach(), None if part.bias is None else part.bias.detach(), how)
        if isinstance(layer, Plain):
            continue
        part.forward = layer.__call__  # type: ignore[assignment, method-assign]
        if shares[id(part.weight)] == 1:
            part.weight.data = part.weight.data.new_empty(0)
        made.append(layer)
    return made


def describe(layers: Sequence[Linear], dtype: torch.dtype) -> str:
    """Such as ``packed bfloat16``: how the weights are stored, the larger share first; small shares are left out."""
    sizes: dict[str, int] = {}
    for layer in layers:
        sizes[layer.kind] = sizes.get(layer.kind, 0) + layer.nbytes
    kinds = sorted((kind for kind in sizes if 10 * sizes[kind] >= sum(sizes.values())), key=lambda kind: -sizes[kind])
    name = str(dtype).removeprefix("torch.")
    return " and ".join(f"{kind} {name}" if kind in WEIGHTS else kind for kind in kinds)

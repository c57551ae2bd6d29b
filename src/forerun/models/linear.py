"""Which form a linear layer's weights have; the forms are in ``formats``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from forerun.core.errors import ConfigError
from forerun.models.formats import FLOATS
from forerun.models.formats.base import Linear, Rows
from forerun.models.formats.compiled import Joined
from forerun.models.formats.plain import Plain

WEIGHTS = ("auto", *FLOATS)


def choose(dtype: torch.dtype, device: torch.device, weights: str) -> str:
    """``streamed``, ``packed`` or ``plain`` under the option ``weights``; ``auto`` takes the first that can be had
    here, and an explicit wish that cannot be met raises ConfigError."""
    if weights not in WEIGHTS:
        raise ConfigError(f"weights must be one of {', '.join(WEIGHTS)}, not {weights!r}")
    if weights == "auto":
        return next(name for name, form in FLOATS.items() if form.can(dtype, device))
    if not FLOATS[weights].can(dtype, device):
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(f"weights={weights!r} needs {FLOATS[weights].needs} for {name}; use weights='auto'")
    return weights


def make_linear(weight: Rows, bias: torch.Tensor | None, how: str) -> Linear:
    """The layer for ``weight`` [outputs, inputs], stored as ``choose`` says; what does not pay stays plain."""
    form = FLOATS[how] if FLOATS[how].pays(weight) else FLOATS["plain"]
    return form.make(weight, bias)


@torch.no_grad()
def replace_linears(module: nn.Module, parts: Sequence[nn.Linear], how: str) -> list[Linear]:
    """Run streamed or packed layers in place of ``parts`` of a module, and give up the weights that nothing else has a
    share in. Returns the new layers; ``plain`` replaces none."""
    fractions = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    made = []
    for part in parts if how != "plain" else ():
        layer = make_linear(part.weight.detach(), None if part.bias is None else part.bias.detach(), how)
        if isinstance(layer, Plain):
            continue
        part.forward = layer.__call__  # type: ignore[assignment, method-assign]
        if fractions[id(part.weight)] == 1:
            part.weight.data = part.weight.data.new_empty(0)
        made.append(layer)
    return made


def describe(layers: Sequence[Linear], dtype: torch.dtype) -> str:
    """Such as ``packed bfloat16``: how the weights are stored, the larger share first; small shares are left out."""
    sizes: dict[str, int] = {}
    for layer in layers:
        for part in layer.parts if isinstance(layer, Joined) else (layer,):
            sizes[part.kind] = sizes.get(part.kind, 0) + part.nbytes
    kinds = sorted((kind for kind in sizes if 10 * sizes[kind] >= sum(sizes.values())), key=lambda kind: -sizes[kind])
    name = str(dtype).removeprefix("torch.")
    return " and ".join(f"{kind} {name}" if kind in FLOATS else kind for kind in kinds)

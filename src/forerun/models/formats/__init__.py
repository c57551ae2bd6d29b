"""The registry of forms of weights, by their names as options, and which form a linear layer's weights get.

Forms that are alike share a file: ``tiled.py``, ``plain.py``, ``int8.py``, ``blocks.py``. ``base.Format`` is what one
is. ``gguf_types.PACKED`` says which one a type of GGUF files becomes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.core.errors import ConfigError
from forerun.models import kinds
from forerun.models.formats import blocks, int8, plain, tiled
from forerun.models.formats.base import Format, Linear, Rows
from forerun.models.formats.compiled import Joined

NUMBERS: dict[str, Format] = {found.name: found for found in (tiled.FORMAT, plain.PACKED, plain.PLAIN)}
"""Of the checkpoint's own numbers; the best first."""
ON_CPU: dict[str, Format] = {found.name: found for found in (*int8.FORMATS, *blocks.FORMATS)}
ON_GPU: dict[str, Format] = {found.name: found for found in plain.ON_GPU}
"""What weights can be quantized to."""
WEIGHTS = ("auto", *NUMBERS)


def choose(dtype: torch.dtype, device: torch.device, weights: str) -> str:
    """``streamed``, ``packed`` or ``plain`` under the option ``weights``; ``auto`` takes the first that can be had
    here, and an explicit wish that cannot be met raises ConfigError."""
    if weights not in WEIGHTS:
        raise ConfigError(f"weights must be one of {', '.join(WEIGHTS)}, not {weights!r}")
    if weights == "auto":
        return next(name for name, form in NUMBERS.items() if form.can(dtype, device))
    if not NUMBERS[weights].can(dtype, device):
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(f"weights={weights!r} needs {NUMBERS[weights].needs} for {name}; use weights='auto'")
    return weights


def make_linear(weight: Rows, bias: torch.Tensor | None, how: str) -> Linear:
    """The layer for ``weight`` [outputs, inputs], stored as ``choose`` says; what does not pay stays plain."""
    form = NUMBERS[how] if NUMBERS[how].pays(weight) else NUMBERS["plain"]
    return form.make(weight, bias)


def check(kind: str | None, device: torch.device, dtype: torch.dtype, *, invariant: bool) -> Format | None:
    """The form called ``kind``; None: weights are not quantized. Raises ConfigError if it cannot be honoured here."""
    if kind is None:
        return None
    forms = ON_CPU if device.type == "cpu" else ON_GPU
    if kind not in forms:
        choices = ", ".join([*forms, *kinds.FLOATS])
        raise ConfigError(
            f"quantization {kind!r} is not one of {choices} (or {kinds.UNQUANTIZED}), which {device.type} has"
        )
    if not forms[kind].can(dtype, device):
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(f"quantization {kind!r} in {name} needs {forms[kind].needs}; leave it out")
    if kind == "int8" and invariant and device.type == "cpu":
        raise ConfigError(
            "quantization 'int8' makes a row depend on the rows beside it, so it cannot be invariant; "
            "use 'int8_rows' or invariant=False"
        )
    return forms[kind]


def describe(layers: Sequence[Linear], dtype: torch.dtype) -> str:
    """Such as ``packed bfloat16``: how the weights are stored, the larger share first; small shares are left out."""
    sizes: dict[str, int] = {}
    for layer in layers:
        for part in layer.parts if isinstance(layer, Joined) else (layer,):
            sizes[part.kind] = sizes.get(part.kind, 0) + part.nbytes
    named = sorted((kind for kind in sizes if 10 * sizes[kind] >= sum(sizes.values())), key=lambda kind: -sizes[kind])
    name = str(dtype).removeprefix("torch.")
    return " and ".join(f"{kind} {name}" if kind in NUMBERS else kind for kind in named)


def error(requested: torch.Tensor, got: torch.Tensor) -> float:
    """Relative error of logits, |got - wanted| / |wanted|, each row's mean taken out: softmax does not see it."""
    requested = requested - requested.mean(dim=-1, keepdim=True)
    got = got - got.mean(dim=-1, keepdim=True)
    return float((got - requested).norm() / requested.norm())

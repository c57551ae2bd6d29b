"""Quantized weights: what can be had where, and what it costs."""

from __future__ import annotations

import torch

from forerun.core.errors import ConfigError
from forerun.models.formats import ON_CPU, ON_GPU
from forerun.models.formats.base import Format
from forerun.models.kinds import FLOATS, UNQUANTIZED


def check(kind: str, device: torch.device, dtype: torch.dtype, *, invariant: bool) -> Format:
    """The form called ``kind``. Raises ConfigError if it cannot be honoured here."""
    forms = ON_CPU if device.type == "cpu" else ON_GPU
    if kind not in forms:
        choices = ", ".join([*forms, *FLOATS])
        raise ConfigError(f"quantization {kind!r} is not one of {choices} (or {UNQUANTIZED}), which {device.type} has")
    if not forms[kind].can(dtype, device):
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(f"quantization {kind!r} in {name} needs {forms[kind].needs}; leave it out")
    if kind == "int8" and invariant and device.type == "cpu":
        raise ConfigError(
            "quantization 'int8' makes a row depend on the rows beside it, so it cannot be invariant; "
            "use 'int8_rows' or invariant=False"
        )
    return forms[kind]


def error(requested: torch.Tensor, got: torch.Tensor) -> float:
    """Relative error of logits, |got - wanted| / |wanted|, each row's mean taken out: softmax does not see it."""
    requested = requested - requested.mean(dim=-1, keepdim=True)
    got = got - got.mean(dim=-1, keepdim=True)
    return float((got - requested).norm() / requested.norm())

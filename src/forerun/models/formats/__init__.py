"""The registry of weight formats, by their names as options, and the choice of one for a linear layer.

``base.Format`` describes a format; they are in ``tiled.py``, ``plain.py``, ``int8.py``, ``blocks.py`` and, for GPUs,
``triton.py``. ``gguf_types.PACKED`` maps a type of GGUF files to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from forerun.core.errors import ConfigError
from forerun.kernels import gpu
from forerun.models import kinds
from forerun.models.formats import blocks, int8, plain, tiled
from forerun.models.formats.base import Format, Linear, Rows
from forerun.models.formats.compiled import Joined


def _in_triton(weight: Rows, bias: torch.Tensor | None, *, name: str) -> Linear:
    from forerun.models.formats import triton  # which not every system has

    return triton.make(weight, bias) if name == "triton" else triton.quantized(weight, bias, name=name)


_TRITON = tuple(
    Format(
        name, lambda dtype, device: gpu.serves(device), "an NVIDIA GPU of compute capability 8.0, and Triton",
        partial(_in_triton, name=name),
    )
    for name in ("triton", *kinds.TRITON_KINDS)
)  # fmt: skip
NUMBERS: dict[str, Format] = {each.name: each for each in (_TRITON[0], tiled.FORMAT, plain.PACKED, plain.PLAIN)}
"""Formats of unquantized weights, the best first."""
ON_CPU: dict[str, Format] = {each.name: each for each in (*int8.FORMATS, *blocks.FORMATS)}
ON_GPU: dict[str, Format] = {each.name: each for each in (*plain.ON_GPU, *_TRITON[1:])}
"""Formats that weights can be quantized to."""
WEIGHTS = ("auto", *NUMBERS)


def choose(dtype: torch.dtype, device: torch.device, weights: str) -> str:
    """The format of unquantized weights under the option ``weights``. ``auto`` is the best that runs here. Raises
    ConfigError for one that does not."""
    if weights not in WEIGHTS:
        raise ConfigError(f"weights must be one of {', '.join(WEIGHTS)}, not {weights!r}")
    if weights == "auto":
        return next(name for name, each in NUMBERS.items() if each.can(dtype, device))
    if not NUMBERS[weights].can(dtype, device):
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(f"weights={weights!r} needs {NUMBERS[weights].needs} for {name}; use weights='auto'")
    return weights


def make_linear(weight: Rows, bias: torch.Tensor | None, how: str) -> Linear:
    """The layer for ``weight`` [outputs, inputs] in the format ``how``, or plain where that does not pay."""
    form = NUMBERS[how] if NUMBERS[how].pays(weight) else NUMBERS["plain"]
    return form.make(weight, bias)


def check(kind: str | None, device: torch.device, dtype: torch.dtype, *, invariant: bool) -> Format | None:
    """The format called ``kind``; None: weights are not quantized. Raises ConfigError if it does not run here."""
    if kind is None:
        return None
    formats = ON_CPU if device.type == "cpu" and not gpu.interpreted() else ON_GPU
    if kind not in formats:
        choices = ", ".join([*formats, *kinds.FLOATS])
        raise ConfigError(
            f"quantization {kind!r} is not one of {choices} (or {kinds.UNQUANTIZED}), which {device.type} has"
        )
    if not formats[kind].can(dtype, device):
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(f"quantization {kind!r} in {name} needs {formats[kind].needs}: remove it")
    if kind == "int8" and invariant and device.type == "cpu":
        raise ConfigError(
            "quantization 'int8' makes a row depend on the rows beside it, so it cannot be invariant; "
            "use 'int8_rows' or invariant=False"
        )
    return formats[kind]


def describe(layers: Sequence[Linear], dtype: torch.dtype) -> str:
    """How weights are stored, such as ``packed bfloat16``: formats of at least a tenth of the bytes, largest first."""
    sizes: dict[str, int] = {}
    for layer in layers:
        for part in layer.parts if isinstance(layer, Joined) else (layer,):
            sizes[part.kind] = sizes.get(part.kind, 0) + part.nbytes
    named = sorted((kind for kind in sizes if 10 * sizes[kind] >= sum(sizes.values())), key=lambda kind: -sizes[kind])
    name = str(dtype).removeprefix("torch.")
    return " and ".join(f"{kind} {name}" if kind in NUMBERS else kind for kind in named)


def error(expected: torch.Tensor, got: torch.Tensor) -> float:
    """Relative error of logits, |got - expected| / |expected|, without each row's mean, which softmax ignores."""
    expected = expected - expected.mean(dim=-1, keepdim=True)
    got = got - got.mean(dim=-1, keepdim=True)
    return float((got - expected).norm() / expected.norm())

"""On GPU, through torchao: ``int8`` and ``fp8`` weights, activations as they are."""

from __future__ import annotations

from functools import partial

import torch

from forerun.core.errors import ConfigError
from forerun.models.formats.base import Format, Linear, Rows, whole
from forerun.models.formats.int8 import pays
from forerun.models.formats.plain import Plain
from forerun.models.kinds import GPU_KINDS


def make(weight: Rows, bias: torch.Tensor | None, *, name: str) -> Linear:
    """Raises ConfigError where torchao is not installed."""
    try:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise ConfigError(f"quantization {name!r} on GPU needs torchao: pip install 'forerun[gpu]'") from error
    module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    module.weight = torch.nn.Parameter(whole(weight), requires_grad=False)
    quantize_(module, Int8WeightOnlyConfig() if name == "int8" else Float8WeightOnlyConfig())
    layer = Plain(module.weight, bias)
    layer.kind = f"{name} weights"
    layer.nbytes = weight.shape.numel() + 4 * weight.shape[0]
    return layer


FORMATS = tuple(
    Format(name, lambda dtype, device: device.type != "cpu", "a GPU", partial(make, name=name), pays)
    for name in GPU_KINDS
)

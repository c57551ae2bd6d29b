"""Layers that torch computes: ``plain``, ``packed``, and on GPU ``int8`` and ``fp8``.

``packed`` is oneDNN's own weight layout, which is faster for few rows. Its two operations are private to torch, so they
are tried before they are used. ``int8`` and ``fp8`` quantize weights only, by torchao.
"""

from __future__ import annotations

from functools import cache, partial

import torch
import torch.nn.functional as F

from forerun.core.errors import ConfigError
from forerun.models.formats.base import Format, Linear, Rows, to_tensor
from forerun.models.formats.int8 import pays
from forerun.models.kinds import TORCHAO_KINDS

PACK_FROM = 256
"""Fewest inputs and outputs for which packing pays: a packed call costs some 10 us more."""


class Plain:
    """``F.linear``."""

    kind, exact = "plain", False

    def __init__(self, weight: Rows, bias: torch.Tensor | None) -> None:
        self.numbers = to_tensor(weight)
        self.bias = bias
        self.nbytes = self.numbers.nbytes

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        y = F.linear(x, self.numbers, self.bias)
        return y if add is None else y.add_(add)


PLAIN = Format("plain", lambda dtype, device: True, "nothing", lambda weight, bias: Plain(weight, bias))


class Packed:
    """oneDNN's own weight layout; the plain copy is not kept."""

    kind, exact = "packed", False

    def __init__(self, weight: Rows, bias: torch.Tensor | None) -> None:
        self.weight = pack(to_tensor(weight))
        self.bias = bias
        self.nbytes = weight.shape.numel() * weight.dtype.itemsize
        self.call = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.shape[0]
        step = 1 << max(0, (rows - 1).bit_length() - 4)
        spare = -rows % step if x.dim() == 2 else 0
        if spare:  # oneDNN keeps some 0.5 MB for every row count
            x = F.pad(x, (0, 0, 0, spare))
        y: torch.Tensor = self.call(x, self.weight, self.bias, "none", [], "")
        y = y[:rows] if spare else y
        return y if add is None else y.add_(add)


def pack(weight: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    return result


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether torch runs packed layers of ``dtype`` natively and correctly on this processor."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    try:
        if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        with torch.inference_mode():
            weight = (torch.arange(64 * 32, dtype=torch.float32).view(64, 32) % 7).to(dtype)
            x = (torch.arange(3 * 32, dtype=torch.float32).view(3, 32) % 5).to(dtype)
            got = Packed(weight, None)(x)
            return torch.allclose(got.float(), F.linear(x.float(), weight.float()), rtol=1e-2)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


PACKED = Format(
    "packed",
    lambda dtype, device: device.type == "cpu" and can_pack(dtype),
    "a CPU on which this torch packs",
    Packed,
    lambda weight: min(weight.shape) >= PACK_FROM,
)


def through_torchao(weight: Rows, bias: torch.Tensor | None, *, name: str) -> Linear:
    """A layer quantized by torchao. Raises ConfigError where that is not installed."""
    try:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise ConfigError(f"quantization {name!r} on GPU needs torchao: pip install 'forerun[gpu]'") from error
    module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    module.weight = torch.nn.Parameter(to_tensor(weight), requires_grad=False)
    quantize_(module, Int8WeightOnlyConfig() if name == "int8" else Float8WeightOnlyConfig())
    layer = Plain(module.weight, bias)
    layer.kind = f"{name} weights"
    layer.nbytes = weight.shape.numel() + 4 * weight.shape[0]
    return layer


ON_GPU = tuple(
    Format(name, lambda dtype, device: device.type != "cpu", "a GPU", partial(through_torchao, name=name), pays)
    for name in TORCHAO_KINDS
)

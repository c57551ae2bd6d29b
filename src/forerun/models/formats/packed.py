"""``packed``: oneDNN's own layout of weights, for few rows read faster than plain ones; one packing serves every row
count. Its two operations are private to torch, so each is tried before it is used."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from forerun.models.formats.base import Format, Rows, whole

PACK_FROM = 256
"""Fewest inputs and outputs for which packing pays: a packed call has some 10 us of fixed cost."""


class Packed:
    """oneDNN's own weight layout; the plain copy is not kept."""

    __slots__ = ("bias", "call", "exact", "kind", "nbytes", "weight")

    def __init__(self, weight: Rows, bias: torch.Tensor | None) -> None:
        self.weight = pack(whole(weight))
        self.bias = bias
        self.kind = "packed"
        self.exact = False
        self.nbytes = weight.shape.numel() * weight.dtype.itemsize
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
    return torch.ops.mkldnn._reorder_linear_weight(weight, 1)


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


FORMAT = Format(
    "packed",
    lambda dtype, device: device.type == "cpu" and can_pack(dtype),
    "a CPU on which this torch packs",
    Packed,
    lambda weight: min(weight.shape) >= PACK_FROM,
)

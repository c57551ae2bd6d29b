"""Keys and values that one projection has laid side by side."""

from __future__ import annotations

import torch


def adjacent(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
    """[rows, 2 * heads, width] over both if v's heads follow k's in memory, as in a fused projection's output."""
    strides = k.stride()
    apart = k.shape[1] * strides[1] * k.element_size()
    if (
        v.data_ptr() - k.data_ptr() != apart
        or v.stride() != strides
        or v.untyped_storage()._cdata != k.untyped_storage()._cdata
    ):
        return None
    return k.as_strided((k.shape[0], 2 * k.shape[1], k.shape[2]), strides, k.storage_offset())

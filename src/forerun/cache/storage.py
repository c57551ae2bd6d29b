"""Memory for keys and values, and how some of them lie."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

LINE = 64
"""Bytes of a cache line, where what is made here begins."""
SPARSE = 1 << 17
"""Bytes of a head's part of a page from which several pages are thought to be mostly empty."""


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device, sparse: bool = False) -> torch.Tensor:
    """An ordinary tensor, whoever touches it first, which on a CPU takes memory as it is used; torch's is written.
    ``sparse``: a little here and there will be; of the large pages that NumPy asks for most would be empty."""
    with torch.inference_mode(False):
        if device.type != "cpu":
            return torch.zeros(*shape, dtype=dtype, device=device)
        size = math.prod(shape) * dtype.itemsize
        if sparse and size and hasattr(mmap, "MADV_NOHUGEPAGE"):
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a system that has no large pages
                pages.madvise(mmap.MADV_NOHUGEPAGE)
            return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(*shape)
        buffer = np.zeros(size + LINE, np.uint8)
        first = -buffer.ctypes.data % LINE
        return torch.from_numpy(buffer[first : first + size]).view(dtype).view(*shape)


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

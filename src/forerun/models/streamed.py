"""Norms and activations on kernels of our own."""

from __future__ import annotations

import torch

from forerun.models.formats.compiled import kernel


class Norm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32; weight [width], or [heads,
    width] for x [rows, heads, width]."""

    __slots__ = ("call", "dtype", "eps", "kinds", "pointer", "weight", "width")

    def __init__(self, weight: torch.Tensor, eps: float, dtype: torch.dtype | None = None) -> None:
        """For rows in ``dtype``, the weights' where None."""
        self.weight = weight.float().contiguous()
        self.width = weight.shape[-1]
        self.kinds = weight.numel() // self.width
        self.eps = eps
        self.pointer = self.weight.data_ptr()
        self.dtype = dtype or weight.dtype
        self.call = kernel("norm", self.dtype)
        if not self.kinds or not weight.is_cpu:
            raise ValueError(f"a norm's weights {[*weight.shape]} on {weight.device}")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not self.dtype:
            raise TypeError(f"rows in {x.dtype} for a norm in {self.dtype}")
        if x.shape[-1:] != self.weight.shape[-1:] or not x.is_cpu:
            raise ValueError(f"rows {[*x.shape]} on {x.device} for a norm of {self.width} numbers on cpu")
        if not x.is_contiguous():
            x = x.contiguous()
        y = torch.empty_like(x)
        self.call(x.data_ptr(), self.pointer, y.data_ptr(), x.numel() // self.width, self.kinds, self.width, self.eps)
        return y


class SiluTimes:
    """silu(gate) * up of rows [gate, up]."""

    __slots__ = ("call", "dtype")

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.call = kernel("silu_times", dtype)

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        if gate_up.dtype is not self.dtype:
            raise TypeError(f"rows in {gate_up.dtype} for an activation in {self.dtype}")
        if gate_up.dim() != 2 or gate_up.shape[1] % 2 or not gate_up.is_cpu:
            raise ValueError(f"gates and inputs {[*gate_up.shape]} on {gate_up.device}, not [rows, 2 width] on cpu")
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        y = gate_up.new_empty(rows, width)
        self.call(gate_up.data_ptr(), y.data_ptr(), rows, width)
        return y

"""What a GPU computes between linear layers, a program for each row, so that a row's bits depend on that row alone:
norms and rotary embeddings. Positions are read on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forerun.kernels import gpu


@triton.jit
def _norm(
    x, gain, shift, add, out, width, count, stride, epsilon,
    BLOCK: tl.constexpr, CENTRED: tl.constexpr, SHIFT: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """One row of one head. Rows of x are ``stride`` numbers apart, those of the result are contiguous."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k = tl.arange(0, BLOCK)
    inside = k < width
    value = tl.load(x + row * stride + head * width + k, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        value = tl.where(inside, value - tl.sum(value, 0) / width, 0.0)
    value = value / tl.sqrt(tl.sum(value * value, 0) / width + epsilon)
    value *= tl.load(gain + head * width + k, mask=inside, other=0.0)
    if SHIFT:
        value += tl.load(shift + head * width + k, mask=inside, other=0.0)
    at = (row * count + head) * width + k
    if ADD:
        value += tl.load(add + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


class TritonNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32; weight [width], or [heads,
    width] for x [rows, heads, width]. With ``layer_norm`` x less its mean; ``bias`` is added."""

    def __init__(
        self,
        weight: torch.Tensor,
        eps: float,
        dtype: torch.dtype,
        *,
        layer_norm: bool = False,
        bias: torch.Tensor | None = None,
    ) -> None:
        self.weight, self.eps, self.dtype = weight.float().contiguous(), eps, dtype
        self.layer_norm = layer_norm
        self.bias = None if bias is None else bias.float().contiguous()
        self.width = weight.shape[-1]
        self.count = weight.numel() // self.width

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """``add``, of x's shape, is added to the norm before that is rounded."""
        if x.shape[-self.weight.dim() :] != self.weight.shape:
            raise ValueError(f"rows {[*x.shape]} for a norm {[*self.weight.shape]}")
        outer = x.shape[: x.dim() - self.weight.dim()]
        together = len(outer) == 1 and outer[0] > 0 and x[0].is_contiguous()
        flat = x if together else x.contiguous().view(-1, *self.weight.shape)
        out = torch.empty(*outer, *self.weight.shape, dtype=self.dtype, device=x.device)
        if not len(flat):
            return out
        _norm[(len(flat), self.count)](
            flat, self.weight, self.weight if self.bias is None else self.bias,
            self.weight if add is None else add.contiguous(), out, self.width, self.count, flat.stride(0), self.eps,
            BLOCK=triton.next_power_of_2(self.width), CENTRED=self.layer_norm, SHIFT=self.bias is not None,
            ADD=add is not None,
        )  # fmt: skip
        return out


@triton.jit(do_not_specialize=gpu.VARYING)
def _rotate(heads, table, positions, width, numbers, stride, BLOCK: tl.constexpr):
    """All heads of one row in place: pairs side by side, and a table of [cosine, sine] for each."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(positions + row).to(tl.int64)
    first = 2 * (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))
    inside = first < numbers
    where = heads + row * stride + first
    one = tl.load(where, mask=inside, other=0.0).to(tl.float32)
    two = tl.load(where + 1, mask=inside, other=0.0).to(tl.float32)
    angle = table + at * width + first % width
    cosine, sine = tl.load(angle, mask=inside, other=0.0), tl.load(angle + 1, mask=inside, other=0.0)
    tl.store(where, (one * cosine - two * sine).to(heads.dtype.element_ty), mask=inside)
    tl.store(where + 1, (one * sine + two * cosine).to(heads.dtype.element_ty), mask=inside)


PAIRS = 1024
"""Pairs that a program rotates."""


def rotate(heads: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotates heads [rows, count, width] in place by the complex ``table`` [positions, 1, width / 2]. A row of padding
    has position 0."""
    if heads.stride()[1:] != (heads.shape[2], 1):
        heads = heads.contiguous()
    rows, count, width = heads.shape
    block = min(PAIRS, triton.next_power_of_2(count * width // 2))
    _rotate[(rows, -(-count * width // 2 // block))](
        heads, torch.view_as_real(table), positions, width, count * width, heads.stride(0), BLOCK=block
    )
    return heads

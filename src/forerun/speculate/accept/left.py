"""What is left of p where a draft of q was rejected."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from forerun.sampling.compiled import can_sample, excess
from forerun.speculate.accept.base import slots, take


def reduce(p: torch.Tensor, q: torch.Tensor, factor: torch.Tensor | float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """max(0, factor * p - q) for each row, unnormalised, and its mass [rows, 1]; p itself where nothing is left but
    rounding put a draw there."""
    left = (factor * p - q).clamp_(min=0.0)
    mass = left.sum(dim=1, keepdim=True)
    return torch.addcmul(left, p, (mass <= 0.0).to(p.dtype), out=left), mass


def reduce_rows(
    p: torch.Tensor, q: torch.Tensor, rows: Seq[int], factor: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, list[float] | None]:
    """``p`` [n, vocabulary] with the named rows, all different, reduced: one for each of ``q`` [rows, vocabulary] and
    ``factor`` [rows, 1] (None: 1). With the masses, and sum_x min(p, q) of each row where it comes for nothing."""
    if p.dtype == torch.float32 and can_sample(p.device):
        factors = [1.0] * len(rows) if factor is None else factor[:, 0].tolist()
        residual, left, shared = excess(p, q, rows, factors)
        return residual, torch.tensor(left)[:, None], shared
    left_of, mass = reduce(take(p, rows), q, 1.0 if factor is None else factor)
    residual = p.clone()
    residual[slots(rows)] = left_of
    return residual, mass, None

"""What is left of p where a draft of q was rejected."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from forerun.core.scores import Scores
from forerun.sampling.compiled import Compiled, Weighed
from forerun.sampling.warp import Row
from forerun.speculate.accept.base import POINT_MASS, Trials, slots, take


def reduce(p: torch.Tensor, q: torch.Tensor, factor: torch.Tensor | float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """max(0, factor * p - q) for each row, unnormalised, and its mass [rows, 1]; p itself where nothing is left but
    rounding put a draw there."""
    left = (factor * p - q).clamp_(min=0.0)
    mass = left.sum(dim=1, keepdim=True)
    return torch.addcmul(left, p, (mass <= 0.0).to(p.dtype), out=left), mass


def reduce_rows(
    p: torch.Tensor, q: torch.Tensor, rows: Seq[int], factor: torch.Tensor | float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """``p`` [n, vocabulary] with the named rows, all different, reduced: one for each of ``q`` [rows, vocabulary] and
    ``factor`` [rows, 1]. With the masses."""
    left, mass = reduce(take(p, rows), q, factor)
    residual = p.clone()
    residual[slots(rows)] = left
    return residual, mass


def weigh_chains(
    scores: Scores,
    trials: Trials,
    rows: Seq[Row],
    compiled: Compiled,
    follows: Seq[bool] | None = None,
    lenience: float = 1.0,
) -> Weighed:
    """All trials of chains through the kernel; see ``Compiled.weigh``."""
    kept: dict[int, torch.Tensor] = {}
    """By draft, its q."""
    qs = []
    for index, row in zip(trials.index, trials.q_row):
        q = scores.drafts[index].q
        if row == POINT_MASS or q is None:
            qs.append(0)
            continue
        if index not in kept:
            kept[index] = q.float().contiguous()
        qs.append(kept[index].data_ptr() + 4 * row * q.shape[1])
    greedy = [row.heat == 0.0 for row in rows]
    follows = follows if follows is not None else [False] * len(qs)
    return compiled.weigh(scores.warped, greedy, trials.row, trials.token, qs, follows, lenience)

"""Drafts that complement each other: a later one learns where the earlier ones miss.

Stratos, "Speculative decoding", footnote 2: "they are trained in sequence where the k-th dataset excludes examples such
that p and any previous q_1 ... q_{k-1} predict the same output" (the boost-tuned small models of SpecInfer, arXiv
2305.09781). The method ``merged`` drafts with all of them in one tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from forerun_lab.train.losses import DistillationLoss
from forerun_lab.train.target import forward


def missed(p_logits: Tensor, earlier: Sequence[Tensor]) -> Tensor:
    """bool [...]: where no earlier draft's likeliest token is the target's; logits are [..., vocabulary]."""
    choice = p_logits.argmax(-1)
    left = torch.ones_like(choice, dtype=torch.bool)
    for q_logits in earlier:
        left &= q_logits.argmax(-1) != choice
    return left


def mean_over(distance: DistillationLoss, p_logits: Tensor, q_logits: Tensor, kept: Tensor) -> Tensor:
    """Mean of ``distance`` over the positions ``kept``, bool [...]; a scalar, 0 where there are none."""
    if not bool(kept.any()):
        return q_logits.sum() * 0.0
    return distance(p_logits[kept], q_logits[kept]).mean()


@torch.no_grad()
def coverage(target: nn.Module, drafts: Sequence[nn.Module], tokens: Tensor) -> list[float]:
    """Entry k: the share of positions of ``tokens`` int64 [rows, length] where the likeliest token of the target is
    that of one of the first k + 1 drafts, which is how often a merged tree of them holds it at temperature 0."""
    result = [0.0] * len(drafts)
    count = 0
    for part in tokens.split(8):
        choice = forward(target, part).argmax(-1)
        hit = torch.zeros_like(choice, dtype=torch.bool)
        for number, draft in enumerate(drafts):
            hit |= forward(draft, part).argmax(-1) == choice
            result[number] += float(hit.sum())
        count += choice.numel()
    return [hits / count for hits in result]

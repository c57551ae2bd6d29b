"""Distillation losses: how far a draft's distribution q is from its target's distribution p.

All take logits, float32 [..., vocabulary], and give one value per position, [...]. With speculative sampling a position
is accepted with probability alpha = sum min(p, q) = 1 - TV(p, q) (Leviathan et al., arXiv 2211.17192, corollary 3.6).
"""

from collections.abc import Callable

import torch
from torch import Tensor

DistillationLoss = Callable[[Tensor, Tensor], Tensor]
"""(target logits, draft logits) -> loss per position."""


def overlap(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """alpha per position, sum over x of min(p(x), q(x))."""
    return torch.minimum(p_logits.softmax(-1), q_logits.softmax(-1)).sum(-1)


def kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(p || q) in nats: covers p, the usual distillation loss."""
    log_p = p_logits.log_softmax(-1)
    return (log_p.exp() * (log_p - q_logits.log_softmax(-1))).sum(-1)


def tv_ce(p_logits: Tensor, q_logits: Tensor, share: float = 0.1) -> Tensor:
    """(1 - share) * |q - p|_1 + share * cross entropy of q under p.

    The total variation is what acceptance depends on but hardly has a gradient where p and q do not meet yet; the cross
    entropy (nats) gives one. |q - p|_1 is twice the total variation.
    """
    p, log_q = p_logits.softmax(-1), q_logits.log_softmax(-1)
    distance = (log_q.exp() - p).abs().sum(-1)
    return (1 - share) * distance - share * (p * log_q).sum(-1)


def lk(p_logits: Tensor, q_logits: Tensor, eta: float = 3.0) -> Tensor:
    """-log alpha, led in by KL: w * KL + (1 - w) * -log alpha, with w = exp(-eta * mean alpha).

    After the LK losses of arXiv 2602.23881: w falls on its own as the draft gets better, so nothing is to be scheduled.
    """
    log_p, log_q = p_logits.log_softmax(-1), q_logits.log_softmax(-1)
    p = log_p.exp()
    alpha = torch.minimum(p, log_q.exp()).sum(-1)
    weight = torch.exp(-eta * alpha.detach().mean())
    return weight * (p * (log_p - log_q)).sum(-1) - (1 - weight) * alpha.clamp_min(1e-6).log()


LOSSES: dict[str, DistillationLoss] = {"kl": kl, "lk": lk, "tv_ce": tv_ce}

"""Distillation losses: how far a draft's distribution q is from its target's distribution p.

All take logits, float32 [..., vocabulary], and give one value per position, [...]. With speculative sampling a position
is accepted with probability alpha = sum min(p, q) = 1 - TV(p, q) (Leviathan et al., arXiv 2211.17192, corollary 3.6).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

DistillationLoss = Callable[[Tensor, Tensor], Tensor]
"""(target logits, draft logits) -> loss per position."""
CACHED = 1 << 18
"""Numbers of a kind that are worked on at a time: a few such arrays stay in a processor's caches."""


def overlap(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """alpha per position, sum over x of min(p(x), q(x))."""
    return torch.minimum(p_logits.softmax(-1), q_logits.softmax(-1)).sum(-1)


def kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(p || q) in nats: covers p, the usual distillation loss."""
    log_p = p_logits.log_softmax(-1)
    return (log_p.exp() * (log_p - q_logits.log_softmax(-1))).sum(-1)


def tv_ce(p_logits: Tensor, q_logits: Tensor, fraction: float = 0.1) -> Tensor:
    """(1 - share) * |q - p|_1 + share * cross entropy of q under p.

    The total variation is what acceptance depends on but hardly has a gradient where p and q do not meet yet; the cross
    entropy (nats) gives one. |q - p|_1 is twice the total variation.
    """
    p, log_q = p_logits.softmax(-1), q_logits.log_softmax(-1)
    distance = (log_q.exp() - p).abs().sum(-1)
    return (1 - fraction) * distance - fraction * (p * log_q).sum(-1)


def lk(p_logits: Tensor, q_logits: Tensor, eta: float = 3.0) -> Tensor:
    """-log alpha, led in by KL: w * KL + (1 - w) * -log alpha, with w = exp(-eta * mean alpha).

    After the LK losses of arXiv 2602.23881: w falls on its own as the draft gets better, so nothing is to be scheduled.
    p is given: its logits get no gradient.
    """
    divergence, alpha = _Compared.apply(p_logits, q_logits)
    weight = torch.exp(-eta * alpha.detach().mean())
    return weight * divergence - (1 - weight) * alpha.clamp_min(1e-6).log()


class _Compared(torch.autograd.Function):
    """KL(p || q) and alpha of each position, and with them their gradients by the logits of q, some rows at a time: one
    operation after another would bring [..., vocabulary] numbers from memory a dozen times."""

    @staticmethod
    def forward(ctx: Any, p_logits: Tensor, q_logits: Tensor) -> tuple[Tensor, Tensor]:
        size = q_logits.shape[-1]
        theirs, ours = p_logits.reshape(-1, size), q_logits.reshape(-1, size)
        wide = torch.promote_types(ours.dtype, torch.float32)
        divergence, alpha = torch.empty(2, len(ours), dtype=wide, device=ours.device)
        slopes = torch.empty(2, *ours.shape, dtype=ours.dtype, device=ours.device) if ctx.needs_input_grad[1] else None
        rows = max(1, CACHED // size)
        for part in range(0, len(ours), rows):
            here = slice(part, part + rows)
            log_p, log_q = (logits[here].to(wide).log_softmax(-1) for logits in (theirs, ours))
            p, q = log_p.exp(), log_q.exp()
            divergence[here] = (p * log_p.sub_(log_q)).sum(-1)
            alpha[here] = torch.minimum(p, q).sum(-1)
            if slopes is not None:
                below = torch.where(q < p, q, 0)
                slopes[0, here] = q - p
                slopes[1, here] = below.sub_(q * below.sum(-1, keepdim=True))
        ctx.save_for_backward(slopes)
        return divergence.view(q_logits.shape[:-1]), alpha.view(q_logits.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *slopes_of_loss: Tensor) -> tuple[None, Tensor]:
        (slopes,) = ctx.saved_tensors
        by_divergence, by_alpha = (part.reshape(-1, 1).to(slopes.dtype) for part in slopes_of_loss)
        out = (slopes[0] * by_divergence).addcmul_(slopes[1], by_alpha)
        return None, out.view(*slopes_of_loss[0].shape, slopes.shape[-1])


LOSSES: dict[str, DistillationLoss] = {"kl": kl, "lk": lk, "tv_ce": tv_ce}

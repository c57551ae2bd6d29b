"""What drafts learn from while a target is tuned, and what heads have learnt position by position."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from forerun.speculate.draft.heads.head import Guess, weights

CACHED = 1 << 18
"""Numbers of a kind that are worked on at a time: a few such arrays stay in a processor's caches."""


def overlap(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """alpha per position, sum over x of min(p(x), q(x))."""
    return torch.minimum(p_logits.softmax(-1), q_logits.softmax(-1)).sum(-1)


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
        rows = max(1, CACHED // size) if ours.device.type == "cpu" else len(ours)
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


Figures = dict[str, Any]


@torch.no_grad()
def of_head(guesses: Callable[[Tensor], Iterable[Guess]], rows: Tensor) -> Figures:
    """A head on token ids int64 [rows, length], by position: ``loss_by_position``, nats per token, and
    ``accepted_at_0`` and ``accepted_at_1``, the share of drafts of which this position and all before it are kept, at
    temperatures 0 and 1. ``held_out_loss`` is the loss that is trained, the weighted sum."""
    totals: list[list[float]] = []
    indices = 0
    for row in rows.split(1):
        hit, fraction = torch.tensor(True), torch.tensor(1.0)
        for position, guess in enumerate(guesses(row)):
            logits, requested = guess.logits.float(), guess.wanted.float()
            if guess.ids is not None:
                logits = torch.full_like(requested, float("-inf")).index_copy_(-1, guess.ids, logits)
            hit = hit & (logits.argmax(-1) == requested.argmax(-1))
            fraction = fraction * overlap(requested, logits)
            if position == len(totals):
                totals.append([0.0, 0.0, 0.0])
            for index, value in enumerate((guess.loss(), hit, fraction)):
                totals[position][index] += float(value.sum())
        indices += hit.numel()
    losses, cold, warm = ([total[index] / indices for total in totals] for index in range(3))
    trained = sum(weight * loss for weight, loss in zip(weights(len(losses)), losses, strict=True))
    return {"held_out_loss": trained, "loss_by_position": losses, "accepted_at_0": cold, "accepted_at_1": warm}

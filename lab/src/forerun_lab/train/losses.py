"""Distillation losses of draft models, and tables of training figures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn, no_grad

from forerun_lab.tune.kinds import Figures, lk_loss

DistillationLoss = Callable[[Tensor, Tensor], Tensor]
"""(target logits, draft logits) -> loss per position."""
DEPTH = 5
"""Positions of a draft model's drafts that are counted."""


def kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(p || q) in nats: covers p, the usual distillation loss."""
    log_p = p_logits.log_softmax(-1)
    return (log_p.exp() * (log_p - q_logits.log_softmax(-1))).sum(-1)


def tv_ce(p_logits: Tensor, q_logits: Tensor, fraction: float = 0.1) -> Tensor:
    """(1 - share) * |q - p|_1 + share * cross entropy of q under p. The total variation is what acceptance depends on
    but hardly has a gradient where p and q do not meet yet; the cross entropy (nats) gives one. |q - p|_1 is twice the
    total variation."""
    p, log_q = p_logits.softmax(-1), q_logits.log_softmax(-1)
    distance = (log_q.exp() - p).abs().sum(-1)
    return (1 - fraction) * distance - fraction * (p * log_q).sum(-1)


LOSSES: dict[str, DistillationLoss] = {"kl": kl, "lk": lk_loss, "tv_ce": tv_ce}


def of_chains(hits: Tensor, overlaps: Tensor, depth: int = DEPTH) -> Figures:
    """Acceptance of a draft model's chains, from whether its likeliest token is the target's, bool [rows, length], and
    from sum min(p, q): a chain begins at every position with ``depth`` more."""
    depth = min(depth, hits.shape[1])
    cold, warm = (
        values.float().unfold(1, depth, 1).cumprod(-1).mean(dim=(0, 1)).tolist() for values in (hits, overlaps)
    )
    return {"accepted_at_0": cold, "accepted_at_1": warm}


def table(figures: Mapping[str, Any], first: int = 1) -> list[str]:
    """Lines of ``accepted_at_0`` and ``accepted_at_1`` by position, and of losses if there are any."""
    cold, warm = figures["accepted_at_0"], figures["accepted_at_1"]
    losses: Sequence[float] | None = figures.get("loss_by_position")
    lines = ["held-out text: how many drafts are kept up to each position, at T = 0 and T = 1"]
    for index in range(len(cold)):
        loss = "" if losses is None else f"   loss {losses[index]:6.3f} nats"
        lines.append(f"  position {first + index}   {cold[index]:4.0%}   {warm[index]:4.0%}{loss}")
    lead = "" if first == 1 else f", beside the {first - 1} before them"
    lines.append(f"  kept per draft   {sum(cold):.2f}   {sum(warm):.2f}{lead}")
    return lines


def show(figures: Mapping[str, Any], shown: bool, first: int = 1) -> None:
    """The table, on stderr, where progress is shown."""
    if shown:
        print("\n".join(table(figures, first)), file=sys.stderr, flush=True)


@no_grad()
def round_weights(model: nn.Module) -> None:
    """Round weights to bfloat16 in place, so that later figures are those of the saved model."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())

"""How much of a draft is accepted, position by position, on text that was not trained on.

The text is given: what is counted at a position is whether the guess there, made behind the text so far, would stand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.speculate.draft.heads.head import Guess, weights
from forerun.train.losses import overlap

Figures = dict[str, Any]
DEPTH = 5
"""Positions of a draft model's drafts that are counted."""


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


def of_chains(hits: Tensor, overlaps: Tensor, depth: int = DEPTH) -> Figures:
    """A draft model's, from where its likeliest token is the target's, bool [rows, length], and from sum min(p, q)
    there: a draft may begin at every position that has ``depth`` of them."""
    depth = min(depth, hits.shape[1])
    cold, warm = (
        values.float().unfold(1, depth, 1).cumprod(-1).mean(dim=(0, 1)).tolist() for values in (hits, overlaps)
    )
    return {"accepted_at_0": cold, "accepted_at_1": warm}


def table(figures: Mapping[str, Any], first: int = 1) -> list[str]:
    """Lines that show ``accepted_at_0`` and ``accepted_at_1`` position by position, and losses where there are any."""
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

"""The target's word on a round's drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from forerun.core.request import RequestState
from forerun.core.tree import Draft


@dataclass(slots=True)
class Scores:
    """Logits of every drafted position, for the sequences that decode this round.

    ``first[s]`` is sequence s's root row (what follows its last committed token); the row of node i is
    ``first[s] + 1 + i``. ``raw`` [rows, vocabulary] holds the model's float32 logits or None where nobody asked;
    ``warped`` [rows, vocabulary] those of the sampled distribution (banned tokens at -inf).
    """

    sequences: list[RequestState]
    drafts: list[Draft]
    first: list[int]
    warped: torch.Tensor
    raw: torch.Tensor | None = None
    contexts: list[Any] | None = field(default=None, repr=False)
    """Each row's sampling context, once somebody has asked for it."""

    def row(self, index: int, node: int) -> int:
        """Row that predicts what follows ``node`` (-1: the root) of the index-th sequence."""
        return self.first[index] + 1 + node

    def of(self, indices: Sequence[int]) -> Scores:
        """Those of some of its sequences; itself where these are all."""
        if len(indices) == len(self.sequences):
            return self
        first: list[int] = []
        rows: list[int] = []
        for index in indices:
            first.append(len(rows))
            rows.extend(range(self.first[index], self.first[index] + 1 + len(self.drafts[index])))
        return Scores(
            [self.sequences[index] for index in indices],
            [self.drafts[index] for index in indices],
            first,
            self.warped[rows],
            None if self.raw is None else self.raw[rows],
            None if self.contexts is None else [self.contexts[row] for row in rows],
        )

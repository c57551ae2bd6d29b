"""Draws from counted continuations, in the way the acceptance rule needs."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from forerun.core.tree import POINT_MASS, Draft
from forerun.sampling.draw import node_key
from forerun.sampling.noise import target_key
from forerun.sampling.warp import Row
from forerun.speculate.draft.base import Chooser


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens that followed a context: ``ids`` int64 [n], the most frequent first, and the log of each count [n]."""

    ids: torch.Tensor
    logs: torch.Tensor

    @classmethod
    def of(cls, counts: dict[int, int], device: torch.device) -> Counts:
        ranked = sorted(counts.items(), key=lambda item: -item[1])
        ids = torch.tensor([token for token, _ in ranked], device=device)
        return cls(ids, torch.tensor([float(count) for _, count in ranked], device=device).log())


class CountChooser:
    """Draws a chain token by token; ``finish`` gives the draft the exact q of every draw.

    A greedy request takes the most frequent token, a point mass. Otherwise q is the counts to the power 1 / heat.
    """

    def __init__(self, chooser: Chooser) -> None:
        self.chooser = chooser
        self.sampler = chooser.sampler
        self.supports: list[tuple[torch.Tensor, torch.Tensor]] = []

    def warm(self, row: Row, count: int) -> None:
        """Compute the noise of the next ``count`` positions in one go, where the target will use the same."""
        if row.heat > 0.0 and not self.chooser.rule.needs_q:
            first = row.position
            self.sampler.noise.rows([target_key(row.sequence.seed, first + i) for i in range(count)])

    def draw(self, counts: Counts, row: Row, parent: int) -> tuple[int, int]:
        """A token, and its row of q."""
        if row.heat == 0.0:
            return int(counts.ids[0]), POINT_MASS
        logs = counts.logs / row.heat
        if self.chooser.rule.needs_q:
            key = node_key(self.chooser.purpose, row, len(row.sequence.tokens), parent)
        else:
            key = target_key(row.sequence.seed, row.position)
        choice = (logs + self.sampler.noise.rows([key])[0, counts.ids]).argmax()
        self.supports.append((counts.ids, logs))
        return int(counts.ids[choice]), len(self.supports) - 1

    def finish(self, drafts: Seq[Draft]) -> list[Draft]:
        """Fill in q [draws, vocabulary] of this round's drafts."""
        if self.supports:
            logs = self.supports[0][1]
            q = torch.zeros(len(self.supports), self.sampler.vocab_size, dtype=logs.dtype, device=logs.device)
            for row, (ids, logs) in zip(q, self.supports):
                row[ids] = torch.softmax(logs, dim=0)
            for draft in drafts:
                draft.q = q
        self.supports = []
        return list(drafts)

"""Draws from counted continuations, in the way the acceptance rule needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from forerun.core.tree import POINT_MASS, Draft
from forerun.sampling.draw import node_key
from forerun.sampling.noise import target_key, uniform
from forerun.sampling.warp import Row
from forerun.speculate.draft.base import Chooser


@dataclass(frozen=True, slots=True)
class CountDistribution:
    """q [n] over some tokens, its logs, and its cumulative sums in float64."""

    q: torch.Tensor
    logs: torch.Tensor
    reached: torch.Tensor


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens that followed a context: ``ids`` int64 [n], the most frequent first, and the log of each count [n]."""

    ids: torch.Tensor
    logs: torch.Tensor
    distributions: dict[float, CountDistribution] = field(default_factory=dict)

    @classmethod
    def of(cls, counts: Mapping[int, float], device: torch.device) -> Counts:
        ranked = sorted(counts.items(), key=lambda item: -item[1])
        ids = torch.tensor([token for token, _ in ranked], device=device)
        return cls(ids, torch.tensor([float(count) for _, count in ranked], device=device).log())

    def distribution(self, temperature: float) -> CountDistribution:
        """The counts to the power 1 / heat, normalised. The latest heats are remembered."""
        result = self.distributions.get(temperature)
        if result is None:
            q = torch.softmax(self.logs / temperature, dim=0)
            if len(self.distributions) >= 4:
                self.distributions.clear()
            result = self.distributions[temperature] = CountDistribution(q, q.log(), q.double().cumsum(dim=0))
        return result


class CountChooser:
    """Draws a chain token by token; ``finish`` gives the draft the exact q of every draw.

    A greedy request takes the most frequent token, a point mass. Otherwise q is the counts to the power 1 / heat.
    """

    def __init__(self, chooser: Chooser) -> None:
        self.chooser = chooser
        self.sampler = chooser.sampler
        self.supports: list[tuple[torch.Tensor, torch.Tensor]] = []

    def draw(self, counts: Counts, row: Row, parent: int, ahead: int = 0) -> tuple[int, int]:
        """A token, and its row of q. ``ahead`` more positions will follow: under a coupled rule their noise, which
        the target needs too, costs less together."""
        if row.effective_temperature == 0.0 or len(counts.ids) == 1:
            return int(counts.ids[0]), POINT_MASS
        distribution = counts.distribution(row.effective_temperature)
        if self.chooser.rule.needs_q:
            quantile = uniform(node_key(self.chooser.purpose, row, len(row.sequence.tokens), parent))
            choice = min(
                int(torch.searchsorted(distribution.reached, quantile * float(distribution.reached[-1]), right=True)),
                len(distribution.q) - 1,
            )
        else:
            keys = [target_key(row.sequence.seed, row.position + step) for step in range(ahead + 1)]
            choice = int((distribution.logs + self.sampler.noise.rows(keys[:1], keys[1:])[0, counts.ids]).argmax())
        self.supports.append((counts.ids, distribution.q))
        return int(counts.ids[choice]), len(self.supports) - 1

    def finish(self, drafts: Sequence[Draft]) -> list[Draft]:
        """Fill in q [draws, vocabulary] of this round's drafts."""
        if self.supports:
            first = self.supports[0][1]
            q = torch.zeros(len(self.supports), self.sampler.vocab_size, dtype=first.dtype, device=first.device)
            for row, (ids, probabilities) in zip(q, self.supports):
                row[ids] = probabilities
            for draft in drafts:
                draft.q = q
        self.supports = []
        return list(drafts)

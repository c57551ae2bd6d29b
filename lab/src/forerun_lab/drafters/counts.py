"""Draws from counts, whose q is exact: ``counts_as_q`` of ``ngram``, and what ``table`` draws with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from forerun.core.request import Requests, RequestState
from forerun.core.tree import POINT_MASS, Draft, Drafts
from forerun.sampling.draw import node_key
from forerun.sampling.noise import target_key, uniform
from forerun.sampling.warp import Row
from forerun.speculate.draft.base import Chooser, DraftContext
from forerun.speculate.draft.ngram import Ngram, NgramConfig, NgramTables


@dataclass(frozen=True, slots=True)
class CountDistribution:
    """q [n] over some tokens, its logs, and its cumulative sums in float64."""

    q: torch.Tensor
    logs: torch.Tensor
    cumulative: torch.Tensor


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
        """The counts to the power 1 / temperature, normalised. Caches the last few temperatures."""
        result = self.distributions.get(temperature)
        if result is None:
            q = torch.softmax(self.logs / temperature, dim=0)
            if len(self.distributions) >= 4:
                self.distributions.clear()
            result = self.distributions[temperature] = CountDistribution(q, q.log(), q.double().cumsum(dim=0))
        return result


class CountChooser:
    """Draws a chain token by token; ``finish`` then gives the drafts the exact q of every draw.

    Greedy requests get the most frequent token, a point mass. For others, q is the counts to the power 1 / temperature.
    """

    def __init__(self, chooser: Chooser) -> None:
        self.chooser = chooser
        self.sampler = chooser.sampler
        self.supports: list[tuple[torch.Tensor, torch.Tensor]] = []

    def draw(self, counts: Counts, row: Row, parent: int, ahead: int = 0) -> tuple[int, int]:
        """Draws a token; returns it with its row of q. ``ahead`` more positions will follow. Under a coupled rule their
        noise is computed now, as one call is cheaper and the target needs it too."""
        if row.effective_temperature == 0.0 or len(counts.ids) == 1:
            return int(counts.ids[0]), POINT_MASS
        distribution = counts.distribution(row.effective_temperature)
        if self.chooser.rule.needs_q:
            quantile = uniform(node_key(self.chooser.purpose, row, len(row.sequence.tokens), parent))
            sums = distribution.cumulative
            choice = min(int(torch.searchsorted(sums, quantile * float(sums[-1]), right=True)), len(sums) - 1)
        else:
            keys = [target_key(row.sequence.seed, row.position + step) for step in range(ahead + 1)]
            choice = int((distribution.logs + self.sampler.noise.rows(keys[:1], keys[1:])[0, counts.ids]).argmax())
        self.supports.append((counts.ids, distribution.q))
        return int(counts.ids[choice]), len(self.supports) - 1

    def finish(self, drafts: Drafts) -> list[Draft]:
        """Sets q [draws, vocabulary] of this round's drafts."""
        if self.supports:
            first = self.supports[0][1]
            q = torch.zeros(len(self.supports), self.sampler.vocab_size, dtype=first.dtype, device=first.device)
            for row, (ids, probabilities) in zip(q, self.supports):
                row[ids] = probabilities
            for draft in drafts:
                draft.q = q
        self.supports = []
        return list(drafts)


class CountedNgram(Ngram):
    """Draws each token from the counted continuations where the request samples."""

    has_evidence = False

    def __init__(self, config: NgramConfig, context: DraftContext) -> None:
        super().__init__(config, context)
        temperature = config.draft_temperature or 1.0
        self.counted = CountChooser(Chooser(context.sampler, context.rule, temperature, context.stream))

    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        return self.counted.finish(super().propose(sequences, budgets))

    def draft(self, sequence: RequestState, index: NgramTables, tail: list[int], budget: int) -> Draft:
        if sequence.params.greedy:
            return super().draft(sequence, index, tail, budget)
        draft, context = Draft(), index.context(tail)
        draft.confidence = index.confidence(context)
        while len(draft) < budget and (suffix := index.longest_suffix(context)) is not None:
            token, q_row = index.best[suffix], POINT_MASS
            if len(index.counts[suffix]) > 1:
                counts = Counts.of(index.counts[suffix], self.context.sampler.device)
                row = self.counted.chooser.row(sequence, draft.tokens)
                token, q_row = self.counted.draw(counts, row, len(draft) - 1, budget - len(draft) - 1)
            draft.add(token, len(draft) - 1, q_row)
            context.append(token)
        return draft

"""``random`` draws uniformly: a draft that is worth nothing, for tests and synthetic acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from forerun.core.request import Requests, RequestState
from forerun.core.tree import POINT_MASS, Draft
from forerun.sampling.draw import node_key
from forerun.sampling.noise import target_key, uniform
from forerun.speculate.draft.base import Chooser, DraftContext, Drafter, DrafterConfig


@dataclass(frozen=True)
class RandomConfig(DrafterConfig):
    unsupported: ClassVar = {"draft_temperature": "method 'random' draws uniformly"}


class Random(Drafter[RandomConfig]):
    """Draws every token from the uniform q over the vocabulary, whatever the request's options."""

    name = "random"
    config_class = RandomConfig

    def __init__(self, config: RandomConfig, context: DraftContext) -> None:
        super().__init__(config, context)
        self.chooser = Chooser(context.sampler, context.rule, stream=context.stream)
        size = context.sampler.vocab_size
        self.q = torch.full((1, size), 1.0 / size, device=context.sampler.device)

    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        return [self._draft(sequence, budget) for sequence, budget in zip(sequences, budgets)]

    def _draft(self, sequence: RequestState, budget: int) -> Draft:
        draft = Draft(q=None if sequence.params.greedy else self.q)
        q_row = POINT_MASS if sequence.params.greedy else 0
        level = [-1]
        for depth in range(budget):
            first = len(draft)
            for parent in level:
                for token in self._children(sequence, draft, parent, self.config.width(depth)):
                    draft.add(token, parent, q_row)
            level = list(range(first, len(draft)))
        return draft

    def _children(self, sequence: RequestState, draft: Draft, parent: int, width: int) -> list[int]:
        row = self.chooser.row(sequence, draft.path_tokens(parent))
        sampler, rule = self.context.sampler, self.context.rule
        width = min(width, sampler.vocab_size)
        if not rule.needs_q and not sequence.params.greedy:
            noise = sampler.noise.rows([target_key(sequence.seed, row.position)])[0]
            return noise.topk(width).indices.tolist()
        root = len(sequence.tokens)
        draws = [uniform(node_key(self.chooser.purpose, row, root, parent, trial)) for trial in range(width)]
        if rule.replacement and not sequence.params.greedy:
            return [int(draw * sampler.vocab_size) for draw in draws]
        return _distinct(draws, sampler.vocab_size)


def _distinct(draws: Sequence[float], size: int) -> list[int]:
    """Uniform ids without replacement: each draw picks among the ids not yet taken."""
    taken: list[int] = []
    for draw in draws:
        token = int(draw * (size - len(taken)))
        for earlier in sorted(taken):
            token += token >= earlier
        taken.append(token)
    return taken

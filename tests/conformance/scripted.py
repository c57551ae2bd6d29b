"""A drafter that knows the answer, and may lie about it."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.core.tree import Draft
from forerun.speculate.draft.base import Drafter, DrafterConfig


@dataclass(frozen=True)
class ScriptConfig(DrafterConfig):
    num_speculative_tokens: int = 5
    wrong_from: int | None = None
    """Depth from which on every token is wrong; None: all are right."""


class Scripted(Drafter[ScriptConfig]):
    """``answers`` maps a request's index (its order of arrival) to its tokens. In a tree, the last sibling is right."""

    name = "scripted"
    config_class = ScriptConfig
    answers: tuple[list[int], ...] = ()

    def propose(self, sequences, budgets):
        return [self._draft(sequence, budget) for sequence, budget in zip(sequences, budgets)]

    def _draft(self, sequence, budget):
        draft, node = Draft(), -1
        known = self.answers[sequence.id]
        for depth, token in enumerate(known[sequence.num_output :][:budget]):
            wrong = self.config.wrong_from is not None and depth >= self.config.wrong_from
            parent = node
            for step in range(self.config.width(depth) - 1, -1, -1):
                node = draft.add((token + step + wrong) % self.context.sampler.vocab_size, parent)
        return draft

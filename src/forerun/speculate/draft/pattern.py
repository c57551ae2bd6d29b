"""``pattern`` drafts the tokens that a grammar forces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from forerun.core.request import Requests
from forerun.core.tree import Draft
from forerun.speculate.draft.base import Drafter, DrafterConfig, Needs, drafters


@dataclass(frozen=True)
class PatternConfig(DrafterConfig):
    num_speculative_tokens: int = 8
    unsupported: ClassVar = dict.fromkeys(
        ("tree", "draft_temperature"), "method 'pattern' drafts chains of certain tokens"
    )


@drafters.register("pattern")
class Pattern(Drafter[PatternConfig]):
    """Drafts the tokens that a grammar leaves no choice about."""

    name = "pattern"
    config_class = PatternConfig
    needs = Needs(grammar=True)

    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        return [
            Draft.chain(sequence.constraint.forced(sequence, budget)) if sequence.constraint is not None else Draft()
            for sequence, budget in zip(sequences, budgets)
        ]

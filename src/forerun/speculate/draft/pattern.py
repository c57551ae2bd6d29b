"""``pattern``: the tokens that a request's grammar forces (reference 004's "regex-based predictor for structured
output"; the fast-forward tokens of llguidance).

Where a schema leaves no choice, such as a key, its quotes and the colon, the text is known before the model has
spoken. Requests without structured output decode plainly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.core.errors import ConfigError
from forerun.core.request import RequestState
from forerun.core.tree import Draft
from forerun.speculate.draft.base import Drafter, DrafterConfig, Needs, drafters


@dataclass(frozen=True)
class PatternConfig(DrafterConfig):
    num_speculative_tokens: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tree", "draft_temperature"):
            if getattr(self, name) is not None:
                raise ConfigError(f"method 'pattern' drafts chains of certain tokens; remove {name!r}")


@drafters.register("pattern")
class Pattern(Drafter[PatternConfig]):
    name = "pattern"
    config_class = PatternConfig
    needs = Needs(grammar=True)

    def propose(self, sequences: Sequence[RequestState], budgets: Sequence[int]) -> list[Draft]:
        return [
            Draft.chain(sequence.constraint.forced(sequence, budget)) if sequence.constraint is not None else Draft()
            for sequence, budget in zip(sequences, budgets)
        ]

"""``cascade``: ask the drafters in turn and take the first draft whose drafter is sure enough of it; the last one's
is taken as it is. A cheap drafter's good guesses save the dear one's passes (CS Drafting, arXiv 2312.11462).

How sure a drafter is was decided before it drew a token, so rules that compare p with q stay exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.core.errors import ConfigError
from forerun.core.request import RequestState
from forerun.core.tree import Draft
from forerun.speculate.draft.base import DraftContext, drafters
from forerun.speculate.draft.nested import PartsConfig, PartsDrafter


@dataclass(frozen=True)
class CascadeConfig(PartsConfig):
    drafters: tuple[Any, ...] = ({"method": "suffix"}, {"method": "draft_model"})
    """Options of each drafter, the first to be asked first; ``num_speculative_tokens`` is their default."""
    min_confidence: float = 0.5
    """How sure, from 0 to 1, a drafter other than the last must be of its draft."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.min_confidence <= 1:
            raise ConfigError(f"min_confidence must be from 0 to 1, not {self.min_confidence!r}")

    def nodes_by_depth(self) -> list[int]:
        return [max(nodes) for nodes in zip(*self.part_nodes())]


@drafters.register("cascade")
class Cascade(PartsDrafter[CascadeConfig]):
    name = "cascade"
    config_class = CascadeConfig

    def __init__(self, config: CascadeConfig, context: DraftContext) -> None:
        super().__init__(config, context, config.drafters)

    def propose(self, sequences: Sequence[RequestState], budgets: Sequence[int]) -> list[Draft]:
        chosen = [Draft() for _ in sequences]
        left = list(range(len(sequences)))
        last = len(self.parts) - 1
        for number, part in enumerate(self.parts):
            drafts = self.ask(number, [sequences[i] for i in left], [budgets[i] for i in left])
            unsure = []
            for index, draft in zip(left, drafts):
                sure = draft.confidence is not None and draft.confidence >= self.config.min_confidence
                if number == last or sure:
                    chosen[index] = draft
                    draft.method = part.name
                else:
                    unsure.append(index)
            left = unsure
        return chosen

    @classmethod
    def example(cls, target: Path, folder: Path) -> dict[str, Any]:
        return {"drafters": [{"method": "suffix"}, {"method": "draft_model", "model": str(target)}]}

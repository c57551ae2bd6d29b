"""``merged``: several drafters' drafts as one tree, verified together (SpecInfer, arXiv 2305.09781).

Nodes of equal path are one node, so that the target reads a shared prefix once; trials are never merged: under each
parent every drafter's draws keep their own q and their order, which is what recursive rejection needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forerun.core.request import RequestState
from forerun.core.tree import POINT_MASS, Draft
from forerun.speculate.draft.base import DraftContext, drafters
from forerun.speculate.draft.nested import PartsConfig, PartsDrafter


@dataclass(frozen=True)
class MergedConfig(PartsConfig):
    @property
    def branches(self) -> bool:
        return True

    def nodes_by_depth(self) -> list[int]:
        return [sum(nodes) for nodes in zip(*self.part_nodes())]


@drafters.register("merged")
class Merged(PartsDrafter[MergedConfig]):
    name = "merged"
    config_class = MergedConfig

    def __init__(self, config: MergedConfig, context: DraftContext) -> None:
        super().__init__(config, context, config.drafters)

    def propose(self, sequences: Sequence[RequestState], budgets: Sequence[int]) -> list[Draft]:
        per_part = [self.ask(number, sequences, budgets) for number in range(len(self.parts))]
        for index, sequence in enumerate(sequences):
            for drafts in reversed(per_part[1:]):  # beams share their rows out, and one may have got most in every part
                if (
                    sequence.draft_budget is not None
                    and sum(len(part[index]) for part in per_part) > sequence.draft_budget
                ):
                    drafts[index] = Draft()
        return merge(per_part)

    @classmethod
    def example(cls, target: Path, folder: Path) -> dict[str, Any]:
        return {"drafters": [{"method": "ngram"}, {"method": "draft_model", "model": str(target)}]}


def merge(per_part: Sequence[Sequence[Draft]]) -> list[Draft]:
    """One tree per sequence from each part's drafts, ``per_part[part][sequence]``; they share one q."""
    qs: list[torch.Tensor] = []
    first_row: dict[int, int] = {}
    rows = 0
    for q in (draft.q for drafts in per_part for draft in drafts):
        if q is not None and id(q) not in first_row:
            first_row[id(q)] = rows
            qs.append(q)
            rows += q.shape[0]
    q = torch.cat(qs) if len(qs) > 1 else qs[0] if qs else None
    merged = []
    for drafts in zip(*per_part):
        tree = Draft(q=q)
        for draft in drafts:
            offset = first_row[id(draft.q)] if draft.q is not None else 0
            add(tree, draft, offset)
        merged.append(tree)
    return merged


def add(tree: Draft, draft: Draft, offset: int) -> None:
    """Add every trial of ``draft`` to ``tree``, behind those already there; its rows of q start at ``offset``."""
    indices = {-1: -1}
    for parent, trials in enumerate(draft.trials):
        for trial in trials:
            row = trial.row if trial.row == POINT_MASS else trial.row + offset
            indices[trial.node] = tree.add(draft.tokens[trial.node], indices[parent - 1], row)

"""Drafters made of drafters: their options, their construction, and what each part gets to see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from forerun.core.config import FRACTION
from forerun.core.errors import ConfigError
from forerun.core.request import Requests, RequestState
from forerun.core.tree import POINT_MASS, Draft, Drafts, Verdict, Verdicts
from forerun.speculate.draft.base import DraftContext, Drafter, DrafterConfig, Needs, drafters
from forerun.speculate.verify import Verification


@dataclass(frozen=True)
class NestedPart:
    """One drafter inside another: its method and options."""

    method: str
    config: DrafterConfig

    @classmethod
    def parse(cls, options: Mapping[str, Any] | NestedPart, num_speculative_tokens: int) -> NestedPart:
        """From ``{"method": ..., its options}``; ``num_speculative_tokens`` unless it has its own."""
        if isinstance(options, NestedPart):
            return options
        if not isinstance(options, Mapping) or "method" not in options:
            raise ConfigError(f"a drafter inside a drafter is a mapping like {{'method': 'suffix'}}, not {options!r}")
        rest = {key: value for key, value in options.items() if key != "method"}
        config = drafters[options["method"]].config_class
        if "tree" not in rest:
            rest.setdefault("num_speculative_tokens", num_speculative_tokens)
        return cls(options["method"], config.from_dict(options["method"], rest))

    def build(self, context: DraftContext, number: int = 0) -> Drafter:
        """``number`` tells the parts of one drafter apart, so that their draws are independent."""
        return drafters[self.method].build(self.config, replace(context, stream=context.stream * 16 + number + 1))


@dataclass(frozen=True)
class PartsConfig(DrafterConfig):
    """Options of drafters that ask several others."""

    drafters: tuple[Any, ...] = ({"method": "ngram"}, {"method": "draft_model"})
    """Options of each drafter, the first to be asked first; ``num_speculative_tokens`` is their default."""
    without: ClassVar = dict.fromkeys(("tree", "draft_temperature"), "it is an option of the drafters inside")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.drafters, (list, tuple)) or not 2 <= len(self.drafters) <= 15:
            raise ConfigError("'drafters' must list the options of 2 to 15 drafters")
        parts = tuple(NestedPart.parse(options, self.num_speculative_tokens) for options in self.drafters)
        object.__setattr__(self, "drafters", parts)
        object.__setattr__(self, "num_speculative_tokens", max(p.config.num_speculative_tokens for p in parts))

    @property
    def branches(self) -> bool:
        return any(part.config.branches for part in self.drafters)

    def part_nodes(self) -> list[list[int]]:
        """``nodes_by_depth`` of every part, each as long as this drafter's own."""
        depth = self.num_speculative_tokens
        tables = [part.config.nodes_by_depth() for part in self.drafters]
        return [table + [table[-1]] * (depth + 1 - len(table)) for table in tables]


P = TypeVar("P", bound=PartsConfig)


class PartsDrafter(Drafter[P]):
    """Keeps its parts' state in step, whichever of their drafts a round used."""

    def __init__(self, config: P, context: DraftContext) -> None:
        super().__init__(config, context)
        self.parts = [part.build(context, number) for number, part in enumerate(config.drafters)]
        needs = [part.needs for part in self.parts]
        hidden = tuple(sorted({layer for need in needs for layer in need.hidden}))
        self.needs = Needs(hidden, any(need.model for need in needs), rows=max(need.rows for need in needs))
        self.proposed: list[dict[int, Draft]] = [{} for _ in self.parts]

    def ask(self, number: int, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        """One part's drafts, none deeper than its own options say."""
        if not sequences:
            return []
        part = self.parts[number]
        limit = part.config.num_speculative_tokens
        drafts = part.propose(sequences, [min(budget, limit) for budget in budgets])
        self.proposed[number] = {sequence.id: draft for sequence, draft in zip(sequences, drafts)}
        return drafts

    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, result: Verification) -> None:
        """Every part sees its own draft, with as much of the accepted path as that held."""
        for part, proposed in zip(self.parts, self.proposed):
            own = [proposed.pop(sequence.id, Draft()) for sequence in sequences]
            seen = [_own_verdict(mine, draft, verdict) for mine, draft, verdict in zip(own, drafts, verdicts)]
            part.observe(sequences, own, seen, result)
            proposed.clear()

    def fork(self, source: RequestState, sequence: RequestState) -> None:
        for part, proposed in zip(self.parts, self.proposed):
            part.fork(source, sequence)
            if source.id in proposed:
                proposed[sequence.id] = proposed[source.id]

    def release(self, sequence: RequestState) -> None:
        for part, proposed in zip(self.parts, self.proposed):
            part.release(sequence)
            proposed.pop(sequence.id, None)

    def rewind(self, sequence: RequestState) -> None:
        for part in self.parts:
            part.rewind(sequence)

    def reusable(self, sequence: RequestState) -> int:
        return min(part.reusable(sequence) for part in self.parts)

    def cached_tokens(self, sequence: RequestState) -> list[int] | None:
        """Of the part that has most."""
        known = [tokens for part in self.parts if (tokens := part.cached_tokens(sequence)) is not None]
        return max(known, key=len) if known else None


def _own_verdict(own: Draft, draft: Draft, verdict: Verdict) -> Verdict:
    """``verdict`` on ``draft`` in terms of ``own``, another tree behind the same root."""
    path: list[int] = []
    for node in verdict.path:
        mine = own.child(path[-1] if path else -1, draft.tokens[node])
        if mine is None:
            break
        path.append(mine)
    return replace(verdict, path=path)


@dataclass(frozen=True)
class CascadeConfig(PartsConfig):
    drafters: tuple[Any, ...] = ({"method": "suffix"}, {"method": "draft_model"})
    """Options of each drafter, the first to be asked first; ``num_speculative_tokens`` is their default."""
    min_confidence: float = 0.5
    """How sure, from 0 to 1, a drafter other than the last must be of its draft."""
    limits: ClassVar = {"min_confidence": FRACTION}

    def nodes_by_depth(self) -> list[int]:
        return [max(nodes) for nodes in zip(*self.part_nodes())]


@drafters.register("cascade")
class Cascade(PartsDrafter[CascadeConfig]):
    name = "cascade"
    config_class = CascadeConfig

    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
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

    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
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


def merge(per_part: Sequence[Drafts]) -> list[Draft]:
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
            row = trial.q_row if trial.q_row == POINT_MASS else trial.q_row + offset
            indices[trial.node] = tree.add(draft.tokens[trial.node], indices[parent - 1], row)

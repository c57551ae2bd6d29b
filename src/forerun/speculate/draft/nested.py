"""Drafters made of other drafters: ``cascade`` asks them in order, ``merged`` joins their trees."""

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
from forerun.speculate.length.base import Parts
from forerun.speculate.verify import Verification


@dataclass(frozen=True)
class InnerConfig:
    """Method and options of a drafter inside another."""

    method: str
    config: DrafterConfig

    @classmethod
    def parse(cls, options: Mapping[str, Any] | InnerConfig, num_speculative_tokens: int) -> InnerConfig:
        """Parses ``{"method": ..., options}``; ``num_speculative_tokens`` is the default of that option."""
        if isinstance(options, InnerConfig):
            return options
        if not isinstance(options, Mapping) or "method" not in options:
            raise ConfigError(f"a drafter inside a drafter is a mapping like {{'method': 'suffix'}}, not {options!r}")
        own = {key: value for key, value in options.items() if key != "method"}
        config_class = drafters[options["method"]].config_class
        if "tree" not in own:
            own.setdefault("num_speculative_tokens", num_speculative_tokens)
        return cls(options["method"], config_class.from_dict(options["method"], own))

    def build(self, context: DraftContext, number: int = 0) -> Drafter[Any]:
        """Builds the drafter; a different ``number`` makes its draws independent of its siblings'."""
        return drafters[self.method].build(self.config, replace(context, stream=context.stream * 16 + number + 1))


@dataclass(frozen=True)
class CompositeConfig(DrafterConfig):
    """Options of drafters that combine several others."""

    drafters: tuple[Any, ...] = ({"method": "ngram"}, {"method": "draft_model"})
    """Options of each drafter, the first to be asked first; ``num_speculative_tokens`` is their default."""
    unsupported: ClassVar = dict.fromkeys(("tree", "draft_temperature"), "it is an option of the drafters inside")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.drafters, (list, tuple)) or not 2 <= len(self.drafters) <= 15:
            raise ConfigError("'drafters' must list the options of 2 to 15 drafters")
        inner = tuple(InnerConfig.parse(options, self.num_speculative_tokens) for options in self.drafters)
        object.__setattr__(self, "drafters", inner)
        object.__setattr__(self, "num_speculative_tokens", max(each.config.num_speculative_tokens for each in inner))

    @property
    def branches(self) -> bool:
        return any(inner.config.branches for inner in self.drafters)

    def inner_nodes(self) -> list[list[int]]:
        """``nodes_by_depth`` of every inner drafter, extended to this drafter's depth."""
        depth = self.num_speculative_tokens
        tables = [inner.config.nodes_by_depth() for inner in self.drafters]
        return [table + [table[-1]] * (depth + 1 - len(table)) for table in tables]


P = TypeVar("P", bound=CompositeConfig)


class CompositeDrafter(Drafter[P]):
    """Keeps the state of all inner drafters up to date, whichever of their drafts a round used."""

    def __init__(self, config: P, context: DraftContext) -> None:
        super().__init__(config, context)
        self.inner = [inner.build(context, number) for number, inner in enumerate(config.drafters)]
        needs = [drafter.needs for drafter in self.inner]
        hidden = tuple(sorted({layer for need in needs for layer in need.hidden}))
        self.needs = Needs(hidden, any(need.model for need in needs), rows=max(need.rows for need in needs))
        self.looks_up = any(drafter.looks_up for drafter in self.inner)
        self.can_skip = any(drafter.can_skip for drafter in self.inner)
        self.proposed: list[dict[int, Draft]] = [{} for _ in self.inner]

    def ask(self, number: int, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        """Drafts of one inner drafter, at most as deep as its own options say."""
        if not sequences:
            return []
        drafter = self.inner[number]
        limit = drafter.config.num_speculative_tokens
        drafts = drafter.propose(sequences, [min(budget, limit) for budget in budgets])
        self.proposed[number] = {sequence.id: draft for sequence, draft in zip(sequences, drafts)}
        return drafts

    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, result: Verification) -> None:
        """Every inner drafter sees its own draft, with the part of the accepted path that it contains."""
        for drafter, proposed in zip(self.inner, self.proposed):
            own = [proposed.get(sequence.id, Draft()) for sequence in sequences]
            drafter.observe(sequences, own, [_own_verdict(*each) for each in zip(own, drafts, verdicts)], result)
            proposed.clear()

    def fork(self, source: RequestState, sequence: RequestState) -> None:
        for drafter, proposed in zip(self.inner, self.proposed):
            drafter.fork(source, sequence)
            if source.id in proposed:
                proposed[sequence.id] = proposed[source.id]

    def release(self, sequence: RequestState) -> None:
        for drafter, proposed in zip(self.inner, self.proposed):
            drafter.release(sequence)
            proposed.pop(sequence.id, None)

    def rewind(self, sequence: RequestState) -> None:
        for drafter in self.inner:
            drafter.rewind(sequence)

    def backlog(self, sequence: RequestState) -> int:
        return sum(drafter.backlog(sequence) for drafter in self.inner)

    def cached_tokens(self, sequence: RequestState) -> list[int] | None:
        """The longest prefix of any inner drafter."""
        cached = [tokens for drafter in self.inner if (tokens := drafter.cached_tokens(sequence)) is not None]
        return max(cached, key=len, default=None)


def _own_verdict(own: Draft, draft: Draft, verdict: Verdict) -> Verdict:
    """The verdict on ``draft``, translated to the nodes of ``own``, another tree with the same root."""
    if not verdict.path:
        return verdict
    path: list[int] = []
    for node in verdict.path:
        child = own.child(path[-1] if path else -1, draft.tokens[node])
        if child is None:
            break
        path.append(child)
    return replace(verdict, path=path)


CONFIDENT = 0.5
"""The least confidence in a cascade, unless an option says so."""


@dataclass(frozen=True)
class CascadeConfig(CompositeConfig):
    drafters: tuple[Any, ...] = ({"method": "suffix"}, {"method": "draft_model"})
    """Options of each drafter, the first to be asked first; ``num_speculative_tokens`` is their default."""
    min_confidence: float | None = None
    """Confidence, from 0 to 1, that a drafter other than the last must have in its draft. None: what a look-up found
    is taken as far as it pays by measured prices where lengths are ``adaptive``; elsewhere ``CONFIDENT``."""
    limits: ClassVar = {"min_confidence": FRACTION}

    def nodes_by_depth(self) -> list[int]:
        return [max(nodes) for nodes in zip(*self.inner_nodes())]


@drafters.register("cascade")
class Cascade(CompositeDrafter[CascadeConfig]):
    """Asks drafters in order and takes the first draft with enough confidence."""

    name = "cascade"
    config_class = CascadeConfig

    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        chosen = [Draft() for _ in sequences]
        undecided = list(range(len(sequences)))
        last = len(self.inner) - 1
        for number, drafter in enumerate(self.inner):
            limits = {i: self._budget(sequences[i], drafter.name, budgets[i]) for i in undecided}
            asked = [i for i in undecided if limits[i]]
            drafts = self.ask(number, [sequences[i] for i in asked], [limits[i] for i in asked])
            for index, draft in zip(asked, drafts):
                draft.method = drafter.name
                if number < last:
                    draft = self._worth(sequences[index], draft)
                if len(draft) or not len(chosen[index]):
                    draft.shadow = draft.shadow or chosen[index].shadow
                    chosen[index] = draft
            undecided = [i for i in undecided if not len(chosen[i])]
        return chosen

    @staticmethod
    def _budget(sequence: RequestState, method: str, budget: int) -> int:
        return budget if sequence.depths is None else min(budget, sequence.depths.get(method, budget))

    def _worth(self, sequence: RequestState, draft: Draft) -> Draft:
        """The part of a draft that is verified; the next drafter is asked if that is nothing."""
        least = self.config.min_confidence
        if least is None and sequence.worth is not None and draft.evidence:
            return draft.cut(sequence.worth(draft))
        least = CONFIDENT if least is None else least
        return draft if draft.confidence is not None and draft.confidence >= least else Draft()

    def parts(self) -> Parts:
        """Look-ups first, then one drafter that pays for each token; other cascades are priced as a whole."""
        *first, last = self.inner
        if (
            all(drafter.has_evidence for drafter in first)
            and not last.has_evidence
            and not isinstance(last, CompositeDrafter)
        ):
            deepest = last.config.num_speculative_tokens
            return Parts(tuple(drafter.name for drafter in first), last.name, deepest)
        return super().parts()

    @classmethod
    def example(cls, target: Path, folder: Path) -> dict[str, Any]:
        return {"drafters": [{"method": "suffix"}, {"method": "draft_model", "model": str(target)}]}


@dataclass(frozen=True)
class MergedConfig(CompositeConfig):
    @property
    def branches(self) -> bool:
        return True

    def nodes_by_depth(self) -> list[int]:
        return [sum(nodes) for nodes in zip(*self.inner_nodes())]


@drafters.register("merged")
class Merged(CompositeDrafter[MergedConfig]):
    """Merges the drafts of several drafters into one tree."""

    name = "merged"
    config_class = MergedConfig

    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        per_drafter = [self.ask(number, sequences, budgets) for number in range(len(self.inner))]
        for index, sequence in enumerate(sequences):
            budget = sequence.draft_budget
            for drafts in reversed(per_drafter[1:]):  # a beam may have most of its group's nodes in every draft
                if budget is not None and sum(len(each[index]) for each in per_drafter) > budget:
                    drafts[index] = Draft()
        return merge(per_drafter)

    @classmethod
    def example(cls, target: Path, folder: Path) -> dict[str, Any]:
        return {"drafters": [{"method": "ngram"}, {"method": "draft_model", "model": str(target)}]}


def merge(per_drafter: Sequence[Drafts]) -> list[Draft]:
    """Merges the drafts of each sequence, ``per_drafter[drafter][sequence]``, into one tree. All trees share one q."""
    qs: list[torch.Tensor] = []
    first_row: dict[int, int] = {}
    num_rows = 0
    for q in (draft.q for drafts in per_drafter for draft in drafts):
        if q is not None and id(q) not in first_row:
            first_row[id(q)] = num_rows
            qs.append(q)
            num_rows += q.shape[0]
    merged_q = torch.cat(qs) if len(qs) > 1 else qs[0] if qs else None
    merged = []
    for drafts in zip(*per_drafter):
        tree = Draft(q=merged_q)
        for draft in drafts:
            offset = 0 if draft.q is None else first_row[id(draft.q)]
            nodes = {-1: -1}
            for parent, trials in enumerate(draft.trials, -1):
                for trial in trials:
                    row = trial.q_row if trial.q_row == POINT_MASS else trial.q_row + offset
                    nodes[trial.node] = tree.add(draft.tokens[trial.node], nodes[parent], row)
        merged.append(tree)
    return merged

"""Acceptance rules for token trees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from forerun.core.batch import Scores
from forerun.core.config import check_types
from forerun.core.tree import POINT_MASS, Draft
from forerun.speculate.accept.base import RatioRule, RuleConfig, rules
from forerun.speculate.accept.compare import Comparison, Trials, column, row_index, take

_TINY = 1e-30
"""The mass of q after earlier draws were taken out must be above this, or float32 cannot tell its shape."""


@dataclass(frozen=True)
class TreeRuleConfig(RuleConfig):
    replacement: bool = False
    """Draw siblings with replacement, so that one may repeat another."""

    def __post_init__(self) -> None:
        check_types(TreeRuleConfig, vars(self))


class Step(NamedTuple):
    """The trials of one rank, with the q [n, vocabulary] that each was drawn from, given the draws before it."""

    trials: list[int]
    rows: list[int]
    tokens: torch.Tensor
    q: torch.Tensor


class TreeRule(RatioRule):
    """Rules for trees whose siblings are drawn one after the other, with or without replacement."""

    config_class = TreeRuleConfig
    config: TreeRuleConfig

    @property
    def replacement(self) -> bool:  # type: ignore[override]
        return self.config.replacement

    def steps(self, compared: Comparison, chosen: Sequence[int]) -> Iterator[Step]:
        """Yields the chosen trials by rank.

        Without replacement, a drawn token is removed from its row of q. A trial is rejected unseen where float32 cannot
        tell what is left of q. That is lossless: earlier draws decide it, not the trial's own token.
        """
        trials = compared.trials
        by_rank: dict[int, list[int]] = {}
        for t in chosen:
            by_rank.setdefault(trials.rank[t], []).append(t)
        for rank in sorted(by_rank):
            members = by_rank[rank]
            q = compared.gather_q(members, compared.p)
            drawn = [] if self.replacement or rank == 0 else self._earlier_draws(trials, members)
            if drawn:
                q = q.clone()  # it may be the drafts' own
                q[[index for index, _ in drawn], [token for _, token in drawn]] = 0.0
                mass = q.sum(dim=1, keepdim=True)
                kept = [index for index, fraction in enumerate(mass[:, 0].tolist()) if fraction > _TINY]
                q, members = take(q.div_(mass), kept) if kept else q, [members[index] for index in kept]
            if members:
                tokens = column([trials.token[t] for t in members], q)
                yield Step(members, [trials.row[t] for t in members], tokens, q)

    @staticmethod
    def reject(
        compared: Comparison, step: Step, factor: torch.Tensor | float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Replaces the trials' rows p by norm(max(0, factor * p - q)).

        Returns min(1, factor * p / q) of each trial's token, and the mass before normalising, [n, 1] each.
        """
        at = take(compared.residual, step.rows).gather(1, step.tokens)
        chance = (factor * at / step.q.gather(1, step.tokens)).clamp_(max=1.0)
        left, mass = compared.left(step.rows, step.q, factor)
        compared.residual[row_index(step.rows)] = left.div_(left.sum(dim=1, keepdim=True))
        return chance, mass

    @staticmethod
    def _earlier_draws(trials: Trials, members: Sequence[int]) -> list[tuple[int, int]]:
        """(index in ``members``, token) of every earlier draw from the same row of q under the same parent."""
        result = []
        for index, t in enumerate(members):
            if trials.q_row[t] != POINT_MASS:
                for earlier in range(t - trials.rank[t], t):
                    if trials.q_row[earlier] == trials.q_row[t]:
                        result.append((index, trials.token[earlier]))
        return result


@rules.register("recursive")
class Recursive(TreeRule):
    """Recursive rejection sampling (SpecInfer, arXiv 2305.09781). Lossless.

    From the root, a child x drawn from q is followed with probability min(1, p(x) / q(x)). If it is rejected, p becomes
    norm(max(0, p - q)) for the next child, and for the emitted token after the last one.
    """

    name = "recursive"

    def decide(self, compared: Comparison) -> list[float]:
        accept = compared.p.new_zeros(len(compared.trials.row), 1)
        for step in self.steps(compared, range(len(accept))):
            accept[row_index(step.trials)], _ = self.reject(compared, step)
        chances: list[float] = accept[:, 0].tolist()
        return chances


@rules.register("traversal")
class Traversal(TreeRule):
    """Visits a node v with a budget a, the probability that its path is to be kept: 1 at the root. With P = p(.|v):

    1. for each child c in the order drawn, from q: visit c with min(1, a P(c) / q(c)); if that accepts, end; else
       with s = sum max(0, a P - q): P becomes max(0, a P - q) / s and a becomes s / (s + 1 - a);
    2. with probability a, accept the path to v and emit a draw of P.

    Lossless, with and without replacement. A rejected token's budget goes to its siblings and its parent's residual, so
    at least as much is kept as from the root down. A rejected token has no mass left in P: a repeated draw fails.
    """

    name = "traversal"

    def decide(self, compared: Comparison) -> list[float]:
        """Budgets do not depend on the tests, so a level of all trees is computed at once."""
        trials, p = compared.trials, compared.p
        budget = p.new_zeros(len(p), 1)
        budget[compared.scores.first] = 1.0
        accept = p.new_zeros(len(trials.row), 1)
        for level in self._levels(compared.scores, trials):
            for step in self.steps(compared, level):
                a = take(budget, step.rows)
                chance, mass = self.reject(compared, step, a)
                accept[row_index(step.trials)] = chance.nan_to_num_(0.0)
                budget[row_index(step.rows)] = torch.where(a < 1.0, mass / (mass + 1.0 - a), 1.0)
                nodes = [t for t in step.trials if self._is_new(trials, t)]
                if nodes:
                    budget[row_index([trials.below[t] for t in nodes])] = accept[row_index(nodes)]
        nodes = [t for t in range(len(trials.row)) if self._is_new(trials, t)]
        if nodes:
            accept[row_index(nodes)] = budget[row_index([trials.below[t] for t in nodes])]
        chances: list[float] = accept[:, 0].tolist()
        return chances

    @staticmethod
    def _is_new(trials: Trials, t: int) -> bool:
        """Whether no earlier trial under the same parent drew the same token."""
        return trials.token[t] not in trials.token[t - trials.rank[t] : t]

    @staticmethod
    def _levels(scores: Scores, trials: Trials) -> list[list[int]]:
        """Trials by the depth of their parent."""
        levels: dict[int, list[int]] = {}
        depths = [draft.depths() for draft in scores.drafts]
        for t, (index, parent) in enumerate(zip(trials.index, trials.parent)):
            levels.setdefault(depths[index][parent] if parent >= 0 else 0, []).append(t)
        return [levels[depth] for depth in sorted(levels)]

    def walk(self, draft: Draft, passed: list[list[bool]]) -> list[int]:
        """Leaves first; a trial's node is tested after everything below it."""

        def visit(parent: int) -> int | None:
            for trial, good in zip(draft.trials[parent + 1], passed[parent + 1]):
                result = visit(trial.node)
                if result is not None:
                    return result
                if good:
                    return trial.node
            return None

        result = visit(-1) if draft.trials else None
        return draft.path(result) if result is not None else []

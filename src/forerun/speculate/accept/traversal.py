"""``traversal``: verification from the leaves to the root (Weng et al., arXiv 2505.12398)."""

from __future__ import annotations

import torch

from forerun.core.scores import Scores
from forerun.core.tree import Draft
from forerun.speculate.accept.base import rules
from forerun.speculate.accept.compare import Comparison, Trials, slots, take
from forerun.speculate.accept.recursive import TreeRule


@rules.register("traversal")
class Traversal(TreeRule):
    """Visit a node v with a budget a, the probability that its path is wanted: 1 at the root. With P = p(.|v):

    1. for each child c in the order drawn, from q: visit c with min(1, a P(c) / q(c)); if that accepts, end; else
       with s = sum max(0, a P - q): P becomes max(0, a P - q) / s and a becomes s / (s + 1 - a);
    2. with probability a, accept the path to v and emit a draw of P.

    Lossless, with and without replacement. A rejected token's budget goes to its siblings and its parent's residual,
    so that at least as much is kept as from the root down. A repeated draw of one token is visited as a leaf: its
    subtree has been looked at before.
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
                accept[slots(step.trials)] = chance.nan_to_num_(0.0)
                budget[slots(step.rows)] = torch.where(a < 1.0, mass / (mass + 1.0 - a), 1.0)
                news = [(t, trials.below[t]) for t in step.trials if self._first(trials, t)]
                if news:
                    budget[slots([row for _, row in news])] = accept[slots([t for t, _ in news])]
        ends = [t for t in range(len(trials.row)) if self._first(trials, t)]
        if ends:
            accept[slots(ends)] = budget[slots([trials.below[t] for t in ends])]
        chances: list[float] = accept[:, 0].tolist()
        return chances

    @staticmethod
    def _first(trials: Trials, t: int) -> bool:
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

    def walk(self, draft: Draft, passed: list[list[bool]]) -> tuple[list[int], bool]:
        """Leaves first; a trial's node is tested after everything below it."""
        met: set[int] = set()

        def visit(parent: int) -> tuple[int, bool] | None:
            for trial, good in zip(draft.trials[parent + 1], passed[parent + 1]):
                again = trial.node in met
                if not again:
                    met.add(trial.node)
                    result = visit(trial.node)
                    if result is not None:
                        return result
                if good:
                    return trial.node, again
            return None

        result = visit(-1) if draft.trials else None
        return (draft.path(result[0]), result[1]) if result is not None else ([], False)

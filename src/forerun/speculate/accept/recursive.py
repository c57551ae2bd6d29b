"""``recursive``: multi-round rejection down a tree (SpecInfer, arXiv 2305.09781; Stratos, "Speculative Decoding",
section 2; without replacement: Sequoia, arXiv 2402.12374)."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from forerun.core.errors import ConfigError
from forerun.core.scores import Scores
from forerun.core.tree import POINT_MASS
from forerun.speculate.accept.base import Decision, RatioRule, RuleConfig, Trials, column, gather_q, rules, slots, take
from forerun.speculate.accept.left import reduce

_TINY = 1e-30
"""What is left of q after earlier draws were taken out must be above this for float32 to hold its shape."""


@dataclass(frozen=True)
class TreeRuleConfig(RuleConfig):
    replacement: bool = False
    """Siblings are drawn with replacement, so that one may repeat another."""

    def __post_init__(self) -> None:
        if not isinstance(self.replacement, bool):
            raise ConfigError(f"replacement must be true or false, not {self.replacement!r}")


@dataclass(slots=True)
class Turn:
    """The trials that are the rank-th of their parents, with the q that each was drawn from given the draws before
    it. ``valid`` [n, 1] is False where float32 cannot tell that q; such a trial counts as rejected unseen, which is
    lossless, since the draws before it decide so and its own token does not."""

    trials: list[int]
    rows: list[int]
    tokens: torch.Tensor
    q: torch.Tensor
    valid: torch.Tensor | None


class TreeRule(RatioRule):
    """Rules for trees whose siblings are drawn one after the other, with or without replacement."""

    config_class = TreeRuleConfig
    config: TreeRuleConfig

    @property
    def replacement(self) -> bool:  # type: ignore[override]
        return self.config.replacement

    def turns(self, p: torch.Tensor, scores: Scores, trials: Trials, chosen: Seq[int]) -> Iterator[Turn]:
        """The chosen trials by rank. Without replacement, a token leaves its row of q once it is drawn."""
        by_rank: dict[int, list[int]] = {}
        for t in chosen:
            by_rank.setdefault(trials.rank[t], []).append(t)
        for rank in sorted(by_rank):
            members = by_rank[rank]
            q, valid = gather_q(scores, trials, members, p), None
            gone = [] if self.replacement or rank == 0 else self._earlier(trials, members)
            if gone:
                if q._base is not None or q is scores.drafts[trials.index[members[0]]].q:
                    q = q.clone()
                q[[place for place, _ in gone], [token for _, token in gone]] = 0.0
                mass = q.sum(dim=1, keepdim=True)
                valid = mass > _TINY
                q = q.div_(mass)
            tokens = column([trials.token[t] for t in members], p)
            yield Turn(members, [trials.row[t] for t in members], tokens, q, valid)

    @staticmethod
    def _earlier(trials: Trials, members: Seq[int]) -> list[tuple[int, int]]:
        """(place in ``members``, token) of every earlier draw from the same row of q under the same parent."""
        found = []
        for place, t in enumerate(members):
            if trials.q_row[t] != POINT_MASS:
                for earlier in range(t - trials.rank[t], t):
                    if trials.q_row[earlier] == trials.q_row[t]:
                        found.append((place, trials.token[earlier]))
        return found


@rules.register("recursive")
class Recursive(TreeRule):
    """From the root: a child x is followed with probability min(1, p(x) / q(x)), q being what x was drawn from; else
    p becomes norm(max(0, p - q)) for the next child, and for the emitted token after the last. Lossless."""

    name = "recursive"

    def decide(self, p: torch.Tensor, scores: Scores, trials: Trials) -> Decision:
        residual = p.clone()
        accept = p.new_zeros(len(trials.row))
        for turn in self.turns(p, scores, trials, range(len(trials.row))):
            at = take(residual, turn.rows)
            chance = at.gather(1, turn.tokens) / turn.q.gather(1, turn.tokens)
            left, _ = reduce(at, turn.q)
            left /= left.sum(dim=1, keepdim=True)
            if turn.valid is not None:
                chance = chance.where(turn.valid, 0.0)
                left = left.where(turn.valid, at)
            accept[slots(turn.trials)] = chance.clamp_(max=1.0)[:, 0]
            residual[slots(turn.rows)] = left
        return Decision(accept, residual)

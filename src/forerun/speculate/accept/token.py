"""``token``: Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1: accept x ~ q with probability min(1, p/q), else
emit a draw of norm(max(0, p - q))."""

from __future__ import annotations

import torch

from forerun.core.scores import Scores
from forerun.speculate.accept.base import Decision, RatioRule, Trials, column, gather_q, rules, take
from forerun.speculate.accept.left import reduce_rows


@rules.register("token")
class Token(RatioRule):
    """Token-level rejection sampling on chains. Lossless; the same seed may give other tokens than plain decoding."""

    name = "token"
    trees = False

    def decide(self, p: torch.Tensor, scores: Scores, trials: Trials) -> Decision:
        if not trials.row:
            return Decision(p.new_empty(0), p)
        q = gather_q(scores, trials, range(len(trials.row)), p)
        tokens = column(trials.token, p)
        chance = self.chance(take(p, trials.row).gather(1, tokens), q.gather(1, tokens))
        residual, _, shared = reduce_rows(p, q, trials.row)
        return Decision(chance[:, 0], residual, shared)

    def chance(self, p_x: torch.Tensor, q_x: torch.Tensor) -> torch.Tensor:
        """The probability that drafted tokens of probabilities ``p_x`` and ``q_x`` are kept."""
        return (p_x / q_x).clamp_(max=1.0)

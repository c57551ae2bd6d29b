"""``token``: Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1: accept x ~ q with probability min(1, p/q), else
emit a draw of norm(max(0, p - q))."""

from __future__ import annotations

import torch

from forerun.core.scores import Scores
from forerun.speculate.accept.base import Decision, RatioRule, Trials, column, gather_q, rules, slots, take


@rules.register("token")
class Token(RatioRule):
    """Token-level rejection sampling on chains. Lossless; the same seed may give other tokens than plain decoding."""

    name = "token"
    trees = False

    def decide(self, p: torch.Tensor, scores: Scores, trials: Trials) -> Decision:
        residual = p.clone()
        if not trials.row:
            return Decision(p.new_empty(0), residual)
        q = gather_q(scores, trials, range(len(trials.row)), p)
        tokens = column(trials.token, p)
        at = take(p, trials.row)
        residual[slots(trials.row)] = reduce(at, q)
        return Decision(self.chance(at.gather(1, tokens), q.gather(1, tokens))[:, 0], residual)

    def chance(self, p_x: torch.Tensor, q_x: torch.Tensor) -> torch.Tensor:
        """The probability that drafted tokens of probabilities ``p_x`` and ``q_x`` are kept."""
        return (p_x / q_x).clamp_(max=1.0)


def reduce(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """max(0, p - q) for each row, unnormalised; p itself where nothing is left but rounding put a draw there."""
    left = (p - q).clamp_(min=0.0)
    mass = left.sum(dim=1, keepdim=True)
    return torch.addcmul(left, p, (mass <= 0.0).to(p.dtype), out=left)

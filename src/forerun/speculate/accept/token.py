"""``token``: Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1: accept x ~ q with probability min(1, p/q), else
emit a draw of norm(max(0, p - q))."""

from __future__ import annotations

import torch

from forerun.core.scores import Scores
from forerun.speculate.accept.base import Decision, RatioRule, Trials, gather_q, rules


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
        tokens = torch.tensor(trials.token, device=p.device)[:, None]
        at = p[trials.row]
        ratio = at.gather(1, tokens) / q.gather(1, tokens)
        residual[trials.row] = (at - q).clamp_(min=0.0)
        return Decision(ratio[:, 0].clamp(max=1.0), residual)

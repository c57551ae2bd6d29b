"""``token``: Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1: accept x ~ q with probability min(1, p/q), else
emit a draw of norm(max(0, p - q))."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from forerun.core.scores import Scores
from forerun.sampling.compiled import Compiled, Weighed
from forerun.sampling.warp import Row
from forerun.speculate.accept.base import Decision, RatioRule, Trials, column, gather_q, rules, take
from forerun.speculate.accept.left import reduce_rows, weigh_chains


@rules.register("token")
class Token(RatioRule):
    """Token-level rejection sampling on chains. Lossless; the same seed may give other tokens than plain decoding."""

    name = "token"
    trees = False
    lenience = 1.0
    """Times q in every comparison of p with it."""

    def decide(self, p: torch.Tensor, scores: Scores, trials: Trials) -> Decision:
        if not trials.row:
            return Decision(p.new_empty(0), p)
        q = gather_q(scores, trials, range(len(trials.row)), p)
        tokens = column(trials.token, p)
        chance = (take(p, trials.row).gather(1, tokens) / (q.gather(1, tokens) * self.lenience)).clamp_(max=1.0)
        residual, _ = reduce_rows(p, q, trials.row)
        return Decision(chance[:, 0], residual)

    def weigh(self, scores: Scores, trials: Trials, rows: Seq[Row], compiled: Compiled) -> tuple[Weighed, list[float]]:
        weighed = weigh_chains(scores, trials, rows, compiled, lenience=self.lenience)
        return weighed, weighed.weights

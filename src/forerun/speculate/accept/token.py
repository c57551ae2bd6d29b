"""``token``: Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1: accept x ~ q with probability min(1, p/q), else
emit a draw of norm(max(0, p - q))."""

from __future__ import annotations

from forerun.speculate.accept.base import RatioRule, rules
from forerun.speculate.accept.compare import Comparison


@rules.register("token")
class Token(RatioRule):
    """Token-level rejection sampling on chains. Lossless; the same seed may give other tokens than plain decoding."""

    name = "token"
    trees = False
    lenience = 1.0
    """Times q in every comparison of p with it."""

    def decide(self, compared: Comparison) -> list[float]:
        weights, _ = compared.chains(lenience=self.lenience)
        return weights

"""Rules that judge a chain token by token, and the rule that judges it as a block."""

from __future__ import annotations

import math
from dataclasses import dataclass

from forerun.core.batch import Scores
from forerun.core.config import POSITIVE_FRACTION, check_within
from forerun.core.tree import Draft, Verdict
from forerun.sampling.draw import Sampler
from forerun.speculate.accept.base import RatioRule, Rule, RuleConfig, follow_samples, rules
from forerun.speculate.accept.compare import Comparison, column, compare, take


@rules.register("token")
class Token(RatioRule):
    """Token-level rejection sampling on chains (Leviathan et al. 2023). Lossless, but a seed's tokens change."""

    name = "token"
    trees = False
    lenience = 1.0
    """Multiplies q in the comparison with p."""

    def decide(self, compared: Comparison) -> list[float]:
        weights, _ = compared.chains(lenience=self.lenience)
        return weights


@rules.register("coupled")
class Coupled(Rule):
    """Keeps a drafted token if the target, sampled with the noise of its position, chooses it."""

    name = "coupled"
    identity = True
    needs_q = False

    def accept(self, scores: Scores, sampler: Sampler) -> list[Verdict]:
        return follow_samples(compare(scores, sampler))


@dataclass(frozen=True)
class LenientConfig(RuleConfig):
    lenience: float = 0.5
    """l in (0, 1]: no token becomes more likely than 1 / l times what the target gives it; 1 is lossless."""

    def __post_init__(self) -> None:
        check_within(self, {"lenience": POSITIVE_FRACTION})


@rules.register("lenient")
class Lenient(Token):
    """Token-level rejection sampling that multiplies q by the lenience l before the comparison.

    A drafted x is kept with probability min(1, p(x) / (l q(x))); a rejected one is replaced by a draw of
    norm(max(0, p - q)), as without lenience. The output's distribution is
    ``forerun.theory.lenient_token_distribution``: no token is emitted with a probability above p(x) / l, and the total
    variation from p is sum min(p / l, q) - sum min(p, q). There is no lower bound: a token that the drafter never
    proposes can lose most of its probability. At temperature 0 a drafted token is kept if p(x) >= l max p, p being the
    distribution at temperature 1 (the paper prints <=, which would keep the unlikely tokens and drop the best one);
    otherwise the argmax is emitted.
    """

    name = "lenient"
    lossless = False
    config_class = LenientConfig
    config: LenientConfig

    @property
    def lenience(self) -> float:  # type: ignore[override]
        return self.config.lenience

    def decide(self, compared: Comparison) -> list[float]:
        accept = super().decide(compared)
        trials, rows = compared.trials, compared.rows
        greedy = [t for t, row in enumerate(trials.row) if rows[row].effective_temperature == 0.0]
        if greedy:
            logits = take(compared.scores.warped, [trials.row[t] for t in greedy])
            drafted = logits.gather(1, column([trials.token[t] for t in greedy], logits))[:, 0].tolist()
            for t, value in zip(greedy, drafted):
                accept[t] = float(value >= compared.tops[trials.row[t]] + math.log(self.lenience))
        return accept


@rules.register("block")
class Block(RatioRule):
    """Verifies a chain x_1 .. x_n as one block. Lossless, and the best of all rules that see one path.

    Let w_0 = 1, w_i = min(1, w_(i-1) p(x_i | x_<i) / q(x_i | x_<i)) and S_i = sum_x max(0, w_i p(x | x_<=i) - q(x |
    x_<=i)). The test of prefix i < n passes with probability S_i / (S_i + 1 - w_i), that of n with w_n. All tests are
    made, and the longest prefix that passes is kept. The next token is drawn from norm(max(0, w_i p - q)), after x_n
    from p.
    """

    name = "block"
    trees = False

    def decide(self, compared: Comparison) -> list[float]:
        weights, left = compared.chains(linked=True)
        follows = [parent >= 0 for parent in compared.trials.parent]
        accept = []
        for t, weight in enumerate(weights):
            if t + 1 < len(follows) and follows[t + 1]:
                mass = left[t + 1]  # S of the prefix: the mass left where the next token was drafted
                total = mass + 1.0 - weight
                accept.append(mass / total if total > 0.0 else 1.0)
            else:
                accept.append(weight)
        return accept

    def walk(self, draft: Draft, passed: list[list[bool]]) -> list[int]:
        """The longest prefix that passes its own test."""
        length = max((i + 1 for i, results in enumerate(passed) if results and results[0]), default=0)
        return list(range(length))

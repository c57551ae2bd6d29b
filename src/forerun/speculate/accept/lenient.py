"""``lenient``: Leviathan et al. 2023 (arXiv 2211.17192), appendix A.5. Faster, and no longer lossless."""

from __future__ import annotations

import math
from dataclasses import dataclass

from forerun.core.errors import ConfigError
from forerun.speculate.accept.base import RuleConfig, rules
from forerun.speculate.accept.compare import Comparison, column, take
from forerun.speculate.accept.token import Token


@dataclass(frozen=True)
class LenientConfig(RuleConfig):
    lenience: float = 0.5
    """l in (0, 1]: no token becomes more likely than 1 / l times what the target gives it; 1 is lossless."""

    def __post_init__(self) -> None:
        value = self.lenience
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not good or not 0 < value <= 1:
            raise ConfigError(f"lenience must be a number above 0 and at most 1, not {value!r}")


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

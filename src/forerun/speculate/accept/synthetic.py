"""Synthetic acceptance: drafted positions are accepted at given rates, whatever their tokens.

It measures speed at a chosen acceptance rate, on random weights for example. The text is not the target's: never
lossless, and marked ``synthetic`` wherever results are shown. Keys and meaning are vLLM's: rates are unconditional, so
0.8 per token is [0.8, 0.64, 0.512, ...]. The name of a profile may stand for rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forerun.core.batch import Scores
from forerun.core.config import FRACTION, Within
from forerun.core.errors import ConfigError
from forerun.core.tree import Draft, Verdict
from forerun.sampling.draw import Sampler
from forerun.sampling.noise import ACCEPT, fold, uniform
from forerun.speculate.accept.base import Rule, valid_prefix
from forerun.speculate.accept.compare import compare
from forerun.speculate.names import PROFILES

RATES, LENGTH = "synthetic_acceptance_rates", "synthetic_acceptance_length"
KEYS = (RATES, LENGTH)


def profile(name: str, depth: int) -> list[float]:
    """The unconditional rates of a profile for ``depth`` positions. After the published ones, rates fall by the ratio
    of the last two. Raises ConfigError."""
    if name not in PROFILES:
        raise ConfigError(f"unknown synthetic profile {name!r}: choose one of {', '.join(PROFILES)}")
    rates = list(PROFILES[name])
    ratio = rates[-1] / rates[-2]
    while len(rates) < depth:
        rates.append(rates[-1] * ratio)
    return rates[:depth]


def take_rates(options: dict[str, Any], depth: int) -> tuple[float, ...] | None:
    """Removes the synthetic keys from ``options``. Returns the rate of each of ``depth`` positions; None without keys.

    ``synthetic_acceptance_length`` is the mean number of tokens per round, the target's own included. It is reached
    with the least variance: the first positions are always accepted, then one by chance. Raises ConfigError.
    """
    rates, length = options.pop(RATES, None), options.pop(LENGTH, None)
    if rates is None and length is None:
        return None
    if rates is not None and length is not None:
        raise ConfigError(f"{RATES} conflicts with {LENGTH}: remove one")
    if isinstance(rates, str):
        rates = profile(rates, depth)
    if rates is None:
        if not Within(least=1, most=depth + 1).permits(length):
            raise ConfigError(f"{LENGTH} must be from 1 to num_speculative_tokens + 1 ({depth + 1}), not {length!r}")
        return tuple(min(1.0, max(0.0, length - 1.0 - position)) for position in range(depth))
    good = isinstance(rates, (list, tuple)) and all(map(FRACTION.permits, rates))
    if not good or list(rates) != sorted(rates, reverse=True):
        raise ConfigError(f"{RATES} must list numbers from 0 to 1, none above the one before, not {rates!r}")
    if len(rates) != depth:
        raise ConfigError(f"{RATES} must have one entry per drafted position: {depth}, not {len(rates)}")
    return tuple(float(rate) for rate in rates)


class Synthetic(Rule):
    """Runs another rule for its cost, and replaces what it decided: from the root, the first child is followed at the
    position's rate. The next token is sampled from the target after the kept path."""

    name = "synthetic"
    identity = False
    lossless = False

    def __init__(self, inner: Rule, rates: Sequence[float]) -> None:
        super().__init__()
        self.inner = inner
        self.rates = tuple(rates)
        self.needs_q = inner.needs_q  # type: ignore[misc]
        self.trees = inner.trees  # type: ignore[misc]
        self.replacement = inner.replacement

    def accept(self, scores: Scores, sampler: Sampler) -> list[Verdict]:
        self.inner.accept(scores, sampler)  # for its cost
        compared = compare(scores, sampler)
        tokens, verdicts = compared.pick(), []
        for index, (sequence, draft) in enumerate(zip(scores.sequences, scores.drafts)):
            path, chances = self._walk(draft, fold(sequence.seed, ACCEPT, len(sequence.tokens)))
            rows = [scores.row(index, node) for node in [-1, *path]]
            good, error = valid_prefix([compared.tops[row] for row in rows])
            verdicts.append(Verdict(path[:good], tokens[rows[good]], error, len(chances), sum(chances)))
        return verdicts

    def _walk(self, draft: Draft, key: int) -> tuple[list[int], list[float]]:
        """A path accepted at the rates, and the chance of every test, which ``overlap`` sums in place of min(p, q)."""
        path: list[int] = []
        chances = []
        before = 1.0
        for depth, rate in enumerate(self.rates):
            child = next(iter(draft.children(path[-1] if path else -1).values()), None)
            if child is None:
                break
            chances.append(rate / before if before > 0 else 0.0)
            if uniform(fold(key, depth)) >= chances[-1]:
                break
            path.append(child)
            before = rate
        return path, chances

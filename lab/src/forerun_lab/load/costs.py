"""What rounds cost and bring, by how many requests decode: measured points, and which way of drafting pays."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from forerun.core.errors import ConfigError, one_line, shown
from forerun.engine.config import NONE
from forerun.speculate.length.adaptive import Adaptive


class LoadCurve:
    """Seconds by a count: straight lines between measured ``points``, and beyond the last ones as between them. More
    never costs less: a dearer point before a cheaper one was disturbed."""

    def __init__(self, points: Mapping[int, float]) -> None:
        least, kept = inf, {}
        for count in sorted(points, reverse=True):
            least = kept[count] = min(least, points[count])
        self.points = dict(sorted(kept.items()))
        self._counts = list(self.points)

    def __call__(self, count: float) -> float:
        known = self._counts
        if count <= known[0] or len(known) == 1:
            return self.points[known[0]]
        right = min(bisect_left(known, count), len(known) - 1)
        low, high = known[right - 1], known[right]
        slope = (self.points[high] - self.points[low]) / (high - low)
        return self.points[low] + slope * (count - low)


@dataclass(frozen=True)
class Way:
    """A way to decode: ``method`` with ``k`` drafted tokens, or plainly with 0: a round's ``seconds`` by the requests
    that decode, and the ``tokens`` that each of them gets, at the mean; ``spread`` are those of single requests, the
    fewest first, where they differ."""

    method: str
    k: int
    seconds: LoadCurve
    tokens: float
    spread: Sequence[float] = ()

    def brings(self, quantile: float) -> float:
        """Tokens that a round brings a request which does better than a share ``quantile`` of all, from 0 to below
        1."""
        return self.spread[int(quantile * len(self.spread))] if self.spread else self.tokens


@dataclass(frozen=True)
class LoadCosts:
    """A replica's, in seconds. ``ways[0]`` is plain decoding. ``prompt`` is a round by the prompt tokens that it reads
    and nothing else, ``deep`` what each of these costs more for each token before it, ``outside`` what a request
    spends on its way to an engine and back, and ``telling`` what a round takes longer for each request that gets tokens
    in it, as these leave the engine."""

    ways: Sequence[Way]
    prompt: LoadCurve
    deep: float = 0.0
    outside: float = 0.0
    telling: float = 0.0
    _best: dict[int, Way] = field(default_factory=dict, init=False, repr=False, compare=False)

    def best(self, decoding: int) -> Way:
        """The way with the most tokens a second where so many requests decode: a draft must promise what ``adaptive``
        asks of one."""
        result = self._best.get(decoding)
        if result is None:
            plain, *drafts = self.ways
            result, most = plain, Adaptive.MARGIN * plain.tokens / plain.seconds(decoding)
            for way in drafts:
                speed = way.tokens / way.seconds(decoding)
                if speed > most:
                    result, most = way, speed
            self._best[decoding] = result
        return result

    def round(self, way: Way, decoding: int, prompt_tokens: int, depth: float = 0.0) -> float:
        """Seconds of a round in which ``decoding`` requests decode and prompts are read, ``depth`` tokens into them at
        the mean. Beside decoding a prompt's token costs what one more row does."""
        deep = self.deep * prompt_tokens * depth
        if not decoding:
            return self.prompt(prompt_tokens) + deep
        decoded = way.seconds(decoding) + self.telling * decoding
        if not prompt_tokens:
            return decoded
        rows = decoding * (1 + way.k)
        return decoded + self.prompt(rows + prompt_tokens) - self.prompt(rows) + deep

    def describe(self) -> dict[str, Any]:
        ways = [
            {
                "method": way.method,
                "k": way.k,
                "tokens_per_round": way.tokens,
                "spread": list(way.spread),
                "seconds": way.seconds.points,
            }
            for way in self.ways
        ]
        counts = list(self.ways[0].seconds.points)
        switched = {count: _name(self.best(count)) for count in counts}
        reported: dict[str, Any] = {"ways": ways, "switched": switched, "prompt_seconds": self.prompt.points}
        return reported | {"deep": self.deep, "outside": self.outside, "telling": self.telling}

    @classmethod
    def from_report(cls, result: Mapping[str, Any]) -> LoadCosts:
        """From what ``describe`` gave, JSON or not. Raises ConfigError for anything else."""
        try:
            ways = [_way(way) for way in result["ways"]]
            added = {name: _least(result[name]) for name in ("deep", "outside", "telling")}
            made = cls(ways, _curve(result["prompt_seconds"]), **added)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(f"these are not the costs of a plan: {one_line(error)}") from None
        if not ways or ways[0].k:
            raise ConfigError("these are not the costs of a plan: plain decoding is not among them")
        return made


def _way(reported: Mapping[str, Any]) -> Way:
    k, spread = _count(reported["k"], least=0), reported.get("spread", [])
    if not isinstance(spread, list):
        raise ConfigError(f"spread must be a list of tokens, not {shown(spread)}")
    for tokens in (reported["tokens_per_round"], *spread):
        if not 1 <= float(tokens) <= 1 + k:
            raise ConfigError(f"{shown(tokens)} is no number of tokens that a round with {k} drafted ones brings")
    tokens = float(reported["tokens_per_round"])
    return Way(str(reported["method"]), k, _curve(reported["seconds"]), tokens, sorted(map(float, spread)))


def _curve(points: Mapping[Any, Any]) -> LoadCurve:
    if not points:
        raise ConfigError("a curve has no points")
    return LoadCurve({_count(count): _positive(seconds) for count, seconds in points.items()})


def _count(value: Any, least: int = 1) -> int:
    if not least <= int(value) <= 1 << 40:
        raise ConfigError(f"{shown(value)} is no number of requests or tokens")
    return int(value)


def _positive(value: Any) -> float:
    if not 0 < float(value) < inf:
        raise ConfigError(f"{shown(value)} is no time")
    return float(value)


def _least(value: Any) -> float:
    if not 0 <= float(value) < inf:
        raise ConfigError(f"{shown(value)} is no time")
    return float(value)


def _name(way: Way) -> str:
    return f"{way.method} {way.k}" if way.k else NONE

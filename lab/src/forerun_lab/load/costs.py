"""Costs and tokens of a replica's rounds by the number of decoding requests, and the fastest draft length for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from forerun.core.errors import ConfigError, one_line, shown
from forerun.engine.config import NONE
from forerun.speculate.length.adaptive import Adaptive
from forerun.speculate.length.prices import Curve


@dataclass(frozen=True)
class Way:
    """A drafter ``method`` with ``k`` drafted tokens; k = 0 is plain decoding.

    A round takes ``seconds`` by the number of decoding requests and gives each of them ``tokens`` on average.
    ``spread`` has the tokens per round of single requests, ascending, if they differ."""

    method: str
    k: int
    seconds: Curve
    tokens: float
    spread: Sequence[float] = ()

    def brings(self, quantile: float) -> float:
        """Tokens per round of the request at ``quantile``, from 0 to below 1, of all requests."""
        return self.spread[int(quantile * len(self.spread))] if self.spread else self.tokens


@dataclass(frozen=True)
class LoadCosts:
    """A replica's costs in seconds.

    ``ways[0]`` is plain decoding. ``prompt`` is a prefill round by its tokens; each of them costs ``deep`` more for
    each token before it. A request spends ``outside`` on its way to the engine and back. Sending tokens adds
    ``request_overhead`` to a round for each request that gets some."""

    ways: Sequence[Way]
    prompt: Curve
    deep: float = 0.0
    outside: float = 0.0
    request_overhead: float = 0.0
    _best: dict[int, Way] = field(default_factory=dict, init=False, repr=False, compare=False)

    def best(self, decoding: int) -> Way:
        """The way with the most tokens per second for ``decoding`` requests; drafts must gain as much as ``adaptive``
        requires."""
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
        """Seconds of a round with ``decoding`` requests and ``prompt_tokens`` of prefill, which have ``depth`` tokens
        before them on average. Beside decoding, a prompt token costs as much as one more row."""
        deep = self.deep * prompt_tokens * depth
        if not decoding:
            return self.prompt(prompt_tokens) + deep
        decoded = way.seconds(decoding) + self.request_overhead * decoding
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
        return reported | {"deep": self.deep, "outside": self.outside, "request_overhead": self.request_overhead}

    @classmethod
    def from_report(cls, result: Mapping[str, Any]) -> LoadCosts:
        """The inverse of ``describe``, also from JSON. Raises ConfigError for anything else."""
        try:
            ways = [_way(way) for way in result["ways"]]
            added = {name: _least(result[name]) for name in ("deep", "outside", "request_overhead")}
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


def _curve(points: Mapping[Any, Any]) -> Curve:
    if not points:
        raise ConfigError("a curve has no points")
    return Curve({_count(count): _positive(seconds) for count, seconds in points.items()})


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

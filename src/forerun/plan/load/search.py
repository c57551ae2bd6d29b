"""The fewest replicas that keep a promise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from math import isfinite

from forerun.core.errors import ConfigError
from forerun.plan.load.fleet import Served

MOST = 10_000
"""Replicas that are considered."""


@dataclass(frozen=True)
class Targets:
    """What 95 of 100 requests are to get, in seconds; None: whatever it is."""

    ttft: float | None = None
    """To the first token."""
    tpot: float | None = None
    """For each further token."""
    latency: float | None = None
    """To the last token."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None and not (isfinite(value) and value > 0):
                raise ConfigError(f"--{item.name}-p95 must be seconds above 0, not {value!r}")

    @property
    def any(self) -> bool:
        return any(getattr(self, item.name) is not None for item in fields(self))

    def misses(self, served: Served) -> dict[str, float]:
        """By what is promised: how many times as long it takes; empty where all is kept."""
        wanted = {item.name: getattr(self, item.name) for item in fields(self)}
        ratios = {name: getattr(served, name).p95 / limit for name, limit in wanted.items() if limit is not None}
        return {name: ratio for name, ratio in ratios.items() if ratio > 1}

    def kept(self, served: Served) -> bool:
        return not self.misses(served)


def fewest(serve: Callable[[int], Served], targets: Targets, most: int = MOST) -> tuple[int | None, dict[int, Served]]:
    """The least number of replicas that ``targets`` are kept with, None if not even ``most`` do, and all that were
    tried. More replicas are taken to serve no worse; where a router's luck makes that untrue, the answer is one whose
    predecessor fails."""
    tried: dict[int, Served] = {}

    def enough(count: int) -> bool:
        tried[count] = serve(count)
        return targets.kept(tried[count])

    # The most is tried first: what no fleet can keep, for its requests alone take longer, is known at once.
    if not enough(most):
        return None, tried
    low, high = 0, 1
    while high < most and not enough(high):
        low, high = high, min(most, 4 * high)
    while high - low > 1:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle
    return high, tried

"""The smallest number of replicas that meets latency targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from forerun_lab.load.fleet import Served
from forerun_lab.load.options import MOST


@dataclass(frozen=True)
class Targets:
    """Limits of 95th percentiles, in seconds; None: no limit."""

    ttft: float | None = None
    """To the first token."""
    tpot: float | None = None
    """For each further token."""
    latency: float | None = None
    """To the last token."""

    def misses(self, served: Served) -> dict[str, float]:
        """For each target that is missed, the ratio of the time to its limit."""
        requested = {item.name: getattr(self, item.name) for item in fields(self)}
        ratios = {name: getattr(served, name).p95 / limit for name, limit in requested.items() if limit is not None}
        return {name: ratio for name, ratio in ratios.items() if ratio > 1}

    def kept(self, served: Served) -> bool:
        return not self.misses(served)


def fewest(serve: Callable[[int], Served], targets: Targets, most: int = MOST) -> tuple[int | None, dict[int, Served]]:
    """The smallest number of replicas that meets ``targets``, None if not even ``most`` do; and all results. Above a
    hundred it is exact to one in a hundred. More replicas are assumed to serve no worse."""
    tried: dict[int, Served] = {}

    def enough(count: int) -> bool:
        tried[count] = serve(count)
        return targets.kept(tried[count])

    # With the most replicas no request waits: a target missed then is always missed, and utilisation is a first guess.
    if not enough(most):
        return None, tried
    low, high = 0, most
    guess = min(most - 1, max(1, round(tried[most].utilisation * most)))
    while low < guess < high:
        if enough(guess):
            high = guess
            guess = high // 2 if not low else high
        else:
            low = guess
            guess = 2 * low
    while high - low > max(1, high // 100):
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle
    return high, tried

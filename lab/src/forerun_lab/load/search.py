"""The fewest replicas that keep a promise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from forerun_lab.load.fleet import Served
from forerun_lab.load.options import MOST


@dataclass(frozen=True)
class Targets:
    """What 95 of 100 requests are to get, in seconds; None: whatever it is."""

    ttft: float | None = None
    """To the first token."""
    tpot: float | None = None
    """For each further token."""
    latency: float | None = None
    """To the last token."""

    def misses(self, served: Served) -> dict[str, float]:
        """By what is promised: how many times as long it takes; empty where all is kept."""
        requested = {item.name: getattr(self, item.name) for item in fields(self)}
        ratios = {name: getattr(served, name).p95 / limit for name, limit in requested.items() if limit is not None}
        return {name: ratio for name, ratio in ratios.items() if ratio > 1}

    def kept(self, served: Served) -> bool:
        return not self.misses(served)


def fewest(serve: Callable[[int], Served], targets: Targets, most: int = MOST) -> tuple[int | None, dict[int, Served]]:
    """The least number of replicas that ``targets`` are kept with, above a hundred to within one in a hundred, None if
    not even ``most`` do; and all that were tried. More replicas are taken to serve no worse."""
    tried: dict[int, Served] = {}

    def enough(count: int) -> bool:
        tried[count] = serve(count)
        return targets.kept(tried[count])

    # With the most no request waits: what takes too long then will always, and what is busy then is a first guess.
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

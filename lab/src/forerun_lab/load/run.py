"""Plans the number of replicas for a load from measured costs: the smallest one that meets latency targets."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from forerun.core.config import check_types
from forerun.core.errors import ConfigError, one_line, shown
from forerun_lab.load.arrivals import Load
from forerun_lab.load.costs import LoadCosts
from forerun_lab.load.fleet import Served, serve
from forerun_lab.load.options import MOST
from forerun_lab.load.replica import Limits


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


ENVIRONMENT = {"model": str, "processor": str, "threads": int}
"""Fields of the environment in which costs were measured."""


def plan_load(
    costs: LoadCosts, limits: Limits, load: Load, targets: Targets, replicas: int | None = None, router: str = "affine"
) -> dict[str, Any]:
    """``{"replicas": the fewest that meet the targets, or the given number, "kept": whether they do, "fleets": [...],
    "load": ..., "costs": ...}``. ``replicas`` is None if not even ``MOST`` meet them."""

    def served(count: int) -> Served:
        return serve(costs, limits, load, count, router)

    result, tried = (replicas, {replicas: served(replicas)}) if replicas is not None else fewest(served, targets)
    if replicas is None and result is not None:
        for near in (max(1, result // 2), min(MOST, 2 * result)):
            tried[near] = tried.get(near) or served(near)
    shown = [tried[count] for count in sorted(tried) if result is None or result // 2 <= count <= 2 * result]
    return {
        "replicas": result,
        "kept": result is not None and targets.kept(tried[result]),
        "misses": targets.misses(tried[MOST if result is None else result]),
        "fleets": [one.to_dict() for one in shown],
        "router": router,
        "load": load.describe(),
        "costs": costs.describe(),
        "limits": asdict(limits),
    }


def read_costs(path: Path) -> tuple[LoadCosts, Limits, dict[str, Any]]:
    """Costs, limits and environment from the ``--json`` output of an earlier plan. Raises ConfigError."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        parts = result["costs"], result["limits"], result["environment"]
        check_types(Limits, parts[1])
        limits = Limits(**parts[1])
        for name, kind in ENVIRONMENT.items():
            if not isinstance(parts[2][name], kind):
                raise ConfigError(f"its environment has no {name}, but {shown(parts[2][name])}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"cannot read a plan's costs from {path}: {one_line(error)}") from None
    return LoadCosts.from_report(parts[0]), limits, parts[2]

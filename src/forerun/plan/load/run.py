"""From a model and a load to a fleet: measure a replica, then find out on paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from forerun.core.errors import ConfigError
from forerun.plan.load.arrivals import Load
from forerun.plan.load.costs import Costs
from forerun.plan.load.fleet import Served, serve
from forerun.plan.load.replica import Limits
from forerun.plan.load.search import MOST, Targets, fewest


def plan_load(
    costs: Costs, limits: Limits, load: Load, targets: Targets, replicas: int | None = None, router: str = "affine"
) -> dict[str, Any]:
    """``{"replicas": the fewest that keep the targets, or those asked for, "kept": whether they do, "fleets": [...],
    "load": ..., "costs": ...}``. ``replicas`` is None where not even ``MOST`` keep them."""
    if replicas is None and not targets.any:
        raise ConfigError("say what is to be kept (--ttft-p95, --tpot-p95, --latency-p95), or how many --replicas")
    if replicas is not None and not 1 <= replicas <= MOST:
        raise ConfigError(f"--replicas must be from 1 to {MOST}, not {replicas}")

    def served(count: int) -> Served:
        return serve(costs, limits, load, count, router)

    if replicas is not None:
        found, tried = replicas, {replicas: served(replicas)}
    else:
        found, tried = fewest(served, targets)
        if found is not None:
            for near in (max(1, found // 2), min(MOST, 2 * found)):
                tried.setdefault(near, served(near))
    shown = [tried[count] for count in sorted(tried) if found is None or found // 2 <= count <= 2 * found]
    return {
        "replicas": found,
        "kept": found is not None and targets.kept(tried[found]),
        "misses": targets.misses(tried[MOST if found is None else found]),
        "fleets": [one.to_dict() for one in shown],
        "router": router,
        "load": load.describe(),
        "costs": costs.describe(),
    }

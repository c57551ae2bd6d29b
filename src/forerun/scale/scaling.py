"""How many replicas the present load wants."""

from __future__ import annotations

import math
from typing import Any

FULL = 0.75
"""Share of a replica's sequences that are in use when there are as many replicas as wanted."""
PAGES = 0.8
"""The same for its KV pages: beyond it long requests push each other out."""


def wanted(replicas: int, *, requests: float, usage: float, capacity: int) -> int:
    """Replicas for so many ``requests``, running or queued, where each of ``replicas`` decodes up to ``capacity`` at a
    time and uses, at the mean, the share ``usage`` of its pages."""
    by_queue = math.ceil(requests / (FULL * capacity))
    by_pages = math.ceil(replicas * usage / PAGES)
    return max(1, by_queue, by_pages)


def policy(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray Serve's autoscaling policy: from an ``AutoscalingContext``, replicas and a state, which is empty. Its delays
    and bounds apply to the number afterwards."""
    reported = context.aggregated_metrics or {}
    usages, capacity, listeners = (
        list((reported.get(name) or {}).values()) for name in ("usage", "places", "listeners")
    )
    if not capacity:
        return max(1, context.target_num_replicas), {}
    return wanted(
        context.current_num_replicas,
        requests=context.total_num_requests - sum(listeners),  # those are Ray's requests, and wait for tokens alone
        usage=sum(usages) / len(usages),
        capacity=int(sum(capacity) / len(capacity)),
    ), {}

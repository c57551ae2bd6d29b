"""Simulates several replicas behind a router, and summarises their latencies."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from forerun.core.errors import ConfigError
from forerun.scale.affinity import Affinity
from forerun_lab.load.arrivals import Arrival, Load
from forerun_lab.load.costs import LoadCosts
from forerun_lab.load.options import ROUTERS
from forerun_lab.load.replica import Limits, SimulatedJob, SimulatedReplica

Choose = Callable[[Mapping[int, int], int, Arrival], int]
"""A router: (requests in progress by replica, request number, request) -> replica."""


@dataclass(frozen=True)
class Spread:
    """Quantiles, in seconds."""

    p50: float
    p95: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        low, high = np.percentile(values, [50, 95]) if len(values) else (0.0, 0.0)
        return cls(float(low), float(high))


@dataclass(frozen=True)
class Served:
    """How ``replicas`` serve a load. Seconds: to the first token, per further token, and of the whole request."""

    replicas: int
    requests: int
    """Simulated requests that are counted."""
    tokens_per_second: float
    requests_per_second: float
    ttft: Spread
    tpot: Spread
    latency: Spread
    utilisation: float
    """Fraction of the time in which replicas compute."""
    streams: float
    """Mean number of requests that decode together while a replica computes."""
    hit_rate: float
    """Fraction of the prompt tokens that were cached."""
    preemptions: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def affine(page: int) -> Choose:
    """The router of ``serve --replicas``."""
    router = Affinity()

    def choose(load: Mapping[int, int], number: int, arrival: Arrival) -> int:
        names = _block_hashes(number, arrival, page)
        best = router.order(load, names)[0]
        router.note(best, names)
        return best

    return choose


def _block_hashes(number: int, arrival: Arrival, page: int) -> list[bytes]:
    """Block hashes as ``affinity.block_hashes`` makes them: equal for equal prefixes."""
    shared = arrival.shared // page
    prefix = [b"%s:%d" % (repr(arrival.prefix).encode(), index) for index in range(shared)]
    return prefix + [b"own %d:%d" % (number, index) for index in range(shared, arrival.prompt // page)]


def at_random(seed: int) -> Choose:
    draw = random.Random(seed)
    return lambda load, number, arrival: draw.randrange(len(load))


def simulate(
    costs: LoadCosts, limits: Limits, arrivals: Sequence[Arrival], count: int, choose: Choose
) -> tuple[list[SimulatedJob], Any]:
    """Run all requests through ``count`` replicas; returns jobs in order of arrival, and the replicas."""
    replicas = [SimulatedReplica(costs, limits) for _ in range(count)]
    load = dict.fromkeys(range(count), 0)
    jobs = [SimulatedJob(number, arrival) for number, arrival in enumerate(arrivals)]
    events: list[tuple[float, int]] = []

    def ended(index: int) -> None:
        replica = replicas[index]
        load[index] -= len(replica.end())
        if replica.until < math.inf:
            heapq.heappush(events, (replica.until, index))

    def run(until: float) -> None:
        while events and events[0][0] <= until:
            at, index = heapq.heappop(events)
            if replicas[index].until == at:  # otherwise the stretch was cut short and has another event
                ended(index)

    for job in jobs:
        run(job.arrival.at)
        index = choose(load, job.number, job.arrival)
        load[index] += 1
        before = replicas[index].until
        replicas[index].add(job, job.arrival.at)
        if replicas[index].until != before:
            heapq.heappush(events, (replicas[index].until, index))
    run(math.inf)
    return jobs, replicas


def serve(costs: LoadCosts, limits: Limits, load: Load, replicas: int, router: str = "affine", seed: int = 0) -> Served:
    """Simulate replicas. Raises ConfigError for an unknown router, and for a request of more pages than one has."""
    if router not in ROUTERS:
        raise ConfigError(f"unknown router {router!r}: choose one of {', '.join(ROUTERS)}")
    part = load.part(replicas, router)
    most = max(-(-(one.prompt + one.output) // limits.page) for one in part.arrivals)
    if limits.pages is not None and most > limits.pages:
        raise ConfigError(f"a request needs {most} KV pages, and a replica has {limits.pages}: raise kv_cache_memory")
    choose = affine(limits.page) if router == "affine" else at_random(seed)
    jobs, machines = simulate(costs, limits, part.arrivals, part.replicas, choose)
    counted = jobs[part.settling :]
    whole = max(job.done for job in jobs) - jobs[0].arrival.at
    # A trace has an end; a sample of an endless load is observed while requests arrive.
    began, last = counted[0].arrival.at, jobs[-1].arrival.at if part.settling else math.inf
    done = [job.arrival.output for job in jobs if began <= job.done <= last]
    span = min(last, jobs[0].arrival.at + whole) - began
    busy = sum(machine.busy for machine in machines)
    scale, out = replicas / part.replicas, costs.outside
    return Served(
        replicas=replicas,
        requests=len(counted),
        tokens_per_second=sum(done) / span * scale,
        requests_per_second=len(done) / span * scale,
        ttft=Spread.of([job.first - job.arrival.at + out for job in counted]),
        tpot=Spread.of([(job.done - job.first) / (n - 1) for job in counted if (n := job.arrival.output) > 1]),
        latency=Spread.of([job.done - job.arrival.at + out for job in counted]),
        utilisation=busy / whole / part.replicas,
        streams=sum(machine.streams for machine in machines) / busy,
        hit_rate=sum(job.reused for job in counted) / sum(job.arrival.prompt for job in counted),
        preemptions=round(sum(machine.preempted for machine in machines) * scale),
    )

"""A replica on paper beside the engine's own scheduler, pages and prefixes, round by round on the same clock."""

import random
from types import SimpleNamespace

import pytest

from forerun.cache.pool import Pages
from forerun.cache.prefix import PrefixTree
from forerun.core.request import RequestState
from forerun.engine.scheduler import PrefillBudget, Scheduler
from forerun.measure.planner import Curve
from forerun_lab.load.arrivals import Arrival
from forerun_lab.load.costs import LoadCosts, Way
from forerun_lab.load.fleet import at_random, simulate
from forerun_lab.load.replica import Limits

PRICE = LoadCosts(
    [Way("none", 0, Curve({1: 0.010, 4: 0.012, 8: 0.016}), 1.0)],
    Curve({1: 0.010, 64: 0.030, 256: 0.100, 2048: 0.800}),
    deep=1e-7,
)


class Played:
    """The engine's scheduler with rounds that only take their time."""

    def __init__(self, limits, arrivals):
        self.pool = Pages(limits.pages or 4096, limits.page)
        self.tree = PrefixTree(self.pool) if limits.prefixes else None
        self.preempted = 0
        self.reused = 0
        self.scheduler = Scheduler(
            self.pool, max_num_seqs=limits.seats, max_num_batched_tokens=limits.rows,
            prefill_budget=PrefillBudget(limits.chunk),
            tree=self.tree, on_admit=self._admitted, on_preempt=self._preempted,
        )  # fmt: skip
        self.arrivals = arrivals
        self.first = {}
        self.done = {}

    def _admitted(self, sequence, reused):
        self.reused += reused

    def _preempted(self, sequence):
        self.preempted += 1

    def run(self):
        now, coming = 0.0, list(enumerate(self.arrivals))
        while coming or self.scheduler.busy:
            if not self.scheduler.busy:
                now = max(now, coming[0][1].at)
            while coming and coming[0][1].at <= now:
                self._add(*coming.pop(0))
            now += self._round(now)

    def _add(self, key, one):
        text = random.Random(repr(one.prefix))
        tokens = [text.randrange(1000) for _ in range(one.shared)] + [10_000 + key] * (one.prompt - one.shared)
        self.scheduler.add(
            RequestState(key, tokens, one.prompt, SimpleNamespace(), seed=0, max_tokens=one.prompt + one.output)
        )

    def _round(self, now):
        chosen = self.scheduler.schedule()
        decoding = [
            one for one in chosen if one.num_output and one.num_computed_tokens + one.scheduled == len(one.tokens)
        ]
        decoding = [one for one in decoding if one.scheduled == 1]
        reading = [one for one in chosen if one not in decoding]
        read = sum(one.scheduled for one in reading)
        depth = sum(one.scheduled * one.num_computed_tokens for one in reading) / max(1, read)
        seconds = PRICE.round(PRICE.ways[0], len(decoding), read, depth)
        for one in chosen:
            emits = one.decodes
            self.pool.advance(one.id, one.num_computed_tokens + one.scheduled)
            one.num_computed_tokens += one.scheduled
            if emits:
                one.tokens.append(50_000 + one.id)
                self.first.setdefault(one.id, now + seconds)
        for one in chosen:
            if one.remaining == 0:
                self.done[one.id] = now + seconds
                self.scheduler.remove(one)
        self.scheduler.observe(seconds)
        return seconds


def load(rate, count, seed, prefixes=0):
    draw, now, result = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate)
        prompt, output = draw.randrange(20, 400), draw.randrange(1, 120)
        if prefixes:
            shared = 128
            result.append(Arrival(now, shared + prompt, output, draw.randrange(prefixes), shared))
        else:
            result.append(Arrival(now, prompt, output))
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "rate", "prefixes", "close"),
    [
        (Limits(seats=1), 1.0, 0, 1e-6),
        (Limits(seats=8, chunk=64), 4.0, 0, 1e-6),
        (Limits(seats=8), 4.0, 0, 0.03),
        (Limits(seats=3, rows=64), 3.0, 0, 0.03),
        (Limits(seats=8, chunk=64), 4.0, 4, 0.01),
        (Limits(seats=8, page=16, pages=120), 6.0, 4, 0.05),
        (Limits(seats=8, page=16, pages=60, prefixes=False), 5.0, 0, 0.05),
        (Limits(seats=8, page=16, pages=60), 5.0, 0, 0.05),
    ],
)
def test_as_the_engine_schedules(limits, rate, prefixes, close):
    arrivals = load(rate, 400, seed=3, prefixes=prefixes)
    real = Played(limits, arrivals)
    real.run()
    jobs, _ = simulate(PRICE, limits, arrivals, 1, at_random(0))
    for result, expected in (
        ([job.first - job.arrival.at for job in jobs], [real.first[job.number] - job.arrival.at for job in jobs]),
        ([job.done - job.arrival.at for job in jobs], [real.done[job.number] - job.arrival.at for job in jobs]),
    ):
        pairs = sorted(result), sorted(expected)
        for part in (0.5, 0.95):
            mine, theirs = (values[int(part * len(values))] for values in pairs)
            assert mine == pytest.approx(theirs, rel=close)

"""Fleets on paper, against queueing theory, the real scheduler, and cases by hand."""

from __future__ import annotations

import random
from statistics import mean

import pytest

from forerun.plan.load.arrivals import Arrival, Synthetic, Trace
from forerun.plan.load.costs import Costs, Curve, Way
from forerun.plan.load.fleet import affine, at_random, serve, simulate
from forerun.plan.load.replica import Limits

NOTHING = 1e-9
"""Seconds of what costs nothing."""
ONE = Limits(seats=1)


def costs(seconds: dict[int, float], prompt: dict[int, float] | None = None, **more) -> Costs:
    """Plain decoding with these seconds of a round by requests."""
    return Costs([Way("none", 0, Curve(seconds), 1.0)], Curve(prompt or {1: NOTHING, 4096: NOTHING}), **more)


def poisson(rate: float, count: int, output, seed: int = 0) -> list[Arrival]:
    draw, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate)
        found.append(Arrival(now, 1, output(draw)))
    return found


def sojourn(arrivals, price: Costs, limits: Limits = ONE, count: int = 1, choose=None) -> float:
    jobs, _ = simulate(price, limits, arrivals, count, choose or at_random(0))
    return mean(job.done - job.arrival.at for job in jobs)


# -------------------------------------------------------------------------------------------------- queueing theory
# One token comes with the prompt, which is free here: a service of n tokens takes n - 1 rounds.


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_equal_requests_wait_as_pollaczek_and_khinchine_say(load):
    arrivals = poisson(load / 10, 15_000, lambda draw: 11)
    wait = load * 10 / (2 * (1 - load))
    assert sojourn(arrivals, costs({1: 1.0})) - 10 == pytest.approx(wait, rel=0.08)


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_geometric_requests_wait_as_pollaczek_and_khinchine_say(load):
    """Services that forget: M/M/1 in rounds."""
    chance = 0.05

    def output(draw):
        tokens = 1
        while draw.random() > chance:
            tokens += 1
        return tokens + 1

    first, second = 1 / chance, (2 - chance) / chance**2
    arrivals = poisson(load / first, 20_000, output)
    wait = load / first * second / (2 * (1 - load))
    assert sojourn(arrivals, costs({1: 1.0})) - first == pytest.approx(wait, rel=0.1)


@pytest.mark.parametrize("load", [0.3, 0.5])
def test_a_machine_that_all_share_alike(load):
    """Processor sharing: a request takes E[S] / (1 - load) whatever the law of its length."""
    for output in (lambda draw: 101, lambda draw: draw.choice((11, 191))):
        arrivals = poisson(load / 100, 5_000, output)
        took = sojourn(arrivals, costs({1: 1.0, 2: 2.0}), Limits(seats=500))
        assert took == pytest.approx(100 / (1 - load), rel=0.1)


def test_rounds_that_cost_the_same_for_all_delay_nobody():
    arrivals = poisson(0.5, 2_000, lambda draw: 21)
    # Half a round, at the mean, until the one under way ends, and one in which the prompt is read.
    assert sojourn(arrivals, costs({1: 1.0, 2: 1.0}), Limits(seats=500)) == pytest.approx(21.5, abs=0.05)


def test_random_routing_makes_queues_of_their_own():
    arrivals = poisson(0.7 * 8 / 10, 20_000, lambda draw: 11)
    wait = 0.7 * 10 / (2 * 0.3)
    assert sojourn(arrivals, costs({1: 1.0}), count=8) - 10 == pytest.approx(wait, rel=0.06)


def test_a_busy_share_is_what_the_load_is():
    price = costs({1: 1.0})
    found = serve(price, ONE, Synthetic(0.06, 1, 11), 1, "random")
    assert found.utilisation == pytest.approx(0.6, rel=0.05)
    assert found.tokens_per_second == pytest.approx(0.66, rel=0.05)
    wide = serve(price, ONE, Synthetic(0.06 * 1000, 1, 11), 1000, "random")
    assert wide.utilisation == pytest.approx(0.6, rel=0.06)
    assert wide.tokens_per_second == pytest.approx(660, rel=0.06)


def test_affine():
    arrivals = [Arrival(i * 0.5, 200, 20, i % 5, 128) for i in range(400)]
    jobs, _ = simulate(costs({1: 1.0, 8: 2.0}, {1: 1.0, 200: 4.0}), Limits(), arrivals, 4, affine(64))
    assert all(job.left < 1e-6 for job in jobs)
    assert serve(costs({1: 1.0}), Limits(), Trace(arrivals), 4).requests == 400

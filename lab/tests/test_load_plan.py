"""Fleets on paper, against queueing theory, the real scheduler, and cases by hand."""

import random
from dataclasses import replace
from itertools import pairwise, product
from statistics import mean

import pytest

from forerun.core.errors import ConfigError
from forerun.measure.planner import Curve
from forerun_lab.load.arrivals import Arrival, SyntheticLoad, Trace
from forerun_lab.load.costs import LoadCosts, Way
from forerun_lab.load.fleet import Served, Spread, affine, at_random, serve, simulate
from forerun_lab.load.replica import Limits
from forerun_lab.load.run import Targets, fewest, plan_load

pytestmark = pytest.mark.slow

NOTHING = 1e-9
"""Seconds of what costs nothing."""
ONE = Limits(seats=1)


def costs(seconds, prompt=None, **more):
    """Plain decoding with these seconds of a round by requests."""
    return LoadCosts([Way("none", 0, Curve(seconds), 1.0)], Curve(prompt or {1: NOTHING, 4096: NOTHING}), **more)


def poisson(rate, count, output, seed=0):
    draw, now, result = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate)
        result.append(Arrival(now, 1, output(draw)))
    return result


def sojourn(arrivals, price, limits=ONE, count=1, choose=None):
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
    """Processor sharing: a request takes E[S] / (1 - load) whatever the distribution of its length."""
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
    result = serve(price, ONE, SyntheticLoad(0.06, 1, 11), 1, "random")
    assert result.utilisation == pytest.approx(0.6, rel=0.05)
    assert result.tokens_per_second == pytest.approx(0.66, rel=0.05)
    wide = serve(price, ONE, SyntheticLoad(0.06 * 1000, 1, 11), 1000, "random")
    assert wide.utilisation == pytest.approx(0.6, rel=0.06)
    assert wide.tokens_per_second == pytest.approx(660, rel=0.06)


# --------------------------------------------------------------------------------------------------------- by hand


def test_one_request_by_hand():
    """A prompt of 100 tokens takes 1 s + 99 * 0.01 s, and each further token a round of 0.5 s."""
    price = costs({1: 0.5}, {1: 1.0, 101: 2.0}, outside=0.25)
    result = serve(price, Limits(), Trace([Arrival(3.0, 100, 5)]), 1)
    assert (result.ttft.p50, result.ttft.p95) == (pytest.approx(2.24), pytest.approx(2.24))
    assert result.tpot.p50 == pytest.approx(0.5)
    assert result.latency.p50 == pytest.approx(1.99 + 4 * 0.5 + 0.25)
    assert result.tokens_per_second == pytest.approx(5 / 3.99)
    assert (result.requests, result.utilisation, result.hit_rate) == (1, pytest.approx(1.0), 0.0)


def test_request_overhead_takes_time_for_each():
    arrivals = [Arrival(0.0, 1, 11), Arrival(0.0, 1, 11)]
    price = costs({1: 1.0}, request_overhead=0.25)
    jobs, _ = simulate(price, Limits(seats=1), arrivals[:1], 1, at_random(0))
    assert jobs[0].done == pytest.approx(10 * 1.25)
    jobs, _ = simulate(price, Limits(chunk=9), arrivals, 1, at_random(0))
    # One round alone, in which the second prompt is read, nine together, one alone.
    assert jobs[1].done == pytest.approx(1.25 + 9 * 1.5 + 1.25)


def test_two_requests_by_hand():
    """The second one is read beside the first one's third token: 10 rows more than 1 cost 0.1 s each."""
    price = costs({1: 1.0, 2: 1.5}, {1: 1.0, 11: 2.0})
    arrivals = [Arrival(0.0, 1, 4), Arrival(1.5, 10, 2)]
    jobs, _ = simulate(price, Limits(chunk=64), arrivals, 1, at_random(0))
    # 0 to 1: the first prompt. 1 to 2: its second token. 2 to 4: its third, and the other one's prompt. Then both.
    assert [job.first for job in jobs] == [pytest.approx(1.0), pytest.approx(4.0)]
    assert [job.done for job in jobs] == [pytest.approx(5.5), pytest.approx(5.5)]


def test_a_shared_beginning_is_read_once():
    price = costs({1: 1.0}, {1: 1.0, 1001: 11.0})
    arrivals = [Arrival(100.0 * i, 200, 1, "text", 128) for i in range(3)]
    jobs, _ = simulate(price, Limits(), arrivals, 1, affine(64))
    assert [job.reused for job in jobs] == [0, 128, 128]
    assert [job.done - job.arrival.at for job in jobs] == [pytest.approx(t) for t in (2.99, 1.71, 1.71)]
    alone, _ = simulate(price, Limits(prefixes=False), arrivals, 1, affine(64))
    assert [job.reused for job in alone] == [0, 0, 0]


def test_a_conversation_goes_on_behind_its_answers():
    arrivals = [Arrival(0.0, 100, 60, "talk", 100), Arrival(500.0, 200, 1, "talk", 200)]
    jobs, _ = simulate(costs({1: 1.0}), Limits(page=16), arrivals, 1, at_random(0))
    assert jobs[1].reused == 159


def test_a_long_text_makes_room_for_one_that_leaves_it_early():
    """Nine of twelve pages hold the conversation; the second request needs two of them and eight others."""
    arrivals = [Arrival(0.0, 100, 60, "talk", 100), Arrival(500.0, 150, 20, "talk", 32)]
    jobs, _ = simulate(costs({1: 1.0}), Limits(page=16, pages=12), arrivals, 1, at_random(0))
    assert jobs[1].done == pytest.approx(519.0)
    assert jobs[1].reused == 32


def test_drafts_where_they_pay():
    """Two tokens a round for 1.5 times the price alone; at eight for 2.5 times."""
    plain = Way("none", 0, Curve({1: 1.0, 8: 1.0}), 1.0)
    drafted = Way("ngram", 3, Curve({1: 1.5, 8: 2.5}), 2.0)
    price = LoadCosts([plain, drafted], Curve({1: NOTHING, 4096: NOTHING}))
    assert [price.best(count) for count in (1, 8)] == [drafted, plain]
    result = serve(price, Limits(), Trace([Arrival(0.0, 1, 101)]), 1)
    assert result.latency.p50 == pytest.approx(50 * 1.5)
    many = serve(price, Limits(), Trace([Arrival(0.0, 1, 101)] * 8), 1)
    assert many.latency.p50 == pytest.approx(100, abs=4)
    barely = Way("ngram", 1, Curve({1: 1.0}), 1.03)
    assert LoadCosts([plain, barely], price.prompt).best(1) is plain


def test_some_are_guessed_better_than_others():
    """A third of all get three tokens a round, and the others one; who decodes together waits for nobody."""
    plain = Way("none", 0, Curve({1: 1.0}), 1.0)
    drafted = Way("ngram", 3, Curve({1: 1.0}), 9 / 7, (1.0, 1.0, 3.0))
    price = LoadCosts([plain, drafted], Curve({1: NOTHING, 4096: NOTHING}))
    apart, _ = simulate(price, ONE, [Arrival(100.0 * n, 1, 31) for n in range(300)], 1, at_random(0))
    took = [round(job.done - job.first) for job in apart]
    assert set(took) == {10, 30}
    assert took.count(10) == pytest.approx(100, abs=1)
    usual = replace(drafted, spread=(1.0, 2.0, 3.0))
    (one,), _ = simulate(LoadCosts([plain, usual], price.prompt), ONE, [Arrival(0.0, 1, 31)], 1, at_random(0))
    assert round(one.done - one.first) == 15  # alone, it is neither lucky nor not
    together, _ = simulate(price, Limits(seats=300), [Arrival(0.0, 1, 31)] * 300, 1, at_random(0))
    assert [round(job.done - job.first) for job in together] == took


def test_a_curve_goes_through_what_was_measured():
    curve = Curve({1: 1.0, 4: 4.0, 2: 6.0})
    assert [curve(n) for n in (1, 2, 3, 4)] == [1.0, 4.0, 4.0, 4.0]
    assert Curve({1: 1.0, 3: 2.0})(5) == 3.0
    assert Curve({2: 7.0})(9) == 7.0


# -------------------------------------------------------------------------------------------------------- all loads


@pytest.mark.parametrize("limits", [Limits(), Limits(pages=40, page=16), Limits(seats=2, rows=40, chunk=8)])
@pytest.mark.parametrize("router", ["affine", "random"])
def test_every_request_is_answered_once(limits, router):
    price = costs({1: 0.010, 8: 0.020}, {1: 0.010, 2048: 0.9}, deep=1e-7)
    load = SyntheticLoad(30.0, 120, 30, spread=0.8, shared=0.4, prefixes=6, limit=500).part(1)
    jobs, machines = simulate(
        price, limits, load.arrivals, 5, affine(limits.page) if router == "affine" else at_random(1)
    )
    assert [job.arrival for job in jobs] == list(load.arrivals)
    for job in jobs:
        assert job.arrival.at < job.first <= job.done
        assert (job.remaining, job.own_pages, job.reads) == (pytest.approx(0), 0, False)
    for machine in machines:
        cache = machine.cache
        assert (machine.load, [text.users for text in cache.texts.values() if text.users]) == (0, [])
        if limits.pages is not None:
            assert cache.free + cache.unused == limits.pages
            assert cache.unused == sum(text.pages for text in cache.texts.values())


def test_more_replicas_serve_no_worse():
    price = costs({1: 0.010, 8: 0.020}, {1: 0.010, 2048: 0.9})
    load = Trace(SyntheticLoad(40.0, 120, 30, spread=0.8, shared=0.4, limit=500).part(1).arrivals[:600])
    result = [serve(price, Limits(), load, count) for count in (1, 2, 4, 8, 16, 32)]
    for name in ("ttft", "latency"):
        times = [getattr(one, name).p95 for one in result]
        assert all(after <= 1.02 * before for before, after in pairwise(times)), name


def assert_alike(fraction, whole):
    for name in ("tokens_per_second", "utilisation", "hit_rate"):
        assert getattr(fraction, name) == pytest.approx(getattr(whole, name), rel=0.08), name
    for name, quantile in product(("ttft", "tpot", "latency"), ("p50", "p95")):
        one, other = (getattr(getattr(served, name), quantile) for served in (fraction, whole))
        assert one == pytest.approx(other, rel=0.15), (name, quantile)


@pytest.mark.parametrize("router", ["affine", "random"])
def test_a_share_stands_for_the_whole(router):
    """Six of 24 replicas, with a quarter of the requests."""

    class Whole(SyntheticLoad):
        SHARE, EACH, ALL = 24, 200, 0

    class Share(Whole):
        SHARE = 6

    price = costs({1: 0.010, 8: 0.020}, {1: 0.010, 2048: 0.9})
    shape = {"spread": 0.8, "shared": 0.4, "prefixes": 24, "limit": 500}
    whole, fraction = (serve(price, Limits(), kind(140.0, 120, 30, **shape), 24, router) for kind in (Whole, Share))
    assert (fraction.requests, whole.requests) == (900, 3600)
    assert_alike(fraction, whole)


@pytest.mark.parametrize(
    ("router", "prefixes"), [("random", 0), ("affine", 1), ("random", 5), ("affine", 60), ("affine", 1500)]
)
def test_a_share_of_a_trace_stands_for_the_whole(router, prefixes, monkeypatch):
    """Six of 24 replicas, with a quarter of 6000 requests."""
    draw = random.Random(3)
    arrivals = [
        Arrival(one.at, draw.randint(80, 160), draw.randint(10, 50), draw.randrange(prefixes) if prefixes else None, 48)
        for one in poisson(120.0, 6000, lambda draw: 1)
    ]
    price = costs({1: 0.010, 8: 0.020}, {1: 0.010, 2048: 0.9})
    whole = serve(price, Limits(page=16), Trace(arrivals), 24, router)
    monkeypatch.setattr("forerun_lab.load.arrivals.LONGEST", 1500)
    fraction = serve(price, Limits(page=16), Trace(arrivals), 24, router)
    assert (fraction.requests, whole.requests) == (1500, 6000)
    assert_alike(fraction, whole)


def test_a_long_trace_with_one_prefix_takes_what_its_requests_do(monkeypatch):
    """Requests whose common beginning is too short to spare them much; a tenth as many as a trace has in earnest."""
    monkeypatch.setattr("forerun_lab.load.arrivals.LONGEST", 2000)
    monkeypatch.setattr("forerun_lab.load.arrivals.COMPARISONS", 50_000)
    price = costs({1: 0.010, 8: 0.020}, {1: 0.010, 2048: 0.9})
    bare = poisson(100.0, 3000, lambda draw: 30)
    begun = [Arrival(one.at, 100, 30, "support", 4) for one in bare]
    bare = [Arrival(one.at, 100, 30) for one in bare]
    result, expected = (
        plan_load(price, Limits(), Trace(each), Targets(ttft=0.5))["replicas"] for each in (begun, bare)
    )
    assert expected > 10
    assert abs(result - expected) <= 1


def test_a_request_that_no_cache_holds():
    with pytest.raises(ConfigError, match="a request needs 5 KV pages, and a replica has 4"):
        serve(costs({1: 1.0}), Limits(pages=4), Trace([Arrival(0.0, 300, 20)]), 1)


# ------------------------------------------------------------------------------------------------------- the search


def keeps(count, least):
    """As if the 95th percentile were a second with ``least`` replicas."""
    times = Spread(0.5, least / count)
    busy = min(1.0, 0.7 * least / count)
    return Served(count, 1, 1.0, 1.0, times, times, times, busy, 1.0, 0.0, 0)


@pytest.mark.parametrize("least", [1, 2, 3, 7, 50, 99])
def test_the_fewest_are_found(least):
    result, tried = fewest(lambda count: keeps(count, least), Targets(ttft=1.0))
    assert result == least
    assert len(tried) < 20
    assert result == 1 or not Targets(ttft=1.0).kept(keeps(result - 1, least))


@pytest.mark.parametrize("least", [101, 999, 5000, 9999, 10_000])
def test_many_are_found_to_one_in_a_hundred(least):
    result, tried = fewest(lambda count: keeps(count, least), Targets(latency=1.0))
    assert least <= result <= 1.011 * least
    assert len(tried) < 15


def test_what_no_fleet_keeps():
    result, tried = fewest(lambda count: keeps(count, 10_001), Targets(tpot=1.0))
    assert result is None
    assert list(tried) == [10_000]
    assert Targets(ttft=2.0, tpot=1.0).misses(tried[10_000]) == {"tpot": pytest.approx(1.0001)}


def test_a_target_is_kept_with_the_least_and_not_with_one_less():
    price = costs({1: 0.010, 8: 0.020}, {1: 0.010, 2048: 0.9})
    load = Trace(poisson(60.0, 400, lambda draw: 30))
    result = plan_load(price, Limits(), load, Targets(ttft=0.3))
    least = result["replicas"]
    assert result["kept"]
    assert serve(price, Limits(), load, least).ttft.p95 <= 0.3 < serve(price, Limits(), load, least - 1).ttft.p95
    assert least >= 60 * 29 * 0.020 / 8  # seconds of rounds in a second

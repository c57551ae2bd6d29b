"""``speculate``: exactly the distribution of g(f(x)), whatever is guessed, and g's waiting time hidden behind f's."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import product
from math import prod

import pytest
from scipy.stats import chisquare

from forerun import ConfigError
from forerun_lab.execution import expected_latency, settle, speculate

P = {"a": Fraction(1, 2), "b": Fraction(3, 10), "c": Fraction(1, 5)}
DRAFTS = {
    "alike": P,
    "other": {"a": Fraction(1, 10), "b": Fraction(3, 5), "c": Fraction(3, 10)},
    "beyond": {"a": Fraction(1, 4), "z": Fraction(3, 4)},
    "disjoint": {"y": Fraction(1, 3), "z": Fraction(2, 3)},
    "certain": {"b": Fraction(1)},
}


@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("name", DRAFTS)
def test_the_distribution_by_enumeration(name, count):
    """Sum over all guesses of their probability times what is settled on."""
    q = DRAFTS[name]
    result = Counter()
    for guesses in product(q, repeat=count):
        chance = float(prod((q[guess] for guess in guesses), start=Fraction(1)))
        distribution = settle(
            {y: float(fraction) for y, fraction in P.items()},
            {y: float(fraction) for y, fraction in q.items()},
            guesses,
        )
        for y, fraction in distribution.items():
            result[y] += chance * fraction
    assert {y: result[y] for y in set(result) | set(P)} == pytest.approx(
        {y: float(P.get(y, 0)) for y in set(result) | set(P)}, abs=1e-12
    )


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1, 2])
def test_what_runs_has_that_distribution(count):
    """g adds chance of its own; 4,000 runs against the product distribution."""
    p, q = ({y: float(fraction) for y, fraction in distribution.items()} for distribution in (P, DRAFTS["other"]))
    with ThreadPoolExecutor(3) as threads:
        drawn = Counter(
            speculate(lambda x: p, str.upper, lambda x: q, None, seed=seed, guesses=count, executor=threads).value
            for seed in range(4000)
        )
    expected = [4000 * p[y] for y in "abc"]
    assert chisquare([drawn[y.upper()] for y in "abc"], expected).pvalue > 1e-4


def test_g_runs_while_f_does():
    """f ends once g has begun on the guess, g once f has ended: one after the other, they would wait for ever."""
    begun, ended = threading.Event(), threading.Event()

    def f(x):
        assert begun.wait(20)
        ended.set()
        return {"left": 1.0}

    def g(y):
        begun.set()
        assert ended.wait(20)
        return y + "!"

    run = speculate(f, g, lambda x: {"left": 1.0}, 0)
    assert (run.value, run.drawn, run.hit, run.guesses) == ("left!", "left", True, ("left",))


def test_the_seed_decides_not_the_timing():
    p, q = ({y: float(fraction) for y, fraction in distribution.items()} for distribution in (P, DRAFTS["beyond"]))
    runs = [speculate(lambda x: p, len, lambda x: q, 0, seed=11, guesses=2) for _ in range(5)]
    assert len({(run.drawn, run.guesses, run.hit) for run in runs}) == 1


def test_what_is_raised_and_what_is_forgotten():
    def broken(x):
        raise KeyError("no guess")

    run = speculate(lambda x: {"a": 1.0}, str.upper, broken, 0)
    assert (run.value, run.hit, run.guesses) == ("A", False, ())
    assert isinstance(run.guess_error, KeyError)
    assert isinstance(speculate(lambda x: {"a": 1.0}, len, lambda x: {"a": 0.5}, 0).guess_error, ConfigError)

    def fragile(y):
        if y == "wrong":
            raise ValueError("a guess that is wrong")
        return y

    assert speculate(lambda x: {"right": 1.0}, fragile, lambda x: {"wrong": 1.0}, 0).value == "right"
    with pytest.raises(ValueError, match="a guess that is wrong"):
        speculate(lambda x: {"wrong": 1.0}, fragile, lambda x: {"wrong": 1.0}, 0)
    with pytest.raises(KeyError):
        speculate(broken, len, lambda x: {"a": 1.0}, 0)


@pytest.mark.parametrize("distribution", [{}, {"a": 0.4}, {"a": 1.5, "b": -0.5}, {"a": float("nan")}, "a"])
def test_what_is_no_distribution_is_refused(distribution):
    with pytest.raises(ConfigError, match="f must return"):
        speculate(lambda x: distribution, len, lambda x: {"a": 1.0}, 0)
    with pytest.raises(ConfigError, match="guesses"):
        speculate(lambda x: {"a": 1.0}, len, lambda x: {"a": 1.0}, 0, guesses=-1)


def test_the_latency_is_the_form_of_theorem_3_8():
    assert expected_latency(1.0, 3.0, 2.0, 0.5) == 3.0
    assert expected_latency(1.0, 2.0, 3.0, 0.5) == 3.5
    assert expected_latency(0.0, 3.0, 2.0, 0.5) == 5.0
    assert expected_latency(0.5, 2.0, 2.0) == 3.0

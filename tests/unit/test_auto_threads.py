"""``threads="auto"`` on simulated machines, whose clock is the sum of what rounds take."""

import random
import threading
from collections.abc import Callable

import pytest
import torch

from forerun import LLM, ConfigError, SamplingParams, kernels
from forerun.cli.console import set_threads
from forerun.core import threads as module
from forerun.core.threads import Threads

Machine = Callable[[int, random.Random], float]


def quiet(count, noise):
    return (0.4 + 1.6 / count) * noise.uniform(0.95, 1.1)


def busy(count, noise):
    """Two threads wait for one that the system has put aside."""
    return noise.uniform(1.8, 2.4) if count == 1 else 1.2 if noise.random() < 0.7 else 40.0


def run(policy, machine, rounds, rows=lambda _: 1):
    """Seconds that so many rounds take; a round of more rows takes longer."""
    noise, total = random.Random(0), 0.0
    for _ in range(rounds):
        count = rows(noise)
        seconds = machine(policy.count, noise) * (1 + count / 8)
        policy.observe(count, seconds)
        total += seconds
    return total


@pytest.mark.parametrize("rows", [lambda _: 1, lambda noise: noise.randint(1, 16)])
def test_quiet_then_busy_then_quiet(rows):
    policy = Threads(2)
    fixed = run(Threads(2, fixed=True), quiet, 2000, rows)
    assert run(policy, quiet, 2000, rows) <= fixed / 0.95
    assert policy.counts[policy.home] == 2
    one = run(Threads(1), busy, 2000, rows)
    assert run(policy, busy, 2000, rows) <= one / 0.9
    assert policy.counts[policy.home] == 1
    run(policy, quiet, 2500, rows)
    assert policy.counts[policy.home] == 2


def test_a_slow_round_is_answered_at_once():
    policy = Threads(8)
    for seconds in (1.0, 1.0, 9.0):
        assert policy.count == 8
        policy.observe(1, seconds)
    assert policy.count == 4


def test_a_probe_that_fails_badly_ends_after_a_round():
    policy = Threads(2)
    while policy.count == 2:
        policy.observe(1, 1.0)
    policy.observe(1, 30.0)
    assert policy.count == 2
    for _ in range(1000):
        assert policy.count == 2
        policy.observe(1, 1.0)


def test_the_best_of_many_counts():
    policy = Threads(6)
    assert policy.counts == [1, 2, 4, 6]
    run(policy, lambda count, noise: {1: 2.0, 2: 1.0, 4: 1.5, 6: 3.0}[count], 500)
    assert policy.counts[policy.home] == 2


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2", "all", 5000])
def test_bad_values(value):
    with pytest.raises(ConfigError, match="threads"):
        LLM(threads=value)


def test_more_threads_than_cores_are_a_warning(monkeypatch, capsys):
    before = torch.get_num_threads()
    monkeypatch.setattr("forerun.cli.console.usable_cores", lambda: 1)
    try:
        assert set_threads(2) == 2
        assert capsys.readouterr().err == "warning: 2 threads on 1 core: they wait for each other\n"
        assert set_threads(None) == "auto"
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_half_a_core_or_one_means_one_thread(llm, monkeypatch):
    monkeypatch.setattr("forerun.engine.engine.usable_cores", lambda: 1)
    assert llm().engine.threads.counts == [1]


def test_changing_threads_within_an_answer_changes_no_bit(llm):
    params = SamplingParams(seed=3, temperature=1.0, max_tokens=40, ignore_eos=True)

    seen = []

    class Alternating(Threads):
        @property
        def count(self):
            return 1 + len(seen) // 2 % 2

        def observe(self, rows, seconds):
            seen.extend((kernels.threads(), self.count))

    model = llm({"method": "ngram", "num_speculative_tokens": 3})
    expected = model.generate("abab", params)[0].outputs[0].token_ids
    model.engine.threads = Alternating(2)
    assert model.generate("abab", params)[0].outputs[0].token_ids == expected
    assert set(seen[1::2]) == {1, 2}


def test_both_names_of_the_default():
    assert module.check_threads("auto") is None
    assert module.check_threads(3) == 3


def test_engines_in_two_threads_do_not_change_each_others_number():
    usual = torch.get_num_threads()
    entered, left = threading.Event(), threading.Event()
    seen = []

    def other():
        with kernels.on_threads(usual + 2):
            entered.set()
            left.wait(10)
            seen.append(kernels.threads())
        seen.append(kernels.threads())

    thread = threading.Thread(target=other)
    with kernels.on_threads(usual + 1):
        thread.start()
        assert entered.wait(10)
        assert kernels.threads() == usual + 1
    left.set()
    thread.join()
    assert seen == [usual + 2, usual]
    assert kernels.threads() == usual

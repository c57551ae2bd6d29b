"""How many threads there are: what affinity masks and quotas of control groups leave, what ``threads="auto"`` makes of
it on simulated machines, and several of them with one ``LLM``."""

import os
import random
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import forerun
from built import torch_threads
from forerun import LLM, ConfigError, RequestError, SamplingParams, kernels
from forerun.cli.console import set_threads
from forerun.core.threads import CoresLeft, Threads, usable_cores
from forerun.engine import engine
from refusals import refused
from simulated_cores import Machine

ROOT = str(Path(forerun.__file__).parent)
PROMPTS = ["the cat", "a dog", "abab", [5, 9, 12, 5, 9]]
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}


def answers(llm, seed):
    params = SamplingParams(seed=seed, max_tokens=12, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


def clean(llm):
    assert not llm.engine.jobs
    assert not llm.engine.busy
    llm.engine.check()


@pytest.fixture
def model(llm):
    """Drafts, pages and prefixes: all that a broken call could leave in disorder."""
    return llm(DRAFTS, page_size=16, max_num_seqs=3)


def test_threads_get_the_answers_that_one_thread_gets(model):
    expected = {seed: answers(model, seed) for seed in range(24)}
    with ThreadPoolExecutor(8) as threads:
        result = dict(zip(expected, threads.map(lambda seed: answers(model, seed), expected)))
    assert result == expected
    clean(model)


def test_an_error_in_one_thread_is_that_threads_alone(model):
    expected = answers(model, 1)

    def ask(number):
        if number % 2:
            return answers(model, 1)
        refused(RequestError, None, model.generate, ["fine", [10**6]])
        return expected

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, range(12))) == [expected] * 12
    clean(model)


def test_a_call_from_within_on_update_is_refused(model):
    def nested(update):
        model.generate("abc")

    refused(ConfigError, "on_update must not call its own LLM", model.generate, "the cat", on_update=nested)
    clean(model)
    assert answers(model, 1) == answers(model, 1)


class Lines:
    """A trace function that counts the lines of ours that run, and sends this process SIGINT at one of them."""

    def __init__(self, target=None):
        self.count, self.target = 0, target

    def __call__(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(ROOT):
            return None
        if event == "line":
            self.count += 1
            if self.count == self.target:
                signal.raise_signal(signal.SIGINT)
        return self

    def during(self, work):
        sys.settrace(self)
        try:
            return work()
        finally:
            sys.settrace(None)


@pytest.mark.parametrize("part", range(1, 12))
def test_an_interrupt_anywhere_leaves_the_engine_empty(model, part):
    expected, lines = answers(model, 3), Lines()
    assert lines.during(lambda: answers(model, 3)) == expected
    before = signal.getsignal(signal.SIGINT)
    refused(KeyboardInterrupt, None, Lines(lines.count * part // 12).during, lambda: answers(model, 3))
    assert signal.getsignal(signal.SIGINT) is before
    clean(model)
    assert answers(model, 3) == expected


def test_an_interrupt_within_on_update_takes_effect_there(model):
    reached = []

    def watch(update):
        signal.raise_signal(signal.SIGINT)
        reached.append(update)

    refused(KeyboardInterrupt, None, model.generate, "the cat", on_update=watch)
    assert not reached
    clean(model)


def test_a_handler_of_the_programs_own_is_called_and_decides(model):
    calls = []
    expected, lines = answers(model, 4), Lines()
    lines.during(lambda: answers(model, 4))
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        result = Lines(lines.count // 2).during(lambda: answers(model, 4))
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls == [signal.SIGINT]
    assert result == expected
    clean(model)


@pytest.mark.parametrize("index", ["forward", "rule", "publish", "prompt"])
def test_an_error_in_the_middle_leaves_the_engine_empty(model, monkeypatch, index):
    expected = answers(model, 5)
    broken, name = {
        "forward": (model.model, "forward"), "rule": (model.engine.rule, "accept"),
        "publish": (model.engine, "_publish"), "prompt": (model.engine.scheduler, "add"),
    }[index]  # fmt: skip
    original, calls = getattr(broken, name), []

    def fail(*arguments, **options):
        calls.append(index)
        if len(calls) == 3:
            raise MemoryError("no room")
        return original(*arguments, **options)

    monkeypatch.setattr(broken, name, fail)
    refused(MemoryError, None, answers, model, 5)
    monkeypatch.undo()
    clean(model)
    assert answers(model, 5) == expected


@pytest.fixture
def eight(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))


def grouped(folder, inner, outer=None):
    (folder / "a" / "b").mkdir(parents=True)
    for group, text in (("a/b", inner), ("a", outer)):
        if text is not None:
            (folder / group / "cpu.max").write_text(text)
    own = folder / "own"
    own.write_text("0::/a/b\n")
    return usable_cores(folder, own)


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        ("50000 100000", None, 1),  # half a core
        ("150000 100000", None, 2),
        ("max 100000", None, 8),
        ("max 100000", "300000 100000", 3),
        ("400000 100000", "300000 100000", 3),
        ("900000 100000", None, 8),
        ("nonsense", None, 8),
        (None, None, 8),
    ],
)
def test_quotas(eight, tmp_path, inner, outer, expected):
    assert grouped(tmp_path, inner, outer) == expected


@pytest.mark.parametrize(("quota", "expected"), [("150000", 2), ("-1", 8), ("0", 8)])
@pytest.mark.parametrize("folder", ["cpu/a", "cpu"])  # a container may not see its own path
def test_quotas_of_version_1(eight, tmp_path, quota, expected, folder):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "cpu.cfs_quota_us").write_text(quota)
    (tmp_path / folder / "cpu.cfs_period_us").write_text("100000")
    own = tmp_path / "own"
    own.write_text("7:memory:/b\n4:cpu,cpuacct:/a\n")
    assert usable_cores(tmp_path, own) == expected
    assert usable_cores(tmp_path, tmp_path / "missing") == 8


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


@pytest.mark.parametrize("slow", [1.0, 3.0], ids=["quiet", "second core slow"])
def test_prompts_take_all_free_cores_whatever_is_best_for_single_rows(slow):
    threads, used = Threads(2), []
    for long in (True, *[False] * 9) * 40:  # a prompt before each answer of nine tokens
        used.append((long, count := threads.begin(1500 if long else 1)))
        threads.observe(1500 if long else 1, 8.0 / count if long else 0.005 * (2 / count) * slow ** (count - 1))
    assert {count for long, count in used if long} == {2}
    assert {count for long, count in used if not long} == {1, 2}
    assert used[-1] == (False, 1 if slow > 2 else 2)


def test_rounds_of_many_rows_beside_a_busy_program():
    threads = Threads(8, cores_left=lambda: (3.0, 3.0))
    threads.observe(1, 1.0)
    assert [threads.begin(rows) for rows in (64, 255, 256, 2048)] == [2, 2, 8, 8]


def test_cores_that_other_programs_leave(tmp_path, monkeypatch):
    """Ticks of 10 ms: others computed for 50 of 100 ms, lower priorities for 40, and this process for 30."""
    stat, now = tmp_path / "stat", [5.0]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2}, raising=False)
    monkeypatch.setattr(os, "sysconf", lambda _: 100)
    niceness = [0]
    monkeypatch.setattr(os, "getpriority", lambda *_: niceness[0])
    own = {5.0: 1.0, 5.01: 1.03, 12.0: 3.53}
    monkeypatch.setattr("time.process_time", lambda: own[max(time for time in own if time <= now[0])])

    def write(user, nice, idle):
        other = "cpu1 9999 0 0 0 0 0 0 0 0 0"  # which this process may not use
        stat.write_text(
            f"cpu 1 2 3\ncpu0 {user} {nice} 7 {idle} 0 0 0 0 0 0\n{other}\ncpu2 4 0 2 9 0 1 1 1 0 0\nintr 5\n"
        )

    cores_left = CoresLeft(stat, lambda: now[0])
    write(100, 30, 50)
    assert cores_left() is None
    write(108, 34, 58)
    now[0] = 5.05
    assert cores_left() is None
    now[0] = 5.1
    assert cores_left() == pytest.approx((1.5, 1.1))
    niceness[0] = 5
    write(108, 34, 60)
    now[0] = 7.0
    assert cores_left() is None  # a window of two seconds says little
    write(108, 44, 60)
    now[0] = 7.1
    assert cores_left() == pytest.approx((1.0, 1.0))
    for idle, own_core in ((70, True), (80, False)):
        now[0] += 0.1
        write(108 + 10 * (not own_core), 44, idle)
        assert cores_left.busy() is not own_core
    now[0] = 12.0
    write(118 + 500, 44, 80)
    left, _ = cores_left()
    assert left == pytest.approx(2 - (5.0 - 2.5) / 4.7)  # a round of seconds
    stat.unlink()
    now[0] = 18.0
    assert cores_left() is None
    assert not cores_left.busy()


def test_the_system_says_that_cores_are_needed_and_free_again():
    left = iter([None, *[(left, left) for left in (8.0, 8.0, 5.5, 5.5)], None, (0.3, 0.3), (7.9, 7.9)])
    policy = Threads(8, cores_left=lambda: next(left, None))
    counts = []
    for _ in range(8):
        policy.observe(1, 1.0)
        counts.append(policy.count)
    assert counts == [8, 8, 8, 4, 4, 4, 1, 8]
    policy.home = 1
    left = iter([(7.9, 7.9)])
    policy.observe(1, 1.0)
    assert policy.count == 2  # what rounds took decides until the system says something else


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("wanted", [0.3, 0.5, 1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_threads_come_back_when_other_programs_stop(monkeypatch, lower, wanted, seed):
    """Within two seconds, whatever the probes beside them have cost. Programs of lower priority count, too: beside them
    one thread is the better choice, though the system says that cores are left."""
    machine = Machine(monkeypatch, lambda now: wanted if now < 20 else 0, lower=lower, seed=seed)
    machine.run(40)
    assert machine.share(5, 20, count=1) > 0.8
    assert machine.back(20) <= 2.0
    assert machine.share(22, 40) > 0.9


def test_neighbours_that_come_and_go(monkeypatch):
    machine = Machine(monkeypatch, lambda now: int(now) // 5 % 2)
    machine.run(60)
    assert all(machine.back(at) <= 2.0 for at in range(10, 60, 10))


def test_neighbours_that_stop_between_two_requests(monkeypatch):
    machine = Machine(monkeypatch, lambda now: 1 if now < 20 else 0, lower=True)
    machine.run(15)
    machine.wait(30)
    machine.run(40)
    assert machine.back(30) <= 2.0


@pytest.mark.parametrize("start", [[1, 1, 8, 6], [8, 1, 1, 1, 1, 5], [1, 9, *[1.5] * 10]])
@pytest.mark.parametrize("seed", range(4))
def test_a_start_that_is_busy_by_itself(monkeypatch, start, seed):
    machine = Machine(monkeypatch, lambda now: 0, start=start, seed=seed)
    machine.run(30)
    assert machine.share(0, 0.3) > 0.8
    assert machine.share(0.3, 30) > 0.9, "and noise in the system's counts costs little"


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2", "all", 5000])
def test_bad_values(value):
    refused(ConfigError, "threads", LLM, threads=value)


def test_more_threads_than_cores_are_a_warning(monkeypatch, capsys):
    before = torch.get_num_threads()
    monkeypatch.setattr("forerun.cli.console.usable_cores", lambda: 1)
    try:
        assert set_threads(2) == 2
        assert capsys.readouterr().err == "warning: 2 threads on 1 core: lower --threads\n"
        assert set_threads(None) == "auto"
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_half_a_core_or_one_means_one_thread(llm, monkeypatch):
    monkeypatch.setattr("forerun.engine.engine.usable_cores", lambda: 1)
    assert llm().engine.threads.counts == [1]


def test_changing_threads_within_an_answer_changes_no_bit(llm):
    params, seen = SamplingParams(seed=3, temperature=1.0, max_tokens=40, ignore_eos=True), []

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


def test_engines_in_two_threads_do_not_change_each_others_number():
    usual = torch.get_num_threads()
    entered, left = threading.Event(), threading.Event()

    def other():
        with kernels.on_threads(usual + 2):
            entered.set()
            left.wait(10)
            inside = kernels.threads()
        return inside, kernels.threads()

    with ThreadPoolExecutor(1) as threads:
        with kernels.on_threads(usual + 1):
            seen = threads.submit(other)
            assert entered.wait(10)
            assert kernels.threads() == usual + 1
        left.set()
    assert seen.result() == (usual + 2, usual)
    assert kernels.threads() == usual


def test_torch_leaves_the_cores_to_the_kernels(two_threads):
    usual = torch.get_num_threads()
    with kernels.on_threads(usual + 1, alone=True):
        assert (torch.get_num_threads(), kernels.threads()) == (1, usual + 1)
        with kernels.all_torch_threads():
            assert torch.get_num_threads() == usual
        assert torch.get_num_threads() == 1
        with ThreadPoolExecutor(1) as threads:  # whose number is its own
            assert threads.submit(lambda: (torch.zeros(3).sum(), torch.get_num_threads())[1]).result() == usual
    with kernels.on_threads(usual + 1), kernels.all_torch_threads():
        assert torch.get_num_threads() == usual
    assert torch.get_num_threads() == usual


@pytest.fixture
def two_threads():
    with torch_threads(2):
        yield


@pytest.mark.parametrize(("path", "expected"), [("native", 1), ("hf", 2)])
def test_an_engine_whose_layers_are_compiled_keeps_torch_to_one_thread(
    tiny_target, listen, two_threads, path, expected
):
    seen = set()
    listen(engine, "speculate", lambda *_: seen.add(torch.get_num_threads()))
    LLM(tiny_target, model_path=path, speculative_config=None).generate(["a"], SamplingParams(max_tokens=3))
    assert seen == {expected}
    assert torch.get_num_threads() == 2

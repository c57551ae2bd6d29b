"""Several threads and one ``LLM``; interrupts and errors in the middle of a call."""

import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import forerun
from forerun import ConfigError, RequestError, SamplingParams

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
        with pytest.raises(RequestError):
            model.generate(["fine", [10**6]])
        return expected

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, range(12))) == [expected] * 12
    clean(model)


def test_a_call_from_within_on_update_is_refused(model):
    def nested(update):
        model.generate("abc")

    with pytest.raises(ConfigError, match="on_update cannot use the LLM whose generate calls it"):
        model.generate("the cat", on_update=nested)
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


@pytest.mark.parametrize("part", range(1, 24))
def test_an_interrupt_anywhere_leaves_the_engine_empty(model, part):
    expected, lines = answers(model, 3), Lines()
    assert lines.during(lambda: answers(model, 3)) == expected
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        Lines(lines.count * part // 24).during(lambda: answers(model, 3))
    assert signal.getsignal(signal.SIGINT) is before
    clean(model)
    assert answers(model, 3) == expected


def test_an_interrupt_within_on_update_takes_effect_there(model):
    reached = []

    def watch(update):
        signal.raise_signal(signal.SIGINT)
        reached.append(update)

    with pytest.raises(KeyboardInterrupt):
        model.generate("the cat", on_update=watch)
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
    with pytest.raises(MemoryError):
        answers(model, 5)
    monkeypatch.undo()
    clean(model)
    assert answers(model, 5) == expected


def test_a_thread_whose_call_fails_lets_the_next_one_in(model):
    begun, may_end = threading.Event(), threading.Event()

    def stall(update):
        begun.set()
        may_end.wait(60)
        raise KeyError("a reader's mistake")

    def first():
        with pytest.raises(KeyError):
            model.generate("the cat", on_update=stall)

    with ThreadPoolExecutor(2) as threads:
        failing = threads.submit(first)
        assert begun.wait(60)
        waiting = threads.submit(answers, model, 6)
        may_end.set()
        failing.result(60)
        assert waiting.result(60) == answers(model, 6)
    clean(model)

"""The kernels' own threads: the same bits on any number of them, from several callers at once, after a fork, beside
signals, and over thousands of starts and stops."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from forerun import kernels
from forerun.models.formats.tiled import TiledLinear

ROWS, OUTPUTS, INPUTS = 3, 4000, 64
CALLERS, CYCLES = 12, 10_000
"""Callers: more than share the workers at once."""


def product(seed=0):
    """Multiplies one matrix on so many threads."""
    generator = torch.Generator().manual_seed(seed)
    layer = TiledLinear(torch.randn(OUTPUTS, INPUTS, generator=generator), None)
    call = kernels.kernel("linear", torch.float32)
    x = torch.randn(ROWS, INPUTS, generator=generator)

    def run(threads):
        y = torch.full((ROWS, OUTPUTS), torch.nan)
        call(layer.pointers[0], x.data_ptr(), y.data_ptr(), None, None, ROWS, OUTPUTS, INPUTS, OUTPUTS, threads)
        return y

    return run


def rest():
    library = kernels.library()
    assert library is not None
    library.stop_threads()


def test_same_bits_on_any_number_of_threads():
    run = product()
    expected = run(1)
    for threads in (2, 3, 7, 64, 4096):
        for _ in range(20):
            assert torch.equal(run(threads), expected), threads


@pytest.mark.slow
def test_ten_thousand_starts_and_stops():
    run = product()
    expected = run(1)
    for cycle in range(CYCLES):
        if cycle % 100 == 0:
            assert torch.equal(run(2), expected)
        else:
            run(2)
        rest()


def test_callers_at_once():
    runs = [product(seed) for seed in range(CALLERS)]
    expected = [run(1) for run in runs]

    def call(run, same):
        return [turn for turn in range(200) if not torch.equal(run(2 + turn % 3), same)]

    with ThreadPoolExecutor(CALLERS) as threads:
        wrong = threads.map(call, runs, expected)
        for _ in range(20):
            rest()  # while others call
        assert [*wrong] == [[]] * CALLERS


def forked(work):
    """Whether ``work`` is true in a child process."""
    child = os.fork()
    if not child:
        os._exit(0 if work() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.slow
def test_fork_before_and_after():
    run = product()
    expected = run(1)
    rest()
    assert forked(lambda: torch.equal(run(3), expected))
    assert torch.equal(run(3), expected)
    for _ in range(20):
        assert forked(lambda: torch.equal(run(3), expected) and forked(lambda: torch.equal(run(2), expected)))
        assert torch.equal(run(3), expected)


@pytest.mark.slow
def test_fork_while_others_call():
    run = product()
    expected = run(1)
    ended = threading.Event()

    def call():
        while not ended.is_set():
            run(2)

    caller = threading.Thread(target=call)
    caller.start()
    try:
        assert all(forked(lambda: torch.equal(run(3), expected)) for _ in range(20))
    finally:
        ended.set()
        caller.join()


def test_signals_come_to_the_process():
    run = product()
    expected = run(2)
    seen = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: seen.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        while len(seen) < 20:
            assert torch.equal(run(3), expected)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

"""Requests that end before the engine's thread has looked at them: whoever waits is told, at once."""

import asyncio
import threading

import pytest

from forerun import SamplingParams
from forerun.core.errors import ForerunError
from forerun.engine.answering import ClosedError, TimeLimitError
from forerun.engine.async_engine import AsyncEngine

PROMPT = [5, 6, 7]
PARAMS = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture
def engine(served):
    asynchronous = AsyncEngine(served.engine)
    yield asynchronous
    asynchronous.close()
    assert not served.engine.jobs
    served.engine.check()


@pytest.fixture
def free(engine):
    """The engine's thread is busy, as with a long round, until this is called."""
    gate = threading.Event()
    engine.post(lambda: gate.wait(30) and None)
    yield gate.set
    gate.set()


def run(work):
    return asyncio.run(asyncio.wait_for(work, 20))


async def submitting(engine, **choices):
    task = asyncio.create_task(engine.submit(PROMPT, PARAMS, **choices))
    while not engine.streams:
        await asyncio.sleep(0)
    return task


@pytest.mark.usefixtures("free")
def test_draining(engine):
    async def work():
        task = await submitting(engine)
        await engine.drain(0.0)
        with pytest.raises(ClosedError, match="shut down before this request ended"):
            await task

    run(work())


@pytest.mark.usefixtures("free")
def test_being_late(engine):
    async def work():
        with pytest.raises(TimeLimitError, match=r"within 0\.05 seconds"):
            await engine.submit(PROMPT, PARAMS, timeout=0.05)
        assert not engine.streams

    run(work())


def test_being_cancelled(engine, free):
    async def work():
        task = await submitting(engine, timeout=30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not engine.streams
        before = engine.engine.stats.prompt_tokens
        free()
        await (await engine.submit(PROMPT, PARAMS)).read()
        assert engine.engine.stats.prompt_tokens == before + len(PROMPT)

    run(work())


def test_closing(engine, free):
    """One waits for the engine to take its request, one for its next token."""

    async def work():
        waiting = await submitting(engine)
        free()
        stream = await waiting
        reading = asyncio.create_task(_rest(stream))
        gate = threading.Event()
        engine.post(lambda: gate.wait(30) and None)
        late = asyncio.create_task(engine.submit(PROMPT, PARAMS))
        await asyncio.sleep(0)
        threading.Timer(0.1, gate.set).start()
        engine.close()
        for task in (late, reading):
            with pytest.raises(ForerunError, match="the engine was closed") as raised:
                await task
            assert isinstance(raised.value, ClosedError)

    run(work())


async def _rest(stream):
    async for _ in stream:
        pass

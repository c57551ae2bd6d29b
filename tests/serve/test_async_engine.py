"""The engine thread: streaming, cancelling, slow readers, failures, an orderly end."""

import asyncio
import threading
from dataclasses import replace

import pytest
from running import in_loop

from forerun import SamplingParams
from forerun.core.errors import RequestError
from forerun.engine import async_engine
from forerun.engine.async_engine import AsyncEngine
from forerun.engine.client import ClosedError, QueueFullError
from forerun.serve.stream import merge

PROMPT = "def parse("
LONG = SamplingParams(temperature=0.9, seed=3, max_tokens=160, ignore_eos=True)


@pytest.fixture
def ids(served):
    return served.tokenizer.encode(PROMPT)


async def read(stream):
    return [delta async for delta in stream]


def joined(deltas):
    return "".join(d.text for d in deltas), [token for d in deltas for token in d.token_ids]


@in_loop
async def test_streams_what_a_lone_decode_gives(engine, served, ids):
    params = [SamplingParams(temperature=t, seed=s, max_tokens=40) for t in (0.0, 0.9) for s in (1, 2, 3)]
    expected = served.generate([PROMPT] * 6, params, speculate=False)
    methods = ["draft_model", "ngram", None] * 2
    streams = [await engine.submit(ids, p, method=m) for p, m in zip(params, methods)]
    for deltas, lone in zip(await asyncio.gather(*map(read, streams)), expected):
        assert joined(deltas) == (lone.outputs[0].text, lone.outputs[0].token_ids)
        assert [d.finish.reason for d in deltas if d.finish] == [lone.outputs[0].finish_reason]
        assert len(deltas) > 1


@in_loop
async def test_it_runs_no_rounds_of_anothers_requests(engine, served, ids, monkeypatch):
    """Two servers of one engine: the idle one may wake up, for a reader that left late, during the other's rounds."""
    idle, threads, step = AsyncEngine(served.engine), set(), served.engine.step

    def noting():
        threads.add(threading.current_thread())
        idle.post(lambda: None)
        return step()

    monkeypatch.setattr(served.engine, "step", noting)
    expected = served.generate([PROMPT], LONG)[0].outputs[0]
    assert joined(await read(await engine.submit(ids, LONG))) == (expected.text, expected.token_ids)
    idle.close()
    assert threads == {threading.current_thread(), engine._thread}


@pytest.mark.parametrize(("delay", "together"), [(0.0, 1), (3.5, 3), (1e9, 16)])
@in_loop
async def test_short_rounds_are_handed_over_together(served, monkeypatch, delay, together):
    """On a clock on which a round takes a second: first and last tokens at once, the others as late as allowed."""
    rounds, batches = 0, []

    class Noting(AsyncEngine):
        def _deliver_batch(self, batch):
            batches.append([(delta.seconds, len(delta.token_ids)) for _, deltas in batch for delta in deltas])
            super()._deliver_batch(batch)

    def step():
        nonlocal rounds
        rounds += 1
        return type(served.engine).step(served.engine)

    monkeypatch.setattr(served.engine, "clock", lambda: float(rounds))
    monkeypatch.setattr(served.engine, "step", step)
    engine = Noting(served.engine, max_backlog=64, max_delay=delay)
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=45, ignore_eos=True)
    deltas = await read(await engine.submit(served.tokenizer.encode(PROMPT), params, speculate=False))
    engine.close()
    assert joined(deltas)[1] == served.generate([PROMPT], params, speculate=False)[0].outputs[0].token_ids
    assert [len(batch) for batch in batches[:-1]] == [1] + [together] * (len(batches) - 2)
    assert 1 <= len(batches[-1]) <= together
    assert sum(count for batch in batches for _, count in batch) == 45


@in_loop
async def test_readers_wake_up_while_the_model_computes(served, monkeypatch):
    """News go out as a forward begins, not while drafting; only the last ones have no forward to wait for."""
    happened = []

    def noting(name, function):
        def noted(*arguments):
            happened.append(name)
            return function(*arguments)

        return noted

    monkeypatch.setattr(served.engine.router, "propose", noting("draft", served.engine.router.propose))
    monkeypatch.setattr(served.engine.model, "forward", noting("forward", served.engine.model.forward))
    monkeypatch.setattr(async_engine, "_post_to", noting("news", async_engine._post_to))
    engine = AsyncEngine(served.engine, max_delay=0.0)
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=20, ignore_eos=True)
    await read(await engine.submit(served.tokenizer.encode(PROMPT), params, method="draft_model"))
    engine.close()
    rounds = happened.count("forward")
    assert happened == ["news", "draft", "forward", *["draft", "news", "forward"] * (rounds - 1), "news"]


@in_loop
async def test_reading_joins_rounds_and_changes_nothing(engine, served, ids):
    """A reader that comes late gets few deltas, of the same tokens and text; rounds with more to tell stay apart."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True, n=2)
    expected = served.generate([PROMPT], params, speculate=False)[0].outputs

    async def read_late(wish, **choices):
        stream = await engine.submit(ids, wish, **choices)
        while stream.backlog < 6:
            await asyncio.sleep(0.002)
        deltas = []
        while fresh := await stream.read():
            deltas.extend(fresh)
        return deltas

    deltas = await read_late(params)
    for answer in expected:
        assert joined([d for d in deltas if d.index == answer.index]) == (answer.text, answer.token_ids)
    rounds = await read_late(params, trace=True)
    assert all(delta.round is not None for delta in rounds)
    assert len(rounds) > len(deltas)
    with_logprobs = await read_late(replace(params, logprobs=0), speculate=False)
    assert [len(delta.logprobs) for delta in with_logprobs] == [1] * 80


@in_loop
async def test_cancelling_the_reader_aborts(engine, served):
    started = asyncio.Event()

    async def consume():
        async for _ in merge([await engine.submit(served.tokenizer.encode(PROMPT), LONG)]):
            started.set()
            await asyncio.sleep(0.01)

    task = asyncio.create_task(consume())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert not engine.streams


@in_loop
async def test_a_slow_reader_is_set_aside_and_loses_nothing(engine, served, ids):
    expected = served.generate([PROMPT], LONG, speculate=False)[0].outputs[0]
    slow, unread = [await engine.submit(ids, LONG, speculate=False) for _ in range(2)]
    while not (slow.paused and unread.paused):
        await asyncio.sleep(0.005)
    backlog = slow.backlog
    others = [await engine.submit(ids, SamplingParams(max_tokens=60, seed=1)) for _ in range(4)]
    await asyncio.gather(*map(read, others))
    # The others were not stalled, the slow one made nothing more, and its pages are free.
    assert slow.backlog == backlog
    assert engine.max_backlog <= backlog < engine.max_backlog + engine.max_backlog // 4
    assert not served.engine.target.attention.pool.block_tables
    assert engine.snapshot().waiting == 2
    assert joined(await read(slow)) == (expected.text, expected.token_ids)
    assert served.engine.stats.preemptions > 0
    unread.abort()


@in_loop
async def test_a_failing_round_ends_its_requests_only(engine, served, ids, monkeypatch, plain):
    params = SamplingParams(max_tokens=20, temperature=0.0)
    expected = plain(PROMPT, params)
    model = served.engine.model
    forward = model.forward
    broke = False

    def broken(batch, attention):
        nonlocal broke
        if not broke and len(served.engine.scheduler.running) == 4:
            broke = True
            raise MemoryError("no memory for this batch")
        return forward(batch, attention)

    monkeypatch.setattr(model, "forward", broken)

    async def ask():
        return await read(await engine.submit(ids, LONG, speculate=False))

    results = await asyncio.gather(*(ask() for _ in range(5)))
    reasons = [deltas[-1].finish for deltas in results]
    assert [f.reason for f in reasons] == ["error"] * 4 + ["length"], "max_num_seqs is 4: the fifth was waiting"
    assert "MemoryError: no memory for this batch" in str(reasons[0].stopped_by)
    assert joined(await read(await engine.submit(ids, params)))[1] == expected.token_ids


@in_loop
async def test_every_answer_takes_a_place_in_the_queue(engine, ids):
    """Four run and four may wait; of a request for n answers, each is one of them."""
    many = await engine.submit(ids, replace(LONG, n=6))
    with pytest.raises(QueueFullError, match="2 waiting, limit 4"):
        await engine.submit(ids, replace(LONG, n=3))
    two = await engine.submit(ids, replace(LONG, n=2))
    with pytest.raises(QueueFullError):
        await engine.submit(ids, LONG)
    many.abort()
    for stream in (two, await engine.submit(ids, replace(LONG, n=4))):
        stream.abort()


@in_loop
async def test_an_idle_engine_takes_any_n(engine, ids):
    short = SamplingParams(max_tokens=2, ignore_eos=True)
    stream = await engine.submit(ids, replace(short, n=128))
    with pytest.raises(QueueFullError, match=r"1[12][0-9] waiting"):  # some may run, or have run
        await engine.submit(ids, short)
    assert sum(delta.finish is not None for delta in await read(stream)) == 128
    assert (await read(await engine.submit(ids, short)))[-1].finish.reason == "length"


@in_loop
async def test_answers_that_have_ended_wait_no_more(engine, ids):
    """A request with one long answer left is one sequence, whatever its n was."""
    many = await engine.submit(ids, replace(LONG, n=8, max_tokens=40))
    with pytest.raises(QueueFullError):
        await engine.submit(ids, LONG)
    while sum(job.finish is None for job in many.jobs) > 4:
        await many.read()
    (await engine.submit(ids, LONG)).abort()
    many.abort()


@in_loop
async def test_a_bad_request_fails_alone(engine, ids):
    good = await engine.submit(ids, SamplingParams(max_tokens=8))
    with pytest.raises(RequestError, match="empty"):
        await engine.submit([], LONG)
    with pytest.raises(RequestError, match="not loaded; loaded: draft_model, ngram, pattern"):
        await engine.submit(ids, LONG, method="medusa")
    with pytest.raises(RequestError, match="from 0 to 3"):
        await engine.submit(ids, LONG, max_draft=9)
    assert (await read(good))[-1].finish.reason == "length"
    assert not engine.streams


@in_loop
async def test_draining_finishes_what_runs(engine, ids):
    stream = await engine.submit(ids, SamplingParams(max_tokens=30, ignore_eos=True))
    reading = asyncio.create_task(read(stream))
    draining = asyncio.create_task(engine.drain(30))
    await asyncio.sleep(0)
    with pytest.raises(ClosedError):
        await engine.submit(ids, LONG)
    await draining
    assert len(joined(await reading)[1]) == 30


@pytest.mark.parametrize("include", [False, True])
@in_loop
async def test_text_that_may_become_a_stop_is_held_back(engine, served, ids, include):
    """Stops taken out of the answer itself, at every length, so that they cross tokens."""
    base = SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True)
    text = served.generate([PROMPT], base, speculate=False)[0].outputs[0].text
    for start, length in ((20, 2), (31, 7), (40, 15)):
        stop = text[start : start + length]
        at = text.index(stop)
        expected = text[: at + len(stop)] if include else text[:at]
        params = replace(base, stop=[stop, "never said"], include_stop_str_in_output=include)
        deltas = await read(await engine.submit(ids, params))
        assert joined(deltas)[0] == expected
        shown = ""
        for delta in deltas:
            shown += delta.text
            assert expected.startswith(shown)
        assert deltas[-1].finish.stopped_by == stop

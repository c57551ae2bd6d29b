"""How requests end: before the engine's thread looks at them, what a streamed answer writes, the line in the log."""

import asyncio
import json
import logging
import re
import threading
import time

import httpx2
import pytest
from running import ASK, in_loop, wait_idle

from forerun import SamplingParams
from forerun.core.errors import ForerunError
from forerun.engine.async_engine import AsyncEngine
from forerun.engine.client import ClosedError, TimeLimitError
from forerun.serve.answering import EventStream
from forerun.serve.app import ServerOptions, create_app

PROMPT = [5, 6, 7]
PARAMS = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture
def free(engine):
    """The engine's thread is busy, as with a long round, until this is called."""
    gate = threading.Event()
    engine.post(lambda: gate.wait(30) and None)
    yield gate.set
    gate.set()


async def submitting(engine, **choices):
    task = asyncio.create_task(engine.submit(PROMPT, PARAMS, **choices))
    while not engine.streams:
        await asyncio.sleep(0)
    return task


@pytest.mark.usefixtures("free")
@in_loop
async def test_draining(engine):
    task = await submitting(engine)
    await engine.drain(0.0)
    with pytest.raises(ClosedError, match="shut down before this request ended"):
        await task


@pytest.mark.usefixtures("free")
@in_loop
async def test_being_late(engine):
    with pytest.raises(TimeLimitError, match=r"within 0\.05 seconds"):
        await engine.submit(PROMPT, PARAMS, timeout=0.05)
    assert not engine.streams


@in_loop
async def test_being_cancelled(engine, free):
    task = await submitting(engine, timeout=30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not engine.streams
    before = engine.engine.stats.prompt_tokens
    free()
    await (await engine.submit(PROMPT, PARAMS)).read()
    assert engine.engine.stats.prompt_tokens == before + len(PROMPT)


@in_loop
async def test_closing(engine, free):
    """One waits for the engine to take its request, one for its next token."""
    waiting = await submitting(engine)
    free()
    reading = asyncio.create_task(_rest(await waiting))
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


async def _rest(stream):
    async for _ in stream:
        pass


PROMPTS = ["def parse(", "a = "]


def messages(engine, body):
    """Everything that the application sends for this request; the client stays."""
    app = create_app(engine, ServerOptions(served_model_name="tiny"))
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
        "query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1", "server": ("localhost", 80),
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }  # fmt: skip
    sent = []

    async def work():
        ended = asyncio.Event()
        pending = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive():
            if pending:
                return pending.pop()
            await ended.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                ended.set()

        await asyncio.wait_for(app(scope, receive, send), 60)

    asyncio.run(work())
    return sent


@pytest.mark.parametrize("usage", [False, True])
def test_an_answer_ends_in_one_write(served, usage):
    """Last tokens, usage, [DONE] and the response's end; several answers, of which some end earlier."""
    stops = {"stop": [" "], "temperature": 0.9, "seed": 5, "max_tokens": 30, "n": 2}
    expected = served.generate(PROMPTS, SamplingParams(**stops), speculate=False)
    answers = [output for request in expected for output in request.outputs]
    assert len({len(output.token_ids) for output in answers}) > 1, "these answers should end in different rounds"
    engine = AsyncEngine(served.engine)
    body = {"prompt": PROMPTS, "stream": True, "speculative": {"enabled": False}, **stops}
    try:
        sent = messages(engine, {**body, "stream_options": {"include_usage": True}} if usage else body)
    finally:
        engine.close()
    assert [message["type"] for message in sent] == ["http.response.start"] + ["http.response.body"] * (len(sent) - 1)
    assert [message["more_body"] for message in sent[1:]] == [True] * (len(sent) - 2) + [False]
    events = [[part[6:] for part in message["body"].decode().split("\n\n") if part] for message in sent[1:]]
    assert all(events), "nothing empty is sent"
    assert [event for piece in events for event in piece].count("[DONE]") == 1
    assert events[-1][-1] == "[DONE]"
    bodies = [json.loads(event) for event in events[-1][:-1]]
    if usage:
        assert bodies.pop()["usage"]["completion_tokens"] == sum(len(output.token_ids) for output in answers)
    assert bodies[-1]["choices"][0]["finish_reason"] is not None
    choices = [c for piece in events for event in piece if event != "[DONE]" for c in json.loads(event)["choices"]]
    for index, output in enumerate(answers):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == output.text
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == [output.finish_reason]


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LOG_PROMPT = {"prompt": "def parse(", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def lines(caplog):
    """``lines(count)``: what the next requests leave, by key, once there are so many."""

    def get(count):
        for _ in range(200):
            told = [record.getMessage() for record in caplog.records if record.name == "forerun.requests"]
            if len(told) >= count:
                break
            time.sleep(0.01)
        caplog.clear()
        return [{"path": line.split()[1], **dict(re.findall(r"(\w+)=(\S+)", line))} for line in told]

    with caplog.at_level(logging.INFO, "forerun.requests"):
        yield get


def check(line, answer, finish, tokens):
    assert (line["status"], line["finish"], line["completion_tokens"]) == ("200", finish, str(tokens))
    assert line["id"] == answer.headers["x-request-id"]
    assert float(line["seconds"]) > 0
    assert float(line["tokens_per_second"]) > 0


def test_an_answer_leaves_a_line(server, lines):
    answer = server.post(COMPLETIONS, {**LOG_PROMPT, "speculative": {"method": "draft_model"}})
    (line,) = lines(1)
    check(line, answer, "length", 12)
    assert answer.json()["id"] == f"cmpl-{line['id']}"
    usage, metrics = answer.json()["usage"], answer.json()["metrics"]["speculative_decoding"]
    assert line["prompt_tokens"] == str(usage["prompt_tokens"])
    assert float(line["mean_acceptance_length"]) == pytest.approx(metrics["mean_acceptance_length"], rel=0.01)
    assert float(line["draft_acceptance_rate"]) == pytest.approx(metrics["draft_acceptance_rate"], rel=0.01)
    server.post(COMPLETIONS, {**LOG_PROMPT, "speculative": {"enabled": False}})
    (plain,) = lines(1)
    assert (plain["mean_acceptance_length"], plain["draft_acceptance_rate"]) == ("-", "-")


def test_streams_and_refusals_leave_one_too(server, lines):
    tiled = server.post(COMPLETIONS, {**LOG_PROMPT, "stream": True, "n": 2})
    wrong = server.post(CHAT, {"messages": []})
    server.post(CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})
    for path in ("/health", "/metrics", "/v1/models"):
        server.http.get(path)
    first, second, third = lines(3)
    check(first, tiled, "length", 24)
    assert (second["path"], second["status"], second["id"]) == (CHAT, "400", wrong.headers["x-request-id"])
    assert "completion_tokens" not in second
    assert third["path"] == CHAT
    assert not lines(0)


LEFT = {
    COMPLETIONS: {"prompt": "def parse(", "max_tokens": 480, "ignore_eos": True},
    "/v1/messages": {"messages": ASK, "max_tokens": 480, "temperature": 0},
    "/api/chat": {"messages": ASK, "options": {"temperature": 0}},
}


@pytest.mark.usefixtures("slower_rounds")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", LEFT)
def test_hanging_up_frees_the_request(server, path, stream):
    body = {**LEFT[path], "stream": stream}
    if stream:
        with server.http.stream("POST", path, json=body) as answer:
            next(answer.iter_lines())
            assert server.engine.engine.jobs
    else:
        with pytest.raises(httpx2.TimeoutException):
            server.post(path, body, timeout=0.3)
    wait_idle(server)


def test_a_stream_that_cannot_begin_frees_the_request(server, monkeypatch):
    async def broken(self, send):
        raise RuntimeError

    monkeypatch.setattr(EventStream, "stream_response", broken)
    body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
    assert server.post(COMPLETIONS, body, headers={"Connection": "close"}).status_code == 500
    wait_idle(server)


@pytest.mark.usefixtures("slow_rounds")
def test_whoever_leaves_leaves_a_line(server, lines):
    with server.http.stream("POST", COMPLETIONS, json={**LOG_PROMPT, "max_tokens": 400, "stream": True}) as answer:
        next(answer.iter_text())
    (line,) = lines(1)
    assert line["finish"] == "abort"
    assert 0 < int(line["completion_tokens"]) < 400


def test_a_stream_that_fails_says_so(server, served, lines, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(served.engine.model, "forward", lambda batch, cache: 1 / 0)
        assert '"internal_error"' in server.post(COMPLETIONS, {**LOG_PROMPT, "prompt": "b = ", "stream": True}).text
        (line,) = lines(1)
    assert (line["status"], line["finish"]) == ("200", "error")

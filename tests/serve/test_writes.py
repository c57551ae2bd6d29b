"""What a streamed answer writes, message by message, to the ASGI server."""

import asyncio
import json

import pytest

from forerun import SamplingParams
from forerun.engine.async_engine import AsyncEngine
from forerun.serve.app import ServerOptions, create_app

PROMPTS = ["def parse(", "a = "]


def messages(engine, body):
    """Everything that the application sends for this request; the client stays."""
    app = create_app(engine, ServerOptions(model_name="tiny"))
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

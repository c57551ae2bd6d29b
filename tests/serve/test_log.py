"""The line that a request leaves in the log, and the id that it shares with its answer."""

import logging
import re
import time

import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"prompt": "def parse(", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


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
    answer = server.post(COMPLETIONS, {**PROMPT, "speculative": {"method": "draft_model"}})
    (line,) = lines(1)
    check(line, answer, "length", 12)
    assert answer.json()["id"] == f"cmpl-{line['id']}"
    usage, metrics = answer.json()["usage"], answer.json()["metrics"]["speculative_decoding"]
    assert line["prompt_tokens"] == str(usage["prompt_tokens"])
    assert float(line["mean_acceptance_length"]) == pytest.approx(metrics["mean_acceptance_length"], rel=0.01)
    assert float(line["draft_acceptance_rate"]) == pytest.approx(metrics["draft_acceptance_rate"], rel=0.01)
    server.post(COMPLETIONS, {**PROMPT, "speculative": {"enabled": False}})
    (plain,) = lines(1)
    assert (plain["mean_acceptance_length"], plain["draft_acceptance_rate"]) == ("-", "-")


def test_streams_and_refusals_leave_one_too(server, lines):
    tiled = server.post(COMPLETIONS, {**PROMPT, "stream": True, "n": 2})
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


@pytest.mark.usefixtures("slow_rounds")
def test_whoever_leaves_leaves_a_line(server, lines):
    with server.http.stream("POST", COMPLETIONS, json={**PROMPT, "max_tokens": 400, "stream": True}) as answer:
        next(answer.iter_text())
    (line,) = lines(1)
    assert line["finish"] == "abort"
    assert 0 < int(line["completion_tokens"]) < 400


def test_a_stream_that_fails_says_so(server, served, lines, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(served.engine.model, "forward", lambda batch, cache: 1 / 0)
        assert '"internal_error"' in server.post(COMPLETIONS, {**PROMPT, "prompt": "b = ", "stream": True}).text
        (line,) = lines(1)
    assert (line["status"], line["finish"]) == ("200", "error")

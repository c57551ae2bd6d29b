"""Batch files: one answer for each line, however it is interrupted."""

import asyncio
import json
import signal
import sys
import time
from collections import Counter
from contextlib import closing

import pytest
from running import TEMPLATE

from forerun import SamplingParams
from forerun.cli.main import run as forerun
from forerun.core.errors import ConfigError
from forerun.engine.async_engine import AsyncEngine
from forerun.serve.app import ServerOptions, create_app
from forerun.serve.batch import Answers, BatchLine, Tally, in_process, run
from refusals import refused

SEEDED = {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0.9, "seed": 3, "ignore_eos": True}


@pytest.fixture
def ask(served):
    engine = AsyncEngine(served.engine)
    yield in_process(create_app(engine, ServerOptions(served_model_name="tiny", chat_template=TEMPLATE)))
    engine.close()


def request(name, **body):
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {**SEEDED, **body}})


def written(path, lines):
    path.write_text("\n".join(lines) + "\n")
    return path


def answer(source, out, ask):
    answers = Answers(out, source)
    try:
        return asyncio.run(run(source, answers, ask, concurrency=4))
    finally:
        answers.close()


def read(out):
    """The answers by ``custom_id``, each of which has one."""
    result = [json.loads(line) for line in out.read_text().splitlines()]
    assert set(Counter(item["custom_id"] for item in result if item["custom_id"]).values()) <= {1}
    assert len({item["id"] for item in result}) == len(result)
    return {item["custom_id"]: item for item in result}


WRONG = {
    "no object": ("[1]", "must be a JSON object"),
    "no JSON": ('{"custom_id": "x"', "is not valid JSON"),
    "no name": ('{"method": "POST"}', "has no custom_id"),
    "method": ('{"custom_id": "GET", "method": "GET"}', "method must be 'POST'"),
    "url": ('{"custom_id": "url", "method": "POST", "url": "/v1/embeddings"}', "url must be one of"),
    "body": ('{"custom_id": "b", "method": "POST", "url": "/v1/completions"}', None),
    "stream": (request("stream", stream=True), "a batch does not stream"),
}


def test_every_line_has_one_answer(ask, tmp_path, plain):
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=3, ignore_eos=True)
    expected = plain({"prompt_token_ids": [5, 6, 7]}, params).text  # before the engine's thread has work
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    good = [
        request("a"),
        json.dumps({"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": chat}),
        "",
        request("refused \ud800", temperature=-1),
        request("a", seed=4),
        request("model", model="gpt-9"),
    ]
    source = written(tmp_path / "in.jsonl", [*good, *(line for line, _ in WRONG.values())])
    tally = answer(source, tmp_path / "out.jsonl", ask)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert (len(lines), tally) == (5 + len(WRONG), Tally(0, 5 + len(WRONG), 5 + len(WRONG) - 2))
    first = [item for item in lines if item["custom_id"] == "a" and item["error"] is None]
    body = first[0]["response"]["body"]
    assert (len(first), body["choices"][0]["text"]) == (1, expected)
    by_name = {item["custom_id"]: item for item in lines}
    assert by_name["c"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    for name, status in (("refused \ud800", 400), ("model", 404)):
        assert by_name[name]["response"]["status_code"] == status
        assert by_name[name]["response"]["body"]["error"]["message"]
    said = [item["error"]["message"] for item in lines if item["error"] is not None]
    for number, (_, message) in enumerate(WRONG.values(), start=len(good) + 1):
        assert any(text.startswith(f"line {number}") and (message or "body must be") in text for text in said)
    assert any("is another line's already" in text for text in said)


def test_it_goes_on_behind_what_is_whole(ask, tmp_path):
    source = written(tmp_path / "in.jsonl", [request(str(i), seed=i) for i in range(9)])
    out = tmp_path / "out.jsonl"
    assert answer(source, out, ask) == Tally(0, 9, 0)
    whole = out.read_bytes()
    texts = {name: item["response"]["body"]["choices"] for name, item in read(out).items()}
    kept = b"".join(whole.splitlines(keepends=True)[:4])
    out.write_bytes(kept + whole.splitlines()[4][:40])
    assert answer(source, out, ask) == Tally(4, 5, 0)
    assert out.read_bytes().startswith(kept)
    assert {name: item["response"]["body"]["choices"] for name, item in read(out).items()} == texts
    assert answer(source, out, ask) == Tally(9, 0, 0)


def test_answers_to_another_file_are_kept(tmp_path):
    source = written(tmp_path / "in.jsonl", [request("a")])
    out = tmp_path / "out.jsonl"
    for content, message in (
        (b'{"id": "batch_req_1_x"}\n', "1 answers to lines"),
        *((text, "does not contain batch answers") for text in (b"hello\n", b"[1,2,3]", b'{"id": "batch"}')),
    ):
        out.write_bytes(content)
        refused(ConfigError, message, Answers, out, source)
        assert out.read_bytes() == content
    out.unlink()
    first = Answers(out, source)
    refused(ConfigError, "another process", Answers, out, source)
    first.close()
    Answers(out, source).close()


def test_a_full_disk_is_one_line(tmp_path):
    answers = Answers(tmp_path / "out.jsonl", written(tmp_path / "in.jsonl", [request("a")]))
    answers.file.close()
    answers.file = open("/dev/full", "wb")  # noqa: SIM115
    refused(ConfigError, r"cannot write .*out\.jsonl: No space left", answers.write, BatchLine("a"), 200, {})
    answers.close()


def test_who_is_too_busy_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr("forerun.serve.batch.WAIT", 0.0)
    source = written(tmp_path / "in.jsonl", [request("a"), request("b")])
    replies = [(429, {}), (503, {}), (200, {"x": 1}), (500, {"error": {}})]

    async def busy(url, body):
        return replies.pop(0)

    assert answer(source, tmp_path / "out.jsonl", busy) == Tally(0, 2, 1)
    assert not replies


def test_the_command(model_folder, tmp_path, capsys):
    source = written(tmp_path / "in.jsonl", [request("a"), "oops"])
    options = ["--model", str(model_folder), "--spec-method", "ngram"]
    assert forerun(["batch", str(source), *options]) == 0
    assert capsys.readouterr().err.endswith("2 answers in " + f"{tmp_path}/in.answers.jsonl, 1 of them with an error\n")
    assert forerun(["batch", str(source), "--out", str(source), *options]) == 2
    assert forerun(["batch", str(tmp_path / "none"), *options]) == 2
    assert "there is no such file" in capsys.readouterr().err


def test_replicas_need_ray(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "forerun.scale.cluster", raising=False)
    source, out = written(tmp_path / "in.jsonl", [request("a")]), tmp_path / "out.jsonl"
    assert forerun(["batch", str(source), "--out", str(out), "--replicas", "2"]) == 2
    assert capsys.readouterr().err == "error: --replicas needs ray: pip install 'forerun[ray]'\n"
    assert not out.read_bytes()


def test_a_killed_one_goes_on(warm, model_folder, tmp_path, monkeypatch):
    """Killed, then stopped, then left alone."""
    names = {str(i) for i in range(60)}
    source = written(tmp_path / "in.jsonl", [request(name, seed=int(name), max_tokens=200) for name in sorted(names)])
    out = tmp_path / "out.jsonl"
    options = ["batch", str(source), "--out", str(out), "--model", str(model_folder), "--max-num-seqs", "4"]
    with closing(warm.piped(*options)) as process:
        while not out.exists() or out.read_bytes().count(b"\n") <= 5:
            assert process.poll() is None
            time.sleep(0.005)
        process.kill()
    write = Answers.write

    def write_and_stop(*given):
        write(*given)
        signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(Answers, "write", write_and_stop)
        assert forerun(options) == 130
    assert 6 < out.read_bytes().count(b"\n") < len(names)
    assert forerun(options) == 0
    result = read(out)
    assert set(result) == names
    assert {item["response"]["status_code"] for item in result.values()} == {200}

"""``forerun serve`` as a process: it stops when asked, once what runs is done; a second one on its port says so."""

import json
import re
import signal
import socket
import threading
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

import httpx2
import pytest

from forerun.cli.main import run
from forerun.cli.serve import served_drafters
from warm import PROGRAM

FAST_LOG = f"from forerun.serve import metrics; metrics.INTERVAL = 0.05; {PROGRAM}"
KEY = {"Authorization": "Bearer s3cret"}
HALF = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer s3cret\r\nContent-Length: 500\r\n"
    b"Expect: 100-continue\r\n\r\n{"
)


@contextmanager
def serving(warm, *options, code=FAST_LOG, **environment):
    """The process, and the address where it listens."""
    process = warm.piped("serve", "--port", "0", *options, code=code, FORERUN_API_KEY="s3cret", COLUMNS="200",
                         **environment)  # fmt: skip
    lines = []
    for line in process.stdout:
        lines.append(line)
        if result := re.search(r"listening on (http://127\.0\.0\.1:\d+)", line):
            break
    else:
        raise AssertionError("".join(lines))
    try:
        yield process, result[1]
    finally:
        process.close()


def begin(url, texts, **body):
    """Reads a streamed answer into ``texts``; returns once it has begun."""
    begun = threading.Event()
    body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True, "temperature": 0, **body}

    def read():
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, headers=KEY, timeout=60) as answer:
            parts = []
            with suppress(httpx2.HTTPError):
                for part in answer.iter_text():
                    parts.append(part)
                    begun.set()
            texts.append("".join(parts))

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(30)
    return reader


def test_it_serves_what_a_file_of_options_says_and_a_second_signal_ends_it_at_once(warm):
    kind = signal.SIGINT  # SIGTERM takes the same way, as a later test shows
    example = Path(__file__).parents[2] / "docs" / "examples" / "forerun.yaml"
    options = ["--config", str(example), "--served-model-name", "mine", "--max-num-seqs", "1", "--drain-timeout", "50"]
    with (
        serving(warm, *options) as (server, url),
        httpx2.Client(base_url=f"{url}/v1", headers=KEY, timeout=60) as client,
    ):
        assert client.get("/models").json()["data"][0]["id"] == "mine"
        for method in ("draft_model", "ngram"):
            body = {"prompt": "def ", "max_tokens": 4, "speculative": {"method": method}}
            assert client.post("/completions", json=body).status_code == 200
        for host, status in (("llm.example.org", 200), ("other.example.org", 403)):
            assert client.get("/models", headers={"Host": host}).status_code == status

        texts = []
        reader = begin(url, texts, max_tokens=500, n=128, logprobs=5)
        server.send_signal(kind)
        while httpx2.get(f"{url}/health").status_code == 200:
            sleep(0.05)
        server.send_signal(kind)
        assert server.wait(15) in (0, -kind)
        reader.join(30)
        assert "the server shut down" in texts[0]
        assert "Traceback" not in server.stdout.read()


def test_it_serves_and_ends(warm, model_folder, capsys):
    drafters = ["--spec-method", "ngram", "--also-draft", '{"method": "pattern"}']
    with serving(warm, "--allowed-host", "models.example", "--model", str(model_folder), *drafters) as (server, url):
        answers(url, capsys)
        texts = []
        readers = [begin(url, texts) for _ in range(3)]
        server.send_signal(signal.SIGTERM)
        for reader in readers:
            reader.join(60)
        assert server.wait(30) in (0, -signal.SIGTERM)
        for text in texts:
            events = [json.loads(part[6:]) for part in text.split("\n\n") if part and "[DONE]" not in part]
            assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert re.search(r"running: [1-3] requests, waiting: 0, .* KV cache usage: ", server.stdout.read())
        assert len(texts) == 3
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"{url}/health")


def answers(url, capsys):
    assert httpx2.get(f"{url}/v1/models").status_code == 401
    model = httpx2.get(f"{url}/v1/models", headers=KEY).json()["data"][0]
    assert set(model["speculative"]) == {"ngram", "pattern"}

    for host, status in (("models.example", 200), ("localhost", 200), ("evil.example", 403)):
        assert httpx2.get(f"{url}/health", headers={"Host": host}).status_code == status

    again = {"prompt": [5] * 200, "max_tokens": 1}
    saved = [httpx2.post(f"{url}/v1/completions", json=again, headers=KEY).json()["usage"] for _ in range(2)]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in saved] == [0, 192]

    port = url.rpartition(":")[2]
    assert run(["serve", "--port", port]) == 2
    shown = capsys.readouterr()
    assert shown.err == f"error: port {port} on 127.0.0.1 is in use: choose another with --port\n"
    assert shown.out == ""


def test_who_asks_while_it_drains_is_reported(warm, model_folder):
    """An answer that outlasts the drain; meanwhile new connections are taken, and refused in words."""
    options = ["--model", str(model_folder), "--max-num-seqs", "1", "--drain-timeout", "2"]
    with (
        serving(warm, *options) as (server, url),
        httpx2.Client(base_url=url, headers=KEY, timeout=30) as known,
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=20) as half,
    ):
        assert known.get("/health").status_code == 200
        texts = []
        reader = begin(url, texts, max_tokens=500, n=128, logprobs=5)
        half.sendall(HALF)
        assert half.recv(1000).startswith(b"HTTP/1.1 100 ")  # its body is waited for
        server.send_signal(signal.SIGTERM)
        signalled = monotonic()
        while known.get("/health").status_code == 200:
            assert monotonic() < signalled + 20
            sleep(0.02)
        for get, post in ((httpx2.get, httpx2.post), (known.get, known.post)):
            index = url if get is httpx2.get else ""
            assert get(f"{index}/health").json()["error"]["code"] == "shutting_down"
            refused = post(f"{index}/v1/completions", json={"prompt": "x"}, headers=KEY)
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
            assert refused.json()["error"]["code"] == "shutting_down"
        assert half.recv(1000).startswith(b"HTTP/1.1 503 ")
        reader.join(30)
        assert "(it had 2 s)" in texts[0]
        assert texts[0].endswith("data: [DONE]\n\n")
        assert server.wait(30) in (0, -signal.SIGTERM)
        assert 1.9 < monotonic() - signalled < 20
        assert "Traceback" not in server.stdout.read()


SLOW = """
import asyncio, logging
from forerun.serve.run import DrainingServer, open_socket

class Done:
    async def drain(self, seconds):
        pass

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        for name in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{name}.complete"})
        print("closed", flush=True)
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while True:
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await asyncio.sleep(0.1)

logging.disable()
listener = open_socket("127.0.0.1", 0)
print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
DrainingServer(app, Done(), 60.0).run(sockets=[listener])
"""


def test_a_signal_once_all_answers_are_made_ends_it_too(warm):
    """The engine has drained, and an answer is still being written, without end."""
    with closing(warm.piped(code=SLOW)) as server:
        url = server.stdout.readline().strip()
        with httpx2.stream("GET", url, timeout=30) as answer:
            assert next(answer.iter_bytes())
            server.send_signal(signal.SIGTERM)
            with suppress(ConnectionRefusedError):  # it no longer listens: the engine is done
                while True:
                    socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))).close()
                    sleep(0.02)
            server.send_signal(signal.SIGTERM)
            assert server.wait(20) in (0, -signal.SIGTERM)
        assert server.stdout.read() == "closed\n"


def test_a_key_that_protects_nothing_is_refused(capsys):
    """Before a model is loaded."""
    assert run(["serve", "--port", "0", "--model", "/nonexistent", "--api-key", ""]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: the API key must not be empty, nor begin or end with white space")


@pytest.mark.parametrize("variable", ["", "s3cret\n"])
def test_a_variable_that_protects_nothing_is_refused(monkeypatch, capsys, variable):
    """``Authorization: Bearer`` alone would be enough, or nothing would."""
    monkeypatch.setenv("FORERUN_API_KEY", variable)
    assert run(["serve", "--port", "0"]) == 2
    assert "the API key must not be empty, nor begin or end" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "length"), [
    ({}, "adaptive"),
    ({"length": "fixed"}, "fixed"),
    ({"accept": "token"}, None),
    ({"accept": "coupled"}, "adaptive"),
])  # fmt: skip
def test_drafts_go_as_far_as_they_pay_where_that_changes_no_token(given, length):
    first, second = served_drafters({"method": "ngram", **given}, {}, ['{"method": "pattern"}'])
    assert first.get("length") == second.get("length") == length
    assert second.get("accept") == given.get("accept")
    assert served_drafters({}, {"model": "x"}, []) == {"method": "suffix", "length": "adaptive"}
    assert served_drafters({}, {"model": "x"}, ['{"method": "ngram"}']) == [{"method": "ngram", "length": "adaptive"}]


def test_a_drafter_that_options_speak_of_is_there_beside_others(monkeypatch):
    monkeypatch.setattr("forerun.cli.options.read_tuned", lambda folder, engine: {"method": "cascade"})
    for asked, method in (
        ({"num_speculative_tokens": 3}, "suffix"),
        ({"speculative_config": {"num_speculative_tokens": 3}}, "suffix"),
        ({"tuned": "folder"}, "cascade"),
    ):
        first, second = served_drafters(asked, {"model": "x"}, ['{"method": "ngram"}'])
        assert (first["method"], second["method"]) == (method, "ngram")

"""``forerun serve`` as a process: it stops when asked, once what runs is done; a second one on its port says so."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from forerun.cli.serve import _drafters

COMMAND = [sys.executable, "-c", "from forerun.cli.main import main; main()", "serve"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "FORERUN_API_KEY": "s3cret", "COLUMNS": "200"}


@pytest.fixture
def process(model_folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    options = [
        "--allowed-host",
        "models.example",
        "--model",
        str(model_folder),
        "--spec-method",
        "ngram",
        "--also-draft",
        '{"method": "pattern"}',
    ]
    process = subprocess.Popen(
        [*COMMAND, "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if found := re.search(r"listening on (http://127\.0\.0\.1:\d+)", line):
            break
    else:
        raise AssertionError("".join(lines))
    yield process, found[1]
    if process.poll() is None:
        process.kill()
    process.wait()
    process.stdout.close()


def test_it_serves_drains_and_ends(process: tuple[subprocess.Popen[str], str]) -> None:
    server, url = process
    key = {"Authorization": "Bearer s3cret"}
    assert httpx2.get(f"{url}/v1/models").status_code == 401
    model = httpx2.get(f"{url}/v1/models", headers=key).json()["data"][0]
    assert set(model["speculative"]) == {"ngram", "pattern"}

    for host, status in (("models.example", 200), ("localhost", 200), ("evil.example", 403)):
        assert httpx2.get(f"{url}/health", headers={"Host": host}).status_code == status

    again = {"prompt": [5] * 200, "max_tokens": 1}
    saved = [httpx2.post(f"{url}/v1/completions", json=again, headers=key).json()["usage"] for _ in range(2)]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in saved] == [0, 192]

    port = url.rpartition(":")[2]
    second = subprocess.run([*COMMAND, "--port", port], capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert second.returncode == 2
    assert second.stderr == f"error: port {port} on 127.0.0.1 is in use: choose another with --port\n"
    assert second.stdout == ""

    body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True, "temperature": 0}
    texts: list[str] = []
    begun = threading.Barrier(4)

    def read() -> None:
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, headers=key, timeout=60) as answer:
            begun.wait(30)
            texts.append("".join(answer.iter_text()))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    begun.wait(30)
    server.send_signal(signal.SIGTERM)
    for reader in readers:
        reader.join(60)
    assert server.wait(30) in (0, -signal.SIGTERM)
    for text in texts:
        events = [json.loads(part[6:]) for part in text.split("\n\n") if part and "[DONE]" not in part]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert len(texts) == 3
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{url}/health")


@pytest.mark.parametrize(
    ("options", "variable"),
    [(["--api-key", ""], "s3cret"), (["--api-key", "s3cret\n"], "s3cret"), ([], ""), ([], " ")],
)
def test_a_key_that_protects_nothing_is_refused(options: list[str], variable: str) -> None:
    """``Authorization: Bearer`` alone would be enough, or nothing would; and it is said before a model is loaded."""
    environment = {**ENVIRONMENT, "FORERUN_API_KEY": variable}
    command = [*COMMAND, "--port", "0", "--model", "/nonexistent", *options]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: the API key is empty, or begins or ends with white space")


@pytest.mark.parametrize(
    ("given", "length"),
    [
        ({}, "adaptive"),
        ({"length": "fixed"}, "fixed"),
        ({"accept": "token"}, None),
        ({"accept": "coupled"}, "adaptive"),
    ],
)
def test_drafts_go_as_far_as_they_pay_where_that_changes_no_token(given: dict[str, str], length: str | None) -> None:
    first, second = _drafters({"spec_method": "ngram", **given}, {}, ['{"method": "pattern"}'])
    assert first.get("length") == second.get("length") == length
    assert second.get("accept") == given.get("accept")
    assert _drafters({}, {"model": "x"}, []) is None

"""Open WebUI, in an environment of its own (``pip install open-webui``): its models and chats, through two APIs."""

import json
import os
import shutil
import subprocess

import httpx2
import pytest
from running import ASK, chatted, free_port, until

from here import where

PROGRAM = os.environ.get("FORERUN_OPEN_WEBUI") or shutil.which("open-webui")
STARTS = 240
"""Seconds. It imports torch and makes a database."""


@pytest.fixture
def web(hermes, tmp_path, request):
    """A client of Open WebUI, which has signed in as its first user and knows one API of the server."""
    port = free_port()
    settings = {
        "DATA_DIR": str(tmp_path), "WEBUI_AUTH": "False", "WEBUI_SECRET_KEY": "s" * 32, "OLLAMA_BASE_URL": hermes.url,
        "OPENAI_API_BASE_URL": f"{hermes.url}/v1", "OPENAI_API_KEY": "unused", "OFFLINE_MODE": "True",
        "ENABLE_OLLAMA_API": str(request.param == "ollama"), "ENABLE_OPENAI_API": str(request.param == "openai"),
        "HF_HUB_OFFLINE": "1", "RAG_EMBEDDING_ENGINE": "ollama", "ANONYMIZED_TELEMETRY": "False",
    }  # fmt: skip
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | settings
    command = [PROGRAM, "serve", "--host", "127.0.0.1", "--port", str(port)]
    with (tmp_path / "log").open("w+", encoding="utf-8") as log:
        program = subprocess.Popen(command, cwd=tmp_path, env=own, stdout=log, stderr=subprocess.STDOUT)
        try:
            with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                until(lambda: answers(client) or program.poll() is not None, STARTS)
                assert program.poll() is None, (tmp_path / "log").read_text(encoding="utf-8")[-3000:]
                user = client.post("/api/v1/auths/signin", json={"email": "admin@localhost", "password": "admin"})
                client.headers["Authorization"] = f"Bearer {user.json()['token']}"
                yield client
        finally:
            program.kill()
            program.wait()


def answers(client):
    try:
        return client.get("/health").status_code == 200
    except httpx2.TransportError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(STARTS + 120)
@pytest.mark.parametrize("web", where(bool(PROGRAM), ["openai", "ollama"], "needs open-webui"), indirect=True)
def test_its_chats_are_the_servers(web, hermes):
    models = web.get("/api/models").json()["data"]
    assert [model["id"] for model in models if model["owned_by"] != "arena"] == ["tiny"]
    expected = chatted(hermes, max_tokens=24, temperature=0)["choices"][0]["message"]["content"]
    body = {"model": "tiny", "messages": ASK, "params": {"max_tokens": 24, "temperature": 0}}  # as its page sends them
    whole = web.post("/api/chat/completions", json=body | {"stream": False}).json()
    assert whole["choices"][0]["message"]["content"] == expected
    events = web.post("/api/chat/completions", json=body | {"stream": True}).text.splitlines()
    chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
    deltas = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk.get("choices", ())]
    assert "".join(deltas) == expected

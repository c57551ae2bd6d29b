"""A server in this process, on a loopback port, in front of a tiny random model with the bundled tokenizer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn

from forerun import LLM, pretrained
from forerun.engine.async_engine import AsyncEngine
from forerun.models.tokenizer import load_tokenizer
from forerun.serve.app import ServerOptions, create_app
from forerun.serve.run import open_socket
from tiny import tiny_llama

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('system', 'developer', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role') }}{% endif %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, float32, 4,096 tokens, a context of 512."""
    folder = tmp_path_factory.mktemp("served")
    tokenizer = load_tokenizer(pretrained.path("target"))
    model = tiny_llama(vocab_size=4096, max_position_embeddings=512, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def served(model_folder: Path) -> LLM:
    """The engine that the tests share; three drafters, chosen per request."""
    drafters = [
        {"method": "draft_model", "model": str(model_folder), "num_speculative_tokens": 3},
        {"method": "ngram"},
        {"method": "pattern"},
    ]
    return LLM(str(model_folder), speculative_config=drafters, max_num_seqs=4)


@dataclass
class Running:
    """A server that answers at ``url``."""

    url: str
    engine: AsyncEngine
    server: uvicorn.Server
    http: httpx2.Client

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        return self.http.post(path, json=body, **options)


@contextmanager
def run_server(llm: LLM, options: ServerOptions | None = None, **engine: Any) -> Iterator[Running]:
    """A uvicorn server in a thread; on leaving, it and its engine thread have ended and no page is held."""
    asynchronous = AsyncEngine(llm.engine, **engine)
    app = create_app(asynchronous, options or ServerOptions(model_name="tiny", chat_template=TEMPLATE))
    listener = open_socket("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        with httpx2.Client(base_url=url, timeout=60) as http:
            yield Running(url, asynchronous, server, http)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
        assert not llm.engine.jobs
        llm.engine.check()


@pytest.fixture(scope="module")
def server(served: LLM) -> Iterator[Running]:
    with run_server(served) as running:
        yield running


@pytest.fixture(scope="session")
def plain(served: LLM) -> Callable[..., Any]:
    """``plain(prompt, params)``: a lone plain decode by the same engine, before any server runs on it."""

    def answer(prompt: Any, params: Any) -> Any:
        return served.generate([prompt], params, speculate=False)[0].outputs[0]

    return answer

"""A server in this process, on a loopback port."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps

import httpx2
import openai
import uvicorn

from forerun.engine.async_engine import AsyncEngine
from forerun.serve.app import ServerOptions, create_app
from forerun.serve.options import ConnectionLimits
from forerun.serve.run import configure, open_socket

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('system', 'developer', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role') }}{% endif %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""It refuses roles that it does not know."""
HERMES = (
    "{% for t in tools or [] %}<tool_call> {{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.content }}"
    "{{ m.tool_calls | length if m.tool_calls }}\n{% endfor %}"
)
"""It knows tools, in the Hermes models' form, and says little of them."""
ASK = [{"role": "user", "content": "hi"}]


@dataclass
class Running:
    """A server that answers at ``url``."""

    url: str
    engine: AsyncEngine
    server: uvicorn.Server
    http: httpx2.Client

    def post(self, path, body, **options):
        return self.http.post(path, json=body, **options)


@contextmanager
def run_server(llm, options=None, limits=None, **engine):
    """A uvicorn server in a thread; on leaving, it and its engine thread have ended and no page is held."""
    asynchronous = AsyncEngine(llm.engine, **engine)
    app = create_app(asynchronous, options or ServerOptions(served_model_name="tiny", chat_template=TEMPLATE))
    try:
        with run_app(app, limits) as (url, server, http):
            yield Running(url, asynchronous, server, http)
    finally:
        assert not llm.engine.jobs
        llm.engine.check()


@contextmanager
def run_app(app, limits=None):
    """A uvicorn server in a thread; yields its URL, itself and a client."""
    listener = open_socket("127.0.0.1", 0)
    config = configure(app, limits or ConnectionLimits())
    config.timeout_graceful_shutdown = 5
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        with httpx2.Client(base_url=url, timeout=60) as http:
            yield url, server, http
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def free_port():
    with open_socket("127.0.0.1", 0) as listener:
        return listener.getsockname()[1]


def client_of(running):
    """OpenAI's own client of a server."""
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0, timeout=60)


def chatted(server, messages=ASK, **more):
    """What OpenAI's chat answers."""
    answer = server.post("/v1/chat/completions", {"messages": messages, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def in_loop(test):
    """An asynchronous test, in an event loop of its own."""

    @wraps(test)
    def run(*given, **named):
        return asyncio.run(asyncio.wait_for(test(*given, **named), 60))

    return run


def closed(properties, *required, **more):
    """The schema of an object with these properties and no others."""
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False, **more}


def until(condition, seconds=20):
    for _ in range(100 * seconds):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")


def wait_idle(server):
    """Until the server knows of every reader who has left, and nothing runs."""
    until(lambda: not server.engine.streams and not server.engine.engine.jobs)

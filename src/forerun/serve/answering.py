"""Answers HTTP requests with replies: whole, or as streams of events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from forerun.core.errors import RequestError
from forerun.serve import answers
from forerun.serve.models import Models
from forerun.serve.schema import KEEP_ALIVE, MAX_NAMED, Asked, in_header
from forerun.serve.server import Server
from forerun.serve.stream import Reply

log = logging.getLogger("forerun")

MOST_IGNORED = 1000
"""Names of ignored fields that the log tells apart."""


def naming(ignored: list[str], server: Server, request: Request) -> dict[str, str]:
    """Returns the header that names ignored fields, if they are many the first ones. The log names each once."""
    ignored = list(dict.fromkeys(map(in_header, ignored[:MOST_IGNORED])))[:MAX_NAMED]
    for name in ignored:
        if name not in server.ignored and len(server.ignored) < MOST_IGNORED:
            log.warning("%s of %s is ignored: it makes no difference here", name, request.url.path)
    server.ignored.update(ignored[: MOST_IGNORED - len(server.ignored)])
    return {"Forerun-Ignored": ", ".join(ignored)} if ignored else {}


async def answer(
    models: Models, request: Request, body: Asked, make: Callable[[Server, Any, str], Awaitable[Reply]],
    keep_alive: float | None = None,
) -> Response:  # fmt: skip
    """Answers a request for text with the reply that ``make`` returns for it."""
    server = await models.served(request, body, keep_alive)
    try:
        reply = request.state.reply = await make(server, body, request.state.request_id)
    except RequestError as error:
        error.param = body.field_of(error.param)
        raise
    ignored = body.ignored(lambda name: (name == KEEP_ALIVE and models.several) or server.text.has_variable(name))
    headers = naming(ignored, server, request)
    if body.stream:
        return EventStream(reply, headers)
    whole = await unless_gone(request, reply.collect())
    whole.headers.update(headers)
    return whole


class EventStream(StreamingResponse):
    """Sends the end of the response along with its last event, so that the client is woken once."""

    def __init__(self, reply: Reply, headers: dict[str, str]) -> None:
        super().__init__((), headers={"Cache-Control": "no-cache", **headers}, media_type=reply.media_type)
        self.reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # also where the events have not begun
            for stream in self.reply.streams:
                stream.abort()

    async def stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event, last in self.reply.events():
            await send({"type": "http.response.body", "body": event.encode(), "more_body": not last})


async def unless_gone(request: Request, work: Coroutine[Any, Any, answers.Answer]) -> Response:
    """Returns the answer of ``work``, which is cancelled if the client hangs up."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, waiting = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait([working, waiting], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return Response(working.result().model_dump_json(exclude_unset=True), media_type="application/json")
        return Response(status_code=499)  # which is not read
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)

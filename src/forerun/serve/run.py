"""The server's process: its socket, uvicorn with limits for connections, and a graceful shutdown."""

from __future__ import annotations

import asyncio
import errno
import gc
import socket
from asyncio.events import TimerHandle
from functools import partial
from time import monotonic
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from forerun.core.errors import ConfigError
from forerun.engine.client import EngineClient
from forerun.serve.errors import ApiError
from forerun.serve.metrics import log_throughput
from forerun.serve.models import Models
from forerun.serve.options import ConnectionLimits


class Connection(HttpToolsProtocol):
    """Uvicorn's protocol with ``ConnectionLimits``.

    A connection is *idle* if it is new, between two requests, or receives headers. If there are too many connections,
    the one that was idle longest is closed. If none is idle, the new one is refused.
    """

    def __init__(self, *arguments: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.limits = limits
        self.in_head = True
        """No request has begun, or its headers have not ended."""
        self.unanswered: list[Any] = []
        """Cycles of requests: the running one, and those that wait for it."""
        self.idle_since = 0.0
        self.progress = False
        """Whether the parser has completed a part of the request in the present piece of data."""
        self.incomplete = 0
        """Bytes since the parser last completed a part."""
        self.deadline: TimerHandle | None = None
        """Of the headers."""
        self.stalled: TimerHandle | None = None
        """Of a client that takes nothing."""

    # ------------------------------------------------------------------------------------------------ the connection

    @property
    def idle(self) -> bool:
        return self.in_head and (self.cycle is None or self.cycle.response_complete)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_deadline()
        connections = [each for each in self.connections if isinstance(each, Connection) and each is not self]
        others = [each for each in connections if not each.transport.is_closing()]
        if len(others) < self.limits.max_connections:
            return
        idle = [each for each in others if each.idle]
        if idle:
            min(idle, key=lambda each: each.idle_since).transport.abort()
        else:
            self._refuse(ApiError(503, "too many connections: try again later", code="too_many_connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        self.resume_writing()
        for cycle in self.unanswered:  # uvicorn tells the last one only
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        limit = self.limits.max_header_bytes
        for start in range(0, len(data), limit):
            if self.transport.is_closing():
                return
            piece = data[start : start + limit]
            self.progress = False
            self._feed(piece)
            self.incomplete = 0 if self.progress else self.incomplete + len(piece)
            if self.incomplete > limit and not self.transport.is_closing():
                self._refuse(ApiError(431, f"the headers are larger than {limit} bytes", code="headers_too_large"))
        if self.in_head and self.incomplete and self.deadline is None and not self.transport.is_closing():
            self._start_deadline()

    def _feed(self, piece: bytes) -> None:
        """Feeds the parser. A body that goes on after its request was answered does not keep the connection alive."""
        waiting = self.timeout_keep_alive_task
        if self.in_head or not self.cycle.response_complete or waiting is None:
            super().data_received(piece)
            return
        self.timeout_keep_alive_task = None
        super().data_received(piece)
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = waiting
        if not self.cycle.response_complete:  # another request has begun
            waiting.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.stalled is None:
            self.stalled = self.loop.call_later(self.limits.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        if self.stalled is not None:
            self.stalled.cancel()
            self.stalled = None
        if self.flow is not None:
            super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    # ------------------------------------------------------------------------------------------------ the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.in_head:  # trailers are ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self.in_head = False
        self.progress = True
        self._stop_deadline()
        self._set_host_of_url()
        super().on_headers_complete()
        self.unanswered.append(self.cycle)
        if len(self.unanswered) < 16:  # uvicorn would no longer see that the client hangs up
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self.progress = True
        super().on_body(body)

    def on_chunk_header(self) -> None:
        self.progress = True

    def on_chunk_complete(self) -> None:
        self.progress = True

    def on_message_complete(self) -> None:
        self.in_head = True
        self.progress = True
        self._stop_deadline()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self.idle_since = self.loop.time()
        self.unanswered.pop(0)
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()

    def _set_host_of_url(self) -> None:
        """``GET http://name/path`` is for that name, whatever the Host header is."""
        if self.url.startswith(b"/") or self.url == b"*":
            return
        name = self.url.partition(b"://")[2] or self.url
        for end in (b"/", b"?", b"#"):
            name = name.partition(end)[0]
        self.headers[:] = [(key, value) for key, value in self.headers if key != b"host"] + [(b"host", name)]

    # ------------------------------------------------------------------------------------------------ timeouts

    def _start_deadline(self) -> None:
        self.idle_since = self.loop.time()
        self.deadline = self.loop.call_later(self.limits.header_timeout, self._head_timed_out)

    def _stop_deadline(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def _head_timed_out(self) -> None:
        self.deadline = None
        if self.idle and self.incomplete:
            message = f"the headers did not arrive within {self.limits.header_timeout:g} seconds"
            self._refuse(ApiError(408, message, code="timeout"))
        elif self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False  # the connection ends with the present answer
        else:
            self._close()

    def _refuse(self, error: ApiError) -> None:
        """Answers with an error, unless another answer is being sent, and closes."""
        if self.cycle is None or self.cycle.response_complete:
            body = bytes(error.response().body)
            head = (
                f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\nconnection: close\r\n"
                f"content-length: {len(body)}\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self._close()

    def _close(self) -> None:
        """Closes the connection; what the client does not take in time is dropped."""
        self._stop_deadline()
        self.transport.close()
        if self.stalled is None and self.transport.get_write_buffer_size():
            self.stalled = self.loop.call_later(self.limits.write_timeout, self.transport.abort)


OTHER_FILES = 128
"""Open files of a server beside its connections."""


def open_socket(host: str, port: int) -> socket.socket:
    """Returns a listening socket; port 0 takes any free port. Raises ConfigError if the address cannot be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host!r}: {error.strerror}") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        # Listening at once is what makes a second server on this port fail.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is in use: choose another with --port") from None
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener


def address_of(host: str, listener: socket.socket) -> str:
    """Returns the URL of a listening socket."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def allow_files(connections: int) -> None:
    """Lets this process open enough files. Raises ConfigError if the system does not permit it."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    requested = connections + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= requested:
        return
    if hard != resource.RLIM_INFINITY and hard < requested:
        raise ConfigError(
            f"{connections} connections need {requested} open files and this process may have {hard}: lower "
            "--max-connections, or raise ulimit -n"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (requested, hard))


def configure(app: FastAPI, limits: ConnectionLimits) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        # uvloop keeps the interpreter while it writes to a socket, and the engine's thread waits for it.
        loop="asyncio",
        http=partial(Connection, limits=limits),  # type: ignore[arg-type]
        ws="none",
        proxy_headers=False,
    )


class DrainingServer(uvicorn.Server):
    """Finishes running requests before it ends, for at most ``drain_seconds``; after that they fail with an error. In
    the meantime it refuses new requests with a reason. A second signal ends it at once.
    """

    def __init__(
        self, app: FastAPI, engine: EngineClient | Models, drain_seconds: float, limits: ConnectionLimits | None = None
    ) -> None:
        super().__init__(configure(app, limits or ConnectionLimits()))
        self.engine = engine
        self.drain_seconds = drain_seconds
        self.stop_now = self.drained = False

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        deadline = monotonic() + self.drain_seconds
        draining = asyncio.create_task(self.engine.drain(self.drain_seconds))
        while not draining.done() and not self.stop_now:
            await asyncio.wait([draining], timeout=0.1)
        if draining.done():
            draining.result()
        else:
            draining.cancel()
            await self.engine.drain(0.0)
        # The end of answers may still have to be written.
        self.config.timeout_graceful_shutdown = 1 if self.stop_now else max(0, int(deadline - monotonic())) + 5
        self.drained = True
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn would leave tasks and lifespan as they are
            for task in self.server_state.tasks:
                task.cancel()
            await self.lifespan.shutdown()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.stop_now, self.force_exit = True, self.drained
        else:
            super().handle_exit(sig, frame)


async def run(
    app: FastAPI, models: Models, listener: socket.socket, limits: ConnectionLimits, *, drain_seconds: float = 30.0
) -> None:
    """Serves until a signal ends it."""
    gc.collect()
    gc.freeze()  # a full collection visits all that torch and transformers made, and stops everybody for 0.2 s
    logging = asyncio.create_task(log_throughput(models))
    try:
        await DrainingServer(app, models, drain_seconds, limits).serve(sockets=[listener])
    finally:
        logging.cancel()

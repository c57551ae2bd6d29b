"""The process: a socket, uvicorn, bounds for what it leaves without one, and an orderly end."""

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
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from forerun.core.errors import ConfigError
from forerun.engine.client import EngineClient
from forerun.serve.errors import ApiError
from forerun.serve.options import ConnectionLimits


class Connection(HttpToolsProtocol):
    """Uvicorn's protocol with ``ConnectionLimits``.

    A connection without a request in hand is *idle*: it may be new, between two requests, or within a head. When there
    are more connections than may be, the one that has been idle longest is closed; if none is idle, the new one is
    refused. The name that a request is sent to is its URL's, where that has one, as HTTP has it.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionLimits,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.limits = limits
        self.in_head = True
        """No request has begun, or its headers have not ended."""
        self.since = 0.0
        """When it was last busy."""
        self.finished = False
        """Whether the parser has finished anything in the present piece."""
        self.unfinished = 0
        """Bytes since the parser last finished anything."""
        self.deadline: TimerHandle | None = None
        self.stalled: TimerHandle | None = None

    # ------------------------------------------------------------------------------------------------ the connection

    @property
    def idle(self) -> bool:
        return self.in_head and (self.cycle is None or self.cycle.response_complete)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_deadline()
        others = [
            other
            for other in self.connections
            if isinstance(other, Connection) and other is not self and not other.transport.is_closing()
        ]
        if len(others) < self.limits.max_connections:
            return
        idle = [other for other in others if other.idle]
        if idle:
            min(idle, key=lambda other: other.since).transport.abort()
        else:
            self._refuse(ApiError(503, "too many connections: try again later", code="too_many_connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), self.limits.max_header_bytes):
            if self.transport.is_closing():
                return
            piece = data[start : start + self.limits.max_header_bytes]
            self.finished = False
            self._feed(piece)
            self.unfinished = 0 if self.finished else self.unfinished + len(piece)
            if self.unfinished > self.limits.max_header_bytes and not self.transport.is_closing():
                limit = self.limits.max_header_bytes
                self._refuse(ApiError(431, f"the headers are larger than {limit} bytes", code="headers_too_large"))
        if self.in_head and self.unfinished and self.deadline is None and not self.transport.is_closing():
            self._start_deadline()

    def _feed(self, piece: bytes) -> None:
        """The rest of a body whose request has been answered does not keep the connection."""
        waiting = self.timeout_keep_alive_task
        if self.in_head or not self.cycle.response_complete or waiting is None:
            super().data_received(piece)
            return
        self.timeout_keep_alive_task = None
        super().data_received(piece)
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = waiting
        if not self.cycle.response_complete:  # a further request came along
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
        if self.in_head:  # trailers say nothing here
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self.in_head = False
        self.finished = True
        self._stop_deadline()
        self._take_the_urls_host()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.finished = True
        super().on_body(body)

    def on_chunk_header(self) -> None:
        self.finished = True

    def on_chunk_complete(self) -> None:
        self.finished = True

    def on_message_complete(self) -> None:
        self.in_head = True
        self.finished = True
        self._stop_deadline()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()

    def _take_the_urls_host(self) -> None:
        """``GET http://name/path`` means that name, whatever the Host header says."""
        if self.url.startswith(b"/") or self.url == b"*":
            return
        _, _, rest = self.url.partition(b"://")
        name = rest or self.url
        for end in (b"/", b"?", b"#"):
            name = name.partition(end)[0]
        self.headers[:] = [(key, value) for key, value in self.headers if key != b"host"] + [(b"host", name)]

    # ------------------------------------------------------------------------------------------------ the clock

    def _start_deadline(self) -> None:
        self.since = self.loop.time()
        self.deadline = self.loop.call_later(self.limits.header_timeout, self._late)

    def _stop_deadline(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def _late(self) -> None:
        self.deadline = None
        if self.idle and self.unfinished:
            message = f"the headers did not arrive within {self.limits.header_timeout:g} seconds"
            self._refuse(ApiError(408, message, code="timeout"))
        elif self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False  # an answer is on its way: the connection ends with it
        else:
            self._close()

    def _refuse(self, error: ApiError) -> None:
        """Answer and close; where another answer is being sent, just close."""
        if self.cycle is None or self.cycle.response_complete:
            body = bytes(error.response().body)
            self.transport.write(
                f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\nconnection: close\r\n"
                f"content-length: {len(body)}\r\n\r\n".encode()
                + body
            )
        self._close()

    def _close(self) -> None:
        """What the client does not take within a while is dropped."""
        self._stop_deadline()
        self.transport.close()
        if self.stalled is None and self.transport.get_write_buffer_size():
            self.stalled = self.loop.call_later(self.limits.write_timeout, self.transport.abort)


OTHER_FILES = 128
"""That a server may have open beside its connections."""


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any. Raises ConfigError if the address cannot be had."""
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
    """Where clients find it."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def allow_files(connections: int) -> None:
    """Let this process have so many connections. Raises ConfigError where the system does not."""
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
    """Finishes what it has begun before it ends: at most ``drain_seconds``, then the rest fails with a clear error. All
    the while it listens, so that whoever asks for more is told why there is none.

    A second signal ends it at once.
    """

    def __init__(
        self, app: FastAPI, engine: EngineClient, drain_seconds: float, limits: ConnectionLimits | None = None
    ) -> None:
        super().__init__(configure(app, limits or ConnectionLimits()))
        self.engine = engine
        self.drain_seconds = drain_seconds
        self.hurried = self.drained = False

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ends = monotonic() + self.drain_seconds
        draining = asyncio.create_task(self.engine.drain(self.drain_seconds))
        while not draining.done() and not self.hurried:
            await asyncio.wait([draining], timeout=0.1)
        if draining.done():
            draining.result()
        else:
            draining.cancel()
            await self.engine.drain(0.0)
        # What has been said may still have to be written.
        self.config.timeout_graceful_shutdown = 1 if self.hurried else max(0, int(ends - monotonic())) + 5
        self.drained = True
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn leaves it at that
            for task in self.server_state.tasks:
                task.cancel()
            await self.lifespan.shutdown()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.hurried, self.force_exit = True, self.drained
        else:
            super().handle_exit(sig, frame)


async def run(
    app: FastAPI, engine: EngineClient, listener: socket.socket, limits: ConnectionLimits, *,
    drain_seconds: float = 30.0,
) -> None:  # fmt: skip
    """Serve until a signal ends it."""
    gc.collect()
    gc.freeze()  # a full collection visits all that torch and transformers made, and stops everybody for 0.2 s
    await DrainingServer(app, engine, drain_seconds, limits).serve(sockets=[listener])

"""The process: a socket, uvicorn, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import socket
from functools import partial
from time import monotonic
from types import FrameType

import uvicorn
from fastapi import FastAPI

from forerun.core.errors import ConfigError
from forerun.engine.answering import Answering
from forerun.serve.connection import Connection, ConnectionLimits

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
        self, app: FastAPI, engine: Answering, drain_seconds: float, limits: ConnectionLimits | None = None
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


def run(
    app: FastAPI,
    engine: Answering,
    listener: socket.socket,
    *,
    drain_seconds: float = 30.0,
    limits: ConnectionLimits | None = None,
) -> None:
    """Serve until a signal ends it."""
    # Uvicorn raises the signal again once everything is closed.
    with contextlib.suppress(KeyboardInterrupt):
        gc.collect()
        gc.freeze()  # a full collection visits all that torch and transformers made, and stops everybody for 0.2 s
        DrainingServer(app, engine, drain_seconds, limits).run(sockets=[listener])

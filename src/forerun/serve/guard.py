"""Who may ask: keys, hosts and origins, and the names that a model goes by."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.core.errors import ConfigError
from forerun.core.folders import expanded
from forerun.models.gguf import SUFFIX
from forerun.serve.errors import ApiError

if TYPE_CHECKING:
    from forerun.serve.app import ServerOptions

HOST = re.compile(r"(?:([a-z0-9._-]+)|\[([0-9a-f:.]+)\])(?::[0-9]*)?", re.ASCII | re.IGNORECASE)
"""A name or an address, and perhaps a port: all that a Host header may hold here."""
OPEN = ("/", "/health", "/live", "/metrics")
"""Paths that need no key; the playground's files, under /page/, neither."""


def needs_key(path: str) -> bool:
    return path not in OPEN and not path.startswith("/page/")


class Guard:
    """ASGI middleware. Bodies are read whole, as large and as slow as ``options`` let them be.

    ``allowed_hosts`` are the names, beside loopback ones, that may stand in a Host header (None: any). A browser sends
    the name that it was given: a page whose own name was pointed here (DNS rebinding) is refused by it.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self.app = app
        hosts = options.allowed_hosts
        self.hosts = None if hosts is None else frozenset(map(allowed_host, hosts))
        self.key = options.api_key.encode() if options.api_key is not None else None
        self.max_body_bytes = options.max_body_bytes
        self.body_timeout = options.body_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self._check_host(scope)
            self._check_key(scope)
            async with asyncio.timeout(self.body_timeout):
                body = await self._read(scope, receive)
        except TimeoutError:
            error = ApiError(408, f"the body did not arrive within {self.body_timeout:g} seconds")
            await error.response()(scope, receive, send)
            return
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self.app(scope, replay, send)

    def _check_host(self, scope: Scope) -> None:
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(given) > 1 or (not given and scope["http_version"] == "1.1"):
            raise ApiError(400, f"a request has one Host header, not {len(given)}", code="invalid_host")
        if self.hosts is None:
            return
        name = host_name(given[0]) if given else None
        if name is None or (name not in self.hosts and not is_loopback(name)):
            raise ApiError(
                403,
                f"this server does not answer to the name {name or ''.join(given)!r}: use localhost, or start it with "
                "--allowed-host",
                code="host_not_allowed",
            )

    def _check_key(self, scope: Scope) -> None:
        if self.key is None or not needs_key(scope["path"]):
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self.key):
            raise ApiError(
                401, "this server needs its API key: send 'Authorization: Bearer KEY'", code="invalid_api_key"
            )

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.max_body_bytes:
            self._refuse()
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return b"".join(chunks)
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self.max_body_bytes:
                self._refuse()
            if not message.get("more_body", False):
                return b"".join(chunks)

    def _refuse(self) -> None:
        raise ApiError(413, f"the body is larger than {self.max_body_bytes} bytes", code="body_too_large")


def host_name(host: str) -> str | None:
    """A Host header's name or address, without the port; None where it holds anything else."""
    host = host.strip(" \t").lower()
    result = HOST.fullmatch(host)
    if result is not None:
        return (result[1] or result[2]).removesuffix(".")
    return host if _address(host) is not None else None  # an IPv6 address without brackets


def allowed_host(given: str) -> str:
    """A name that requests may be sent to, as ``host_name`` has it. Raises ConfigError for what is none."""
    name = host_name(given)
    if name is None:
        raise ConfigError(f"{given!r} is no name that a request may be sent to: give a host name or an IP address")
    return name


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return None if "%" in name else ipaddress.ip_address(name)
    except ValueError:
        return None


def is_loopback(name: str) -> bool:
    """Whether ``name`` can only mean this machine."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _address(name)
    return address is not None and address.is_loopback


ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+", re.ASCII)


def names(model: str) -> tuple[str, ...]:
    """The names of a ``model`` that was given by a name or a path, the one that answers say first.

    A path goes by its last part, without the suffix of GGUF files; the path and the file's name are understood too,
    with and without that suffix. What is no path, such as a hub's id, keeps its name, and its last part is understood.
    """
    folder = expanded(model)
    local = model.startswith((".", "/", "~")) or model.count("/") > 1 or model.endswith(SUFFIX) or folder.is_dir()
    file = Path(os.path.abspath(folder)).name or model if local else model.rpartition("/")[2]
    usual = file.removesuffix(SUFFIX) if local else model
    return tuple(dict.fromkeys((usual, model, model.removesuffix(SUFFIX), file, file.removesuffix(SUFFIX))))


def allowed_origin(given: str) -> str:
    """An origin as browsers say it. Raises ConfigError for what is none."""
    origin = given.strip().rstrip("/").lower()
    if origin != "*" and not ORIGIN.fullmatch(origin):
        raise ConfigError(f"{given!r} is no origin: give one such as https://app.example.com, or * for any")
    return origin

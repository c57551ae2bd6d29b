"""Options of the server, and the host names, origins and model names that it goes by. ``forerun serve`` makes its flags
of these fields, so that this file imports nothing of FastAPI."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forerun.core.config import COUNT, Within, check_within
from forerun.core.errors import ConfigError
from forerun.core.folders import expanded

METRICS_NAMES = ("forerun", "vllm")
API_KEY_VARIABLE = "FORERUN_API_KEY"


@dataclass(frozen=True)
class ServerOptions:
    """How the server treats its clients. Sizes are in bytes, times in seconds."""

    served_model_name: str = "forerun"
    """the model's name in requests and answers"""
    aliases: Sequence[str] = ()
    """other names that requests may call it by"""
    api_key: str | None = None
    """bearer token of clients (or the variable FORERUN_API_KEY)"""
    allowed_host: Sequence[str] | None = ()
    """host name under which the server may be reached, beside loopback names"""
    allowed_origin: Sequence[str] = ()
    """origin whose web pages may use the API, or *"""
    chat_template: str | None = None
    """Jinja template that replaces the checkpoint's"""
    max_body_bytes: int = 4 << 20
    """largest request"""
    body_timeout: float = 60.0
    """seconds for a request's body to arrive"""
    request_timeout: float = 600.0
    """seconds from arrival to the last token"""
    response_memory: int = 64 << 20
    """bytes of answers of /v1/responses to keep"""
    strict: bool = False
    """refuse requests with unknown fields, which are otherwise ignored, and named in the header Forerun-Ignored"""
    any_model_name: bool = False
    """serve requests whatever model they name"""
    metrics_names: str = "forerun"
    """forerun or vllm: the latter adds vLLM's metric names, for gateways that read them"""

    def __post_init__(self) -> None:
        check_within(self, {
            "max_body_bytes": COUNT, "response_memory": Within(least=0, whole=True),
            "body_timeout request_timeout": Within(above=0),
        })  # fmt: skip
        if self.metrics_names not in METRICS_NAMES:
            raise ConfigError(f"metrics_names is {' or '.join(METRICS_NAMES)}, not {self.metrics_names!r}")
        for name in self.allowed_host or ():
            checked_host(name)
        for origin in self.allowed_origin:
            checked_origin(origin)
        if self.api_key is not None and (not self.api_key or self.api_key != self.api_key.strip()):
            raise ConfigError(
                "the API key is empty, or begins or ends with white space, which clients cannot send: "
                "give another, or none to serve without"
            )

    def named_after(self, model: str) -> ServerOptions:
        """Returns the options with names made of a model's name or path, unless a name was given."""
        if self.served_model_name:
            return self
        name, *aliases = model_names(model)
        return replace(self, served_model_name=name, aliases=aliases)


@dataclass(frozen=True)
class ConnectionLimits:
    """What clients may keep open, and for how long. Sizes are in bytes, times in seconds."""

    max_header_bytes: int = 32768
    """largest request line and headers together"""  # and trailers; twice as many are always refused
    header_timeout: float = 10.0
    """seconds for the headers to arrive"""
    max_connections: int = 1024
    """open connections; then idle ones are closed"""
    write_timeout: float = 600.0
    """seconds in which a client must take something of an answer"""

    def __post_init__(self) -> None:
        check_within(self, {
            "max_header_bytes": Within(least=256, whole=True), "header_timeout write_timeout": Within(least=0.01),
            "max_connections": COUNT,
        })  # fmt: skip


HOST = re.compile(r"(?:([a-z0-9._-]+)|\[([0-9a-f:.]+)\])(?::[0-9]*)?", re.ASCII | re.IGNORECASE)
"""A name or an address, and perhaps a port: all that a Host header may hold here."""


def host_name(host: str) -> str | None:
    """Returns a Host header's name or address without the port; None if it holds anything else."""
    host = host.strip(" \t").lower()
    result = HOST.fullmatch(host)
    if result is not None:
        return (result[1] or result[2]).removesuffix(".")
    return host if _address(host) is not None else None  # an IPv6 address without brackets


def checked_host(given: str) -> str:
    """Returns the ``host_name`` of an option. Raises ConfigError if it is none."""
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


def model_names(model: str) -> tuple[str, ...]:
    """Returns the names that a ``model`` goes by, that of answers first.

    The name of a path is its last part, without the suffix of GGUF files. The path itself and the file's name are
    aliases, with and without the suffix. Any other name, such as a hub's id, stays, and its last part is an alias.
    """
    from forerun.models.gguf import SUFFIX

    folder = expanded(model)
    local = model.startswith((".", "/", "~")) or model.count("/") > 1 or model.endswith(SUFFIX) or folder.is_dir()
    file = Path(os.path.abspath(folder)).name or model if local else model.rpartition("/")[2]
    usual = file.removesuffix(SUFFIX) if local else model
    return tuple(dict.fromkeys((usual, model, model.removesuffix(SUFFIX), file, file.removesuffix(SUFFIX))))


def checked_origin(given: str) -> str:
    """Returns an origin as browsers write it. Raises ConfigError if it is none."""
    origin = given.strip().rstrip("/").lower()
    if origin != "*" and not ORIGIN.fullmatch(origin):
        raise ConfigError(f"{given!r} is no origin: give one such as https://app.example.com, or * for any")
    return origin

"""Options of the server, and the host names, origins and model names that it goes by. ``forerun serve`` makes its flags
of these fields, so that this file imports nothing of FastAPI."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from forerun.core.config import COUNT, Within, check_within, option
from forerun.core.errors import ConfigError, shown
from forerun.core.folders import expanded
from forerun.core.registry import has_lab, lacks_lab

METRICS_NAMES = ("forerun", "vllm")
API_KEY_VARIABLE = "FORERUN_API_KEY"


@dataclass(frozen=True)
class ServerOptions:
    """How the server treats its clients. Sizes are in bytes, times in seconds."""

    served_model_name: str = option("forerun", "Model name in requests and responses.")
    aliases: Sequence[str] = option((), "Further names of the model in requests.")
    api_key: str | None = option(None, "Bearer token that clients must send (or set FORERUN_API_KEY).")
    allowed_host: Sequence[str] | None = option(
        (), "Host name by which clients may reach the server, besides loopback names."
    )
    allowed_origin: Sequence[str] = option((), "Origin whose web pages may use the API, or *.")
    chat_template: str | None = option(None, "Jinja template to use instead of the checkpoint's.")
    max_body_bytes: int = option(4 << 20, "Maximum size of a request body, in bytes.")
    body_timeout: float = option(60.0, "Seconds to wait for a request body.")
    request_timeout: float = option(600.0, "Maximum seconds per request, from arrival to its last token.")
    response_memory: int = option(64 << 20, "Memory for stored answers of /v1/responses, in bytes.")
    strict: bool = option(
        False, "Refuse requests with unknown fields. Default: ignore them and name them in the header Forerun-Ignored."
    )
    models: bool = option(False, "Serve all models that forerun ls lists. Each is loaded when a request names it.")
    model_memory: str | None = option(
        None, "With --models: memory for loaded models and their caches, such as 8GiB. Default: 80% of what is free."
    )
    keep_alive: str | None = option(
        None, "With --models: how long an unused model stays loaded, such as 30s. -1: forever. Default: 5m."
    )
    any_model_name: bool = option(False, "Serve requests whatever model they name.")
    metrics_names: str = option(
        "forerun", "Metric names: forerun; vllm adds vLLM's for gateways that read them, and needs forerun-lab."
    )

    def __post_init__(self) -> None:
        check_within(self, {
            "max_body_bytes": COUNT, "response_memory": Within(least=0, whole=True),
            "body_timeout request_timeout": Within(above=0),
        })  # fmt: skip
        seconds_of(self.keep_alive or 0)
        if not self.models and (self.model_memory, self.keep_alive) != (None, None):
            raise ConfigError("--model-memory and --keep-alive go with --models: add that, or remove them")
        if self.metrics_names not in METRICS_NAMES:
            raise ConfigError(f"metrics_names is {' or '.join(METRICS_NAMES)}, not {self.metrics_names!r}")
        if self.metrics_names == "vllm" and not has_lab("vllm_metrics"):
            raise lacks_lab("--metrics-names vllm")
        for name in self.allowed_host or ():
            checked_host(name)
        for origin in self.allowed_origin:
            checked_origin(origin)
        if self.api_key is not None and (not self.api_key or self.api_key != self.api_key.strip()):
            raise ConfigError("the API key must not be empty, nor begin or end with white space: change or remove it")

    def named_after(self, model: str) -> ServerOptions:
        """Returns the options with names made of a model's name or path, unless a name was given."""
        if self.served_model_name:
            return self
        name, *aliases = model_names(model)
        return replace(self, served_model_name=name, aliases=aliases)


@dataclass(frozen=True)
class ConnectionLimits:
    """What clients may keep open, and for how long. Sizes are in bytes, times in seconds."""

    max_header_bytes: int = option(32768, "Maximum size of the request line and headers, in bytes.")
    header_timeout: float = option(10.0, "Seconds to wait for request headers.")
    max_connections: int = option(1024, "Maximum number of open connections. Beyond it, idle ones are closed.")
    write_timeout: float = option(600.0, "Seconds after which a client that reads nothing is disconnected.")

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
        raise ConfigError(f"{given!r} is not a host name or an IP address")
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
    from forerun.models.files.gguf import SUFFIX

    folder = expanded(model)
    local = model.startswith((".", "/", "~")) or model.count("/") > 1 or model.endswith(SUFFIX) or folder.is_dir()
    file = Path(os.path.abspath(folder)).name or model if local else model.rpartition("/")[2]
    usual = file.removesuffix(SUFFIX) if local else model
    return tuple(dict.fromkeys((usual, model, model.removesuffix(SUFFIX), file, file.removesuffix(SUFFIX))))


DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
LONGEST = 1e9
"""Seconds that count as forever."""


def seconds_of(given: Any) -> float:
    """Returns a duration as Ollama's clients write it, a number of seconds or a text such as 5m or 1h30m; below 0:
    infinity. Raises ConfigError."""
    value = given
    if isinstance(given, str):
        text, sign = given.removeprefix("-"), -1 if given.startswith("-") else 1
        if DURATION.sub("", text) == "" != text:
            value = sign * sum(float(number) * SECONDS[unit] for number, unit in DURATION.findall(text))
        elif re.fullmatch(r"\d+(\.\d+)?", text):
            value = sign * float(text)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise ConfigError(f"keep_alive must be seconds or a text such as 5m, not {shown(given)}")
    return float(value) if 0 <= value <= LONGEST else inf


def checked_origin(given: str) -> str:
    """Returns an origin as browsers write it. Raises ConfigError if it is none."""
    origin = given.strip().rstrip("/").lower()
    if origin != "*" and not ORIGIN.fullmatch(origin):
        raise ConfigError(f"{given!r} is not an origin: use one like https://app.example.com, or * for any")
    return origin

"""``forerun serve`` and ``forerun batch``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.console import all_but_one, all_threads, out, read_file, set_threads, warn, warn_synthetic
from forerun.cli.options import (
    SERVED,
    SPECULATIVE,
    ChatTemplate,
    Config,
    Threads,
    parse_json,
    speculative_config,
    takes,
)
from forerun.core.errors import ConfigError
from forerun.core.folders import POSIX
from forerun.core.threads import AUTO
from forerun.speculate.names import rules

if TYPE_CHECKING:
    from forerun.serve.app import ServerOptions
    from forerun.serve.batch import Answers, Tally
    from forerun.serve.run import ConnectionLimits

AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="host name under which the server may be reached, beside loopback names (repeatable)",
        show_default="--host if that is a loopback address, else any",
    ),
]
AllowedOrigins = Annotated[
    list[str] | None,
    typer.Option(metavar="ORIGIN", help="origin whose web pages may use the API, or * (repeatable)"),
]
ServedName = Annotated[
    str | None,
    typer.Option(help="the model's name in requests and answers", show_default="--model's, or its file's name"),
]
NoRequestLog = Annotated[bool, typer.Option("--no-request-log", help="no line in the log for each request")]
MetricsNames = Annotated[
    str, typer.Option(metavar="forerun|vllm", help="vllm adds vLLM's metric names, for gateways that read them")
]
Replicated = Annotated[
    int | None, typer.Option(help="engines behind this server, on Ray Serve, each with --threads", min=1)
]
Events = Annotated[
    str | None, typer.Option(metavar="ENDPOINT", help="publish cached prefixes over ZeroMQ, as vLLM does")
]
AlsoDraft = Annotated[
    list[str] | None,
    typer.Option(metavar="JSON", help="another drafter, which requests may choose by method (repeatable)"),
]

KEY_VARIABLE = "FORERUN_API_KEY"
PAGE_SIZE = 64
"""Small enough for prompts that begin alike, large enough to cost nothing."""
Opening = Callable[[], Awaitable[Any]]
"""Called in the event loop: opens the client that answers. Whoever opens it closes it."""


@takes(
    SERVED.showing(page_size=str(PAGE_SIZE)),
    SPECULATIVE.showing(length="adaptive, or fixed where the rule does not keep tokens"),
)
def serve(
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any free port", min=0, max=65535)] = 8000,
    api_key: Annotated[str | None, typer.Option(help="bearer token of clients", envvar=KEY_VARIABLE)] = None,
    allowed_host: AllowedHosts = None,
    allowed_origin: AllowedOrigins = None,
    served_model_name: ServedName = None,
    also_draft: AlsoDraft = None,
    chat_template: ChatTemplate = None,
    max_queue: Annotated[int, typer.Option(help="sequences that may wait before 429", min=1)] = 1024,
    max_delay: Annotated[float, typer.Option(help="seconds to gather tokens that are sent together", min=0)] = 0.01,
    max_body_bytes: Annotated[int, typer.Option(help="largest request", min=1024)] = 4 << 20,
    max_header_bytes: Annotated[int, typer.Option(help="largest request line and headers together", min=256)] = 32768,
    header_timeout: Annotated[float, typer.Option(help="seconds for the headers to arrive", min=0.1)] = 10.0,
    max_connections: Annotated[int, typer.Option(help="open connections; then idle ones are closed", min=1)] = 1024,
    request_timeout: Annotated[float, typer.Option(help="seconds from arrival to the last token", min=1)] = 600.0,
    drain_timeout: Annotated[float, typer.Option(help="seconds for running requests when asked to stop", min=0)] = 30.0,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads", show_default="the cores it may use, but one for HTTP")
    ] = None,
    no_request_log: NoRequestLog = False,
    response_memory: Annotated[int, typer.Option(help="bytes of answers of /v1/responses to keep", min=0)] = 64 << 20,
    metrics_names: MetricsNames = "forerun",
    kv_events: Events = None,
    replicas: Replicated = None,
    max_replicas: Annotated[
        int | None, typer.Option(help="most replicas; their number follows the load", min=1)
    ] = None,
    config: Config = None,
    *,
    engine: Mapping[str, Any],
    speculative: Mapping[str, Any],
) -> None:
    """Answer OpenAI's API over HTTP; the playground is at /.

    Listens on the loopback address unless told otherwise. Stops on the first signal, once what runs is done; on a
    second one at once."""
    _check_installed("serve")
    from forerun.serve.app import ServerOptions
    from forerun.serve.guard import is_loopback
    from forerun.serve.run import ConnectionLimits, open_socket

    _set_up(max_connections, log_requests=not no_request_log)
    limits = ConnectionLimits(max_header_bytes, header_timeout, request_timeout, max_connections)
    listener = open_socket(host, port)
    local = is_loopback(listener.getsockname()[0])
    options = ServerOptions(
        model_name=served_model_name or "",
        api_key=key_of(api_key),
        allowed_hosts=[host.partition("%")[0], *(allowed_host or [])] if local or allowed_host else None,
        allowed_origins=allowed_origin or (),
        chat_template=None if chat_template is None else read_file(chat_template),
        max_body_bytes=max_body_bytes,
        request_timeout=request_timeout,
        response_memory=response_memory,
        metrics_names=metrics_names,
    )
    if options.api_key is None and not local:
        warn(f"{host} can be reached from outside and there is no --api-key")
    number = (replicas or 1) if replicas or max_replicas else None
    if kv_events is not None and number is not None:
        raise ConfigError("--kv-events tells of one engine's prefixes: not with --replicas, which routes by itself")

    drafters = served_drafters(speculative, engine, also_draft)
    answers = answerer(
        engine, drafters, threads, all_but_one(), replicas=number, most=max_replicas, max_queue=max_queue,
        max_delay=max_delay,
    )  # fmt: skip
    # Uvicorn raises the signal again once everything is closed.
    with answers as opening, contextlib.suppress(KeyboardInterrupt):
        asyncio.run(
            _answer(opening, options, host, listener, limits, drain_timeout, kv_events=kv_events, replicas=number)
        )


async def _answer(
    opening: Opening, options: ServerOptions, host: str, listener: socket.socket, limits: ConnectionLimits,
    drain_seconds: float, *, kv_events: str | None, replicas: int | None,
) -> None:  # fmt: skip
    """Say what runs, by its name as clients know it, and where; answer until a signal ends it."""
    from forerun.serve.app import create_app
    from forerun.serve.run import address_of, run

    client = await opening()
    if kv_events is not None:
        from forerun.serve.kv_events import KVEvents

        out().print(f"KV events at {KVEvents(kv_events, client.engine.scheduler.tree).endpoint}")
    named, described = options.serving(client.facts.model), client.facts.described
    shown = described if replicas is None else f"{replicas} replicas, each with {described}"
    out().print(f"{named.model_name}: {shown}\nlistening on {address_of(host, listener)}", soft_wrap=True)
    await run(create_app(client, named), client, listener, limits, drain_seconds=drain_seconds)


def _check_installed(command: str) -> None:
    try:
        import forerun.serve.app
        import forerun.serve.run  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(f"forerun {command} needs {error.name}: pip install 'forerun[serve]'") from None


@contextlib.contextmanager
def answerer(
    engine: Mapping[str, Any], drafters: Any, threads: int | None, cores: int, *, replicas: int | None = None,
    most: int | None = None, max_queue: int = 1024, max_delay: float = 0.01,
) -> Iterator[Opening]:  # fmt: skip
    """An engine in this process with up to ``cores`` threads or, where their number is given, ``replicas`` on Ray
    Serve, or as many up to ``most`` as the load wants, which share the cores if nothing is said of ``threads``. Raises
    ConfigError where Ray is missing."""
    if replicas is None:
        from forerun.engine.async_engine import AsyncEngine
        from forerun.engine.llm import LLM

        engine = {"page_size": PAGE_SIZE, **engine, "threads": set_threads(threads, cores)}
        llm = LLM(**engine, speculative_config=drafters)
        warn_synthetic(llm)

        async def opening() -> AsyncEngine:
            return AsyncEngine(llm.engine, max_queue=max_queue, max_delay=max_delay)

        yield opening
        return
    try:
        from forerun.scale.cluster import Cluster, Replicas, cluster
    except ModuleNotFoundError as error:
        raise ConfigError(f"--replicas needs {error.name}: pip install 'forerun[ray]'") from None
    ranks = int(engine.get("tensor_parallel_size") or 1)
    fraction = max(1, cores // (replicas * ranks)) if threads is None else threads
    engine = {"page_size": PAGE_SIZE, "threads": AUTO if threads is None else threads, **engine}
    requested = Replicas(engine, drafters, number=replicas, most=most, threads=fraction, max_queue=max_queue)
    with cluster(requested) as (handle,):
        yield lambda: Cluster(handle).pool(max_queue)


def _set_up(connections: int, *, log_requests: bool) -> None:
    """The process: the files that it may open, and what it writes to standard error."""
    from forerun.serve.run import allow_files

    allow_files(connections)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logging.getLogger("forerun").handlers = [handler]  # with the time, in place of the commands' own
    logging.getLogger("forerun.core.threads").setLevel(logging.INFO)
    logging.getLogger("forerun.requests").setLevel(logging.INFO if log_requests else logging.WARNING)


def key_of(given: str | None) -> str | None:
    """Of ``--api-key`` and its variable. Click takes a variable that is empty for one that is not set; whoever sets it
    wants a key."""
    return os.environ.get(KEY_VARIABLE) if given is None else given


def served_drafters(
    speculative: Mapping[str, Any], engine: Mapping[str, Any], others: list[str] | None
) -> list[dict[str, Any]] | dict[str, Any]:
    """Every drafter's config; the others take rule and length policy from the first, and its place where a model of
    one's own has no options but these. Drafts go as far as they pay where that changes no token."""
    first = speculative_config(speculative, engine)
    if rules[first.get("accept", "coupled")].identity:
        first = {"length": "adaptive", **first}
    if not others:
        return first
    common = ("accept", "length")
    shared = {key: value for key, value in first.items() if key in common}
    listed = [{**shared, **parse_json("also_draft", text)} for text in others]
    asked = {**(speculative.get("speculative_config") or {}), **speculative, "speculative_config": None}
    own = any(value is not None and key not in common for key, value in asked.items())
    return [first, *listed] if own or "model" not in engine else listed


NO_LIMIT = 10.0**9
"""Seconds for a request: a batch has no client that waits."""


@takes(
    SERVED.showing(page_size=str(PAGE_SIZE)),
    SPECULATIVE.showing(length="adaptive, or fixed where the rule does not keep tokens"),
)
def batch(
    file: Annotated[Path, typer.Argument(help="requests, one on each line, in OpenAI's batch format")],
    answers: Annotated[
        Path | None, typer.Option("--out", help="file for the answers", show_default="FILE.answers.jsonl")
    ] = None,
    served_model_name: ServedName = None,
    chat_template: ChatTemplate = None,
    threads: Threads = None,
    replicas: Annotated[
        int | None, typer.Option(help="engines that share the work, on Ray Serve, each with --threads", min=1)
    ] = None,
    *,
    engine: Mapping[str, Any],
    speculative: Mapping[str, Any],
) -> int:
    """Answer a file of requests in OpenAI's batch format.

    Each line gets exactly one answer, in the order in which they are done. A line that is no request gets an error, and
    the others go on. Ctrl-C stops it; the same command goes on with what is not answered.
    """
    _check_installed("batch")
    from forerun.serve.app import ServerOptions
    from forerun.serve.batch import Answers

    out = answers or file.with_name(f"{file.name.removesuffix('.jsonl')}.answers.jsonl")
    template = None if chat_template is None else read_file(chat_template)
    options = ServerOptions(model_name=served_model_name or "", chat_template=template, request_timeout=NO_LIMIT)
    drafters = served_drafters(speculative, engine, None)
    with (
        contextlib.closing(Answers(out, file)) as written,
        answerer(engine, drafters, threads, all_threads(), replicas=replicas) as opening,
    ):
        return work(file, out, written, opening, options)


def work(file: Path, out: Path, written: Answers, opening: Opening, options: ServerOptions) -> int:
    """Answer the file and say what was done; the command's exit code."""
    from forerun.serve.app import create_app
    from forerun.serve.batch import asking, run

    async def answered() -> Tally:
        client = await opening()
        try:
            ask = asking(create_app(client, options.serving(client.facts.model)))
            return await run(file, written, ask, together=2 * client.capacity())
        finally:
            client.close()

    async def until_stopped() -> Tally | None:
        task = asyncio.create_task(answered())
        for kind in (signal.SIGINT, signal.SIGTERM) if POSIX else ():  # on Windows a signal ends it with an exception
            asyncio.get_running_loop().add_signal_handler(kind, task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            return None

    tally = asyncio.run(until_stopped())
    if tally is None:
        print(f"stopped: what is in {out} is kept, the same command goes on from there", file=sys.stderr)
        return 130
    failed = f", {tally.failed} of them with an error" if tally.failed else ""
    before = f"; {tally.before} were there before" if tally.before else ""
    print(f"{tally.answered} answers in {out}{failed}{before}", file=sys.stderr)
    return 0

"""``forerun serve`` and ``forerun batch``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
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
    Flags,
    Threads,
    flags_of,
    parse_json,
    speculative_config,
    takes,
)
from forerun.core.errors import ConfigError
from forerun.core.folders import POSIX
from forerun.core.threads import AUTO
from forerun.serve.options import API_KEY_VARIABLE, ConnectionLimits, ServerOptions, is_loopback
from forerun.speculate.names import rules

if TYPE_CHECKING:
    from forerun.serve.batch import Answers, Tally
    from forerun.serve.kv_events import KVEvents
    from forerun.serve.models import Models

SERVER = Flags("server", flags_of(ServerOptions, skip=("aliases", "chat_template", "body_timeout")))
CONNECTIONS = Flags("connections", flags_of(ConnectionLimits, skip=("write_timeout",)))
MODEL_NAME = "--model's, or its file's name"
ServedName = Annotated[str | None, typer.Option(help="Model name in requests and responses.", show_default=MODEL_NAME)]
NoRequestLog = Annotated[bool, typer.Option("--no-request-log", help="Do not log requests.")]
Replicated = Annotated[
    int | None, typer.Option(help="Number of engines behind this server, on Ray Serve, with --threads each.", min=1)
]
MaxReplicas = Annotated[
    int | None, typer.Option(help="Maximum number of replicas. Their number follows the load.", min=1)
]
ServerThreads = Annotated[
    int | None, typer.Option(help="CPU threads.", show_default="all usable cores but one, for HTTP")
]
Events = Annotated[
    str | None, typer.Option(metavar="ENDPOINT", help="Publish KV cache events over ZeroMQ, in vLLM's format.")
]
AlsoDraft = Annotated[
    list[str] | None,
    typer.Option(metavar="JSON", help="Another drafter, which requests may select by its method. Repeatable."),
]

PAGE_SIZE = 64
"""Small enough for prompts that begin alike, large enough to cost nothing."""
Opening = Callable[[], Awaitable[Any]]
"""Called in the event loop: opens the client that answers. Whoever opens it closes it."""


@takes(
    SERVED.showing(page_size=str(PAGE_SIZE)),
    SPECULATIVE.showing(length="adaptive if the rule keeps tokens, else fixed"),
    SERVER.showing(served_model_name=MODEL_NAME, allowed_host="--host if that is a loopback address, else any"),
    CONNECTIONS,
)
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port. 0: any free one.", min=0, max=65535)] = 8000,
    also_draft: AlsoDraft = None,
    chat_template: ChatTemplate = None,
    max_queue: Annotated[int, typer.Option(help="Most waiting sequences. Beyond it, status 429.", min=1)] = 1024,
    max_delay: Annotated[float, typer.Option(help="Seconds to gather tokens that are sent together.", min=0)] = 0.01,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests have to finish on shutdown.", min=0)
    ] = 30.0,
    threads: ServerThreads = None,
    no_request_log: NoRequestLog = False,
    kv_events: Events = None,
    replicas: Replicated = None,
    max_replicas: MaxReplicas = None,
    config: Config = None,
    *,
    engine: Mapping[str, Any],
    speculative: Mapping[str, Any],
    server: Mapping[str, Any],
    connections: Mapping[str, Any],
) -> None:
    """Serve OpenAI's API over HTTP, with a playground at /.

    Editors complete code by /infill, or by suffix of /v1/completions, with
    models that have tokens to fill in the middle.

    With --models, a model that forerun ls lists is loaded when a request names it,
    and leaves memory when it is idle (--keep-alive) or when another one needs the
    memory (--model-memory).

    The first signal drains running requests and exits; a second exits immediately.
    """
    _check_installed("serve")
    from forerun.serve.app import create_app
    from forerun.serve.kv_events import KVEvents
    from forerun.serve.models import Library
    from forerun.serve.run import address_of, open_socket, run

    write_timeout = server.get("request_timeout", ServerOptions.request_timeout)
    limits = ConnectionLimits(**connections, write_timeout=write_timeout)
    _set_up(limits.max_connections, log_requests=not no_request_log)
    number = (replicas or 1) if replicas or max_replicas else None
    if kv_events is not None and number is not None:
        raise ConfigError("--kv-events does not support --replicas: remove one")
    with contextlib.ExitStack() as resources:
        listener = resources.enter_context(contextlib.closing(open_socket(host, port)))
        options = _server_options(server, host, is_loopback(listener.getsockname()[0]), chat_template)
        events = None
        if kv_events is not None:
            events = resources.enter_context(contextlib.closing(KVEvents(kv_events)))

        async def listen(models: Models, what: str) -> None:
            out().print(f"{what}\nlistening on {address_of(host, listener)}", soft_wrap=True)
            await run(create_app(models), models, listener, limits, drain_seconds=drain_timeout)

        if options.models:
            more = {"also_draft": also_draft, "kv_events": kv_events, "replicas": number}
            _check_several({**server, **engine, **more, "chat_template": chat_template}, speculative)
            each = {"page_size": PAGE_SIZE, **engine, "threads": set_threads(threads, all_but_one())}
            library = Library(each, options, max_queue=max_queue, max_delay=max_delay)
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(listen(library, library.described))
            return

        drafters = served_drafters(speculative, engine, also_draft)
        answers = answerer(
            engine, drafters, threads, all_but_one(), replicas=number, most=max_replicas, max_queue=max_queue,
            max_delay=max_delay,
        )  # fmt: skip
        # Uvicorn raises the signal again once everything is closed.
        with answers as opening, contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_serve_one(opening, options, number, events, listen))


async def _serve_one(
    opening: Opening, options: ServerOptions, replicas: int | None, events: KVEvents | None,
    listen: Callable[[Models, str], Awaitable[None]],
) -> None:  # fmt: skip
    from forerun.serve.models import OneModel

    client = await opening()
    if events is not None:
        try:
            events.publish(client.engine.scheduler.tree)
        except ConfigError:
            client.close()
            raise
        out().print(f"KV events at {events.endpoint}")
    named, described = options.named_after(client.facts.model), client.facts.described
    what = described if replicas is None else f"{replicas} replicas, each with {described}"
    await listen(OneModel(client, named), f"{named.served_model_name}: {what}")


OF_ONE = (
    "model", "tokenizer", "lora", "served_model_name", "any_model_name", "also_draft", "kv_events", "replicas",
    "chat_template",
)  # fmt: skip
"""Options about one model, beside those of speculation."""


def _check_several(given: Mapping[str, Any], speculative: Mapping[str, Any]) -> None:
    """Raises ConfigError for an option that is about one model."""
    names = [name for name in OF_ONE if given.get(name)]
    names += [flag.name for flag in SPECULATIVE.flags if (flag.field or flag.name) in speculative]
    if names:
        option = names[0].replace("_", "-")
        raise ConfigError(f"--models serves several models and --{option} is about one: remove one of the two")


def _server_options(server: Mapping[str, Any], host: str, local: bool, chat_template: Path | None) -> ServerOptions:
    hosts = server.get("allowed_host", [])
    options = ServerOptions(**{
        "served_model_name": "", "api_key": os.environ.get(API_KEY_VARIABLE), **server,
        "allowed_host": [host.partition("%")[0], *hosts] if local or hosts else None,
        "chat_template": None if chat_template is None else read_file(chat_template),
    })  # fmt: skip
    if options.api_key is None and not local:
        warn(f"{host} is reachable from other machines without --api-key")
    return options


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
    """Yields a function that opens the client: of an engine in this process or, with ``replicas``, of Ray Serve.

    ``most``: the replicas' number follows the load up to this. Without ``threads``, an engine has up to ``cores``
    threads, and replicas share them. Raises ConfigError where Ray is missing.
    """
    if replicas is None:
        from forerun.engine.async_engine import AsyncEngine
        from forerun.engine.llm import LLM

        engine = {"page_size": PAGE_SIZE, **engine, "threads": set_threads(threads, cores)}
        llm = LLM(**engine, speculative_config=drafters)
        warn_synthetic(llm)
        llm.engine.prepare()

        async def opening() -> AsyncEngine:
            return AsyncEngine(llm.engine, max_queue=max_queue, max_delay=max_delay)

        yield opening
        return
    try:
        from forerun.scale.cluster import Cluster, Replicas, cluster
    except ModuleNotFoundError as error:
        raise ConfigError(f"--replicas needs {error.name}: pip install 'forerun[ray]'") from None
    ranks = int(engine.get("tensor_parallel_size") or 1)
    each = max(1, cores // (replicas * ranks)) if threads is None else threads
    engine = {"page_size": PAGE_SIZE, "threads": AUTO if threads is None else threads, **engine}
    with cluster(
        Replicas(engine, drafters, num_replicas=replicas, max_replicas=most, threads=each, max_queue=max_queue)
    ) as (handle,):
        yield lambda: Cluster(handle).pool(max_queue)


def _set_up(connections: int, *, log_requests: bool) -> None:
    """Sets the process's limit of open files, and its logs on standard error."""
    from forerun.serve.run import allow_files

    allow_files(connections)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logging.getLogger("forerun").handlers = [handler]  # with the time, in place of the commands' handler
    logging.getLogger("forerun.core.threads").setLevel(logging.INFO)
    logging.getLogger("forerun.throughput").setLevel(logging.INFO)
    logging.getLogger("forerun.requests").setLevel(logging.INFO if log_requests else logging.WARNING)


def served_drafters(
    speculative: Mapping[str, Any], engine: Mapping[str, Any], others: list[str] | None
) -> list[dict[str, Any]] | dict[str, Any]:
    """Configs of all drafters. ``others`` (``--also-draft``) share the first one's rule and length policy.

    For a model of the user's without other options of speculation they replace the first. The length policy is
    ``adaptive`` where that changes no token.
    """
    first = speculative_config(speculative, engine)
    if rules[first.get("accept", "coupled")].identity:
        first = {"length": "adaptive", **first}
    if not others:
        return first
    common = ("accept", "length")
    shared = {key: value for key, value in first.items() if key in common}
    more = [{**shared, **parse_json("also_draft", text)} for text in others]
    given = {**(speculative.get("speculative_config") or {}), **speculative, "speculative_config": None}
    chosen = any(value is not None and key not in common for key, value in given.items())
    return [first, *more] if chosen or "model" not in engine else more


NO_LIMIT = 10.0**9
"""Seconds for a request of a batch, for which no client waits."""


@takes(
    SERVED.showing(page_size=str(PAGE_SIZE)),
    SPECULATIVE.showing(length="adaptive if the rule keeps tokens, else fixed"),
)
def batch(
    file: Annotated[Path, typer.Argument(help="Requests in OpenAI's batch format, one per line.")],
    answers: Annotated[
        Path | None, typer.Option("--out", help="Output file.", show_default="FILE.answers.jsonl")
    ] = None,
    served_model_name: ServedName = None,
    chat_template: ChatTemplate = None,
    threads: Threads = None,
    replicas: Annotated[
        int | None,
        typer.Option(help="Number of engines that share the work, on Ray Serve, with --threads each.", min=1),
    ] = None,
    *,
    engine: Mapping[str, Any],
    speculative: Mapping[str, Any],
) -> int:
    """Answer a file of requests in OpenAI's batch format.

    Each line gets one response, in order of completion; an invalid line gets an error. Ctrl-C stops; the same command
    answers the rest.
    """
    _check_installed("batch")
    from forerun.serve.batch import Answers

    out = answers or file.with_name(f"{file.name.removesuffix('.jsonl')}.answers.jsonl")
    template = None if chat_template is None else read_file(chat_template)
    options = ServerOptions(served_model_name=served_model_name or "", chat_template=template, request_timeout=NO_LIMIT)
    drafters = served_drafters(speculative, engine, None)
    with (
        contextlib.closing(Answers(out, file)) as written,
        answerer(engine, drafters, threads, all_threads(), replicas=replicas) as opening,
    ):
        return work(file, out, written, opening, options)


def work(file: Path, out: Path, written: Answers, opening: Opening, options: ServerOptions) -> int:
    """Answers the file and prints what was done; returns the command's exit code."""
    from forerun.serve.app import create_app
    from forerun.serve.batch import in_process, run

    async def answered() -> Tally:
        client = await opening()
        try:
            ask = in_process(create_app(client, options.named_after(client.facts.model)))
            return await run(file, written, ask, concurrency=2 * client.capacity())
        finally:
            client.close()

    async def until_stopped() -> Tally | None:
        task = asyncio.create_task(answered())
        for kind in (signal.SIGINT, signal.SIGTERM) if POSIX else ():  # on Windows a signal raises an exception
            asyncio.get_running_loop().add_signal_handler(kind, task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            return None

    tally = asyncio.run(until_stopped())
    if tally is None:
        print(f"stopped: {out} is kept; the same command resumes", file=sys.stderr)
        return 130
    failed = f", {tally.failed} of them with an error" if tally.failed else ""
    before = f"; {tally.before} from earlier runs" if tally.before else ""
    print(f"{tally.answered} answers in {out}{failed}{before}", file=sys.stderr)
    return 0

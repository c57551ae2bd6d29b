"""``forerun batch``."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.console import all_threads, read_file
from forerun.cli.options import SERVED, SPECULATIVE, ChatTemplate, Threads, takes
from forerun.cli.serve import PAGE_SIZE, Opening, ServedName, answerer, served_drafters
from forerun.core.errors import ConfigError
from forerun.core.folders import POSIX

if TYPE_CHECKING:
    from forerun.serve.app import ServerOptions
    from forerun.serve.batch import Answers, Tally

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
    try:
        from forerun.serve.app import ServerOptions
    except ModuleNotFoundError as error:
        raise ConfigError(f"forerun batch needs {error.name}: pip install 'forerun[serve]'") from None
    out = answers or file.with_name(f"{file.name.removesuffix('.jsonl')}.answers.jsonl")
    template = None if chat_template is None else read_file(chat_template)
    options = ServerOptions(model_name=served_model_name or "", chat_template=template, request_timeout=NO_LIMIT)
    drafters = served_drafters(speculative, engine, None)
    with (
        opened(file, out) as written,
        answerer(engine, drafters, threads, all_threads(), replicas=replicas) as opening,
    ):
        return work(file, out, written, opening, options)


@contextlib.contextmanager
def opened(file: Path, out: Path) -> Iterator[Answers]:
    """The answers' file, for as long as nobody else may have it. Raises ConfigError before anything is loaded."""
    from forerun.serve.batch import Answers

    if not file.is_file():
        raise ConfigError(f"cannot read {file}: there is no such file")
    if out.exists() and out.samefile(file):
        raise ConfigError(f"{out} is the file of requests: give another --out")
    written = Answers(out, file)
    try:
        yield written
    finally:
        written.close()


def work(file: Path, out: Path, written: Answers, opening: Opening, options: ServerOptions) -> int:
    """Answer the file and say what was done; the command's exit code."""
    from forerun.serve.app import create_app
    from forerun.serve.batch import asking, run

    async def answered() -> Tally:
        answering = await opening()
        try:
            ask = asking(create_app(answering, options.serving(answering.facts.model)))
            return await run(file, written, ask, together=2 * answering.capacity())
        finally:
            answering.close()

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

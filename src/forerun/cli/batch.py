"""``forerun batch``."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.console import read_file, set_threads
from forerun.cli.options import SERVED, SPECULATIVE, takes
from forerun.cli.serve import PAGE_SIZE, load_served, served_drafters
from forerun.core.errors import ConfigError

if TYPE_CHECKING:
    from forerun.serve.batch import Ask, Tally

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
    served_model_name: Annotated[str | None, typer.Option(help="the model's name in requests and answers")] = None,
    chat_template: Annotated[Path | None, typer.Option(help="Jinja file that replaces the checkpoint's")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads", show_default="all cores")] = None,
    *,
    engine: Mapping[str, Any],
    speculative: Mapping[str, Any],
) -> int:
    """Answer a file of requests in OpenAI's batch format.

    Each line gets exactly one answer, in the order in which they are done. A line that is no request gets an error, and
    the others go on. Ctrl-C stops it; the same command goes on with what is not answered.
    """
    try:
        from forerun.engine.async_engine import AsyncEngine
        from forerun.serve.app import ServerOptions, create_app
        from forerun.serve.batch import asking
    except ModuleNotFoundError as error:
        raise ConfigError(f"forerun batch needs {error.name}: pip install 'forerun[serve]'") from None
    set_threads(threads)
    out = answers or file.with_name(f"{file.name.removesuffix('.jsonl')}.answers.jsonl")
    template = None if chat_template is None else read_file(chat_template)
    with opened(file, out) as written:
        llm = load_served(engine, served_drafters(speculative, engine, None))
        asynchronous = AsyncEngine(llm.engine)
        name = served_model_name or llm.model.info.name
        options = ServerOptions(model_name=name, chat_template=template, request_timeout=NO_LIMIT)
        try:
            return work(file, out, written, asking(create_app(asynchronous, options)), llm.config.max_num_seqs * 2)
        finally:
            asynchronous.close()


@contextlib.contextmanager
def opened(file: Path, out: Path) -> Any:
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


def work(file: Path, out: Path, written: Any, ask: Ask, together: int) -> int:
    """Answer the file and say what was done; the command's exit code."""
    from forerun.serve.batch import run

    async def until_stopped() -> Tally | None:
        task = asyncio.create_task(run(file, written, ask, together=together))
        for kind in (signal.SIGINT, signal.SIGTERM):
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

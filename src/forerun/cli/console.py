"""Where the commands print, and what they keep quiet."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typer.core import TyperArgument, TyperCommand

from forerun.core.errors import ConfigError
from forerun.core.loading import Advance, watch, watch_parts
from forerun.core.threads import AUTO, MOST_THREADS, usable_cores
from forerun.engine.memory import megabytes
from forerun.measure.page import markdown

WORTH_A_BAR = 64 << 20
"""Bytes of a model's files."""


def out() -> Console:
    return Console(file=sys.stdout, highlight=False)


def warn(message: object) -> None:
    print(f"warning: {one_line(message)}", file=sys.stderr)


def warn_synthetic(llm: Any) -> None:
    """Where drafts are accepted at given rates, say that its answers are not the model's."""
    if llm.speculative.synthetic is not None:
        warn("synthetic acceptance: drafts are accepted at given rates, so that answers are not the model's text")


def model_line(llm: Any) -> str:
    """What runs: the model, how, and how large it is."""
    info, mode = llm.model.info, "invariant" if llm.model.invariant else "not invariant"
    return f"{info.name} ({info.path}, {mode}), {megabytes(info.weight_bytes)}"


class _Warnings(logging.Handler):
    """Shows log records that are warnings; who meets an error says so in another way."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING:
            warn(record.getMessage())


_WARNINGS = _Warnings()


def one_line(message: object) -> str:
    return " ".join(str(message).split())


def quiet() -> None:
    """Silence other libraries' remarks; Forerun's own warnings become one line each on stderr. Characters that a
    terminal cannot show are escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    quiet_transformers()
    logging.getLogger("forerun").addHandler(_WARNINGS)
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    warnings.filterwarnings("always", category=RuntimeWarning, module=r"forerun\b")
    warnings.showwarning = lambda message, *rest, **named: warn(message)


def quiet_transformers() -> None:
    """Errors only and no progress bars, whether it has been imported yet or not."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if "transformers" in sys.modules:
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()


def print_json(value: Any) -> None:
    """One JSON object, all of stdout."""
    print(json.dumps(value, indent=2, allow_nan=False))


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their cells, never cut: text to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows)]
    words = [not any(re.fullmatch(r"[-+.\d]+%?|-", row[i]) for row in rows) for i in range(len(heads))]
    for row in [heads, *rows]:
        cells = [cell.ljust(width) if word else cell.rjust(width) for cell, width, word in zip(row, widths, words)]
        print("  ".join(cells).rstrip())


def print_markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The same as a markdown table, between empty lines."""
    print(f"\n{markdown(heads, rows)}\n")


def check_file(path: Path) -> None:
    """Raise ConfigError, before there is anything to lose, where ``write_file`` would."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {folder}")
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"cannot write {path}: permission denied")


def write_file(path: Path, text: str) -> None:
    """Raises ConfigError where the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    except UnicodeEncodeError as error:  # half a surrogate pair, from an argument that was no UTF-8
        raise ConfigError(f"cannot write {path}: {error}") from None


def read_file(path: Path) -> str:
    """Raises ConfigError where the file cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def set_threads(count: int | None, most: int | None = None) -> str | int:
    """Set torch's threads; returns the engine's option ``threads``. None: "auto", up to ``most`` (``all_threads``).
    Raises ConfigError for a number out of range."""
    result = AUTO if count is None else count
    if count is None:
        count = all_threads() if most is None else most
    if not 1 <= count <= MOST_THREADS:
        raise ConfigError(f"--threads must be from 1 to {MOST_THREADS}, not {count}")
    if count > (cores := usable_cores()):
        warn(f"{count} threads on {cores} core{'s'[: cores > 1]}: they wait for each other")
    import torch

    torch.set_num_threads(count)
    return result


def all_threads() -> int:
    """CPU threads that torch takes by itself, one for each core, but no more than the process may use."""
    import torch

    return min(torch.get_num_threads(), usable_cores())


def all_but_one() -> int:
    """CPU threads that leave a core to whatever else the process does."""
    return max(1, all_threads() - 1)


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Any]:
    """A bar on stderr, where that is a terminal; yields a function that advances it by one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda note=None: bar.update(task, advance=1, description=note or title)


@contextlib.contextmanager
def loading(title: str, total: int) -> Iterator[Advance]:
    """A bar on stderr of the bytes of a model's files, gone when the model is there."""
    columns = (TextColumn("Loading {task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=total < WORTH_A_BAR) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.advance(task, done)


@contextlib.contextmanager
def in_parts(title: str, total: int) -> Iterator[Advance]:
    """A bar on stderr of what takes long, or a line where that is no terminal."""
    if not sys.stderr.isatty():
        print(title, file=sys.stderr, flush=True)
    with progress(title, total) as advance:
        yield lambda done: advance()


def watch_loading() -> None:
    """Show those bars whenever this process compiles kernels or, if stderr is a terminal, loads a model."""
    watch_parts.set(in_parts)
    if sys.stderr.isatty():
        watch.set(loading)


class PlainHelp(TyperCommand):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        self.format_options(ctx, formatter)
        self.format_epilog(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            kind = "Arguments" if isinstance(parameter, TyperArgument) else "Options"
            if record is not None:
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)

"""Output of the commands: tables, warnings, progress bars; and other libraries silenced."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from typer.core import TyperArgument, TyperCommand

from forerun.core.errors import ConfigError, RequestError
from forerun.core.loading import Advance, watch, watch_parts
from forerun.core.threads import AUTO, MOST_THREADS, usable_cores
from forerun.engine.memory import megabytes
from forerun.measure.page import markdown

WORTH_A_BAR = 64 << 20
"""Bytes of a model's files from which on its loading shows a bar."""
MOST_OF_A_NAME = 28
"""Characters of a model's name that leave room for a bar in 80 columns."""


def out() -> Console:
    return Console(file=sys.stdout, highlight=False)


def warn(message: object) -> None:
    print(f"warning: {one_line(message)}", file=sys.stderr)


def warn_synthetic(llm: Any) -> None:
    """Warns if drafts are accepted at given rates, because answers are not the model's then."""
    if llm.speculative.synthetic is not None:
        warn("synthetic acceptance: drafts are accepted at given rates, and the text is meaningless")


def model_line(llm: Any) -> str:
    """The model's name, path, mode and size in a line."""
    info, mode = llm.model.info, "invariant" if llm.model.invariant else "not invariant"
    return f"{info.name} ({info.path}, {mode}), {megabytes(info.weight_bytes)}"


class _Warnings(logging.Handler):
    """Prints logged warnings. Errors are reported by whoever raises them."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING:
            warn(record.getMessage())


_WARNINGS = _Warnings()  # one, because a logger adds the same handler once


def one_line(message: object) -> str:
    return " ".join(str(message).split())


def quiet() -> None:
    """Silences other libraries; prints our warnings, a line of stderr each, and escapes what it cannot show."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # it was closed before the program began
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if os.environ.get("COLUMNS") == "0":  # an unknown width, as some terminals say it
        del os.environ["COLUMNS"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if "transformers" in sys.modules:  # then it has read the variables already
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
    logging.getLogger("forerun").addHandler(_WARNINGS)
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    warnings.filterwarnings("always", category=RuntimeWarning, module=r"forerun\b")
    warnings.showwarning = lambda message, *rest, **named: warn(message)


def print_json(value: Any) -> None:
    """Prints one JSON object."""
    print(json.dumps(value, indent=2, allow_nan=False))


def table(rows: Mapping[str, str]) -> str:
    """Names and values in two columns."""
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints columns that are as wide as their cells: text to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows)]
    left = [not any(re.fullmatch(r"[-+.\d]+%?|-", row[i]) for row in rows) for i in range(len(heads))]
    for row in [heads, *rows]:
        cells = [cell.ljust(width) if text else cell.rjust(width) for cell, width, text in zip(row, widths, left)]
        print("  ".join(cells).rstrip())


def print_markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a markdown table between empty lines."""
    print(f"\n{markdown(heads, rows)}\n")


def check_file(path: Path) -> None:
    """Raises ConfigError where ``write_file`` would; to be called before the work whose result it writes."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {folder}")
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"cannot write {path}: permission denied")


def write_file(path: Path, text: str) -> None:
    """Writes a file. Raises ConfigError where that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    except UnicodeEncodeError as error:  # half a surrogate pair, from an argument that was no UTF-8
        raise ConfigError(f"cannot write {path}: {error}") from None


def read_file(path: Path) -> str:
    """A file's text. Raises ConfigError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def read_input() -> str:
    """All of standard input. Raises RequestError unless it is UTF-8 text."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 text: {error}") from None


def set_threads(count: int | None, most: int | None = None) -> str | int:
    """Sets torch's threads and returns the engine's option ``threads``.

    "auto" without a ``count``, with up to ``most`` threads (None: ``all_threads``). Raises ConfigError if out of range.
    """
    result = AUTO if count is None else count
    if count is None:
        count = all_threads() if most is None else most
    if not 1 <= count <= MOST_THREADS:
        raise ConfigError(f"--threads must be from 1 to {MOST_THREADS}, not {count}")
    if count > (cores := usable_cores()):
        warn(f"{count} threads on {cores} core{'s'[: cores > 1]}: lower --threads")
    import torch

    torch.set_num_threads(count)
    return result


def all_threads() -> int:
    """CPU threads that torch chooses, but no more than the cores that the process may use."""
    import torch

    return min(torch.get_num_threads(), usable_cores())


def all_but_one() -> int:
    """CPU threads that leave a core for the rest of the process."""
    return max(1, all_threads() - 1)


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Callable[..., None]]:
    """A bar on stderr, if that is a terminal. Yields a function that advances it by one, perhaps with a new title."""
    from tqdm import tqdm

    with tqdm(total=total, desc=title, dynamic_ncols=True, leave=False, disable=None, mininterval=0) as bar:

        def advance(note: str | None = None) -> None:
            bar.set_description(note or title, refresh=False)
            bar.update()

        yield advance


@contextlib.contextmanager
def loading(title: str, total: int) -> Iterator[Advance]:
    """A bar on stderr of the bytes of a model's files, if they are many. Yields a function that advances it."""
    from tqdm import tqdm

    name = Path(title).name
    short = name if len(name) <= MOST_OF_A_NAME else f"{name[: MOST_OF_A_NAME - 1]}…"
    title, small = f"Loading {short}", total < WORTH_A_BAR
    with tqdm(
        total=total, desc=title, unit="B", unit_scale=True, dynamic_ncols=True, leave=False, disable=small
    ) as bar:
        yield bar.update


@contextlib.contextmanager
def in_parts(title: str, total: int) -> Iterator[Advance]:
    """A bar on stderr of the parts of a long task, or a line if that is no terminal."""
    if not sys.stderr.isatty():
        print(title, file=sys.stderr, flush=True)
    with progress(title, total) as advance:
        yield lambda done: advance()


def watch_loading() -> None:
    """Shows these bars when this process compiles kernels and, if stderr is a terminal, when it loads a model."""
    watch_parts.set(in_parts)
    if sys.stderr.isatty():
        watch.set(loading)


class PlainHelp(TyperCommand):
    """A command whose help is plain text, with options grouped by panel."""

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


class NamesModel(PlainHelp):
    """A command without arguments of its own: ``--model`` may be given without the option's name."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[MODEL]"]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True
        words = super().parse_args(ctx, args)
        if words and ctx.get_parameter_source("model").name != "COMMANDLINE":  # a file of options may name one, too
            ctx.params["model"] = words.pop(0)
        if words:
            ctx.fail(f"{ctx.info_name} takes one model and no other argument: remove {' '.join(words)}")
        return words

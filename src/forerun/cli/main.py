"""The command line. Every error is one line on stderr and exit code 2.

A command's module is imported when it is called or listed, and torch when it runs: help and mistakes answer at once.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module, metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import forerun
from forerun.cli.console import NamesModel, PlainHelp, one_line, quiet, watch_loading
from forerun.core.errors import ConfigError, ForerunError
from forerun.core.registry import lacks_lab

COMMANDS = {
    "generate": "generate:generate",
    "chat": "chat:chat",
    "run": "chat:run",
    "fetch": "fetch:fetch_command",
    "ls": "fetch:list_command",
    "show": "fetch:show_command",
    "rm": "fetch:remove_command",
    "bench": "bench:bench",
    "plan": "plan:plan",
    "check": "bench:check",
    "serve": "serve:serve",
    "batch": "serve:batch",
    "tune": "tune:tune",
}
"""Each command's function, as ``module:name``."""
LAB = ("export", "reproduce", "train")
"""Commands of the distribution forerun-lab."""
GROUP = "forerun.commands"
"""The entry-point group of commands that other distributions add."""
MANY = 50_000
"""Objects between two garbage collections; Python's 700 would take a tenth of the time of importing torch."""
LLAMA_CPP = {
    "-m": "--model", "--model-draft": "--spec-model", "--draft-max": "--spec-tokens", "-c": "--max-model-len",
    "--ctx-size": "--max-model-len", "-n": "--max-tokens", "--n-predict": "--max-tokens", "-t": "--threads",
    "--temp": "--temperature", "--repeat-penalty": "--repetition-penalty", "--parallel": "--max-num-seqs",
    "-p": "the text itself, without an option", "--prompt": "the text itself, without an option",
}  # fmt: skip
"""llama.cpp's options and their names here."""
OLLAMA = {"pull": "fetch", "list": "ls", "delete": "rm"}
"""Commands of Ollama's, and their names here."""
WITH_KEYS = ("generate", "chat", "run", "bench", "serve", "batch")
"""Commands that take ``--speculative-config``."""
OF_A_MODEL = ("chat", "serve", "bench", "plan", "check")
"""Commands that take ``--model`` as an argument, too."""


def load(name: str) -> Any:
    """A click command: ours, or one that another distribution adds."""
    if name in COMMANDS:
        module, attribute = COMMANDS[name].split(":")
        result = getattr(import_module(f"forerun.cli.{module}"), attribute)
    else:
        (point,) = metadata.entry_points(group=GROUP, name=name)
        result = point.load()
    if isinstance(result, typer.Typer):
        group = typer.main.get_command(result)
        group.name = name
        return group
    epilog = None
    if name in WITH_KEYS:
        from forerun.cli.options import method_options

        epilog = f"Keys of --speculative-config:\n\n{method_options()}"
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    single.command(name, cls=NamesModel if name in OF_A_MODEL else PlainHelp, epilog=epilog)(result)
    return typer.main.get_command(single)


class Commands(TyperGroup):
    """Our commands, and those that other distributions add."""

    @cached_property
    def added(self) -> frozenset[str]:
        """Names that other distributions register."""
        return frozenset(metadata.entry_points(group=GROUP).names) - set(COMMANDS)

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS, *sorted(self.added)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load(cmd_name) if cmd_name in COMMANDS or cmd_name in self.added else None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        if args[0] in LAB and args[0] not in self.added:
            raise lacks_lab(f"forerun {args[0]}")
        if args[0] in OLLAMA:
            raise ConfigError(f"there is no command {args[0]}: here it is forerun {OLLAMA[args[0]]}")
        # Typer names those that are spelt alike.
        self.commands = dict.fromkeys(self.list_commands(ctx))  # type: ignore[assignment]
        result: tuple[Any, Any, list[str]] = super().resolve_command(ctx, args)
        return result


app = typer.Typer(
    name="forerun",
    cls=Commands,
    help="Lossless speculative decoding: the same tokens, faster.",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        print(f"forerun {forerun.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


def advice(error: typer.TyperException) -> str:
    """A hint for users of another engine's command line."""
    option = getattr(error, "option_name", None)
    if option in LLAMA_CPP:
        return f"; here it is {LLAMA_CPP[option]}"
    if "unexpected extra argument" in error.format_message():
        return "; name the model with --model, and put a text of several words in quotes"
    return ""


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    quiet()
    watch_loading()
    try:
        return int(app(args=arguments, prog_name="forerun", standalone_mode=False) or 0)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ForerunError, OSError) as error:
        message = one_line(error)
    except typer.TyperException as error:
        message = one_line(error.format_message()) + advice(error)
    except typer.Abort:
        return 130
    print(f"error: {message}", file=sys.stderr)
    return 2


def main() -> None:
    gc.set_threshold(MANY)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(run())

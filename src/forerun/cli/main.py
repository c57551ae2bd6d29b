"""The command line. Every error is one line on stderr and exit code 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence as Seq
from typing import Annotated

import typer

import forerun
from forerun.cli import bench, check, fetch, generate, plan, serve, train
from forerun.cli.console import one_line, quiet
from forerun.cli.options import method_options
from forerun.core.errors import ForerunError

app = typer.Typer(
    name="forerun",
    help="Lossless speculative decoding: the same tokens, sooner.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
OPTIONS = f"Keys of --speculative-config:\n\n{method_options()}"
app.command("generate", epilog=OPTIONS)(generate.generate)
app.command("fetch")(fetch.fetch_command)
app.command("bench", epilog=OPTIONS)(bench.bench)
app.command("plan")(plan.plan)
app.command("check")(check.check)
app.add_typer(train.app, name="train")
app.command("serve", epilog=OPTIONS)(serve.serve)


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    if version:
        print(f"forerun {forerun.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


def run(arguments: Seq[str] | None = None) -> int:
    """Run one command; its exit code."""
    quiet()
    try:
        return int(app(args=arguments, prog_name="forerun", standalone_mode=False) or 0)
    except (ForerunError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        message = one_line(error)
    except typer.TyperException as error:
        message = one_line(error.format_message())
    except typer.Abort:
        return 130
    print(f"error: {message}", file=sys.stderr)
    return 2


def main() -> None:
    sys.exit(run())

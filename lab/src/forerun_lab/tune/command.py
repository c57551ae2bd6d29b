"""``forerun tune`` without ``--draft``, and ``forerun export``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli.console import set_threads
from forerun.cli.options import Flags, flags_of
from forerun_lab.tune.config import Stopped, TuneConfig

TUNE = Flags("options", flags_of(TuneConfig, "Tuning", skip=("model", "out")))


def tune(model: str, folder: Path, options: Mapping[str, Any], say: Callable[[str], None]) -> int:
    """Train and select the fastest drafter; the exit code."""
    config = TuneConfig(model=model, out=folder, **options)
    set_threads(config.threads or None)
    from forerun_lab.tune.run import tune as run

    try:
        run(config, say)
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print(f"stopped: {folder / 'run'} is kept; the same command resumes", file=sys.stderr)
        return 130
    return 0


def export(
    head: Annotated[str, typer.Argument(help="Folder of an eagle head, or forerun:eagle.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write.")],
    target: Annotated[str, typer.Option(help="Checkpoint folder of the target.")] = "forerun:target",
    form: Annotated[str, typer.Option("--as", metavar="speculators|sglang", help="Format.")] = "speculators",
) -> None:
    """Export a trained eagle head for another engine.

    speculators is vLLM's format, sglang is SGLang's. Prints the command that serves the model with the head there.
    """
    from forerun_lab.tune.export import export_head

    print(export_head(head, target, out, form))

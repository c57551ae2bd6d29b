"""``forerun reproduce``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from forerun.cli.console import out


def reproduce(
    folder: Annotated[Path, typer.Option("--out", help="Folder for tables, trained models and the page.")] = Path(
        "reproduction"
    ),
    only: Annotated[str, typer.Option(help="Tables, comma-separated (see lab/notebook/reproduction.md).")] = "",
    *,
    again: Annotated[bool, typer.Option(help="Reproduce finished tables again.")] = False,
    quick: Annotated[bool, typer.Option(help="Only tables that take seconds.")] = False,
    tokens: Annotated[int, typer.Option(help="Target tokens per acceptance rate.")] = 10_000,
    minutes: Annotated[float, typer.Option(help="Training time of each model, in minutes.")] = 20.0,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
) -> int:
    """Reproduce the papers' tables next to the published values. Ctrl-C keeps finished ones."""
    import torch

    from forerun.core.errors import ConfigError
    from forerun_lab.reproduce.parts import Settings
    from forerun_lab.reproduce.run import PARTS
    from forerun_lab.reproduce.run import reproduce as run

    if tokens < 1 or threads < 1 or minutes <= 0:
        raise ConfigError("tokens, threads and minutes must be above 0")
    torch.set_num_threads(threads)
    names = [name.strip() for name in only.split(",") if name.strip()]
    if quick:
        names = [name for name in names or PARTS if name not in PARTS or PARTS[name].seconds]
    settings = Settings(folder, tokens, minutes, lambda note: print(note, file=sys.stderr, flush=True))
    try:
        page = run(settings, names, again)
    except KeyboardInterrupt:
        print(f"stopped: what is in {folder} is kept, the same command goes on", file=sys.stderr)
        return 130
    out().print(f"written: {page}", markup=False, highlight=False)
    return 0

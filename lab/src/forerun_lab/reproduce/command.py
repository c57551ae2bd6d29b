"""``forerun reproduce``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from forerun.cli.console import out


def reproduce(
    folder: Annotated[Path, typer.Option("--out", help="folder for tables, trained models and the page")] = Path(
        "reproduction"
    ),
    only: Annotated[str, typer.Option(help="tables, comma-separated (lab/notebook/reproduction.md names them)")] = "",
    *,
    again: Annotated[bool, typer.Option(help="make them again though they are there")] = False,
    quick: Annotated[bool, typer.Option(help="only what takes seconds")] = False,
    tokens: Annotated[int, typer.Option(help="the target's own tokens behind every acceptance rate")] = 10_000,
    minutes: Annotated[float, typer.Option(help="minutes that each model of a pair trains")] = 20.0,
    threads: Annotated[int, typer.Option(help="CPU threads")] = 1,
) -> int:
    """Make the references' tables, figures and examples again, beside what they print; Ctrl-C keeps what is there."""
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

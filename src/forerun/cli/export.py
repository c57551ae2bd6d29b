"""``forerun export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    head: Annotated[str, typer.Argument(help="folder of an eagle head, or forerun:eagle")],
    out: Annotated[Path, typer.Option("--out", help="folder to write")],
    target: Annotated[str, typer.Option(help="checkpoint folder of the model it drafts for")] = "forerun:target",
    form: Annotated[str, typer.Option("--as", metavar="speculators|sglang", help="whose folder")] = "speculators",
) -> None:
    """Write a trained eagle head as other engines read it.

    speculators is the form that vLLM serves, sglang is SGLang's. The command that serves the model with the head there
    is printed.
    """
    from forerun.train.export import export_head

    print(export_head(head, target, out, form))

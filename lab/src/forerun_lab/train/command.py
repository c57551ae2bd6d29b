"""``forerun train``: one subcommand per kind of model, its flags made from its configuration."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from importlib import import_module
from typing import Any

import typer

from forerun.cli.console import PlainHelp, set_threads
from forerun.cli.options import Flags, flags_of, takes
from forerun.core.errors import ConfigError
from forerun_lab.train.config import (
    HEAD_NAMES,
    DistillConfig,
    HeadTrainConfig,
    JointConfig,
    ModelShape,
    RunConfig,
    TargetConfig,
)

app = typer.Typer(help="Train a target model or a drafter.", rich_markup_mode="rich")


@app.callback(invoke_without_command=True)
def start(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def until_stopped(train: Callable[[], None], config: RunConfig) -> int:
    """Exit status: 0 for a training that ends, 130 for one stopped by Ctrl-C, whose progress is saved and reported."""
    from forerun_lab.tune.config import Stopped

    try:
        train()
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
    except KeyboardInterrupt:
        print(f"stopped: {config.out / 'run'} is kept; the same command resumes", file=sys.stderr)
    else:
        return 0
    return 130


def command(
    kind: type[RunConfig], index: str, help_text: str, *, sized: bool = True, **fixed: Any
) -> Callable[..., int]:
    """A command that fills ``kind`` from flags and runs the function at ``index``, ``module:name`` of
    ``forerun_lab.train``; ``fixed`` are fields it decides itself.

    ``sized``: the model's shape can be chosen."""
    shape = next(item.default_factory for item in fields(kind) if item.name == "shape")
    assert shape is not MISSING
    default_shape: ModelShape = shape()
    sizes = Flags("sizes", flags_of(ModelShape, "Model", defaults=vars(default_shape)) if sized else [])
    run = Flags("run", flags_of(kind, "Run", skip=("shape", *fixed)))

    @takes(run, sizes)
    def start(*, run: Mapping[str, Any], sizes: Mapping[str, Any]) -> int:
        if "out" not in run:
            raise ConfigError("--out is missing: name the folder for the finished model")
        given = {**run, **fixed}
        if sizes:
            given["shape"] = ModelShape(**{**vars(default_shape), **sizes})
        config = kind(**given)
        set_threads(config.threads or None)
        module, name = index.split(":")
        train = getattr(import_module(f"forerun_lab.train.{module}"), name)
        return until_stopped(lambda: print(train(config)), config)

    start.__doc__ = help_text
    return start


app.command("target", cls=PlainHelp)(
    command(
        TargetConfig,
        "target:train_target",
        "Train a small language model and its tokenizer from a folder of text files.",
    )
)
app.command("draft_model", cls=PlainHelp)(
    command(
        DistillConfig, "distill:train_draft_model", "Distil a draft model from a target, the bundled one by default."
    )
)
for head in HEAD_NAMES:
    app.command(head, cls=PlainHelp)(
        command(
            HeadTrainConfig,
            "heads:train_head",
            f"Train {head} on a frozen target, the bundled one by default.",
            sized=False,
            method=head,
        )
    )
app.command("medusa2", cls=PlainHelp)(
    command(
        JointConfig,
        "joint:train_joint",
        "Train medusa heads jointly with a copy of the target. Writes OUT/target and OUT/head.",
        sized=False,
    )
)

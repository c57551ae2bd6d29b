"""The laboratory beside the engine: its commands, and what is said where it is not installed."""

from importlib import metadata

import pytest

from forerun.cli import plan  # before a test makes the laboratory vanish: its flags are made once
from forerun.cli.main import LAB, run
from forerun_lab.train.config import HEAD_NAMES, LOSS_NAMES
from forerun_lab.train.heads import HEADS
from forerun_lab.train.losses import LOSSES

FROM_THE_LAB = {
    "train": ["train", "medusa", "--out", "x"],
    "reproduce": ["reproduce"],
    "plan": ["plan", "--load", "trace.jsonl"],
    "plans": ["plan", "--trees", "4", "--methods", "ngram"],
    "page": ["plan", "--html", "plan.html"],
    "peers": ["bench", "--peers", "transformers", "--max-tokens", "2", "--prompts", "1"],
    "written": ["bench", "--prompt-set", "categories-small"],
    "tune": ["tune", "forerun:target", "--out", "x", "--train", "medusa"],
    "adapt": ["generate", "x", "--speculative-config", '{"method": "eagle", "adapt": true}'],
    "traces": ["generate", "x", "--trace-html", "trace.html"],
    "metrics": ["serve", "--metrics-names", "vllm"],
    "plots": ["bench", "--plots", "x"],
}


def test_help_lists_the_commands_of_the_laboratory(capsys):
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "│ train " in shown
    assert "│ reproduce " in shown
    assert {point.name for point in metadata.entry_points(group="forerun.commands")} >= set(LAB)


@pytest.mark.parametrize("name", FROM_THE_LAB)
def test_without_the_laboratory_one_line_says_how_to_install_it(name, monkeypatch, capsys):
    every = metadata.entry_points

    def without(**expected):
        return (
            every(group="forerun.nothing")
            if expected["group"] in ("forerun.lab", "forerun.commands")
            else every(**expected)
        )

    monkeypatch.setattr(metadata, "entry_points", without)
    if name == "plan":
        with pytest.raises(plan.ConfigError, match=r"plan --load is part of forerun-lab: pip install \./lab"):
            plan.from_lab("load", "plan --load")
        assert [flag.name for flag in plan._load_flags().flags] == ["load", "rate"]
        return
    assert run(FROM_THE_LAB[name]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert error.endswith("is part of forerun-lab: pip install ./lab")


def test_names_that_help_shows_are_those_of_the_classes():
    assert tuple(HEADS) == HEAD_NAMES
    assert set(LOSS_NAMES) == set(LOSSES)

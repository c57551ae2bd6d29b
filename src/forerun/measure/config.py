"""Configurations of ``bench``, ``check`` and ``plan``. Their commands' flags are made from the fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.core.config import COUNT, NOT_NEGATIVE, check_within, drawn, option
from forerun.core.errors import ConfigError
from forerun.engine.config import NONE, SpeculativeConfig
from forerun.sampling.params import SamplingParams
from forerun.speculate.names import drafters, policies, rules

ALL = "all"
PEERS = ("transformers", "llama-cpp", "llama-server", "openvino", "vllm")
HELD_OUT, REPETITIVE, RANDOM = "held_out", "repetitive", "random"
SETS = (HELD_OUT, REPETITIVE, RANDOM)
"""Prompt sets that are drawn, in any number and length."""
CATEGORIES, CATEGORIES_SMALL, HUMANEVAL = "categories", "categories-small", "humaneval"
SMALL, EVERY = 22, 1 << 20
WRITTEN: dict[str, dict[str, Any]] = {
    CATEGORIES: {"prompts": EVERY, "max_tokens": 128, "repeats": 1, "temperatures": (0.0,)},
    CATEGORIES_SMALL: {"prompts": SMALL, "max_tokens": 64, "repeats": 3, "temperatures": (0.0,)},
    HUMANEVAL: {"prompts": EVERY, "max_tokens": 256, "repeats": 1, "temperatures": (0.0,)},
}
"""Prompt sets that are written, and their default settings. The model ends their answers."""
SHAPES = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "tiny")
"""Models of random weights (``forerun_lab.shapes``)."""
TREE_NODES = 8
SAMPLES = 1000
"""Answers of one distribution check. Enough to find a rule that draws the token after a rejection from p instead of
max(0, p - q): on a weak pair its p-value was below 1e-11 in each of four runs; with 200 samples it was 4e-5 to 1e-2."""


def _listed(name: str, default: tuple[Any, ...], text: str) -> Any:
    """A field that is a comma-separated list on the command line, in the option ``name``."""
    return field(default=default, metadata={"commas": name, "help": text})


@dataclass(frozen=True)
class BenchConfig:
    """One benchmark. Every combination of the lists is measured."""

    engine: dict[str, Any] = field(default_factory=dict)
    speculative: dict[str, Any] = field(default_factory=dict)
    methods: Sequence[str] = _listed(
        "methods",
        (NONE, "draft_model", "ngram"),
        f"methods, comma-separated, or {ALL} (name none twice to see the noise): {', '.join([NONE, *drafters])}",
    )
    accepts: Sequence[str] = _listed("accept", ("coupled",), f"acceptance rules: {', '.join(rules)}")
    lengths: Sequence[str] = _listed("length", ("fixed",), f"length policies: {', '.join(policies)}")
    counts: Sequence[int] = _listed("spec_tokens", (), "numbers of drafted tokens")
    concurrency: Sequence[int] = _listed("concurrency", (1,), "requests decoded together")
    temperatures: Sequence[float] = _listed("temperature", (0.0, 1.0), "temperatures")
    peers: Sequence[str] = _listed(
        "peers", (), f"engines: NAME, NAME=PYTHON or llama-server=COMMAND: {', '.join(PEERS)}"
    )
    sampling: dict[str, Any] = field(default_factory=dict)
    """sampling options of every request, beside its temperature, length and seed"""
    prompts: int = option(8, "number of prompts; by default all of a written set")
    prompt_tokens: int = option(64, "tokens of a drawn prompt")
    max_tokens: int = option(64, "most tokens of an answer; categories 128, humaneval 256")
    repeats: int = option(3, "how often everything is run; medians are reported; categories and humaneval 1")
    prompt_set: str = option(
        HELD_OUT,
        f"prompts, drawn ({', '.join(SETS)}) or, with forerun-lab, written ({', '.join(WRITTEN)}): see docs/bench.md",
    )
    prompts_file: Path | None = option(
        None, "take prompts from this file, one per line; for categories lines of JSON, for humaneval its wheel"
    )
    execute: bool = option(
        False,
        "run humaneval's tests on the answers, in child processes with limits: generated code is run only with this",
    )
    seed: int = option(0, "seed of prompts and sampling; -1: a random one")
    random_shape: str | None = option(
        None, f"measure random weights of this shape instead of a model: {', '.join(SHAPES)}"
    )
    random_draft_shape: str | None = option(None, "add a draft model of this shape, with random weights")
    whole: bool = option(False, "count rounds that read prompts, too, as for requests that come and go")
    fresh: bool = option(False, "forget after every repeat what the length policy has measured")
    fastest: bool = option(True, "measure plain decoding without bit-equal logits too")
    trees: int | None = option(
        None, "also measure each method's trees of about this many nodes; 0: none; by default only with all methods"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", drawn(self.seed, 31))
        if self.trees is None:
            object.__setattr__(self, "trees", TREE_NODES if ALL in self.methods else 0)
        check_within(self, {
            "prompts prompt_tokens max_tokens repeats concurrency": COUNT, "trees temperatures": NOT_NEGATIVE,
        })  # fmt: skip
        for name in ("methods", "accepts", "lengths"):
            if not getattr(self, name):
                raise ConfigError(f"{name} must name at least one")
        if self.prompt_set not in SETS and self.prompt_set not in WRITTEN:
            raise ConfigError(f"unknown prompt set {self.prompt_set!r}: choose one of {', '.join([*SETS, *WRITTEN])}")
        if self.prompt_set in WRITTEN and self.random_shape is not None:
            raise ConfigError("random weights know no text: leave prompt_set out, or random_shape")
        if self.execute and self.prompt_set != HUMANEVAL:
            raise ConfigError(f"execute runs the tests of {HUMANEVAL}: name that as prompt_set")
        own = {"temperature", "max_tokens", "seed", "n"} & set(self.sampling)
        if own:
            raise ConfigError(f"sampling must not set {', '.join(sorted(own))}")
        unknown = set(self.sampling) - set(SamplingParams.names())
        if unknown:
            raise ConfigError(f"sampling has unknown options {', '.join(sorted(unknown))}")
        if self.fresh and set(self.lengths) <= {"fixed"}:
            raise ConfigError("fresh forgets what a length policy has measured, and fixed measures nothing")
        if self.sampling and self.peers:
            raise ConfigError("sampling options are not passed on to peers: leave one of the two out")
        if self.whole and self.peers:
            raise ConfigError("only decoding is timed where peers take part: leave whole or peers out")


@dataclass(frozen=True)
class CheckConfig:
    """One check."""

    engine: dict[str, Any] = field(default_factory=dict)
    speculative: dict[str, Any] = field(default_factory=dict)
    methods: Sequence[str] = _listed(
        "methods", ("ngram", "draft_model"), f"methods, comma-separated, or all: {', '.join(drafters)}"
    )
    trees: bool = option(True, "check hand-made trees too")
    prompts: int = option(22, "prompts: sampling options and layouts take turns over them")
    prompt_tokens: int = option(32, "tokens of a prompt")
    max_tokens: int = option(24, "tokens of an answer")
    temperatures: Sequence[float] = _listed("temperature", (0.0, 0.8), "temperatures")
    page_sizes: Sequence[int | None] = (None, 16)
    accepts: Sequence[str] = _listed(
        "accept", ("coupled", "token"), "lossless rules whose distribution is tested, or all"
    )
    samples: int = option(SAMPLES, "answers per test of the output's distribution; 0: no such test")
    concurrency: int = option(16, "requests decoded together")
    prompt_set: str = option(HELD_OUT, f"prompts: {', '.join(SETS)}")
    seed: int = option(0, "seed of prompts and sampling; -1: a random one")

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", drawn(self.seed, 31))
        object.__setattr__(self, "methods", [method for method in self.methods if method != NONE])
        if ALL in self.accepts:
            object.__setattr__(self, "accepts", [name for name in rules if rules[name].lossless])
        check_within(self, {"prompts prompt_tokens max_tokens concurrency": COUNT, "samples": NOT_NEGATIVE})
        for name in ("temperatures", "page_sizes", *(("accepts",) if self.samples else ())):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty: name at least one, or nothing is checked")
        if self.prompts < len(self.page_sizes):
            raise ConfigError(f"layouts take turns over the prompts: {len(self.page_sizes)} prompts at least")
        for rule in self.accepts:
            if not rules[rule].lossless:
                raise ConfigError(f"rule {rule!r} is not lossless by design: there is nothing to check")
        if not self.methods and not self.trees:
            raise ConfigError("nothing to check: name at least one method, or leave the trees in")


@dataclass(frozen=True)
class PlanConfig:
    """One plan."""

    methods: Sequence[str] = _listed("methods", ("draft_model", "ngram"), f"candidates: {', '.join(drafters)}")
    accept: str = option(SpeculativeConfig.accept, f"acceptance rule: {', '.join(rules)}")
    temperature: float = option(0.0, "temperature of your requests")
    concurrency: Sequence[int] = _listed("concurrency", (1,), "requests decoded together; several: a plan for each")
    longest: int = option(8, "longest draft to consider, in tokens")
    layer_trials: int = option(0, "how many subsets of the target's layers to try for layerskip, with forerun-lab")
    trees: int = option(0, "plan trees of up to this many tokens, with forerun-lab")
    prompts: int = option(4, "number of prompts")
    prompt_tokens: int = option(64, "tokens of a prompt")
    max_tokens: int = option(48, "tokens of an answer")
    prompt_set: str = option(HELD_OUT, f"prompts: {', '.join(SETS)}")
    prompts_file: Path | None = option(None, "take prompts from this file, one per line")
    seed: int = option(0, "seed of prompts and sampling; -1: a random one")

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", drawn(self.seed, 31))
        check_within(self, {
            "longest concurrency prompts prompt_tokens max_tokens": COUNT, "layer_trials trees": NOT_NEGATIVE,
        })  # fmt: skip
        if not self.methods:
            raise ConfigError(f"--methods must name at least one of {', '.join(drafters)}")

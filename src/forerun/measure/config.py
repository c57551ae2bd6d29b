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
PEERS = ("transformers", "llama-cpp", "llama-server", "openvino", "mistralrs", "vllm")
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
TREE_NODES = 8
SAMPLES = 1000
"""Answers of one distribution check. Enough to find a rule that draws the token after a rejection from p instead of
max(0, p - q): on a weak pair its p-value was below 1e-11 in each of four runs; with 200 samples it was 4e-5 to 1e-2."""


@dataclass(frozen=True)
class BenchConfig:
    """One benchmark. Every combination of the lists is measured."""

    engine: dict[str, Any] = field(default_factory=dict)
    speculative: dict[str, Any] = field(default_factory=dict)
    methods: Sequence[str] = option(
        (NONE, "draft_model", "ngram"),
        f"Methods, comma-separated, or {ALL}; {NONE} twice shows the noise: {', '.join([NONE, *drafters])}.",
        commas="methods",
    )
    accepts: Sequence[str] = option(
        ("coupled",), f"Acceptance rules, comma-separated: {', '.join(rules)}.", commas="accept"
    )
    lengths: Sequence[str] = option(
        ("fixed",), f"Draft length policies, comma-separated: {', '.join(policies)}.", commas="length"
    )
    counts: Sequence[int] = option((), "Numbers of draft tokens, comma-separated.", commas="spec_tokens")
    concurrency: Sequence[int] = option(
        (1,), "Numbers of requests decoded together, comma-separated.", commas="concurrency"
    )
    temperatures: Sequence[float] = option((0.0, 1.0), "Temperatures, comma-separated.", commas="temperature")
    peers: Sequence[str] = option(
        (),
        f"Other engines to measure, comma-separated: {', '.join(PEERS)}; NAME=PYTHON or llama-server=COMMAND.",
        commas="peers",
    )
    sampling: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Further sampling options of every request."}
    )
    prompts: int = option(8, "Number of prompts. Default of written sets: all.")
    prompt_tokens: int = option(64, "Tokens per prompt of a drawn set.")
    max_tokens: int = option(64, "Maximum tokens per answer. Default of categories: 128, humaneval: 256.")
    repeats: int = option(3, "Number of runs, of which medians are shown. Default of categories and humaneval: 1.")
    prompt_set: str = option(
        HELD_OUT, f"Prompt set, drawn ({', '.join(SETS)}) or, with forerun-lab, written ({', '.join(WRITTEN)})."
    )
    prompts_file: Path | None = option(
        None, "Read prompts from this file, one per line. For categories JSON lines, for humaneval its wheel."
    )
    execute: bool = option(False, "Run humaneval's tests on generated code, in limited child processes.")
    seed: int = option(0, "Seed of prompts and sampling. -1: a random one.")
    whole: bool = option(False, "Include prompt processing, as for requests that come and go.")
    fresh: bool = option(False, "Reset the length policy's measurements after every run.")
    fastest: bool = option(True, "Also measure plain decoding without bit-equal logits.")
    trees: int | None = option(
        None, "Also measure trees of about this many nodes. Default: 8 with all methods, else none."
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
        if self.execute and self.prompt_set != HUMANEVAL:
            raise ConfigError(f"execute needs prompt_set {HUMANEVAL}")
        own = {"temperature", "max_tokens", "seed", "n"} & set(self.sampling)
        if own:
            raise ConfigError(f"sampling must not set {', '.join(sorted(own))}")
        unknown = set(self.sampling) - set(SamplingParams.names())
        if unknown:
            raise ConfigError(f"sampling has unknown options {', '.join(sorted(unknown))}")
        if self.fresh and set(self.lengths) <= {"fixed"}:
            raise ConfigError("fresh has no effect with length fixed: remove it")
        if self.sampling and self.peers:
            raise ConfigError("peers do not support sampling options: remove sampling or peers")
        if self.whole and self.peers:
            raise ConfigError("whole does not support peers: remove one")


QUICK: dict[str, Any] = {"prompts": 11, "max_tokens": 12, "accepts": ("coupled",), "samples": 200, "rows": 70}
"""Settings of ``check --quick``: every sampling option, layout and kind of draft once."""


@dataclass(frozen=True)
class CheckConfig:
    """One check."""

    engine: dict[str, Any] = field(default_factory=dict)
    speculative: dict[str, Any] = field(default_factory=dict)
    methods: Sequence[str] = option(
        ("ngram", "draft_model"), f"Methods, comma-separated, or all: {', '.join(drafters)}.", commas="methods"
    )
    trees: bool = option(True, "Also check hand-made trees.")
    prompts: int = option(22, "Number of prompts. Sampling options and layouts rotate over them.")
    prompt_tokens: int = option(32, "Tokens per prompt.")
    max_tokens: int = option(24, "Tokens per answer.")
    temperatures: Sequence[float] = option((0.0, 0.8), "Temperatures, comma-separated.", commas="temperature")
    page_sizes: Sequence[int | None] = (None, 16)
    rows: int | None = None
    """Of the self-test; None: as many as it wants."""
    accepts: Sequence[str] = option(
        ("coupled", "token"),
        "Lossless rules whose output distribution is tested, comma-separated, or all.",
        commas="accept",
    )
    samples: int = option(SAMPLES, "Answers per distribution test. 0: skip these tests.")
    concurrency: int = option(16, "Number of requests decoded together.")
    prompt_set: str = option(HELD_OUT, f"Prompt set: {', '.join(SETS)}.")
    seed: int = option(0, "Seed of prompts and sampling. -1: a random one.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", drawn(self.seed, 31))
        object.__setattr__(self, "methods", [method for method in self.methods if method != NONE])
        if ALL in self.accepts:
            object.__setattr__(self, "accepts", [name for name in rules if rules[name].lossless])
        check_within(self, {"prompts prompt_tokens max_tokens concurrency": COUNT, "samples": NOT_NEGATIVE})
        for name in ("temperatures", "page_sizes", *(("accepts",) if self.samples else ())):
            if not getattr(self, name):
                raise ConfigError(f"{name} must name at least one")
        if self.prompts < len(self.page_sizes):
            raise ConfigError(f"--prompts must be at least {len(self.page_sizes)}, one per layout")
        for rule in self.accepts:
            if not rules[rule].lossless:
                raise ConfigError(f"rule {rule!r} is not lossless: remove it")
        if not self.methods and not self.trees:
            raise ConfigError("nothing to check: add a method, or trees")


@dataclass(frozen=True)
class PlanConfig:
    """One plan."""

    methods: Sequence[str] = option(
        ("draft_model", "ngram"), f"Methods to consider, comma-separated: {', '.join(drafters)}.", commas="methods"
    )
    accept: str = option(SpeculativeConfig.accept, f"Acceptance rule: {', '.join(rules)}.")
    temperature: float = option(0.0, "Temperature of your requests.")
    concurrency: Sequence[int] = option(
        (1,), "Numbers of requests decoded together, comma-separated; a plan for each.", commas="concurrency"
    )
    longest: int = option(8, "Longest draft to consider, in tokens.")
    layer_trials: int = option(0, "Number of layer subsets to try for layerskip. Needs forerun-lab.")
    trees: int = option(0, "Plan trees of up to this many tokens. Needs forerun-lab.")
    prompts: int = option(4, "Number of prompts.")
    prompt_tokens: int = option(64, "Tokens per prompt.")
    max_tokens: int = option(48, "Tokens per answer.")
    prompt_set: str = option(HELD_OUT, f"Prompt set: {', '.join(SETS)}.")
    prompts_file: Path | None = option(None, "Read prompts from this file, one per line.")
    seed: int = option(0, "Seed of prompts and sampling. -1: a random one.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", drawn(self.seed, 31))
        check_within(self, {
            "longest concurrency prompts prompt_tokens max_tokens": COUNT, "layer_trials trees": NOT_NEGATIVE,
        })  # fmt: skip
        if not self.methods:
            raise ConfigError(f"--methods must name at least one of {', '.join(drafters)}")

"""All checks, in order."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.bench.config import ALL, HELD_OUT, REPETITIVE, SAMPLES
from forerun.bench.environment import environment
from forerun.bench.lossless.bits import check_bits
from forerun.bench.lossless.identity import answers, check_identity
from forerun.bench.lossless.law import check_law
from forerun.bench.lossless.result import Result
from forerun.bench.methods import labels, method_configs, runnable
from forerun.bench.prompts import make_prompts
from forerun.core.errors import ConfigError
from forerun.engine.llm import LLM
from forerun.models.architectures.spec import applies
from forerun.models.kinds import UNQUANTIZED
from forerun.models.load import load_model, read_config, resolve
from forerun.sampling.params import SamplingParams
from forerun.speculate.accept import rules
from forerun.speculate.draft import drafters

LAW_PROMPT = 14
"""Tokens of the prompt whose continuations are counted; it repeats itself, for drafters that look back."""


@dataclass(frozen=True)
class CheckConfig:
    """What is checked and how thoroughly."""

    engine: dict[str, Any] = field(default_factory=dict)
    speculative: dict[str, Any] = field(default_factory=dict)
    methods: Seq[str] = ("ngram", "draft_model")
    accepts: Seq[str] = ("coupled", "token")
    trees: bool = True
    prompts: int = 22
    prompt_tokens: int = 32
    max_tokens: int = 24
    temperatures: Seq[float] = (0.0, 0.8)
    page_sizes: Seq[int | None] = (None, 16)
    samples: int = SAMPLES
    concurrency: int = 16
    prompt_set: str = HELD_OUT
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompts", "prompt_tokens", "max_tokens", "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.samples < 0:
            raise ConfigError(f"samples must not be negative, not {self.samples}")
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


def run_checks(config: CheckConfig, step: Callable[[str], None] = lambda note: None) -> dict[str, Any]:
    """``{"passed": bool, "tested": bool, "environment": ..., "results": [...], "left_out": {method: why}}``: whether
    every result passed, and whether every one tested something. Raises ForerunError subclasses."""
    options = method_configs(config.methods, ("coupled",), ("fixed",), (), config.speculative)[1:]
    llm = LLM(**config.engine, speculative_config=None)
    left_out: dict[str, str] = {}
    if ALL in config.methods:
        step("building every method")
        options, left_out = runnable(llm, options)
    prompts = make_prompts(
        config.prompt_set, llm.tokenizer, count=config.prompts, length=config.prompt_tokens, seed=config.seed
    )
    results = list(
        check_identity(
            llm,
            options,
            prompts,
            trees=config.trees,
            temperatures=config.temperatures,
            max_tokens=config.max_tokens,
            page_sizes=config.page_sizes,
            concurrency=config.concurrency,
            seed=config.seed,
            step=step,
        )
    )
    results += _bits(config, llm, prompts, step)
    if config.samples:
        prompt = make_prompts(REPETITIVE, llm.tokenizer, count=1, length=LAW_PROMPT, seed=config.seed)[0]
        cases = [{**item, "accept": rule} for item in options for rule in config.accepts]
        if ALL in config.methods:
            cases, not_with = runnable(llm, cases)
            left_out |= not_with
        for name, case in zip(labels(cases, ("accept",)), cases, strict=True):
            step(f"law, {name}, {case['accept']}")
            results.append(check_law(llm, case, prompt, samples=config.samples, seed=config.seed, name=name))
    return {
        "passed": all(result.passed for result in results),
        "tested": all(result.tested for result in results),
        "environment": environment(llm, config.engine),
        "results": [result.as_dict() for result in results],
        "left_out": left_out,
    }


def _bits(config: CheckConfig, llm: LLM, prompts: Seq[list[int]], step: Callable[[str], None]) -> list[Result]:
    """On every path that runs this model; the layouts take turns over the prompts."""
    params = [
        SamplingParams(temperature=1.0, max_tokens=config.max_tokens, seed=config.seed + i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    found, _ = answers(llm, None, prompts, params, concurrency=config.concurrency)
    pairs = [(prompt, group[0].tokens) for prompt, group in zip(prompts, found)]
    layouts = len(config.page_sizes)
    results = []
    encodes = llm.model.info.encoder is not None
    for path in ("native",) if encodes else ("native", "hf"):
        if path == "native" and not encodes and applies(read_config(resolve(llm.config.model))) is not None:
            continue
        if llm.model.info.path.startswith(path):
            model = llm.model
        elif config.engine.get("quantization") not in (None, UNQUANTIZED) or llm.config.tensor_parallel_size > 1:
            continue
        else:
            wanted = replace(llm.config, model_path=path)
            model = load_model(
                wanted.model,
                dtype=wanted.dtype,
                device=wanted.device,
                invariant=wanted.invariant,
                model_path=path,
                lora=wanted.lora,
            )
        for turn, page_size in enumerate(config.page_sizes):
            step(f"bits, {model.info.path}")
            results += check_bits(model, pairs[turn::layouts], page_size)
    return results


def steps(config: CheckConfig) -> int:
    """About how many steps ``run_checks`` reports."""
    methods = len(list(drafters)) if ALL in config.methods else len(config.methods)
    cases = methods + config.trees
    laws = methods * len(config.accepts) if config.samples else 0
    return len(config.temperatures) * (1 + cases * len(config.page_sizes)) + 2 * len(config.page_sizes) + laws

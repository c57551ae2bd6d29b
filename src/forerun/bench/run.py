"""The benchmark: every contender on the same prompts, taking turns, so that a busy machine is busy for all."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from forerun.bench.contenders import FASTEST, Contender, EngineContender, method_configs
from forerun.bench.environment import environment, read_bandwidth
from forerun.bench.peers import peer_contenders
from forerun.bench.prompts import HELD_OUT, RANDOM, make_prompts, repetition_rate
from forerun.bench.shapes import bytes_per_token, random_checkpoint
from forerun.core.errors import ConfigError
from forerun.engine.config import NONE
from forerun.engine.llm import LLM
from forerun.models.load import resolve
from forerun.plan.estimate import Costs, Measured, shares
from forerun.sampling.params import SamplingParams

WARM_UP_TOKENS = 8
OUT_OF_CACHE = 256 << 20


@dataclass(frozen=True)
class BenchConfig:
    """What is measured. Lists are combined with each other."""

    engine: dict[str, Any] = field(default_factory=dict)
    speculative: dict[str, Any] = field(default_factory=dict)
    methods: Seq[str] = (NONE, "draft_model", "ngram")
    accepts: Seq[str] = ("coupled",)
    lengths: Seq[str] = ("fixed",)
    counts: Seq[int] = ()
    concurrency: Seq[int] = (1,)
    temperatures: Seq[float] = (0.0, 1.0)
    peers: Seq[str] = ()
    prompts: int = 8
    prompt_tokens: int = 64
    max_tokens: int = 64
    repeats: int = 3
    prompt_set: str = HELD_OUT
    prompts_file: Path | None = None
    seed: int = 0
    random_shape: str | None = None
    """Measure a model of this shape with random weights."""
    random_draft_shape: str | None = None
    fastest: bool = True
    """Measure plain decoding without bit-equal logits too."""

    def __post_init__(self) -> None:
        for name in ("prompts", "prompt_tokens", "max_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.concurrency or min(self.concurrency) < 1:
            raise ConfigError(f"concurrency must be at least 1, not {list(self.concurrency)}")
        if not self.temperatures or min(self.temperatures) < 0:
            raise ConfigError(f"temperatures must be at least 0, not {list(self.temperatures)}")


Progress = Callable[[str], None]


def run_bench(config: BenchConfig, progress: Progress = lambda note: None) -> dict[str, Any]:
    """``{"environment": ..., "rows": [...]}``. Raises ForerunError subclasses."""
    with tempfile.TemporaryDirectory(prefix="forerun-bench-") as folder:
        return _run(_with_random_models(config, Path(folder), progress), progress)


def _with_random_models(config: BenchConfig, folder: Path, progress: Progress) -> BenchConfig:
    """The same, with checkpoints in place of shapes. Held-out text means nothing to such models."""
    if config.random_shape is not None:
        if "model" in config.engine:
            raise ConfigError("give a model or a random shape, not both")
        progress(f"writing random weights, {config.random_shape}")
        path = random_checkpoint(folder / config.random_shape, config.random_shape, seed=config.seed)
        kind = RANDOM if config.prompt_set == HELD_OUT else config.prompt_set
        config = replace(config, engine={**config.engine, "model": str(path)}, prompt_set=kind)
    if config.random_draft_shape is not None:
        path = random_checkpoint(folder / "draft", config.random_draft_shape, seed=config.seed + 1)
        config = replace(config, speculative={**config.speculative, "model": str(path)})
    return config


def _run(config: BenchConfig, progress: Progress) -> dict[str, Any]:
    options = method_configs(config.methods, config.accepts, config.lengths, config.counts, config.speculative)
    llm = LLM(**config.engine)
    fastest = None
    if config.fastest and llm.model.row_multiple > 1:
        fastest = LLM(**{**config.engine, "invariant": False})
    prompts = make_prompts(
        config.prompt_set,
        llm.tokenizer,
        count=max(config.prompts, max(config.concurrency)),
        length=config.prompt_tokens,
        seed=config.seed,
        file=config.prompts_file,
    )
    rows = []
    for concurrency in config.concurrency:
        contenders: list[Contender] = [EngineContender(o["method"], llm, o, concurrency) for o in options]
        if fastest is not None:
            contenders.append(EngineContender(FASTEST, fastest, {"method": NONE}, concurrency))
        if concurrency == 1:
            contenders += peer_contenders(config.peers, llm, config.speculative.get("model"))
        for temperature in config.temperatures:
            progress(f"temperature {temperature:g}, concurrency {concurrency}")
            runs = take_turns(contenders, prompts, config, temperature, concurrency)
            rows += table(contenders, runs, prompts, temperature, concurrency)
        for contender in contenders:
            contender.close()
        gc.collect()
    about = environment(llm, config.engine)
    about |= _bandwidth(llm, rows)
    about |= {
        "model": config.random_shape or about["model"],
        "random_weights": config.random_shape is not None,
        "prompt_set": config.prompt_set if config.prompts_file is None else str(config.prompts_file),
        "prompts": len(prompts),
        "prompt_tokens": config.prompt_tokens,
        "max_tokens": config.max_tokens,
        "repeats": config.repeats,
        "prompt_repetition_rate": repetition_rate(prompts),
    }
    return {"environment": about, "rows": rows}


def take_turns(
    contenders: Seq[Contender], prompts: Seq[list[int]], config: BenchConfig, temperature: float, concurrency: int
) -> list[list[Measured]]:
    """Per contender, one measurement per repeat. The turn passes after every prompt, or every full batch."""

    def params(first: int, count: int, tokens: int) -> list[SamplingParams]:
        seeds = range(config.seed + first, config.seed + first + count)
        return [SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, seed=s) for s in seeds]

    for contender in contenders:
        contender.run(prompts[:concurrency], params(0, concurrency, min(WARM_UP_TOKENS, config.max_tokens)))
    size = len(prompts) if concurrency > 1 else 1
    runs: list[list[Measured]] = [[] for _ in contenders]
    for repeat in range(config.repeats):
        for found in runs:
            found.append(Measured())
        for first in range(0, len(prompts), size):
            turn = (repeat + first // size) % len(contenders)
            for index in [*range(turn, len(contenders)), *range(turn)]:
                part = prompts[first : first + size]
                found = contenders[index].run(part, params(first, len(part), config.max_tokens))
                runs[index][-1].extend(found)
    return runs


def table(
    contenders: Seq[Contender],
    runs: Seq[Seq[Measured]],
    prompts: Seq[list[int]],
    temperature: float,
    concurrency: int,
) -> list[dict[str, Any]]:
    """One row per contender, each against ``none`` of the same run and against the fastest plain mode."""
    names = [contender.name for contender in contenders]
    plain = runs[names.index(NONE)]
    fastest = runs[names.index(FASTEST)] if FASTEST in names else plain
    rows = []
    for contender, found in zip(contenders, runs):
        row: dict[str, Any] = {"method": contender.name, "temperature": temperature, "concurrency": concurrency}
        row |= contender.facts()
        row["tokens_per_second"] = median(m.tokens_per_second for m in found)
        ratios = [m.tokens_per_second / p.tokens_per_second for m, p in zip(found, plain)]
        row["speedup"], row["speedup_range"] = median(ratios), [min(ratios), max(ratios)]
        row["speedup_over_fastest"] = median(m.tokens_per_second / f.tokens_per_second for m, f in zip(found, fastest))
        row |= _speculation(found, plain, concurrency)
        row["identical"] = None
        if contender.promises_identity(temperature):
            row["identical"] = all(m.answers == plain[0].answers for m in found)
        texts = [[*prompt, *answer] for prompt, answer in zip(prompts, found[0].answers)]
        row["repetition_rate"] = repetition_rate(texts, [len(prompt) for prompt in prompts])
        rows.append(row)
    return rows


def _speculation(found: Seq[Measured], plain: Seq[Measured], concurrency: int) -> dict[str, Any]:
    """Acceptance and prices of all repeats together, and what the theory makes of them."""
    rounds = [r for m in found for r in m.rounds]
    total = Measured(metrics=[metric for m in found for metric in m.metrics]).total
    costs = Costs.of(rounds, [r for m in plain for r in m.rounds], concurrency) if total.num_drafts else None
    predicted = None
    if costs is not None and total.match_rate is not None:
        predicted = costs.predict(rounds, total.match_rate)
    return {
        "alpha": total.alpha,
        "match_rate": total.match_rate,
        "draft_acceptance_rate": total.draft_acceptance_rate,
        "mean_acceptance_length": total.mean_acceptance_length,
        "tokens_per_round": total.tokens_per_round,
        "cost_coefficient": costs.c if costs is not None else None,
        "verify_cost": costs.typical if costs is not None else None,
        "predicted_speedup": predicted,
        "shares": shares(rounds),
        "draft_error": total.draft_error,
    }


def _bandwidth(llm: LLM, rows: Seq[dict[str, Any]]) -> dict[str, Any]:
    """Bytes that a plain token reads and the bandwidth measured beside it; adds each plain row's share of it.

    Only for weights that no cache holds.
    """
    size = bytes_per_token(resolve(llm.config.model), llm.model.info.dtype.itemsize)
    found: dict[str, Any] = {"weight_bytes_per_token": size, "read_bandwidth": None}
    if size >= OUT_OF_CACHE:
        found["read_bandwidth"] = read_bandwidth(llm.model.info.device)
        for row in rows:
            if row["tokens_per_round"] == 1.0 and row["concurrency"] == 1:
                row["bandwidth_share"] = size * row["tokens_per_second"] / found["read_bandwidth"]
    return found

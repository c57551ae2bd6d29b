"""The benchmark: every contender on the same prompts, taking turns, so that a busy machine is busy for all."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

from forerun.bench.categories import by_category
from forerun.bench.config import ALL, HELD_OUT, HUMANEVAL, RANDOM, WRITTEN, BenchConfig
from forerun.bench.contenders import FASTEST, Contender, EngineContender
from forerun.bench.conversations import Texts, make_texts, read_set, stops
from forerun.bench.environment import environment, read_bandwidth
from forerun.bench.methods import labels, method_configs, runnable, with_trees
from forerun.bench.prompts import repetition_rate
from forerun.bench.rows import table
from forerun.bench.weights import weights
from forerun.core.errors import ConfigError
from forerun.core.registry import from_lab
from forerun.engine.config import NONE
from forerun.engine.llm import LLM
from forerun.plan.estimate import Measured, in_turns
from forerun.sampling.params import SamplingParams
from forerun.speculate.accept.synthetic import LENGTH, RATES

PEERS_DRAFT = 64
"""Tokens of room behind an answer: more than any peer drafts at once."""

WARM_UP_TOKENS = 8
OUT_OF_CACHE = 256 << 20


Progress = Callable[[str], None]


def run_bench(config: BenchConfig, progress: Progress = lambda note: None) -> dict[str, Any]:
    """``{"environment": ..., "rows": [...], "categories": [...], "left_out": {method: why}}``; ``categories`` where the
    prompts have any. Raises ForerunError subclasses."""
    with tempfile.TemporaryDirectory(prefix="forerun-bench-") as folder:
        return _run(_with_random_models(config, Path(folder), progress), progress)


def _with_random_models(config: BenchConfig, folder: Path, progress: Progress) -> BenchConfig:
    """The same, with checkpoints in place of shapes. Held-out text means nothing to such models."""
    if config.random_shape is None and config.random_draft_shape is None:
        return config
    random_checkpoint = from_lab("shapes", "bench with random weights").random_checkpoint
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
    options = with_trees(options, config.trees or 0)
    conversations = read_set(config.prompt_set, config.prompts_file) if config.prompt_set in WRITTEN else []
    llm = LLM(**config.engine, speculative_config=None)
    left_out: dict[str, str] = {}
    if ALL in config.methods:
        progress("building every method")
        options, left_out = runnable(llm, options)
    fastest = None
    if config.fastest and llm.model.invariant:
        fastest = LLM(**{**config.engine, "invariant": False}, speculative_config=None)
    texts = make_texts(config, llm, conversations)
    prompts = texts.prompts
    config = _with_stops(config, stops(texts))
    judge = from_lab(HUMANEVAL, HUMANEVAL).Judge() if config.execute else None
    rows, categories = [], []
    held: list[dict[str, Any]] = []
    for concurrency in config.concurrency:
        named = zip(labels(options), options, strict=True)
        contenders: list[Contender] = [EngineContender(name, llm, o, concurrency, config.whole) for name, o in named]
        if fastest is not None:
            contenders.append(EngineContender(FASTEST, fastest, {"method": NONE}, concurrency, config.whole))
        if config.peers:
            context = min(max(map(len, prompts)) + config.max_tokens + PEERS_DRAFT, llm.engine.max_model_len)
            peer_contenders = from_lab("peers", "bench with peers").peer_contenders
            contenders += peer_contenders(config.peers, llm, config.speculative.get("model"), concurrency, context)
        engines = [contender.engine for contender in contenders if isinstance(contender, EngineContender)]
        held = weights(engines, prompts, held)
        del engines
        for temperature in config.temperatures:
            progress(f"temperature {temperature:g}, concurrency {concurrency}")
            gc.collect()
            gc.freeze()  # a full collection visits all that torch and transformers made: 0.2 s, in whoever's turn
            runs = take_turns(contenders, prompts, config, temperature, concurrency)
            gc.unfreeze()
            rows += table(contenders, runs, prompts, temperature, concurrency)
            categories += by_category(contenders, runs, texts, temperature, concurrency, llm.tokenizer, judge)
        for contender in contenders:
            contender.close()
        gc.collect()
    about = _about(llm, config, texts, rows, held)
    about |= {"offline": judge.offline if judge is not None else None, "synthetic": _synthetic(options)}
    return {"environment": about, "rows": rows, "categories": categories, "left_out": left_out}


def _synthetic(options: Seq[Mapping[str, Any]]) -> Any:
    """At which rates or lengths some methods' drafts are accepted: None, what all of those have, or a list."""
    asked: list[Any] = []
    for option in options:
        asked += [option[key] for key in (RATES, LENGTH) if key in option and option[key] not in asked]
    return asked if len(asked) > 1 else next(iter(asked), None)


def _with_stops(config: BenchConfig, texts: Seq[str]) -> BenchConfig:
    """The same; answers end at one of ``texts``. Raises ConfigError with peers, which know no such ends."""
    if not texts:
        return config
    if config.peers:
        raise ConfigError("peers know no stop texts, with which a model without a chat template answers humaneval")
    return replace(config, sampling={"stop": texts, **config.sampling})


def _about(
    llm: LLM, config: BenchConfig, texts: Texts, rows: Seq[dict[str, Any]], held: Seq[dict[str, Any]]
) -> dict[str, Any]:
    """What was measured, on what, with which prompts."""
    about = environment(llm, config.engine)
    about |= _bandwidth(llm, rows)
    lengths, written = sorted(map(len, texts.prompts)), config.prompt_set in WRITTEN
    return about | {
        "weights": list(held),
        "peers": list(config.peers),
        "model": config.random_shape or about["model"],
        "sampling": config.sampling,
        "random_weights": config.random_shape is not None,
        "prompt_set": config.prompt_set if written or config.prompts_file is None else str(config.prompts_file),
        "prompts_file": None if config.prompts_file is None else str(config.prompts_file),
        "prompts": len(texts.prompts),
        "prompts_left_out": texts.left_out,
        "prompt_tokens": None if written else config.prompt_tokens,
        "prompt_lengths": [lengths[0], lengths[len(lengths) // 2], lengths[-1]],
        "max_tokens": config.max_tokens,
        "repeats": config.repeats,
        "whole": config.whole,
        "prompt_repetition_rate": repetition_rate(texts.prompts),
    }


def take_turns(
    contenders: Seq[Contender], prompts: Seq[list[int]], config: BenchConfig, temperature: float, concurrency: int
) -> list[list[Measured]]:
    """Per contender, one measurement per repeat, each by a drafter that has not seen the prompts. The turn passes after
    every ``concurrency`` prompts, or, where engines alone answer several or count as a whole, after
    ``plan.estimate.TURN`` rounds."""

    def params(first: int, count: int, tokens: int) -> list[SamplingParams]:
        seeds = range(config.seed + first, config.seed + first + count)
        options = {"ignore_eos": config.prompt_set not in WRITTEN, **config.sampling}
        options |= {"temperature": temperature, "max_tokens": tokens}
        return [SamplingParams(**options, seed=seed) for seed in seeds]

    others = [prompt[::-1] for prompt in prompts[:concurrency]]
    runs: list[list[Measured]] = [[] for _ in contenders]
    for repeat in range(config.repeats):
        for contender, found in zip(contenders, runs):
            found.append(Measured())
            if isinstance(contender, EngineContender):
                contender.renew(fresh=config.fresh)
            contender.run(others, params(0, concurrency, min(WARM_UP_TOKENS, config.max_tokens)))
        engines = [contender for contender in contenders if isinstance(contender, EngineContender)]
        if config.whole or (concurrency > 1 and len(engines) == len(contenders)):
            found = [each[-1] for each in runs]
            side_by_side(engines, prompts, params(0, len(prompts), config.max_tokens), found, repeat)
            continue
        for first in range(0, len(prompts), concurrency):
            group = prompts[first : first + concurrency]
            for index in _order(len(contenders), repeat + first // concurrency):
                runs[index][-1].extend(contenders[index].run(group, params(first, len(group), config.max_tokens)))
    return runs


def side_by_side(
    contenders: Seq[EngineContender],
    prompts: Seq[list[int]],
    params: Seq[SamplingParams],
    found: Seq[Measured],
    begin: int = 0,
) -> None:
    """All contenders at once, in turns."""
    in_turns([contenders[i].rounds(prompts, params, found[i]) for i in _order(len(contenders), begin)])


def _order(count: int, begin: int) -> list[int]:
    return [(begin + index) % count for index in range(count)]


def _bandwidth(llm: LLM, rows: Seq[dict[str, Any]]) -> dict[str, Any]:
    """Bytes that a plain token reads, as they are held, and the bandwidth measured beside it; adds each plain row's
    share of it.

    Only for weights that no cache holds.
    """
    size = llm.model.info.token_bytes
    found: dict[str, Any] = {"weight_bytes_per_token": size, "read_bandwidth": None}
    if size >= OUT_OF_CACHE:
        found["read_bandwidth"] = read_bandwidth(llm.model.info.device)
        for row in rows:
            if row["method"] in (NONE, FASTEST) and row["concurrency"] == 1:
                row["bandwidth_share"] = size * row["tokens_per_second"] / found["read_bandwidth"]
    return found

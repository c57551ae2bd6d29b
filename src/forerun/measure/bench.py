"""``forerun bench``: every contender on the same prompts, in rotation, so that a busy machine slows all of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from statistics import median, stdev
from typing import Any

import torch

from forerun.core.registry import from_lab
from forerun.engine.config import NONE
from forerun.engine.llm import LLM
from forerun.measure.config import ALL, WRITTEN, BenchConfig
from forerun.measure.environment import environment, read_bandwidth, weights
from forerun.measure.methods import labels, method_configs, runnable, with_trees
from forerun.measure.prompts import prompts_of, repetition_rate
from forerun.measure.rounds import (
    FASTEST,
    PLAIN,
    Contender,
    EngineContender,
    Interleaved,
    Measured,
    Prompts,
    RoundCosts,
    seeded_params,
    shares,
)
from forerun.speculate.accept.synthetic import LENGTH, RATES

PEERS_DRAFT = 64
"""Tokens of cache beyond an answer: more than any peer drafts at once."""
OUT_OF_CACHE = 256 << 20
"""Bytes of weights that no processor's cache holds."""
Progress = Callable[[str], None]


def run_bench(config: BenchConfig, progress: Progress = lambda note: None) -> dict[str, Any]:
    """Measure every combination of ``config``. Returns ``{"environment": ..., "rows": [...], "categories": [...],
    "left_out": {method: why}}``, with ``categories`` if the prompts have any. Raises ForerunError subclasses."""
    options = method_configs(config.methods, config.accepts, config.lengths, config.counts, config.speculative)
    options = with_trees(options, config.trees or 0)
    written = None
    if config.prompt_set in WRITTEN:
        written = from_lab("written", f"bench with prompts of {config.prompt_set}").WrittenPrompts(config)
    llm = LLM(**config.engine, threads=torch.get_num_threads(), speculative_config=None)
    left_out: dict[str, str] = {}
    if ALL in config.methods:
        progress("building every method")
        options, left_out = runnable(llm, options)
    fastest = None
    if config.fastest and llm.model.invariant:
        fastest = LLM(**{**config.engine, "invariant": False}, threads=torch.get_num_threads(), speculative_config=None)
    if written is not None:
        prompts, config = written.ask(llm)
    else:
        prompts = prompts_of(config, llm.tokenizer)
    rows, categories = [], []
    held: list[dict[str, Any]] = []
    for concurrency in config.concurrency:
        named = zip(labels(options), options, strict=True)
        common: dict[str, Any] = {"whole": config.whole, "max_num_seqs": concurrency}
        contenders: list[Contender] = [EngineContender(llm, each, name, **common) for name, each in named]
        if fastest is not None:
            contenders.append(EngineContender(fastest, PLAIN, FASTEST, **common))
        if config.peers:
            context = min(max(map(len, prompts)) + config.max_tokens + PEERS_DRAFT, llm.engine.max_model_len)
            peer_contenders = from_lab("peers", "bench with peers").peer_contenders
            contenders += peer_contenders(config.peers, llm, config.speculative.get("model"), concurrency, context)
        held = weights([each.engine for each in contenders if isinstance(each, EngineContender)], prompts, held)
        for temperature in config.temperatures:
            progress(f"temperature {temperature:g}, concurrency {concurrency}")
            gc.collect()
            gc.freeze()  # a full collection visits all that torch and transformers made: 0.2 s, in whoever's turn
            runs = run_interleaved(contenders, prompts, config, temperature, concurrency)
            gc.unfreeze()
            rows += table(contenders, runs, prompts, temperature, concurrency)
            if written is not None:
                categories += written.by_category(contenders, runs, temperature, concurrency)
        for contender in contenders:
            contender.close()
        gc.collect()
    about = _about(llm, config, prompts, rows, held) | {"synthetic": _synthetic(options)}
    about["speculative_configs"] = dict(zip(labels(options), options, strict=True))
    about |= {"prompts_left_out": 0, "offline": None} if written is None else written.facts()
    return {"environment": about, "rows": rows, "categories": categories, "left_out": left_out}


def _synthetic(options: Sequence[Mapping[str, Any]]) -> Any:
    """The synthetic acceptance rates or lengths among the options: None, the only value, or a list of them."""
    values: list[Any] = []
    for option in options:
        values += [option[key] for key in (RATES, LENGTH) if key in option and option[key] not in values]
    return values if len(values) > 1 else next(iter(values), None)


def _about(
    llm: LLM, config: BenchConfig, prompts: Prompts, rows: Sequence[dict[str, Any]], held: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The result's ``environment``: machine, model, weights and prompts."""
    about = environment(llm, config.engine)
    about |= _bandwidth(llm, rows)
    lengths, written = sorted(map(len, prompts)), config.prompt_set in WRITTEN
    return about | {
        "weights": list(held),
        "peers": list(config.peers),
        "sampling": config.sampling,
        "prompt_set": config.prompt_set if written or config.prompts_file is None else str(config.prompts_file),
        "prompts_file": None if config.prompts_file is None else str(config.prompts_file),
        "prompts": len(prompts),
        "prompt_tokens": None if written else config.prompt_tokens,
        "prompt_lengths": [lengths[0], lengths[len(lengths) // 2], lengths[-1]],
        "max_tokens": config.max_tokens,
        "seed": config.seed,
        "repeats": config.repeats,
        "whole": config.whole,
        "prompt_repetition_rate": repetition_rate(prompts),
    }


def run_interleaved(
    contenders: Sequence[Contender], prompts: Prompts, config: BenchConfig, temperature: float, concurrency: int
) -> list[list[Measured]]:
    """For each contender a result per repeat, each with a drafter that has not seen the prompts. Contenders alternate
    after every ``concurrency`` prompts. Where all are engines and several prompts are decoded together, or rounds with
    prefill count, they alternate after ``measure.rounds.ROUNDS`` rounds."""
    options = {"ignore_eos": config.prompt_set not in WRITTEN, **config.sampling}
    options |= {"temperature": temperature, "max_tokens": config.max_tokens}
    params = seeded_params(len(prompts), config.seed, **options)
    engines = all(isinstance(contender, EngineContender) for contender in contenders)
    runs: list[list[Measured]] = [[] for _ in contenders]
    for repeat in range(config.repeats):
        turns = Interleaved(contenders, first=repeat)
        turns.renew(fresh=config.fresh)
        turns.warm_up(prompts[:concurrency], params[:concurrency])
        if config.whole or (concurrency > 1 and engines):
            turns.side_by_side(prompts, params)
        else:
            for first in range(0, len(prompts), concurrency):
                group = slice(first, first + concurrency)
                turns.run(prompts[group], params[group])
        for result, parts in zip(runs, turns.runs):
            result.append(Measured.joined(parts))
    return runs


def _bandwidth(llm: LLM, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Weight bytes read per plain token and, for weights that no cache holds, the memory's read bandwidth. Adds
    ``bandwidth_share`` to plain rows."""
    size = llm.model.info.token_bytes
    result: dict[str, Any] = {"weight_bytes_per_token": size, "read_bandwidth": None}
    if size >= OUT_OF_CACHE:
        result["read_bandwidth"] = read_bandwidth(llm.model.info.device)
        for row in rows:
            if row["method"] in (NONE, FASTEST) and row["concurrency"] == 1:
                row["bandwidth_share"] = size * row["tokens_per_second"] / result["read_bandwidth"]
    return result


def table(
    contenders: Sequence[Contender],
    runs: Sequence[Sequence[Measured]],
    prompts: Prompts,
    temperature: float,
    concurrency: int,
) -> list[dict[str, Any]]:
    """One row per contender, compared with ``none`` of the same run and with the fastest plain mode. ``speedup_error``
    is the standard error of the mean speed-up over repeats."""
    names = [contender.name for contender in contenders]
    plain = runs[names.index(NONE)]
    for each in plain:
        each.check()
    fastest = runs[names.index(FASTEST)] if FASTEST in names else plain
    rows = []
    for contender, result in zip(contenders, runs):
        row: dict[str, Any] = {"method": contender.name, "temperature": temperature, "concurrency": concurrency}
        row["tree"] = None
        row |= contender.facts()
        row["speeds"] = [m.tokens_per_second for m in result]  # by repeat: those of all rows are pairs
        row["tokens_per_second"] = median(row["speeds"])
        ratios = [m.tokens_per_second / p.tokens_per_second for m, p in zip(result, plain)]
        row["speedup"], row["speedup_range"] = median(ratios), [min(ratios), max(ratios)]
        row["speedup_error"] = stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None
        row["speedup_over_fastest"] = median(m.tokens_per_second / f.tokens_per_second for m, f in zip(result, fastest))
        row |= _speculation(result, plain, concurrency)
        row["identical"] = None
        if contender.promises_identity(temperature):
            row["identical"] = not any(m.num_different(plain[0]) for m in result)
        texts = [[*prompt, *answer] for prompt, answer in zip(prompts, result[0].answers)]
        row["repetition_rate"] = repetition_rate(texts, [len(prompt) for prompt in prompts])
        rows.append(row)
    _compare_with_chains(rows)
    return rows


def _compare_with_chains(rows: Sequence[dict[str, Any]]) -> None:
    """Add ``over_chain``: a tree's tokens per round over those of the same drafter's chain of equal depth."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in ("method", "accept", "length", "num_speculative_tokens"))

    chains = {key(row): row["tokens_per_round"] for row in rows if row.get("tree") is None}
    for row in rows:
        chain = chains.get(key(row)) if row.get("tree") is not None else None
        row["over_chain"] = row["tokens_per_round"] / chain if chain and row["tokens_per_round"] else None


def acceptance_by_position(histogram: Sequence[int]) -> list[float] | None:
    """Entry j is the fraction of drafts with more than j accepted tokens (vLLM's unconditional rates)."""
    drafts = sum(histogram)
    return [sum(histogram[j + 1 :]) / drafts for j in range(len(histogram) - 1)] if drafts else None


def _speculation(result: Sequence[Measured], plain: Sequence[Measured], concurrency: int) -> dict[str, Any]:
    """Acceptance and costs over all repeats, and the speed-up that theory predicts from them."""
    every = Measured.joined(result)
    rounds, total = every.rounds, every.total
    costs = RoundCosts.of(rounds, Measured.joined(plain).rounds, concurrency)
    predicted = None
    if costs is not None and total.match_rate is not None:
        predicted = costs.predict(rounds, total.match_rate)
    return {
        "alpha": total.alpha,
        "match_rate": total.match_rate,
        "draft_acceptance_rate": total.draft_acceptance_rate,
        "mean_acceptance_length": total.mean_acceptance_length,
        "tokens_per_round": total.tokens_per_round,
        "nodes_per_draft": total.num_draft_tokens / total.num_drafts if total.num_drafts else None,
        "acceptance_by_position": acceptance_by_position(total.acceptance_histogram),
        "cost_coefficient": costs.c if costs is not None else None,
        "verify_cost": costs.typical if costs is not None else None,
        "predicted_speedup": predicted,
        "shares": shares(rounds),
        "draft_error": total.draft_error,
    }

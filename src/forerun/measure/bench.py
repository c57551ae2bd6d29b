"""The benchmark: every contender on the same prompts, taking turns, so that a busy machine is busy for all.

By category of the prompts, a conversation is one case. Its turns are not independent, so errors and intervals count it
once.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import comb
from pathlib import Path
from statistics import median, stdev
from typing import Any

import torch

from forerun.core.errors import ConfigError
from forerun.core.registry import from_lab
from forerun.engine.config import NONE
from forerun.engine.llm import LLM
from forerun.engine.metrics import RequestMetrics
from forerun.measure.config import ALL, HELD_OUT, HUMANEVAL, RANDOM, WRITTEN, BenchConfig
from forerun.measure.conversations import Texts, make_texts, read_set, stops
from forerun.measure.environment import environment, read_bandwidth, weights
from forerun.measure.methods import FASTEST, Contender, EngineContender, labels, method_configs, runnable, with_trees
from forerun.measure.prompts import repetition_rate
from forerun.measure.rounds import Measured, RoundCosts, interleave, shares
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
    llm = LLM(**config.engine, threads=torch.get_num_threads(), speculative_config=None)
    left_out: dict[str, str] = {}
    if ALL in config.methods:
        progress("building every method")
        options, left_out = runnable(llm, options)
    fastest = None
    if config.fastest and llm.model.invariant:
        fastest = LLM(**{**config.engine, "invariant": False}, threads=torch.get_num_threads(), speculative_config=None)
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
            runs = run_interleaved(contenders, prompts, config, temperature, concurrency)
            gc.unfreeze()
            rows += table(contenders, runs, prompts, temperature, concurrency)
            categories += by_category(contenders, runs, texts, temperature, concurrency, llm.tokenizer, judge)
        for contender in contenders:
            contender.close()
        gc.collect()
    about = _about(llm, config, texts, rows, held)
    about |= {"offline": judge.offline if judge is not None else None, "synthetic": _synthetic(options)}
    return {"environment": about, "rows": rows, "categories": categories, "left_out": left_out}


def _synthetic(options: Sequence[Mapping[str, Any]]) -> Any:
    """At which rates or lengths some methods' drafts are accepted: None, what all of those have, or a list."""
    asked: list[Any] = []
    for option in options:
        asked += [option[key] for key in (RATES, LENGTH) if key in option and option[key] not in asked]
    return asked if len(asked) > 1 else next(iter(asked), None)


def _with_stops(config: BenchConfig, texts: Sequence[str]) -> BenchConfig:
    """The same; answers end at one of ``texts``. Raises ConfigError with peers, which know no such ends."""
    if not texts:
        return config
    if config.peers:
        raise ConfigError("peers know no stop texts, with which a model without a chat template answers humaneval")
    return replace(config, sampling={"stop": texts, **config.sampling})


def _about(
    llm: LLM, config: BenchConfig, texts: Texts, rows: Sequence[dict[str, Any]], held: Sequence[dict[str, Any]]
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


def run_interleaved(
    contenders: Sequence[Contender],
    prompts: Sequence[list[int]],
    config: BenchConfig,
    temperature: float,
    concurrency: int,
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
        for contender, result in zip(contenders, runs):
            result.append(Measured())
            if isinstance(contender, EngineContender):
                contender.renew(fresh=config.fresh)
            contender.run(others, params(0, concurrency, min(WARM_UP_TOKENS, config.max_tokens)))
        engines = [contender for contender in contenders if isinstance(contender, EngineContender)]
        if config.whole or (concurrency > 1 and len(engines) == len(contenders)):
            result = [each[-1] for each in runs]
            side_by_side(engines, prompts, params(0, len(prompts), config.max_tokens), result, repeat)
            continue
        for first in range(0, len(prompts), concurrency):
            group = prompts[first : first + concurrency]
            for index in _order(len(contenders), repeat + first // concurrency):
                runs[index][-1].extend(contenders[index].run(group, params(first, len(group), config.max_tokens)))
    return runs


def side_by_side(
    contenders: Sequence[EngineContender],
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    result: Sequence[Measured],
    begin: int = 0,
) -> None:
    """All contenders at once, in turns."""
    interleave([contenders[i].rounds(prompts, params, result[i]) for i in _order(len(contenders), begin)])


def _order(count: int, begin: int) -> list[int]:
    return [(begin + index) % count for index in range(count)]


def _bandwidth(llm: LLM, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Bytes that a plain token reads, as they are held, and the bandwidth measured beside it; adds each plain row's
    share of it.

    Only for weights that no cache holds.
    """
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
    prompts: Sequence[list[int]],
    temperature: float,
    concurrency: int,
) -> list[dict[str, Any]]:
    """One row per contender, each against ``none`` of the same run and against the fastest plain mode;
    ``speedup_error`` is the standard error of the repeats' mean speed-up."""
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
        row["tokens_per_second"] = median(m.tokens_per_second for m in result)
        ratios = [m.tokens_per_second / p.tokens_per_second for m, p in zip(result, plain)]
        row["speedup"], row["speedup_range"] = median(ratios), [min(ratios), max(ratios)]
        row["speedup_error"] = stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None
        row["speedup_over_fastest"] = median(m.tokens_per_second / f.tokens_per_second for m, f in zip(result, fastest))
        row |= _speculation(result, plain, concurrency)
        row["identical"] = None
        if contender.promises_identity(temperature):
            row["identical"] = all(m.answers == plain[0].answers for m in result)
        texts = [[*prompt, *answer] for prompt, answer in zip(prompts, result[0].answers)]
        row["repetition_rate"] = repetition_rate(texts, [len(prompt) for prompt in prompts])
        rows.append(row)
    _compare_with_chains(rows)
    return rows


def _compare_with_chains(rows: Sequence[dict[str, Any]]) -> None:
    """``over_chain``: a tree's tokens per round over those of the same drafter's chain of the same depth."""

    def key(row: dict[str, Any]) -> tuple:
        return tuple(row.get(name) for name in ("method", "accept", "length", "num_speculative_tokens"))

    chains = {key(row): row["tokens_per_round"] for row in rows if row.get("tree") is None}
    for row in rows:
        chain = chains.get(key(row)) if row.get("tree") is not None else None
        row["over_chain"] = row["tokens_per_round"] / chain if chain and row["tokens_per_round"] else None


def acceptance_by_position(histogram: Sequence[int]) -> list[float] | None:
    """Entry j: the share of drafts of which more than j tokens were accepted (vLLM's unconditional rates)."""
    drafts = sum(histogram)
    return [sum(histogram[j + 1 :]) / drafts for j in range(len(histogram) - 1)] if drafts else None


def _speculation(result: Sequence[Measured], plain: Sequence[Measured], concurrency: int) -> dict[str, Any]:
    """Acceptance and prices of all repeats together, and what the theory makes of them."""
    rounds = [r for m in result for r in m.rounds]
    total = Measured(metrics=[metric for m in result for metric in m.metrics]).total
    costs = RoundCosts.of(rounds, [r for m in plain for r in m.rounds], concurrency) if total.num_drafts else None
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


EVERYTHING = "all"
CONFIDENCE = 0.95


def by_category(
    contenders: Sequence[Contender],
    runs: Sequence[Sequence[Measured]],
    texts: Texts,
    temperature: float,
    concurrency: int,
    tokenizer: Any,
    judge: Any = None,
) -> list[dict[str, Any]]:
    """One row per contender and category, then one over all where there are several; none for drawn prompts. ``judge``,
    a ``forerun_lab.humaneval.Judge``, says how many answers pass their tests."""
    kinds = [texts.conversations[owner].category for owner in texts.owners]
    groups = {kind: [i for i, each in enumerate(kinds) if each == kind] for kind in dict.fromkeys(kinds)}
    if len(groups) > 1:
        groups[EVERYTHING] = list(range(len(kinds)))
    plain = runs[[contender.name for contender in contenders].index(NONE)]
    rows = []
    for contender, result in zip(contenders, runs):
        about: dict[str, Any] = {"method": contender.name, "temperature": temperature, "concurrency": concurrency}
        about |= {"tree": None} | contender.facts()
        promised = contender.promises_identity(temperature)
        passed = _passed(result[0], texts, tokenizer, judge) if judge is not None else None
        for kind, members in groups.items():
            row: dict[str, Any] = (
                about | {"category": kind} | _acceptance(result, texts, members) | _speed(result, plain, texts, members)
            )
            same = sum(all(m.answers[i] == plain[0].answers[i] for m in result) for i in members)
            row |= {"same_answers": same, "identical": same == len(members) if promised else None}
            answers = [[*texts.prompts[i], *result[0].answers[i]] for i in members]
            row["repetition_rate"] = repetition_rate(answers, [len(texts.prompts[i]) for i in members])
            row["passed"] = sum(passed[i] for i in members) if passed is not None else None
            row["pass_at_1"] = row["passed"] / len(members) if passed is not None else None
            rows.append(row)
    return rows


def _passed(result: Measured, texts: Texts, tokenizer: Any, judge: Any) -> list[bool]:
    tasks = [task for owner in texts.owners if (task := texts.conversations[owner].task) is not None]
    return judge.passed(tasks, [tokenizer.decode(a, skip_special_tokens=True) for a in result.answers], texts.chat)


def _cases(texts: Texts, members: Sequence[int]) -> list[list[int]]:
    """The prompts of each conversation."""
    result: dict[int, list[int]] = {}
    for i in members:
        result.setdefault(texts.owners[i], []).append(i)
    return list(result.values())


def _acceptance(result: Sequence[Measured], texts: Texts, members: Sequence[int]) -> dict[str, Any]:
    """Counts, and tokens per round and per drafted round with their standard errors; None for a peer."""
    cases = _cases(texts, members)
    row: dict[str, Any] = {
        "conversations": len(cases),
        "prompts": len(members),
        "tokens": sum(len(result[0].answers[i]) for i in members),
    }
    measured = all(m.metrics for m in result)
    each = [RequestMetrics.merged([m.metrics[i] for m in result for i in case]) for case in cases] if measured else []
    total = RequestMetrics.merged(each) if each else RequestMetrics()
    lengths = [(m.num_accepted_draft_tokens + m.num_drafts, m.num_drafts) for m in each]
    return row | {
        "tokens_per_round": total.tokens_per_round,
        "tokens_per_round_error": ratio_error([(m.decode_tokens, m.rounds) for m in each]),
        "mean_acceptance_length": total.mean_acceptance_length,
        "mean_acceptance_length_error": ratio_error(lengths),
        "acceptance_by_position": acceptance_by_position(total.acceptance_histogram),
    }


def _speed(
    result: Sequence[Measured], plain: Sequence[Measured], texts: Texts, members: Sequence[int]
) -> dict[str, Any]:
    """Speed over plain decoding: each conversation's is the median over the repeats, which are interleaved pairs;
    ``speedup`` is the conversations' median. None where prompts were decoded together or nothing but first tokens
    came."""
    ratios = []
    for case in _cases(texts, members):
        pairs = [(_rate(m, case), _rate(p, case)) for m, p in zip(result, plain)]
        if all(mine and theirs for mine, theirs in pairs):
            ratios.append(median(mine / theirs for mine, theirs in pairs))
    return {
        "speedup": median(ratios) if ratios else None,
        "speedup_interval": median_interval(ratios),
        "speedup_conversations": len(ratios),
    }


def _rate(measured: Measured, case: Sequence[int]) -> float:
    """Tokens per second over these prompts; 0 where they were not timed one by one."""
    if len(measured.parts) != len(measured.answers):
        return 0.0
    seconds = sum(measured.parts[i][1] for i in case)
    return sum(measured.parts[i][0] for i in case) / seconds if seconds else 0.0


def ratio_error(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Standard error of sum(a) / sum(b) over independent cases (a, b), to first order (Cochran, Sampling Techniques,
    1977, section 6.4). None for fewer than two cases with b > 0."""
    pairs = [(a, b) for a, b in pairs if b > 0]
    count, below = len(pairs), sum(b for _, b in pairs)
    if count < 2:
        return None
    ratio = sum(a for a, _ in pairs) / below
    return (sum((a - ratio * b) ** 2 for a, b in pairs) * count / (count - 1)) ** 0.5 / below


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> list[float] | None:
    """An interval that holds the population's median with at least this confidence, whatever the distribution: between
    two of the sorted values, as far from both ends as the binomial distribution permits. None for too few values."""
    count = len(values)
    outside, below = 0, 0.0
    while (below := below + comb(count, outside) / 2**count) <= (1 - confidence) / 2:
        outside += 1
    if not outside:
        return None
    ordered = sorted(values)
    return [ordered[outside - 1], ordered[count - outside]]

"""``forerun tune TARGET --draft DRAFT``: the fastest settings of a draft model for a target, on this machine.

Costs are measured once: a verification by its rows, a draft by its tokens in each variant of the draft model, and which
tokens of the target's own answers each variant predicts. Every draft length is then simulated from them. The best few
settings are measured, interleaved with plain decoding, on other prompts.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from math import inf, log
from pathlib import Path
from statistics import geometric_mean, median
from time import perf_counter
from typing import Any

import torch

from forerun.core.batch import Batch, Span
from forerun.core.errors import ConfigError
from forerun.core.request import RequestState
from forerun.engine import tuned
from forerun.engine.llm import LLM
from forerun.measure.planner import CostCurve, draft_cost
from forerun.measure.rounds import (
    PLAIN,
    WARM_UP,
    EngineContender,
    Interleaved,
    engine_of,
    figures,
    full_rounds,
    identity,
    in_plain_forwards,
    measure,
)
from forerun.models.files.checkpoint import read_object
from forerun.models.files.inventory import here
from forerun.models.files.open import read_config, resolve, weight_sizes
from forerun.models.formats import blocks
from forerun.models.load import sharing
from forerun.models.weights import sanity
from forerun.sampling.params import SamplingParams
from forerun.speculate.draft.model import LARGE, DraftModel
from forerun.tune.config import PairConfig
from forerun.tune.data import held_out_prompts
from forerun.tune.page import pair_page
from forerun.tune.progress import Progress, progress

DRAFT = "draft_model"
DRAFT_VOCABULARIES = (32_768, 65_536)
"""Sizes of the draft vocabulary that are tried where the draft has at least twice as many outputs."""
DEADLINES = {"write": 0.1, "verify": 0.14, "variants": 0.5, "race": 0.95}
"""Fraction of the time budget at which each stage ends."""
WRITE_BATCH = 4
"""Answers that are written together."""
MAX_PROMPT = 704
"""Tokens of a prompt, at most."""
MAX_VERIFIED = 16
"""Largest number of drafted tokens whose verification is timed."""
REPEATS = (3, 6)
"""Repetitions of each timed verification, at least and at most."""
DEPTHS = range(1, 13)
THRESHOLDS = (None, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
TIMED = {"num_speculative_tokens": 8, "confidence_threshold": 0.4}
"""Settings for timing a draft: its lengths vary, which separates the cost of its start from that of its steps."""
BLOCK_FORMATS = ("q4_0", "q8_0", "q4_k")
CLOSE = 0.9
"""Fraction of the best simulated speed from which the second-best variant is measured, too."""
FIRST_PROMPTS = 2
"""Prompts of each workload that the candidates answer even if the time is over."""
HOPELESS = 0.4
"""A candidate is dropped when its speed is below 1 - HOPELESS / (prompts so far) of the best one's."""
REPORT = "report.html"


@dataclass
class DraftVariant:
    """A draft model in one weight format and with one draft vocabulary, and what was measured of it."""

    options: dict[str, Any]
    replayed: dict[float, list[Replayed]]
    """By temperature."""
    costs: dict[int, PairCosts]
    """By the number of sequences."""
    bytes: int
    best: tuple[int, float | None] = (1, None)
    """Depth and confidence threshold."""
    speed: float = 0.0
    """Simulated speed over plain decoding."""

    def find_best(self, workloads: Sequence[tuple[float, int]]) -> None:
        """Set ``best`` and ``speed`` by simulating every depth and threshold."""
        for depth in DEPTHS:
            for threshold in THRESHOLDS:
                speeds = [
                    simulate(self.replayed[temperature], depth, threshold, self.costs[count])[0]
                    for temperature, count in workloads
                ]
                if (speed := geometric_mean(speeds)) > self.speed:
                    self.speed, self.best = speed, (depth, threshold)

    def config(self) -> dict[str, Any]:
        """The ``speculative_config`` with the best depth and threshold."""
        depth, threshold = self.best
        more = {} if threshold is None else {"confidence_threshold": threshold}
        return {**self.options, "num_speculative_tokens": depth, **more}

    def row(self) -> dict[str, Any]:
        """The variant's entry in ``forms`` of the result."""
        kept = [each.kept for answers in self.replayed.values() for each in answers]
        costs = next(iter(self.costs.values()))
        return {
            "config": {key: value for key, value in self.config().items() if key not in ("method", "model")},
            "bytes": self.bytes,
            "guessed": sum(map(sum, kept)) / max(1, sum(map(len, kept))),
            "start": costs.start,
            "step": costs.step,
            "on_paper": self.speed,
        }


def tune_pair(config: PairConfig, out: Path, say: Callable[[str], None] = lambda line: None) -> Path:
    """Search, and write the result into the folder ``out``. Raises ForerunError subclasses."""
    if _holds_another_tuning(out, config.draft):
        raise ConfigError(f"{out} has another tuning: choose another --out or remove it")
    result = search(config, say)
    out.mkdir(parents=True, exist_ok=True)
    (out / REPORT).write_text(pair_page(config.model, result), encoding="utf-8")
    more = {key: result[key] for key in ("measured", "forms", "verify_cost", "check")}
    tuned.save(out, config.model, result["chosen"], [], draft=config.draft, **more)
    say(verdict(result))
    say(f"{out}: use it with --tuned {out}, or LLM({config.model!r}, tuned={str(out)!r})")
    return out


def _holds_another_tuning(out: Path, draft: str) -> bool:
    """Whether the folder has a tuning that was made without ``draft``."""
    if not (out / tuned.FILE).is_file():
        return (out / "run").exists()
    saved = read_object(out / tuned.FILE).get("draft")
    return not isinstance(saved, dict) or saved.get("model") != draft


def verdict(result: Mapping[str, Any]) -> str:
    """One line with the chosen config and its speed-ups."""
    chosen, answers = _without_model(result["chosen"]), result["check"]["answers"]
    speedups = ", ".join(
        f"{row['speedup']:.2f} at temperature {row['temperature']:g}, {row['concurrency']} at a time"
        for row in result["measured"]
        if row["config"] == chosen
    )
    return f"{json.dumps(chosen)}: over plain decoding {speedups}; {answers} answers are the same"


def search(config: PairConfig, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Find the fastest settings. Returns ``{"chosen": speculative_config, "measured": [{"config", "temperature",
    "concurrency", "speedup", ...}, ...], "forms": [...], "verify_cost": {sequences: {rows: cost}}, "check": {"passed",
    "answers", "different"}}``. Raises ConfigError if an answer differs with and without drafts."""
    if config.threads:
        torch.set_num_threads(config.threads)
    began = time.monotonic()
    here(config.draft)
    sanity.require_decoder(read_config(resolve(config.model)), resolve(config.model), "forerun tune")
    with sharing() as loaded, progress("tuning, seconds", round(60 * config.minutes), config.progress) as bar:
        return _Search(config, say, began, bar, loaded).run()


@dataclass
class _Search:
    config: PairConfig
    say: Callable[[str], None]
    began: float
    bar: Progress
    loaded: dict[Any, Any]
    """Draft models that engines share (``models.load.sharing``)."""
    llm: LLM = field(init=False)
    answers: dict[float, list[PairAnswer]] = field(default_factory=dict)
    curves: dict[int, CostCurve] = field(default_factory=dict)
    """Verification costs by the number of sequences."""
    rests: dict[int, float] = field(default_factory=dict)
    """A plain round's time outside its forward, by the number of sequences."""
    points: dict[int, dict[int, float]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.config
        context = read_config(resolve(config.model)).get_text_config().max_position_embeddings
        max_len = min(MAX_PROMPT + config.answer, context)
        self.llm = LLM(
            config.model,
            quantization=config.quantization,
            threads=torch.get_num_threads(),
            max_model_len=max_len,
            max_num_seqs=max(WRITE_BATCH, *config.concurrency),
        )
        prompts = held_out_prompts(self.llm, max_len - config.answer)
        if len(prompts) < 8:
            raise ConfigError(f"an answer of {config.answer} tokens leaves no room for a prompt: lower it")
        count = len(prompts)
        prompts = [prompts[i] for i in sorted(range(count), key=lambda i: (i % 4, i))]  # one of each category first
        self.train, self.held_out = prompts[: count // 4], prompts[count // 4 :]

    def over(self, stage: str) -> bool:
        """Whether the time for a stage is over."""
        seconds = time.monotonic() - self.began
        if seconds < self.bar.total:
            self.bar.update(round(seconds))
        return seconds >= DEADLINES[stage] * 60 * self.config.minutes

    def end_stage(self, name: str) -> None:
        self.seconds[name] = time.monotonic() - self.began - sum(self.seconds.values())

    def params(self, temperature: float, number: int, tokens: int) -> SamplingParams:
        return SamplingParams(temperature=temperature, max_tokens=tokens, seed=self.config.seed + number)

    def run(self) -> dict[str, Any]:
        first = {"method": DRAFT, "model": self.config.draft, "quantization": self._formats()[0]}
        drafting = EngineContender(self.llm, {**first, **TIMED})  # refuses another vocabulary before any measurement
        self.plain = EngineContender(self.llm, PLAIN)
        self.end_stage("load")
        self._generate_answers()
        self.end_stage("write")
        self._time_verification()
        self.end_stage("verification")
        variants = self._variants(drafting, first)
        self.end_stage("forms")
        del drafting
        rows, check, chosen = self._race(self._candidates(variants))
        self.end_stage("turns")
        self.llm.close()
        if not check["passed"]:
            raise ConfigError(f"speculation changed {check['different']} answers; nothing is recommended")
        return {
            "chosen": chosen, "measured": rows, "forms": [variant.row() for variant in variants],
            "verify_cost": self.points, "check": check, "seconds": self.seconds,
        }  # fmt: skip

    def _formats(self) -> list[str]:
        """Weight formats of the draft that are tried, the default first."""
        info = self.llm.model.info
        if not blocks.can(info.dtype, info.device):
            return ["none"]
        small = weight_sizes(resolve(self.config.draft))[0] <= LARGE
        return ["int8_rows", "none", *BLOCK_FORMATS[:2]] if small else [BLOCK_FORMATS[0], "none", *BLOCK_FORMATS[1:]]

    def _generate_answers(self) -> None:
        """The target answers a prompt of each category at every temperature, as long as there is time."""
        for first in range(0, len(self.train), WRITE_BATCH):
            for temperature in self.config.temperatures:
                if first and self.over("write"):
                    return
                prompts = self.train[first : first + WRITE_BATCH]
                params = [self.params(temperature, first + i, self.config.answer) for i in range(len(prompts))]
                triples = zip(prompts, self.plain.run(prompts, params).answers, params)
                answers = [PairAnswer(*each) for each in triples if len(each[1]) > 1]
                self.answers.setdefault(temperature, []).extend(answers)

    def _time_verification(self) -> None:
        """Measure the target's cost of a round by its rows, with random drafts, which are not accepted."""
        if not all(self.answers.values()):
            raise ConfigError("the model ended its answers at once: there is nothing to draft")
        engine = engine_of(self.llm, {"method": "random", "num_speculative_tokens": MAX_VERIFIED})
        for count in self.config.concurrency:
            prompts = [self.train[i % len(self.train)][:8] for i in range(count)]
            times: dict[int, list[float]] = defaultdict(list)
            rests: list[float] = []
            for repeat in range(REPEATS[1]):
                if repeat >= REPEATS[0] and self.over("verify"):
                    break
                for depth in (0, MAX_VERIFIED):
                    # Drafts get shorter towards an answer's end, so every number of rows occurs.
                    params = [replace(self.params(0.0, i, 3 + depth), ignore_eos=True) for i in range(count)]
                    for sample in full_rounds(measure(engine, prompts, params, max_draft=depth).rounds, count):
                        times[sample.rows].append(sample.verify)
                        rests += [] if sample.depth else [sample.rest]
            unit = min(times[count])  # other work on the machine only ever adds to a time
            self.points[count] = {rows: max(1.0, min(each) / unit) for rows, each in sorted(times.items())}
            self.curves[count] = CostCurve(self.points[count], count, self.llm.model.row_multiple)
            self.rests[count] = min(rests) / unit

    def _variants(self, drafting: EngineContender, first: Mapping[str, Any]) -> list[DraftVariant]:
        """Variants of the draft, the best first: every weight format, then the best format's other vocabularies."""
        drafter: Any = drafting.engine.router.drafters[DRAFT]
        result: list[DraftVariant] = []

        def others() -> Iterator[dict[str, Any]]:
            yield from ({"quantization": name} for name in self._formats()[1:])
            best = result[0].options["quantization"]
            yield from ({"quantization": best, "draft_vocab_size": size} for size in self._vocabularies(drafter))

        self._measure(drafting, first, result)
        for options in others():
            if self.over("variants"):
                break
            options = {"method": DRAFT, "model": self.config.draft, **options}
            self._measure(EngineContender(self.llm, {**options, **TIMED}), options, result)
        return result

    def _vocabularies(self, drafter: DraftModel) -> list[int]:
        """Other sizes of the draft vocabulary that are tried, for a large draft."""
        outputs = read_config(resolve(self.config.draft)).get_text_config().vocab_size
        outputs = min(outputs, drafter.context.sampler.vocab_size)
        large = drafter.model.info.weight_bytes > LARGE
        sizes = [size for size in DRAFT_VOCABULARIES if large and 2 * size <= outputs]
        return sizes if drafter.output_ids is None else [*sizes, outputs]

    def _measure(self, drafting: EngineContender, options: Mapping[str, Any], result: list[DraftVariant]) -> None:
        """Add a variant to ``result``, which stays sorted."""
        drafter: Any = drafting.engine.router.drafters[DRAFT]
        replayed, read_seconds = {}, []
        for temperature, answers in self.answers.items():
            replayed[temperature], seconds = replay(drafter, answers)
            read_seconds.append(seconds)
        if not all(replayed.values()):
            raise ConfigError(f"{self.config.draft} has too short a context for these prompts: it cannot draft")
        costs = {count: self._costs(drafting, count, median(read_seconds)) for count in self.config.concurrency}
        variant = DraftVariant(dict(options), replayed, costs, sum(m.info.weight_bytes for m in drafter.models()))
        variant.find_best(self.config.workloads)
        if not result or variant.speed > result[0].speed:
            shown = json.dumps(variant.row()["config"])
            self.say(f"so far, after {time.monotonic() - self.began:.0f} s: {shown}, {variant.speed:.2f} simulated")
        result.append(variant)
        result.sort(key=lambda each: -each.speed)

    def _costs(self, drafting: EngineContender, count: int, read_seconds: float) -> PairCosts:
        """Measure drafted rounds of ``count`` sequences, interleaved with plain ones."""
        prompts = [self.train[i % len(self.train)] for i in range(count)]
        params = [replace(self.params(self.config.temperatures[0], i, 32), ignore_eos=True) for i in range(count)]
        interleaved = Interleaved([self.plain, drafting])
        interleaved.warm_up(prompts, params)
        plain, result = interleaved.side_by_side(prompts, params)
        unit = in_plain_forwards([plain, result], count)
        samples = [sample for sample in full_rounds(result.rounds, count) if sample.depth]
        if not samples:
            raise ConfigError(f"{self.config.draft} drafts nothing for these prompts: it has too short a context")
        start, step = draft_cost(samples, self.rests[count])
        return PairCosts(self.curves[count], start, step, self.rests[count], read_seconds / unit, count)

    def _candidates(self, variants: Sequence[DraftVariant]) -> list[dict[str, Any]]:
        """The settings that are measured: the best simulated one, the second-best variant if it is close, the default
        chain, a tree, ``suffix`` before the best one, and ``suffix`` alone."""
        best = variants[0].config()
        close = [variant.config() for variant in variants[1:2] if variant.speed > CLOSE * variants[0].speed]
        formats = {config["quantization"] for config in (best, *close)}
        for key in [key for key in self.loaded if not any(repr(kind) in repr(key) for kind in formats)]:
            del self.loaded[key]
        curve = self.curves[min(self.curves)]
        nodes = 16 if curve(17) < 1.25 * curve(9) else 8
        depth = min(4, max(2, variants[0].best[0]))
        tree = {**variants[0].options, "num_speculative_tokens": depth, "tree_nodes": nodes}
        suffix = {"method": "suffix", "num_speculative_tokens": 4}
        cascade = {"method": "cascade", "drafters": [suffix, best]}
        return [best, *close, dict(variants[0].options), tree, cascade, suffix]

    def _race(
        self, candidates: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
        """Measure the candidates on held-out prompts and drop slow ones on the way. Returns a row for each candidate
        and workload, the identity check of the fastest one, and that one."""
        configs = [dict(PLAIN), *({**candidate, "length": "adaptive"} for candidate in candidates)]
        contenders = [self.plain, *(EngineContender(self.llm, config) for config in configs[1:])]
        runs = [Interleaved(contenders) for _ in self.config.workloads]
        runs[0].warm_up(self.held_out[:1], [replace(self.params(0.0, 0, WARM_UP), ignore_eos=True)])
        active = list(range(len(configs)))
        for number, workload, prompts in self._groups():
            if number >= FIRST_PROMPTS and self.over("race"):
                break
            temperature, count = self.config.workloads[workload]
            params = [self.params(temperature, number * count + i, self.config.answer) for i in range(count)]
            runs[workload].run(prompts, params, active)
            if workload == len(runs) - 1:
                speeds = [_speedup(runs, index) for index in active]
                least = max(speeds) * (1 - HOPELESS / (1 + number))
                fastest = _without_model(configs[active[speeds.index(max(speeds))]])
                self.say(f"measured on {number + 1} prompts each: {max(speeds):.2f} with {json.dumps(fastest)}")
                active = [index for index, speed in zip(active, speeds) if not index or speed > least]
        chosen = max(active, key=lambda index: _speedup(runs, index))
        rows = [
            {"config": _without_model(config), "temperature": temperature, "concurrency": count,
             "answers": len(run.runs[index]), **figures(run.runs[index], run.runs[0])}
            for index, config in enumerate(configs)
            for run, (temperature, count) in zip(runs, self.config.workloads)
        ]  # fmt: skip
        chosen_runs, plain_runs = ([one for run in runs for one in run.runs[index]] for index in (chosen, 0))
        return rows, identity(chosen_runs, plain_runs), configs[chosen]

    def _groups(self) -> Iterator[tuple[int, int, list[list[int]]]]:
        """Yields a number, an index of ``workloads`` and its prompts, until every held-out prompt was used."""
        remaining, number = list(self.held_out), 0
        while len(remaining) >= sum(count for _, count in self.config.workloads) or not number:
            for workload, (_, count) in enumerate(self.config.workloads):
                while len(remaining) < count:
                    remaining += self.held_out
                yield number, workload, remaining[:count]
                remaining = remaining[count:]
            number += 1


def _speedup(runs: Sequence[Interleaved], index: int) -> float:
    """A contender's speed over plain decoding: the geometric mean over workloads."""
    return geometric_mean([figures(run.runs[index], run.runs[0])["speedup"] for run in runs])


def _without_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """A ``speculative_config`` without the draft model's path."""
    parts = [_without_model(part) for part in config.get("drafters", ())]
    return {key: value for key, value in config.items() if key != "model"} | ({"drafters": parts} if parts else {})


@dataclass(frozen=True)
class PairAnswer:
    """The target's answer to a prompt."""

    prompt: list[int]
    tokens: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Replayed:
    """What the draft would have proposed for an answer, an entry for each of its tokens but the first."""

    kept: list[bool]
    """Whether the draft's token is the answer's."""
    log_probs: list[float]
    """Log-probability of the draft's likeliest token."""
    second_kept: Sequence[bool] = ()
    """Whether the draft's second token is the answer's; empty if drafts are chains."""
    prompt: int = 0
    """Tokens of the prompt."""


@dataclass(frozen=True)
class PairCosts:
    """Costs in plain forwards of ``streams`` sequences."""

    curve: CostCurve
    start: float
    """Of a draft, whatever its length."""
    step: float
    """Of each token of a draft."""
    rest: float = 0.0
    """Of a plain round, outside its forward."""
    read: float = 0.0
    """Of each prompt token in the draft model's prefill."""
    streams: int = 1


def replay(drafter: DraftModel, answers: Sequence[PairAnswer]) -> tuple[list[Replayed], float]:
    """What ``drafter`` would have drafted for ``answers``, and the seconds that it takes to read a prompt token."""
    result, seconds, read = [], 0.0, 0
    pool, info = drafter.attention.pool, drafter.model.info

    def batch(span: Span) -> Batch:
        return Batch([span], info.device).clamp_tokens(info.vocab_size)

    with torch.inference_mode():
        for number, answer in enumerate(answers):
            key, first = -1 - number, len(answer.prompt)
            fed = answer.tokens[: drafter.max_len - first][:-1]
            if not fed or not pool.try_reserve(key, first + len(fed)):
                continue
            began = perf_counter()
            drafter.model.forward(batch(Span(key, 0, list(answer.prompt))), drafter.attention)
            seconds += perf_counter() - began
            read += first
            verified = Span(key, first, fed, logits=list(range(len(fed))))
            output = drafter.model.forward(batch(verified), drafter.attention)
            pool.free(key)
            sequence = RequestState(key, list(answer.prompt), first, answer.params, answer.params.seed or 0)
            chooser, logits = drafter.chooser, drafter.translate(output.logits)
            ranked = chooser.sampler.rank(chooser.align(logits), 1)[1]
            rows = [chooser.row(sequence, answer.tokens[: index + 1]) for index in range(len(fed))]
            branches = drafter.chains is not None and drafter.chains.branches
            chosen = chooser.choose(logits, rows, [-1] * len(rows), 1 + branches)[0]
            kept, second_kept = (
                [ids[rank : rank + 1] == [token] for ids, token in zip(chosen, answer.tokens[1:])] for rank in (0, 1)
            )
            log_probs = [values[0] if values else -inf for values in ranked]
            result.append(Replayed(kept, log_probs, second_kept if branches else (), first))
    return result, seconds / max(1, read)


def drafted(answer: Replayed, start: int, depth: int, threshold: float | None) -> tuple[int, int, int]:
    """Depth, nodes and accepted tokens of the draft after ``start`` known tokens. It ends where the product of its
    tokens' probabilities falls below ``threshold``, at the latest at ``depth``."""
    floor = -inf if threshold is None else log(threshold)
    accepted, log_prob = 0, 0.0
    end = min(start + depth, len(answer.kept))
    for index in range(start, end):
        length = index + 1 - start
        all_kept = accepted == length - 1
        accepted += all_kept and answer.kept[index]
        log_prob += answer.log_probs[index]
        if log_prob < floor:
            branches = bool(answer.second_kept) and length < depth
            accepted += branches and all_kept and answer.second_kept[index]
            return length, length + branches, accepted
    return end - start, end - start, accepted


@dataclass
class _Stream:
    """A simulated sequence, and how many of its answer's tokens are known."""

    answer: Replayed
    known: int = 0


def simulate(answers: Sequence[Replayed], depth: int, threshold: float | None, costs: PairCosts) -> tuple[float, float]:
    """Speed over plain decoding, and a sequence's tokens per round, of drafts of at most ``depth`` tokens.
    ``costs.streams`` answers are decoded at a time, and only full rounds count."""
    waiting = map(_Stream, islice(cycle(answers), max(len(answers), costs.streams)))
    running = list(islice(waiting, costs.streams))
    tokens = rounds = 0
    time = costs.read * sum(stream.answer.prompt for stream in running)
    while len(running) == costs.streams:
        deepest = rows = 0
        for stream in running:
            length, nodes, accepted = drafted(stream.answer, stream.known, depth, threshold)
            emitted = min(accepted + 1, len(stream.answer.kept) - stream.known)
            stream.known += emitted
            tokens += emitted
            deepest, rows = max(deepest, length), rows + 1 + nodes
        rounds += costs.streams
        time += costs.curve(rows) + costs.start + deepest * costs.step + costs.rest
        running = [stream for stream in running if stream.known < len(stream.answer.kept)]
        fresh = list(islice(waiting, costs.streams - len(running)))
        time += costs.read * sum(stream.answer.prompt for stream in fresh)
        running += fresh
    plain_time = tokens / costs.streams * (1 + costs.rest)
    return plain_time / time, tokens / rounds

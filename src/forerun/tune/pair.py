"""``forerun tune TARGET --draft DRAFT``: how a draft model drafts quickest for a target, here.

Parts are measured, and combinations of them are judged on paper: what a verification costs by its rows, what a draft
costs by its tokens in each form, and which tokens each form guesses of answers that the target gave. The best few then
take turns with plain decoding on other prompts.
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
from forerun.measure.planner import CostCurve, draft_price
from forerun.measure.rounds import (
    PLAIN,
    WARM_UP,
    EngineContender,
    Turns,
    engine_of,
    figures,
    full,
    identity,
    in_plain_forwards,
    measure,
)
from forerun.models import sanity
from forerun.models.checkpoint import read_object
from forerun.models.formats import blocks
from forerun.models.inventory import here
from forerun.models.load import sharing
from forerun.models.open import read_config, resolve, weight_sizes
from forerun.sampling.params import SamplingParams
from forerun.speculate.draft.model import LARGE, DraftModel
from forerun.tune.choose import pair_page
from forerun.tune.config import PairConfig
from forerun.tune.data import held_out_prompts
from forerun.tune.loop import Progress, progress

DRAFT = "draft_model"
FEWER = (32_768, 65_536)
"""Outputs of a draft that are tried where its vocabulary has at least twice as many."""
SHARES = {"write": 0.1, "cost": 0.14, "forms": 0.5}
"""When each stage ends, of the time; what is left is for the best few."""
TOGETHER = 4
"""Answers that are written together."""
LONGEST = 704
"""Tokens of a prompt, at most."""
VERIFIED = 16
"""Drafted tokens up to which a verification is timed."""
LADDERS = (3, 6)
"""Times at each number of rows, at least and at most."""
DEPTHS = range(1, 13)
THRESHOLDS = (None, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
TIMED = {"num_speculative_tokens": 8, "confidence_threshold": 0.4}
"""Drafts of many lengths, to tell a draft's start from its steps."""
BLOCKS = ("q4_0", "q8_0", "q4_k")
CLOSE = 0.9
"""Of the best one's speed on paper: another form that comes so close is tried, too."""
TURNS = 2
"""Prompts of each cell that the best few answer in any case."""
HOPELESS = 0.4
"""How much slower than the best, over the number of prompts so far, is too slow to go on with."""
REPORT = "report.html"


@dataclass
class Form:
    """How the draft is held, and what was measured of it."""

    options: dict[str, Any]
    replayed: dict[float, list[Replayed]]
    prices: dict[int, Price]
    """By sequences at a time."""
    bytes: int
    best: tuple[int, float | None] = (1, None)
    """Depth and threshold."""
    speed: float = 0.0
    """On paper, over plain decoding."""

    def judge(self, cells: Sequence[tuple[float, int]]) -> None:
        """Find the best depth and threshold on paper."""
        for depth in DEPTHS:
            for threshold in THRESHOLDS:
                speeds = [
                    on_paper(self.replayed[temperature], depth, threshold, self.prices[n])[0]
                    for temperature, n in cells
                ]
                if (speed := geometric_mean(speeds)) > self.speed:
                    self.speed, self.best = speed, (depth, threshold)

    def config(self) -> dict[str, Any]:
        depth, threshold = self.best
        sure = {} if threshold is None else {"confidence_threshold": threshold}
        return {**self.options, "num_speculative_tokens": depth, **sure}

    def row(self) -> dict[str, Any]:
        """As a page shows it."""
        every = [each.kept for result in self.replayed.values() for each in result]
        guessed = sum(map(sum, every)) / max(1, sum(map(len, every)))
        price = next(iter(self.prices.values()))
        config = {key: value for key, value in self.config().items() if key not in ("method", "model")}
        return {"config": config, "bytes": self.bytes, "guessed": guessed, "start": price.start, "step": price.step,
                "on_paper": self.speed}  # fmt: skip


def tune_pair(config: PairConfig, out: Path, say: Callable[[str], None] = lambda line: None) -> Path:
    """Searches, and writes what was found into ``out``. Raises ForerunError subclasses."""
    if _holds_another(out, config.draft):
        raise ConfigError(f"{out} holds another tuning; name another --out, or remove it")
    result = search(config, say)
    out.mkdir(parents=True, exist_ok=True)
    (out / REPORT).write_text(pair_page(config.model, result), encoding="utf-8")
    more = {key: result[key] for key in ("measured", "forms", "verify_cost", "check")}
    tuned.save(out, config.model, result["chosen"], [], draft=config.draft, **more)
    say(verdict(result))
    say(f"{out}: use it with --tuned {out}, or LLM({config.model!r}, tuned={str(out)!r})")
    return out


def _holds_another(out: Path, draft: str) -> bool:
    """Whether a folder has a tuning in it that was not made with ``draft``."""
    if not (out / tuned.FILE).is_file():
        return (out / "run").exists()
    said = read_object(out / tuned.FILE).get("draft")
    return not isinstance(said, dict) or said.get("model") != draft


def verdict(result: Mapping[str, Any]) -> str:
    """One line: what was chosen, and what it brings."""
    described, answers = _described(result["chosen"]), result["check"]["answers"]
    said = ", ".join(
        f"{row['speedup']:.2f} at temperature {row['temperature']:g}, {row['concurrency']} at a time"
        for row in result["measured"]
        if row["config"] == described
    )
    return f"{json.dumps(described)}: over plain decoding {said}; {answers} answers are the same"


def search(config: PairConfig, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """``{"chosen": speculative_config, "measured": [{"config", "temperature", "concurrency", "speedup", ...}, ...],
    "forms": [...], "verify_cost": {sequences: {rows: price}}, "check": {"passed", "answers", "different"}}``. Raises
    ConfigError where an answer differs with and without drafts."""
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
    llm: LLM = field(init=False)
    answers: dict[float, list[PairAnswer]] = field(default_factory=dict)
    curves: dict[int, CostCurve] = field(default_factory=dict)
    rests: dict[int, float] = field(default_factory=dict)
    points: dict[int, dict[int, float]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.config
        room = min(
            LONGEST + config.answer, read_config(resolve(config.model)).get_text_config().max_position_embeddings
        )
        most = max(TOGETHER, *config.concurrency)
        self.llm = LLM(
            config.model,
            quantization=config.quantization,
            threads=torch.get_num_threads(),
            max_model_len=room,
            max_num_seqs=most,
        )
        prompts = held_out_prompts(self.llm, room - config.answer)
        if len(prompts) < 8:
            raise ConfigError(f"an answer of {config.answer} tokens leaves no room for a prompt: lower it")
        count = len(prompts)
        prompts = [prompts[i] for i in sorted(range(count), key=lambda i: (i % 4, i))]  # one of each category first
        self.seen, self.held = prompts[: count // 4], prompts[count // 4 :]

    def spent(self, fraction: float) -> bool:
        """Whether so much of the time is over."""
        seconds = time.monotonic() - self.began
        if seconds < self.bar.total:
            self.bar.update(round(seconds))
        return seconds >= fraction * 60 * self.config.minutes

    def stage(self, name: str) -> None:
        self.seconds[name] = time.monotonic() - self.began - sum(self.seconds.values())

    def params(self, temperature: float, number: int, tokens: int) -> SamplingParams:
        return SamplingParams(temperature=temperature, max_tokens=tokens, seed=self.config.seed + number)

    def run(self) -> dict[str, Any]:
        first = {"method": DRAFT, "model": self.config.draft, "quantization": self._kinds()[0]}
        # Another vocabulary is refused before anything is measured.
        drafting = EngineContender(self.llm, {**first, **TIMED})
        self.plain = EngineContender(self.llm, PLAIN)
        self.stage("load")
        self._write()
        self.stage("write")
        self._verify()
        self.stage("verification")
        forms = self._forms(drafting, first)
        self.stage("forms")
        del drafting
        rows, check, chosen = self._turns(self._candidates(forms))
        self.stage("turns")
        self.llm.close()
        if not check["passed"]:
            raise ConfigError(f"speculation changed {check['different']} answers; nothing is recommended")
        return {
            "chosen": chosen, "measured": rows, "forms": [form.row() for form in forms], "verify_cost": self.points,
            "check": check, "seconds": self.seconds,
        }  # fmt: skip

    def _kinds(self) -> list[str]:
        """Forms that the draft's weights may have, the one that is usual first."""
        info = self.llm.model.info
        if not blocks.can(info.dtype, info.device):
            return ["none"]
        small = weight_sizes(resolve(self.config.draft))[0] <= LARGE
        return ["int8_rows", "none", *BLOCKS[:2]] if small else [BLOCKS[0], "none", *BLOCKS[1:]]

    def _write(self) -> None:
        """The target answers a prompt of each category at every temperature, as long as there is time."""
        for first in range(0, len(self.seen), TOGETHER):
            for temperature in self.config.temperatures:
                if first and self.spent(SHARES["write"]):
                    return
                prompts = self.seen[first : first + TOGETHER]
                params = [self.params(temperature, first + i, self.config.answer) for i in range(len(prompts))]
                said = self.plain.run(prompts, params).answers
                result = [PairAnswer(*each) for each in zip(prompts, said, params) if len(each[1]) > 1]
                self.answers.setdefault(temperature, []).extend(result)

    def _verify(self) -> None:
        """What a round costs the target by its rows, with drafts that are never kept."""
        if not all(self.answers.values()):
            raise ConfigError("the model ended its answers at once: there is nothing to draft")
        guess = engine_of(self.llm, {"method": "random", "num_speculative_tokens": VERIFIED})
        for count in self.config.concurrency:
            prompts = [self.seen[i % len(self.seen)][:8] for i in range(count)]
            times: dict[int, list[float]] = defaultdict(list)
            rests: list[float] = []
            for turn in range(LADDERS[1]):
                if turn >= LADDERS[0] and self.spent(SHARES["cost"]):
                    break
                for depth in (0, VERIFIED):  # no draft is longer than what is left of an answer: each number in turn
                    params = [replace(self.params(0.0, i, 3 + depth), ignore_eos=True) for i in range(count)]
                    for sample in full(measure(guess, prompts, params, max_draft=depth).rounds, count):
                        times[sample.rows].append(sample.verify)
                        rests += [] if sample.depth else [sample.rest]
            unit = min(times[count])  # other work on the machine only ever adds to a time
            self.points[count] = {rows: max(1.0, min(each) / unit) for rows, each in sorted(times.items())}
            self.curves[count] = CostCurve(self.points[count], count, self.llm.model.row_multiple)
            self.rests[count] = min(rests) / unit

    def _forms(self, drafting: EngineContender, first: Mapping[str, Any]) -> list[Form]:
        """What each form of the draft costs and guesses, the best on paper first; then the best one's other numbers of
        outputs."""
        drafter: Any = drafting.engine.router.drafters[DRAFT]
        result: list[Form] = []
        self._measure(drafting, first, result)
        del drafting
        base = {"method": DRAFT, "model": self.config.draft}
        for kind in self._kinds()[1:]:
            self._try({**base, "quantization": kind}, result)
        kind = result[0].options["quantization"]
        for size in self._sizes(drafter):
            self._try({**base, "quantization": kind, "draft_vocab_size": size}, result)
        return result

    def _sizes(self, drafter: DraftModel) -> list[int]:
        """Other numbers of outputs to try, where there are many."""
        known = min(
            read_config(resolve(self.config.draft)).get_text_config().vocab_size, drafter.context.sampler.vocab_size
        )
        sizes = [size for size in FEWER if 2 * size <= known and drafter.model.info.weight_bytes > LARGE]
        return sizes if drafter.output_ids is None else [*sizes, known]

    def _try(self, options: Mapping[str, Any], result: list[Form]) -> None:
        """Measures another form, if there is time."""
        if not self.spent(SHARES["forms"]):
            self._measure(EngineContender(self.llm, {**options, **TIMED}), options, result)

    def _measure(self, drafting: EngineContender, options: Mapping[str, Any], result: list[Form]) -> None:
        drafter: Any = drafting.engine.router.drafters[DRAFT]
        replayed, read = {}, []
        for temperature, answers in self.answers.items():
            replayed[temperature], seconds = replay(drafter, answers)
            read.append(seconds)
        if not all(replayed.values()):
            raise ConfigError(f"{self.config.draft} has too short a context for these prompts: it cannot draft")
        prices = {count: self._price(drafting, count, median(read)) for count in self.config.concurrency}
        form = Form(dict(options), replayed, prices, sum(m.info.weight_bytes for m in drafter.models()))
        form.judge(self.config.cells)
        best = max((each.speed for each in result), default=0.0)
        result.append(form)
        result.sort(key=lambda each: -each.speed)
        if form.speed > best:
            described = json.dumps(form.row()["config"])
            self.say(f"so far, after {time.monotonic() - self.began:.0f} s: {described}, {form.speed:.2f} on paper")

    def _price(self, drafting: EngineContender, count: int, read: float) -> Price:
        """From rounds that take turns with plain ones."""
        prompts = [self.seen[i % len(self.seen)] for i in range(count)]
        params = [replace(self.params(self.config.temperatures[0], i, 32), ignore_eos=True) for i in range(count)]
        turns = Turns([self.plain, drafting])
        turns.warm_up(prompts, params)
        plain, result = turns.side_by_side(prompts, params)
        unit = in_plain_forwards([plain, result], count)
        samples = [sample for sample in full(result.rounds, count) if sample.depth]
        if not samples:
            raise ConfigError(f"{self.config.draft} drafts nothing for these prompts: it has too short a context")
        start, step = draft_price(samples, self.rests[count])
        return Price(self.curves[count], start, step, self.rests[count], read / unit, count)

    def _candidates(self, forms: Sequence[Form]) -> list[dict[str, Any]]:
        """What is measured: the best on paper, the next form where it comes close, the usual chains, a tree, text that
        repeats before the draft, and that alone."""
        best = forms[0].config()
        chains = [best, *(form.config() for form in forms[1:2] if form.speed > CLOSE * forms[0].speed)]
        kept = {form["quantization"] for form in chains}
        for key in [key for key in self.loaded if not any(repr(kind) in repr(key) for kind in kept)]:
            del self.loaded[key]
        curve = self.curves[min(self.curves)]
        wide = 16 if curve(17) < 1.25 * curve(9) else 8
        tree = {**forms[0].options, "num_speculative_tokens": min(4, max(2, forms[0].best[0])), "tree_nodes": wide}
        suffix = {"method": "suffix", "num_speculative_tokens": 4}
        return [*chains, dict(forms[0].options), tree, {"method": "cascade", "drafters": [suffix, best]}, suffix]

    def _turns(self, ways: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
        """A row for each way and cell, what the check of identity says of the chosen way, and that."""
        configs = [dict(PLAIN), *({**way, "length": "adaptive"} for way in ways)]
        contenders = [self.plain, *(EngineContender(self.llm, config) for config in configs[1:])]
        cells = [Turns(contenders) for _ in self.config.cells]
        cells[0].warm_up(self.held[:1], [replace(self.params(0.0, 0, WARM_UP), ignore_eos=True)])
        active = list(range(len(configs)))
        for turn, cell, prompts in self._groups():
            if turn >= TURNS and self.spent(0.95):
                break
            temperature, count = self.config.cells[cell]
            params = [self.params(temperature, turn * count + i, self.config.answer) for i in range(count)]
            cells[cell].take(prompts, params, active)
            if cell == len(cells) - 1:
                speeds = [_speed(cells, way) for way in active]
                least = max(speeds) * (1 - HOPELESS / (1 + turn))
                described = _described(configs[active[speeds.index(max(speeds))]])
                self.say(f"measured on {turn + 1} prompts each: {max(speeds):.2f} with {json.dumps(described)}")
                active = [way for way, speed in zip(active, speeds) if not way or speed > least]
        chosen = max(active, key=lambda way: _speed(cells, way))
        rows = [
            {"config": _described(config), "temperature": temperature, "concurrency": count,
             "answers": len(turns.runs[way]), **figures(turns.runs[way], turns.runs[0])}
            for way, config in enumerate(configs)
            for turns, (temperature, count) in zip(cells, self.config.cells)
        ]  # fmt: skip
        chosen_runs, plain_runs = ([run for turns in cells for run in turns.runs[way]] for way in (chosen, 0))
        return rows, identity(chosen_runs, plain_runs), configs[chosen]

    def _groups(self) -> Iterator[tuple[int, int, list[list[int]]]]:
        """Turn, cell, and prompts that nothing has seen."""
        left, turn = list(self.held), 0
        while len(left) >= sum(count for _, count in self.config.cells) or not turn:
            for cell, (_, count) in enumerate(self.config.cells):
                while len(left) < count:
                    left += self.held
                yield turn, cell, left[:count]
                left = left[count:]
            turn += 1


def _speed(cells: Sequence[Turns], way: int) -> float:
    """Over plain decoding, all cells alike."""
    return geometric_mean([figures(turns.runs[way], turns.runs[0])["speedup"] for turns in cells])


def _described(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without the place of the draft."""
    parts = [_described(part) for part in config.get("drafters", ())]
    return {key: value for key, value in config.items() if key != "model"} | ({"drafters": parts} if parts else {})


@dataclass(frozen=True)
class PairAnswer:
    """What the target said behind a prompt."""

    prompt: list[int]
    tokens: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Replayed:
    """For each token of an answer but the first: whether the draft would have said it, and the logarithm of how likely
    it finds its likeliest token."""

    kept: list[bool]
    sure: list[float]
    beside: Sequence[bool] = ()
    """Whether it is the draft's next best token; empty where drafts are chains alone."""
    prompt: int = 0
    """Tokens of its prompt."""


@dataclass(frozen=True)
class Price:
    """In plain forwards of ``streams`` sequences: a draft of k tokens takes ``start`` + k ``step``, a plain round
    ``rest`` beside its forward, a token of a prompt that the draft reads ``read``."""

    curve: CostCurve
    start: float
    step: float
    rest: float = 0.0
    read: float = 0.0
    streams: int = 1


@dataclass
class _Place:
    """An answer that is being given, and how many of its tokens are."""

    answer: Replayed
    at: int = 0


def replay(drafter: DraftModel, answers: Sequence[PairAnswer]) -> tuple[list[Replayed], float]:
    """What ``drafter`` would have drafted for ``answers``, and the seconds that it takes to read a prompt's token."""
    result, seconds, read = [], 0.0, 0
    pool, size = drafter.attention.pool, drafter.model.info.vocab_size
    with torch.inference_mode():
        for number, answer in enumerate(answers):
            key, first = -1 - number, len(answer.prompt)
            fed = answer.tokens[: drafter.max_len - first][:-1]
            if not fed or not pool.try_reserve(key, first + len(fed)):
                continue
            began = perf_counter()
            spans = [Span(key, 0, list(answer.prompt))]
            drafter.model.forward(Batch(spans, drafter.model.info.device).clamp_tokens(size), drafter.attention)
            seconds += perf_counter() - began
            read += first
            spans = [Span(key, first, fed, logits=list(range(len(fed))))]
            made = drafter.model.forward(Batch(spans, drafter.model.info.device).clamp_tokens(size), drafter.attention)
            pool.free(key)
            seed = answer.params.seed or 0
            sequence = RequestState(key, list(answer.prompt), first, answer.params, seed)
            chooser, logits = drafter.chooser, drafter.translate(made.logits)
            sure = [logs[0] if logs else -inf for logs in chooser.sampler.rank(chooser.align(logits), 1)[1]]
            rows = [chooser.row(sequence, answer.tokens[: index + 1]) for index in range(len(fed))]
            branches = drafter.chains is not None and drafter.chains.branches
            said = chooser.choose(logits, rows, [-1] * len(rows), 1 + branches)[0]
            kept, beside = (
                [ids[rank : rank + 1] == [token] for ids, token in zip(said, answer.tokens[1:])] for rank in (0, 1)
            )
            result.append(Replayed(kept, sure, beside if branches else (), first))
    return result, seconds / max(1, read)


def drafted(answer: Replayed, at: int, depth: int, threshold: float | None) -> tuple[int, int, int]:
    """How many tokens a chain has that begins behind ``at`` known ones, how many nodes its draft, and how many tokens
    are kept."""
    floor = -inf if threshold is None else log(threshold)
    kept, chance = 0, 0.0
    last = min(at + depth, len(answer.kept))
    for index in range(at, last):
        length = index + 1 - at
        right = kept == length - 1
        kept += right and answer.kept[index]
        chance += answer.sure[index]
        if chance < floor:
            branches = bool(answer.beside) and length < depth
            kept += branches and right and answer.beside[index]
            return length, length + branches, kept
    return last - at, last - at, kept


def on_paper(answers: Sequence[Replayed], depth: int, threshold: float | None, price: Price) -> tuple[float, float]:
    """Speed over plain decoding and tokens a round of one sequence, for chains of at most ``depth`` tokens;
    ``price.streams`` answers at a time, and only rounds that are full."""
    waiting = map(_Place, islice(cycle(answers), max(len(answers), price.streams)))
    running = list(islice(waiting, price.streams))
    tokens = rounds = 0
    time = price.read * sum(index.answer.prompt for index in running)
    while len(running) == price.streams:
        deepest = rows = 0
        for index in running:
            length, nodes, kept = drafted(index.answer, index.at, depth, threshold)
            gained = min(kept + 1, len(index.answer.kept) - index.at)
            index.at += gained
            tokens += gained
            deepest, rows = max(deepest, length), rows + 1 + nodes
        rounds += price.streams
        time += price.curve(rows) + price.start + deepest * price.step + price.rest
        left = [index for index in running if index.at < len(index.answer.kept)]
        fresh = list(islice(waiting, price.streams - len(left)))
        time += price.read * sum(index.answer.prompt for index in fresh)
        running = left + fresh
    return tokens / price.streams * (1 + price.rest) / time, tokens / rounds

"""Reference 002's Table 2, the T5 rows of Tables 3 and 5, and Figure 5, in kind, on pairs trained here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import T5ForConditionalGeneration

from forerun.engine.llm import LLM
from forerun.measure.rounds import PLAIN, EngineContender, Interleaved, Measured, RoundCosts, measure
from forerun.sampling.params import SamplingParams
from forerun.theory import walltime_improvement
from forerun_lab.reproduce.distributions import LENIENCE, NgramCounts, Rates, Sums
from forerun_lab.reproduce.pairs import ANSWER, DOCSTRINGS, PAD, SOUNDS, PairTask, batch, docstrings, sounds, trained
from forerun_lab.reproduce.parts import Cell, ReportTable, Section, Settings

TASKS = {SOUNDS: sounds, DOCSTRINGS: docstrings}
PAPER_3 = {("unigram", 0): 0.08, ("bigram", 0): 0.20, ("draft", 0): 0.75} | {
    ("unigram", 1): 0.07, ("bigram", 1): 0.19, ("draft", 1): 0.62
}  # fmt: skip
PAPER_2 = {(SOUNDS, 0): (7, 3.4), (SOUNDS, 1): (7, 2.6), (DOCSTRINGS, 0): (5, 3.1), (DOCSTRINGS, 1): (5, 2.3)}
"""Gamma and speed-up of T5-small: EnDe stands beside sounds, CNN/DM beside docstrings."""
REPEATS = 3
TOGETHER = 32
SOURCES = 32
"""Sources over which speed is measured."""


def pair(task: PairTask, settings: Settings) -> tuple[Path, Path]:
    return trained(task, "target", settings), trained(task, "draft", settings)


@cache
def rates(name: str, settings: Settings, temperature: float) -> dict[str, Rates]:
    """By draft, over tokens that the target wrote for held-out sources of the task."""
    task = _task(name)
    return _rates(task, pair(task, settings), settings, temperature)


@torch.inference_mode()
def _rates(task: PairTask, folders: tuple[Path, Path], settings: Settings, temperature: float) -> dict[str, Rates]:
    target, draft = (T5ForConditionalGeneration.from_pretrained(folder).eval() for folder in folders)
    counts = NgramCounts([[PAD, *answer] for _, answer in task.train[:20_000]], task.vocabulary)
    sums = {name: Sums() for name in ("unigram", "bigram", "draft")}
    torch.manual_seed(0)
    done = 0
    while done < settings.tokens:
        for start in range(0, len(task.held_out), TOGETHER):
            sources = [source for source, _ in task.held_out[start : start + TOGETHER]]
            answers = _answers(target, sources, temperature, task.end)
            fed = batch([(source, answer) for source, answer in zip(sources, answers, strict=True)])
            p, q = (model(**fed).logits.double().softmax(-1) for model in (target, draft))
            for row, answer in enumerate(answers):
                before = [PAD, *answer[:-1]]
                distributions: dict[str, Tensor] = {"unigram": counts.q(before, 1), "bigram": counts.q(before, 2)}
                distributions["draft"] = q[row, : len(answer)]
                for kind, distribution in distributions.items():
                    sums[kind].add(p[row, : len(answer)], distribution)
                done += len(answer)
            if done >= settings.tokens:
                break
        if temperature == 0:  # greedy answers would be the same again
            break
    return {kind: result.means() for kind, result in sums.items()}


def _answers(model: Any, sources: Sequence[list[int]], temperature: float, end: int) -> list[list[int]]:
    fed = batch([(source, [end]) for source in sources])
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    out = model.generate(
        input_ids=fed["input_ids"], attention_mask=fed["attention_mask"], max_new_tokens=ANSWER, **sampling
    )
    return [row[: row.index(end) + 1] if end in row else row for row in out[:, 1:].tolist()]


def table_3(settings: Settings) -> ReportTable:
    rows: list[list[Cell]] = []
    for name in TASKS:
        for temperature in (0, 1):
            for draft, rate in rates(name, settings, float(temperature)).items():
                alpha = rate.greedy if temperature == 0 else rate.sampled
                rows.append([name, draft, temperature, PAPER_3[draft, temperature], f"{alpha:.3f}"])
    return ReportTable(["task", "draft", "T", "alpha, paper (T5-XXL, T5-small; EnDe)", "ours"], rows)


def table_5(settings: Settings) -> ReportTable:
    rows: list[list[Cell]] = []
    for name in TASKS:
        for draft, rate in rates(name, settings, 1.0).items():
            rows.append([name, draft, *(f"{fraction:.3f}" for fraction in rate.lenient)])
    return ReportTable(["task", "draft", *(f"l = {keep:g}" for keep in LENIENCE)], rows)


def table_2(settings: Settings) -> ReportTable:
    """Wall-clock in the engine: plain and speculated rounds in turns, one request at a time."""
    rows: list[list[Cell]] = []
    for name in TASKS:
        task = _task(name)
        target, draft = pair(task, settings)
        for temperature in (0, 1):
            gamma, printed = PAPER_2[name, temperature]
            config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": gamma}
            llm = LLM(str(target), speculative_config=None)
            turns = Interleaved([EngineContender(llm, PLAIN), EngineContender(llm, config)])
            sources = [source for source, _ in task.held_out[:SOURCES]]
            params = [SamplingParams(temperature=temperature, max_tokens=ANSWER, seed=i) for i in range(len(sources))]
            for source, options in zip(sources, params):
                for _ in range(REPEATS):
                    turns.run([source], [options])
            slow, quick = map(Measured.joined, turns.runs)
            alpha = quick.total.alpha or 0.0
            costs = RoundCosts.of(quick.rounds, slow.rounds, 1)
            c, expected = 0.0, None
            if costs is not None:
                c, expected = costs.c, costs.predict(quick.rounds, quick.total.match_rate or 0.0)
            same = len(slow.answers) - quick.num_different(slow)
            rows.append(
                [name, temperature, gamma, f"{alpha:.2f}", f"{c:.2f}", printed, f"{_speedup(turns):.2f}",
                 f"{walltime_improvement(alpha, gamma, c):.2f}", "-" if expected is None else f"{expected:.2f}",
                 f"{same} of {len(slow.answers)}"]
            )  # fmt: skip
    columns = ["task", "T", "gamma", "alpha", "c", "speed, paper", "ours", "EXP", "EXP with verification priced"]
    return ReportTable([*columns, "answers the same"], rows)


def _speedup(turns: Interleaved) -> float:
    """The median over sources of the median over the repeats."""
    pairs = list(zip(*turns.runs, strict=True))
    ratios: list[float] = []
    for first in range(0, len(pairs), REPEATS):
        here = [
            quick.tokens_per_second / slow.tokens_per_second
            for slow, quick in pairs[first : first + REPEATS]
            if slow.seconds and quick.seconds
        ]
        ratios += [median(here)] if here else []
    return median(ratios)


def figure_5(settings: Settings) -> ReportTable:
    """The first answer of a pair round by round, for the paper's gammas."""
    task = _task(SOUNDS)
    target, draft = pair(task, settings)
    rows: list[list[Cell]] = []
    for gamma in (7, 3, 0):
        speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": gamma}
        llm = LLM(str(target), speculative_config=speculation if gamma else {"method": "none"})
        params = SamplingParams(temperature=0.0, max_tokens=ANSWER)
        measure(llm.engine, [task.held_out[1][0]], [params])
        result = measure(llm.engine, [task.held_out[0][0]], [params])
        drawn = " ".join("q" * r.depth + "P" + (str(r.tokens) if gamma else "") for r in result.rounds)
        draft_ms, verify_ms = (
            1000 * sum(getattr(r, part) for r in result.rounds) / len(result.rounds) for part in ("draft", "verify")
        )
        rows.append([gamma, len(result.rounds), result.tokens, f"{draft_ms:.2f}", f"{verify_ms:.2f}", f"`{drawn}`"])
    note = "q: a step of the draft, P: a pass of the target, with the tokens that the round gave. Encoders ran before."
    return ReportTable(
        ["gamma", "rounds", "tokens", "drafting, ms a round", "target, ms a round", "trace"], rows, [note]
    )


@cache
def _task(name: str) -> PairTask:
    return TASKS[name]()


WHY = (
    "Tasks, models and machine are others: words to sounds (cmudict) and functions to docstrings (standard library) "
    "for translation and summaries; a target of 0.9M to 1.9M parameters trained for minutes for T5-XXL's 11B. A small "
    "target's pass costs little more than its draft's, so c is large and speculation gains little or loses; the "
    "paper's c is 0.02."
)
PARTS = [
    Section("table-2", "Encoder-decoder pairs: speed", "Reference 002, Table 2", WHY, table_2, False),
    Section(
        "table-3-seq2seq", "Encoder-decoder pairs: acceptance", "Reference 002, Table 3, T5 rows", WHY, table_3, False
    ),
    Section("table-5-seq2seq", "Encoder-decoder pairs: lenience", "Reference 002, Table 5", WHY, table_5, False),
    Section("figure-5", "A trace of rounds", "Reference 002, Figure 5", WHY, figure_5, False),
]

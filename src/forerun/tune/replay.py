"""What a draft model would have done for answers that the target gave, every depth and threshold at once.

A drafted token is kept if it is the target's, and what comes behind it was drafted from the target's own text then. So
one pass of the draft over an answer says which tokens it would have guessed, whatever lengths its drafts have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from math import inf, log
from time import perf_counter

import torch

from forerun.core.batch import Batch, Span
from forerun.core.request import RequestState
from forerun.measure.planner import CostCurve
from forerun.sampling.params import SamplingParams
from forerun.speculate.draft.model import DraftModel


@dataclass(frozen=True)
class Answer:
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


def replay(drafter: DraftModel, answers: Sequence[Answer]) -> tuple[list[Replayed], float]:
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
            drafter.model.forward(Batch(spans, drafter.model.info.device).within(size), drafter.attention)
            seconds += perf_counter() - began
            read += first
            spans = [Span(key, first, fed, logits=list(range(len(fed))))]
            made = drafter.model.forward(Batch(spans, drafter.model.info.device).within(size), drafter.attention)
            pool.free(key)
            seed = answer.params.seed or 0
            sequence = RequestState(key, list(answer.prompt), first, answer.params, seed)
            chooser, logits = drafter.chooser, drafter.translate(made.logits)
            sure = [logs[0] if logs else -inf for logs in chooser.sampler.rank(chooser.align(logits), 1)[1]]
            rows = [chooser.row(sequence, answer.tokens[: index + 1]) for index in range(len(fed))]
            said = chooser.choose(logits, rows, [-1] * len(rows))[0]
            kept = [ids[:1] == [token] for ids, token in zip(said, answer.tokens[1:])]
            result.append(Replayed(kept, sure, first))
    return result, seconds / max(1, read)


def drafted(answer: Replayed, at: int, depth: int, threshold: float | None) -> tuple[int, int]:
    """How many tokens a draft has that begins behind ``at`` known ones, and how many of them are kept."""
    floor = -inf if threshold is None else log(threshold)
    length = kept = 0
    chance, right = 0.0, True
    for good, sure in zip(answer.kept[at : at + depth], answer.sure[at : at + depth]):
        length += 1
        right = right and good
        kept += right
        chance += sure
        if chance < floor:
            break
    return length, kept


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
            length, kept = drafted(index.answer, index.at, depth, threshold)
            gained = min(kept + 1, len(index.answer.kept) - index.at)
            index.at += gained
            tokens += gained
            deepest, rows = max(deepest, length), rows + 1 + length
        rounds += price.streams
        time += price.curve(rows) + price.start + deepest * price.step + price.rest
        left = [index for index in running if index.at < len(index.answer.kept)]
        fresh = list(islice(waiting, price.streams - len(left)))
        time += price.read * sum(index.answer.prompt for index in fresh)
        running = left + fresh
    return tokens / price.streams * (1 + price.rest) / time, tokens / rounds

"""Every drafter beside beams: plain beam search's beams and scores, bit for bit, and sampled requests undisturbed."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from harness import Answer, answers, check_idle, options
from matrix import CASES, Case

from forerun.engine.engine import Engine
from forerun.engine.jobs import Job
from forerun.sampling.params import BeamSearchParams

SEARCHES = [
    ("hello world, hello world, hello", BeamSearchParams(4, 20, ignore_eos=True)),
    ("a", BeamSearchParams(2, 24, length_penalty=-0.5, early_stopping="never")),
    ("def parse(text):\n    return ", BeamSearchParams(3, 17, early_stopping=True, length_penalty=2.0)),
    ("the cat sat on the mat; the cat sat", BeamSearchParams(1, 12)),
]
ALONE = [("0123456789" * 3, options(temperature=0.8, max_tokens=24)), ("a", options(max_tokens=24))]
PAGE_SIZES = (4, 16, None)
WIDEST = 12
"""Sequences together: not all of the requests fit, so that some wait."""


def add(engine: Engine, requests: list[tuple[str, Any]]) -> list[Job]:
    return [job for prompt, params in requests for job in engine.add(engine.tokenizer.encode(prompt), params)]


def check(engine: Engine) -> None:
    """Between rounds: pages are accounted for, the target holds all but the last token of every beam, or less where it
    reads some again, and its drafter knows a prefix."""
    pool = engine.target.attention.pool
    for each in engine.pools:
        each.check()
    for root in engine.scheduler.running:
        for sequence in root.parts:
            assert pool.length(sequence.id) == sequence.num_computed_tokens < len(sequence.tokens)
            known = engine.router.drafters[sequence.drafter].cached_tokens(sequence) if sequence.drafter else None
            assert known is None or known == sequence.tokens[: len(known)]


def beams(jobs: list[Job]) -> list[Any]:
    return [job.beam for job in jobs if job.peers]


@pytest.fixture(scope="session")
def expected(engine: Callable[..., Engine]) -> Callable[[], tuple[list[Any], list[Answer]]]:
    """Plain beams and plain answers, one request at a time."""

    @cache
    def get() -> tuple[list[Any], list[Answer]]:
        plain, jobs = engine(), []
        for request in SEARCHES + ALONE:
            jobs += add(plain, [request])
            while plain.busy:
                plain.step()
        return beams(jobs), answers([job for job in jobs if not job.peers])

    return get


@pytest.mark.parametrize("case", CASES, ids=str)
def test_beams_are_plain_ones(
    case: Case, engine: Callable[..., Engine], keys: Callable[..., dict[str, Any]], expected: Callable[[], Any]
) -> None:
    page_size = PAGE_SIZES[CASES.index(case) % len(PAGE_SIZES)]
    built = engine(keys(case), page_size=page_size, max_num_seqs=WIDEST)
    jobs = add(built, SEARCHES[:2]) + add(built, ALONE) + add(built, SEARCHES[2:])
    while built.busy:
        built.step()
        check(built)
    check_idle(built, [job for job in jobs if not job.peers])
    for metrics in (job.metrics for job in jobs if job.peers):
        histogram = metrics.acceptance_histogram
        assert sum(histogram) == metrics.num_drafts <= metrics.rounds
        assert metrics.decode_tokens == metrics.rounds + sum(more * count for more, count in enumerate(histogram))
    assert all(job.metrics.draft_error is None for job in jobs)
    assert (beams(jobs), answers([job for job in jobs if not job.peers])) == expected()
    if case == Case("draft_model", "tree"):
        searches = [job.metrics for job in jobs if job.peers]
        assert sum(metrics.decode_tokens for metrics in searches) > 1.3 * sum(metrics.rounds for metrics in searches)


def test_the_transformers_path_finds_the_same(
    engine: Callable[..., Engine], keys: Callable[..., dict[str, Any]]
) -> None:
    result = []
    for config in (None, keys(Case("draft_model", "tree"))):
        built = engine(config, path="hf", page_size=4)
        jobs = add(built, SEARCHES[:2])
        while built.busy:
            built.step()
        result.append(beams(jobs))
    assert result[0] == result[1]


@pytest.mark.parametrize("method", ["tli", "slem"])
def test_a_draft_with_another_vocabulary(
    method: str, engine: Callable[..., Engine], tiny_stranger: str, expected: Callable[[], Any]
) -> None:
    stranger = {"model": tiny_stranger, "use_heterogeneous_vocab": True, "heterogeneous_vocab_method": method}
    built = engine({"method": "draft_model", **stranger}, page_size=4, max_num_seqs=WIDEST)
    jobs = add(built, SEARCHES)
    while built.busy:
        built.step()
        check(built)
    built.check()
    assert all(job.metrics.draft_error is None for job in jobs)
    assert beams(jobs) == expected()[0]


CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("draft_model", {"tree": [2, 2, 1]}),
    ("layerskip", {}),
    ("suffix", {}),
    ("draft_model", {"confidence_threshold": 0.05}),
]


@pytest.mark.parametrize("seed", range(6))
def test_searches_that_come_and_go(
    seed: int, engine: Callable[..., Engine], keys: Callable[..., dict[str, Any]], expected: Callable[[], Any]
) -> None:
    """Few pages, requests that arrive at any time, and some that are aborted: nothing leaks, and whoever ends finds
    what it would have found alone."""
    source = random.Random(seed)
    method, shape = CONFIGS[seed % len(CONFIGS)]
    layout = {"page_size": None} if seed == 5 else {"page_size": source.choice([1, 3, 8]), "max_model_len": 80}
    if layout["page_size"]:
        layout |= {"num_pages": 180 // layout["page_size"], "prefix_caching": source.random() < 0.5}
    built = engine({**keys(Case(method, "chain")), **shape}, max_num_seqs=6, **layout)
    waiting = [(request, index) for index, request in enumerate(SEARCHES + ALONE)] * 2
    source.shuffle(waiting)
    ended: dict[int, list[Any]] = {}
    begun: list[tuple[int, list[Job]]] = []
    while waiting or built.busy:
        if waiting and source.random() < 0.3:
            request, index = waiting.pop()
            begun.append((index, add(built, [request])))
        if begun and source.random() < 0.02:
            built.abort(source.choice(begun)[1][0])
        built.step()
        check(built)
    built.check()
    searches, alone = expected()
    firsts = [sum(params.n for _, params in SEARCHES[:index]) for index in range(len(SEARCHES))]
    for index, jobs in begun:
        if jobs[0].finish is not None and jobs[0].finish.reason == "abort":
            continue
        ended.setdefault(index, []).append(jobs)
        if index < len(SEARCHES):
            assert beams(jobs) == searches[firsts[index] : firsts[index] + len(jobs)]
        else:
            assert answers(jobs) == [alone[index - len(SEARCHES)]]
    assert len(ended) > 3

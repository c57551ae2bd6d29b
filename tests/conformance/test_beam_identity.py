"""Every drafter beside beams: plain beam search's beams and scores, bit for bit, and sampled requests undisturbed."""

import random
from functools import cache

import pytest
from matrix import CASES, Case, marked, unless_of_lab

from forerun.sampling.params import BeamSearchParams
from harness import answers, check_idle, options

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


def add(engine, requests):
    return [job for prompt, params in requests for job in engine.add(engine.tokenizer.encode(prompt), params)]


def check(engine):
    """Between rounds: pages are accounted for, the target holds all but the last token of every beam, or less where it
    reads some again, and its drafter knows a prefix."""
    pool = engine.target.attention.pool
    for each in engine.pools:
        each.check()
    for root in engine.scheduler.running:
        for sequence in root.sequences:
            assert pool.length(sequence.id) == sequence.num_computed_tokens < len(sequence.tokens)
            known = engine.router.drafters[sequence.drafter].cached_tokens(sequence) if sequence.drafter else None
            assert known is None or known == sequence.tokens[: len(known)]


def search(engine, *requests):
    """The jobs of all requests, in the order in which they came, once they have ended."""
    jobs = [job for some in requests for job in add(engine, some)]
    while engine.busy:
        engine.step()
        check(engine)
    return jobs


def beams(jobs):
    return [job.beam for job in jobs if job.peers]


@pytest.fixture(scope="session")
def expected(engine):
    """Plain beams and plain answers, one request at a time."""

    @cache
    def get():
        plain, jobs = engine(), []
        for request in SEARCHES + ALONE:
            jobs += search(plain, [request])
        return beams(jobs), answers([job for job in jobs if not job.peers])

    return get


@pytest.mark.parametrize("case", marked(CASES, unless_of_lab))
def test_beams_are_plain_ones(case, engine, keys, expected):
    page_size = PAGE_SIZES[CASES.index(case) % len(PAGE_SIZES)]
    built = engine(keys(case), page_size=page_size, max_num_seqs=WIDEST)
    jobs = search(built, SEARCHES[:2], ALONE, SEARCHES[2:])
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


def test_the_transformers_path_finds_the_same(engine, keys):
    result = []
    for config in (None, keys(Case("draft_model", "tree"))):
        built = engine(config, path="hf", page_size=4)
        result.append(beams(search(built, SEARCHES[:2])))
    assert result[0] == result[1]


@pytest.mark.parametrize("method", ["tli", "slem"])
def test_a_draft_with_another_vocabulary(method, engine, tiny_stranger, expected):
    stranger = {"model": tiny_stranger, "use_heterogeneous_vocab": True, "heterogeneous_vocab_method": method}
    built = engine({"method": "draft_model", **stranger}, page_size=4, max_num_seqs=WIDEST)
    jobs = search(built, SEARCHES)
    built.check()
    assert all(job.metrics.draft_error is None for job in jobs)
    assert beams(jobs) == expected()[0]


CONFIGS = [
    ("draft_model", {"tree": [2, 2, 1]}),
    ("layerskip", {}),
    ("suffix", {}),
    ("draft_model", {"confidence_threshold": 0.05}),
]


@pytest.mark.parametrize("seed", range(6))
def test_searches_that_come_and_go(seed, engine, keys, expected):
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
    ended = {}
    begun = []
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

"""Many requests of every kind at once on too few pages: all of them get the tokens of decoding them alone."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, SamplingParams, pretrained
from forerun.engine.config import EngineConfig, SpeculativeConfig
from forerun.engine.engine import Engine, Job

CONCURRENCY = 32
PAGE_SIZE = 8
LONGEST = 160
BURST = 250
"""Requests between two moments at which the engine is idle."""

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 12, "top_p": 0.9},
    {"temperature": 0.9, "min_p": 0.05, "logit_bias": {30: 2.0, 31: -100.0}},
    {"temperature": 0.8, "frequency_penalty": 0.4, "bad_words": ["e", "at"]},
    {"temperature": 0.8, "stop": ["e", "self", "\n\n"], "min_tokens": 3},
    {"temperature": 0.6, "ignore_eos": False, "logprobs": 1},
    {"temperature": 0.5, "prompt_logprobs": 0},
    {"temperature": 0.8, "n": 2},
]


@dataclass
class Request:
    """One request of the soak, what becomes of it, and its jobs."""

    prompt: list[int]
    params: SamplingParams
    how: dict[str, Any]
    cancel_after: int | None
    """Rounds after which it is cancelled, if it still runs."""
    pause_after: int | None
    jobs: list[Job] = field(default_factory=list)
    age: int = 0


def requests(count: int, vocab_size: int, methods: list[str], seed: int) -> list[Request]:
    """Mixed lengths, options, drafters and priorities; many prompts begin alike; a third is to be cancelled."""
    draw = random.Random(seed)
    stems = [[draw.randrange(2, vocab_size) for _ in range(length)] for length in (9, 24, 40, 70)]
    made = []
    for index in range(count):
        stem = draw.choice([[], [], *stems])
        rest = [draw.randrange(2, vocab_size) for _ in range(draw.choice([1, 2, 5, 17, 40]))]
        prompt = (stem + rest)[: draw.choice([4, 32, 90, 90])]
        params = SamplingParams(
            **{"ignore_eos": True, **draw.choice(OPTIONS)},
            max_tokens=draw.choice([3, 9, 20, 60]),
            seed=draw.randrange(99),
        )
        how: dict[str, Any] = {"priority": draw.choice([0, 0, 0, -1, 1])}
        method = draw.choice([None, *methods])
        how |= {"speculate": False} if method is None else {"method": method, "max_draft": draw.choice([None, None, 1])}
        cancel = draw.randrange(25) if index % 3 == 0 else None
        pause = draw.randrange(12) if draw.random() < 0.1 else None
        made.append(Request(prompt, params, how, cancel, pause))
    return made


def soak(engine: Engine, todo: list[Request], seed: int, at_idle: Callable[[], None]) -> int:
    """Serve all requests, ``CONCURRENCY`` at a time; returns how many were cancelled before their end."""
    draw = random.Random(seed)
    waiting, active, paused, cancelled = list(reversed(todo)), [], [], 0
    served = 0
    while waiting or active:
        # An idle moment comes after each burst.
        while waiting and len(active) < CONCURRENCY and served < BURST:
            request = waiting.pop()
            request.jobs = engine.add(request.prompt, request.params, **request.how)
            active.append(request)
            served += 1
        engine.step()
        for job in [job for job in paused if job.finish is not None or draw.random() < 0.3]:
            paused.remove(job)
            if job.finish is None:
                engine.resume(job)
        for request in active:
            request.age += 1
            for job in request.jobs:
                if job.finish is None and job not in paused:
                    if request.cancel_after is not None and request.age > request.cancel_after:
                        engine.abort(job)
                        cancelled += 1
                    elif request.pause_after == request.age:
                        engine.pause(job)
                        paused.append(job)
        active = [request for request in active if any(job.finish is None for job in request.jobs)]
        if not active:
            engine.check()
            assert not engine.jobs
            served = 0
            at_idle()
    return cancelled


def compare(alone: Engine, todo: list[Request]) -> int:
    """Every answer against decoding the request alone and plainly; a cancelled one got a part of it."""
    finished = 0
    for request in todo:
        wanted = alone.add(request.prompt, request.params, speculate=False)
        while alone.busy:
            alone.step()
        for job, lone in zip(request.jobs, wanted, strict=True):
            if job.finish.reason == "abort":
                assert job.output_ids == lone.output_ids[: len(job.output_ids)]
                continue
            finished += 1
            assert job.output_ids == lone.output_ids
            assert (job.finish, job.text) == (lone.finish, lone.text)
            assert job.logprobs == lone.logprobs
            assert job.prompt_logprobs == lone.prompt_logprobs
    return finished


def serve(
    alone: Engine, drafters: list[dict[str, Any]], count: int, seed: int, num_pages: int, **options: Any
) -> Engine:
    """A soak of ``count`` requests on an engine with ``num_pages`` pages; everything that must hold is checked."""
    config = EngineConfig(
        **{
            "max_model_len": LONGEST,
            "page_size": PAGE_SIZE,
            "num_pages": num_pages,
            "max_num_seqs": CONCURRENCY,
            **options,
        }
    )
    engine = Engine(alone.model, alone.tokenizer, config, [SpeculativeConfig.parse(keys) for keys in drafters])
    assert engine.identity
    todo = requests(count, alone.model.info.vocab_size, [keys["method"] for keys in drafters], seed)
    sizes: list[int] = []

    def measure() -> None:
        gc.collect()
        sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)

    cancelled = soak(engine, todo, seed, measure)
    assert cancelled > count // 10
    assert compare(alone, todo) > count // 2
    if len(sizes) > 3:
        assert sizes[-1] - sizes[1] < 48 << 20, f"resident bytes at idle moments: {sizes}"
    for drafter in engine.router.drafters.values():
        assert not any(drafter.cached_tokens(job.sequence) for request in todo for job in request.jobs)
    assert not engine.router.failures
    assert all(job.metrics.draft_error is None for request in todo for job in request.jobs)
    return engine


def test_soak(engine: Callable[..., Engine], tiny_draft: str) -> None:
    drafters = [
        {"method": "draft_model", "model": tiny_draft},
        {"method": "ngram"},
        {"method": "suffix"},
        {"method": "staged", "model": tiny_draft, "num_speculative_tokens": 3},
    ]
    soaked = serve(engine(max_num_seqs=1, max_model_len=LONGEST), drafters, 90, seed=1, num_pages=40)
    stats = soaked.stats
    assert stats.preemptions > 20
    assert 0 < stats.prefix_hits < stats.prefix_queries
    assert stats.num_accepted_tokens > 50


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_soak_of_the_bundled_pair() -> None:
    alone = LLM(dtype="float32", invariant=True, max_num_seqs=1, max_model_len=LONGEST).engine
    draft = pretrained.path("draft")
    drafters = [
        {"method": "draft_model", "model": str(draft)},
        {"method": "ngram"},
        {"method": "suffix"},
        {"method": "prompt_lookup"},
        {"method": "staged", "model": str(draft), "num_speculative_tokens": 3},
    ]
    soaked = serve(alone, drafters, 2000, seed=2, num_pages=56)
    assert soaked.stats.preemptions > 500

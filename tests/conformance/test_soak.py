"""Many requests of every kind at once on too few pages: all of them get the tokens of decoding them alone.

Nothing here depends on time: requests are cancelled and set aside after so many of their rounds, and the engine is told
how many prompt tokens to read in a round, so that a run preempts and evicts exactly what the one before it did.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from drafting import MIXED
from forerun import SamplingParams
from forerun.engine.config import EngineConfig, SpeculativeConfig
from forerun.engine.engine import Engine
from forerun.engine.jobs import Job
from forerun.engine.stop import ABORT

CONCURRENCY = 32
PAGE_SIZE = 8
LONGEST = 160
NOISE_ROWS = 256
"""Kept by each engine: what is remembered is bounded."""
PROMPT_TOKENS = 24
"""Read beside decoding requests, per round."""
CHOSEN = 0.37
"""Of all requests: those that are to be cancelled. Some of them end before their turn comes."""
CANCELLED = 0.3
"""Of all requests: those that are cancelled while they run or wait, at least."""

OPTIONS = [*MIXED, {"temperature": 0.6, "ignore_eos": False, "logprobs": 1}, {"temperature": 0.5, "prompt_logprobs": 0}]


@dataclass
class Request:
    """One request of the soak, what becomes of it, and its jobs."""

    prompt: list[int]
    params: SamplingParams
    how: dict[str, Any]
    cancel_after: tuple[int, int] | None
    """Rounds, and tokens of an answer, after which it is cancelled, whichever come first."""
    pause_after: int | None
    jobs: list[Job] = field(default_factory=list)
    age: int = 0

    @property
    def unfinished(self):
        return [job for job in self.jobs if job.finish is None]

    @property
    def cancelled(self):
        return any(job.finish is not None and job.finish.reason == ABORT for job in self.jobs)

    @property
    def to_cancel(self):
        """Whether its turn has come."""
        if self.cancel_after is None:
            return False
        rounds, tokens = self.cancel_after
        return self.age > rounds or any(job.sequence.num_output >= tokens for job in self.jobs)


def requests(count, vocab_size, methods, seed, options):
    """Mixed lengths, options, drafters and priorities; many prompts begin alike; some are to be cancelled, in one of
    their first rounds, in which they may still wait or read, or somewhere within their answer."""
    draw = random.Random(seed)
    stems = [[draw.randrange(2, vocab_size) for _ in range(length)] for length in (9, 24, 40, 70)]
    chosen = set(draw.sample(range(count), round(CHOSEN * count)))
    made = []
    for index in range(count):
        stem = draw.choice([[], [], *stems])
        rest = [draw.randrange(2, vocab_size) for _ in range(draw.choice([1, 2, 5, 17, 40]))]
        prompt = (stem + rest)[: draw.choice([4, 32, 90, 90])]
        params = SamplingParams(
            **{"ignore_eos": True, **draw.choice(options)},
            max_tokens=draw.choice([3, 9, 20, 60]),
            seed=draw.randrange(99),
        )
        how = {"priority": draw.choice([0, 0, 0, -1, 1])}
        method = draw.choice([None, *methods])
        how |= {"speculate": False} if method is None else {"method": method, "max_draft": draw.choice([None, None, 1])}
        cancel = (draw.randrange(60), draw.randrange(1, params.max_tokens)) if index in chosen else None
        pause = draw.randrange(12) if draw.random() < 0.1 else None
        made.append(Request(prompt, params, how, cancel, pause))
    return made


def soak(engine, todo, seed):
    """Serve all requests, ``CONCURRENCY`` at a time, until the engine is idle."""
    draw = random.Random(seed)
    waiting, active, paused = list(reversed(todo)), [], []
    while waiting or active:
        while waiting and len(active) < CONCURRENCY:
            request = waiting.pop()
            request.jobs = engine.add(request.prompt, request.params, **request.how)
            active.append(request)
        engine.step()
        for job in [job for job in paused if job.finish is not None or draw.random() < 0.3]:
            paused.remove(job)
            if job.finish is None:
                engine.resume(job)
        for request in active:
            request.age += 1
            for job in request.unfinished:
                if request.to_cancel:
                    engine.abort(job)
                elif request.pause_after == request.age:
                    engine.pause(job)
                    paused.append(job)
        active = [request for request in active if request.unfinished]


def compare(alone, todo):
    """Every answer against decoding the request alone and plainly; a cancelled one got a part of it. Returns how many
    were not cancelled."""
    finished = 0
    for request in todo:
        expected = alone.add(request.prompt, request.params, speculate=False)
        while alone.busy:
            alone.step()
        for job, lone in zip(request.jobs, expected, strict=True):
            assert job.metrics.draft_error is None
            if job.finish.reason == ABORT:
                assert job.output_ids == lone.output_ids[: len(job.output_ids)]
                continue
            finished += 1
            assert job.output_ids == lone.output_ids
            assert (job.finish, job.text) == (lone.finish, lone.text)
            assert job.logprobs == lone.logprobs
            assert job.prompt_logprobs == lone.prompt_logprobs
    return finished


def serve(alone, drafters, bursts, size, seed, num_pages, options):
    """Bursts of ``size`` requests, between which the engine is idle, on ``num_pages`` pages. Everything that must hold
    is checked."""
    config = EngineConfig(
        max_model_len=LONGEST, page_size=PAGE_SIZE, num_pages=num_pages, max_num_seqs=CONCURRENCY,
        max_prefill_tokens=PROMPT_TOKENS,
    )  # fmt: skip
    engine = Engine(alone.model, alone.tokenizer, config, SpeculativeConfig.parse_all(drafters))
    assert engine.identity
    alone.sampler.noise.capacity = engine.sampler.noise.capacity = NOISE_ROWS
    methods = [keys["method"] for keys in drafters]
    cancelled = finished = 0
    for burst in range(bursts):
        todo = requests(size, alone.model.info.vocab_size, methods, seed + burst, options)
        soak(engine, todo, seed + burst)
        engine.check()
        assert not engine.jobs
        assert not engine.router.failures
        for drafter in engine.router.drafters.values():
            assert not any(drafter.cached_tokens(job.sequence) for request in todo for job in request.jobs)
        finished += compare(alone, todo)
        cancelled += sum(request.cancelled for request in todo)
    assert cancelled >= CANCELLED * bursts * size
    assert finished > bursts * size // 2
    return engine.stats


def test_soak(engine, tiny_draft):
    drafters = [
        {"method": "draft_model", "model": tiny_draft, "num_speculative_tokens": 3},
        {"method": "ngram"},
        {"method": "suffix"},
        {"method": "staged", "model": tiny_draft, "num_speculative_tokens": 3},
    ]
    alone = engine(max_num_seqs=1, max_model_len=LONGEST)
    stats = serve(alone, drafters, bursts=2, size=45, seed=1, num_pages=40, options=OPTIONS)
    assert stats.preemptions > 20
    assert 0 < stats.prefix_hits < stats.prefix_queries
    assert stats.num_accepted_tokens > 50

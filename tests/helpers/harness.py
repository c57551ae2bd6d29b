"""One set of requests, and engines that must all answer it alike."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from forerun import SamplingParams, StructuredOutputsParams
from forerun.speculate.length.adaptive import Adaptive
from tiny import ALPHABET

TOKENS = 64
LONGEST = 112
"""``max_model_len``: the longest prompt meets it before its 64 tokens are out."""

PROMPTS = (
    "hello world, hello world, hello", "def parse(text):\n    return ", "a", "0123456789" * 6,
    "the cat sat on the mat; the cat sat",
)  # fmt: skip


def options(**given):
    return SamplingParams(**{"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.0, "seed": 5, **given})


PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
BIAS = {"logit_bias": {40: 1.5, 41: -100.0, 3: 2.0}}
STOPS = {"stop": ["/e/[", "@@@@", "2"], "min_tokens": 3}
STOP_TOKEN = {"stop_token_ids": [ALPHABET.index("*")]}
GRAMMAR = {"structured_outputs": StructuredOutputsParams(regex="(def|for) parse[(]text[)]: return [a-z]{40}")}
EOS_SOON = {"ignore_eos": False, "logit_bias": {0: 3.0}, "min_tokens": 3}

GREEDY = [options(), options(**PENALTIES, **BIAS), options(**STOPS), options(**EOS_SOON), options(top_k=5, top_p=0.9)]
SAMPLED = [
    options(temperature=0.8),
    options(temperature=0.8, top_k=20, top_p=0.9),
    options(temperature=0.8, min_p=0.05, **PENALTIES, bad_words=["e", "at"]),
    options(temperature=0.8, **STOPS, **BIAS),
    options(temperature=0.8, **EOS_SOON, top_p=0.95, max_tokens=None, n=2),
]
# Every prompt at T = 0 and at T = 0.8, each time with other options.
REQUESTS = [
    *zip(PROMPTS, GREEDY), *zip(PROMPTS, SAMPLED), (PROMPTS[3], options()), (PROMPTS[2], options(**STOP_TOKEN)),
    (PROMPTS[2], options(temperature=0.8, **GRAMMAR)),
]  # fmt: skip
# For what does not depend on the options: fewer and shorter.
SHORT = [(prompt, replace(params, max_tokens=24)) for prompt, params in (REQUESTS[i] for i in (0, 2, 3, 5, 6, 9, -1))]
FREE = [
    (prompt, options(temperature=temperature, max_tokens=40)) for prompt in PROMPTS[:3] for temperature in (0.0, 0.8)
]
SETS = {"all": REQUESTS, "short": SHORT, "free": FREE}


class Answer(NamedTuple):
    tokens: list[int]
    text: str
    reason: str | None
    stopped_by: str | int | None


def run(engine, requests=REQUESTS, each_round=lambda: None):
    """Answer all requests; every round and the idle engine are checked."""
    jobs = []
    for prompt, params in requests:
        jobs.extend(engine.add(engine.tokenizer.encode(prompt), params))
    while engine.busy:
        engine.step()
        check_drafters(engine)
        each_round()
    check_idle(engine, jobs)
    return jobs


def until_idle(engine):
    """Answer all that has been asked for."""
    while engine.busy:
        engine.step()


def set_prices(engine, price):
    """A verification costs 1 whatever its rows, and a drafted token ``price()``. Measured prices of tiny models seldom
    let ``adaptive`` draft, and differ from run to run."""
    if isinstance(engine.policy, Adaptive):
        engine.policy.prices.verify = lambda table, rows, sequences, experts=0: 1.0
        engine.policy.prices.draft = lambda table, method, depth: price() * depth


def answers(jobs):
    result = []
    for job in jobs:
        assert job.finish is not None
        result.append(Answer(job.output_ids, job.text, job.finish.reason, job.finish.stopped_by))
    return result


def check_drafters(engine):
    """What a drafter has state for is a prefix of the committed tokens."""
    for drafter in engine.router.drafters.values():
        for job in engine.jobs.values():
            known = drafter.cached_tokens(job.sequence)
            assert known is None or known == job.sequence.tokens[: len(known)]
        for pool in drafter.pools():
            for job in engine.jobs.values():
                assert pool.length(job.sequence.id) <= len(job.sequence.tokens)


def check_idle(engine, jobs):
    """Nothing is left of finished requests."""
    engine.check()
    assert not engine.jobs
    for drafter in engine.router.drafters.values():
        for job in jobs:
            assert not drafter.cached_tokens(job.sequence)
        assert kept(drafter, {job.sequence.id for job in jobs}) == []
        for pool in drafter.pools():
            assert not pool.block_tables
            pool.check()
    for job in jobs:
        check_metrics(job)


def kept(part, ids, seen=()):
    """Names of what still belongs to one of the sequences ``ids`` in a drafter and the drafters inside it. A table with
    larger keys is one by token."""
    result, known = [], range(-1, max(ids, default=0) + 1)
    for name, value in vars(part).items():
        for holder in value if isinstance(value, list | tuple) else [value]:
            if isinstance(holder, dict) and ids & set(holder) and all(key in known for key in holder):
                result.append(name)
            if name in ("base", "inner", "policy") and id(holder) not in seen:
                result += kept(holder, ids, (*seen, id(holder)))
    return result + [
        f"pages of {key}" for pool in getattr(part, "pools", list)() for key in pool.block_tables if key in ids
    ]


def check_metrics(job):
    """The counts that must agree whatever was drafted."""
    metrics = job.metrics
    histogram = metrics.acceptance_histogram
    assert sum(histogram) == metrics.num_drafts <= metrics.rounds
    assert sum(length * count for length, count in enumerate(histogram)) == metrics.num_accepted_draft_tokens
    assert metrics.num_accepted_draft_tokens <= metrics.num_draft_tokens
    assert metrics.num_accepted_draft_tokens <= metrics.matched <= metrics.tested
    assert 0.0 <= metrics.overlap <= metrics.tested * (1 + 1e-6)
    assert metrics.decode_tokens <= metrics.rounds + metrics.num_accepted_draft_tokens
    assert metrics.decode_tokens <= len(job.output_ids)

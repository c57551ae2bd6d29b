"""Hundreds of requests of every kind over HTTP at once, on too few pages: every answer is that of decoding it alone and
plainly, whoever hangs up meanwhile.

``tests/conformance/test_soak.py`` does the same to the engine alone, without a clock. Here time decides who shares a
round with whom and how far an answer has got when its reader leaves.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from running import run_server, wait_idle

from drafting import MIXED
from forerun import LLM, SamplingParams, StructuredOutputsParams
from forerun.cache.prefix import PrefixTree
from held import held

CONCURRENCY = 32
LONGEST = 208
POOL = {"page_size": 4, "num_pages": 92}
NOISE_ROWS = 256
"""Kept by each engine: what is remembered is bounded, and should be full before memory is looked at."""
CHOSEN = 0.42
"""Of all requests: those whose readers are to leave. Some have their answer by then."""
LEFT = 0.3
"""Of all answers: those that are cancelled because their readers have left, at least."""
LONG = 80
"""Tokens of an answer that is to be left."""
SPENT = 0.5
"""Of those tokens, as many may have been made: an answer whose reader has left ends there."""
OBJECTS = 0.5
"""Python objects per request by which an idle server may grow: one that is left behind per request is a leak."""
FEW_OBJECTS = 5.0
"""The same while caches fill: a request that is left behind is more."""
BYTES = 2048
"""Bytes per request, likewise: resident ones, and those that malloc has handed out."""
DRAFTERS = [
    {"method": "draft_model"},
    {"method": "ngram"},
    {"method": "suffix", "suffix_decoding_max_cached_requests": 20},
    {"method": "staged", "num_speculative_tokens": 3},
    {"method": "pattern"},
]
OPTIONS = [*MIXED, {"temperature": 0.6, "ignore_eos": False}, {
    "temperature": 0.7, "structured_outputs": {"regex": "[a-z ]{2,12}(ab|cd)?"},
}]  # fmt: skip
WORDS = [
    "def", "parse(", "value,", "self):", "\n    return", "if not", "x = None", "[", "]", "the", "é", "一", "import os",
]  # fmt: skip


@dataclass
class Request:
    """One request of the soak, and what its reader got."""

    path: str
    body: dict[str, Any]
    prompt: list[int]
    params: SamplingParams
    method: str | None
    events: int | None = None
    """After so many the reader leaves."""
    patience: float | None = None
    """Seconds after which a reader leaves who is not sent events."""
    answered: bool = False
    texts: list[str] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    ends: list[tuple[str, Any] | None] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    told: dict[str, Any] | None = None

    def __post_init__(self):
        self.texts = [""] * self.params.n
        self.logprobs = [[] for _ in self.texts]
        self.ends = [None] * self.params.n

    def take(self, reply):
        """A whole answer, or an event."""
        for choice in reply["choices"]:
            index = choice["index"]
            chat = choice.get("message") or choice.get("delta")
            self.texts[index] += chat["content"] if chat is not None else choice["text"]
            listed = choice["logprobs"]
            if listed is not None:
                items = listed.get("content")
                values = [item["logprob"] for item in items] if items is not None else listed["token_logprobs"]
                self.logprobs[index] += values
            if choice["finish_reason"] is not None:
                self.ends[index] = choice["finish_reason"], choice["stop_reason"]
        if reply.get("metrics") is not None:
            self.usage, self.told = reply["usage"], reply["metrics"]["speculative_decoding"]


def words(draw, count):
    return " ".join(draw.choice(WORDS) for _ in range(count))


def requests(count, tokenizer, seed):
    """Mixed lengths, options, drafters, endpoints and priorities; many prompts begin alike."""
    draw = random.Random(seed)
    stems = [words(draw, length) for length in (5, 12, 25)]
    chosen = set(draw.sample(range(count), round(CHOSEN * count)))
    made = []
    for index in range(count):
        text = draw.choice(["", "", *stems]) + words(draw, draw.choice([1, 3, 9, 20]))
        options = draw.choice(OPTIONS)
        stream = draw.random() < 0.5
        body = {"ignore_eos": True, **options, "seed": draw.randrange(99), "priority": draw.choice([0, 0, -1, 1])}
        body |= {"max_tokens": draw.choice([3, 9, 20, 40]), "stream": stream}
        leaves = {}
        if index in chosen:
            body |= {"max_tokens": LONG, "ignore_eos": True, "n": 1}
            body = {
                key: value for key, value in body.items() if key not in ("stop", "min_tokens", "structured_outputs")
            }
            stream = body["stream"] = draw.random() < 0.8
            leaves = {"events": draw.randrange(12)} if stream else {"patience": 0.3 * draw.random()}
        if stream:
            body["stream_options"] = {"include_usage": True}
        method = draw.choice([None, *(keys["method"] for keys in DRAFTERS)])
        body["speculative"] = {"enabled": method is not None}
        if method is not None:
            body["speculative"] |= {"method": method, "num_speculative_tokens": draw.choice([None, None, 1])}
        made.append(request(draw, tokenizer, text, body, method, leaves))
    return made


def request(draw, tokenizer, text, body, method, leaves):
    """As a chat, a text or token ids; ``Request.prompt`` is what the model should read."""
    names = set(SamplingParams.__dataclass_fields__)
    options = {key: value for key, value in body.items() if key in names}
    if "structured_outputs" in options:
        options["structured_outputs"] = StructuredOutputsParams(**options["structured_outputs"])
    listed = draw.random() < 0.4
    params = SamplingParams(**options, logprobs=0 if listed else None)
    if draw.random() < 0.4:
        ids = tokenizer.encode(f"<system>brief\n<user>{text}\n<assistant>", add_special_tokens=False)
        messages = [{"role": "system", "content": "brief"}, {"role": "user", "content": text}]
        chat = {**body, "messages": messages, "logprobs": listed}
        return Request("/v1/chat/completions", chat, ids, params, method, **leaves)
    ids = tokenizer.encode(text)
    completion = {**body, "prompt": draw.choice([text, ids])}
    if listed:
        completion["logprobs"] = 0
    return Request("/v1/completions", completion, ids, params, method, **leaves)


async def ask(http, request):
    """Read an answer, or leave in the midst of it."""
    if not request.body["stream"]:
        try:
            async with asyncio.timeout(request.patience):
                response = await http.post(request.path, json=request.body)
        except TimeoutError:
            return
        assert response.status_code == 200, response.text
        request.take(response.json())
        request.answered = True
        return
    seen = 0
    async with http.stream("POST", request.path, json=request.body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line:
                continue
            if line == "data: [DONE]":
                request.answered = True
                continue
            if seen == request.events:
                return
            seen += 1
            request.take(json.loads(line.removeprefix("data: ")))


async def ask_all(url, todo):
    """``CONCURRENCY`` at a time."""
    waiting = iter(todo)
    async with httpx2.AsyncClient(base_url=url, timeout=240) as http:

        async def reader():
            for request in waiting:
                await ask(http, request)

        await asyncio.gather(*(reader() for _ in range(CONCURRENCY)))


def decode(alone, request):
    """The request's answers, decoded alone and plainly, as far as its reader got."""
    jobs = alone.add(request.prompt, request.params, speculate=False)

    def expected(job):
        return request.answered or len(job.text) < len(request.texts[job.index])

    while any(job.finish is None and expected(job) for job in jobs):
        alone.step()
    return jobs


def compare(alone, request):
    jobs = decode(alone, request)
    for job, text, end, logprobs in zip(jobs, request.texts, request.ends, request.logprobs, strict=True):
        expected = [item.logprob for item in job.logprobs]
        assert logprobs == expected[: len(logprobs)]
        if not request.answered:
            assert job.text.startswith(text)
            continue
        assert (text, end) == (job.text, (job.finish.reason, job.finish.stopped_by))
        if request.params.logprobs is not None and job.finish.cut is None:
            assert len(logprobs) == len(expected)
    if request.answered:
        assert request.usage["completion_tokens"] == sum(len(job.output_ids) for job in jobs)
        assert request.usage["prompt_tokens"] == len(request.prompt)
        assert request.told["method"] == request.method
        assert request.told["identical_to_plain_decoding"] is True
        assert request.told["draft_error"] is None
    for job in jobs:
        alone.abort(job)


def samples(server):
    """/metrics: (name, reason if it has one) -> value."""
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    return {
        (sample.name.removeprefix("forerun:"), sample.labels.get("finished_reason")): sample.value
        for family in families
        for sample in family.samples
    }


@dataclass
class Tally:
    """What readers know of all requests."""

    answers: int = 0
    answered: int = 0
    tokens: int = 0
    """Of what was answered."""
    left: int = 0
    unknown: int = 0
    """Left, perhaps before the engine knew of them."""

    def add(self, todo):
        stayed = [request for request in todo if request.answered]
        self.answers += sum(request.params.n for request in todo)
        self.answered += sum(request.params.n for request in stayed)
        self.tokens += sum(request.usage["completion_tokens"] for request in stayed)
        self.left += len(todo) - len(stayed)
        self.unknown += sum(not request.answered and not request.body["stream"] for request in todo)

    def check(self, server):
        """What the server says of itself, when it is idle."""
        metrics = samples(server)
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert metrics[gauge, None] == 0
        ended = {reason: metrics["request_success_total", reason] for reason in ("stop", "length", "error", "abort")}
        assert ended["error"] == 0
        assert self.answers - self.unknown <= sum(ended.values()) <= self.answers
        assert ended["stop"] + ended["length"] >= self.answered
        assert ended["abort"] >= LEFT * self.answers
        assert metrics["generation_tokens_total", None] - self.tokens < SPENT * LONG * self.left


def name_all(server, vocab_size):
    """Have every token named once, as names are remembered; returns how many requests that took."""
    size = LONGEST - 1
    starts = range(0, vocab_size, size)
    for start in starts:
        prompt = list(range(start, min(start + size, vocab_size)))
        body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0}
        assert server.post("/v1/completions", body).status_code == 200
    return len(starts)


def soak(alone, served, bursts, size, seed, *, named=False):
    """Bursts of ``size`` requests, between which the server is idle. Everything that must hold is checked; the result
    is what was ``held`` after each burst. ``named``: all tokens are named before."""
    alone.sampler.noise.capacity = served.engine.sampler.noise.capacity = NOISE_ROWS
    assert served.engine.identity
    sizes = []
    tally = Tally()
    with run_server(served) as server:
        if named:
            count = name_all(server, alone.model.info.vocab_size)
            tally = Tally(answers=count, answered=count, tokens=count)
        for burst in range(bursts):
            todo = requests(size, alone.tokenizer, seed + burst)
            asyncio.run(ask_all(server.url, todo))
            wait_idle(server)
            served.engine.check()
            for drafter in served.engine.router.drafters.values():
                assert not any(pool.block_tables for pool in drafter.pools())
            for request in todo:
                compare(alone, request)
            tally.add(todo)
            del todo
            sizes.append(held())
        tally.check(server)
    return sizes


@pytest.fixture
def evicted(monkeypatch):
    """Counts of pages that prefix trees gave back."""
    counts = []
    evict = PrefixTree.evict

    def counting(tree, count):
        before = len(tree.lru)
        evict(tree, count)
        counts.append(before - len(tree.lru))

    monkeypatch.setattr(PrefixTree, "evict", counting)
    return counts


@pytest.fixture(scope="module")
def alone():
    return LLM(dtype="float32", invariant=True, max_num_seqs=1, max_model_len=LONGEST).engine


def server_of(length):
    """The bundled pair behind every drafter of ``DRAFTERS``."""
    drafters = [{**keys, "length": length} for keys in DRAFTERS]
    options = {"dtype": "float32", "invariant": True, "max_num_seqs": CONCURRENCY, "max_model_len": LONGEST}
    return LLM(speculative_config=drafters, **options, **POOL)


def test_soak_over_http(alone, evicted):
    served = server_of("fixed")
    sizes = soak(alone, served, bursts=2, size=125, seed=1)
    stats = served.engine.stats
    assert stats.preemptions > 20
    assert sum(evicted) > 100
    assert 0 < stats.prefix_hits < stats.prefix_queries
    assert stats.num_accepted_tokens > 50
    assert sizes[-1].growth(sizes[0], 125).objects < FEW_OBJECTS


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("length", ["fixed", "adaptive"])
def test_2000_requests_over_http(length, alone, evicted):
    """What is held must be flat once what is remembered (noise rows, past answers of a drafter) is full."""
    served, size = server_of(length), 200
    sizes = soak(alone, served, bursts=10, size=size, seed=2, named=True)
    stats = served.engine.stats
    growth = sizes[-1].growth(sizes[4], size * 5)
    print(f"{length}: {stats.preemptions} preemptions, {sum(evicted)} pages evicted; when idle: {sizes}; {growth}")
    assert stats.preemptions > 100
    assert sum(evicted) > 1000
    assert 0 < stats.prefix_hits < stats.prefix_queries
    assert stats.num_accepted_tokens > 50
    assert growth.objects < OBJECTS
    assert growth.allocated < BYTES
    assert growth.resident < BYTES

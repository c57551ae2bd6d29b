"""Replicas behind one API, two engines in this process: what is lost in the middle goes on elsewhere, to the token."""

import asyncio
import itertools
import random
from contextlib import aclosing
from dataclasses import replace

import pytest
from running import TEMPLATE, in_loop, until

from forerun import LLM, BeamSearchParams, SamplingParams
from forerun.core.errors import ConfigError
from forerun.engine.metrics import EngineStats, Snapshot
from forerun.sampling.noise import fold
from forerun.scale import pool as pools
from forerun.scale.pool import LostError, ReplicaPool
from forerun.scale.replica import Progress, Replica, check_same
from forerun.serve.app import ServerOptions, create_app
from forerun.serve.batch import in_process

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def replicas(model_folder):
    engine = {"model": str(model_folder), "max_num_seqs": 4, "page_size": 16}
    result = [Replica(engine, [{"method": "ngram"}, {"method": "pattern"}]) for _ in range(2)]
    yield result
    for replica in result:
        replica.engine.close()
        replica.engine.engine.check()


class Lossy:
    """Gives requests to the replicas in turn, and loses them: behind so many tokens as ``lives`` says, one number for
    each time; -1: before the replica says anything."""

    def __init__(self, replicas, lives):
        self.turn = itertools.cycle(replicas)
        self.lives = lives
        self.requests = []
        self.lost = 0

    async def send(self, request):
        self.requests.append(request)
        left = next(self.lives)
        async with aclosing(next(self.turn).answer(request)) as messages:
            async for message in messages:
                given = sum(len(delta.token_ids) for delta in message.deltas) if isinstance(message, Progress) else 0
                if left < 0 or (given and given > left):
                    self.lost += 1
                    searches = isinstance(request.params, BeamSearchParams)  # beams come in one message
                    if isinstance(message, Progress) and not searches and (rest := cut(message.deltas, left)):
                        yield Progress(rest, prompt_logprobs=message.prompt_logprobs)
                    raise LostError("killed by the test")
                left -= given
                yield message


def cut(deltas, left):
    """The first ``left`` tokens; a traced round only whole."""
    kept = []
    for delta in deltas:
        if len(delta.token_ids) > left:
            if left > 0 and delta.round is None:
                kept.append(
                    replace(delta, token_ids=delta.token_ids[:left], logprobs=delta.logprobs[:left], finish=None)
                )
            break
        kept.append(delta)
        left -= len(delta.token_ids)
    return kept


FOREVER = itertools.repeat(10**9)


@pytest.fixture
def asked(replicas, monkeypatch):
    """``asked(lives)``: a way to ask the API of a pool that loses requests so."""
    monkeypatch.setattr(pools, "WAIT", 0.0)

    def make(lives=FOREVER):
        lossy = Lossy(replicas, lives)
        pool = ReplicaPool(replicas[0].facts, lossy.send, capacity=lambda: 8)
        return (
            in_process(create_app(pool, ServerOptions(served_model_name="tiny", chat_template=TEMPLATE))),
            lossy,
            pool,
        )

    return make


CASES = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 3, "temperature": 0.9},
    "several": {"seed": 4, "temperature": 1.0, "n": 3},
    "penalties": {"seed": 5, "temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "probabilities": {"seed": 6, "temperature": 0.8, "logprobs": 2},
    "a grammar": {"seed": 7, "temperature": 0.8, "structured_outputs": {"regex": "(ab|cd|ef){4,12}"}},
    "traced": {"seed": 8, "temperature": 0.5, "speculative": {"trace": True}},
    "plain": {"seed": 9, "temperature": 0.5, "speculative": {"enabled": False}},
    "pattern": {"seed": 9, "temperature": 0.5, "speculative": {"method": "pattern"}},
}


def shown(status, body):
    assert status == 200, body
    return [{key: value for key, value in choice.items() if key != "trace"} for choice in body["choices"]]


@pytest.mark.parametrize("case", CASES)
@in_loop
async def test_what_is_lost_goes_on_with_the_same_tokens(asked, case):
    """Before the replica says anything, before the first token, in the middle."""
    body = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True, **CASES[case]}
    undisturbed = shown(*await asked()[0]("/v1/completions", body))
    lost = 0
    for life in range(-1, 11, 4):
        ask, lossy, pool = asked(itertools.chain([life, life + 1, 1], FOREVER))
        assert shown(*await ask("/v1/completions", body)) == undisturbed
        assert pool.moved == lossy.lost
        lost += lossy.lost
    assert lost >= 3


@in_loop
async def test_it_is_the_answer_of_one_engine(asked, served, plain):
    params = SamplingParams(max_tokens=30, temperature=0.9, seed=11, ignore_eos=True)
    stopped = replace(params, stop=[plain({"prompt_token_ids": PROMPT}, params).text[20:24]])
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0.9, "seed": 11, "ignore_eos": True}
    for given, rest in ((params, {}), (stopped, {"stop": stopped.stop})):
        one = plain({"prompt_token_ids": PROMPT}, given)
        (answer,) = shown(*await asked(itertools.chain([5, 3], FOREVER))[0]("/v1/completions", body | rest))
        assert (answer["text"], answer["finish_reason"]) == (one.text, one.finish_reason)


def test_who_names_no_seed_gets_one_first(asked, plain):
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 1.0, "n": 2, "ignore_eos": True}
    ask, lossy, _ = asked(itertools.chain([3, 4, 2], FOREVER))
    choices = shown(*asyncio.run(ask("/v1/completions", body)))
    assert lossy.lost == 3
    seeds = {request.params.seed for request in lossy.requests}
    first = lossy.requests[0].params.seed
    assert seeds == {first, fold(first, 1)}
    for choice, seed in zip(choices, (first, fold(first, 1))):
        alone = SamplingParams(max_tokens=20, temperature=1.0, seed=seed, ignore_eos=True)
        assert choice["text"] == plain({"prompt_token_ids": PROMPT}, alone).text
    assert choices[0]["text"] != choices[1]["text"]


@in_loop
async def test_a_stream_repeats_nothing(asked, plain):
    """At the engine's side of the API, where a stream's pieces can be counted."""
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=2, ignore_eos=True)
    one = plain({"prompt_token_ids": PROMPT}, params)
    draw = random.Random(0)
    lives = itertools.chain((draw.randrange(2, 6) for _ in range(8)), FOREVER)
    _, lossy, pool = asked(lives)
    deltas = [delta async for delta in await pool.submit(PROMPT, params)]
    assert [token for delta in deltas for token in delta.token_ids] == list(one.token_ids)
    assert "".join(delta.text for delta in deltas) == one.text
    assert lossy.lost == 8
    assert not pool.streams
    assert not pool._tasks


def test_a_request_that_ends_every_replica_fails(asked, replicas):
    ask, lossy, pool = asked(itertools.repeat(-1))
    status, _ = asyncio.run(ask("/v1/completions", {"prompt": PROMPT}))
    assert (status, lossy.lost) == (503, pools.MAX_MOVES + 1)  # none is there: another time it may be answered
    lossy.lost, pool.latest = 0, replicas[0].engine.snapshot()
    status, body = asyncio.run(ask("/v1/completions", {"prompt": PROMPT}))
    assert (status, lossy.lost) == (400, pools.MAX_MOVES + 1)
    assert "replicas ended while they had this request" in body["error"]["message"]
    assert not pool.streams


def test_other_weights_do_not_go_on(asked, replicas, monkeypatch):
    facts = replicas[0].facts
    monkeypatch.setattr(replicas[1], "facts", replace(facts, weights=f"{facts.checkpoint}-other"))
    body = {"prompt": PROMPT, "max_tokens": 20, "seed": 1, "ignore_eos": True}
    undisturbed = shown(*asyncio.run(asked()[0]("/v1/completions", body)))
    ask, lossy, _ = asked(itertools.chain([4], FOREVER))
    assert shown(*asyncio.run(ask("/v1/completions", body))) == undisturbed
    assert [request.weights for request in lossy.requests] == [facts.checkpoint, *[facts.weights] * 2]
    assert [request.rejections for request in lossy.requests] == [0, 0, 1]
    monkeypatch.setattr(pools, "MAX_REJECTIONS", 0)
    status, answer = asyncio.run(asked(itertools.chain([4], FOREVER))[0]("/v1/completions", body))
    assert status == 400
    assert f"replicas have other weights ({facts.checkpoint}-other) than" in answer["error"]["message"]


def test_nothing_said_yet_may_go_on_with_other_weights(asked, replicas, monkeypatch):
    """A replica is lost once it has begun, before its first token: one whose numbers differ answers instead."""
    facts = replicas[0].facts
    monkeypatch.setattr(replicas[1], "facts", replace(facts, weights=f"{facts.checkpoint}-other"))
    ask, lossy, _ = asked(itertools.chain([0], FOREVER))
    shown(*asyncio.run(ask("/v1/completions", {"prompt": PROMPT, "max_tokens": 5, "seed": 1})))
    assert lossy.lost == 1
    assert [(request.weights, request.rejections) for request in lossy.requests] == [(facts.checkpoint, 0)] * 2


def test_another_model_answers_nothing(asked, replicas, monkeypatch):
    """A replica with another version or checkpoint is passed over; where there is no other, that is what is said."""
    right = replicas[0].facts
    monkeypatch.setattr(replicas[0], "facts", replace(right, checkpoint="0.0-x", weights="0.0-x-y"))
    monkeypatch.setattr(pools, "MAX_REJECTIONS", 2)
    ask, lossy, pool = asked()
    pool.facts = right
    shown(*asyncio.run(ask("/v1/completions", {"prompt": PROMPT, "max_tokens": 4})))
    assert len(lossy.requests) == 2
    lossy.turn = itertools.repeat(replicas[0])
    status, answer = asyncio.run(ask("/v1/completions", {"prompt": PROMPT}))
    assert (status, len(lossy.requests)) == (400, 5)
    assert answer["error"]["message"].endswith("deploy one version and one checkpoint")


def test_replicas_are_alike():
    check_same(["0.1-a", "0.1-a"])
    with pytest.raises(ConfigError, match=r"differ in version or checkpoint \(2 of 0.1-a, 1 of 0.2-a\)"):
        check_same(["0.1-a", "0.2-a", "0.1-a"])


@pytest.mark.parametrize("life", [-1, 0, 3])
@in_loop
async def test_beams_are_one_engines(asked, served, life):
    """Whatever is lost of a search, another replica searches again: nothing of it is random, nothing is told twice."""
    params = BeamSearchParams(3, 12, length_penalty=0.5, early_stopping="never", num_return_sequences=2)
    (result,) = served.beam_search([{"prompt_token_ids": PROMPT}], params)
    _, lossy, pool = asked(itertools.chain([life, life], FOREVER))
    stream = await pool.submit(PROMPT, params)
    deltas = [delta async for delta in stream]
    told = [(delta.index, delta.text, delta.finish.reason if delta.finish else None) for delta in deltas]
    answers = [[*sequence.tokens[len(PROMPT) :]] for sequence in result.sequences]
    assert told == [(index, served.tokenizer.decode(ids), "length") for index, ids in enumerate(answers)]
    assert (stream.jobs[1].metrics.num_drafts > 0, lossy.lost) == (True, 2)
    assert all(request.committed == () for request in lossy.requests)
    assert not pool.streams


def test_beams_over_the_api(asked, served):
    (result,) = served.beam_search([{"prompt_token_ids": PROMPT}], BeamSearchParams(3, 12))
    body = {"prompt": PROMPT, "max_tokens": 12, "n": 3, "use_beam_search": True}
    ask, lossy, _ = asked(itertools.chain([2], FOREVER))
    status, answer = asyncio.run(ask("/v1/completions", body))
    texts = [served.tokenizer.decode(sequence.tokens[len(PROMPT) :]) for sequence in result.sequences]
    assert (status, [choice["text"] for choice in answer["choices"]]) == (200, texts)
    assert (lossy.lost, answer["usage"]["completion_tokens"]) == (1, 36)
    status, answer = asyncio.run(asked()[0]("/v1/completions", {**body, "n": 5}))
    assert (status, answer["error"]["param"]) == (400, "beam_width")


@in_loop
async def test_errors_are_the_requests(asked):
    for body, param in (
        ({"prompt": [4096]}, "prompt"),
        ({"prompt": [1] * 600}, "prompt"),
        ({"speculative": {"method": "table"}}, "speculative.method"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ):
        status, answer = await asked()[0]("/v1/completions", {"prompt": PROMPT, **body})
        assert (status, answer["error"]["param"]) == (400, param), answer


@in_loop
async def test_who_leaves_is_forgotten(asked, replicas):
    pool = asked()[2]
    stream = await pool.submit(PROMPT, SamplingParams(max_tokens=400, n=3, ignore_eos=True))
    await stream.read()
    stream.abort()
    engines = [replica.engine for replica in replicas]
    await asyncio.to_thread(until, lambda: not any(each.streams or each.engine.jobs for each in engines))
    assert not pool.streams


def test_snapshots_add_up(replicas):
    one = Snapshot(1, 2, 10, 5, 16, True, EngineStats(rounds=3, accepted_per_pos=[1], by_context={64: [1, 2, 3]}))
    two = Snapshot(3, 0, 30, 30, 16, True, EngineStats(rounds=4, accepted_per_pos=[1, 1], by_context={64: [1, 1, 1]}))
    both = Snapshot.merged([one, two])
    assert (both.running, both.waiting, both.pages, both.usage) == (4, 2, 40, 0.125)
    assert both.stats == EngineStats(rounds=7, accepted_per_pos=[2, 1], by_context={64: [2, 3, 4]})
    assert one.stats.rounds == 3
    assert replicas[0].engine.snapshot().usage == 0


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_an_encoder_reads_its_own_positions(seq2seq, monkeypatch, kind):
    """A source takes no room from the answer, which goes on at another replica behind what it has."""
    monkeypatch.setattr(pools, "WAIT", 0.0)
    llm = LLM(seq2seq(kind))
    longest, room = llm.engine.validator.longest_source, llm.engine.max_model_len
    source = "the cat sat on the mat " * (longest // 23) + "x" * (longest % 23)
    params = SamplingParams(max_tokens=40, temperature=0.9, seed=3, ignore_eos=True)
    one = llm.generate([source], params, use_tqdm=False)[0].outputs[0]
    replica = Replica({"model": seq2seq(kind)})
    lossy = Lossy([replica], itertools.chain([4, 9], FOREVER))
    pool = ReplicaPool(replica.facts, lossy.send, capacity=lambda: 8)
    ask = in_process(create_app(pool, ServerOptions(served_model_name="tiny")))
    body = {"prompt": source, "max_tokens": 40, "temperature": 0.9, "seed": 3, "ignore_eos": True}
    try:
        status, answer = asyncio.run(ask("/v1/completions", body))
        assert (status, answer["choices"][0]["text"], lossy.lost) == (200, one.text, 2)
        assert answer["usage"]["prompt_tokens"] == longest
        status, answer = asyncio.run(ask("/v1/completions", {**body, "prompt": source + "x"}))
        assert (status, answer["error"]["message"]) == (
            400, f"the prompt has {longest + 1} tokens; the encoder reads at most {longest}"
        )  # fmt: skip
        status, answer = asyncio.run(ask("/v1/completions", {**body, "max_tokens": room}))
        assert (status, "together more than" in answer["error"]["message"]) == (400, True)
    finally:
        replica.engine.close()

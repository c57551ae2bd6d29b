"""Encoder-decoders: every drafter that takes them gives the tokens of plain decoding; a source is read once, shared,
and no prefix of another source's answer is reused."""

import random
from itertools import count

import pytest
import torch
from transformers import LlamaForCausalLM

from drafting import fill
from forerun import SamplingParams
from forerun.core.errors import ContextLengthError, RequestError
from forerun.engine.config import EngineConfig, SpeculativeConfig
from forerun.engine.engine import Engine
from forerun.models.formats.tiled import can_tile
from forerun.models.load import load_model
from forerun.models.run.invariance import self_test
from forerun.models.text.tokenizer import load_tokenizer
from forerun.speculate.accept import rules
from harness import BIAS, PENALTIES, answers, check_idle, options, until_idle
from here import NO_KERNELS
from refusals import refused
from tiny import ALPHABET, save_checkpoint, tiny_llama
from tiny_seq2seq import KINDS, POSITIONS, START

pytestmark = [] if can_tile(torch.float32) else [pytest.mark.elsewhere(NO_KERNELS)]

SOURCES = ["hello world, hello world", "a", "0123456789" * 5, "the cat sat on the mat; the cat", "hello worl"]
STOP = {"stop": ["e", "7"], "min_tokens": 3, "max_tokens": 24}
MIXES = [
    {"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.0, **PENALTIES, **BIAS},
    {"temperature": 0.8, "n": 2, "top_k": 20}, {"temperature": 0.7, **STOP, "ignore_eos": False},
]  # fmt: skip
REQUESTS = [(source, options(max_tokens=30).clone(**mix)) for source, mix in zip(SOURCES, MIXES)]
DECODER = "a decoder"
DRAFTING = {
    "draft_model": {}, "tree": {"method": "draft_model", "tree": [3, 2, 1]}, "decoder": {"model": DECODER},
    "decoder tree": {"model": DECODER, "tree_nodes": 6}, "ngram": {}, "prompt_lookup": {"prompt_lookup_min": 1},
    "suffix": {}, "table": {"table_file": __file__}, "token_recycling": {}, "random": {}, "staged": {},
    "merged": {"drafters": [{"method": "ngram"}, {"method": "draft_model", "model": DECODER}]},
}  # fmt: skip
COUPLED = [(kind, drafting, page) for kind, (drafting, page) in zip(
    [*KINDS] * 6, [(drafting, page) for page in (None, 16) for drafting in DRAFTING]
)]  # fmt: skip


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """Folder of a decoder with the same vocabulary, and as sure of what follows as the encoder-decoders."""
    return save_checkpoint(tiny_llama(layers=1), tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def engine(seq2seq, decoder):
    models = {}

    def build(kind, drafting=None, rule="coupled", **more):
        folder = seq2seq(kind)
        if kind not in models:
            models[kind] = load_model(folder, invariant=True)
        config = None
        if drafting is not None:
            method = drafting.split()[0]
            config = {"method": "draft_model" if method == "decoder" else method, "accept": rule, **DRAFTING[drafting]}
            if config["method"] in ("draft_model", "staged"):
                config.setdefault("model", folder)
            if config["method"] == "draft_model" and not {"tree", "tree_nodes"} & set(config):
                config.setdefault("num_speculative_tokens", 3)
            config = fill(config, {DECODER: decoder})
        made = EngineConfig(model=folder, **{"max_model_len": 80, "max_num_seqs": 4, **more})
        return Engine(models[kind], load_tokenizer(folder), made, SpeculativeConfig.parse(config))

    return build


def run(engine, requests=REQUESTS):
    jobs = [job for text, params in requests for job in engine.add(engine.tokenizer.encode(text), params)]
    while engine.busy:
        engine.step()
        engine.check()
        for drafter in engine.router.drafters.values():
            for job in engine.jobs.values():
                known = drafter.cached_tokens(job.sequence)
                assert known is None or known == job.sequence.tokens[: len(known)]
    check_idle(engine, jobs)
    return jobs


@pytest.fixture(scope="module")
def plain(engine):
    result = {}

    def get(kind):
        if kind not in result:
            result[kind] = answers(run(engine(kind, max_num_seqs=1)))
        return result[kind]

    return get


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_bits_of_decoding(engine, kind):
    """However many are fed at once, beside others, in trees, and when sources are encoded beside others."""
    model = engine(kind).model
    assert model.invariant
    for page_size in (None, 16):
        assert not self_test(model, page_size=page_size, rows=90, chunks=(2, 5, 17))


@pytest.mark.parametrize("kind", KINDS)
def test_plain_decoding_in_batches(engine, plain, kind):
    for more in ({}, {"page_size": 8}, {"page_size": 4, "num_pages": 24}, {"max_num_batched_tokens": 4}):
        assert answers(run(engine(kind, **more))) == plain(kind)


@pytest.mark.parametrize(("kind", "drafting", "page_size"), COUPLED)
def test_same_tokens_as_plain_decoding(engine, plain, kind, drafting, page_size):
    jobs = run(engine(kind, drafting, page_size=page_size))
    assert answers(jobs) == plain(kind)
    assert not any(job.metrics.draft_error for job in jobs)
    assert sum(job.metrics.num_draft_tokens for job in jobs) > 0


@pytest.mark.parametrize("rule", [name for name in rules if rules[name].lossless and not rules[name].identity])
def test_greedy_tokens_under_other_rules(engine, plain, rule):
    jobs = run(engine("flan", "tree" if rules[rule].trees else "draft_model", rule))
    greedy = [params.greedy for _, params in REQUESTS for _ in range(params.n)]
    for result, expected, same in zip(answers(jobs), plain("flan"), greedy, strict=True):
        if same:
            assert result == expected


@pytest.mark.parametrize("kind", KINDS)
def test_the_target_as_its_own_draft_is_always_right(engine, kind):
    jobs = run(engine(kind, "draft_model"), [(text, options(max_tokens=30)) for text in SOURCES])
    assert all(job.metrics.draft_acceptance_rate == 1.0 for job in jobs)


def test_a_decoder_reads_the_source_and_what_follows(engine, decoder):
    """Its drafts are what transformers' decoder says behind both."""
    drafting = engine("t5", "decoder")
    drafts = []
    drafting.on_round = lambda result: drafts.extend(result.drafts)
    job = run(drafting, [(SOURCES[0], options(max_tokens=8))])[0]
    ids, model = drafting.tokenizer.encode(SOURCES[0]), LlamaForCausalLM.from_pretrained(decoder)
    index = 0
    for draft in drafts:
        text = torch.tensor([[*ids, *job.output_ids[:index], *draft.tokens]])
        with torch.no_grad():
            expected = model(text).logits[0, -1 - len(draft) :].argmax(dim=1).tolist()
        assert draft.tokens == expected[: len(draft)]
        index += 1 + next((i for i, t in enumerate(draft.tokens) if t != job.output_ids[index + i]), len(draft))
    assert sum(map(len, drafts)) >= 15


def test_lookup_copies_from_the_source(engine):
    drafting = engine("bart", "prompt_lookup", rule="coupled")
    drafts = []
    drafting.on_round = lambda result: drafts.extend(result.drafts)
    ids = [7, 8, 9, 10, 11, 12]
    bias = {7: 100.0}
    drafting.add(ids, SamplingParams(temperature=0, max_tokens=6, logit_bias=bias, ignore_eos=True))
    until_idle(drafting)
    assert [8, 9, 10] in [draft.tokens[:3] for draft in drafts]


@pytest.fixture
def encoded(listen):
    """Which sources each call of the encoder reads."""
    from forerun.models.run.encdec import EncoderDecoder

    calls = []
    listen(EncoderDecoder, "_encode", lambda self, sources: calls.append(list(sources)))
    return calls


def test_a_source_is_read_once(engine, encoded):
    """All sources of a round in one call; answers share, and so do later requests with the same text."""
    one = engine("mt5", max_num_seqs=8)
    run(one)
    assert sorted(map(len, encoded[0])) == sorted(map(len, (one.tokenizer.encode(text) for text in SOURCES)))
    assert len(encoded) == 1
    run(one)
    assert len(encoded) == 1
    assert len(one.target.attention.pool.sources.keys) == len(SOURCES)


def test_sources_make_room_for_others(engine, encoded):
    one = engine("t5", max_num_seqs=2)
    texts = [f"number {index}" for index in range(6)]
    expected = [answers(run(one, [(text, options(max_tokens=6))])) for text in texts]
    assert len(one.target.attention.pool.sources.keys) == 2
    del encoded[:]
    assert answers(run(one, [(text, options(max_tokens=6)) for text in texts])) == [each for (each,) in expected]
    assert sum(map(len, encoded)) >= 4


def test_preemption_and_a_pause_change_no_token(engine, plain):
    small = engine("bart", "draft_model", page_size=4, num_pages=21, max_num_seqs=4)
    rounds = count()
    jobs = [job for text, params in REQUESTS for job in small.add(small.tokenizer.encode(text), params)]
    while small.busy:
        small.step()
        small.check()
        if next(rounds) == 3:
            small.pause(jobs[0])
            small.step()
            small.resume(jobs[0])
    assert answers(jobs) == plain("bart")
    assert small.stats.preemptions > 1


def test_prefixes_are_reused_under_the_same_source_only(engine):
    """Answers go on behind a long decoder prompt, under one source and under another."""
    one = engine("flan", page_size=4)
    behind = [START, *range(5, 25)]
    params = options(max_tokens=10)

    def answer(text):
        (job,) = one.add(one.tokenizer.encode(text), params, decoder_prompt=behind)
        until_idle(one)
        assert job.sequence.num_prompt == len(behind)
        return job.output_ids, job.metrics.num_cached_tokens

    first, reused = answer("some text")
    other, reused_by_other = answer("some other text")
    assert reused == reused_by_other == 0
    assert first != other
    assert answer("some text") == (first, 20)
    assert answer("some other text") == (other, 20)
    cold = engine("flan")
    (job,) = cold.add(cold.tokenizer.encode("some other text"), params, decoder_prompt=behind[1:])
    until_idle(cold)
    assert job.output_ids == other
    one.scheduler.tree.clear()
    assert list(one.scheduler.tree.roots) == [None]


BAD = [
    ([], {}, RequestError, "the source is empty"),
    ([ALPHABET.index("<eos>")] * 3, {}, RequestError, "the source is empty"),
    ([5] * 81, {}, ContextLengthError, "the prompt has 81 tokens; the encoder reads at most 80"),
    ([98], {}, RequestError, "token id 98 is outside the vocabulary of 98"),
    ([5], {"decoder_prompt": [98]}, RequestError, "token id 98 is outside"),
    ([5], {"decoder_prompt": [5] * 80}, ContextLengthError, "the decoder_prompt has 81 tokens"),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad[3])
def test_a_bad_request_costs_nobody_else_anything(engine, plain, bad):
    ids, how, kind, message = bad
    one = engine("t5", "ngram")
    jobs = [job for text, params in REQUESTS for job in one.add(one.tokenizer.encode(text), params)]
    one.step()
    refused(kind, message, one.add, ids, options(), **how)
    refused(RequestError, "encoder-decoders do not support prompt_logprobs", one.add, [5], options(prompt_logprobs=1))
    until_idle(one)
    assert answers(jobs) == plain("t5")


def test_a_source_as_long_as_the_positions(engine):
    one = engine("bart", max_model_len=None)
    (job,) = one.add([7] * POSITIONS, options(max_tokens=None))
    until_idle(one)
    assert len(job.sequence.tokens) == POSITIONS
    (cut,) = one.add([*range(2, 60)] * 3, options(max_tokens=3).clone(truncate_prompt_tokens=-1))
    assert len(cut.sequence.prompt) == POSITIONS


def test_a_draft_with_fewer_positions_stands_aside(engine, seq2seq):
    config = {"method": "draft_model", "model": seq2seq("bart"), "max_model_len": 32, "num_speculative_tokens": 3}
    target = engine("bart")
    short = Engine(target.model, target.tokenizer, target.config, SpeculativeConfig.parse(config))
    jobs = run(short, [("x" * 33, options(max_tokens=12)), ("x" * 20, options(max_tokens=12))])
    assert jobs[0].metrics.num_draft_tokens == 0 < jobs[1].metrics.num_draft_tokens
    assert not any(job.metrics.draft_error for job in jobs)


def test_many_requests_at_once_on_few_pages(engine):
    """Mixed sources, options, cancellations and answers: the tokens of decoding alone, and nothing is left."""
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdef ", k=draw.choice([1, 4, 19, 50]))) + "." for _ in range(9)]
    mixes = [{}, {"temperature": 0.8}, {"temperature": 0.9, "n": 2}, {"temperature": 0.7, "top_p": 0.8}]
    todo = []
    for seed in range(40):
        params = options(max_tokens=draw.choice([1, 5, 20]), seed=seed).clone(**draw.choice(mixes))
        todo.append((draw.choice(texts), params, draw.random() < 0.3))
    alone = engine("t5", max_num_seqs=1)
    expected = {}
    for index, (text, params, cancelled) in enumerate(todo):
        if not cancelled:
            expected[index] = answers(run(alone, [(text, params)]))
    busy = engine("t5", "draft_model", page_size=4, num_pages=40, max_num_seqs=6)
    jobs = [busy.add(busy.tokenizer.encode(text), params) for text, params, _ in todo]
    rounds = count()
    while busy.busy:
        busy.step()
        busy.check()
        if next(rounds) % 2:
            for index, (_, _, cancelled) in enumerate(todo):
                if cancelled and any(job.sequence.num_output > 1 for job in jobs[index]):
                    for job in jobs[index]:
                        busy.abort(job)
    check_idle(busy, [])
    for index, result in expected.items():
        assert answers(jobs[index]) == result

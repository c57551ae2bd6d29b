"""Sampling options in the engine: speculative equals plain, plain equals one token at a time over transformers."""

import functools
import math

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from forerun import SamplingParams
from forerun.sampling.noise import Gumbel, fold, target_key
from forerun.speculate.accept import rules
from sampling_oracle import edited, kept
from tiny import ALPHABET

pytestmark = pytest.mark.slow

PROMPTS = ["hello world, hello", "a", "0123456789012345", "the cat sat"]
LENGTH = 16


@pytest.fixture(scope="module")
def raw_logits(tiny_target):
    """transformers' logits after each of the tokens, float64 [tokens, vocabulary]."""
    model = LlamaForCausalLM.from_pretrained(tiny_target).eval()

    @functools.lru_cache(maxsize=4096)
    def rows(tokens):
        with torch.inference_mode():
            return model(torch.tensor([tokens])).logits[0].double().numpy()

    return lambda tokens: rows(tuple(tokens))


def mix(draw):
    """Some options at random; what is not drawn is off."""
    given = {
        "temperature": st.sampled_from([0.0, 0.5, 0.8, 1.2]), "top_k": st.integers(1, 30),
        "top_p": st.floats(0.3, 0.99), "min_p": st.floats(0.001, 0.3), "repetition_penalty": st.floats(0.7, 1.5),
        "presence_penalty": st.floats(-1.0, 1.0), "frequency_penalty": st.floats(-1.0, 1.0),
        "logit_bias": st.dictionaries(st.integers(0, 97), st.floats(-3.0, 3.0), min_size=1, max_size=3),
        "allowed_token_ids": st.sets(st.integers(0, 97), min_size=25),
        "bad_words": st.lists(st.text(ALPHABET[4:60], min_size=1, max_size=2), min_size=1, max_size=3),
        "min_tokens": st.integers(1, 10), "stop_token_ids": st.lists(st.integers(0, 97), min_size=1, max_size=3),
        "n": st.just(2),
    }  # fmt: skip
    chosen = draw(st.sets(st.sampled_from(sorted(given)), max_size=6))
    options = {name: draw(given[name]) for name in sorted(chosen)}
    return SamplingParams(seed=draw(st.integers(0, 99)), max_tokens=LENGTH, **options)


mixes = st.composite(lambda draw: [mix(draw) for _ in PROMPTS])()
slow = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("accept", [name for name in rules if rules[name].lossless])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_come(llm, tiny_draft, accept, temperature):
    """With drafts that are warped alike, and with copies of the prompt, which are not."""
    allowed = [token for token in range(len(ALPHABET)) if token % 3]
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=LENGTH, allowed_token_ids=allowed)
    plain = [output.outputs[0].token_ids for output in llm().generate(PROMPTS, params)]
    assert {token for answer in plain for token in answer} <= set(allowed)
    free = llm().generate(PROMPTS, params.clone(allowed_token_ids=None))
    assert {token for output in free for token in output.outputs[0].token_ids} - set(allowed)
    for spec in ({"method": "ngram"}, {"method": "draft_model", "model": tiny_draft, "num_speculative_tokens": 3}):
        outputs = llm({**spec, "accept": accept}).generate(PROMPTS, params)
        result = [output.outputs[0].token_ids for output in outputs]
        assert {token for answer in result for token in answer} <= set(allowed)
        if "model" in spec:
            assert sum(output.metrics.num_accepted_draft_tokens for output in outputs) > 0
        if temperature == 0.0 or rules[accept].identity:
            assert result == plain


def test_a_prompt_may_be_truncated(llm):
    model = llm({"method": "ngram"})
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH)
    ids = model.tokenizer.encode("the cat sat on the mat " * 20)
    for count, expected in ((7, ids[-7:]), (200, ids[-200:]), (-1, ids[LENGTH - 256 :])):
        output = model.generate([ids], params.clone(truncate_prompt_tokens=count))[0]
        assert output.prompt_token_ids == expected[:]
        assert output.outputs[0].token_ids == model.generate([expected], params)[0].outputs[0].token_ids


@slow
@given(params=mixes)
def test_plain_equals_one_token_at_a_time(llm, raw_logits, params):
    """Every emitted token is the best of transformers' logits, edited and filtered, plus the position's noise."""
    noise = Gumbel(len(ALPHABET))
    engine = llm().engine
    for prompt, options, output in zip(PROMPTS, params, llm().generate(PROMPTS, list(params))):
        ids = output.prompt_token_ids
        *_, options = engine.validator.admit(ids, None, options)
        for answer in output.outputs:
            seed = options.seed if answer.index == 0 else fold(options.seed, answer.index)
            rows = raw_logits([*ids, *answer.token_ids])
            for index, token in enumerate(answer.token_ids):
                values = edited(rows[len(ids) + index - 1], options, ids, answer.token_ids[:index], [0])
                if not options.greedy:
                    values /= options.temperature
                    stay = [kept(values, options, slack) for slack in (1e-4, 0.0, -1e-4)]
                    values += noise.rows([target_key(seed, len(ids) + index)])[0].double().numpy()
                    best = [numpy.where(mask, values, -numpy.inf).max() for mask in stay]
                    assert any(mask[token] for mask in stay), (prompt, options)
                    assert min(abs(values[token] - value) for value in best) < 1e-3
                else:
                    assert values[token] > values.max() - 1e-3


def log_softmax(values):
    return values - values.max() - numpy.log(numpy.exp(values - values.max()).sum())


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("method", ["none", "ngram", "draft_model"])
def test_logprobs(llm, tiny_draft, raw_logits, mode, method):
    """Values, ranks and the likeliest tokens, of the model's distribution or of the sampled one."""
    spec = {"method": method, **({"model": tiny_draft, "num_speculative_tokens": 3} if method == "draft_model" else {})}
    params = [
        SamplingParams(temperature=0.0, logprobs=3, max_tokens=LENGTH, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=1, logprobs=5, top_k=9, repetition_penalty=1.3, max_tokens=LENGTH),
        SamplingParams(temperature=1.2, seed=2, logprobs=0, top_p=0.9, max_tokens=LENGTH),
        SamplingParams(temperature=1.0, seed=3, logprobs=200, logit_bias={4: 3.0}, max_tokens=LENGTH),
    ]
    tokenizer = llm().tokenizer
    for options, output in zip(params, llm(spec, logprobs_mode=mode).generate(PROMPTS, params)):
        ids, answer = output.prompt_token_ids, output.outputs[0]
        rows = raw_logits([*ids, *answer.token_ids])
        assert len(answer.logprobs) == len(answer.token_ids)
        total = 0.0
        for index, (token, result) in enumerate(zip(answer.token_ids, answer.logprobs)):
            values = rows[len(ids) + index - 1]
            if mode == "processed_logprobs":
                values = edited(values, options, ids, answer.token_ids[:index], [0])
                if not options.greedy:
                    values = values / options.temperature
                    values = numpy.where(kept(values, options), values, -numpy.inf)
            expected = log_softmax(values)
            total += expected[token]
            assert next(iter(result)) == token
            assert result[token].rank == int((expected > expected[token] + 1e-6).sum()) + 1
            for other, item in result.items():
                assert item.logprob == pytest.approx(expected[other], abs=1e-3)
                assert item.decoded_token == tokenizer.decode([other])
            top = [item for item in result.values() if item.rank <= options.logprobs]
            assert sorted(item.rank for item in top) == list(range(1, len(top) + 1))
            assert len(top) == min(options.logprobs, int(numpy.isfinite(expected).sum()))
            assert len(result) == len(top) + (result[token].rank > options.logprobs)
            if top:
                assert min(item.logprob for item in top) >= numpy.sort(expected)[-len(top)] - 1e-3
        assert answer.cumulative_logprob == pytest.approx(total, abs=1e-2)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("accept", [None, *(name for name in rules if rules[name].lossless)])
def test_the_coldest_temperatures_are_greedy(llm, tiny_draft, accept, mode):
    """And what is still sampled, at 1e-5, has finite logits: the best token's lead is a thousand times that."""
    drafts = {"model": tiny_draft, "accept": accept, "draft_temperature": 1e-5}
    spec = {"method": "draft_model", **drafts} if accept else {"method": "none"}
    model = llm(spec, logprobs_mode=mode)
    options = {"logprobs": 2, "max_tokens": LENGTH, "ignore_eos": True, "seed": 5, "min_tokens": 2}
    expected = model.generate(PROMPTS, SamplingParams(temperature=0.0, **options))
    for temperature in (5e-324, 1e-46, 1e-40, 3e-38, 1e-6, 1e-5):
        result = model.generate(PROMPTS, SamplingParams(temperature=temperature, **options))
        for output, best in zip(result, expected):
            assert output.outputs[0].token_ids == best.outputs[0].token_ids
            if temperature < 1e-5 or mode == "raw_logprobs":
                assert output.outputs[0].logprobs == best.outputs[0].logprobs
            assert all(math.isfinite(each.logprob) for one in output.outputs[0].logprobs for each in one.values())


@pytest.mark.parametrize("budget", [2048, 16])
def test_prompt_logprobs(llm, raw_logits, budget):
    """Of the raw distribution, whatever the chunks; the first token has none."""
    params = SamplingParams(temperature=0.7, seed=0, max_tokens=4, prompt_logprobs=2, top_k=5)
    for output in llm({"method": "ngram"}, max_num_batched_tokens=budget).generate(PROMPTS, params):
        ids, result = output.prompt_token_ids, output.prompt_logprobs
        assert len(result) == len(ids)
        assert result[0] is None
        rows = raw_logits(ids)
        for index in range(1, len(ids)):
            expected = log_softmax(rows[index - 1])
            assert next(iter(result[index])) == ids[index]
            assert result[index][ids[index]].logprob == pytest.approx(expected[ids[index]], abs=1e-3)
            assert {1, 2} <= {item.rank for item in result[index].values()}
            assert len(result[index]) in (2, 3)
            assert max(item.logprob for item in result[index].values()) == pytest.approx(expected.max(), abs=1e-3)

"""What ``LLM.generate`` takes for prompts and options, and what it says of anything else."""

import numpy as np
import pytest
import torch

from forerun import BeamSearchParams, SamplingParams
from forerun.core.errors import ForerunError
from refusals import refused

SHORT = SamplingParams(temperature=0.0, max_tokens=3)
COLD = SamplingParams(temperature=0.0, max_tokens=5)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("given", [None, "auto", 0])
def test_speculate_is_a_flag(llm, given):
    refused(
        ForerunError, f"speculate must be true or false, not {given!r}", llm().generate, "a", SHORT, speculate=given
    )


def test_prompts_and_options_may_come_one_by_one(llm):
    model = llm()
    expected = tokens(model.generate(["the cat", "a dog"], [SHORT, COLD]))
    assert [len(answer) for answer in expected] == [3, 5]
    given = model.generate((text for text in ("the cat", "a dog")), (params for params in (SHORT, COLD)))
    assert tokens(given) == expected
    assert model.generate([]) == []
    ids = model.tokenizer.encode("the cat")
    for one in ("the cat", ids, tuple(ids), {"prompt": "the cat"}, (text for text in ["the cat"]), iter(ids)):
        assert tokens(model.generate(one, SHORT)) == expected[:1]


@pytest.mark.parametrize(
    "made",
    [
        lambda ids: np.array(ids),
        lambda ids: np.array([ids], dtype=np.uint16),
        lambda ids: [np.array(ids)],
        lambda ids: [np.int64(token) for token in ids],
        lambda ids: torch.tensor(ids),
        lambda ids: torch.tensor([ids], dtype=torch.int32),
        lambda ids: list(torch.tensor(ids)),
        lambda ids: {"prompt_token_ids": np.array(ids)},
        lambda ids: {"prompt_token_ids": [np.int32(token) for token in ids]},
    ],
)
def test_arrays_of_ids_are_prompts(llm, made):
    model = llm()
    ids = model.tokenizer.encode("the cat")
    (expected,) = model.generate([ids], SHORT)
    (answer,) = model.generate(made(ids), SHORT)
    assert answer.outputs[0].token_ids == expected.outputs[0].token_ids
    assert answer.prompt_token_ids == ids
    assert {type(token) for token in answer.prompt_token_ids} == {int}


def test_a_seed_of_minus_one_is_a_fresh_one(llm):
    """As in vLLM and llama.cpp, whatever the engine's own seed is; the engine's may be -1, too."""

    def answers(model, seed):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=24, ignore_eos=True)
        return len({tuple(tokens(model.generate("the cat", params))[0]) for _ in range(4)})

    fixed, free = llm(seed=3), llm(seed=-1)
    assert [answers(fixed, seed) for seed in (None, 5, -2, 2**64 - 1)] == [1] * 4
    assert min(answers(fixed, -1), answers(free, None), answers(free, -1)) > 1
    assert answers(free, 5) == 1


def test_options_may_be_numbers_of_numpy(llm):
    given = {"seed": 7, "max_tokens": 5, "min_tokens": 2, "n": 2, "top_k": 9, "temperature": 0.5, "logprobs": 1}
    plain = SamplingParams(**given, stop_token_ids=[3, 4], allowed_token_ids=[3, 5, 6], bad_words_ids=[[8, 9]])
    arrays = {name: np.asarray(value)[()] for name, value in given.items()}
    assert {type(value) for value in arrays.values()} == {np.int64, np.float64}
    made = SamplingParams(
        **arrays, stop_token_ids=np.array([3, 4]), allowed_token_ids=[np.int64(3), torch.tensor(5), 6],
        bad_words_ids=[np.array([8, 9])],
    )  # fmt: skip
    assert made == plain
    assert repr(made) == repr(plain)
    refused(ForerunError, "max_tokens must be an integer", SamplingParams, max_tokens=np.float64(5.0))
    assert BeamSearchParams(np.int64(3), np.int32(5)) == BeamSearchParams(3, 5)
    model = llm()
    assert tokens(model.generate(["the cat"], made)) == tokens(model.generate(["the cat"], plain))


@pytest.mark.parametrize(("prompts", "params", "message"), [
    (np.array([True, False]), None, "token id True is outside the vocabulary"),
    ([np.array([-1])], None, "token id -1 is outside the vocabulary"),
    (np.array(5), None, "prompts must be a prompt or a list of prompts, not int"),
    (None, None, "prompts must be a prompt or a list of prompts, not NoneType"),
    (b"ab", None, "a prompt is a string, a list of token ids or a mapping, not bytes"),
    ([["a", "b"]], None, "a prompt is a string, a list of token ids or a mapping, not a list of texts"),
    (["a"], {"temperature": 0}, "sampling_params must be SamplingParams, or one each, not dict"),
    (["a"], [{"temperature": 0}], "sampling_params must be SamplingParams, or one each, not dict"),
    (["a"], [5], "sampling_params must be SamplingParams, or one each, not int"),
    (["a"], [], "0 sampling_params for 1 prompts"),
])  # fmt: skip
def test_anything_else_is_refused_in_one_line(llm, prompts, params, message):
    refused(ForerunError, message, llm().generate, prompts, params)
    assert not llm().engine.busy

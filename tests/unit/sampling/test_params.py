"""Options of requests and of acceptance rules: what is refused, and in which words."""

import math
from dataclasses import replace

import pytest

from forerun import ConfigError, EngineConfig, SamplingParams, SpeculativeConfig
from forerun.serve.schema import CompletionRequest
from forerun.speculate.accept import rules
from forerun.speculate.accept.chains import LenientConfig
from forerun.speculate.accept.trees import TreeRuleConfig
from refusals import refused

COUNT, SCALE, PENALTY, FLAG = "an integer of at least 0", r"to 1e\+30", "a number from -2 to 2", "true or false"
OUT_OF_RANGE = {
    "n": ("an integer from 1 to 16384", [0, 1.5]),
    "temperature": (f"a number from 0 {SCALE}", [-0.1, math.nan, math.inf, "hot", 1e39]),
    "top_k": ("an integer of at least -1", [-2, 2.0]),
    "top_p": ("a number above 0 and at most 1", [0.0, 1.01]),
    "min_p": ("a number from 0 to 1", [-0.1, 1.1]),
    "seed": (r"an integer from -2\^63 to 2\^64 - 1", [1.0, True, -(2**63) - 1, 2**64]),
    "max_tokens": ("an integer of at least 1", [0]),
    "min_tokens": (COUNT, [-1]),
    "repetition_penalty": (f"a number from 1e-30 {SCALE}", [0.0, 1e-46, 1e39]),
    "presence_penalty": (PENALTY, [2.1]),
    "frequency_penalty": (PENALTY, [-2.1, True]),
    "logprobs": (COUNT, [-1]),
    "prompt_logprobs": (COUNT, [-1]),
    "stop": ("a non-empty string or a list of them", ["", [""], [3], 5]),
    "stop_token_ids": (COUNT, [[-1], ["a"], 7]),
    "logit_bias": (None, [
        {"x": 1.0}, {-1: 1.0}, {1: math.nan}, {1: 10**400}, {1: math.inf}, {1: 1e39}, {1.7: 1.0}, {True: 1.0},
        {" 1": 1.0}, {"1_0": 1.0}, {"01": 5.0, "1": -5.0}, {1: 5.0, "1": 5.0}, {"9" * 5000: 1.0}, [1],
    ]),
    "bad_words": ("a list of non-empty strings", [[""], "word"]),
    "bad_words_ids": (f"(a list of non-empty lists of token ids|{COUNT})", [[1], [[]], [["a"]], [[-1]], "ab"]),
    "allowed_token_ids": (COUNT, [[-1], "ab"]),
    "truncate_prompt_tokens": ("an integer of at least 1", [0, -2]),
    "include_stop_str_in_output": (FLAG, [None]),
    "ignore_eos": (FLAG, [1]),
    "skip_special_tokens": (FLAG, ["no"]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (_, values) in OUT_OF_RANGE.items() for value in values]
)
def test_out_of_range(name, value):
    words = OUT_OF_RANGE[name][0]
    said = f"must be ({words}|an? [a-z]+, not)" if words else "(maps token ids to numbers|names token id 1 twice)"
    refused(ConfigError, f"{name} {said}", SamplingParams, **{name: value})


def test_options_that_contradict():
    refused(ConfigError, r"min_tokens \(5\) exceeds max_tokens \(4\)", SamplingParams, min_tokens=5, max_tokens=4)
    refused(ConfigError, "allowed_token_ids must not be empty", SamplingParams, allowed_token_ids=[])


def test_seeds_have_64_bits():
    for seed in (-(2**63), 2**64 - 1):
        assert SamplingParams(seed=seed).seed == EngineConfig(seed=seed).seed == seed
    for seed in (-(2**63) - 1, 2**64 + 5):
        refused(ConfigError, rf"seed must be an integer from -2\^63 to 2\^64 - 1, not {seed}", EngineConfig, seed=seed)


def test_equal_options_compare_equal():
    one = SamplingParams(stop="a", stop_token_ids=[1], logit_bias={"3": 1})
    assert one == SamplingParams(stop=["a"], stop_token_ids=(1,), logit_bias={3: 1.0})
    assert one.logit_bias == {3: 1.0}


@pytest.mark.parametrize("temperature", [0, -0.0, 5e-324, 1e-46, 1e-40, 3e-38, 1e-7, math.nextafter(1e-5, 0)])
def test_a_temperature_below_the_bound_is_zero(temperature):
    params = SamplingParams(temperature=temperature)
    assert params == SamplingParams(temperature=0.0)
    assert math.copysign(1.0, params.temperature) == 1.0
    assert replace(SamplingParams(), temperature=temperature).greedy
    assert CompletionRequest(prompt="x", temperature=temperature).sampling(
        logprobs=None, max_tokens=1, prompt_logprobs=None
    ).greedy  # fmt: skip
    assert SamplingParams(temperature=1e-5).temperature == 1e-5
    with pytest.raises(ConfigError, match="draft_temperature must be a number from 1e-05 to 1e"):
        SpeculativeConfig.parse({"method": "ngram", "counts_as_q": True, "draft_temperature": temperature})


def test_a_clone_is_equal_and_may_differ_in_what_is_named():
    params = SamplingParams(temperature=0.5, stop="a", allowed_token_ids=[3, 4, 3])
    assert params.clone() == params
    assert params.clone(temperature=0.7) == SamplingParams(temperature=0.7, stop="a", allowed_token_ids=(3, 4))
    refused(ConfigError, "top_p", params.clone, top_p=3)
    refused(ConfigError, "no field 'heat'", params.clone, heat=1)


def test_defaults_are_off():
    params = SamplingParams()
    assert not any([params.greedy, params.edits, params.filters, params.penalised])
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(top_k=-1) != SamplingParams(top_k=1)
    assert not SamplingParams(top_k=-1).filters


# ------------------------------------------------------------------------------------------------------------- rules


def test_a_rule_takes_its_options_from_the_same_mapping():
    config = SpeculativeConfig.parse({"method": "ngram", "accept": "lenient", "lenience": 0.3, "max_order": 3})
    assert config.rule == LenientConfig(0.3)
    assert SpeculativeConfig.parse({"method": "ngram", "accept": "lenient"}).rule == LenientConfig(0.5)
    for value in (True, False):
        config = SpeculativeConfig.parse({"method": "none", "accept": "recursive", "replacement": value})
        assert config.rule == TreeRuleConfig(value)
        assert rules["recursive"](config.rule).replacement is value
        assert rules["traversal"](config.rule).replacement is value
    assert rules["recursive"]().replacement is False


SHAPED = {"method": "draft_model", "model": "m", "tree": [2, 2]}


def test_a_tree_has_one_depth():
    for asked in (1, 3, 5):
        with pytest.raises(ConfigError, match=rf"num_speculative_tokens is {asked}, but tree \[2, 2\] is 2 deep"):
            SpeculativeConfig.parse({**SHAPED, "num_speculative_tokens": asked})
    matching = SpeculativeConfig.parse({**SHAPED, "num_speculative_tokens": 2})
    assert matching == SpeculativeConfig.parse(SHAPED)

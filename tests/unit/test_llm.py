"""What ``LLM.generate`` takes for prompts and options, and what it says of anything else."""

from __future__ import annotations

import pytest

from forerun import SamplingParams
from forerun.core.errors import ForerunError

SHORT = SamplingParams(temperature=0.0, max_tokens=3)
COLD = SamplingParams(temperature=0.0, max_tokens=5)


def tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_prompts_and_options_may_come_one_by_one(llm):
    model = llm()
    wanted = tokens(model.generate(["the cat", "a dog"], [SHORT, COLD]))
    assert [len(answer) for answer in wanted] == [3, 5]
    given = model.generate((text for text in ("the cat", "a dog")), (params for params in (SHORT, COLD)))
    assert tokens(given) == wanted
    ids = model.tokenizer.encode("the cat")
    for one in ("the cat", ids, tuple(ids), {"prompt": "the cat"}, (text for text in ["the cat"]), iter(ids)):
        assert tokens(model.generate(one, SHORT)) == wanted[:1]


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (None, None, "give a prompt or a list of prompts, not NoneType"),
        (5, None, "give a prompt or a list of prompts, not int"),
        (b"ab", None, "a prompt is a string, a list of token ids or a mapping, not bytes"),
        ([b"ab"], None, "a prompt is a string, a list of token ids or a mapping, not bytes"),
        ([[True, False]], None, "token id True is outside the vocabulary"),
        (["a"], {"temperature": 0}, "sampling_params must be SamplingParams, or one each, not dict"),
        (["a"], [{"temperature": 0}], "sampling_params must be SamplingParams, or one each, not dict"),
        (["a"], [5], "sampling_params must be SamplingParams, or one each, not int"),
        (["a"], 5, "sampling_params must be SamplingParams, or one each, not int"),
        (["a"], [], "0 sampling_params for 1 prompts"),
    ],
)
def test_anything_else_is_refused_in_one_line(llm, prompts, params, message):
    with pytest.raises(ForerunError, match=message) as caught:
        llm().generate(prompts, params)
    assert "\n" not in str(caught.value)
    assert not llm().engine.busy

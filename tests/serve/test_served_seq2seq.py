"""An encoder-decoder behind HTTP: the prompt is its source."""

import pytest
from running import run_server

from forerun import LLM, SamplingParams
from tiny_seq2seq import POSITIONS

PROMPTS = ["hello world, hello", "the cat sat on the mat"]


@pytest.fixture(scope="module")
def expected(seq2seq):
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=16)
    return LLM(seq2seq("bart")).generate(PROMPTS, params, use_tqdm=False)


@pytest.fixture(scope="module")
def server(seq2seq):
    drafting = {"method": "draft_model", "model": seq2seq("bart"), "num_speculative_tokens": 3}
    with run_server(LLM(seq2seq("bart"), speculative_config=drafting, page_size=16)) as running:
        yield running


def post(server, path="/v1/completions", **body):
    return server.http.post(path, json={"temperature": 0.8, "seed": 7, "max_tokens": 16, **body})


def test_a_source_takes_no_room_from_the_answer(server):
    answer = post(server, prompt="x" * POSITIONS, max_tokens=POSITIONS - 1, ignore_eos=True)
    assert answer.json()["usage"]["completion_tokens"] == POSITIONS - 1
    assert "together more than" in post(server, prompt="x", max_tokens=POSITIONS).json()["error"]["message"]


def test_completions(server, expected):
    answer = post(server, prompt=PROMPTS).json()
    assert [choice["text"] for choice in answer["choices"]] == [output.outputs[0].text for output in expected]
    usage = answer["usage"]
    assert usage["prompt_tokens"] == sum(map(len, PROMPTS))
    assert usage["completion_tokens"] == sum(len(output.outputs[0].token_ids) for output in expected)
    assert answer["metrics"]["speculative_decoding"]["mean_acceptance_length"] > 3
    several = post(server, prompt=PROMPTS[0], n=2, logprobs=2).json()["choices"]
    assert several[0]["text"] == expected[0].outputs[0].text
    assert "".join(several[0]["logprobs"]["tokens"]) == several[0]["text"]
    tiled = post(server, prompt=PROMPTS[1], stream=True)
    assert tiled.status_code == 200
    assert tiled.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(("body", "message"), [
    ({"prompt": ""}, "the source is empty"),
    ({"prompt": []}, ""),
    ({"prompt": "x" * (POSITIONS + 1)}, f"the encoder reads at most {POSITIONS}"),
    ({"prompt": "x", "echo": True, "logprobs": 1}, "do not support prompt_logprobs"),
])  # fmt: skip
def test_bad_requests(server, expected, body, message):
    answer = post(server, **body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    good = post(server, prompt=PROMPTS[0]).json()
    assert good["choices"][0]["text"] == expected[0].outputs[0].text

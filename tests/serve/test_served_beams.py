"""Beams over HTTP: as ``LLM.beam_search`` finds them, beside sampled requests."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from running import wait_idle

from forerun import BeamSearchParams, SamplingParams

PROMPT = "def parse("
CHAT = "<system>be brief\n<user>hi\n<assistant>"
SEARCH = {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": "never"}


@pytest.fixture(scope="module", autouse=True)
def expected(served, plain):
    """Plain searches and a plain decode, made before the server's thread owns the engine."""
    params = BeamSearchParams(3, 12, length_penalty=0.5, early_stopping="never")

    def search(prompt):
        return served.beam_search([prompt], params, speculate=False)[0]

    return {
        "completion": search(PROMPT),
        "chat": search(CHAT),
        "sampled": plain(PROMPT, SamplingParams(temperature=0.8, seed=7, max_tokens=24)),
    }


def texts(result, prompt):
    return [sequence.text.removeprefix(prompt) for sequence in result.sequences]


def test_completions_are_the_beams_beside_a_sampled_request(client, expected):
    def search(method):
        body = {**SEARCH, "speculative": {"method": method}}
        return client.completions.create(model="tiny", prompt=PROMPT, n=3, max_tokens=12, extra_body=body)

    with ThreadPoolExecutor() as pool:
        sampled = pool.submit(
            client.completions.create, model="tiny", prompt=PROMPT, max_tokens=24, temperature=0.8, seed=7
        )
        result = list(pool.map(search, ["draft_model", "ngram"]))
    assert sampled.result().choices[0].text == expected["sampled"].text
    for answer in result:
        assert [choice.text for choice in answer.choices] == texts(expected["completion"], PROMPT)
        assert [choice.finish_reason for choice in answer.choices] == ["length"] * 3
        assert answer.usage.completion_tokens == 36
    rounds = [answer.model_extra["metrics"]["rounds"] for answer in result]
    assert rounds[0] < expected["completion"].metrics.rounds


def test_chat_streams_every_beam_once_the_search_is_over(client, server, expected):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    told = {}
    with client.chat.completions.create(
        model="tiny", messages=messages, n=3, max_tokens=12, stream=True, extra_body=SEARCH
    ) as events:
        for event in events:
            for choice in event.choices:
                told[choice.index] = told.get(choice.index, "") + (choice.delta.content or "")
    assert [told[index] for index in range(3)] == texts(expected["chat"], CHAT)
    wait_idle(server)


@pytest.mark.parametrize(("given", "message"), [
    ({"top_p": 0.5}, "beam search does not sample: remove top_p"),
    ({"temperature": 0.7}, "temperature must be 0 or unset, not 0.7"),
    ({"logprobs": 1}, "beam search does not return log-probabilities"),
    ({"response_format": {"type": "json_object"}}, "beam search does not support grammars: remove response_format"),
    ({"stop": ["x"]}, "beam search does not sample: remove stop"),
    ({"n": 5}, "5 beams are more than the 4 sequences decoded together"),
    ({"speculative": {"trace": True}}, "beam search has no trace"),
    ({"use_beam_search": False}, "go with use_beam_search: true"),
    ({"early_stopping": "soon"}, "never"),
    ({"length_penalty": 99.0}, "less than or equal to 10"),
])  # fmt: skip
def test_what_beams_do_not_have(client, server, given, message):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.completions.create(model="tiny", prompt=PROMPT, extra_body={**SEARCH, **given})
    assert "\n" not in caught.value.body["message"]
    wait_idle(server)

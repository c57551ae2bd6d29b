"""The HTTP API, spoken by the ``openai`` package and by hand."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from running import closed, wait_idle

from forerun import SamplingParams

PROMPT = "def parse("
AGE = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMA = closed({"name": {"enum": ["ada", "bob"]}, "age": AGE}, "name", "age")


@pytest.fixture(scope="module", autouse=True)
def expected(plain):
    """Plain decodes, made before the server's thread owns the engine."""
    chat = {"prompt": "<system>be brief\n<user>hi\n<assistant>"}
    first = plain(chat, SamplingParams(temperature=0.8, seed=7, max_tokens=24))
    again = {"prompt": f"{chat['prompt']}{first.text}\n<user>go on\n<assistant>"}
    return {
        "completion": plain(PROMPT, SamplingParams(temperature=0.8, seed=7, max_tokens=24)),
        "greedy": plain(PROMPT, SamplingParams(temperature=0.0, max_tokens=24, logprobs=2)),
        "chat": first,
        "again": plain(again, SamplingParams(temperature=0.8, seed=7, max_tokens=24)),
        "several": [
            plain(prompt, SamplingParams(temperature=0.8, seed=7, max_tokens=8, n=1)) for prompt in ("a = ", "b = ")
        ],
    }


def test_completion(client, expected):
    answer = client.completions.create(model="tiny", prompt=PROMPT, temperature=0.8, seed=7, max_tokens=24)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == expected["completion"].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24
    speculation = answer.metrics["speculative_decoding"]
    assert speculation["method"] == "draft_model"
    assert speculation["num_spec_tokens"] == 3
    assert speculation["identical_to_plain_decoding"] is True
    accepted = speculation["num_accepted_draft_tokens"]
    assert sum(speculation["per_step_accepted"]) == accepted
    assert sum(speculation["per_step_drafted"]) == speculation["num_draft_tokens"]
    assert sum(j * count for j, count in enumerate(speculation["acceptance_histogram"])) == accepted
    assert speculation["mean_acceptance_length"] == pytest.approx(1 + accepted / speculation["num_spec_steps"])


def test_streamed_completion(client, expected):
    chunks = list(
        client.completions.create(
            model="tiny", prompt=PROMPT, temperature=0.8, seed=7, max_tokens=24, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert "".join(c.choices[0].text for c in chunks if c.choices) == expected["completion"].text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == 24
    assert chunks[-1].metrics["speculative_decoding"]["num_spec_steps"] > 0
    assert len({c.id for c in chunks}) == 1


def test_chat(client, expected):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
    ]
    options = {"model": "tiny", "messages": messages, "temperature": 0.8, "seed": 7, "max_completion_tokens": 24}
    answer = client.chat.completions.create(**options)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == expected["chat"].text
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected["chat"].text


def test_an_answer_is_the_next_request_s_turn(client, server, expected):
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    options = {"model": "tiny", "temperature": 0.8, "seed": 7, "max_completion_tokens": 24}
    first = client.chat.completions.create(**options, messages=turns).choices[0].message
    raw = server.post("/v1/chat/completions", {**options, "messages": turns}).json()["choices"][0]["message"]
    full = {**first.model_dump(), "annotations": [], "tool_calls": [], "audio": None, "function_call": None}
    full["provider_specific_fields"] = {"refusal": None}  # litellm's
    for message in (first, first.model_dump(), raw, full):
        second = client.chat.completions.create(
            **options, messages=[*turns, message, {"role": "user", "content": "go on"}]
        )
        assert second.choices[0].message.content == expected["again"].text


def test_null_is_the_default(server, expected):
    """Every field that may be left out may be null, those of objects in the body included."""
    description = server.http.get("/openapi.json").json()["components"]["schemas"]
    for path, name, body in (
        ("/v1/completions", "CompletionRequest", {"prompt": PROMPT, "temperature": 0}),
        ("/v1/chat/completions", "ChatRequest", {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}),
    ):
        nulls = dict.fromkeys(description[name]["properties"])
        plain = server.post(path, body).json()
        full = server.post(path, nulls | body)
        assert full.status_code == 200, full.text
        assert full.json()["choices"] == plain["choices"]
        usage = full.json()["usage"]
        assert (usage["completion_tokens"] == 16) if "prompt" in body else (usage["total_tokens"] == 512)
        for field, kind in (("stream_options", "StreamOptions"), ("speculative", "Speculative")):
            inner = {**body, field: dict.fromkeys(description[kind]["properties"])}
            answer = server.post(path, inner | ({"stream": True} if field == "stream_options" else {}))
            assert answer.status_code == 200, answer.text
    sampled = {"prompt": PROMPT, "temperature": None, "top_p": None, "seed": 7, "max_tokens": 24}
    ones = {"prompt": PROMPT, "temperature": 1, "top_p": 1, "seed": 7, "max_tokens": 24}
    texts = [server.post("/v1/completions", body).json()["choices"][0]["text"] for body in (sampled, ones)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_seed_of_minus_one_is_a_fresh_one(server, path):
    given = {"prompt": PROMPT, "messages": [{"role": "user", "content": "hi"}], "input": "hi"}
    field = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")

    def answers(seed):
        limit = {"max_output_tokens" if field == "input" else "max_tokens": 24}
        body = {field: given[field], "temperature": 1, "seed": seed, **limit}
        answers = [server.post(path, body).json() for _ in range(3)]
        said = [each["output"][0]["content"] if field == "input" else each["choices"] for each in answers]
        return len(set(map(json.dumps, said)))

    assert answers(-1) > 1
    assert answers(-2) == 1


def test_what_asks_for_nothing_is_accepted(server):
    hello = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    for extra in (
        {"tool_choice": "none"},
        {"tool_choice": "auto", "parallel_tool_calls": True, "functions": []},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"service_tier": "auto", "safety_identifier": "me", "prompt_cache_key": "key", "modalities": ["text"]},
        {"user": "me", "store": False, "cache_prompt": False, "metadata": {"a": "b"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}},
    ):
        assert server.post("/v1/chat/completions", {**hello, **extra}).status_code == 200, extra
    assert server.post("/v1/completions", {"prompt": PROMPT, "suffix": "", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize(
    "wish", [{"enabled": False}, {"method": "none"}, {"method": "ngram"}, {"num_speculative_tokens": 1}]
)
def test_speculation_is_chosen_per_request(client, expected, wish):
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, temperature=0.8, seed=7, max_tokens=24, extra_body={"speculative": wish}
    )
    assert answer.choices[0].text == expected["completion"].text
    speculation = answer.metrics["speculative_decoding"]
    if wish in ({"enabled": False}, {"method": "none"}):
        assert (speculation["num_spec_steps"], speculation["draft_acceptance_rate"]) == (0, None)
        assert speculation["method"] is None
    elif "method" in wish:
        assert speculation["method"] == "ngram"
    else:
        assert set(speculation["per_step_drafted"]) == {1}
        assert speculation["num_spec_tokens"] == 1


def test_several_prompts_and_answers(client, expected):
    options = {"model": "tiny", "prompt": ["a = ", "b = "], "n": 2, "temperature": 0.8, "seed": 7, "max_tokens": 8}
    answer = client.completions.create(**options)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert [answer.choices[0].text, answer.choices[2].text] == [e.text for e in expected["several"]]
    assert answer.usage.completion_tokens == sum(8 for _ in answer.choices)
    texts = [""] * 4
    for chunk in client.completions.create(**options, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [c.text for c in answer.choices]


def test_logprobs(client, expected):
    greedy = expected["greedy"]
    answer = client.completions.create(model="tiny", prompt=PROMPT, temperature=0, max_tokens=24, logprobs=2)
    result = answer.choices[0].logprobs
    assert result.token_logprobs == pytest.approx(
        [at[token].logprob for token, at in zip(greedy.token_ids, greedy.logprobs)], abs=1e-5
    )
    assert all(
        max(top.values()) == pytest.approx(value) for top, value in zip(result.top_logprobs, result.token_logprobs)
    )
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], temperature=0, max_tokens=8, logprobs=True,
        top_logprobs=3,
    )  # fmt: skip
    content = chat.choices[0].logprobs.content
    assert len(content) == 8
    assert all(len(item.top_logprobs) == 3 and item.logprob <= 0 for item in content)
    assert b"".join(bytes(item.bytes) for item in content).decode(errors="replace") == chat.choices[0].message.content


def test_a_prompt_alone_is_scored(client, server):
    """max_tokens 0: the probabilities are those of the prompt's part of an answer, and nothing else comes."""
    options = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "echo": True}
    longer = client.completions.create(**options, max_tokens=3, logprobs=2).choices[0].logprobs
    answer = client.completions.create(**options, max_tokens=0, logprobs=2)
    scored = answer.choices[0].logprobs
    count = answer.usage.prompt_tokens
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (PROMPT, "length")
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (0, count)
    assert (scored.tokens, scored.text_offset) == (longer.tokens[:count], longer.text_offset[:count])
    assert scored.top_logprobs == longer.top_logprobs[:count]
    assert scored.token_logprobs == longer.token_logprobs[:count]
    assert len(scored.token_logprobs) == count > 1
    chunks = list(client.completions.create(**options, max_tokens=0, n=2, stream=True))
    for index in range(2):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(choice.text for choice in own) == PROMPT
        assert own[-1].finish_reason == "length"


def test_trace_tells_every_token_and_draft(client, server):
    options = {"model": "tiny", "prompt": PROMPT, "temperature": 0.8, "seed": 7, "max_tokens": 24}
    extra = {"speculative": {"trace": True}}
    answer = client.completions.create(**options, extra_body=extra)
    rounds = answer.choices[0].trace
    assert "".join(text for r in rounds for text, _ in r["tokens"]) == answer.choices[0].text
    assert {origin for r in rounds for _, origin in r["tokens"]} <= {"accepted", "corrected", "bonus", "plain"}
    accepted = sum(origin == "accepted" for r in rounds for _, origin in r["tokens"])
    assert accepted + sum(len(r["rejected"]) for r in rounds) == sum(r["drafted"] for r in rounds) > 0
    for made in rounds:
        for texts, ids in (
            ([text for text, _ in made["tokens"]], made["token_ids"]),
            (made["rejected"], made["rejected_ids"]),
        ):
            alone = [server.post("/detokenize", {"tokens": [token]}).json()["prompt"] for token in ids]
            assert alone == texts
    tiled = client.completions.create(**options, extra_body=extra, stream=True)
    assert [r for chunk in tiled for r in chunk.choices[0].trace] == rounds


def test_a_trace_begins_with_the_answers_text(server):
    """Behind it are the stop text and what came in the same round; an unfinished character is in both."""
    body = {"prompt": PROMPT, "temperature": 0.8, "seed": 7, "max_tokens": 24, "speculative": {"trace": True}}
    text = server.post("/v1/completions", body).json()["choices"][0]["text"]
    byte = server.post("/tokenize", {"prompt": "🙂"}).json()["tokens"][0]
    for extra, rest in (
        ({"stop": [text[12:17]]}, text[12:17]),
        ({"logit_bias": {str(byte): 100}, "max_tokens": 2}, ""),
    ):
        (choice,) = server.post("/v1/completions", {**body, **extra}).json()["choices"]
        traced = "".join(token for made in choice["trace"] for token, _ in made["tokens"])
        assert traced.startswith(choice["text"] + rest)
    assert choice["text"].endswith("\ufffd")


def test_clients_that_go_cost_the_others_nothing(client, server, expected):
    """Streams are left, and connections dropped, while others wait for their answers and are given them."""

    def stay():
        answer = client.completions.create(model="tiny", prompt=PROMPT, temperature=0.8, seed=7, max_tokens=24)
        return answer.choices[0].text

    with ThreadPoolExecutor(6) as threads:
        staying = []
        for _ in range(6):
            staying.append(threads.submit(stay))
            with client.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
            ) as stream:
                next(iter(stream))
        assert [each.result() for each in staying] == [expected["completion"].text] * 6
    wait_idle(server)


@pytest.mark.parametrize("method", ["draft_model", "ngram", "pattern", None])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_structured_output(client, method, temperature):
    wish = {"enabled": False} if method is None else {"method": method}
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "who?"}], temperature=temperature, seed=2, max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
        extra_body={"speculative": wish},
    )  # fmt: skip
    value = json.loads(answer.choices[0].message.content)
    assert value["name"] in ("ada", "bob")
    assert 0 <= value["age"] <= 99
    if method == "pattern":
        assert answer.metrics["speculative_decoding"]["draft_acceptance_rate"] > 0.5


@pytest.mark.parametrize("extra", [
    {"choice": ["red", "green"]},
    {"regex": "(red|green)"},
    {"grammar": 'start: "red" | "green"'},
])  # fmt: skip
def test_vllms_keys_for_structured_output(client, extra):
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=10, seed=1, extra_body={"structured_outputs": extra}
    )
    assert answer.choices[0].text in ("red", "green")
    assert answer.choices[0].finish_reason == "stop"


def test_stop_and_bias(client, expected):
    text = expected["completion"].text
    stop = text[12:17]
    answer = client.completions.create(model="tiny", prompt=PROMPT, temperature=0.8, seed=7, max_tokens=24, stop=[stop])
    assert answer.choices[0].text == text[: text.index(stop)]
    assert (answer.choices[0].finish_reason, answer.choices[0].stop_reason) == ("stop", stop)
    token = expected["greedy"].token_ids[0]
    banned = client.completions.create(
        model="tiny", prompt=PROMPT, temperature=0, max_tokens=1, logit_bias={str(token): -100}, logprobs=0
    )
    first = client.completions.create(model="tiny", prompt=PROMPT, temperature=0, max_tokens=1, logprobs=0)
    assert banned.choices[0].logprobs.tokens != first.choices[0].logprobs.tokens


def test_models_and_tokens(client, server):
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert model.max_model_len == 512
    assert model.chat_template is True
    assert set(model.speculative) == {"draft_model", "ngram", "pattern"}
    assert client.models.retrieve("tiny").id == "tiny"
    tokens = server.post("/tokenize", {"prompt": "naïve = 'é'"}).json()["tokens"]
    text = "naïve = 'é'"  # vLLM's field and llama.cpp's
    assert server.post("/detokenize", {"tokens": tokens}).json() == {"prompt": text, "content": text}
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()
    assert server.post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"] == "<user>hi\n<assistant>"
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/version").json()["version"]


@pytest.mark.parametrize("stream", [False, True])
def test_predicted_outputs(client, expected, stream):
    """OpenAI's ``prediction``: the same answer, most of it accepted from the prediction."""
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    ask = {"model": "tiny", "messages": messages, "temperature": 0.8, "seed": 7, "max_tokens": 24}
    for content in (expected["chat"].text, [{"type": "text", "text": expected["chat"].text}], "something else"):
        given = {"prediction": {"type": "content", "content": content}}
        if stream:
            chunks = list(
                client.chat.completions.create(**ask, **given, stream=True, stream_options={"include_usage": True})
            )
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            usage = chunks[-1].usage
        else:
            answer = client.chat.completions.create(**ask, **given)
            text, usage = answer.choices[0].message.content, answer.usage
        assert text == expected["chat"].text
        details = usage.completion_tokens_details
        assert details.rejected_prediction_tokens >= 0
        assert (details.accepted_prediction_tokens > 12) == (content != "something else")
    assert client.chat.completions.create(**ask).usage.completion_tokens_details is None


def test_a_prediction_for_a_drafter_that_looks_up_nothing(server):
    body = {"prompt": PROMPT, "max_tokens": 4, "prediction": {"type": "content", "content": "a"}}
    answer = server.post("/v1/completions", {**body, "speculative": {"method": "draft_model"}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prediction")
    assert "drafts from no prediction: remove one" in answer.json()["error"]["message"]
    assert server.post("/v1/completions", {**body, "speculative": {"method": "ngram"}}).status_code == 200
    assert server.post("/v1/completions", {**body, "speculative": {"enabled": False}}).status_code == 200
    assert server.post("/v1/completions", {**body, "prediction": {"type": "diff"}}).status_code == 400

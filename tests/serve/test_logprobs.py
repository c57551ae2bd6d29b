"""Which tokens an answer lists, under what names, and where in its text: held against the text's own bytes."""

import ast
import json
from types import SimpleNamespace

import pytest
import torch
from running import run_server
from transformers import LlamaForCausalLM

from forerun import LLM, SamplingParams, pretrained
from forerun.engine.jobs import TokenLogprobs
from forerun.models.text.tokenizer import load_tokenizer
from forerun.serve.text import TextService, top_by_name

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WIDE = "x = '日本🙂' and not self"
SAMPLED = {"prompt": "def parse(", "temperature": 0.8, "seed": 7, "max_tokens": 24}


@pytest.fixture(scope="module", autouse=True)
def text(plain):
    return plain("def parse(", SamplingParams(temperature=0.8, seed=7, max_tokens=24)).text


def encoded(name):
    """A listed token's bytes: its text, or ``bytes:`` and Python's escapes."""
    if name.startswith("bytes:"):
        return ast.literal_eval(f"b'{name.removeprefix('bytes:')}'")
    return name.encode()


def check(listed, text):
    """The names spell the text, and every token is placed where its first byte's character begins."""
    assert len({len(column) for column in listed.values()}) == 1
    parts = [encoded(name) for name in listed["tokens"]]
    assert b"".join(parts) == text.encode()
    lengths = [len(b"".join(parts[:count]).decode(errors="ignore")) for count in range(len(parts))]
    assert listed["text_offset"] == lengths


def streamed(server, path, body):
    lines = server.post(path, {**body, "stream": True}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
    return [event["choices"][0] for event in events]


def joined(pieces):
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [item for piece in pieces for item in piece["logprobs"][name]] for name in names}


def test_offsets_count_the_characters_of_an_echoed_prompt(server):
    body = {"prompt": WIDE, "echo": True, "logprobs": 2, "max_tokens": 1, "structured_outputs": {"choice": ["z"]}}
    answer = server.post(COMPLETIONS, body).json()["choices"][0]
    assert answer["text"] == WIDE + "z"
    listed = answer["logprobs"]
    check(listed, WIDE + "z")
    assert any(name.startswith("bytes:") for name in listed["tokens"])
    assert "".join(listed["tokens"][i] for i, at in enumerate(listed["text_offset"]) if at >= WIDE.index(" and")) == (
        " and not selfz"
    )
    tokens = server.post("/tokenize", {"prompt": WIDE}).json()["tokens"]
    again = server.post(COMPLETIONS, {**body, "prompt": tokens}).json()["choices"][0]
    assert (again["text"], again["logprobs"]) == (answer["text"], listed)


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_and_names_of_an_answer(server, stream):
    chosen = {"choice": ["日本🙂 ŝelf naïve"]}
    body = {"prompt": "x = ", "logprobs": 3, "max_tokens": 60, "seed": 1, "structured_outputs": chosen}
    if stream:
        pieces = streamed(server, COMPLETIONS, body)
        text, listed = "".join(piece["text"] for piece in pieces), joined(pieces)
        assert any(piece["logprobs"]["tokens"] for piece in pieces[:-1])
    else:
        answer = server.post(COMPLETIONS, body).json()["choices"][0]
        text, listed = answer["text"], answer["logprobs"]
    assert text == "日本🙂 ŝelf naïve"
    assert (listed["tokens"][-1], listed["text_offset"][-1]) == ("<|endoftext|>", len(text))
    check({name: column[:-1] for name, column in listed.items()}, text)
    assert all(name in top for name, top in zip(listed["tokens"], listed["top_logprobs"]))


def test_no_two_tokens_share_a_name():
    tokenizer = load_tokenizer(pretrained.path("target"))
    service = TextService(tokenizer, 512)
    assert len({service.token_name(token) for token in range(len(tokenizer))}) == len(tokenizer)
    service.close()


def test_tokens_that_look_the_same_go_by_their_ids():
    names = SimpleNamespace(token_name={3: "a", 5: "a", 7: "a", 8: "b"}.__getitem__)
    result = top_by_name(TokenLogprobs(5, -2.0, 2, {3: -1.0, 5: -2.0, 7: -3.0, 8: float("-inf")}), names)
    assert result == {"a": -2.0, "token_id:3": -1.0, "token_id:7": -3.0, "b": -9999.0}


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("first", [0, 1, 5, 12, 23])
@pytest.mark.parametrize("length", [1, 4, 9])
def test_lists_end_where_a_stop_string_cut(server, text, first, length, kept):
    """The same tokens as without the stop, those that begin before the cut: whole, streamed and in chat."""
    stop = text[first : first + length]
    whole = server.post(COMPLETIONS, {**SAMPLED, "logprobs": 1}).json()["choices"][0]
    assert whole["text"] == text
    body = {**SAMPLED, "logprobs": 1, "stop": stop, "include_stop_str_in_output": kept}
    answer = server.post(COMPLETIONS, body).json()["choices"][0]
    cut = text.index(stop) + (len(stop) if kept else 0)
    assert (answer["text"], answer["stop_reason"]) == (text[:cut], stop)
    listed = sum(offset < cut for offset in whole["logprobs"]["text_offset"])
    for name, column in answer["logprobs"].items():
        assert column == whole["logprobs"][name][:listed]
    pieces = streamed(server, COMPLETIONS, body)
    assert joined(pieces) == answer["logprobs"]
    seen = ""
    for piece in pieces:  # nothing is listed before its text is shown
        seen += piece["text"]
        assert all(offset < len(seen) for offset in piece["logprobs"]["text_offset"])
    assert seen == text[:cut]


def test_chat_lists_end_there_too(server):
    body = {"messages": [{"role": "user", "content": "hi"}], "seed": 3, "max_tokens": 20, "logprobs": True}
    whole = server.post(CHAT, body).json()["choices"][0]
    text = whole["message"]["content"]
    stop = text[9:13]
    for extra in ({}, {"stream": True}):
        if extra:
            pieces = streamed(server, CHAT, {**body, "stop": stop})
            content = [item for piece in pieces if piece.get("logprobs") for item in piece["logprobs"]["content"]]
        else:
            content = server.post(CHAT, {**body, "stop": stop}).json()["choices"][0]["logprobs"]["content"]
        spelled = b"".join(bytes(item["bytes"]) for item in content[:-1])
        shown = text[: text.index(stop)].encode()
        assert spelled == shown[: len(spelled)] != shown
        assert len(spelled + bytes(content[-1]["bytes"])) >= len(shown)
        assert content == whole["logprobs"]["content"][: len(content)]


@pytest.fixture(scope="module")
def raw(model_folder):
    """transformers' log-probabilities in float32 of what follows each token."""
    model = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logprobs(tokens):
        return model(torch.tensor([tokens])).logits[0].log_softmax(-1)

    return logprobs


LONG = "def parse(line, sep):\n    return [part.strip() for part in line.split(sep)]\n\n\n"
PROMPTS = {COMPLETIONS: {"prompt": LONG}, CHAT: {"messages": [{"role": "user", "content": LONG}]}}


def of_prompt(answer):
    """vLLM has them in a completion's choices, and beside a chat's."""
    return answer.get("prompt_logprobs") or answer["choices"][0]["prompt_logprobs"]


@pytest.mark.parametrize("path", PROMPTS)
def test_log_probabilities_of_a_prompt(server, model_folder, raw, path):
    """By token id, in transformers' order, whatever drafts, and whatever is cached or read in pieces."""
    body = {**PROMPTS[path], "prompt_logprobs": 3, "max_tokens": 4, "temperature": 0}
    tokens = server.post("/tokenize", PROMPTS[path]).json()["tokens"]
    expected = raw(tokens)
    answers = [server.post(path, {**body, "speculative": how}).json() for how in ({"enabled": False}, {}, {})]
    again = server.post(path, {**PROMPTS[path], "max_tokens": 4}).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
    assert "prompt_logprobs" not in json.dumps(again)
    pieces = LLM(str(model_folder), speculative_config={"method": "ngram"}, max_num_batched_tokens=16, page_size=16)
    with run_server(pieces) as running:
        answers.append(running.post(path, body).json())
    first, *rest = map(of_prompt, answers)
    assert all(other == first for other in rest)
    assert (len(first), first[0]) == (len(tokens), None)
    tokenizer = load_tokenizer(model_folder)
    for index, given in enumerate(first[1:], start=1):
        row = expected[index - 1]
        own = tokens[index]
        assert [int(token) for token in given] == [own, *(t for t in row.topk(3).indices.tolist() if t != own)]
        for token, entry in given.items():
            value = row[int(token)]
            assert entry["logprob"] == pytest.approx(float(value), abs=1e-3)
            assert entry["rank"] == int((row > value).sum()) + 1
            assert entry["decoded_token"] == tokenizer.decode([int(token)])


def test_each_prompt_has_its_own(server, raw):
    prompts = [[5, 9, 12, 700], [5, 9, 13]]
    body = {"prompt": prompts, "n": 2, "max_tokens": 2, "prompt_logprobs": 0, "echo": True, "logprobs": 2}
    choices = server.post(COMPLETIONS, body).json()["choices"]
    assert len(choices) == 4
    for choice, tokens in zip(choices, [prompts[0], prompts[0], prompts[1], prompts[1]]):
        values = [None, *(float(row[token]) for row, token in zip(raw(tokens), tokens[1:]))]
        listed = [None if each is None else each.popitem() for each in choice["prompt_logprobs"]]
        assert [each and int(each[0]) for each in listed] == [None, *tokens[1:]]
        for (_, entry), value, echoed in zip(listed[1:], values[1:], choice["logprobs"]["token_logprobs"][1:]):
            assert entry["logprob"] == echoed == pytest.approx(value, abs=1e-3)
    fewer = server.post(COMPLETIONS, {**body, "prompt_logprobs": 9}).json()["choices"]
    assert [choice["logprobs"]["top_logprobs"][1:2] for choice in fewer] == [
        choice["logprobs"]["top_logprobs"][1:2] for choice in choices
    ]


@pytest.mark.parametrize(("fields", "message"), [
    ({"stream": True}, "does not go with stream"),
    ({"use_beam_search": True, "n": 2}, "beam search does not return log-probabilities"),
    ({"prompt_logprobs": -1}, "greater than or equal to 0"),
    ({"prompt_logprobs": 21}, "less than or equal to 20"),
    ({"prompt_logprobs": "all"}, "valid integer"),
])  # fmt: skip
@pytest.mark.parametrize("path", PROMPTS)
def test_what_has_no_prompt_logprobs(server, path, fields, message):
    answer = server.post(path, {**PROMPTS[path], "prompt_logprobs": 1, **fields})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]

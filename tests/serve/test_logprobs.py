"""Which tokens an answer lists, under what names, and where in its text: held against the text's own bytes."""

import ast
import json
from types import SimpleNamespace

import pytest

from forerun import SamplingParams, pretrained
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
    body = {"prompt": WIDE, "echo": True, "logprobs": 2, "max_tokens": 1, "guided_choice": ["z"]}
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
    body = {"prompt": "x = ", "logprobs": 3, "max_tokens": 60, "seed": 1, "guided_choice": ["日本🙂 ŝelf naïve"]}
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

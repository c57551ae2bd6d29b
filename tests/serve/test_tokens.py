"""Tokens, prompts and facts in llama.cpp's and vLLM's forms, against the tokenizer itself."""

import pytest
from running import ASK, TEMPLATE

from forerun.models.text.chat import render_chat

TEXT = "def f(x): return 'é 日本 🙂'"


@pytest.fixture(scope="module")
def tokenizer(served):
    return served.get_tokenizer()


def test_texts_become_tokens_in_both_forms(server, tokenizer):
    plain, special = tokenizer.encode(TEXT, add_special_tokens=False), tokenizer.encode(TEXT)
    for body, tokens in (
        ({"content": TEXT}, plain), ({"content": TEXT, "add_special": True, "parse_special": True}, special),
        ({"prompt": TEXT}, special), ({"prompt": TEXT, "add_special_tokens": False}, plain),
    ):  # fmt: skip
        answer = server.post("/tokenize", body).json()
        assert answer == {"tokens": tokens, "count": len(tokens), "max_model_len": 512}
    strings = server.post("/tokenize", {"prompt": TEXT, "return_token_strs": True}).json()["token_strs"]
    assert strings == tokenizer.convert_ids_to_tokens(special)
    for body in (
        {"content": "a", "prompt": "a"},
        {},
        {"prompt": "a", "with_pieces": True},
        {"content": "a", "parse_special": False},
    ):
        assert server.post("/tokenize", body).status_code == 400


def test_pieces_are_the_text(server, tokenizer):
    pieces = server.post("/tokenize", {"content": TEXT, "with_pieces": True}).json()["tokens"]
    assert [each["id"] for each in pieces] == tokenizer.encode(TEXT, add_special_tokens=False)
    joined = b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces)
    assert joined.decode() == TEXT
    assert any(isinstance(each["piece"], list) for each in pieces)


def test_a_conversation_becomes_its_prompt(server, served):
    tool = {"type": "function", "function": {"parameters": {"type": "object", "properties": {}}, "name": "add"}}
    for more in ({}, {"tools": [tool]}, {"add_generation_prompt": False}):
        answer = server.post("/apply-template", {"messages": ASK, **more})
        assert answer.json() == {"prompt": render_chat(served.tokenizer, ASK, chat_template=TEMPLATE, **more)}
    assert server.post("/apply-template", {"messages": []}).status_code == 400


def test_facts(server, tokenizer):
    props = server.http.get("/props").json()
    assert props["default_generation_settings"] == {"n_ctx": 512, "params": {}}
    assert (props["total_slots"], props["model_alias"], props["chat_template"]) == (4, "tiny", TEMPLATE)
    assert (props["bos_token"], props["eos_token"]) == (tokenizer.bos_token or "", tokenizer.eos_token)
    info = server.http.get("/tokenizer_info").json()
    assert info["tokenizer_class"] == type(tokenizer).__name__
    assert info["eos_token"] == tokenizer.eos_token
    assert info["chat_template"] == TEMPLATE
    assert "/" not in "".join(str(value) for name, value in info.items() if name.endswith(("_file", "path")))

"""Tokenizers out of GGUF metadata. ``tests/real`` compares whole vocabularies."""

import pytest

from forerun.core.errors import ModelError
from forerun.models.text.gguf_tokenizer import PRE_TOKENIZERS, make_tokenizer, vocabulary
from gguf_files import TEMPLATE, TOKENS, VOCABULARY
from refusals import refused


def tokenizer(**changes):
    changed = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return make_tokenizer(VOCABULARY | changed, "a.gguf")


def test_control_tokens_are_special_and_user_defined_ones_are_text():
    made = tokenizer()
    ids = made.encode("<|start|>the 12<tool> the<|end|>")
    assert made.convert_ids_to_tokens(ids) == ["<|start|>", "the", "Ġ", "1", "2", "<tool>", "Ġthe", "<|end|>"]
    assert made.decode(ids) == "<|start|>the 12<tool> the<|end|>"
    assert made.decode(ids, skip_special_tokens=True) == "the 12<tool> the"
    assert (made.bos_token, made.eos_token, made.chat_template) == ("<|start|>", "<|end|>", TEMPLATE)


@pytest.mark.parametrize(("pre", "changes", "expected"), [
    ("smollm", {}, []),
    ("smollm", {"add_bos_token": True}, [1]),
    ("smollm", {"add_bos_token": True, "add_eos_token": True}, [1, 0]),
    ("llama-bpe", {}, [1]),
    ("llama-bpe", {"add_bos_token": False}, []),
    ("smaug-bpe", {}, []),
    ("dbrx", {}, []),
])  # fmt: skip
def test_texts_begin_and_end_as_the_file_says(pre, changes, expected):
    made = tokenizer(pre=pre, **changes)
    the = TOKENS.index("the")
    assert made.encode("the") == [*expected[:1], the, *expected[1:]]
    assert made.encode("the", add_special_tokens=False) == [the]


def test_whole_words_come_before_merges():
    tokens = [*TOKENS, "cat"]
    kinds = [*VOCABULARY["tokenizer.ggml.token_type"], 1]
    for pre in ("llama-bpe", "smaug-bpe"):
        assert tokenizer(pre=pre, tokens=tokens, token_type=kinds).tokenize("cat") == ["cat"]
    assert tokenizer(pre="gpt-2", tokens=tokens, token_type=kinds).tokenize("cat") == ["c", "a", "t"]


def test_texts_are_composed_where_the_model_does_so():
    assert PRE_TOKENIZERS["qwen2"].nfc
    composed, left = tokenizer(pre="qwen2"), tokenizer(pre="smollm")
    assert composed.backend_tokenizer.normalizer.normalize_str("e\u0301") == "\u00e9"
    assert left.backend_tokenizer.normalizer is None


@pytest.mark.parametrize("pre", ["a-new-one", None])
def test_an_unknown_pre_tokenizer_is_an_error_that_lists_the_known(pre):
    message = str(refused(ModelError, None, tokenizer, pre=pre))
    assert f"a.gguf names no pre-tokenizer that is known (tokenizer.ggml.pre is {pre!r})" in message
    assert all(name in message for name in PRE_TOKENIZERS)


@pytest.mark.parametrize(("changes", "message"), [
    ({"model": "t5"}, "a tokenizer of kind 't5'; only byte-level BPE"),
    ({"tokens": None}, "no list of texts in tokenizer.ggml.tokens"),
    ({"token_type": [1, 1]}, "not as many entries in tokenizer.ggml.token_type"),
    ({"merges": ["t zz"]}, "merges 't zz', which is not in its vocabulary"),
    ({"merges": []}, "no list of texts in tokenizer.ggml.merges"),
    ({"eos_token_id": 999}, "999 as tokenizer.ggml.eos_token_id"),
    ({"add_bos_token": True, "bos_token_id": None}, "does not say which token that is"),
])  # fmt: skip
def test_contradictions_are_named(changes, message):
    refused(ModelError, message, tokenizer, **changes)


@pytest.mark.parametrize("ids", [-1, 999, 2**32 - 1, "0"])
def test_a_padding_id_that_is_no_token_is_none(ids):
    made = tokenizer(padding_token_id=ids)
    assert made.pad_token is None
    assert made.tokenize("the") == ["the"]


def test_twins_and_empty_tokens_have_ids_and_texts_of_their_own():
    kinds = [*VOCABULARY["tokenizer.ggml.token_type"], 1, 1, 1, 1, 3]
    made = tokenizer(tokens=[*TOKENS, "a", "the", "", "", "<tool>"], token_type=kinds)
    first = len(TOKENS)
    assert len(made) == first + 5
    assert [made.decode([token]) for token in range(first, first + 5)] == ["a", "the", "", "", "<tool>"]
    assert made.decode([TOKENS.index("the"), first + 2, first + 1, first]) == "thethea"
    assert made.encode("the a<tool>") == tokenizer().encode("the a<tool>")


def test_of_twins_the_one_that_texts_are_cut_by_keeps_its_name():
    kinds = [*VOCABULARY["tokenizer.ggml.token_type"], 1, 3]
    made = tokenizer(tokens=[*TOKENS, "<turn>", "<turn>"], token_type=kinds)
    assert made.encode("a<turn>") == [TOKENS.index("a"), len(TOKENS) + 1]


def test_phi_4s_added_tokens_take_the_spaces_around_them():
    for architecture, expected in (("phi3", ["the", "<|end|>", "the"]), ("llama", ["the", "Ġ", "<|end|>", "Ġthe"])):
        made = make_tokenizer(
            VOCABULARY | {"tokenizer.ggml.pre": "dbrx", "general.architecture": architecture}, "a.gguf"
        )
        assert made.convert_ids_to_tokens(made.encode("the <|end|> the")) == expected


@pytest.mark.parametrize(
    "tokens", [TOKENS, [*TOKENS, "a", "the", "", "", "<tool>"], [*TOKENS, "<turn>", "<turn>"], [*TOKENS, "<|im_end|>"]]
)
def test_a_vocabulary_is_its_tokenizers(tokens):
    kinds = [*VOCABULARY["tokenizer.ggml.token_type"], *[1] * (len(tokens) - len(TOKENS) - 1), 3][: len(tokens)]
    metadata = VOCABULARY | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    assert vocabulary(metadata, "a.gguf") == make_tokenizer(metadata, "a.gguf").get_vocab()

"""Text as it grows, against decoding everything at once; and what makes two tokenizers a pair."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from forerun import LLM, SamplingParams
from forerun.cli.trace import REJECTED, parts
from forerun.core.errors import ConfigError, ModelError
from forerun.core.request import RequestState
from forerun.engine.jobs import TokenLogprobs, by_token
from forerun.engine.metrics import CORRECTED, RoundTrace
from forerun.models.text.gguf_tokenizer import make_tokenizer
from forerun.models.text.tokenizer import REPLACEMENT, Detokenizer, load_tokenizer, token_text
from forerun.serve.text import TextService
from refusals import refused
from tiny import ALPHABET, byte_tokenizer, save_checkpoint, save_tokenizer, tiny_llama

TEXT = "def naïve(x): return 'žluťoučký kůň' # 中文字符 и кириллица 👩‍👩‍👧‍👦 🎉🎉 ٣٤٥\n" * 3
VALID = st.text(alphabet=st.sampled_from([*TEXT, "\t", "a", "€", "𝄞", "한", "\U0001f600"]), max_size=60)


def byte_fallback():
    """As Llama 2: characters without a token are spelt in byte tokens, and a leading space is stripped."""
    vocabulary = ["<unk>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", *"abcdefg", "▁a", "▁the"]
    merges = [("▁", "a")]
    tokenizer = Tokenizer(
        BPE({token: i for i, token in enumerate(vocabulary)}, merges, byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


BYTE_LEVEL, BYTE_FALLBACK = byte_tokenizer([TEXT], 297, ["<eos>"]), byte_fallback()


def whole(tokenizer, tokens):
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def grown(tokenizer, tokens, prompt=(), sizes=(1,)):
    """The text from pushing ``tokens`` in pieces of the given sizes; what was said once is never taken back."""
    detokenizer = Detokenizer(tokenizer, prompt)
    start, turn, said = 0, 0, ""
    while start < len(tokens):
        size = sizes[turn % len(sizes)]
        said += detokenizer.push(tokens[start : start + size])
        assert said == detokenizer.text
        start, turn = start + size, turn + 1
    said += detokenizer.finish()
    assert said == detokenizer.text
    return said


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(VALID, SIZES)
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])
def test_text_grows_to_what_decoding_at_once_gives(tokenizer, text, sizes):
    tokens = tokenizer.encode(text)
    assert grown(tokenizer, tokens, sizes=sizes) == whole(tokenizer, tokens)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 296), max_size=80), SIZES)
def test_any_tokens_at_all(tokens, sizes):
    """Bytes that are no text, special tokens among them."""
    assert grown(BYTE_LEVEL, tokens, sizes=sizes) == whole(BYTE_LEVEL, tokens)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 263), max_size=80), SIZES)
def test_which_tokens_came_together_makes_no_difference(tokens, sizes):
    """Runs of byte tokens that are no text: one bad byte spoils what was a character before it."""
    assert grown(BYTE_FALLBACK, tokens, sizes=sizes) == grown(BYTE_FALLBACK, tokens)


def test_nothing_is_decoded_before_somebody_asks():
    tokens = BYTE_LEVEL.encode("naïve 中文")
    detokenizer, decoded = Detokenizer(BYTE_LEVEL, tokens), []
    decode = detokenizer._decode
    detokenizer._decode = lambda ids: decoded.append(list(ids)) or decode(ids)
    for token in tokens:
        detokenizer.add([token])
    assert not decoded
    assert detokenizer.text == "naïve 中文"
    count = len(decoded)
    assert (detokenizer.finish(), detokenizer.finish(), detokenizer.text) == ("", "", "naïve 中文")
    assert len(decoded) == count > 0


@settings(max_examples=60, deadline=None)
@given(VALID, VALID)
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])
def test_behind_a_prompt(tokenizer, prompt, text):
    before, tokens = tokenizer.encode(prompt), tokenizer.encode(text)
    said = grown(tokenizer, tokens, prompt=before)
    assert not before or whole(tokenizer, before) + said == whole(tokenizer, before + tokens)


@pytest.mark.parametrize("text", ["中文字符" * 30, "👩‍👩‍👧‍👦" * 20, "ab" * 100, "€ " * 50])
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])
def test_long_runs_and_short_windows(tokenizer, text):
    tokens, lengths = tokenizer.encode(text), []
    detokenizer = Detokenizer(tokenizer)
    decode = detokenizer._decode
    detokenizer._decode = lambda ids: lengths.append(len(ids)) or decode(ids)
    for token in tokens:
        detokenizer.push([token])
    detokenizer.finish()
    assert detokenizer.text == whole(tokenizer, tokens)
    assert max(lengths) < 40 < len(tokens)


def test_a_character_is_said_when_it_is_complete():
    tokens = BYTE_FALLBACK.encode("a😀")[-5:]
    assert [*map(Detokenizer(BYTE_FALLBACK).push, zip(tokens))] == ["a", "", "", "", "😀"]


@pytest.mark.parametrize("skip", [True, False])
def test_an_answer_is_spelled_behind_its_prompt_and_as_it_asks(skip):
    """A text's first space is stripped, an answer's is not."""
    prompt, tokens = BYTE_FALLBACK.encode("the a"), [*BYTE_FALLBACK.encode("the"), BYTE_FALLBACK.eos_token_id]
    params = SamplingParams(skip_special_tokens=skip)
    detokenizer = Detokenizer.of(BYTE_FALLBACK, RequestState(0, [*prompt, *tokens[:1]], len(prompt), params, 0))
    assert "".join(detokenizer.spell(tokens, last=True)) == " the" + ("" if skip else "</s>")


def sentence_piece():
    """As Llama 2's: a space before every text, which decoding takes off again."""
    special, letters = ["<unk>", "<s>", "</s>"], [*"\u2581abcdefghijklmnopqrstuvwxyz"]
    pieces = ["\u2581t", "ru", "\u2581tru", "\u2581true", "tr", "tru", "true", "hi", "\u2581hi", "\u2581\u2581"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *letters]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(pieces + letters)]
    scores = [0.0] * 259 + [-float(index) for index in range(len(pieces + letters))]
    keys = {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores, "bos_token_id": 1}
    return make_tokenizer({f"tokenizer.ggml.{key}": value for key, value in keys.items()}, "file")


SENTENCE_PIECE = sentence_piece()


def test_a_token_keeps_the_space_that_it_begins_with():
    ids = SENTENCE_PIECE.convert_tokens_to_ids(["\u2581true", "true", "\u2581", "\u2581\u2581", "<0x0A>", "</s>"])
    assert [token_text(SENTENCE_PIECE, token) for token in ids] == [" true", "true", " ", "  ", "\n", "</s>"]
    service = TextService(SENTENCE_PIECE, 100)
    both = (ids[0], SENTENCE_PIECE.convert_tokens_to_ids("<0xC3>"))
    assert [*map(service.token_text, both)] == [(" true", [*b" true"]), (REPLACEMENT, [0xC3])]
    service.close()
    found = parts(RoundTrace((ids[1],), (CORRECTED,), (ids[0],), 1, "ngram"), SENTENCE_PIECE)
    assert found == [(REJECTED, " true"), (CORRECTED, "true")]


def test_the_first_difference_of_two_vocabularies_is_named(tiny_target, tmp_path):
    tiny_llama(layers=1).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, [*ALPHABET[:7], ALPHABET[8], ALPHABET[7], *ALPHABET[9:]])
    drafted = {"speculative_config": {"method": "draft_model", "model": str(tmp_path)}}
    message = "differs from the target's: id 7 is 'd' in .* and 'e' in .*use_heterogeneous_vocab"
    refused(ConfigError, message, LLM, tiny_target, **drafted)
    save_checkpoint(tiny_llama(layers=1, vocab_size=len(ALPHABET) + 1), tmp_path, [*ALPHABET, "é"])
    refused(ConfigError, "id 98 is None in .* and 'é' in ", LLM, tiny_target, **drafted)


def test_a_draft_that_ends_texts_elsewhere_drafts_for_the_targets_ends(tiny_target, tmp_path):
    save_checkpoint(tiny_llama(layers=1, eos_token_id=[5, 7]), tmp_path)
    drafted = LLM(tiny_target, speculative_config={"method": "draft_model", "model": str(tmp_path)}, max_model_len=64)
    params = [SamplingParams(seed=seed, logit_bias={0: 3.0, 5: 3.0}) for seed in range(8)]
    result, expected = (each.generate(["hello"] * 8, params) for each in (drafted, LLM(tiny_target, max_model_len=64)))
    assert drafted.model.info.eos_ids == {0}
    assert [out.outputs[0].token_ids for out in result] == [out.outputs[0].token_ids for out in expected]
    assert 5 in [token for out in result for token in out.outputs[0].token_ids]
    assert any(out.outputs[0].finish_reason == "stop" for out in result)


def test_a_tokenizers_own_end_of_text_ends_answers_too(tiny_target, tmp_path):
    """As in vLLM: Phi-3 and Qwen have other ends in their generation config."""
    save_checkpoint(tiny_llama(eos_token_id=[5, 7]), tmp_path)
    llm = LLM(str(tmp_path), max_model_len=64)
    assert llm.model.info.eos_ids == {llm.tokenizer.eos_token_id, 5, 7}
    for token in sorted(llm.model.info.eos_ids):
        answer = llm.generate("hello", SamplingParams(temperature=0, logit_bias={token: 1000.0}))[0].outputs[0]
        assert (answer.token_ids, answer.finish_reason) == ([token], "stop")


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK, SENTENCE_PIECE], ids=["bytes", "fallback", "pieces"])
def test_texts_of_tokens_make_up_the_text(tokenizer):
    text = "a hi  hi\n true\u00e9 truehi"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    before = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.decode([*before, *tokens]).removeprefix(tokenizer.decode(before))
    texts = [token_text(tokenizer, token) for token in tokens]
    assert [text for text in texts if REPLACEMENT not in text]
    assert REPLACEMENT in "".join(texts) or "".join(texts) == whole
    items = [TokenLogprobs(token, -1.0, 2, {other: -0.5}) for token, other in zip(tokens, reversed(tokens))]
    result = by_token(items, tokenizer, before)
    assert "".join(each[token].decoded_token for each, token in zip(result, tokens)) == whole
    for end in range(1, len(tokens)):  # some cuts are inside a character; the last token has what there is of it
        cut = tokenizer.decode([*before, *tokens[:end]]).removeprefix(tokenizer.decode(before))
        texts = [each[token].decoded_token for each, token in zip(by_token(items[:end], tokenizer, before), tokens)]
        assert "".join(texts) == cut
    others = [(each, other) for each, token, other in zip(result, tokens, reversed(tokens)) if token != other]
    assert all(each[other].decoded_token == token_text(tokenizer, other) for each, other in others)


def test_padding_and_logits_beyond_the_tokenizer_are_none(tiny_target, tmp_path):
    save_checkpoint(tiny_llama(layers=1, vocab_size=len(ALPHABET) + 30, pad_token_id=3), tmp_path)
    drafter = {"method": "draft_model", "model": str(tmp_path), "length": "fixed"}
    llm = LLM(tiny_target, speculative_config=drafter, max_model_len=64)
    assert llm.generate("hello", SamplingParams(seed=0, ignore_eos=True))[0].metrics.num_draft_tokens > 0


def test_a_tokenizer_that_is_missing_or_broken(tmp_path):
    tiny_llama(layers=1).save_pretrained(tmp_path)
    refused(ModelError, "has no usable tokenizer", load_tokenizer, tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    refused(ModelError, "has no usable tokenizer", load_tokenizer, tmp_path)


@pytest.mark.parametrize(("model", "kind"), [
    ("llama", "TokenizersBackend"), ("llama", "LlamaTokenizerFast"), ("qwen2", "Qwen2Tokenizer"),
    ("t5", "GPT2Tokenizer"), ("mistral", "LlamaTokenizer"), ("nosuch", "Nosuch"), ("qwen3", None), ("gpt2", "Own"),
])  # fmt: skip
def test_a_tokenizer_is_the_one_that_transformers_makes(tmp_path, monkeypatch, model, kind):
    """Where it names its class, the model's own config, whose import takes seconds, is not made."""
    BYTE_LEVEL.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<eos>"}))
    own = {"auto_map": {"AutoTokenizer": [None, "own.Own"]}} if kind == "Own" else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, **own}))
    expected = AutoTokenizer.from_pretrained(tmp_path)
    monkeypatch.setattr(AutoConfig, "from_pretrained", None if kind and not own else AutoConfig.from_pretrained)
    found = load_tokenizer(tmp_path)
    assert (type(found), found.encode(TEXT)) == (type(expected), expected.encode(TEXT))

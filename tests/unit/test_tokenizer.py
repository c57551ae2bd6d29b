"""Text as it grows, against decoding everything at once; and what makes two tokenizers a pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from forerun import LLM, SamplingParams
from forerun.core.errors import ConfigError, ModelError
from forerun.models.tokenizer import Detokenizer, load_tokenizer
from tiny import ALPHABET, save_tokenizer, tiny_llama

TEXT = "def naïve(x): return 'žluťoučký kůň' # 中文字符 и кириллица 👩‍👩‍👧‍👦 🎉🎉 ٣٤٥\n" * 3
VALID = st.text(alphabet=st.sampled_from([*TEXT, "\t", "a", "€", "𝄞", "한", "\U0001f600"]), max_size=60)


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3 and Qwen: tokens are pieces of UTF-8, 40 of them learnt."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=297, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def byte_fallback() -> PreTrainedTokenizerFast:
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


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()


def whole(tokenizer, tokens) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def grown(tokenizer, tokens, prompt=(), sizes=(1,)) -> str:
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
    if before:
        assert whole(tokenizer, before) + said == whole(tokenizer, before + tokens)


@pytest.mark.parametrize("text", ["中文字符" * 30, "👩‍👩‍👧‍👦" * 20, "ab" * 100, "€ " * 50])
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])
def test_long_runs_and_short_windows(tokenizer, text):
    tokens, longest = tokenizer.encode(text), 0
    detokenizer = Detokenizer(tokenizer)
    decode = tokenizer.decode

    def watched(ids, **options):
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids, **options)

    detokenizer._decode = lambda ids: watched(ids, skip_special_tokens=True)
    for token in tokens:
        detokenizer.push([token])
    detokenizer.finish()
    assert detokenizer.text == whole(tokenizer, tokens)
    assert longest < 40 < len(tokens)


def test_a_character_is_said_when_it_is_complete():
    tokens = BYTE_FALLBACK.encode("a😀")[-5:]
    detokenizer = Detokenizer(BYTE_FALLBACK)
    assert [detokenizer.push([token]) for token in tokens] == ["a", "", "", "", "😀"]


def test_special_tokens_are_said_on_request():
    tokens = [*BYTE_LEVEL.encode("a"), BYTE_LEVEL.eos_token_id]
    assert grown(BYTE_LEVEL, tokens) == "a"
    shown = Detokenizer(BYTE_LEVEL, skip_special_tokens=False)
    assert shown.push(tokens) == "a<eos>"


def refuse(target: str, draft: Path, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(target, speculative_config={"method": "draft_model", "model": str(draft)})


def test_the_first_difference_of_two_vocabularies_is_named(tiny_target, tmp_path):
    tiny_llama(layers=1).save_pretrained(tmp_path)
    swapped = [*ALPHABET[:7], ALPHABET[8], ALPHABET[7], *ALPHABET[9:]]
    save_tokenizer(tmp_path, swapped)
    refuse(tiny_target, tmp_path, "differs from the target's: id 7 is 'd' in .* and 'e' in .*use_heterogeneous_vocab")


def test_a_longer_vocabulary_differs_where_the_shorter_ends(tiny_target, tmp_path):
    tiny_llama(layers=1, vocab_size=len(ALPHABET) + 1).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, [*ALPHABET, "é"])
    refuse(tiny_target, tmp_path, "id 98 is None in .* and 'é' in ")


def test_other_ends_of_text_are_a_difference(tiny_target, tmp_path):
    tiny_llama(layers=1, eos_token_id=[0, 5]).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    refuse(tiny_target, tmp_path, r"ends texts with other ids than the target: \[0, 5\] in .*, \[0\] in ")


def test_padding_and_logits_beyond_the_tokenizer_are_none(tiny_target, tmp_path):
    tiny_llama(layers=1, vocab_size=len(ALPHABET) + 30, pad_token_id=3).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    llm = LLM(tiny_target, speculative_config={"method": "draft_model", "model": str(tmp_path)}, max_model_len=64)
    params = SamplingParams(seed=0, ignore_eos=True)
    assert llm.generate("hello", params)[0].metrics.num_draft_tokens > 0


def test_a_tokenizer_that_is_missing_or_broken(tmp_path):
    tiny_llama(layers=1).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="has no usable tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(ModelError, match="has no usable tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)

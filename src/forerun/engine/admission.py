"""A request's options as the engine runs them: ids that the model has, words as tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from forerun.core.errors import ContextLengthError, RequestError, shown
from forerun.models.tokenizer import encode
from forerun.sampling.params import SamplingParams


def admit(params: SamplingParams, vocab_size: int, tokenizer: Any) -> SamplingParams:
    """Raises RequestError for an id that the model lacks, and for text where there is no tokenizer or that is none."""
    banned = params.bad_words_ids
    if params.bad_words:
        banned = tuple(sorted({*banned, *_bad_words(params.bad_words, tokenizer)}))
    named = {
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "stop_token_ids": params.stop_token_ids or (),
        "bad_words": [token for word in banned for token in word],
    }
    for name, tokens in named.items():
        for token in tokens:
            if token >= vocab_size:
                raise RequestError(f"token id {shown(token)} is outside the vocabulary of {vocab_size}", param=name)
    if params.stop and tokenizer is None:
        raise RequestError("stop strings need a tokenizer")
    top_k = min(params.top_k, vocab_size)
    if (banned, top_k) == (params.bad_words_ids, params.top_k):
        return params
    return replace(params, bad_words_ids=banned, top_k=top_k)


def truncated(prompt: Seq[int], params: SamplingParams, max_model_len: int) -> Seq[int]:
    """The prompt's last tokens, as many as ``truncate_prompt_tokens`` says."""
    count = params.truncate_prompt_tokens
    if count == -1:
        count = max(1, max_model_len - (params.max_tokens or 1))
    return prompt if count is None else prompt[-count:]


def check_length(prompt: Seq[int], max_model_len: int) -> None:
    """Raise ContextLengthError if ``prompt`` leaves no room for an answer."""
    if len(prompt) >= max_model_len:
        room = f"max_model_len {max_model_len} leaves no room"
        raise ContextLengthError(f"the prompt has {len(prompt)} tokens; {room}", param="prompt")


def _bad_words(words: Seq[str], tokenizer: Any) -> set[tuple[int, ...]]:
    """Token sequences of each word: as it is, and with and without a space before it (as vLLM)."""
    if tokenizer is None:
        raise RequestError("bad_words need a tokenizer")
    texts = {text for word in words for text in (word, word.lstrip(" "), " " + word.lstrip(" "))}
    found = (tuple(encode(tokenizer, text, add_special_tokens=False)) for text in texts)
    return {ids for ids in found if ids}

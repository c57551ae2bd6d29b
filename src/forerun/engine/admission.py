"""A request as the engine runs it: a prompt that fits, ids that the model has, words as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.cache.sources import Sources
from forerun.core.config import as_python
from forerun.core.errors import ContextLengthError, RequestError, shown
from forerun.models.base import ModelInfo
from forerun.models.tokenizer import encode
from forerun.sampling.params import SamplingParams

AROUND = ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id")
"""What tokenizers put around a text."""


@dataclass(frozen=True)
class Validator:
    """What a model takes; ``sources`` are those of an encoder-decoder."""

    info: ModelInfo
    tokenizer: Any
    max_model_len: int
    sources: Sources | None

    @property
    def longest_source(self) -> int | None:
        """Tokens that an encoder reads; None: it is a decoder."""
        return None if self.sources is None else min(self.sources.longest, self.max_model_len)

    def admit(
        self,
        prompt: Sequence[int],
        decoder_prompt: Sequence[int] | None,
        params: SamplingParams,
        committed: Sequence[int] = (),
    ) -> tuple[tuple[int, ...] | None, Sequence[int], Sequence[int], SamplingParams]:
        """What the encoder reads, if there is one, what the decoder goes on behind, ``committed``, which comes behind
        that, and the options. Raises RequestError."""
        prompt = self._truncated(token_ids(prompt), params)
        self._check_given(prompt)
        committed = token_ids(committed)
        self._check_ids(committed)
        source: tuple[int, ...] | None = None
        if self.info.encoder is not None:
            if params.prompt_logprobs is not None:
                raise RequestError(
                    "an encoder reads its prompt at once: it has no prompt_logprobs", param="prompt_logprobs"
                )
            check_length(prompt, self.max_model_len, self.longest_source)
            source, prompt = tuple(prompt), self._begin(decoder_prompt, self.info.encoder.start)
        elif decoder_prompt is not None:
            raise RequestError(f"{self.info.name} is a decoder: it has no decoder_prompt", param="prompt")
        check_length([*prompt, *committed], self.max_model_len)
        return source, prompt, committed, known(params, self.info.vocab_size, self.tokenizer)

    def _check_given(self, prompt: Sequence[int]) -> None:
        empty, given = not len(prompt), "prompt"
        if self.info.encoder is not None:
            given, empty = "source", {*prompt} <= {getattr(self.tokenizer, name, None) for name in AROUND}
        if empty:
            raise RequestError(f"the {given} is empty: give at least one token", param="prompt")
        self._check_ids(prompt)

    def _check_ids(self, tokens: Sequence[int]) -> None:
        size = self.info.vocab_size
        for token in tokens:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < size:
                raise RequestError(f"token id {shown(token)} is outside the vocabulary of {size}", param="prompt")

    def _begin(self, given: Sequence[int] | None, start: tuple[int, ...]) -> list[int]:
        """What the decoder goes on behind: ``given``, behind the token that every answer begins with."""
        tokens = list(start) if given is None else token_ids(given)
        self._check_ids(tokens)
        tokens = tokens if tokens[:1] == [start[0]] else [start[0], *tokens]
        if len(tokens) >= self.max_model_len:
            message = f"the decoder_prompt has {len(tokens)} tokens; max_model_len {self.max_model_len} leaves no room"
            raise ContextLengthError(message, param="prompt")
        return tokens

    def _truncated(self, prompt: Sequence[int], params: SamplingParams) -> Sequence[int]:
        """The prompt's last tokens, as many as ``truncate_prompt_tokens`` says."""
        count = params.truncate_prompt_tokens
        if count == -1:
            count = self.longest_source or max(1, self.max_model_len - (params.max_tokens or 1))
        return prompt if count is None else prompt[-count:]


def token_ids(given: Any) -> list[int]:
    """Ids as Python's integers; they may be NumPy's or torch's, or arrays of theirs."""
    return [token if type(token) is int else as_python(token) for token in as_python(given)]


def known(params: SamplingParams, vocab_size: int, tokenizer: Any) -> SamplingParams:
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


def check_length(prompt: Sequence[int], max_model_len: int, longest_source: int | None = None) -> None:
    """Raise ContextLengthError if ``prompt`` leaves no room for an answer, or is more than an encoder reads."""
    most, reason = max_model_len - 1, f"max_model_len {max_model_len} leaves no room"
    if longest_source is not None:
        most, reason = longest_source, f"the encoder reads at most {longest_source}"
    if len(prompt) > most:
        raise ContextLengthError(f"the prompt has {len(prompt)} tokens; {reason}", param="prompt")


def _bad_words(words: Sequence[str], tokenizer: Any) -> set[tuple[int, ...]]:
    """Token sequences of each word: as it is, and with and without a space before it (as vLLM)."""
    if tokenizer is None:
        raise RequestError("bad_words need a tokenizer")
    texts = {text for word in words for text in (word, word.lstrip(" "), " " + word.lstrip(" "))}
    result = (tuple(encode(tokenizer, text, add_special_tokens=False)) for text in texts)
    return {ids for ids in result if ids}

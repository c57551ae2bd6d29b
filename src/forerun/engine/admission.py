"""Validates requests: lengths, token ids, and options that need the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.cache.sources import Sources
from forerun.core.config import to_python
from forerun.core.errors import ContextLengthError, RequestError, shown
from forerun.models.run.base import ModelInfo
from forerun.models.text.tokenizer import encode
from forerun.sampling.params import SamplingParams

SURROUNDING = ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id")
"""Special tokens that tokenizers put around a text; a source of nothing else is empty."""


@dataclass(frozen=True)
class Validator:
    """Checks requests against a model; ``sources`` is an encoder-decoder's cache of encoded prompts."""

    info: ModelInfo
    tokenizer: Any
    max_model_len: int
    sources: Sources | None

    @property
    def longest_source(self) -> int | None:
        """Most tokens that the encoder reads; None for a decoder."""
        return None if self.sources is None else min(self.sources.longest, self.max_model_len)

    def admit(
        self,
        prompt: Sequence[int],
        decoder_prompt: Sequence[int] | None,
        params: SamplingParams,
        committed: Sequence[int] = (),
    ) -> tuple[tuple[int, ...] | None, Sequence[int], Sequence[int], SamplingParams]:
        """Checks a request.

        Returns:
            The encoder's source (None for a decoder), the decoder's prompt, ``committed`` (tokens of the answer that
            were given before), and the options with ``bad_words`` as ids and ``top_k`` within the vocabulary.

        Raises:
            RequestError: the request cannot be run.
        """
        prompt = token_ids(prompt)
        if (count := self._kept_tokens(params)) is not None:
            prompt = prompt[-count:]
        self._check_prompt(prompt)
        committed = token_ids(committed)
        self.check_ids(committed)
        source: tuple[int, ...] | None = None
        if self.info.encoder is not None:
            if params.prompt_logprobs is not None:
                raise RequestError(
                    "encoder-decoders do not support prompt_logprobs: remove it", param="prompt_logprobs"
                )
            check_length(prompt, self.max_model_len, self.longest_source)
            source, prompt = tuple(prompt), self._decoder_prompt(decoder_prompt, self.info.encoder.start)
        elif decoder_prompt is not None:
            raise RequestError(f"{self.info.name} is decoder-only: remove decoder_prompt", param="prompt")
        check_length([*prompt, *committed], self.max_model_len)
        return source, prompt, committed, self._resolve(params)

    def _kept_tokens(self, params: SamplingParams) -> int | None:
        """How many of the prompt's last tokens ``truncate_prompt_tokens`` keeps; None: all."""
        if params.truncate_prompt_tokens != -1:
            return params.truncate_prompt_tokens
        return self.longest_source or max(1, self.max_model_len - (params.max_tokens or 1))

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        name, empty = "prompt", not len(prompt)
        if self.info.encoder is not None:
            name, empty = "source", {*prompt} <= {getattr(self.tokenizer, name, None) for name in SURROUNDING}
        if empty:
            raise RequestError(f"the {name} is empty: it needs at least one token", param="prompt")
        self.check_ids(prompt)

    def check_ids(self, tokens: Sequence[int], param: str = "prompt") -> None:
        """Raises RequestError for an id that the model lacks."""
        for token in tokens:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.info.vocab_size:
                raise self._unknown_id(token, param)

    def _unknown_id(self, token: Any, param: str) -> RequestError:
        return RequestError(f"token id {shown(token)} is outside the vocabulary of {self.info.vocab_size}", param=param)

    def _decoder_prompt(self, given: Sequence[int] | None, start: tuple[int, ...]) -> list[int]:
        """``given`` after the decoder's start token; the checkpoint's ``start`` where it is None."""
        tokens = list(start) if given is None else token_ids(given)
        self.check_ids(tokens)
        tokens = tokens if tokens[:1] == [start[0]] else [start[0], *tokens]
        if len(tokens) >= self.max_model_len:
            message = f"the decoder_prompt has {len(tokens)} tokens; max_model_len {self.max_model_len} leaves no room"
            raise ContextLengthError(message, param="prompt")
        return tokens

    def _resolve(self, params: SamplingParams) -> SamplingParams:
        """The options with ``bad_words`` as ids and ``top_k`` within the vocabulary. Raises RequestError for an id
        that the model lacks, and for text options without a tokenizer."""
        bad_words = params.bad_words_ids
        if params.bad_words:
            bad_words = tuple(sorted({*bad_words, *self._bad_words(params.bad_words)}))
        ids_by_option = {
            "logit_bias": params.logit_bias or (),
            "allowed_token_ids": params.allowed_token_ids or (),
            "stop_token_ids": params.stop_token_ids or (),
            "bad_words": [token for word in bad_words for token in word],
        }
        for name, tokens in ids_by_option.items():
            for token in tokens:
                if token >= self.info.vocab_size:
                    raise self._unknown_id(token, name)
        if params.stops_in_text and self.tokenizer is None:
            raise RequestError("stop strings and min_indent need a tokenizer")
        top_k = min(params.top_k, self.info.vocab_size)
        if (bad_words, top_k) == (params.bad_words_ids, params.top_k):
            return params
        return replace(params, bad_words_ids=bad_words, top_k=top_k)

    def _bad_words(self, words: Sequence[str]) -> set[tuple[int, ...]]:
        """Token sequences of each word: as it is, and with and without a space before it (as vLLM)."""
        if self.tokenizer is None:
            raise RequestError("bad_words need a tokenizer")
        texts = {text for word in words for text in (word, word.lstrip(" "), " " + word.lstrip(" "))}
        ids = (tuple(encode(self.tokenizer, text, add_special_tokens=False)) for text in texts)
        return {word for word in ids if word}


def token_ids(given: Any) -> list[int]:
    """Ids as Python integers, from a list, or an array of NumPy or torch."""
    return [token if type(token) is int else to_python(token) for token in to_python(given)]


def check_length(prompt: Sequence[int], max_model_len: int, longest_source: int | None = None) -> None:
    """Raises ContextLengthError if ``prompt`` leaves no room for an answer, or is more than an encoder reads."""
    most, reason = max_model_len - 1, f"max_model_len {max_model_len} leaves no room"
    if longest_source is not None:
        most, reason = longest_source, f"the encoder reads at most {longest_source}"
    if len(prompt) > most:
        raise ContextLengthError(f"the prompt has {len(prompt)} tokens; {reason}", param="prompt")

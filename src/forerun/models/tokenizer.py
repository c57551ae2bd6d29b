"""Tokenizers: loading, compatibility of a pair, and text as it grows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from forerun.core.errors import ConfigError, ModelError, RequestError, check_text
from forerun.core.request import RequestState
from forerun.models.base import ModelInfo
from forerun.models.checkpoint import library, read_object
from forerun.models.gguf import is_gguf, open_gguf
from forerun.models.gguf_tokenizer import GGUFTokenizer, make_tokenizer, vocabulary
from forerun.models.open import quiet, resolve
from forerun.models.sanity import check_tokenizer


def load_tokenizer(path_or_id: str | Path) -> Any:
    """The tokenizer of a checkpoint or a GGUF file. Raises ModelError."""
    folder = resolve(path_or_id)
    problem = f"{folder} has no usable tokenizer"
    with library(problem):
        tokenizer: Any
        if is_gguf(folder):
            tokenizer = make_tokenizer(open_gguf(folder).metadata, str(folder))
        else:
            tokenizer = _from_folder(folder)
        tokenizer.decode(tokenizer.encode(""))  # what comes before and after a text may be damaged too
        known = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
        if (
            len(tokenizer) <= len(known) and set(tokenizer.get_vocab()) <= known
        ):  # transformers makes an empty one where the files are missing
            raise ModelError(f"{problem}: it has no tokens but special ones; is tokenizer.json missing?")
        template = getattr(tokenizer, "chat_template", None)
        if template is not None and not isinstance(template, (str, dict)):
            raise ModelError(f"{problem}: its chat_template is {type(template).__name__}, not text")
    return tokenizer


def _from_folder(folder: Path) -> Any:
    from transformers import AutoTokenizer

    for path in (folder / "tokenizer_config.json", folder / "special_tokens_map.json"):
        if path.is_file():
            check_tokenizer(read_object(path), path)
    with quiet():
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def read_vocabulary(path_or_id: str | Path) -> dict[str, int]:
    """The tokens of a checkpoint or a GGUF file, and the id of each. Raises ModelError."""
    folder = resolve(path_or_id)
    if is_gguf(folder):  # to make its tokenizer takes a second
        return vocabulary(open_gguf(folder).metadata, str(folder))
    return dict(load_tokenizer(folder).get_vocab())


def encode(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """A text's token ids; ``options`` are the tokenizer's. Raises RequestError for half a surrogate pair, which is no
    text, and for a text that the tokenizer fails on."""
    check_text(text)
    with library("the tokenizer fails on this text", RequestError):
        return tokenizer.encode(text, **options)


def with_end(info: ModelInfo, tokenizer: Any) -> ModelInfo:
    """What is known of a model, the tokenizer's own end of a text counted among its ends."""
    end: int | None = getattr(tokenizer, "eos_token_id", None)
    if end is None or end >= info.vocab_size:
        return info
    return replace(info, eos_ids=info.eos_ids | {end})


def check_compatible(
    ours: Mapping[str, int], theirs: Mapping[str, int], target_info: ModelInfo, draft_info: ModelInfo
) -> None:
    """Raise ConfigError, naming the first difference, unless both map the same ids to the same tokens.

    Padding ids do not matter, nor do logits beyond the tokenizer, nor where the draft would end a text.
    """
    if ours != theirs:
        by_id = {i: t for t, i in ours.items()}
        other = {i: t for t, i in theirs.items()}
        for i in range(max(max(by_id, default=0), max(other, default=0)) + 1):
            if by_id.get(i) != other.get(i):
                raise ConfigError(
                    f"the draft's tokenizer differs from the target's: id {i} is {by_id.get(i)!r} in "
                    f"{target_info.name} and {other.get(i)!r} in {draft_info.name} "
                    "('use_heterogeneous_vocab': true drafts all the same)"
                )


REPLACEMENT = "\ufffd"
_PLAIN = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = [byte for byte in range(256) if byte not in _PLAIN]
BYTE_LETTERS = {chr(byte): byte for byte in _PLAIN} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
"""The letters that byte-level tokenizers write bytes with (GPT-2's table, inverted)."""


LONGEST_CHARACTER = 4
WINDOW = 16


def plain_decoder(tokenizer: Any, skip_special_tokens: bool) -> Callable[[Sequence[int]], str]:
    """Token ids -> text, as ``tokenizer.decode`` gives it without cleaning up spaces. Where transformers only hands
    ids on to the tokenizers library, this does without the way there, which takes four times as long."""
    lean = isinstance(tokenizer, GGUFTokenizer)
    if not lean:
        from transformers import PreTrainedTokenizerFast as Fast

        kind = type(tokenizer)
        lean = issubclass(kind, Fast) and kind.decode is Fast.decode and kind._decode is Fast._decode
    if lean:
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=skip_special_tokens)
    return partial(tokenizer.decode, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


def token_text(tokenizer: Any, token: int) -> str:
    """One token's text within a longer one: some decoders take the space off that a text begins with."""
    decode = plain_decoder(tokenizer, False)
    return decode([token, token])[len(decode([token])) :]


class Detokenizer:
    """Text of a growing token list, decoded a window at a time, and not before somebody asks for it.

    The whole reply is never decoded again, and which tokens came together makes no difference to the text. A window
    starts at a token where the text so far was complete, because some decoders spoil a whole run of byte tokens that
    begins inside a character. Text that ends inside a character is held back until it is complete, or until so many
    tokens have come that it never will be.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._decode = plain_decoder(tokenizer, skip_special_tokens)
        self._text = ""
        self._pending: list[int] = []
        self._window = list(prompt[1 - 2 * LONGEST_CHARACTER :])
        self._known: int | None = None
        """Characters of the window's text that have been said; None: nothing was decoded yet."""
        self._mark = 0
        self._open = 0

    @classmethod
    def of(cls, tokenizer: Any, sequence: RequestState) -> Detokenizer:
        """For a request's answer: behind its prompt, with or without special tokens as it asks."""
        skip = sequence.params.skip_special_tokens
        return cls(tokenizer, sequence.tokens[: sequence.num_prompt], skip_special_tokens=skip)

    def add(self, tokens: Sequence[int]) -> None:
        """Add tokens, to be decoded when the text is asked for."""
        self._pending.extend(tokens)

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens; returns the text that became certain."""
        start = len(self.text)
        self.add(tokens)
        return self.text[start:]

    def spell(self, tokens: Sequence[int], *, last: bool) -> list[str]:
        """Add tokens; returns the text that became certain with each, with the ``last`` of all the rest."""
        texts = [self.push([token]) for token in tokens]
        if last and texts:
            texts[-1] += self.finish()
        return texts

    def finish(self) -> str:
        """The rest, incomplete characters included."""
        start = len(self.text)
        if self._open:
            self._emit(self._decode(self._window))
        return self._text[start:]

    @property
    def text(self) -> str:
        """What is certain so far."""
        if self._pending:
            pending, self._pending = self._pending, []
            if self._known is None:
                self._begin()
            for start in range(0, len(pending), WINDOW // 2):
                run = pending[start : start + WINDOW // 2]
                if not self._together(run):
                    for token in run:
                        self._next(token)
        return self._text

    def _begin(self) -> None:
        """Choose a window of the prompt's last tokens; one of these begins with a character."""
        last = self._window
        for size in range(LONGEST_CHARACTER, 2 * LONGEST_CHARACTER):
            self._window = last[-size:]
            decoded = self._decode(self._window)
            if REPLACEMENT not in decoded:
                break
        self._known = len(decoded.removesuffix(REPLACEMENT))
        self._mark = len(self._window)

    def _together(self, run: list[int]) -> bool:
        """Decode a run at once; False, and nothing done, if a character may be incomplete somewhere."""
        if self._open or len(run) == 1:
            return False
        decoded = self._decode(self._window + run)
        if REPLACEMENT in decoded[self._known :]:
            return False
        self._window += run
        self._complete(decoded)
        return True

    def _next(self, token: int) -> None:
        window = self._window
        window.append(token)
        decoded = self._decode(window)
        if decoded.endswith(REPLACEMENT):
            self._open += 1
            if self._open >= LONGEST_CHARACTER:
                self._emit(decoded[:-1])  # of bytes that are no character, only the last may still become one
                if len(window) > 2 * WINDOW:
                    self._restart(len(window) - LONGEST_CHARACTER)
            return
        self._complete(decoded)

    def _complete(self, decoded: str) -> None:
        """The window's text ends with a character."""
        self._open = 0
        self._emit(decoded)
        if len(self._window) <= WINDOW // 2:  # note it
            self._mark = len(self._window)
        elif len(self._window) > WINDOW:  # or drop what lies before an earlier such point
            self._restart(self._mark)

    def _emit(self, decoded: str) -> None:
        known = self._known or 0
        self._text += decoded[known:]
        self._known = max(known, len(decoded))

    def _restart(self, first: int) -> None:
        self._window = self._window[first:]
        self._known = len(self._decode(self._window).removesuffix(REPLACEMENT))
        self._mark = min(self._mark, len(self._window)) if self._open else len(self._window)

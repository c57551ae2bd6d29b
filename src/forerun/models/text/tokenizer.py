"""Tokenizers: loading, a target's and a draft's compared, and incremental detokenization."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from forerun.core.errors import ConfigError, ModelError, RequestError, check_text
from forerun.core.folders import expanded
from forerun.core.request import RequestState
from forerun.models.files.checkpoint import ADAPTER, library, read_object
from forerun.models.files.gguf import refuse_pointer
from forerun.models.files.open import Checkpoint, quiet, resolve
from forerun.models.run.base import ModelInfo
from forerun.models.text.gguf_tokenizer import GGUFTokenizer, make_tokenizer, vocabulary
from forerun.models.weights.sanity import check_tokenizer


def load_tokenizer(path_or_id: str | Path) -> Any:
    """The tokenizer of a checkpoint, a GGUF file or a LoRA adapter. Raises ModelError."""
    folder = expanded(path_or_id)
    folder = folder if (folder / ADAPTER).is_file() else resolve(path_or_id)
    problem = f"{folder} has no usable tokenizer"
    with library(problem):
        file = Checkpoint.at(folder).gguf
        tokenizer: Any = _from_folder(folder) if file is None else make_tokenizer(file.metadata, str(folder))
        tokenizer.decode(tokenizer.encode(""))  # what is added before and after a text may be damaged too
        special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
        # transformers makes an empty one where the files are missing
        if len(tokenizer) <= len(special) and set(tokenizer.get_vocab()) <= special:
            raise ModelError(f"{problem}: it has no tokens but special ones; is tokenizer.json missing?")
        template = getattr(tokenizer, "chat_template", None)
        if template is not None and not isinstance(template, (str, dict)):
            raise ModelError(f"{problem}: its chat_template is {type(template).__name__}, not text")
    return tokenizer


def _from_folder(folder: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedConfig

    named: dict[str, Any] = {}
    for path in filter(Path.is_file, (folder / "special_tokens_map.json", folder / "tokenizer_config.json")):
        check_tokenizer(named := read_object(path), path)
    for path in filter(Path.is_file, (folder / "tokenizer.json", folder / "tokenizer.model")):
        refuse_pointer(path)
    config = None
    with quiet():
        # Where a class is named, any config with the same fields will do: to import the model's own takes 1.5 seconds.
        if named.get("tokenizer_class") and "auto_map" not in named:
            config = PreTrainedConfig.from_pretrained(folder, local_files_only=True)
        return AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False, local_files_only=True)


def read_vocabulary(path_or_id: str | Path) -> dict[str, int]:
    """The ids of a checkpoint's or a GGUF file's tokens. Raises ModelError."""
    folder = resolve(path_or_id)
    if (file := Checkpoint.at(folder).gguf) is not None:  # to make its tokenizer takes a second
        return vocabulary(file.metadata, str(folder))
    return dict(load_tokenizer(folder).get_vocab())


def encode(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """A text's token ids. ``options`` are the tokenizer's. Raises RequestError for lone surrogates, and for a text that
    the tokenizer fails on."""
    check_text(text)
    with library("the tokenizer fails on this text", RequestError):
        return list(tokenizer.encode(text, **options))


def with_end(info: ModelInfo, tokenizer: Any) -> ModelInfo:
    """A model's info with the tokenizer's EOS token among its ``eos_ids``."""
    end: int | None = getattr(tokenizer, "eos_token_id", None)
    if end is None or end >= info.vocab_size:
        return info
    return replace(info, eos_ids=info.eos_ids | {end})


def check_compatible(
    target: Mapping[str, int], draft: Mapping[str, int], target_info: ModelInfo, draft_info: ModelInfo
) -> None:
    """Raise ConfigError, naming the first difference, unless both vocabularies map the same tokens to the same ids.

    Padding ids do not matter, nor do logits beyond the tokenizer, nor where the draft would end a text.
    """
    target_tokens, draft_tokens = ({index: token for token, index in each.items()} for each in (target, draft))
    if differing := {index for index, _ in target_tokens.items() ^ draft_tokens.items()}:
        index = min(differing)
        raise ConfigError(
            f"the draft's tokenizer differs from the target's: id {index} is {target_tokens.get(index)!r} in "
            f"{target_info.name} and {draft_tokens.get(index)!r} in {draft_info.name} "
            "('use_heterogeneous_vocab': true drafts all the same)"
        )


REPLACEMENT = "\ufffd"
_PLAIN = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = [byte for byte in range(256) if byte not in _PLAIN]
BYTE_LETTERS = {chr(byte): byte for byte in _PLAIN} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
"""The characters that stand for bytes in byte-level tokenizers (GPT-2's table, inverted)."""
MAX_CHARACTER_BYTES = 4
WINDOW = 16
"""Tokens that are decoded together."""


def plain_decoder(tokenizer: Any, skip_special_tokens: bool) -> Callable[[Sequence[int]], str]:
    """A function from token ids to text: ``tokenizer.decode`` without cleaning up spaces. Where transformers only calls
    the tokenizers library, that is called directly, which is four times as fast."""
    lean = isinstance(tokenizer, GGUFTokenizer)
    if not lean:
        from transformers import PreTrainedTokenizerFast as Fast

        kind = type(tokenizer)
        lean = issubclass(kind, Fast) and kind.decode is Fast.decode and kind._decode is Fast._decode
    if lean:
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=skip_special_tokens)
    return partial(tokenizer.decode, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


def token_text(tokenizer: Any, token: int) -> str:
    """One token's text in the middle of a text: some decoders strip the space at the beginning."""
    decode = plain_decoder(tokenizer, False)
    return decode([token, token])[len(decode([token])) :]


class Detokenizer:
    """The text of a growing list of tokens, decoded a window at a time, when the text is read.

    How tokens are grouped in calls makes no difference to the text. A window begins where the text was complete:
    some decoders spoil a whole run of byte tokens that begins inside a character. Text that ends inside a character is
    held back until the character is complete, or has too many bytes to become one.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._decode = plain_decoder(tokenizer, skip_special_tokens)
        self._text = ""
        self._pending: list[int] = []
        self._window = list(prompt[1 - 2 * MAX_CHARACTER_BYTES :])
        self._emitted: int | None = None
        """Characters of the window's text that were emitted; None: nothing has been decoded yet."""
        self._restart_at = 0
        """The index in the window where the next one may begin."""
        self._incomplete = 0
        """Tokens since the text was last complete."""

    @classmethod
    def of(cls, tokenizer: Any, sequence: RequestState) -> Detokenizer:
        """For a request's answer, with special tokens as its parameters say."""
        skip = sequence.params.skip_special_tokens
        return cls(tokenizer, sequence.tokens[: sequence.num_prompt], skip_special_tokens=skip)

    def add(self, tokens: Sequence[int]) -> None:
        """Add tokens, to be decoded when the text is asked for."""
        self._pending.extend(tokens)

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens. Returns the text that they completed."""
        start = len(self.text)
        self.add(tokens)
        return self.text[start:]

    def spell(self, tokens: Sequence[int], *, last: bool) -> list[str]:
        """Add tokens. Returns the text that each completed; with ``last``, the final one has all that remains."""
        texts = [self.push([token]) for token in tokens]
        if last and texts:
            texts[-1] += self.finish()
        return texts

    def finish(self) -> str:
        """The text that was held back, incomplete characters included."""
        start = len(self.text)
        if self._incomplete:
            self._emit(self._decode(self._window))
        return self._text[start:]

    @property
    def text(self) -> str:
        """The complete text so far."""
        if self._pending:
            pending, self._pending = self._pending, []
            if self._emitted is None:
                self._begin()
            for start in range(0, len(pending), WINDOW // 2):
                run = pending[start : start + WINDOW // 2]
                if not self._decode_run(run):
                    for token in run:
                        self._next(token)
        return self._text

    def _begin(self) -> None:
        """Choose a window of the prompt's last tokens that begins with a character."""
        last = self._window
        for size in range(MAX_CHARACTER_BYTES, 2 * MAX_CHARACTER_BYTES):
            self._window = last[-size:]
            decoded = self._decode(self._window)
            if REPLACEMENT not in decoded:
                break
        self._emitted = len(decoded.removesuffix(REPLACEMENT))
        self._restart_at = len(self._window)

    def _decode_run(self, run: list[int]) -> bool:
        """Decode several tokens at once, unless a character may be incomplete. Returns whether it did."""
        if self._incomplete or len(run) == 1:
            return False
        decoded = self._decode(self._window + run)
        if REPLACEMENT in decoded[self._emitted :]:
            return False
        self._window += run
        self._complete(decoded)
        return True

    def _next(self, token: int) -> None:
        window = self._window
        window.append(token)
        decoded = self._decode(window)
        if decoded.endswith(REPLACEMENT):
            self._incomplete += 1
            if self._incomplete >= MAX_CHARACTER_BYTES:
                self._emit(decoded[:-1])  # of bytes that are not a character, only the last may become one
                if len(window) > 2 * WINDOW:
                    self._restart(len(window) - MAX_CHARACTER_BYTES)
            return
        self._complete(decoded)

    def _complete(self, decoded: str) -> None:
        """Emit the window's text, which ends with a character, and perhaps begin a new window."""
        self._incomplete = 0
        self._emit(decoded)
        if len(self._window) <= WINDOW // 2:
            self._restart_at = len(self._window)
        elif len(self._window) > WINDOW:
            self._restart(self._restart_at)

    def _emit(self, decoded: str) -> None:
        emitted = self._emitted or 0
        self._text += decoded[emitted:]
        self._emitted = max(emitted, len(decoded))

    def _restart(self, first: int) -> None:
        self._window = self._window[first:]
        self._emitted = len(self._decode(self._window).removesuffix(REPLACEMENT))
        self._restart_at = min(self._restart_at, len(self._window)) if self._incomplete else len(self._window)

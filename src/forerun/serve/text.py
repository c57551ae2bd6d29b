"""Text in and out of token ids, away from the event loop and from the engine's own tokenizer."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, TypeVar

from jinja2 import TemplateError

from forerun.core.errors import RequestError
from forerun.models.tokenizer import Detokenizer, encode

log = logging.getLogger("forerun")

T = TypeVar("T")


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level tokenizers write bytes with (GPT-2's table, inverted)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_LETTERS = _byte_letters()


class TextService:
    """Two tokenizers: a copy behind a thread, for prompts, and the given one for the event loop, for single tokens.
    Fast tokenizers must not be used from two threads at once.

    ``chat_template`` replaces the checkpoint's. Templates run in transformers' sandbox.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self._encoder = copy.deepcopy(tokenizer)
        self.chat_template = chat_template or getattr(tokenizer, "chat_template", None)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forerun-text")
        self.token_text = lru_cache(maxsize=1 << 17)(self._token_text)
        self.token_name = lru_cache(maxsize=1 << 17)(self._token_name)

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *arguments))

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        return await self.run(self._encode, text, special)

    def _encode(self, text: str, special: bool) -> list[int]:
        return encode(self._encoder, text, add_special_tokens=special, verbose=False)

    async def decode(self, tokens: Seq[int], *, param: str = "tokens") -> str:
        """Raises RequestError, about ``param``, for an id beyond the tokenizer."""
        size = len(self.tokenizer)
        for token in tokens:
            if token >= size:
                raise RequestError(f"token id {token} is outside the tokenizer's {size}", param=param)
        return await self.run(self._encoder.decode, list(tokens))

    async def offsets(self, prompt: Seq[int], text: str) -> list[int]:
        """Where a prompt's tokens begin in its text, which may lack the special tokens put before it."""
        return await self.run(self._offsets, prompt, text)

    def _offsets(self, prompt: Seq[int], text: str) -> list[int]:
        detokenizer = Detokenizer(self._encoder, skip_special_tokens=False)
        offsets = []
        for token in prompt:
            offsets.append(len(detokenizer.text))
            detokenizer.push([token])
        detokenizer.finish()
        before = max(0, detokenizer.text.find(text))
        return [min(max(0, offset - before), len(text)) for offset in offsets]

    async def encode_chat(self, messages: Seq[dict[str, str]]) -> list[int]:
        """Raises RequestError if there is no template, or it refuses the messages."""
        if self.chat_template is None:
            raise RequestError(
                "this model has no chat template: use /v1/completions, or start the server with --chat-template FILE"
            )
        return await self.run(self._encode_chat, list(messages))

    def _encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        try:
            text = self._encoder.apply_chat_template(
                messages, chat_template=self.chat_template, tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            log.info("a chat template failed", exc_info=error)
            message = f"the model's chat template refuses these messages: {error}"
            raise RequestError(message, param="messages") from None
        return self._encode(text, False)

    def _token_text(self, token: int) -> tuple[str, list[int] | None]:
        """One token's text and, where they can be told, its bytes (half a character has no text of its own)."""
        text = self.tokenizer.decode([token])
        if "\ufffd" not in text:
            return text, list(text.encode())
        letters = self.tokenizer.convert_ids_to_tokens(token)
        if letters is None:
            return text, None
        if letters.startswith("<0x") and letters.endswith(">"):
            return text, [int(letters[3:-1], 16)]
        known = [BYTE_LETTERS.get(letter) for letter in letters]
        return text, None if None in known else [byte for byte in known if byte is not None]

    def _token_name(self, token: int) -> str:
        """One token's text, or, where it is not whole characters, its bytes as OpenAI's completions write them."""
        encoded = self.token_text(token)[1]
        if encoded is None:
            return f"token_id:{token}"
        try:
            return bytes(encoded).decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in encoded)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

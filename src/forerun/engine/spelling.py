"""A tokenizer as llguidance takes it, which spells every text byte by byte.

A tokenizer's own ids may say something else than the text: a special token that is written in it (``<|im_end|>``), or
what a normalizer makes of it (``é`` as one character). A grammar follows the text, and would not take such a token.
"""

from __future__ import annotations

from typing import Any

import llguidance
import llguidance.hf

MARKER = b"\xff"
"""Before a name: llguidance takes the token for one that no text spells."""


class Spelling:
    """Raises ValueError for a tokenizer whose tokens are no bytes."""

    bos_token_id = None

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: list[int]) -> None:
        tokenizer = getattr(tokenizer, "full", tokenizer)
        own = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos_ids, slices=[])
        added = tokenizer.added_tokens_decoder
        spoken = {token for token, one in added.items() if not one.special} - set(eos_ids)
        """Added tokens that are text as others are, ``<tool_call>`` of Qwen among them."""
        named = [own.is_special_token(token) and token not in spoken for token in range(vocab_size)]
        self.tokens = [MARKER * mark + own.decode_bytes([token]) for token, mark in enumerate(named)]
        self.eos_token_id = eos_ids[0]
        self._own = own

    def __call__(self, text: str) -> list[int]:
        """The tokenizer's own ids, in halves as small as it takes for them to spell the text."""
        ids = self._own.tokenize_str(text)
        if b"".join([self.tokens[token] for token in ids]) == text.encode():
            return ids
        if len(text) == 1:
            return self._own.greedy_tokenize(text)
        half = len(text) // 2
        return self(text[:half]) + self(text[half:])

"""Draft models with another tokenizer than the target (Timor et al., arXiv 2502.05202).

*TLI*, token-level intersection, restricts q to the tokens that both vocabularies have, so that every rule works with
exact q. forerun-lab adds *SLEM*, string-level exact match. Both are lossless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from forerun.core.errors import ConfigError
from forerun.core.request import Requests, RequestState
from forerun.core.tree import Draft, Verdict
from forerun.models.text.tokenizer import BYTE_LETTERS, load_tokenizer, with_end
from forerun.speculate.draft.base import DraftContext, scatter_logits
from forerun.speculate.draft.model import DraftModel, DraftModelConfig


class CrossVocabularyDraftModel(DraftModel):
    """TLI. Keeps each sequence's text in the draft's tokens."""

    per_sequence = (*DraftModel.per_sequence, "readings", "starts")
    readings: dict[int, VocabularyReading]
    starts: dict[int, int]

    def __init__(self, config: DraftModelConfig, context: DraftContext) -> None:
        if context.tokenizer is None:
            raise ConfigError("use_heterogeneous_vocab needs the target's tokenizer")
        super().__init__(config, replace(context, prefix_caching=False))

    def _check_vocabulary(self, path: str) -> None:
        info, own = self.context.target.info, self.model.info
        target = Vocabulary(self.context.tokenizer, info.vocab_size)
        tokenizer = load_tokenizer(path)
        draft = Vocabulary(tokenizer, own.vocab_size)
        self.vocab_map = VocabularyMap(target, draft, info.eos_ids, with_end(own, tokenizer).eos_ids)
        self.target_ids, self.draft_ids = torch.tensor(
            sorted(self.vocab_map.to_draft.items()), device=own.device
        ).T.contiguous()

    def _read(self, sequence: RequestState) -> list[int]:
        reading = self.readings.get(sequence.id)
        if reading is None:
            reading = self.readings[sequence.id] = self._new_reading()
        if reading.read < len(sequence.tokens):
            reading.follow(sequence.tokens)
        return reading.tokens

    def _new_reading(self) -> VocabularyReading:
        return VocabularyReading(self.vocab_map)

    def _to_draft_ids(self, tokens: list[int]) -> list[int]:
        return [self.vocab_map.to_draft[token] for token in tokens]

    def translate(self, logits: torch.Tensor) -> torch.Tensor:
        return scatter_logits(logits[:, self.draft_ids], self.target_ids, self.context.sampler.vocab_size)

    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        self.starts = {sequence.id: len(self._read(sequence)) for sequence in sequences}
        return super().propose(sequences, budgets)

    def _draft_start(self, sequence: RequestState, verdict: Verdict) -> int:
        return self.starts[sequence.id]

    def fork(self, source: RequestState, sequence: RequestState) -> None:
        """Shares nothing: the new beam's text is read again."""

    def rewind(self, sequence: RequestState) -> None:
        self.release(sequence)

    def cached_tokens(self, sequence: RequestState) -> list[int]:
        reading = self.readings.get(sequence.id)
        return sequence.tokens[: reading.read] if reading is not None else []


class Vocabulary:
    """A tokenizer's tokens as bytes. Special tokens have no bytes; they are in ``names``."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        self.tokenizer = tokenizer
        vocab = {token: i for token, i in tokenizer.get_vocab().items() if i < size}
        added = tokenizer.added_tokens_decoder.values()
        special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        self.names = {i: token for token, i in vocab.items() if token in special}
        plain = {i: token for token, i in vocab.items() if token not in special}
        byte_level = any("Ġ" in token for token in plain.values())
        self.word_marks = not byte_level and any("▁" in token for token in plain.values())
        alphabet = BYTE_LETTERS if byte_level else {}
        self.bytes = {i: self._bytes(token, alphabet) for i, token in plain.items()}

    def _bytes(self, token: str, alphabet: dict[str, int]) -> bytes:
        if alphabet and all(character in alphabet for character in token):
            return bytes(alphabet[character] for character in token)
        if self.word_marks:
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes([int(token[3:5], 16)])
            token = token.replace("▁", " ")
        return token.encode("utf-8", "surrogatepass")

    @cached_property
    def ids(self) -> dict[bytes, int]:
        """Maps bytes to ids; of several tokens with the same bytes, to the first."""
        result: dict[bytes, int] = {}
        for i in sorted(self.bytes):
            result.setdefault(self.bytes[i], i)
        return result

    def spell(self, tokens: Sequence[int]) -> bytes:
        """The bytes of tokens."""
        return b"".join(self.bytes.get(token, b"") for token in tokens)

    def encode(self, text: str, *, whole: bool = False) -> list[int]:
        """Token ids of a text; ``whole``: with the special tokens at its beginning."""
        return list(self.tokenizer.encode(text, add_special_tokens=whole, verbose=False))


class VocabularyMap:
    """Maps the ids of a target's vocabulary to those of a draft's, and back.

    ``to_draft`` has the tokens of both vocabularies: those with equal bytes, special tokens with equal names, and the
    tokens that end a text. Raises ConfigError if they have no bytes in common.
    """

    def __init__(self, target: Vocabulary, draft: Vocabulary, target_eos: frozenset[int], draft_eos: frozenset[int]):
        self.target = target
        self.draft = draft
        self.to_draft = {i: draft.ids[text] for i, text in target.bytes.items() if text in draft.ids}
        if not self.to_draft:
            raise ConfigError("the draft's vocabulary shares no token with the target's: choose another draft")
        names = {name: i for i, name in draft.names.items()}
        self.to_draft.update({i: names[name] for i, name in target.names.items() if name in names})
        if target_eos and draft_eos and not any(self.to_draft.get(end) in draft_eos for end in target_eos):
            self.to_draft[min(target_eos)] = min(draft_eos)


class VocabularyReading:
    """A target's text in the draft's tokens. It only grows: tokens once read are never re-tokenized."""

    def __init__(self, vocab_map: VocabularyMap) -> None:
        self.vocab_map = vocab_map
        self.tokens: list[int] = []
        self.read = 0
        """How many of the target's tokens were read."""
        self._pending = b""

    def follow(self, tokens: Sequence[int]) -> None:
        """Reads the target's ``tokens`` that are new: the first text as a whole, with the draft's own tokenizer, later
        tokens one by one."""
        if not self.read:
            self._begin(tokens)
        for token in tokens[self.read :]:
            self.extend(token)

    def _begin(self, tokens: Sequence[int]) -> None:
        whole = True
        for piece in self._pieces(tokens):
            if isinstance(piece, bytes):
                self.tokens += self.vocab_map.draft.encode(piece.decode("utf-8", "replace"), whole=whole)
            else:
                self.tokens.append(piece)
            whole = False
        self.read = len(tokens)

    def _pieces(self, tokens: Sequence[int]) -> list[bytes | int]:
        """Splits the target's tokens into runs of text and the draft's ids of special tokens between them."""
        pieces: list[bytes | int] = []
        text = b""
        for token in tokens:
            if token in self.vocab_map.target.bytes:
                text += self.vocab_map.target.bytes[token]
                continue
            pieces += [text] if text else []
            pieces += [self.vocab_map.to_draft[token]] if token in self.vocab_map.to_draft else []
            text = b""
        return [*pieces, text] if text else pieces

    def extend(self, token: int) -> None:
        """Reads one token: as the same token if the draft has it, otherwise as the draft's tokens of its text. An
        incomplete character waits for the next token, and is dropped if the draft has that one."""
        own = self.vocab_map.to_draft.get(token)
        if own is not None:
            self.tokens.append(own)
            self._pending = b""
        else:
            self._spell(self.vocab_map.target.bytes.get(token, b""))
        self.read += 1

    def _spell(self, piece: bytes) -> None:
        self._pending += piece
        try:
            text = self._pending.decode("utf-8")
        except UnicodeDecodeError:
            return
        self._pending = b""
        if text:
            self.tokens += self.vocab_map.draft.encode(text)

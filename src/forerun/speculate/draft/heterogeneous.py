"""Draft models with another tokenizer than the target (Timor et al., arXiv 2502.05202).

*TLI*, token-level intersection: q is restricted to the tokens that both vocabularies have, so that every rule works
with exact q. *SLEM*, string-level exact match: the draft writes in its own tokens, and the target's tokens of that
text are point masses. Neither needs anything of the draft for the output to be the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from forerun.core.batch import Span
from forerun.core.errors import ConfigError
from forerun.core.request import Requests, RequestState
from forerun.core.tree import Draft, Drafts, Verdicts
from forerun.models.tokenizer import BYTE_LETTERS, load_tokenizer, with_end
from forerun.sampling.noise import target_key
from forerun.speculate.draft.base import DraftContext, spread
from forerun.speculate.draft.model import DraftModel, DraftModelConfig
from forerun.speculate.verify import Verification

EULER = 0.5772156649
TAIL = 4
"""Committed tokens before a drafted text that are encoded with it, so that its first token is cut as in context."""


class CrossVocabularyDraftModel(DraftModel):
    """TLI. Keeps, per sequence, the text as the draft reads it."""

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
        self.bridge = VocabularyMap(target, draft, info.eos_ids, with_end(own, tokenizer).eos_ids)
        pairs = sorted(self.bridge.shared.items())
        self.target_ids = torch.tensor([target_id for target_id, _ in pairs], device=own.device)
        self.draft_ids = torch.tensor([draft_id for _, draft_id in pairs], device=own.device)

    def _read(self, sequence: RequestState) -> list[int]:
        reading = self.readings.get(sequence.id)
        if reading is None:
            reading = self.readings[sequence.id] = VocabularyReading(self.bridge)
        if reading.read < len(sequence.tokens):
            reading.follow(sequence.tokens)
        return reading.tokens

    def _own(self, tokens: list[int]) -> list[int]:
        return [self.bridge.shared[token] for token in tokens]

    def translate(self, logits: torch.Tensor) -> torch.Tensor:
        return spread(logits[:, self.draft_ids], self.target_ids, self.context.sampler.vocab_size)

    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        self.starts = {sequence.id: len(self._read(sequence)) for sequence in sequences}
        return super().propose(sequences, budgets)

    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, result: Verification) -> None:
        pool = self.attention.pool
        for sequence, draft, verdict in zip(sequences, drafts, verdicts):
            start = self.starts.pop(sequence.id, None)
            if start is None or sequence.id not in pool.block_tables or not len(draft):
                continue
            pool.keep(sequence.id, start, self._kept(sequence, verdict, start))

    def fork(self, source: RequestState, sequence: RequestState) -> None:
        """Its text is read anew: where the draft's tokens of it end is not known from the source's."""

    def rewind(self, sequence: RequestState) -> None:
        self.attention.pool.free(sequence.id)  # first: what was read is no prefix of the text any more
        self.release(sequence)

    def cached_tokens(self, sequence: RequestState) -> list[int]:
        reading = self.readings.get(sequence.id)
        return sequence.tokens[: reading.read] if reading is not None else []


class StringDraftModel(CrossVocabularyDraftModel):
    """SLEM. The draft takes its likeliest tokens, which as point masses are most often right; where the rule couples
    draft and target, those that are likeliest under the noise that the target will meet."""

    per_sequence = (*CrossVocabularyDraftModel.per_sequence, "written")
    written: dict[int, list[int]]

    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        self.starts = {sequence.id: len(self._read(sequence)) for sequence in sequences}
        depths = [self._depth(sequence, budget) for sequence, budget in zip(sequences, budgets)]
        spans, ready = self._missing(sequences, depths)
        logits = self._forward(spans) if spans else torch.empty(0)
        written: dict[int, list[int]] = {index: [] for index in ready}
        growing = list(ready)
        while growing:
            scores = self._with_noise(logits, [sequences[i] for i in growing], len(written[growing[0]]))
            for index, token in zip(growing, scores.argmax(dim=1).tolist()):
                written[index].append(token)
            growing = [i for i in growing if len(written[i]) < depths[i] and not self._ended(written[i][-1])]
            if growing:
                logits = self._forward([self._span(sequences[i], written[i]) for i in growing])
        drafts = []
        for index, (sequence, budget) in enumerate(zip(sequences, budgets)):
            own = self.written[sequence.id] = written.get(index, [])
            drafts.append(Draft.chain(self._encode(sequence, own)[:budget]))
        return drafts

    def _with_noise(self, logits: torch.Tensor, sequences: Requests, depth: int) -> torch.Tensor:
        """Under a coupled rule, sampled requests' scores of the ``depth``-th token behind the committed ones, as if
        every token before it had been one of the target's; a token that the target lacks gets the noise's mean."""
        hot = [i for i, sequence in enumerate(sequences) if not sequence.params.greedy]
        if self.context.rule.needs_q or not hot:
            return logits
        temperatures = [self.config.draft_temperature or sequences[i].params.temperature for i in hot]
        keys = [target_key(sequences[i].seed, len(sequences[i].tokens) + depth) for i in hot]
        scores = logits[hot] / torch.tensor(temperatures, device=logits.device)[:, None]
        noise = torch.full_like(scores, EULER)
        noise[:, self.draft_ids] = self.context.sampler.noise.rows(keys)[:, self.target_ids]
        result = logits.clone()
        result[hot] = scores + noise
        return result

    def _ended(self, token: int) -> bool:
        return token not in self.bridge.draft.bytes

    def _span(self, sequence: RequestState, written: list[int]) -> Span:
        start = self.starts[sequence.id] + len(written) - 1
        return Span(sequence.id, start, written[-1:], logits=[0])

    def _encode(self, sequence: RequestState, written: Sequence[int]) -> list[int]:
        """The target's tokens of what the draft wrote; a character that is cut off at the end is left out."""
        target = self.bridge.target
        text = self.bridge.draft.spell(written).decode("utf-8", "ignore")
        after = [self.bridge.back[t] for t in written[-1:] if self._ended(t) and t in self.bridge.back]
        if not text:
            return after
        tail = sequence.tokens[-TAIL:]
        before = target.spell(tail).decode("utf-8", "ignore")
        ids = target.encode(before + text)
        if ids[: len(tail)] == tail:
            return ids[len(tail) :] + after
        return [] if target.word_marks else target.encode(text) + after

    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, result: Verification) -> None:
        """Keep the draft's own tokens as far as their text was committed."""
        pool = self.attention.pool
        for sequence, verdict in zip(sequences, verdicts):
            start, written = self.starts.pop(sequence.id, None), self.written.pop(sequence.id, [])
            if start is None or sequence.id not in pool.block_tables or not written:
                continue
            kept = self.readings[sequence.id].adopt(written, verdict.tokens)
            pool.truncate(sequence.id, min(pool.length(sequence.id), start + kept))


class Vocabulary:
    """A tokenizer's tokens as bytes. Special tokens have none; they are known by their name."""

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
        """Bytes to id; of several tokens with the same bytes, the first."""
        result: dict[bytes, int] = {}
        for i in sorted(self.bytes):
            result.setdefault(self.bytes[i], i)
        return result

    def spell(self, tokens: Sequence[int]) -> bytes:
        """The bytes of a text."""
        return b"".join(self.bytes.get(token, b"") for token in tokens)

    def encode(self, text: str, *, whole: bool = False) -> list[int]:
        """Ids of a text; ``whole``: with the special tokens that begin one."""
        return self.tokenizer.encode(text, add_special_tokens=whole, verbose=False)


class VocabularyMap:
    """From a target's vocabulary to a draft's and back.

    ``shared`` maps the target's ids to the draft's where both have a token: equal bytes, equal special names, and the
    tokens that end a text. Raises ConfigError where they share no text.
    """

    def __init__(self, target: Vocabulary, draft: Vocabulary, target_eos: frozenset[int], draft_eos: frozenset[int]):
        self.target = target
        self.draft = draft
        self.shared = {i: draft.ids[text] for i, text in target.bytes.items() if text in draft.ids}
        if not self.shared:
            raise ConfigError("the draft's vocabulary shares no token with the target's: choose another draft")
        names = {name: i for i, name in draft.names.items()}
        self.shared.update({i: names[name] for i, name in target.names.items() if name in names})
        if target_eos and draft_eos and not any(self.shared.get(end) in draft_eos for end in target_eos):
            self.shared[min(target_eos)] = min(draft_eos)

    @cached_property
    def back(self) -> dict[int, int]:
        """The draft's ids to the target's, where both have a token."""
        return {draft: target for target, draft in self.shared.items()}


class VocabularyReading:
    """A target's text as the draft reads it. It only grows: what was read once stays as it was read."""

    def __init__(self, bridge: VocabularyMap) -> None:
        self.bridge = bridge
        self.tokens: list[int] = []
        self.read = 0
        """How many of the target's tokens these are."""
        self._pending = b""

    def follow(self, tokens: Sequence[int]) -> None:
        """Read the target's tokens up to the last of ``tokens``: a text's beginning as a whole, so that the draft
        sees it as its own tokenizer would cut it, later tokens one by one."""
        if not self.read:
            self._begin(tokens)
        for token in tokens[self.read :]:
            self.extend(token)

    def _begin(self, tokens: Sequence[int]) -> None:
        whole = True
        for piece in self._pieces(tokens):
            if isinstance(piece, bytes):
                self.tokens += self.bridge.draft.encode(piece.decode("utf-8", "replace"), whole=whole)
            else:
                self.tokens.append(piece)
            whole = False
        self.read = len(tokens)

    def _pieces(self, tokens: Sequence[int]) -> list[bytes | int]:
        """The target's tokens as runs of text and, between them, the draft's ids of special tokens that it has too."""
        pieces: list[bytes | int] = []
        text = b""
        for token in tokens:
            if token in self.bridge.target.bytes:
                text += self.bridge.target.bytes[token]
                continue
            pieces += [text] if text else []
            pieces += [self.bridge.shared[token]] if token in self.bridge.shared else []
            text = b""
        return [*pieces, text] if text else pieces

    def extend(self, token: int) -> None:
        """Read one more token: as the same token if the draft has it, else spelled out with the draft's. Bytes that
        do not make a character yet wait for the next token; if that is shared they are left out."""
        own = self.bridge.shared.get(token)
        if own is not None:
            self.tokens.append(own)
            self._pending = b""
        else:
            self._spell(self.bridge.target.bytes.get(token, b""))
        self.read += 1

    def adopt(self, drafted: Sequence[int], tokens: Sequence[int]) -> int:
        """Read the target's ``tokens``, whose text may begin like the draft's own ``drafted`` tokens: those that agree
        are kept as they are. Returns how many."""
        pieces = self._pieces(tokens)
        kept = 0
        for own in drafted if not self._pending else ():
            text = self.bridge.draft.bytes.get(own)
            first = pieces[0] if pieces else None
            if isinstance(first, bytes) and text and first.startswith(text):
                pieces[0:1] = [first[len(text) :]] if first != text else []
            elif first == own and text is None:
                del pieces[0]
            else:
                break
            self.tokens.append(own)
            kept += 1
        for piece in pieces:
            if isinstance(piece, bytes):
                self._spell(piece)
            else:
                self.tokens.append(piece)
                self._pending = b""
        self.read += len(tokens)
        return kept

    def _spell(self, piece: bytes) -> None:
        self._pending += piece
        try:
            text = self._pending.decode("utf-8")
        except UnicodeDecodeError:
            return
        self._pending = b""
        if text:
            self.tokens += self.bridge.draft.encode(text)

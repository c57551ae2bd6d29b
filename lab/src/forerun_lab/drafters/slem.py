"""SLEM, string-level exact match (Timor et al., arXiv 2502.05202): ``heterogeneous_vocab_method: slem``.

It drafts text in the draft's own tokens and encodes it with the target's tokenizer; these tokens are point masses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.core.batch import Span
from forerun.core.request import Requests, RequestState
from forerun.core.tree import Draft, Drafts, Verdicts
from forerun.sampling.noise import target_key
from forerun.speculate.draft.heterogeneous import CrossVocabularyDraftModel, VocabularyReading
from forerun.speculate.verify import Verification

EULER = 0.5772156649
TAIL = 4
"""How many committed tokens are encoded together with a drafted text, so that it is tokenized as in context."""


class StringReading(VocabularyReading):
    """A text in the draft's tokens, of which some were drafted."""

    def adopt(self, drafted: Sequence[int], tokens: Sequence[int]) -> int:
        """Reads the target's ``tokens``. Keeps the draft's own ``drafted`` tokens as far as their text agrees; returns
        how many are kept."""
        pieces = self._pieces(tokens)
        kept = 0
        for own in drafted if not self._pending else ():
            text = self.vocab_map.draft.bytes.get(own)
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


class StringDraftModel(CrossVocabularyDraftModel):
    """SLEM. The draft takes its likeliest tokens, which are the best point masses. Under a coupled rule, it takes those
    that are likeliest with the target's noise."""

    per_sequence = (*CrossVocabularyDraftModel.per_sequence, "written")
    written: dict[int, list[int]]
    readings: dict[int, StringReading]  # type: ignore[assignment]

    def _new_reading(self) -> StringReading:
        return StringReading(self.vocab_map)

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
        """Adds the target's noise to sampled requests' logits under a coupled rule. It is the noise of the ``depth``-th
        token after the committed ones, as if every drafted token were one target token. Tokens that the target lacks
        get the noise's mean."""
        sampled = [i for i, sequence in enumerate(sequences) if not sequence.params.greedy]
        if self.context.rule.needs_q or not sampled:
            return logits
        temperatures = [self.config.draft_temperature or sequences[i].params.temperature for i in sampled]
        keys = [target_key(sequences[i].seed, len(sequences[i].tokens) + depth) for i in sampled]
        scores = logits[sampled] / torch.tensor(temperatures, device=logits.device)[:, None]
        noise = torch.full_like(scores, EULER)
        noise[:, self.draft_ids] = self.context.sampler.noise.rows(keys)[:, self.target_ids]
        result = logits.clone()
        result[sampled] = scores + noise
        return result

    def _ended(self, token: int) -> bool:
        return token not in self.vocab_map.draft.bytes

    def _span(self, sequence: RequestState, written: list[int]) -> Span:
        start = self.starts[sequence.id] + len(written) - 1
        return Span(sequence.id, start, written[-1:], logits=[0])

    def _encode(self, sequence: RequestState, written: Sequence[int]) -> list[int]:
        """The target's tokens of the drafted text, without an incomplete character at its end."""
        target = self.vocab_map.target
        text = self.vocab_map.draft.spell(written).decode("utf-8", "ignore")
        after: list[int] = []
        if written and self._ended(written[-1]):
            after = [own for own, token in self.vocab_map.to_draft.items() if token == written[-1]][-1:]
        if not text:
            return after
        tail = sequence.tokens[-TAIL:]
        before = target.spell(tail).decode("utf-8", "ignore")
        ids = target.encode(before + text)
        if ids[: len(tail)] == tail:
            return ids[len(tail) :] + after
        return [] if target.word_marks else target.encode(text) + after

    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, result: Verification) -> None:
        """Keeps the cache entries of drafted tokens whose text was committed."""
        pool = self.attention.pool
        for sequence, verdict in zip(sequences, verdicts):
            start, written = self.starts.pop(sequence.id, None), self.written.pop(sequence.id, [])
            if start is None or sequence.id not in pool.block_tables or not written:
                continue
            kept = self.readings[sequence.id].adopt(written, verdict.tokens)
            pool.truncate(sequence.id, min(pool.length(sequence.id), start + kept))

"""Draft models with another tokenizer than the target (Timor et al., arXiv 2502.05202).

*TLI*, token-level intersection: q is restricted to the tokens that both vocabularies have, so that every rule works
with exact q. *SLEM*, string-level exact match: the draft writes in its own tokens, and the target's tokens of that
text are point masses. Neither needs anything of the draft for the output to be the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from forerun.core.batch import Span
from forerun.core.errors import ConfigError
from forerun.core.request import RequestState
from forerun.core.tree import Draft, Verdict
from forerun.models.tokenizer import load_tokenizer, with_end
from forerun.sampling.noise import target_key
from forerun.speculate.draft.base import DraftContext
from forerun.speculate.draft.model import DraftModel, DraftModelConfig
from forerun.speculate.draft.vocabulary import Bridge, Reading, Vocabulary
from forerun.speculate.verify.score import Verification

EULER = 0.5772156649
TAIL = 4
"""Committed tokens before a drafted text that are encoded with it, so that its first token is cut as in context."""


class CrossVocabularyDraftModel(DraftModel):
    """TLI. Keeps, per sequence, the text as the draft reads it."""

    def __init__(self, config: DraftModelConfig, context: DraftContext) -> None:
        if context.tokenizer is None:
            raise ConfigError("use_heterogeneous_vocab needs the target's tokenizer")
        super().__init__(config, replace(context, prefix_caching=False))
        self.readings: dict[int, Reading] = {}
        self.starts: dict[int, int] = {}

    def _check_vocabulary(self, path: str) -> None:
        info, own = self.context.target.info, self.model.info
        target = Vocabulary(self.context.tokenizer, info.vocab_size)
        tokenizer = load_tokenizer(path)
        draft = Vocabulary(tokenizer, own.vocab_size)
        self.bridge = Bridge(target, draft, info.eos_ids, with_end(own, tokenizer).eos_ids)
        pairs = sorted(self.bridge.shared.items())
        self.target_ids = torch.tensor([target_id for target_id, _ in pairs], device=own.device)
        self.draft_ids = torch.tensor([draft_id for _, draft_id in pairs], device=own.device)

    def _read(self, sequence: RequestState) -> list[int]:
        reading = self.readings.get(sequence.id)
        if reading is None:
            reading = self.readings[sequence.id] = Reading(self.bridge)
        if reading.read < len(sequence.tokens):
            reading.follow(sequence.tokens)
        return reading.tokens

    def _own(self, tokens: list[int]) -> list[int]:
        return [self.bridge.shared[token] for token in tokens]

    def translate(self, logits: torch.Tensor) -> torch.Tensor:
        size = self.context.sampler.vocab_size
        moved = torch.full((logits.shape[0], size), float("-inf"), dtype=logits.dtype, device=logits.device)
        moved[:, self.target_ids] = logits[:, self.draft_ids]
        return moved

    def propose(self, sequences: Sequence[RequestState], budgets: Sequence[int]) -> list[Draft]:
        self.starts = {sequence.id: len(self._read(sequence)) for sequence in sequences}
        return super().propose(sequences, budgets)

    def observe(
        self,
        sequences: Sequence[RequestState],
        drafts: Sequence[Draft],
        verdicts: Sequence[Verdict],
        result: Verification,
    ) -> None:
        pool = self.attention.pool
        for sequence, draft, verdict in zip(sequences, drafts, verdicts):
            start = self.starts.pop(sequence.id, None)
            if start is None or sequence.id not in pool.tables or not len(draft):
                continue
            pool.keep(sequence.id, start, self._kept(sequence, verdict, start))

    def fork(self, source: RequestState, sequence: RequestState) -> None:
        """Its text is read anew: where the draft's tokens of it end is not known from the source's."""

    def release(self, sequence: RequestState) -> None:
        super().release(sequence)
        self.readings.pop(sequence.id, None)
        self.starts.pop(sequence.id, None)

    def rewind(self, sequence: RequestState) -> None:
        self.release(sequence)

    def cached_tokens(self, sequence: RequestState) -> list[int]:
        reading = self.readings.get(sequence.id)
        covered = reading.covered(self.attention.pool.length(sequence.id)) if reading is not None else 0
        return sequence.tokens[:covered]


class StringDraftModel(CrossVocabularyDraftModel):
    """SLEM. The draft takes its likeliest tokens, which as point masses are most often right; where the rule couples
    draft and target, those that are likeliest under the noise that the target will meet."""

    def __init__(self, config: DraftModelConfig, context: DraftContext) -> None:
        super().__init__(config, context)
        self.written: dict[int, list[int]] = {}

    def propose(self, sequences: Sequence[RequestState], budgets: Sequence[int]) -> list[Draft]:
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

    def _with_noise(self, logits: torch.Tensor, sequences: Sequence[RequestState], depth: int) -> torch.Tensor:
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

    def observe(
        self,
        sequences: Sequence[RequestState],
        drafts: Sequence[Draft],
        verdicts: Sequence[Verdict],
        result: Verification,
    ) -> None:
        """Keep the draft's own tokens as far as their text was committed."""
        pool = self.attention.pool
        for sequence, verdict in zip(sequences, verdicts):
            start, written = self.starts.pop(sequence.id, None), self.written.pop(sequence.id, [])
            if start is None or sequence.id not in pool.tables or not written:
                continue
            kept = self.readings[sequence.id].adopt(written, verdict.tokens)
            pool.truncate(sequence.id, min(pool.length(sequence.id), start + kept))

    def release(self, sequence: RequestState) -> None:
        super().release(sequence)
        self.written.pop(sequence.id, None)

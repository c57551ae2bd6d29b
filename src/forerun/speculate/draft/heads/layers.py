"""Drafters with decoder layers of their own, which read the target's hidden states.

Entry t of their cache combines the target's feature of token t with the embedding of token t + 1, and predicts token
t + 2. While drafting, the layers' own output replaces the feature. After the round these entries are dropped, and read
again with true features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch

from forerun.attention.base import Attention
from forerun.cache.pool import Pool
from forerun.cache.prefix import PrefixTree
from forerun.core.batch import Batch, HiddenStates, Output, Span
from forerun.core.inference import inference
from forerun.core.request import Requests, RequestState
from forerun.core.tree import Draft, Drafts
from forerun.models.architectures.spec import with_window
from forerun.models.formats import ON_CPU
from forerun.models.run.drafter import DraftDecoder
from forerun.models.run.fused import RAW
from forerun.models.weights.transform import TensorWeights
from forerun.speculate.draft.base import Chooser, DraftContext, Drafter, scatter_logits
from forerun.speculate.draft.chain import FEEDS_NORMED, CatchUpConfig, ChainRunner, can_chain
from forerun.speculate.draft.heads.base import FeatureDrafter, HeadConfig, HeadDrafter
from forerun.speculate.draft.levels import Frontier, StepsConfig, grow, newest_level

L = TypeVar("L", bound="LayerConfig")


@dataclass(frozen=True)
class LayerConfig(StepsConfig, HeadConfig, CatchUpConfig):
    """Options of a head and of trees."""

    prefill_chunk: int = 256
    """As for a draft model."""


class LayerDrafter(FeatureDrafter[L]):
    per_sequence: ClassVar[tuple[str, ...]] = ("seen", "skipped", "pending")
    UNREAD = 64
    """Of a text that it does not draft, so many rounds are kept at least, and twice as many at most."""
    pending: dict[int, list[HiddenStates | torch.Tensor]]
    """Per sequence: hidden states that the layers have not read, by round."""
    chooser: Chooser
    decoder: DraftDecoder
    attention: Attention
    feeds: int
    """What replaces the feature while drafting: ``chain.FEEDS_RAW`` or ``FEEDS_NORMED``."""
    ids: torch.Tensor | None
    """int64 ascending: the tokens of a reduced output layer; None: all."""
    can_skip = True

    def use(self, decoder: DraftDecoder, feeds: int, ids: torch.Tensor | None) -> None:
        """Drafts with ``decoder``, and makes a cache for it."""
        self.decoder, self.feeds, self.ids = decoder, feeds, ids
        self.num_tokens = decoder.info.vocab_size
        self.attention = self.make_attention(decoder)
        self.tree = PrefixTree(self.attention.pool) if self.context.prefix_caching else None
        self.find_chains()

    def make_attention(self, decoder: DraftDecoder) -> Attention:
        info = decoder.info
        longest = self.context.max_model_len + self.rows(self.config.num_speculative_tokens)
        page_size = (self.context.options or {}).get("page_size") or longest
        pages = self.context.max_num_seqs * -(-longest // page_size)
        pool = Pool(info.kv_shapes, pages, page_size, info.dtype, info.device)
        return decoder.attention(pool)

    def find_chains(self) -> None:
        steps = self.decoder.steps(self.attention)
        self.chains = ChainRunner.find(
            self.decoder.fused, self.attention, self.chooser, self.config, feeds_hidden=self.feeds, output_ids=self.ids,
            steps=None if steps is None else replace(steps, state=partial(_next_feature, self.decoder, self.feeds)),
        )  # fmt: skip

    def rows(self, depth: int) -> int:
        """Entries that one sequence's draft of this depth takes."""
        return self.config.rows_by_depth()[depth]

    def feature(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the layers are given, [n, hidden size], of the target's hidden states [n, layers * hidden size]."""
        return hidden

    def add_hidden(self, sequence: RequestState, hidden: HiddenStates) -> None:
        """Keeps them until the token after each of them is known and the layers have read them. After many rounds
        without drafts, the layers begin anew with the last ``UNREAD`` rounds."""
        super().add_hidden(sequence, hidden)
        parts = self.pending.setdefault(sequence.id, [])
        parts.append(hidden.to_keep(self.layers))
        if len(parts) > 2 * self.UNREAD:
            kept, seen = parts[-self.UNREAD :], self.seen[sequence.id]
            Drafter.release(self, sequence)
            self.pending[sequence.id], self.seen[sequence.id] = kept, seen
            self.skipped[sequence.id] = seen - sum(map(len, kept))

    def _unread(self, sequence: RequestState) -> torch.Tensor:
        """Takes its pending hidden states [tokens, layers * hidden size]."""
        parts = [
            part if isinstance(part, torch.Tensor) else part.joined(self.layers)
            for part in self.pending.pop(sequence.id)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @inference
    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        self.learn()
        fitting = [
            index
            for index, (sequence, depth) in enumerate(zip(sequences, budgets))
            if self.ready(sequence) and self._fits(sequence, self.rows(depth) * len(sequence.sequences))
        ]
        drafts = [Draft() for _ in sequences]
        if not fitting:
            return drafts
        spans, feature, ready = self._missing(sequences, fitting)
        chosen = [sequences[index] for index in ready]
        if not ready:
            self._read(spans, feature)
        elif self.chains is not None and all(map(can_chain, chosen)):
            batch = Batch(spans, self.context.target.info.device)
            drafts = self.chains.draft(sequences, ready, budgets, batch, self.attention, feature)
        else:
            drafts = self._grow(sequences, budgets, ready, spans, feature)
        for sequence in chosen:
            self.attention.pool.truncate(sequence.id, self._end(sequence))
        for index in fitting:
            self._keep(sequences[index])
        return drafts

    def _end(self, sequence: RequestState) -> int:
        """How many entries its cache has if it has read all committed tokens."""
        return len(sequence.tokens) - 1 - self.skipped[sequence.id]

    def _fits(self, sequence: RequestState, rows: int) -> bool:
        """Reserves pages for its tokens and ``rows`` drafted ones; False if there are none. A new sequence starts from
        the prefix cache. Its entries are those that the target's tokens have there, as far as they were read."""
        pool = self.attention.pool
        if sequence.id not in pool.block_tables:
            self._skip(sequence)
            if (skipped := self.skipped[sequence.id]) and self.tree is not None:
                self.skipped[sequence.id] -= self.tree.match_prefix(sequence.id, sequence.tokens, skipped)
        return pool.try_reserve(sequence.id, self._end(sequence) + 1 + rows)

    def _skip(self, sequence: RequestState) -> None:
        """Drops the features of tokens that it is not to read (``RequestState.reads``)."""
        unread = 0 if sequence.reads is None else self._end(sequence) - sequence.reads
        if unread > 0:
            self.pending[sequence.id] = [self._unread(sequence)[unread:].clone()]
            self.skipped[sequence.id] += unread

    def _keep(self, sequence: RequestState) -> None:
        """Adds its entries to the prefix cache, unless some are missing among them. The last one of a prefix may be of
        another text: it holds the token after that prefix."""
        if self.tree is not None and not self.skipped[sequence.id]:
            self.tree.insert(sequence.id, sequence.tokens, self.attention.pool.length(sequence.id))

    @inference
    def release(self, sequence: RequestState) -> None:
        """Reads what its last round left behind, so that the text's next reader finds all of it. Of a text that it has
        not begun, it reads nothing: the answer ended before that paid."""
        begun = sequence.id in self.pending and sequence.id in self.attention.pool.block_tables
        behind = begun and self.seen[sequence.id] >= len(sequence.tokens) - 1
        works = sequence.drafter is not None and sequence.group is None and self.tree is not None
        if behind and works and self._fits(sequence, 0):
            spans, feature, _ = self._missing([sequence], [0])
            self._read(spans, feature)
            self._keep(sequence)
        super().release(sequence)

    def _grow(
        self, sequences: Requests, budgets: Sequence[int], ready: list[int], spans: list[Span], feature: torch.Tensor
    ) -> list[Draft]:
        states: dict[tuple[int, int], torch.Tensor] = {}

        def score(depth: int, frontier: Frontier, drafts: Drafts) -> torch.Tensor:
            if depth:
                read = newest_level(sequences, frontier, drafts, self._end)
                features = torch.stack([states[index, drafts[index].parents[node]] for index, node in frontier])
            out, logits = self._run(read, features) if depth else self._read(spans, feature)
            states.update(zip(frontier, out))
            return logits

        return grow(sequences, ready, budgets, self.config, self.chooser, score)[0]

    def _read(self, spans: list[Span], feature: torch.Tensor) -> Any:
        """Reads entries of committed tokens. Returns what ``_run`` does."""
        return self._run(spans, feature)

    def _run(self, spans: list[Span], feature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass of the layers over the spans' tokens and their ``feature`` rows [rows, hidden size]. Returns the
        next step's features and the logits, for the rows whose logits the spans ask for."""
        batch = Batch(spans, self.context.target.info.device, hidden=(RAW,), embeds=feature)
        out = self.decoder.forward(batch, self.attention)
        return _next_feature(self.decoder, self.feeds, out), self.to_all_tokens(out.logits)

    def to_all_tokens(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over the target's vocabulary."""
        return logits if self.ids is None else scatter_logits(logits, self.ids, self.num_tokens)

    def _missing(self, sequences: Requests, fitting: Sequence[int]) -> tuple[list[Span], torch.Tensor, list[int]]:
        """Spans to prefill now, their features, and the indices of sequences without backlog, which can draft."""
        spans: list[Span] = []
        rows: list[torch.Tensor] = []
        ready: list[int] = []
        starts = [self.attention.pool.length(sequences[index].id) for index in fitting]
        missing = [self._end(sequences[index]) - start for index, start in zip(fitting, starts)]
        for index, start, backlog, count in zip(fitting, starts, missing, self.config.shares(missing)):
            if not count:
                continue
            sequence = sequences[index]
            features = self._unread(sequence)
            rows.append(features[:count])
            if count == backlog:
                ready.append(index)
            else:
                self.pending[sequence.id] = [features[count:]]
            first = self.skipped[sequence.id] + start + 1
            tokens = sequence.tokens[first : first + count]
            spans.append(Span(sequence.id, start, tokens, logits=[count - 1] if count == backlog else []))
        return spans, self.feature(torch.cat(rows)).contiguous(), ready

    def backlog(self, sequence: RequestState) -> int:
        return self._end(sequence) - self.attention.pool.length(sequence.id) if self.ready(sequence) else 0

    def pools(self) -> list[Pool]:
        return [self.attention.pool]


class HeadLayerDrafter(LayerDrafter[L], HeadDrafter[L]):
    """Drafts with the layers of a trained head, which ``described`` returns: their config, spec and weights."""

    head: Any

    def __init__(self, config: L, context: DraftContext) -> None:
        super().__init__(config, context)
        self.packed = self.head.packed
        self.use(self._decoder(), self.head.feeds, self.head.token_ids())

    def _decoder(self) -> DraftDecoder:
        config, spec, tensors = self.head.described()
        spec = with_window(spec, self.config.draft_window)
        form = None if self.head.quantization is None else ON_CPU[self.head.quantization]
        return DraftDecoder(self.context.target, config, spec, TensorWeights(tensors), form)

    def learn(self) -> None:
        super().learn()
        if self.packed != self.head.packed:
            if self.decoder.graphs is not None:
                self.decoder.graphs.drop(self.attention)
            self.decoder, self.packed = self._decoder(), self.head.packed
            self.find_chains()

    def feature(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head.feature(hidden)
        return result


def _next_feature(decoder: DraftDecoder, feeds: int, out: Output) -> torch.Tensor:
    """What replaces the feature in the step after ``out``."""
    states = out.hidden[RAW]
    return decoder.normed(states) if feeds == FEEDS_NORMED else states

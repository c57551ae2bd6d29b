"""The ragged rows of one forward pass: prefill chunks, plain decodes and verifications alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from forerun.core.request import RequestState
from forerun.core.tree import Draft, depths

CPU = torch.device("cpu")


@dataclass(slots=True)
class Span:
    """One sequence's rows in a forward pass.

    The cache holds ``start`` committed entries, visible to every row, then ``stored`` tree nodes fed earlier.
    ``tokens`` are the rows to feed. ``parents`` is None for a chain; otherwise it names the parent of every node
    behind ``start``, the stored ones first (-1: the last committed entry), and a row sees its ancestors only.
    ``logits`` lists the rows, counted within this span, whose logits are wanted, in ascending order.
    """

    key: int
    start: int
    tokens: list[int]
    parents: list[int] | None = None
    stored: int = 0
    logits: list[int] = field(default_factory=list)
    source: tuple[int, ...] | None = None
    """What the encoder reads for these rows, in an encoder-decoder."""
    settled: int | None = None
    """Entries that will not be taken back, of which a layer's state may become part; None: those before ``start``. A
    tree's nodes up to there are a chain."""

    @property
    def count(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        """Cache entries after the forward."""
        return self.start + self.stored + len(self.tokens)

    def depths(self) -> list[int]:
        """Offset of every node's position from ``start``, stored nodes first."""
        if self.parents is None:
            return list(range(self.stored + len(self.tokens)))
        return depths(self.parents)

    def slice(self, begin: int, end: int) -> Span:
        """Rows [begin, end), the ones before them having been fed."""
        if begin == 0 and end == len(self.tokens):
            return self
        nodes = self.stored + end
        parents = None if self.parents is None else self.parents[:nodes]
        logits = [row - begin for row in self.logits if begin <= row < end]
        return replace(self, tokens=self.tokens[begin:end], parents=parents, stored=self.stored + begin, logits=logits)

    def positions(self) -> list[int]:
        if self.parents is None:
            first = self.start + self.stored
            return list(range(first, first + len(self.tokens)))
        return [self.start + depth for depth in self.depths()[self.stored :]]


@dataclass(eq=False)
class Batch:
    """Spans laid end to end. Row tensors are int64 [rows] on ``device``.

    ``embeds`` ([count, hidden]) replaces the token embedding at ``embed_rows`` (trained look-ahead tokens);
    ``hidden`` lists the layers whose outputs the caller wants; ``layers`` runs a subset of layers (early exit).
    """

    spans: list[Span]
    device: torch.device = CPU
    _: KW_ONLY
    hidden: tuple[int, ...] = ()
    layers: tuple[int, ...] | None = None
    embeds: torch.Tensor | None = None
    embed_rows: list[int] | None = None
    offsets: list[int] = field(init=False)
    num_rows: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.offsets = []
        for span in self.spans:
            self.offsets.append(self.num_rows)
            self.num_rows += len(span.tokens)

    def split(self, rows: int, logits: int) -> list[Batch]:
        """The same rows in batches of at most ``rows`` rows and ``logits`` wanted logits, to be fed in this order."""
        if self.num_rows <= rows and self.num_logits <= logits:
            return [self]
        return [self._piece(begin, end) for begin, end in pairwise([0, *self._cuts(rows, logits), self.num_rows])]

    def clamp_tokens(self, vocab_size: int) -> Batch:
        """As a draft of ``vocab_size`` tokens reads it. A token that it lacks is its last one: one model's padding may
        be longer than another's."""
        last = vocab_size - 1
        if all(max((*span.tokens, *(span.source or ())), default=0) <= last for span in self.spans):
            return self
        spans = [
            replace(
                span,
                tokens=[min(token, last) for token in span.tokens],
                source=None if span.source is None else tuple(min(token, last) for token in span.source),
            )
            for span in self.spans
        ]
        return replace(self, spans=spans)

    def _cuts(self, rows: int, logits: int) -> Iterator[int]:
        requested = {offset + row for span, offset in zip(self.spans, self.offsets) for row in span.logits}
        first = taken = 0
        for row in range(self.num_rows):
            if row - first == rows or (row in requested and taken == logits):
                yield row
                first, taken = row, 0
            taken += row in requested

    def _piece(self, begin: int, end: int) -> Batch:
        spans = [
            span.slice(max(begin - offset, 0), min(end - offset, span.count))
            for span, offset in zip(self.spans, self.offsets)
            if offset < end and begin < offset + span.count
        ]
        embeds, embed_rows = self.embeds, None
        if embeds is not None:
            here = [i for i, row in enumerate(self.embed_rows or ()) if begin <= row < end]
            embeds, embed_rows = embeds[here], [(self.embed_rows or [])[i] - begin for i in here]
        return replace(self, spans=spans, embeds=embeds, embed_rows=embed_rows)

    @cached_property
    def input_ids(self) -> torch.Tensor:
        return torch.tensor([t for span in self.spans for t in span.tokens], dtype=torch.long, device=self.device)

    @cached_property
    def positions(self) -> torch.Tensor:
        rows = [p for span in self.spans for p in span.positions()]
        return torch.tensor(rows, dtype=torch.long, device=self.device)

    @cached_property
    def logit_rows(self) -> torch.Tensor:
        rows = [offset + row for span, offset in zip(self.spans, self.offsets) for row in span.logits]
        return torch.tensor(rows, dtype=torch.long, device=self.device)

    @property
    def num_logits(self) -> int:
        return sum(len(span.logits) for span in self.spans)


@dataclass(slots=True)
class Output:
    """A forward's result: float32 ``logits`` [logit rows, vocabulary]; ``hidden[layer]`` [rows, hidden size]."""

    logits: torch.Tensor
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    experts: int = 0
    """How many experts were read, those of all layers; 0: none, or nobody counted."""


@dataclass(slots=True)
class Scores:
    """Logits of every drafted position, for the sequences that decode this round.

    ``first[s]`` is sequence s's root row (what follows its last committed token); the row of node i is
    ``first[s] + 1 + i``. ``raw`` [rows, vocabulary] holds the model's float32 logits or None where nobody asked;
    ``warped`` [rows, vocabulary] those of the sampled distribution (banned tokens at -inf).
    """

    sequences: list[RequestState]
    drafts: list[Draft]
    first: list[int]
    warped: torch.Tensor
    raw: torch.Tensor | None = None
    contexts: list[Any] | None = field(default=None, repr=False)
    """Each row's sampling context, once somebody has asked for it."""

    def row(self, index: int, node: int) -> int:
        """Row that predicts what follows ``node`` (-1: the root) of the index-th sequence."""
        return self.first[index] + 1 + node

    def select(self, indices: Sequence[int]) -> Scores:
        """Those of some of its sequences; itself where these are all."""
        if len(indices) == len(self.sequences):
            return self
        first: list[int] = []
        rows: list[int] = []
        for index in indices:
            first.append(len(rows))
            rows.extend(range(self.first[index], self.first[index] + 1 + len(self.drafts[index])))
        return Scores(
            [self.sequences[index] for index in indices],
            [self.drafts[index] for index in indices],
            first,
            self.warped[rows],
            None if self.raw is None else self.raw[rows],
            None if self.contexts is None else [self.contexts[row] for row in rows],
        )

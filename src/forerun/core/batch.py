"""The rows of one forward pass, ragged over sequences: prefill chunks, plain decodes and verifications alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from forerun.core.request import RequestState
from forerun.core.tree import Draft, depths
from forerun.kernels.gpu import HostCopy

CPU = torch.device("cpu")


@dataclass(slots=True)
class Span:
    """One sequence's rows in a forward pass.

    The cache holds ``start`` committed entries, which every row sees, then ``stored`` tree nodes that were fed earlier.
    """

    key: int
    start: int
    tokens: list[int]
    """The rows to feed."""
    parents: list[int] | None = None
    """The parent of every node after ``start``, stored ones first (-1: the last committed entry); a row then sees its
    ancestors only. None: a chain."""
    stored: int = 0
    logits: list[int] = field(default_factory=list)
    """The rows whose logits are requested, counted within this span, ascending."""
    source: tuple[int, ...] | None = None
    """What the encoder of an encoder-decoder reads."""
    settled: int | None = None
    """Entries up to here will not be rolled back, so that a layer's state may take them in; None: up to ``start``. A
    tree's nodes up to here are a chain."""

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
        """Rows [begin, end); those before them count as fed."""
        if begin == 0 and end == len(self.tokens):
            return self
        parents = None if self.parents is None else self.parents[: self.stored + end]
        logits = [row - begin for row in self.logits if begin <= row < end]
        return replace(self, tokens=self.tokens[begin:end], parents=parents, stored=self.stored + begin, logits=logits)

    def positions(self) -> list[int]:
        """Absolute position of every row."""
        if self.parents is None:
            return list(range(self.start + self.stored, self.end))
        return [self.start + depth for depth in self.depths()[self.stored :]]


@dataclass(eq=False)
class Batch:
    """Spans laid end to end. Row tensors are int64 [rows] on ``device``."""

    spans: list[Span]
    device: torch.device = CPU
    _: KW_ONLY
    hidden: tuple[int, ...] = ()
    """Layers whose outputs the caller wants."""
    layers: tuple[int, ...] | None = None
    """Layers to run (early exit); None: all."""
    embeds: torch.Tensor | None = None
    """[count, hidden]: embeddings that replace those of the tokens at ``embed_rows`` (trained look-ahead tokens)."""
    embed_rows: list[int] | None = None
    late: HostCopy | None = None
    """What the negative tokens of the spans stand for, on a GPU."""
    offsets: list[int] = field(init=False)
    """Each span's first row."""
    num_rows: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.offsets = []
        for span in self.spans:
            self.offsets.append(self.num_rows)
            self.num_rows += len(span.tokens)

    def split(self, rows: int, logits: int) -> list[Batch]:
        """The same rows as batches of at most ``rows`` rows and ``logits`` requested logits, in order."""
        if self.num_rows <= rows and self.num_logits <= logits:
            return [self]
        return [self._slice(begin, end) for begin, end in pairwise([0, *self._cuts(rows, logits), self.num_rows])]

    def clamp_tokens(self, vocab_size: int) -> Batch:
        """The batch for a draft model of ``vocab_size`` tokens, whose last token stands for those that it lacks: the
        target's vocabulary may be padded further."""
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
        requested = set(self._logit_rows())
        first = taken = 0
        for row in range(self.num_rows):
            if row - first == rows or (row in requested and taken == logits):
                yield row
                first, taken = row, 0
            taken += row in requested

    def _slice(self, begin: int, end: int) -> Batch:
        spans = [
            span.slice(max(begin - offset, 0), min(end - offset, span.count))
            for span, offset in zip(self.spans, self.offsets)
            if offset < end and begin < offset + span.count
        ]
        embeds, embed_rows = self.embeds, self.embed_rows
        if embeds is not None and embed_rows is not None:
            chosen = [i for i, row in enumerate(embed_rows) if begin <= row < end]
            embeds, embed_rows = embeds[chosen], [embed_rows[i] - begin for i in chosen]
        return replace(self, spans=spans, embeds=embeds, embed_rows=embed_rows)

    def _logit_rows(self) -> list[int]:
        return [offset + row for span, offset in zip(self.spans, self.offsets) for row in span.logits]

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)

    @cached_property
    def input_ids(self) -> torch.Tensor:
        return self.fill_in(self._tensor([token for span in self.spans for token in span.tokens]))

    def fill_in(self, ids: torch.Tensor) -> torch.Tensor:
        """Puts tokens that are still on the GPU in their place in ``ids``."""
        if self.late is not None:
            self.late.fill_in(ids)
        return ids

    @cached_property
    def positions(self) -> torch.Tensor:
        return self._tensor([position for span in self.spans for position in span.positions()])

    @cached_property
    def logit_rows(self) -> torch.Tensor:
        return self._tensor(self._logit_rows())

    @property
    def scores_all(self) -> bool:
        """Whether logits of every row are requested."""
        return all(len(span.logits) == span.count for span in self.spans)

    @property
    def num_logits(self) -> int:
        return sum(len(span.logits) for span in self.spans)


@dataclass(slots=True)
class Output:
    """A forward's result: float32 ``logits`` [logit rows, vocabulary]; ``hidden[layer]`` [rows, hidden size]."""

    logits: torch.Tensor
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    experts: int = 0
    """Experts read, summed over layers; 0: there are none, or they were not counted."""


class HiddenStates:
    """Hidden states of one sequence's ``rows`` of a forward. A layer's rows are selected when they are asked for, since
    many are never read. Until then all rows of the forward stay in memory."""

    __slots__ = ("hidden", "rows")
    FEW = 64
    """Rows of a forward that may stay in memory for any one of them."""

    def __init__(self, hidden: dict[int, torch.Tensor], rows: range | list[int]) -> None:
        self.hidden, self.rows = hidden, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, layer: int) -> torch.Tensor:
        """[rows, hidden size]."""
        rows = self.rows
        return self.hidden[layer][slice(rows.start, rows.stop) if isinstance(rows, range) else rows]

    def to_keep(self, layers: Sequence[int]) -> HiddenStates | torch.Tensor:
        """These, or what ``joined`` returns if the forward had many other rows, such as those of a prompt."""
        rows = len(self.hidden[layers[0]])
        return self if rows <= max(self.FEW, 2 * len(self)) else self.joined(layers).clone()

    def joined(self, layers: Sequence[int]) -> torch.Tensor:
        """[rows, layers * hidden size]."""
        return self[layers[0]] if len(layers) == 1 else torch.cat([self[layer] for layer in layers], dim=-1)


@dataclass(slots=True)
class Scores:
    """The target's logits at every drafted position, for the sequences that decode this round."""

    sequences: list[RequestState]
    drafts: list[Draft]
    first: list[int]
    """Per sequence, its root's row, which predicts what follows its last committed token. Its nodes' rows follow."""
    warped: torch.Tensor
    """[rows, vocabulary]: logits of the sampled distribution; banned tokens are at -inf."""
    raw: torch.Tensor | None = None
    """[rows, vocabulary]: the model's float32 logits, if they were asked for."""
    contexts: list[Any] | None = field(default=None, repr=False)
    """Each row's sampling context, computed on first use."""

    def row(self, index: int, node: int) -> int:
        """The row that predicts what follows ``node`` (-1: the root) of the index-th sequence."""
        return self.first[index] + 1 + node

    def select(self, indices: Sequence[int]) -> Scores:
        """The scores of some of the sequences."""
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

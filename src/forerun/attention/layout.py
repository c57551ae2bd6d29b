"""The layout of attention through torch: which rows share a call, where they are stored, and what they see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from forerun.attention.base import Metadata
from forerun.cache.pool import Pool, Slots
from forerun.core.batch import Batch, Span
from forerun.core.tree import node_paths

BATCHED_ROWS = 16
"""Sequences with at most this many rows each share a call with others."""
BUCKET = 128
"""Sequences share a call if their key counts fall into the same bucket."""
NEG_INF = float("-inf")
FOLDED = 4
"""Folded rows come in fours: on CPU a product of 1 to 3 rows, or their rest in a block of 32, rounds differently, and
one of 3 rows is slower than one of 4."""


@dataclass(slots=True)
class AttentionCall:
    """``count`` rows of each of one or more spans, over the same number of keys."""

    spans: list[int]
    count: int
    first_positions: list[int]
    """Per span, the position of its first row."""
    columns: int
    """Keys."""
    rows: slice | torch.Tensor
    """The batch's rows."""
    pages: int | torch.Tensor
    """The first of consecutive pages, each of which holds all keys of a span; else block tables [spans, pages]."""
    tree: bool
    """Whether the mask comes from the span's parents."""
    masks: dict[tuple[int, int | None, int, bool, bool], torch.Tensor | None] = field(default_factory=dict)


@dataclass(slots=True)
class Layout(Metadata):
    slots: Slots
    calls: list[AttentionCall]
    order: torch.Tensor | None
    """Where in the calls' results, end to end, each of the batch's rows is; None: in place."""


def new_slots(pool: Pool, batch: Batch) -> Slots:
    """Where the rows of ``batch`` are stored: a range of one page if they fit there, else a slot mapping."""
    entries = [(span.key, range(span.start + span.stored, span.end)) for span in batch.spans]
    if len(entries) == 1:
        key, new = entries[0]
        page, first = divmod(new[0], pool.page_size)
        if page == new[-1] // pool.page_size:
            return pool.block_tables[key][page], slice(first, first + len(new))
    return pool.slot_mappings(entries)


def plan(pool: Pool, batch: Batch) -> Layout:
    """Reserves the batch's entries and lays out its calls. Raises OutOfPages, before anything is written."""
    for span in batch.spans:
        pool.reserve(span.key, span.end)
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, span in enumerate(batch.spans):
        alone = span.parents is not None or span.count > BATCHED_ROWS
        groups.setdefault((index,) if alone else (span.count, -(-span.end // BUCKET)), []).append(index)
    rows = [
        [batch.offsets[index] + row for index in indices for row in range(batch.spans[index].count)]
        for indices in groups.values()
    ]
    calls = [_call(pool, batch, indices, listed) for indices, listed in zip(groups.values(), rows)]
    order = [row for listed in rows for row in listed]
    moved = None if order == list(range(batch.num_rows)) else torch.tensor(order, device=pool.device).argsort()
    return Layout(batch, new_slots(pool, batch), calls, moved)


def _call(pool: Pool, batch: Batch, indices: list[int], listed: list[int]) -> AttentionCall:
    """One call for the spans ``indices``, whose rows in the batch are ``listed``."""
    spans = [batch.spans[index] for index in indices]
    count, columns, tree = spans[0].count, max(span.end for span in spans), spans[0].parents is not None
    firsts = [span.start if tree else span.start + span.stored for span in spans]
    tables = [pool.block_tables[span.key][: pool.pages_for(span.end)] for span in spans]
    rows: slice | torch.Tensor = slice(listed[0], listed[-1] + 1)
    if listed[-1] - listed[0] != len(listed) - 1:  # other sequences are between them
        rows = torch.tensor(listed, device=pool.device)
    width, page = max(map(len, tables)), tables[0][0]
    pages: int | torch.Tensor = page
    if tables != [[page + i] for i in range(len(tables))]:
        pages = torch.tensor([table + table[:1] * (width - len(table)) for table in tables], device=pool.device)
    return AttentionCall(indices, count, firsts, columns, rows, pages, tree)


def leaf_paths(span: Span) -> Iterator[tuple[list[int], int]]:
    """Yields a tree's paths from root to leaf, and how many nodes of each were fed before or are on an earlier path."""
    parents = span.parents or []
    inner = {parent for parent in parents if parent >= 0}
    seen = set(range(span.stored))
    for leaf, nodes in enumerate(node_paths(parents)):
        if leaf not in inner:
            yield nodes, sum(node in seen for node in nodes)
            seen.update(nodes)


def tree_mask(
    span: Span, columns: int, window: int | None, dtype: torch.dtype, sink_tokens: int = 0
) -> torch.Tensor:  # fmt: skip
    """Additive [rows, columns] mask: a row sees the committed entries and its ancestors, within ``window`` *positions*
    (a sliding window counts positions, not rows) or among the first ``sink_tokens``."""
    nodes = span.stored + span.count
    visible = torch.zeros(span.count, columns, dtype=torch.bool)
    visible[:, : span.start] = True
    for row, path in zip(visible[:, span.start :], node_paths(span.parents or ())[span.stored :]):
        row[path] = True
    if window is not None:
        depths = torch.tensor(span.depths())
        positions = torch.arange(columns)
        positions[span.start : span.start + nodes] = span.start + depths
        rows = span.start + depths[span.stored :]
        visible &= (rows[:, None] - positions[None, :] < window) | (positions < sink_tokens)
    return torch.zeros(span.count, columns, dtype=dtype).masked_fill_(~visible, NEG_INF)


def chain_mask(
    first_positions: list[int], rows: int, columns: int, window: int | None, dtype: torch.dtype, device: torch.device,
    *, causal: bool = True, sink_tokens: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Additive [sequences, rows, columns] mask: a row sees the keys up to its own position, within ``window`` or among
    the first ``sink_tokens``; if not ``causal``, up to the last row's."""
    positions = torch.tensor(first_positions, device=device)[:, None] + torch.arange(rows, device=device)
    keys = torch.arange(columns, device=device)
    distance = positions[..., None] - keys
    hidden = (distance if causal else distance[:, -1:]) < 0
    if window is not None:
        hidden = hidden | ((distance >= window) & (keys >= sink_tokens))
    hidden = hidden.expand(distance.shape)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, NEG_INF)


def repeat(mask: torch.Tensor, groups: int) -> torch.Tensor:
    """A mask [..., rows, columns] for folded queries: each row ``groups`` times, padded with the last one."""
    mask = mask.repeat_interleave(groups, dim=-2)
    spare = -mask.shape[-2] % FOLDED
    return torch.cat([mask, mask[..., -1:, :].expand(*mask.shape[:-2], spare, -1)], -2) if spare else mask

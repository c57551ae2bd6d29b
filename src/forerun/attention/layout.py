"""Which rows are attended together, over which keys: worked out once per forward, used in every layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from forerun.attention.base import Metadata
from forerun.cache.pool import Pool
from forerun.core.batch import Batch, Span

BATCHED_ROWS = 16
"""Sequences with at most so many rows each share a call with others."""
BUCKET = 128
"""Sequences whose key counts fall into the same bucket share a call where bits need not be kept."""


@dataclass(slots=True)
class AttentionCall:
    """``count`` consecutive rows of each of one or more sequences, over the same number of keys.

    ``offset`` is the first row in the batch if all rows lie side by side; ``rows`` lists them otherwise.
    ``pages`` is the first of consecutive pages, one per sequence, or the page lists [sequences, pages].
    """

    spans: list[int]
    count: int
    firsts: list[int]
    """Per sequence, the position of its first row."""
    columns: int
    pages: int | torch.Tensor
    offset: int = 0
    rows: torch.Tensor | None = None
    tree: bool = False
    """Whether the mask comes from the span's parents."""
    masks: dict[tuple[int, int | None, bool], torch.Tensor | None] = field(default_factory=dict)


@dataclass(slots=True)
class Where:
    """Cache entries to write: a run of one page from offset ``first`` on, or (page, offset) tensors."""

    page: int = -1
    first: int = 0
    slot_mapping: tuple[torch.Tensor, torch.Tensor] | None = None

    def store(self, pool: Pool, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write rows ``k`` and ``v`` ([rows, heads, width]) of one layer."""
        if self.slot_mapping is not None:
            pool.write(layer, self.slot_mapping, k, v)
        else:
            pool.write_run(layer, self.page, self.first, k, v)


def where(pool: Pool, batch: Batch) -> Where:
    """Where the rows of ``batch`` are stored."""
    runs = new_entries(batch)
    if len(runs) == 1:
        key, entries = runs[0]
        page, first = divmod(entries[0], pool.page_size)
        if page == entries[-1] // pool.page_size:
            return Where(pool.block_tables[key][page], first)
    return Where(slot_mapping=pool.slot_mappings(runs))


def new_entries(batch: Batch) -> list[tuple[int, range]]:
    """Each span's sequence, and the entries that its rows become."""
    return [(span.key, range(span.start + span.stored, span.end)) for span in batch.spans]


@dataclass(slots=True)
class Layout(Metadata):
    """``order`` lists where in the calls' results, end to end, each of the batch's rows is (None: in place)."""

    where: Where
    calls: list[AttentionCall]
    order: torch.Tensor | None = None


@dataclass(slots=True)
class Path:
    """A path from the root to a leaf: its nodes, the first ``done`` of which need no attention any more: they were fed
    before, or are on an earlier path."""

    nodes: list[int]
    done: int


def leaves(span: Span) -> list[Path]:
    """A tree's paths in node order."""
    parents = span.parents or []
    inner = {parent for parent in parents if parent >= 0}
    seen = set(range(span.stored))
    paths = []
    for leaf in range(len(parents)):
        if leaf in inner:
            continue
        nodes = []
        node = leaf
        while node >= 0:
            nodes.append(node)
            node = parents[node]
        nodes.reverse()
        paths.append(Path(nodes, sum(1 for node in nodes if node in seen)))
        seen.update(nodes)
    return paths


def plan(pool: Pool, batch: Batch) -> Layout:
    """Raises OutOfPages where there is no room; nothing was written."""
    for span in batch.spans:
        pool.reserve(span.key, span.end)
    parts = []
    for index, (span, offset) in enumerate(zip(batch.spans, batch.offsets)):
        pages, tree = _pages(pool, span.key, span.end), span.parents is not None
        first = span.start if tree else span.start + span.stored
        parts.append(AttentionCall([index], span.count, [first], span.end, pages, offset, tree=tree))
    layout = Layout(batch, where(pool, batch), parts if len(parts) < 2 else list(_merge(parts, pool.device)))
    attended: list[int] = []
    for call in layout.calls:
        listed = range(call.offset, call.offset + call.count * len(call.spans))
        attended += listed if call.rows is None else call.rows.tolist()
    if attended != list(range(batch.num_rows)):
        layout.order = torch.tensor(attended, device=pool.device).argsort()
    return layout


def _pages(pool: Pool, key: int, columns: int) -> int | torch.Tensor:
    """The page that holds all the keys, or the list of pages that do."""
    table = pool.block_tables[key][: pool.pages_for(columns)]
    return table[0] if len(table) == 1 else torch.tensor([table], device=pool.device)


def _merge(parts: list[AttentionCall], device: torch.device) -> Iterator[AttentionCall]:
    """Put short parts of equal shape into one call."""
    groups: dict[tuple[int, int, bool], list[AttentionCall]] = {}
    for part in parts:
        if part.tree or part.count > BATCHED_ROWS:
            yield part
            continue
        bucket = -(-part.columns // BUCKET)
        groups.setdefault((part.count, bucket, isinstance(part.pages, int)), []).append(part)
    for (_, _, slotted), group in groups.items():
        if slotted:
            yield from _runs(sorted(group, key=lambda part: part.pages), device)
        else:
            yield _join(group, device)


def _runs(group: list[AttentionCall], device: torch.device) -> Iterator[AttentionCall]:
    """One call for each run of consecutive pages."""
    first = 0
    for at in range(1, len(group) + 1):
        if at == len(group) or group[at].pages != group[at - 1].pages + 1:
            yield _join(group[first:at], device)
            first = at


def _join(group: list[AttentionCall], device: torch.device) -> AttentionCall:
    if len(group) == 1:
        return group[0]
    count = group[0].count
    columns = max(part.columns for part in group)
    pages = group[0].pages
    if isinstance(pages, torch.Tensor):
        lists = [part.pages for part in group if isinstance(part.pages, torch.Tensor)]
        width = max(pages.shape[1] for pages in lists)
        lists = [torch.cat([pages, pages[:, :1].expand(-1, width - pages.shape[1])], dim=1) for pages in lists]
        pages = torch.cat(lists)
    offsets = [part.offset for part in group]
    together = all(b - a == count for a, b in pairwise(offsets))
    rows = None
    if not together:
        listed = [offset + row for offset in offsets for row in range(count)]
        rows = torch.tensor(listed, device=device)
    spans = [part.spans[0] for part in group]
    return AttentionCall(spans, count, [part.firsts[0] for part in group], columns, pages, offsets[0], rows)


NEG_INF = float("-inf")
FOLDED = 4
"""Folded rows come in fours: on CPU a product of 1 to 3 rows, or their rest in a block of 32, rounds differently, and
one of 3 rows is slower than one of 4."""


def ancestors(span: Span) -> torch.Tensor:
    """bool [rows, stored + rows]: which nodes behind ``span.start`` each new row sees (itself included)."""
    total = span.stored + span.count
    seen = torch.zeros(total, total, dtype=torch.bool)
    parents = span.parents if span.parents is not None else list(range(-1, total - 1))
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] = seen[parent]
        seen[node, node] = True
    return seen[span.stored :]


def tree_mask(span: Span, columns: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Additive [rows, columns] mask: committed entries, then ancestors, within ``window`` *positions* of the row
    (a sliding window counts positions, not rows)."""
    nodes = span.stored + span.count
    visible = torch.zeros(span.count, columns, dtype=torch.bool)
    visible[:, : span.start] = True
    visible[:, span.start : span.start + nodes] = ancestors(span)
    if window is not None:
        depths = torch.tensor(span.depths())
        where = torch.arange(columns)
        where[span.start : span.start + nodes] = span.start + depths
        rows = span.start + depths[span.stored :]
        visible &= rows[:, None] - where[None, :] < window
    return torch.zeros(span.count, columns, dtype=dtype).masked_fill_(~visible, NEG_INF)


def chain_mask(
    firsts: list[int], rows: int, columns: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Additive [sequences, rows, columns] mask: each row sees the keys up to its own position, within ``window``.
    ``firsts`` are the positions of the sequences' first rows."""
    positions = torch.tensor(firsts, device=device)[:, None] + torch.arange(rows, device=device)
    distance = positions[..., None] - torch.arange(columns, device=device)
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, NEG_INF)


def repeat(mask: torch.Tensor, groups: int) -> torch.Tensor:
    """A mask [..., rows, columns] for folded queries: ``groups`` times each row, padded with the last one."""
    mask = mask.repeat_interleave(groups, dim=-2)
    spare = -mask.shape[-2] % FOLDED
    return torch.cat([mask, mask[..., -1:, :].expand(*mask.shape[:-2], spare, -1)], -2) if spare else mask

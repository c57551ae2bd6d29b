"""Which rows are attended together, over which keys: worked out once per forward, used in every layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from forerun.attention.mask import FOLDED
from forerun.cache.pool import Pool
from forerun.core.batch import Batch, Span

BATCHED_ROWS = 16
"""Sequences with at most so many rows each share a call with others."""
BUCKET = 128
"""Sequences whose key counts fall into the same bucket share a call where bits need not be kept."""


@dataclass(slots=True)
class Call:
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
    masks: dict[tuple[int, int | None], torch.Tensor | None] = field(default_factory=dict)


@dataclass(slots=True)
class Where:
    """Cache entries to write: a slice of one page, or (page, offset) tensors."""

    page: int = -1
    first: int = 0
    last: int = 0
    places: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(slots=True)
class Path:
    """One root-to-leaf path of a tree: the ``count`` stored rows from ``stored`` on belong in the columns from
    ``first`` on, where plain decoding would have them; then come the calls for the rows not attended before."""

    stored: int
    first: int
    count: int
    calls: list[Call]


@dataclass(slots=True)
class Tree:
    """A tree attended path by path. Its calls count their ``offset`` in ``rows``."""

    rows: torch.Tensor
    """The batch's rows in the order attended, then ``FOLDED - 1`` spare ones."""
    stored: torch.Tensor
    """The batch's rows as the paths lay them out, one path after the other."""
    span: Call
    """All the keys that a path sees, for one sequence."""
    paths: list[Path]


@dataclass(slots=True)
class Layout:
    """The plan of one forward. Trees come first, then calls; ``order`` lists where in their results, end to end, each
    of the batch's rows is (None: in place)."""

    where: Where
    calls: list[Call] = field(default_factory=list)
    trees: list[Tree] = field(default_factory=list)
    order: torch.Tensor | None = None


@dataclass(slots=True)
class _Leaf:
    """A path's rows in the span; how many an earlier path attended, and how many are still where they belong."""

    rows: list[int]
    done: int
    placed: int


def leaves(span: Span) -> list[_Leaf]:
    """Paths in node order; rows are counted within the span."""
    parents = span.parents or []
    inner = {parent for parent in parents if parent >= 0}
    seen: set[int] = set()
    before: list[int] = []
    paths = []
    for leaf in range(len(parents)):
        if leaf in inner:
            continue
        rows = []
        node = leaf
        while node >= 0:
            rows.append(node)
            node = parents[node]
        rows.reverse()
        placed = 0
        while placed < min(len(rows), len(before)) and rows[placed] == before[placed]:
            placed += 1
        paths.append(_Leaf(rows, sum(1 for row in rows if row in seen), placed))
        seen.update(rows)
        before = rows
    return paths


class Planner:
    """Makes layouts.

    ``exact``: a row's bits must not depend on its batch. Then a row at position p always attends
    ``p // key_multiple + 1`` times ``key_multiple`` keys, so that decoding, verification and prefill make the same
    sums: rows on both sides of a multiple go into two calls, and trees are attended path by path.
    """

    def __init__(self, pool: Pool, key_multiple: int, exact: bool) -> None:
        self.pool = pool
        self.key_multiple = key_multiple
        self.exact = exact

    def plan(self, batch: Batch) -> Layout:
        layout = Layout(self._where(batch))
        parts: list[Call] = []
        attended: list[int] = []
        for index, (span, offset) in enumerate(zip(batch.spans, batch.offsets)):
            if span.parents is None:
                parts.extend(self._chain(span, index, span.start + span.stored, span.count, offset))
            elif self.exact and not span.stored:
                tree, rows = self._tree(span, index, offset)
                layout.trees.append(tree)
                attended += rows
            else:
                columns = -(-span.end // self.key_multiple) * self.key_multiple
                pages = self._pages(span.key, columns)
                parts.append(Call([index], span.count, [span.start], columns, pages, offset, tree=True))
        layout.calls = parts if len(parts) < 2 else list(self._merge(parts))
        for call in layout.calls:
            listed = range(call.offset, call.offset + call.count * len(call.spans))
            attended += listed if call.rows is None else call.rows.tolist()
        if attended != list(range(batch.num_rows)):
            layout.order = torch.tensor(attended, device=self.pool.device).argsort()
        return layout

    def _chain(self, span: Span, index: int, first: int, count: int, offset: int) -> Iterator[Call]:
        if not self.exact:
            columns = -(-(first + count) // self.key_multiple) * self.key_multiple
            yield Call([index], count, [first], columns, self._pages(span.key, columns), offset)
            return
        for at, take, columns in self._pieces(first, count):
            yield Call([index], take, [at], columns, self._pages(span.key, columns), offset + at - first)

    def _pieces(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """``count`` positions from ``first`` on, cut where the number of keys changes: position, count, columns."""
        end = first + count
        while first < end:
            columns = (first // self.key_multiple + 1) * self.key_multiple
            yield first, min(end, columns) - first, columns
            first = columns

    def _tree(self, span: Span, index: int, offset: int) -> tuple[Tree, list[int]]:
        stored: list[int] = []
        rows: list[int] = []
        paths = []
        for leaf in leaves(span):
            calls = []
            for at, take, columns in self._pieces(span.start + leaf.done, len(leaf.rows) - leaf.done):
                calls.append(Call([index], take, [at], columns, 0, len(rows) + at - span.start - leaf.done))
            paths.append(Path(len(stored), span.start + leaf.placed, len(leaf.rows) - leaf.placed, calls))
            stored += [offset + row for row in leaf.rows[leaf.placed :]]
            rows += [offset + row for row in leaf.rows[leaf.done :]]
        columns = max(call.columns for path in paths for call in path.calls)
        whole = Call([index], span.count, [span.start], columns, self._pages(span.key, columns))
        device = self.pool.device
        padded = torch.tensor(rows + rows[-1:] * (FOLDED - 1), device=device)
        return Tree(padded, torch.tensor(stored, device=device), whole, paths), rows

    def _where(self, batch: Batch) -> Where:
        return self._entries([(span.key, span.start + span.stored, span.end) for span in batch.spans])

    def _entries(self, runs: list[tuple[int, int, int]]) -> Where:
        size, tables = self.pool.page_size, self.pool.tables
        if len(runs) == 1:
            key, first, end = runs[0]
            if first // size == (end - 1) // size:
                page = tables[key][first // size]
                return Where(page, first % size, first % size + end - first)
        pages: list[int] = []
        offsets: list[int] = []
        for key, first, end in runs:
            table = tables[key]
            for entry in range(first, end):
                pages.append(table[entry // size])
                offsets.append(entry % size)
        device = self.pool.device
        return Where(places=(torch.tensor(pages, device=device), torch.tensor(offsets, device=device)))

    def _pages(self, key: int, columns: int) -> int | torch.Tensor:
        """The page that holds all the keys, or the list of pages up to the padded end."""
        count = -(-columns // self.pool.page_size)
        table = self.pool.tables[key]
        if count <= 1:
            return table[0]
        # Padding repeats a page of its own: another sequence's may hold a NaN, which no mask stops.
        listed = table[:count] + table[:1] * (count - len(table))
        return torch.tensor([listed], device=self.pool.device)

    def _merge(self, parts: list[Call]) -> Iterator[Call]:
        """Put short parts of equal shape into one call."""
        groups: dict[tuple[int, int, bool], list[Call]] = {}
        for part in parts:
            if part.tree or part.count > BATCHED_ROWS:
                yield part
                continue
            bucket = part.columns if self.exact else -(-part.columns // BUCKET)
            groups.setdefault((part.count, bucket, isinstance(part.pages, int)), []).append(part)
        for (_, _, slotted), group in groups.items():
            if len(group) == 1:
                yield group[0]
            elif slotted:
                yield from self._runs(sorted(group, key=lambda part: part.pages))
            else:
                yield self._join(group)

    def _runs(self, group: list[Call]) -> Iterator[Call]:
        """One call for each run of consecutive pages."""
        first = 0
        for at in range(1, len(group) + 1):
            if at == len(group) or group[at].pages != group[at - 1].pages + 1:
                yield self._join(group[first:at])
                first = at

    def _join(self, group: list[Call]) -> Call:
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
            rows = torch.tensor(listed, device=self.pool.device)
        spans = [part.spans[0] for part in group]
        return Call(spans, count, [part.firsts[0] for part in group], columns, pages, offsets[0], rows)

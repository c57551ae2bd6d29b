"""Attention through torch in calls of a few shapes, so that a row's bits do not depend on the rest of the batch.

It is used where our own kernel cannot be. A row attends the blocks of ``BLOCK`` keys up to its position, in the order
of its own path. Each block's scores are one product, one softmax spans the blocks, and each block's values are one
product, in float32. Rows of one sequence share a call, and query heads that share a KV head are folded into rows. The
number of rows is one of the sizes that ``core/tiles.py`` found to agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import torch

from forerun.attention.base import Backend, Metadata, Query
from forerun.attention.layout import NEG_INF, leaf_paths, new_slots
from forerun.cache.pool import KVShape, Slots
from forerun.core import tiles
from forerun.core.batch import Batch, Span

BLOCK = 256
"""Keys in one product."""
SIZES = (4, 8, 16, 32, 64, 128, 256)
"""Row counts that a product may have: rows times the query heads of a KV head."""


@dataclass(slots=True)
class KeyPart:
    """Rows of one sequence whose positions are in the same block."""

    rows: list[int]
    """Indices in the batch."""
    positions: list[int]
    slots: Slots
    """Where the keys are, in the order of the rows' path."""
    masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        return self.positions[0] // BLOCK + 1

    def first_seen(self, window: int | None) -> int:
        """The first block that rows in the last block can see."""
        return max(0, (self.blocks - 1) * BLOCK - window + 1) // BLOCK if window else 0


@dataclass(slots=True)
class Parts(Metadata):
    slots: Slots
    parts: list[KeyPart]


class TiledAttention(Backend[Parts]):
    """Sums are in float32, whatever the pool's dtype."""

    def begin(self, batch: Batch) -> Parts:
        pool = self.pool
        for span in batch.spans:
            pool.reserve(span.key, span.end)
        parts = [part for span, offset in zip(batch.spans, batch.offsets) for part in self._parts(span, offset)]
        return Parts(batch, new_slots(pool, batch), parts)

    def _parts(self, span: Span, offset: int) -> Iterator[KeyPart]:
        before = span.start + span.stored
        if span.parents is None:
            yield from self._pieces(span, list(range(offset, offset + span.count)), before, None)
            return
        for nodes, known in leaf_paths(span):
            new = [offset + node - span.stored for node in nodes[known:]]
            yield from self._pieces(span, new, span.start + known, nodes)

    def _pieces(self, span: Span, rows: list[int], first: int, path: list[int] | None) -> Iterator[KeyPart]:
        """``rows`` at positions from ``first`` on, cut where the number of blocks changes."""
        end = first + len(rows)
        while first < end:
            last = min(end, (first // BLOCK + 1) * BLOCK)
            columns = (first // BLOCK + 1) * BLOCK
            taken, rows = rows[: last - first], rows[last - first :]
            yield KeyPart(taken, list(range(first, last)), self._keys(span, columns, path))
            first = last

    def _keys(self, span: Span, columns: int, path: list[int] | None) -> Slots:
        table, size = self.pool.block_tables[span.key], self.pool.page_size
        if path is None and columns <= size:
            return table[0], slice(0, columns)
        entries = torch.arange(columns)
        if path is not None:
            nodes = torch.tensor([span.start + node for node in path])[: columns - span.start]
            entries[span.start : span.start + len(nodes)] = nodes
            entries[span.start + len(nodes) :] = 0
        entries[entries >= len(table) * size] = 0  # masked; a mask does not stop a NaN of another sequence
        pages = torch.tensor(table)[entries // size]
        return pages.to(self.pool.device), (entries % size).to(self.pool.device)

    def run(self, query: Query, parts: Parts) -> torch.Tensor:
        if not query.causal:
            raise TypeError(f"{type(self).__name__} does not show a row the rows after it")
        pool, count = self.pool, parts.batch.num_rows
        k, v = query.k[:count], query.v[:count]
        pool.write(query.layer, parts.slots, k, v)
        shape = pool.layers[query.layer]
        heads = query.q.shape[1]
        sizes = row_sizes(shape, pool.device, torch.get_num_threads())
        if not sizes:
            raise RuntimeError("no row count of torch's products keeps its bits here; self-tests come first")
        out = query.q.new_empty(query.q.shape[0], heads * shape.value_dim)
        together = max(1, sizes[-1] // (heads // shape.heads))
        if query.sink_tokens:
            raise TypeError("invariant attention through torch has no sink tokens")
        for part in parts.parts:
            first = part.first_seen(query.window)
            keys, values = (self._blocks(side[query.layer], part, first) for side in (pool.keys, pool.values))
            for at in range(0, len(part.rows), together):
                rows = part.rows[at : at + together]
                mask = self._mask(part, at, len(rows), first, query.window)
                out[rows] = self._attend(query, rows, keys, values, mask, sizes)
        if count < out.shape[0]:
            out[count:] = out[count - 1]
        return out

    @staticmethod
    def _blocks(side: torch.Tensor, part: KeyPart, first: int) -> list[torch.Tensor]:
        """float32 [kv heads, BLOCK, width] each, from block ``first`` on."""
        page, offset = part.slots
        if isinstance(page, int):
            blocks = side[page, :, first * BLOCK : part.blocks * BLOCK].split(BLOCK, 1)
        else:
            assert isinstance(offset, torch.Tensor)
            start = first * BLOCK
            gathered = side[page[start:], :, offset[start:]].split(BLOCK)
            blocks = tuple(block.transpose(0, 1).contiguous() for block in gathered)
        return [block.float() for block in blocks]

    @staticmethod
    def _mask(part: KeyPart, at: int, count: int, first: int, window: int | None) -> torch.Tensor:
        """Additive [blocks, 1, rows, 1, BLOCK], for the last block alone where the others hide nothing."""
        key = at, window
        if key not in part.masks:
            begin = first if window else part.blocks - 1
            columns = torch.arange(begin * BLOCK, part.blocks * BLOCK).view(-1, 1, 1, 1, BLOCK)
            positions = torch.tensor(part.positions[at : at + count]).view(1, 1, -1, 1, 1)
            hidden = columns > positions
            if window:
                hidden = hidden | (columns <= positions - window)
            part.masks[key] = torch.zeros(hidden.shape).masked_fill_(hidden, NEG_INF)
        return part.masks[key]

    @staticmethod
    def _attend(
        query: Query,
        rows: list[int],
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        mask: torch.Tensor,
        sizes: tuple[int, ...],
    ) -> torch.Tensor:
        """[rows, heads * value width]."""
        q, kv_heads = query.q[rows], keys[0].shape[0]
        groups = q.shape[1] // kv_heads
        folded = q.float().view(len(rows), kv_heads, groups, -1).transpose(0, 1).flatten(1, 2)
        mask = mask.expand(-1, -1, -1, groups, -1).flatten(2, 3).to(q.device)
        sinks = query.sinks
        if sinks is not None:  # in the order of the folded queries
            sinks = sinks.to(q.device).view(kv_heads, 1, groups).expand(-1, len(rows), -1).flatten(1)[..., None]
        parts = []
        for first, end, size in tiles.split_rows(folded.shape[1], sizes):
            result = attend(
                _pad(folded[:, first:end], size, 1), keys, values, _pad(mask[:, :, first:end], size, 2),
                query.scale, query.softcap, None if sinks is None else _pad(sinks[:, first:end], size, 1),
            )  # fmt: skip
            parts.append(result[:, : end - first])
        out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        by_group: torch.Tensor = out.unflatten(1, (len(rows), groups))
        return by_group.transpose(0, 1).flatten(1).to(q.dtype)


def _pad(x: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """``x`` with its last entry along ``dim`` repeated, contiguous."""
    missing = size - x.shape[dim]
    if missing:
        x = torch.cat([x, x.narrow(dim, x.shape[dim] - 1, 1).expand(*x.shape[:dim], missing, *x.shape[dim + 1 :])], dim)
    return x.contiguous()


def attend(
    q: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale q k^T + mask) v, for q [heads, rows, width] and blocks [heads, BLOCK, width] of keys and values.

    ``mask`` [blocks, 1, rows, BLOCK] is for the last blocks. ``sinks`` [heads, rows, 1] are one more score of each row.
    """
    q = q * scale
    scores = [torch.bmm(q, block.transpose(1, 2)) for block in keys]
    if softcap is not None:
        for block in scores:
            block.div_(softcap).tanh_().mul_(softcap)
    for block, hidden in zip(scores[len(keys) - len(mask) :], mask):
        block.add_(hidden)
    tops = [block.amax(-1, keepdim=True) for block in scores]
    top = tops[0] if sinks is None else torch.maximum(tops[0], sinks)
    for other in tops[1:]:
        top = torch.maximum(top, other)
    for block in scores:
        block.sub_(top).exp_()
    total, out = scores[0].sum(-1, keepdim=True), torch.bmm(scores[0], values[0])
    for weights, block in zip(scores[1:], values[1:]):
        total.add_(weights.sum(-1, keepdim=True))
        out.baddbmm_(weights, block)
    if sinks is not None:
        total.add_(torch.exp(sinks - top))
    return out.div_(total)


@cache
def row_sizes(shape: KVShape, device: torch.device, threads: int) -> tuple[int, ...]:
    """The row counts whose products agree to the last bit on this machine, ascending; () if none do."""

    def measure() -> tiles.Groups:
        generator = torch.Generator().manual_seed(0)

        def numbers(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=generator).to(device)

        sides = [numbers(shape.heads, 3 * BLOCK, width) for width in (shape.key_dim, shape.value_dim)]
        views = [list(side.split(BLOCK, 1)) for side in sides]
        copies = [[block.contiguous() for block in blocks] for blocks in views]
        q = numbers(shape.heads, 1, shape.key_dim)

        def run(size: int) -> torch.Tensor:
            """Results over one, two and three blocks, [size, numbers]. Views of the pool and copies must agree, too."""
            rows = q.expand(-1, size, -1).contiguous()
            mask = torch.zeros(1, 1, size, BLOCK, device=device)
            mask[..., BLOCK // 2 :] = NEG_INF
            results = [
                torch.cat([
                    attend(rows, k[:count], v[:count], mask, shape.key_dim**-0.5, cap).transpose(0, 1).flatten(1)
                    for count in (1, 2, 3)
                    for cap in (None, 5.0)
                ], 1)
                for k, v in (views, copies)
            ]  # fmt: skip
            return results[0] if torch.equal(*results) else torch.arange(2.0)[:, None]  # rows that disagree

        with torch.inference_mode():
            return tiles.compare(SIZES, run)

    what = f"attention {shape.heads} {shape.key_dim} {shape.value_dim} {device} {BLOCK}"
    return tiles.best_group(tiles.measured_once(what, measure, tiles.as_groups))

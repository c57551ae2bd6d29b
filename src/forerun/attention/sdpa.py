"""Attention through ``torch.nn.functional.scaled_dot_product_attention``: every device, and the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from forerun.attention.mask import ChainMasks, tree_mask
from forerun.cache.pool import Pool
from forerun.core.batch import Batch, Span


@dataclass(slots=True)
class _Leaf:
    """One root-to-leaf path of a tree: its rows in the span, and how many an earlier leaf has attended."""

    rows: list[int]
    done: int


def leaves(span: Span) -> list[_Leaf]:
    """Paths in node order; rows are counted within the span."""
    parents = span.parents or []
    inner = {parent for parent in parents if parent >= 0}
    seen: set[int] = set()
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
        done = sum(1 for row in rows if row in seen)
        seen.update(rows)
        paths.append(_Leaf(rows, done))
    return paths


class SdpaAttention:
    """Folded grouped-query attention, one call per sequence.

    ``row_multiple`` and ``key_multiple`` pad queries and keys so that a row's bits do not depend on how many rows
    or keys its call has; trees are then attended path by path, each path's keys in the columns that plain
    decoding would use. With both at 1 nothing is padded and a tree is one masked call.
    """

    def __init__(self, pool: Pool, *, row_multiple: int = 1, key_multiple: int = 1, reach: int = 4096) -> None:
        self.pool = pool
        self.row_multiple = row_multiple
        self.key_multiple = key_multiple
        self.by_path = row_multiple > 1
        self.masks = ChainMasks(-(-reach // key_multiple) * key_multiple, pool.device, pool.dtype)

    def begin(self, batch: Batch) -> None:
        pool = self.pool
        pages: list[int] = []
        offsets: list[int] = []
        for span in batch.spans:
            pool.reserve(span.key, span.end)
            table = pool.tables[span.key]
            first = span.start + span.stored
            for entry in range(first, span.end):
                pages.append(table[entry // pool.page_size])
                offsets.append(entry % pool.page_size)
        plan = batch.plan
        plan["tables"] = [self._table(span) for span in batch.spans]
        if len(batch.spans) == 1 and pages and pages[0] == pages[-1]:
            plan["slice"] = (pages[0], offsets[0], offsets[-1] + 1)
        else:
            device = pool.device
            plan["places"] = (torch.tensor(pages, device=device), torch.tensor(offsets, device=device))
        plan["leaves"] = [
            leaves(span) if self.by_path and span.parents is not None and not span.stored else None
            for span in batch.spans
        ]
        plan["masks"] = {}

    def finish(self, batch: Batch) -> None:
        for span in batch.spans:
            self.pool.advance(span.key, span.end)

    def _columns(self, end: int) -> int:
        return -(-end // self.key_multiple) * self.key_multiple

    def _table(self, span: Span) -> int | torch.Tensor:
        """The page that holds all of the span's keys, or the list of its pages up to the padded end."""
        pool = self.pool
        count = pool.pages_for(self._columns(span.end))
        table = pool.tables[span.key]
        if count <= 1:
            return table[0]
        padded = table[:count] + [0] * (count - len(table))
        return torch.tensor(padded, device=pool.device)

    def _view(self, layer: int, table: int | torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(table, int):
            return self.pool.keys[layer][table, :, :columns], self.pool.values[layer][table, :, :columns]
        k, v = self.pool.gather(layer, table)
        return k[:, :columns], v[:, :columns]

    def _write(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> None:
        where = batch.plan.get("slice")
        if where is not None:
            page, first, last = where
            self.pool.keys[layer][page, :, first:last] = k.transpose(0, 1)
            self.pool.values[layer][page, :, first:last] = v.transpose(0, 1)
        else:
            self.pool.write(layer, batch.plan["places"], k, v)

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: Batch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        count = batch.num_rows
        k, v = k[:count], v[:count]
        plan = batch.plan
        outputs = {}
        for index, paths in enumerate(plan["leaves"]):
            if paths is not None:
                outputs[index] = self._paths(layer, q, k, v, batch, index, scale, window, softcap)
        self._write(layer, k, v, batch)
        parts = []
        for index, (span, offset) in enumerate(zip(batch.spans, batch.offsets)):
            if index in outputs:
                parts.append(outputs[index])
                continue
            columns = self._columns(span.end)
            keys, values = self._view(layer, plan["tables"][index], columns)
            rows = self._pad(q, offset, span.count)
            mask = self._mask(batch, index, rows.shape[0], q.shape[1] // keys.shape[0], columns, window)
            parts.append(fold(rows, keys, values, mask, scale, softcap)[: span.count])
        spare = q.shape[0] - count
        if spare:
            parts.append(parts[0].new_zeros(spare, parts[0].shape[1]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _pad(self, q: torch.Tensor, offset: int, count: int) -> torch.Tensor:
        """Rows ``offset`` to ``offset + count`` of q, padded to the row multiple with rows whose result is unused."""
        padded = -(-count // self.row_multiple) * self.row_multiple
        rows = q[offset : offset + padded]
        if rows.shape[0] < padded:
            rows = torch.cat([rows, rows[-1:].expand(padded - rows.shape[0], -1, -1)])
        return rows

    def _mask(
        self, batch: Batch, index: int, rows: int, groups: int, columns: int, window: int | None
    ) -> torch.Tensor | None:
        span = batch.spans[index]
        first = span.start + span.stored
        if span.parents is None:
            if rows == 1 and columns == span.end and (window is None or window >= columns):
                return None
            return self.masks.get(rows, groups, first, columns, window)
        cache = batch.plan["masks"]
        key = (index, window, groups)
        if key not in cache:
            mask = tree_mask(span, columns, window, self.masks.dtype)
            if rows > span.count:
                mask = torch.cat([mask, mask[-1:].expand(rows - span.count, -1)])
            cache[key] = mask.repeat(groups, 1).to(self.pool.device)
        return cache[key]

    def _paths(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: Batch,
        index: int,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """A tree, leaf by leaf: each path's keys are laid where plain decoding would have them."""
        span, offset = batch.spans[index], batch.offsets[index]
        result: torch.Tensor | None = None
        for path in batch.plan["leaves"][index]:
            rows = [offset + row for row in path.rows]
            places = self.pool.places(span.key, range(span.start, span.start + len(rows)))
            self.pool.write(layer, places, k[rows], v[rows])
            columns = self._columns(span.start + len(rows))
            keys, values = self._view(layer, batch.plan["tables"][index], columns)
            fresh = self._pad(q[rows[path.done :]], 0, len(rows) - path.done)
            groups = q.shape[1] // keys.shape[0]
            mask = self.masks.get(fresh.shape[0], groups, span.start + path.done, columns, window)
            out = fold(fresh, keys, values, mask, scale, softcap)[: len(rows) - path.done]
            if result is None:
                result = out.new_empty(span.count, out.shape[1])
            result[path.rows[path.done :]] = out
        assert result is not None
        return result


def fold(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of q [rows, heads, width] over k, v [kv heads, keys, width] -> [rows, heads * value width].

    The queries that share a KV head become rows of one call: ``enable_gqa`` is 5 to 8 times slower on CPU for one
    row in bfloat16. ``mask`` is additive, [groups * rows, keys].
    """
    rows, heads, width = q.shape
    kv_heads = k.shape[0]
    groups = heads // kv_heads
    folded = q.view(rows, kv_heads, groups, width).permute(1, 2, 0, 3).reshape(kv_heads, groups * rows, width)
    if softcap is None:
        out = F.scaled_dot_product_attention(folded[None], k[None], v[None], attn_mask=mask, scale=scale)[0]
    else:
        scores = torch.matmul(folded, k.transpose(1, 2)).float() * scale
        scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            scores = scores + mask
        out = torch.matmul(torch.softmax(scores, dim=-1).to(v.dtype), v)
    return out.view(kv_heads, groups, rows, -1).permute(2, 0, 1, 3).reshape(rows, -1)

"""Attention on a GPU: one Triton kernel over the page table for prefill, decoding and trees alike.

Queries that share a KV head are folded into one tile. Keys are split at fixed multiples of ``SPLIT``, and a second
kernel merges the splits (flash-decoding). Lengths and block tables are read on the device, and a tree's ancestors are
packed bits. Neither splits nor tiles depend on the batch, so a row's bits do not either. A tree node's bits differ from
a chain's, since its keys are at other entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from forerun.attention.base import Backend, Metadata, Query
from forerun.attention.layout import ancestors, new_slots
from forerun.cache.pool import Slots
from forerun.core.batch import Batch, Span

SPLIT = 256
BLOCK_KEYS = 64
WORD = 32


@triton.jit
def _entries(side, page, slot, page_stride, head_offset, inside, width, WIDTH: tl.constexpr):
    """One block of keys or values, [keys, width]."""
    index = side + (page * page_stride + head_offset + slot * WIDTH)[:, None] + width[None, :]
    return tl.load(index, mask=inside[:, None] & (width < WIDTH)[None, :], other=0.0)


@triton.jit
def _capped(score, softcap):
    ratio = tl.exp(2.0 * (score / softcap))
    return softcap * (1.0 - 2.0 / (ratio + 1.0))


@triton.jit
def _visible(
    entry, row, at, begin, fed, span, is_tree, position, bits, depths, words, nodes, window, BITS: tl.constexpr
):
    """[rows, keys]: a row sees the committed entries and its ancestors, within the window of positions."""
    committed = entry < begin
    seen = committed[None, :] | (entry[None, :] <= (fed + row)[:, None])
    where = entry
    if is_tree != 0:
        node = tl.maximum(entry - begin, 0)
        word = tl.load(bits + at[:, None] * words + (node // BITS)[None, :], mask=(node < nodes)[None, :], other=0)
        seen = committed[None, :] | (((word >> (node % BITS)[None, :]) & 1) != 0)
        depth = tl.load(depths + span * nodes + node, mask=node < nodes, other=0)
        where = tl.where(committed, entry, begin + depth)
    if window > 0:
        seen = seen & (position[:, None] - where[None, :] < window)
    return seen


@triton.jit
def _attend_split(
    q, keys, values, out, top, total, tables, tile_span, tile_row, start, offset, count, tree, positions, bits, depths,
    scale, softcap, window, page_size, table_stride, words, nodes, heads, rows,
    page_stride_k, head_stride_k, page_stride_v, head_stride_v,
    GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, BLOCK_ROWS: tl.constexpr, KEYS: tl.constexpr,
    SPAN_KEYS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, VALUE_PADDED: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """One tile of rows, one KV head, one split of the keys: partial outputs with their running maximum and sum."""
    span = tl.load(tile_span + tl.program_id(0))
    first = tl.load(tile_row + tl.program_id(0))
    head = tl.program_id(1)
    split = tl.program_id(2)
    begin = tl.load(start + span)
    base = tl.load(offset + span)
    size = tl.load(count + span)
    is_tree = tl.load(tree + span)
    lane = tl.arange(0, BLOCK_ROWS * GROUPS_PADDED)
    row = first + lane // GROUPS_PADDED
    group = lane % GROUPS_PADDED
    live = (row < size) & (group < GROUPS)
    at = base + tl.minimum(row, size - 1)
    query_head = head * GROUPS + tl.minimum(group, GROUPS - 1)
    width = tl.arange(0, WIDTH_PADDED)
    value_width = tl.arange(0, VALUE_PADDED)
    wide = live[:, None] & (width < WIDTH)[None, :]
    query = tl.load(q + (at * heads + query_head)[:, None] * WIDTH + width[None, :], mask=wide, other=0.0)
    position = tl.load(positions + at)
    fed = tl.load(positions + rows + span)  # entries before this forward's rows
    end = fed + size
    running = tl.full([BLOCK_ROWS * GROUPS_PADDED], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_ROWS * GROUPS_PADDED], tl.float32)
    result = tl.zeros([BLOCK_ROWS * GROUPS_PADDED, VALUE_PADDED], tl.float32)
    for block in range(SPAN_KEYS // KEYS):
        entry = split * SPAN_KEYS + block * KEYS + tl.arange(0, KEYS)
        inside = entry < end
        page = tl.load(tables + span * table_stride + entry // page_size, mask=inside, other=0).to(tl.int64)
        slot = entry % page_size
        k = _entries(keys, page, slot, page_stride_k, head * head_stride_k, inside, width, WIDTH)
        score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        if softcap > 0.0:
            score = _capped(score, softcap)
        seen = _visible(entry, row, at, begin, fed, span, is_tree, position, bits, depths, words, nodes, window, BITS)
        score = tl.where(seen & inside[None, :], score, float("-inf"))
        best = tl.maximum(running, tl.max(score, 1))
        safe = tl.where(best == float("-inf"), 0.0, best)
        chance = tl.exp(score - safe[:, None])
        fade = tl.exp(running - safe)
        v = _entries(values, page, slot, page_stride_v, head * head_stride_v, inside, value_width, VALUE_WIDTH)
        result = result * fade[:, None] + tl.dot(chance.to(v.dtype), v, input_precision="ieee")
        weight = weight * fade + tl.sum(chance, 1)
        running = best
    cell = (split * rows + at) * heads + query_head
    tl.store(top + cell, running, mask=live)
    tl.store(total + cell, weight, mask=live)
    kept = live[:, None] & (value_width < VALUE_WIDTH)[None, :]
    tl.store(out + cell[:, None] * VALUE_WIDTH + value_width[None, :], result, mask=kept)


@triton.jit
def _merge(
    out, top, total, merged, sinks, cells, heads,
    SINKS: tl.constexpr, SPLITS: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_PADDED: tl.constexpr,
):  # fmt: skip
    """Combine one (row, head)'s splits, in order, and with SINKS the head's own score without a value."""
    cell = tl.program_id(0)
    width = tl.arange(0, VALUE_PADDED)
    running = tl.load(top + cell)
    weight = tl.load(total + cell)
    result = tl.load(out + cell * VALUE_WIDTH + width, mask=width < VALUE_WIDTH, other=0.0)
    for split in range(1, SPLITS):
        other = split * cells + cell
        peak = tl.load(top + other)
        best = tl.maximum(running, peak)
        safe = tl.where(best == float("-inf"), 0.0, best)
        fade, gain = tl.exp(running - safe), tl.exp(peak - safe)
        part = tl.load(out + other * VALUE_WIDTH + width, mask=width < VALUE_WIDTH, other=0.0)
        result = result * fade + part * gain
        weight = weight * fade + tl.load(total + other) * gain
        running = best
    if SINKS:
        sink = tl.load(sinks + cell % heads)
        best = tl.maximum(running, sink)
        fade = tl.exp(running - best)
        result = result * fade
        weight = weight * fade + tl.exp(sink - best)
    value = (result / weight).to(merged.dtype.element_ty)
    tl.store(merged + cell * VALUE_WIDTH + width, value, mask=width < VALUE_WIDTH)


@dataclass(slots=True)
class TritonTables(Metadata):
    """One forward's metadata on the device, shared by all layers."""

    slots: Slots
    tables: torch.Tensor
    start: torch.Tensor
    offset: torch.Tensor
    count: torch.Tensor
    tree: torch.Tensor
    positions: torch.Tensor
    """Positions of the rows, then each span's entries before this forward."""
    bits: torch.Tensor
    depths: torch.Tensor
    nodes: int
    splits: int
    """A power of two, so that few kernels are compiled."""
    tiles: dict[int, tuple[torch.Tensor, torch.Tensor]]


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def _pack_bits(spans: list[Span], nodes: int) -> torch.Tensor:
    """int32 [rows, words]: bit n of a row says whether it sees node n after its span's committed entries."""
    words = max(1, -(-nodes // WORD))
    weights = torch.ones(WORD, dtype=torch.int64) << torch.arange(WORD)
    parts = []
    for span in spans:
        seen = torch.zeros(span.count, words * WORD, dtype=torch.int64)
        if span.parents is not None:
            visible = ancestors(span)
            seen[:, : visible.shape[1]] = visible.long()
        packed = (seen.view(span.count, words, WORD) * weights).sum(dim=-1)
        parts.append(torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32))
    return torch.cat(parts)


class TritonAttention(Backend[TritonTables]):
    def begin(self, batch: Batch) -> TritonTables:
        pool, spans, device = self.pool, batch.spans, self.pool.device
        for span in spans:
            pool.reserve(span.key, span.end)

        def ints(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        widest = max(len(pool.block_tables[span.key]) for span in spans)
        tables = [pool.block_tables[s.key] + [0] * (widest - len(pool.block_tables[s.key])) for s in spans]
        trees = [span for span in spans if span.parents is not None]
        nodes = max((span.stored + span.count for span in trees), default=0)
        depths = [((s.depths() if s.parents is not None else []) + [0] * nodes)[:nodes] for s in spans]
        before = [span.start + span.stored for span in spans]
        bits = _pack_bits(spans, nodes) if trees else torch.zeros(1, 1, dtype=torch.int32)
        return TritonTables(
            batch,
            slots=new_slots(pool, batch),
            tables=ints([page for table in tables for page in table]).view(len(spans), widest),
            start=ints([span.start for span in spans]),
            offset=ints(batch.offsets),
            count=ints([span.count for span in spans]),
            tree=ints([int(span.parents is not None) for span in spans]),
            positions=ints([p for span in spans for p in span.positions()] + before),
            bits=bits.to(device),
            depths=ints([d for row in depths for d in row] or [0]),
            nodes=nodes,
            splits=_power_of_two(-(-max(span.end for span in spans) // SPLIT)),
            tiles={},
        )

    @staticmethod
    def _tiles(tables: TritonTables, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        if block not in tables.tiles:
            tiles = [(i, row) for i, span in enumerate(tables.batch.spans) for row in range(0, span.count, block)]
            pair = torch.tensor(tiles, dtype=torch.int32, device=tables.start.device)
            tables.tiles[block] = (pair[:, 0].contiguous(), pair[:, 1].contiguous())
        return tables.tiles[block]

    def run(self, query: Query, tables: TritonTables) -> torch.Tensor:
        batch = tables.batch
        q, rows = query.q, batch.num_rows
        self.pool.write(query.layer, tables.slots, query.k[:rows], query.v[:rows])
        keys, values = self.pool.keys[query.layer], self.pool.values[query.layer]
        heads, kv_heads, width, value_width = q.shape[1], keys.shape[1], keys.shape[3], values.shape[3]
        groups = heads // kv_heads
        padded = _power_of_two(groups)
        block = max(1, 16 // padded)  # one size for every batch: a larger tile sums in another order
        tile_span, tile_row = self._tiles(tables, block)
        partial = torch.empty(tables.splits, rows, heads, value_width, dtype=torch.float32, device=q.device)
        top = torch.full((tables.splits, rows, heads), float("-inf"), dtype=torch.float32, device=q.device)
        total = torch.zeros_like(top)
        _attend_split[(tile_span.shape[0], kv_heads, tables.splits)](
            q[:rows].contiguous(), keys, values, partial, top, total, tables.tables, tile_span, tile_row, tables.start,
            tables.offset, tables.count, tables.tree, tables.positions, tables.bits, tables.depths, query.scale,
            query.softcap or 0.0, query.window or 0,
            self.pool.page_size, tables.tables.shape[1], tables.bits.shape[1], tables.nodes, heads, rows,
            keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
            GROUPS=groups, GROUPS_PADDED=padded, BLOCK_ROWS=block, KEYS=BLOCK_KEYS, SPAN_KEYS=SPLIT, WIDTH=width,
            WIDTH_PADDED=max(16, _power_of_two(width)), VALUE_WIDTH=value_width,
            VALUE_PADDED=max(16, _power_of_two(value_width)), BITS=WORD,
        )  # fmt: skip
        out = q.new_zeros(q.shape[0], heads * value_width)
        _merge[(rows * heads,)](
            partial, top, total, out, total if query.sinks is None else query.sinks, rows * heads, heads,
            SINKS=query.sinks is not None, SPLITS=tables.splits,
            VALUE_WIDTH=value_width, VALUE_PADDED=max(16, _power_of_two(value_width)),
        )  # fmt: skip
        return out

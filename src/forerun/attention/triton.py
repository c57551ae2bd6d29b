"""Attention on a GPU: one Triton kernel over the page table for prefill, decoding and trees alike.

Queries that share a KV head are folded into one tile. Keys are read in blocks, which are dealt to a fixed number of
splits; the last split of a tile to finish merges all of them in order (flash-decoding). A tree's node reads its
ancestors where a chain would have them. Neither blocks nor splits depend on the batch, so a row has the bits of
decoding, in chains and trees. The device reads lengths, block tables, positions and paths: it gets all in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import triton
import triton.language as tl

from forerun.attention.base import Backend, Metadata, Query
from forerun.core.batch import Batch
from forerun.core.tree import node_paths
from forerun.kernels import gpu

KEYS, WIDE = 64, 1024
"""Keys of a block; heads of ``WIDE`` bytes have half as many, so that 99 KB of shared memory suffice."""
SPLITS = 16
LANES = 16
"""Queries of a tile: rows by heads that share keys."""
MOST_ROWS = 256
"""Rows of a call, which bounds the memory for splits."""


@triton.jit
def _store_side(rows, side, row, page, slot, row_stride, page_stride, head_stride, numbers, WIDTH, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    inside = index < numbers
    value = tl.load(rows + row.to(tl.int64) * row_stride + index, mask=inside)
    at = page * page_stride + (index // WIDTH) * head_stride + slot * WIDTH + index % WIDTH
    tl.store(side + at, value, mask=inside)


@triton.jit(do_not_specialize=gpu.VARYING)
def _store(
    k, v, keys, values, row_span, offset, fed, tables, page_size, table_stride, row_stride_k, row_stride_v,
    page_stride_k, head_stride_k, page_stride_v, head_stride_v, heads, WIDTH, VALUE_WIDTH,
    BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes a row's keys and values to its slot."""
    row = tl.program_id(0)
    span = tl.load(row_span + row)
    if span < 0:
        return
    entry = tl.load(fed + span) + row - tl.load(offset + span)
    page = tl.load(tables + span * table_stride + entry // page_size).to(tl.int64)
    slot = entry % page_size
    _store_side(k, keys, row, page, slot, row_stride_k, page_stride_k, head_stride_k, heads * WIDTH, WIDTH, BLOCK)
    _store_side(
        v, values, row, page, slot, row_stride_v, page_stride_v, head_stride_v, heads * VALUE_WIDTH, VALUE_WIDTH,
        VALUE_BLOCK,
    )  # fmt: skip


@triton.jit
def _entries(side, table, entry, inside, page_size, page_stride, head_offset, width, WIDTH: tl.constexpr):
    """Keys or values [entries, width]."""
    page = tl.load(table + entry // page_size, mask=inside, other=0).to(tl.int64)
    index = side + (page * page_stride + head_offset + (entry % page_size) * WIDTH)[:, None] + width[None, :]
    return tl.load(index, mask=inside[:, None] & (width < WIDTH)[None, :], other=0.0)


@triton.jit
def _clear(
    out, row, head, split, heads, GROUPS: tl.constexpr, PADDED: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
):  # fmt: skip
    """Zeros for a row of padding; the first split writes them."""
    index = tl.arange(0, PADDED * VALUE_PADDED)
    wide = index < (GROUPS * VALUE_WIDTH if split == 0 else 0)
    at = (row.to(tl.int64) * heads + head * GROUPS) * VALUE_WIDTH
    tl.store(out + at + index, tl.zeros([PADDED * VALUE_PADDED], out.dtype.element_ty), mask=wide)


@triton.jit
def _add_entries(
    query, keys, values, table, entry, inside, place, position, last, running, weight, result, scale, softcap, window,
    sink_tokens, page_size, page_stride_k, head_k, page_stride_v, head_v, width, value_width, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Maximum, sum and output so far after one more block, at positions ``place``; no row sees keys after ``last``."""
    k = _entries(keys, table, entry, inside, page_size, page_stride_k, head_k, width, WIDTH)
    v = _entries(values, table, entry, inside, page_size, page_stride_v, head_v, value_width, VALUE_WIDTH)
    score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
    if softcap > 0.0:
        ratio = tl.exp(2.0 * (score / softcap))
        score = softcap * (1.0 - 2.0 / (ratio + 1.0))
    seen = place[None, :] <= last[:, None]
    if window > 0:
        seen = seen & ((position[:, None] - place[None, :] < window) | (place[None, :] < sink_tokens))
    score = tl.where(seen, score, float("-inf"))
    best = tl.maximum(running, tl.max(score, 1))
    safe = tl.where(best == float("-inf"), 0.0, best)
    chance = tl.exp(score - safe[:, None])
    fade = tl.exp(running - safe)
    result = result * fade[:, None] + tl.dot(chance.to(v.dtype), v, input_precision="ieee")
    return best, weight * fade + tl.sum(chance, 1), result


@triton.jit
def _add_nodes(
    query, keys, values, table, positions, paths, base, local, size, begin, path_stride, row, place, position, running,
    weight, result, scale, softcap, window, sink_tokens, page_size, page_stride_k, head_k, page_stride_v, head_v, width,
    value_width, ROWS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """As ``_add_entries`` for a tree, where every row has ancestors of its own. ``row`` is a query's in the tile."""
    for each in range(ROWS):
        node_row = base + tl.minimum(local + each, size - 1)
        depth = place - begin
        node = tl.load(paths + node_row * path_stride + depth, mask=(depth >= 0) & (depth < path_stride), other=0)
        entry = tl.where(depth < 0, place, begin + node)
        best, total, sides = _add_entries(
            query, keys, values, table, entry, place <= tl.load(positions + node_row), place, position, position,
            running, weight, result, scale, softcap, window, sink_tokens, page_size, page_stride_k, head_k,
            page_stride_v, head_v, width, value_width, WIDTH, VALUE_WIDTH,
        )  # fmt: skip
        mine = row == each
        running, weight = tl.where(mine, best, running), tl.where(mine, total, weight)
        result = tl.where(mine[:, None], sides, result)
    return running, weight, result


@triton.jit
def _merge(
    outputs, tops, sums, sinks, at, rows, heads, query_head, live, used, value_width,
    LANES: tl.constexpr, SPLITS: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_PADDED: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """The outputs of a tile's rows from those of its splits, added in order."""
    kept = live[:, None] & (value_width < VALUE_WIDTH)[None, :]
    running = tl.full([LANES], float("-inf"), tl.float32)
    weight = tl.zeros([LANES], tl.float32)
    result = tl.zeros([LANES, VALUE_PADDED], tl.float32)
    for part in range(SPLITS):
        cell = (part * rows + at) * heads + query_head
        some = tl.where(live, part, used) < used  # the interpreter of Triton 3.9 takes no scalar condition in a mask
        peak = tl.load(tops + cell, mask=some, other=float("-inf"), cache_modifier=".cg")
        best = tl.maximum(running, peak)
        safe = tl.where(best == float("-inf"), 0.0, best)
        fade, gain = tl.exp(running - safe), tl.exp(peak - safe)
        side = outputs + cell[:, None] * VALUE_WIDTH + value_width[None, :]
        more = tl.load(side, mask=tl.where(kept, part, used) < used, other=0.0, cache_modifier=".cg")
        result = result * fade[:, None] + more * gain[:, None]
        weight = weight * fade + tl.load(sums + cell, mask=some, other=0.0, cache_modifier=".cg") * gain
        running = best
    if SINKS:
        sink = tl.load(sinks + query_head)
        best = tl.maximum(running, sink)
        fade = tl.exp(running - best)
        result = result * fade[:, None]
        weight = weight * fade + tl.exp(sink - best)
    return result / tl.where(weight == 0.0, 1.0, weight)[:, None]


@triton.jit(do_not_specialize=gpu.VARYING)
def _attend(
    q, keys, values, out, outputs, tops, sums, done, sinks, row_span, start, offset, count, tree, tables, positions,
    paths, scale, softcap, window, sink_tokens, page_size, table_stride, path_stride, first, rows, heads, row_stride_q,
    page_stride_k, head_stride_k, page_stride_v, head_stride_v,
    GROUPS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_PADDED: tl.constexpr,
    TREES: tl.constexpr, SINKS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """One tile of rows, if one begins at this row, one KV head, one split of the keys."""
    here, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    span = tl.load(row_span + first + here)
    if span < 0:
        _clear(out, first + here, head, split, heads, GROUPS, PADDED, VALUE_WIDTH, VALUE_PADDED)
        return
    base = tl.load(offset + span)
    local = first + here - base
    if local % ROWS != 0:
        return
    size, begin = tl.load(count + span), tl.load(start + span)
    lane = tl.arange(0, ROWS * PADDED)
    row, group = local + lane // PADDED, lane % PADDED
    live = (row < size) & (group < GROUPS)
    at = base + tl.minimum(row, size - 1)
    query_head = head * GROUPS + tl.minimum(group, GROUPS - 1)
    position = tl.load(positions + at)
    last = position
    if not CAUSAL:
        last = tl.full([ROWS * PADDED], 0, tl.int32) + tl.load(positions + base + size - 1)
    end = tl.max(last, 0) + 1
    blocks = (end + KEYS - 1) // KEYS
    used = tl.minimum(blocks, SPLITS)
    if split >= used:
        return
    width, value_width = tl.arange(0, WIDTH_PADDED), tl.arange(0, VALUE_PADDED)
    where = q + at.to(tl.int64)[:, None] * row_stride_q + query_head[:, None] * WIDTH + width[None, :]
    query = tl.load(where, mask=live[:, None] & (width < WIDTH)[None, :], other=0.0)
    oldest = 0  # the first position that a row of the tile sees
    if window > 0:
        oldest = tl.min(position, 0) - window + 1
    running = tl.full([ROWS * PADDED], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS * PADDED], tl.float32)
    result = tl.zeros([ROWS * PADDED, VALUE_PADDED], tl.float32)
    table, block = tables + span * table_stride, split
    head_k, head_v = head * head_stride_k, head * head_stride_v
    branches = False
    if TREES:
        branches = tl.load(tree + span) != 0
    while block < blocks:
        place = block * KEYS + tl.arange(0, KEYS)
        if ((block + 1) * KEYS > oldest) | (block * KEYS < sink_tokens):
            if TREES and branches and (block + 1) * KEYS > begin:
                running, weight, result = _add_nodes(
                    query, keys, values, table, positions, paths, base, local, size, begin, path_stride, lane // PADDED,
                    place, position, running, weight, result, scale, softcap, window, sink_tokens, page_size,
                    page_stride_k, head_k, page_stride_v, head_v, width, value_width, ROWS, WIDTH, VALUE_WIDTH,
                )  # fmt: skip
            else:
                running, weight, result = _add_entries(
                    query, keys, values, table, place, place < end, place, position, last, running, weight, result,
                    scale, softcap, window, sink_tokens, page_size, page_stride_k, head_k, page_stride_v, head_v, width,
                    value_width, WIDTH, VALUE_WIDTH,
                )  # fmt: skip
        block += SPLITS
    cell = (split * rows + at - first) * heads + query_head
    kept = live[:, None] & (value_width < VALUE_WIDTH)[None, :]
    tl.store(tops + cell, running, mask=live)
    tl.store(sums + cell, weight, mask=live)
    tl.store(outputs + cell[:, None] * VALUE_WIDTH + value_width[None, :], result, mask=kept)
    tl.debug_barrier()
    counter = done + here * tl.num_programs(1) + head
    if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
        tl.debug_barrier()
        value = _merge(
            outputs, tops, sums, sinks, at - first, rows, heads, query_head, live, used, value_width, ROWS * PADDED,
            SPLITS, VALUE_WIDTH, VALUE_PADDED, SINKS,
        )  # fmt: skip
        side = out + (at.to(tl.int64) * heads + query_head)[:, None] * VALUE_WIDTH + value_width[None, :]
        tl.store(side, value.to(out.dtype.element_ty), mask=kept)
        tl.store(counter, 0)


@dataclass(frozen=True)
class Sizes:
    """How many rows, spans, pages of a span, and nodes of a tree's path there is room for."""

    rows: int
    spans: int
    pages: int
    nodes: int

    @classmethod
    def of(cls, batch: Batch, tables: dict[int, list[int]]) -> Sizes:
        """Those that the batch needs."""
        trees = [max(span.depths(), default=-1) + 1 for span in batch.spans if span.parents is not None]
        pages = max((len(tables[span.key]) for span in batch.spans), default=1)
        return cls(batch.num_rows, len(batch.spans), max(1, pages), max(trees, default=0))

    def fields(self) -> dict[str, int]:
        """The parts of a ``Tables``' numbers, and how long each is."""
        rows, spans = self.rows, self.spans
        return {
            "input_ids": rows, "positions": rows, "row_span": rows, "logit_rows": rows, "start": spans, "fed": spans,
            "offset": spans, "count": spans, "tree": spans, "tables": spans * self.pages, "paths": rows * self.nodes,
        }  # fmt: skip


@dataclass(slots=True)
class TritonTables(Metadata):
    """One forward's metadata on the device, shared by all layers: parts of one int32 tensor."""

    sizes: Sizes
    parts: dict[str, torch.Tensor]


def lay_out(numbers: torch.Tensor, batch: Batch, sizes: Sizes) -> TritonTables:
    """The parts of ``numbers``. The batch gets its row tensors from them."""
    lengths = sizes.fields()
    parts = dict(zip(lengths, numbers.split_with_sizes([*lengths.values()])))
    batch.input_ids, batch.positions = parts["input_ids"], parts["positions"]
    batch.logit_rows = parts["logit_rows"][: batch.num_logits]
    return TritonTables(batch, sizes, parts)


def write_numbers(to: np.ndarray, batch: Batch, tables: dict[int, list[int]], sizes: Sizes) -> None:
    """Writes int32 numbers [sum of ``sizes.fields()``] for a batch. Rows of padding belong to no span."""
    ends = [*accumulate(sizes.fields().values(), initial=0)]
    parts = {name: to[first:end] for name, first, end in zip(sizes.fields(), ends, ends[1:])}
    spans = batch.spans
    columns: dict[str, Sequence[int]] = {
        "input_ids": [token for span in spans for token in span.tokens],
        "positions": [position for span in spans for position in span.positions()],
        "row_span": [index for index, span in enumerate(spans) for _ in span.tokens],
        "logit_rows": [offset + row for span, offset in zip(spans, batch.offsets) for row in span.logits],
        "start": [span.start for span in spans], "fed": [span.start + span.stored for span in spans],
        "offset": batch.offsets, "count": [span.count for span in spans],
        "tree": [span.parents is not None for span in spans],
    }  # fmt: skip
    for name, column in columns.items():
        parts[name][: len(column)] = column
        parts[name][len(column) :] = -1 if name == "row_span" else 0
    for index, span in enumerate(spans):
        table = tables[span.key]
        parts["tables"][index * sizes.pages : index * sizes.pages + len(table)] = table
        if span.parents is not None:
            for row, path in enumerate(node_paths(span.parents)[span.stored :], start=batch.offsets[index]):
                parts["paths"][row * sizes.nodes : row * sizes.nodes + len(path)] = path


def _rows(side: torch.Tensor) -> torch.Tensor:
    """[rows, heads, width], each row contiguous."""
    return side if side[0].is_contiguous() else side.contiguous()


class TritonAttention(Backend[TritonTables]):
    def begin(self, batch: Batch) -> TritonTables:
        sizes = self.reserve(batch)
        numbers = np.zeros(sum(sizes.fields().values()), np.int32)
        write_numbers(numbers, batch, self.pool.block_tables, sizes)
        tables = lay_out(gpu.send(numbers, self.pool.device), batch, sizes)
        batch.fill_in(batch.input_ids)
        return tables

    def reserve(self, batch: Batch) -> Sizes:
        """Reserves the batch's entries, and returns the sizes of its numbers. Raises OutOfPages."""
        for span in batch.spans:
            self.pool.reserve(span.key, span.end)
        return Sizes.of(batch, self.pool.block_tables)

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor, tables: TritonTables) -> None:
        """Stores one layer's k and v [rows, kv heads, width]."""
        parts, sizes, keys, values = tables.parts, tables.sizes, self.pool.keys[layer], self.pool.values[layer]
        k, v, heads, width, value_width = _rows(k), _rows(v), keys.shape[1], keys.shape[3], values.shape[3]
        _store[(sizes.rows,)](
            k, v, keys, values, **{name: parts[name] for name in ("row_span", "offset", "tables", "fed")},
            page_size=self.pool.page_size, table_stride=sizes.pages, row_stride_k=k.stride(0), row_stride_v=v.stride(0),
            page_stride_k=keys.stride(0), head_stride_k=keys.stride(1), page_stride_v=values.stride(0),
            head_stride_v=values.stride(1), heads=heads, WIDTH=width, VALUE_WIDTH=value_width,
            BLOCK=triton.next_power_of_2(heads * width), VALUE_BLOCK=triton.next_power_of_2(heads * value_width),
        )  # fmt: skip

    def run(self, query: Query, tables: TritonTables) -> torch.Tensor:
        self.store(query.layer, query.k, query.v, tables)
        parts, sizes, pool = tables.parts, tables.sizes, self.pool
        keys, values = pool.keys[query.layer], pool.values[query.layer]
        q = _rows(query.q)
        count, heads, kv_heads = sizes.rows, q.shape[1], keys.shape[1]
        width, value_width = keys.shape[3], values.shape[3]
        names = ("row_span", "start", "offset", "count", "tree", "tables", "positions", "paths")
        groups = heads // kv_heads
        padded = triton.next_power_of_2(groups)
        widths = [max(16, triton.next_power_of_2(each)) for each in (width, value_width)]
        block = max(1, LANES // padded)  # one size for every batch: a larger tile sums in another order
        out = q.new_empty(q.shape[0], heads * value_width)
        most, splits = min(count, MOST_ROWS), 2 if gpu.interpreted() else SPLITS
        cells = splits * (most + block) * heads
        outputs, tops, sums = torch.empty(cells * (value_width + 2), dtype=torch.float32, device=q.device).split(
            [cells * value_width, cells, cells]
        )
        done = gpu.counters(q.device, most * kv_heads)
        for first in range(0, count, most):
            _attend[(min(most, count - first), kv_heads, splits)](
                q, keys, values, out, outputs, tops, sums, done, sums if query.sinks is None else query.sinks,
                **{name: parts[name] for name in names}, scale=query.scale, softcap=query.softcap or 0.0,
                window=query.window or 0, sink_tokens=query.sink_tokens, page_size=pool.page_size,
                table_stride=sizes.pages, path_stride=sizes.nodes, first=first, rows=most + block, heads=heads,
                row_stride_q=q.stride(0), page_stride_k=keys.stride(0), head_stride_k=keys.stride(1),
                page_stride_v=values.stride(0), head_stride_v=values.stride(1), GROUPS=groups, PADDED=padded,
                ROWS=block, KEYS=KEYS if max(widths) * q.element_size() < WIDE else KEYS // 2, SPLITS=splits,
                WIDTH=width, WIDTH_PADDED=widths[0], VALUE_WIDTH=value_width, VALUE_PADDED=widths[1],
                TREES=sizes.nodes > 0,
                SINKS=query.sinks is not None, CAUSAL=query.causal,
                num_stages=1,  # more take shared memory that many GPUs lack where heads are wide
                enable_fp_fusion=False,  # or else ptxas may round a tree's sums otherwise than a chain's
            )  # fmt: skip
        return out

"""Attention on CPU through ``kernels/attention.cpp``: pages are read in place, trees without masks.

Every row reads its keys in the order of its own path, so its bits do not depend on the rest of the batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from forerun import kernels
from forerun.attention.base import Backend, Metadata, Query
from forerun.cache.pool import KVShape, Pool
from forerun.core.batch import Batch, Span
from forerun.core.tree import node_paths
from forerun.kernels import structs

WIDEST = 1024
"""Most numbers in a head."""
CHAIN = -1


def can_attend(dtype: torch.dtype, device: torch.device, shapes: tuple[KVShape, ...]) -> bool:
    """Whether there is a kernel for such entries here."""
    widths = {width for shape in shapes for width in (shape.key_dim, shape.value_dim)}
    fits = all(0 < width <= WIDEST and width % 2 == 0 for width in widths)
    fits = fits and all(shape.value_dim <= shape.key_dim for shape in shapes)
    return fits and device.type == "cpu" and kernels.has(f"attend_{kernels.dtype_name(dtype)}")


@dataclass(slots=True)
class AttentionPlan(Metadata):
    """The kernel's arguments that all layers share: a ``structs.Plan``, and the arrays that it points to."""

    arrays: tuple[array[int], ...]
    plan: array[int]
    address: int
    """Of ``plan``."""
    table_starts: list[int]
    """Where each span's block table begins in the array of all."""
    cross_plan: AttentionPlan | None = None
    """For cross-attention to the sequences' sources, if they have any."""
    both_ways: AttentionPlan | None = None
    """What ``bidirectional`` returned."""


class KernelAttention(Backend[AttentionPlan]):
    def __init__(self, pool: Pool, layers: Sequence[int] | None = None) -> None:
        """``layers``: the pool's that are read; None: all."""
        super().__init__(pool)
        self.call = kernels.kernel("attend", pool.dtype)
        self.layers: Sequence[int] = range(len(pool.layers)) if layers is None else layers
        self._keys: list[torch.Tensor] = []
        self._kv = self._shapes = array("q")

    def kv(self) -> tuple[int, int]:
        """Addresses of two arrays: every layer's keys and values, and their ``structs.PoolStruct``."""
        pool = self.pool
        if self._keys is not pool.keys:  # at first, and after the pool was resized
            self._keys = pool.keys
            pairs = [(pool.keys[index], pool.values[index]) for index in self.layers]
            self._kv = array("q", (each.data_ptr() for pair in pairs for each in pair))
            self._shapes = array("q", (value for pair in pairs for value in _pool_struct(*pair)))
        return self._kv.buffer_info()[0], self._shapes.buffer_info()[0]

    def begin(self, batch: Batch) -> AttentionPlan:
        """Raises ValueError, before anything is reserved, for malformed spans."""
        pool = self.pool
        for span in batch.spans:
            _check(span)
        spans, tables, paths, entries, starts = array("q"), array("q"), array("q"), array("q"), []
        for span, offset in zip(batch.spans, batch.offsets):
            pool.reserve(span.key, span.end)
            before = span.start + span.stored
            path = CHAIN if span.parents is None else len(paths)
            starts.append(len(tables))
            spans.extend(structs.SpanStruct(
                first=offset, rows=len(span.tokens), base=span.start, before=before, table=len(tables), paths=path,
            ))  # fmt: skip
            tables.extend(pool.block_tables[span.key])
            if span.parents is not None:
                for nodes in node_paths(span.parents)[span.stored :]:
                    paths.extend((len(entries), len(nodes)))
                    entries.extend([span.start + node for node in nodes])
        plan = _plan(batch, spans, tables, paths, entries, starts)
        if pool.sources is not None:
            sources = [pool.sources.page(span.key) for span in batch.spans]
            plan.cross_plan = plan_reads(batch, [([page], length) for page, length in sources])
        return plan

    def run(self, query: Query, plan: AttentionPlan) -> torch.Tensor:
        q, k, v = (_by_row(side) for side in (query.q, query.k, query.v))
        rows, heads, count = q.shape[0], q.shape[1], plan.batch.num_rows
        if not query.causal:
            if query.window is not None:
                raise TypeError("the kernel has no sliding window for rows that see later rows")
            plan = bidirectional(plan)
        bias, sinks = _address("a bias", query.bias, heads, 2), _address("sinks", query.sinks, heads, 1)
        reach = 0 if query.bias is None else query.bias.shape[1]
        sizes = structs.Heads(
            heads=heads, window=query.window or 0, sink_tokens=query.sink_tokens, q_stride=q.stride(0),
            k_stride=k.stride(0), v_stride=v.stride(0), bias=bias, reach=reach, sinks=sinks,
        )  # fmt: skip
        out = self._attend(self.pool, query.layer, (q, k, v), sizes, query.scale, query.softcap or 0.0, plan)
        if rows != count:
            out[count:] = out[count - 1]
        return out

    def _attend(
        self, pool: Pool, layer: int, given: Sequence[torch.Tensor], sizes: structs.Heads, scale: float, softcap: float,
        plan: AttentionPlan,
    ) -> torch.Tensor:  # fmt: skip
        """Calls the kernel: ``given`` are queries, or queries, keys and values, which are stored first."""
        keys, values, count = pool.keys[layer], pool.values[layer], plan.batch.num_rows
        _check_rows(keys, values, count, *given)
        q, (k, v) = given[0], [side.data_ptr() for side in given[1:]] or (None, None)
        out = q.new_empty(q.shape[0], q.shape[1] * values.shape[3])
        shape, heads = _pool_struct(keys, values), array("q", sizes)
        self.call(
            q.data_ptr(), k, v, out.data_ptr(), keys.data_ptr(), values.data_ptr(), shape.buffer_info()[0],
            heads.buffer_info()[0], plan.address, count, scale, softcap, kernels.threads(),
        )  # fmt: skip
        return out

    def cross(self, layer: int, q: torch.Tensor, scale: float, plan: AttentionPlan) -> torch.Tensor:
        sources = self.pool.sources
        assert sources is not None
        assert plan.cross_plan is not None
        return self.read(sources.pool, layer, q, scale, plan.cross_plan)

    def read(
        self, pool: Pool, layer: int, q: torch.Tensor, scale: float, plan: AttentionPlan, window: int = 0
    ) -> torch.Tensor:
        """Attends to entries of a layer of ``pool``, as ``plan_reads`` laid them out; nothing is stored. ``window``:
        only this many last entries are seen (0: all)."""
        q = _by_row(q)
        sizes = structs.Heads(
            heads=q.shape[1], window=window, sink_tokens=0, q_stride=q.stride(0), k_stride=0, v_stride=0, bias=0,
            reach=0, sinks=0,
        )  # fmt: skip
        return self._attend(pool, layer, (q,), sizes, scale, 0.0, plan)


def _pool_struct(keys: torch.Tensor, values: torch.Tensor) -> array[int]:
    """One layer's ``structs.PoolStruct``."""
    return array("q", structs.PoolStruct(
        pages=keys.shape[0], page_size=keys.shape[2], kv_heads=keys.shape[1], width=keys.shape[3],
        value_width=values.shape[3], key_page=keys.stride(0), key_head=keys.stride(1), key_slot=keys.stride(2),
        value_page=values.stride(0), value_head=values.stride(1), value_slot=values.stride(2),
    ))  # fmt: skip


def plan_reads(batch: Batch, reads: Sequence[tuple[Sequence[int], int]]) -> AttentionPlan:
    """A plan by which each span's rows see a given number of entries of given pages, and not each other."""
    spans, tables, starts = array("q"), array("q"), []
    paths, entries = array("q", (0,) * 2 * batch.num_rows), array("q", (0,))  # paths without nodes
    for span, offset, (pages, length) in zip(batch.spans, batch.offsets, reads, strict=True):
        starts.append(len(tables))
        spans.extend(structs.SpanStruct(
            first=offset, rows=len(span.tokens), base=length, before=length, table=len(tables), paths=2 * offset,
        ))  # fmt: skip
        tables.extend(pages)
    return _plan(batch, spans, tables, paths, entries, starts)


def bidirectional(plan: AttentionPlan) -> AttentionPlan:
    """The plan of chains whose rows see their whole span: to the kernel, trees with all rows on each row's path."""
    if plan.both_ways is None:
        spans, paths, entries = array("q"), array("q"), array("q")
        for span, offset, table in zip(plan.batch.spans, plan.batch.offsets, plan.table_starts):
            before = span.start + span.stored
            spans.extend(structs.SpanStruct(
                first=offset, rows=span.count, base=before, before=before, table=table, paths=len(paths)
            ))  # fmt: skip
            paths.extend((len(entries), span.count) * span.count)
            entries.extend(range(before, span.end))
        plan.both_ways = _plan(plan.batch, spans, plan.arrays[1], paths, entries, plan.table_starts)
    return plan.both_ways


def _plan(
    batch: Batch, spans: array[int], tables: array[int], paths: array[int], entries: array[int], starts: list[int]
) -> AttentionPlan:
    arrays = spans, tables, paths, entries
    plan = array("q", structs.Plan(
        spans=structs.address(spans), num_spans=len(starts), tables=structs.address(tables), num_tables=len(tables),
        paths=structs.address(paths), num_paths=len(paths), entries=structs.address(entries),
        num_entries=len(entries),
    ))  # fmt: skip
    return AttentionPlan(batch, arrays, plan, structs.address(plan), starts)


def _address(what: str, side: torch.Tensor | None, heads: int, dims: int) -> int:
    """The address of float32 numbers [heads, ...]; 0 for None. Raises ValueError for what the kernel would misread."""
    if side is None:
        return 0
    fits = side.dtype is torch.float32 and side.is_cpu and side.is_contiguous()
    if not fits or side.dim() != dims or side.shape[0] != heads:
        raise ValueError(f"{what} {side.dtype} {[*side.shape]} on {side.device} for {heads} heads")
    return side.data_ptr()


def _check(span: Span) -> None:
    if span.start < 0 or span.stored < 0:
        raise ValueError(f"a span starts at {span.start} with {span.stored} stored nodes; neither may be negative")
    if span.parents is not None and len(span.parents) != span.stored + span.count:
        nodes = span.stored + span.count
        raise ValueError(f"a span of {nodes} nodes names {len(span.parents)} parents")
    for node, parent in enumerate(span.parents or ()):
        if parent >= node:
            raise ValueError(f"node {node} of a tree comes before its parent {parent}")


def _check_rows(keys: torch.Tensor, values: torch.Tensor, rows: int, *sides: torch.Tensor) -> None:
    """Raises ValueError unless ``sides``, queries or queries, keys and values, fit the pool's tensors."""
    heads, key_dim, value_dim = keys.shape[1], keys.shape[3], values.shape[3]
    if any(side.dtype is not keys.dtype or not side.is_cpu or side.shape[0] < rows for side in sides):
        shown = ", ".join(f"{side.dtype} {[*side.shape]} on {side.device}" for side in sides)
        raise ValueError(f"attention over {keys.dtype} on cpu needs {rows} rows, not {shown}")
    wrong = any(side.shape[1:] != (heads, width) for side, width in zip(sides[1:], (key_dim, value_dim)))
    if wrong or sides[0].shape[2] != key_dim:
        shown = ", ".join(f"{[*side.shape]}" for side in sides)
        raise ValueError(f"entries have {heads} heads of {key_dim} numbers, with {value_dim}, not {shown}")


def _by_row(side: torch.Tensor) -> torch.Tensor:
    """[rows, heads, width] with each row's heads side by side."""
    return side if side.stride(2) == 1 and side.stride(1) == side.shape[2] else side.contiguous()

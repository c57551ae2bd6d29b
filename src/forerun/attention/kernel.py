"""Attention on CPU through ``kernels/attention.cpp``: pages read where they lie, trees without masks.

Every row takes its own keys in the order of its own path, so its bits depend on nothing beside it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from forerun import kernels
from forerun.attention.base import Backend, Metadata, Query
from forerun.cache.pool import KVShape, Pool
from forerun.cache.sources import Sources
from forerun.core.batch import Batch, Span
from forerun.kernels import structs

WIDEST = 1024
"""Numbers in a head; they are even."""
CHAIN = -1


def can_attend(dtype: torch.dtype, device: torch.device, shapes: tuple[KVShape, ...]) -> bool:
    """Whether the kernel is here and serves such entries."""
    fits = all(_serves(shape.value_dim) and shape.value_dim <= shape.key_dim for shape in shapes)
    fits = fits and all(_serves(shape.key_dim) for shape in shapes)
    return fits and device.type == "cpu" and kernels.has(f"attend_{kernels.dtype_name(dtype)}")


def _serves(width: int) -> bool:
    return 0 < width <= WIDEST and width % 2 == 0


@dataclass(slots=True)
class AttentionPlan(Metadata):
    """Arguments that hold for every layer of a forward: what ``structs.AttentionPlan`` points to, and itself."""

    lists: tuple[array[int], ...]
    plan: array[int]
    address: int
    begins: list[int]
    """Where each span's pages begin in the tables."""
    across: AttentionPlan | None = None
    """Of attention to the sequences' sources, if they have any."""


class KernelAttention(Backend[AttentionPlan]):
    """The protocol of ``attention/base.py`` on the kernel."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self.call = getattr(kernels.library(), f"attend_{kernels.dtype_name(pool.dtype)}")
        self.layers: Sequence[int] = range(len(pool.keys))
        """Whose keys and values are read, of those in the pool."""
        self._keys: list[torch.Tensor] = []
        self._sides = self._shapes = array("q")

    def sides(self) -> tuple[int, int]:
        """Addresses of every layer's keys and values, and of their ``structs.PoolStruct``."""
        pool = self.pool
        if self._keys is not pool.keys:  # at first, and after the pool was resized
            self._keys = pool.keys
            pairs = [(pool.keys[index], pool.values[index]) for index in self.layers]
            self._sides = array("q", (side.data_ptr() for pair in pairs for side in pair))
            self._shapes = array("q", (number for pair in pairs for number in _lay_out(*pair)))
        return self._sides.buffer_info()[0], self._shapes.buffer_info()[0]

    def begin(self, batch: Batch) -> AttentionPlan:
        """Raises ValueError, before anything is reserved, for spans that are no rows of a sequence."""
        pool = self.pool
        for span in batch.spans:
            _check(span)
        spans, tables, paths, entries, begins = array("q"), array("q"), array("q"), array("q"), []
        for span, offset in zip(batch.spans, batch.offsets):
            pool.reserve(span.key, span.end)
            before = span.start + span.stored
            where = CHAIN if span.parents is None else len(paths)
            begins.append(len(tables))
            spans.extend(structs.SpanStruct(offset, len(span.tokens), span.start, before, len(tables), where))
            tables.extend(pool.block_tables[span.key])
            if span.parents is not None:
                _list_paths(span, span.parents, paths, entries)
        at = [numbers.buffer_info()[0] for numbers in (spans, tables, paths, entries)]
        plan = array("q", structs.Plan(
            at[0], len(begins), at[1], len(tables), at[2], len(paths), at[3], len(entries)
        ))  # fmt: skip
        across = None if pool.sources is None else _plan_sources(pool.sources, batch)
        return AttentionPlan(batch, (spans, tables, paths, entries), plan, plan.buffer_info()[0], begins, across)

    def run(self, query: Query, plan: AttentionPlan) -> torch.Tensor:
        pool, count = self.pool, plan.batch.num_rows
        q, k, v = (_by_row(side) for side in (query.q, query.k, query.v))
        keys, values = pool.keys[query.layer], pool.values[query.layer]
        rows, heads, _ = q.shape
        _check_rows(keys, values, count, q, k, v)
        out = q.new_empty(rows, heads * values.shape[3])
        shape = _lay_out(keys, values)
        strides = q.stride(0), k.stride(0), v.stride(0)
        bias, sinks = _check_bias(query.bias, heads), _check_sinks(query.sinks, heads)
        sizes = array("q", structs.Heads(heads, query.window or 0, *strides, *bias, sinks))
        self.call(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), keys.data_ptr(), values.data_ptr(),
            shape.buffer_info()[0], sizes.buffer_info()[0], plan.address, count, query.scale,
            query.softcap or 0.0, kernels.threads(),
        )  # fmt: skip
        if rows != count:
            out[count:] = out[count - 1]
        return out

    def cross(self, layer: int, q: torch.Tensor, scale: float, plan: AttentionPlan) -> torch.Tensor:
        sources, across = self.pool.sources, plan.across
        assert sources is not None
        assert across is not None
        return self.read(sources.pool, layer, q, scale, across)

    def read(
        self, pool: Pool, layer: int, q: torch.Tensor, scale: float, plan: AttentionPlan, window: int = 0
    ) -> torch.Tensor:
        """Attend to entries of a layer of ``pool``, the last ``window`` of them if that is not 0, where
        ``plan_reads`` has laid out the rows; nothing is stored."""
        q, count = _by_row(q), plan.batch.num_rows
        keys, values = pool.keys[layer], pool.values[layer]
        _check_rows(keys, values, count, q)
        rows, heads, _ = q.shape
        out = q.new_empty(rows, heads * values.shape[3])
        shape, sizes = _lay_out(keys, values), array("q", structs.Heads(heads, window, q.stride(0), 0, 0, 0, 0, 0))
        self.call(
            q.data_ptr(), None, None, out.data_ptr(), keys.data_ptr(), values.data_ptr(), shape.buffer_info()[0],
            sizes.buffer_info()[0], plan.address, count, scale, 0.0, kernels.threads(),
        )  # fmt: skip
        return out


def _lay_out(keys: torch.Tensor, values: torch.Tensor) -> array[int]:
    """One layer's ``structs.PoolStruct``."""
    return array("q", structs.PoolStruct(
        keys.shape[0], keys.shape[2], keys.shape[1], keys.shape[3], values.shape[3], *keys.stride()[:3],
        *values.stride()[:3],
    ))  # fmt: skip


def _plan_sources(sources: Sources, batch: Batch) -> AttentionPlan:
    pages = [sources.page(span.key) for span in batch.spans]
    return plan_reads(batch, [([page], length) for page, length in pages])


def plan_reads(batch: Batch, reads: Sequence[tuple[Sequence[int], int]]) -> AttentionPlan:
    """Each span's rows see the first entries of these pages, so many, and nothing else: paths of no nodes behind
    them."""
    spans, tables, begins = array("q"), array("q"), []
    paths, entries = array("q", (0,) * 2 * batch.num_rows), array("q", (0,))
    for span, offset, (pages, length) in zip(batch.spans, batch.offsets, reads, strict=True):
        begins.append(len(tables))
        spans.extend(structs.SpanStruct(offset, len(span.tokens), length, length, len(tables), 2 * offset))
        tables.extend(pages)
    at = [numbers.buffer_info()[0] for numbers in (spans, tables, paths, entries)]
    plan = array("q", structs.Plan(at[0], len(begins), at[1], len(tables), at[2], len(paths), at[3], 0))
    return AttentionPlan(batch, (spans, tables, paths, entries), plan, plan.buffer_info()[0], begins)


def _check_bias(bias: torch.Tensor | None, heads: int) -> tuple[int, int]:
    """Its address and columns; 0 for none. Raises ValueError for one that the kernel would misread."""
    if bias is None:
        return 0, 0
    if bias.dtype is not torch.float32 or not bias.is_cpu or not bias.is_contiguous() or bias.shape[:-1] != (heads,):
        raise ValueError(f"a bias {bias.dtype} {[*bias.shape]} on {bias.device} for {heads} heads")
    return bias.data_ptr(), bias.shape[1]


def _check_sinks(sinks: torch.Tensor | None, heads: int) -> int:
    """Their address; 0 for none. Raises ValueError for those that the kernel would misread."""
    if sinks is None:
        return 0
    if sinks.dtype is not torch.float32 or not sinks.is_cpu or not sinks.is_contiguous() or sinks.shape != (heads,):
        raise ValueError(f"sinks {sinks.dtype} {[*sinks.shape]} on {sinks.device} for {heads} heads")
    return sinks.data_ptr()


def _check(span: Span) -> None:
    if span.start < 0 or span.stored < 0:
        raise ValueError(f"a span starts at {span.start} with {span.stored} stored nodes; neither may be negative")
    if span.parents is not None and len(span.parents) != span.stored + span.count:
        nodes = span.stored + span.count
        raise ValueError(f"a span of {nodes} nodes names {len(span.parents)} parents")


def _check_rows(
    keys: torch.Tensor, values: torch.Tensor, rows: int, q: torch.Tensor,
    k: torch.Tensor | None = None, v: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """``k`` and ``v`` None: nothing is stored."""
    requested, wanted = (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3])
    sides = [side for side in (q, k, v) if side is not None]
    if any(side.dtype is not keys.dtype or not side.is_cpu or side.shape[0] < rows for side in sides):
        said = ", ".join(f"{side.dtype} {[*side.shape]} on {side.device}" for side in sides)
        raise ValueError(f"attention over {keys.dtype} on cpu needs {rows} rows, not {said}")
    wrong = (k is not None and k.shape[1:] != requested) or (v is not None and v.shape[1:] != wanted)
    if wrong or q.shape[2] != requested[1]:
        said = ", ".join(f"{[*side.shape]}" for side in sides)
        raise ValueError(f"entries have {requested[0]} heads of {requested[1]} numbers, with {wanted[1]}, not {said}")


def _by_row(side: torch.Tensor) -> torch.Tensor:
    """[rows, heads, width] with each row's heads side by side."""
    width = side.shape[2]
    return side if side.stride(2) == 1 and side.stride(1) == width else side.contiguous()


def _list_paths(span: Span, parents: list[int], paths: array[int], entries: array[int]) -> None:
    """For each row to feed, where its path of nodes begins in ``entries`` and how long it is."""
    for node in range(span.stored, len(parents)):
        path = []
        while node >= 0:
            path.append(span.start + node)
            if parents[node] >= node:
                raise ValueError(f"node {node} of a tree comes before its parent {parents[node]}")
            node = parents[node]
        paths.extend((len(entries), len(path)))
        entries.extend(reversed(path))

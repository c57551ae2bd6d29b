"""Attention on CPU through ``kernels/attention.cpp``: pages read where they lie, trees without masks.

Every row takes its own keys in the order of its own path, so its bits depend on nothing beside it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch

from forerun import kernels
from forerun.attention.base import Attention, Query
from forerun.cache.pool import KVShape, Pool
from forerun.core.batch import Batch, Span

WIDTHS = (16, 32, 64, 80, 96, 112, 128, 256)
"""Of a head, in numbers."""
CHAIN = -1


def can_attend(dtype: torch.dtype, device: torch.device, shapes: tuple[KVShape, ...]) -> bool:
    """Whether the kernel is here and serves such entries."""
    fits = all(shape.key_dim == shape.value_dim and shape.key_dim in WIDTHS for shape in shapes)
    return fits and device.type == "cpu" and kernels.has(f"attend_{kernels.dtype_name(dtype)}")


@dataclass(slots=True)
class Plan:
    """Arguments that hold for every layer of a forward; see ``Span`` and ``Plan`` in the kernel."""

    spans: array[int]
    tables: array[int]
    paths: array[int]
    entries: array[int]
    addresses: tuple[int, ...]


class StreamedAttention(Attention):
    """The protocol of ``attention/base.py`` on the kernel."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self.call = getattr(kernels.library(), f"attend_{kernels.dtype_name(pool.dtype)}")
        self._keys: list[torch.Tensor] = []
        self._sides = self._strides = array("q")

    def plan(self, batch: Batch) -> Plan:
        """What ``begin`` laid out."""
        plan: Plan = batch.plan["streamed"]
        return plan

    def sides(self) -> tuple[int, int]:
        """Addresses of every layer's keys and values, and of their strides and the page size: all layers' entries
        have one shape."""
        pool = self.pool
        if self._keys is not pool.keys:  # at first, and after the pool was resized
            self._keys = pool.keys
            self._sides = array("q", (side.data_ptr() for pair in zip(pool.keys, pool.values) for side in pair))
            key, value = pool.keys[0].stride(), pool.values[0].stride()
            self._strides = array("q", (*key[:3], *value[:3], pool.page_size))
        return self._sides.buffer_info()[0], self._strides.buffer_info()[0]

    def begin(self, batch: Batch) -> None:
        pool = self.pool
        spans, tables, paths, entries = array("q"), array("q"), array("q"), array("q")
        for span, offset in zip(batch.spans, batch.offsets):
            pool.reserve(span.key, span.end)
            before = span.start + span.stored
            where = CHAIN if span.parents is None else len(paths)
            spans.extend((offset, len(span.tokens), span.start, before, len(tables), where))
            tables.extend(pool.tables[span.key])
            if span.parents is not None:
                _list_paths(span, span.parents, paths, entries)
        lists = (spans, tables, paths, entries)
        addresses = tuple(numbers.buffer_info()[0] for numbers in lists)
        batch.plan["streamed"] = Plan(*lists, addresses)

    def run(self, query: Query, batch: Batch) -> torch.Tensor:
        plan = self.plan(batch)
        q, k, v = (_by_row(side) for side in (query.q, query.k, query.v))
        keys, values = self.pool.keys[query.layer], self.pool.values[query.layer]
        rows, heads, width = q.shape
        kv_heads, value_width = keys.shape[1], values.shape[3]
        out = q.new_empty(rows, heads * value_width)
        sizes = array("q", (
            heads, kv_heads, width, value_width, self.pool.page_size, query.window or 0,
            q.stride(0), k.stride(0), v.stride(0), *keys.stride()[:3], *values.stride()[:3],
        ))  # fmt: skip
        spans, tables, paths, entries = plan.addresses
        self.call(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), keys.data_ptr(), values.data_ptr(),
            sizes.buffer_info()[0], spans, len(batch.spans), tables, paths, entries, query.scale,
            query.softcap or 0.0, torch.get_num_threads(),
        )  # fmt: skip
        if rows != batch.num_rows:
            out[batch.num_rows :] = out[batch.num_rows - 1]
        return out


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
            node = parents[node]
        paths.extend((len(entries), len(path)))
        entries.extend(reversed(path))

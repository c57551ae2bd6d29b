"""Attention to what another model has in its cache, for queries without keys and values of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from forerun.attention.base import Attention, Backend, Metadata, Query
from forerun.attention.kernel import AttentionPlan, KernelAttention, plan_reads
from forerun.core.batch import Batch


class Reading(Backend[Metadata]):
    """Over the cache of ``attention``: layer i reads what that has for layer ``layers[i]``. Every span is one row; it
    sees its sequence's ``start`` entries, the last ``window`` of them, and nothing else. Nothing is stored, and no
    length changes."""

    def __init__(self, attention: Attention, layers: Sequence[int]) -> None:
        super().__init__(attention.pool)
        self.layers = tuple(layers)

    def begin(self, batch: Batch) -> Metadata:
        _check(batch)
        return Metadata(batch)

    def run(self, query: Query, metadata: Metadata) -> torch.Tensor:
        layer = self.layers[query.layer]
        parts = [self._row(layer, query, row, span.key, span.start) for row, span in enumerate(metadata.batch.spans)]
        return torch.stack(parts)

    def _row(self, layer: int, query: Query, row: int, key: int, end: int) -> torch.Tensor:
        pages = torch.tensor(self.pool.block_tables[key], device=query.q.device)
        first = max(0, end - query.window) if query.window else 0
        k, v = (side[:, first:end] for side in self.pool.gather(layer, pages))
        q = query.q[row].unflatten(0, (k.shape[0], -1))  # [kv heads, group, width]
        return F.scaled_dot_product_attention(q, k, v, scale=query.scale).flatten()

    def finish(self, metadata: Metadata) -> None:
        """No entries were added."""


class KernelReading(KernelAttention):
    """As ``Reading``, on the kernel."""

    def __init__(self, attention: Attention, layers: Sequence[int]) -> None:
        super().__init__(attention.pool)
        self.layers = tuple(layers)

    def begin(self, batch: Batch) -> AttentionPlan:
        _check(batch)
        return plan_reads(batch, [(self.pool.block_tables[span.key], span.start) for span in batch.spans])

    def run(self, query: Query, plan: AttentionPlan) -> torch.Tensor:
        return self.read(self.pool, self.layers[query.layer], query.q, query.scale, plan, query.window or 0)

    def finish(self, metadata: AttentionPlan) -> None:
        """No entries were added."""


def read_from(attention: Attention, layers: Sequence[int]) -> Reading | KernelReading:
    """On the kernel where ``attention`` is."""
    return (KernelReading if isinstance(attention, KernelAttention) else Reading)(attention, layers)


def _check(batch: Batch) -> None:
    if any(span.count != 1 for span in batch.spans):
        raise ValueError("a span that reads another model's entries is one row")

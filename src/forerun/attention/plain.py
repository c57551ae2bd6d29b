"""Attention a sequence at a time through torch, with the biases and the sources of encoder-decoders: the reference for
``streamed.py``, on every device. A row's bits depend on the rows beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from forerun.attention.base import Backend, Metadata, Query
from forerun.attention.layout import Where, tree_mask, where
from forerun.core.batch import Batch, Span


@dataclass(slots=True)
class Stored(Metadata):
    where: Where


class PlainAttention(Backend[Stored]):
    """The protocol of ``attention/base.py``, but for ``softcap``; as many key heads as query heads."""

    def begin(self, batch: Batch) -> Stored:
        for span in batch.spans:
            self.pool.reserve(span.key, span.end)
        return Stored(batch, where(self.pool, batch))

    def run(self, query: Query, stored: Stored) -> torch.Tensor:
        stored.where.store(self.pool, query.layer, query.k, query.v)
        parts, batch = [], stored.batch
        for span, offset in zip(batch.spans, batch.offsets):
            pages = torch.tensor(self.pool.block_tables[span.key], device=self.pool.device)
            k, v = (side[:, : span.end] for side in self.pool.gather(query.layer, pages))
            mask = tree_mask(span, span.end, query.window, torch.float32).to(k.device)
            if query.bias is not None:
                mask = mask + _bias(query.bias, span)
            parts.append(_attend(query.q[offset : offset + span.count], k, v, mask, query.scale))
        return torch.cat(parts)

    def cross(self, layer: int, q: torch.Tensor, scale: float, stored: Stored) -> torch.Tensor:
        sources = self.pool.sources
        assert sources is not None
        parts, batch = [], stored.batch
        for span, offset in zip(batch.spans, batch.offsets):
            page, length = sources.page(span.key)
            k, v = (side[layer][page, :, :length] for side in (sources.pool.keys, sources.pool.values))
            parts.append(_attend(q[offset : offset + span.count], k, v, None, scale))
        return torch.cat(parts)


def _bias(bias: torch.Tensor, span: Span) -> torch.Tensor:
    """[heads, rows, entries]"""
    behind = torch.tensor(span.depths(), dtype=torch.long) + span.start
    entries = torch.cat([torch.arange(span.start), behind])
    distances = (behind[span.stored :, None] - entries).clamp_(min=0).to(bias.device)
    return bias[:, bias.shape[1] - 1 - distances]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """q [rows, heads, width] over k and v [heads, entries, width] -> [rows, heads * width]."""
    mask = None if mask is None else mask.to(q.dtype)
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, scale=scale)
    return out[0].transpose(0, 1).flatten(1)

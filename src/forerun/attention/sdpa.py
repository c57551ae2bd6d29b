"""Attention through ``torch.nn.functional.scaled_dot_product_attention``: for every device, and as the reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from forerun.attention.base import Backend, Query
from forerun.attention.layout import FOLDED, AttentionCall, Layout, chain_mask, plan, repeat, tree_mask
from forerun.core.batch import Batch, Span


class SdpaAttention(Backend[Layout]):
    """Folded grouped-query attention. Sequences with few rows share a call; a tree is one masked call.

    A row's bits depend on the batch; ``tiled.py`` keeps them the same.
    """

    def begin(self, batch: Batch) -> Layout:
        return plan(self.pool, batch)

    def run(self, query: Query, layout: Layout) -> torch.Tensor:
        batch, count = layout.batch, layout.batch.num_rows
        self.pool.write(query.layer, layout.slots, query.k[:count], query.v[:count])
        parts = [self._attend(query, call, batch) for call in layout.calls]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        if layout.order is not None:
            out = out.index_select(0, layout.order)
        spare = query.q.shape[0] - count
        return torch.cat([out, out[-1:].expand(spare, -1)]) if spare else out

    def _attend(self, query: Query, call: AttentionCall, batch: Batch) -> torch.Tensor:
        if isinstance(call.pages, int):
            sides = self.pool.keys[query.layer], self.pool.values[query.layer]
            k, v = (side[call.pages : call.pages + len(call.spans), :, : call.columns] for side in sides)
        else:
            k, v = self.pool.gather(query.layer, call.pages, call.columns)
        rows, groups = call.count, query.q.shape[1] // k.shape[1]
        mask = self._mask(batch, call, groups, query)
        folded = fold(query.q[call.rows], len(call.spans), k.shape[1])
        sinks = query.sinks
        if sinks is not None:  # as the queries are folded; those of padding are dropped
            sinks = sinks.view(k.shape[1], 1, groups).expand(-1, rows, -1).flatten(1)
            sinks = F.pad(sinks, (0, folded.shape[2] - sinks.shape[1]))[..., None]
        return unfold(attend(folded, k, v, mask, query.scale, query.softcap, sinks), rows, groups)

    def _mask(self, batch: Batch, call: AttentionCall, groups: int, query: Query) -> torch.Tensor | None:
        """Additive mask, [folded rows, columns], [sequences, 1, folded rows, columns] or, with a bias, by heads; None:
        nothing is hidden. All folded rows of a single row share one mask row."""
        groups = 1 if call.count == 1 else groups
        key = (groups, query.window, query.sink_tokens, query.bias is not None, query.causal)
        if key not in call.masks:
            mask = self._make_mask(batch, call, groups, query)
            call.masks[key] = mask if query.bias is None else self._biased(mask, query.bias, batch, call)
        return call.masks[key]

    def _biased(self, mask: torch.Tensor | None, bias: torch.Tensor, batch: Batch, call: AttentionCall) -> torch.Tensor:
        """The mask plus the bias, [sequences, heads, folded rows, columns], where every head has keys of its own."""
        spare = -call.count % FOLDED if call.count > 1 else 0
        parts = [spread_bias(bias, batch.spans[index]) for index in call.spans]
        result = torch.stack([F.pad(part, (0, call.columns - part.shape[2], 0, spare)) for part in parts])
        return (result if mask is None else result + mask).to(self.pool.dtype)

    def _make_mask(self, batch: Batch, call: AttentionCall, groups: int, query: Query) -> torch.Tensor | None:
        rows, columns, window, sinks, pool = call.count, call.columns, query.window, query.sink_tokens, self.pool
        if call.tree:
            mask = tree_mask(batch.spans[call.spans[0]], columns, window, pool.dtype, sinks).to(pool.device)
        elif (
            (rows == 1 or not query.causal)
            and (window is None or window >= columns)
            and all(at == columns - rows for at in call.first_positions)
        ):
            return None
        else:
            first = call.first_positions
            mask = chain_mask(
                first, rows, columns, window, pool.dtype, pool.device, causal=query.causal, sink_tokens=sinks
            )[:, None]
        return mask if rows == 1 else repeat(mask, groups)

    def cross(self, layer: int, q: torch.Tensor, scale: float, layout: Layout) -> torch.Tensor:
        sources = self.pool.sources
        assert sources is not None
        parts, batch = [], layout.batch
        for span, offset in zip(batch.spans, batch.offsets):
            page, length = sources.page(span.key)
            k, v = (side[layer][page : page + 1, :, :length] for side in (sources.pool.keys, sources.pool.values))
            rows = q[offset : offset + span.count]
            parts.append(unfold(attend(fold(rows, 1, k.shape[1]), k, v, None, scale, None), span.count, 1))
        return torch.cat(parts)


def fold(q: torch.Tensor, sequences: int, kv_heads: int) -> torch.Tensor:
    """q [sequences * rows, heads, width] -> [sequences, kv heads, rows * groups and padding, width].

    Queries that share a KV head become rows of one call: on CPU, ``enable_gqa`` is 5 to 8 times slower for one bfloat16
    row. A view pads single rows at no cost: a KV head's rows run on into the next one's; their results are dropped.
    """
    total, heads, width = q.shape
    rows, groups = total // sequences, heads // kv_heads
    folded = rows * groups
    padded = -(-folded // FOLDED) * FOLDED
    if rows == 1:
        by_row, by_head, _ = q.stride()
        start = q.storage_offset()
        end = start + (sequences - 1) * by_row + ((kv_heads - 1) * groups + padded - 1) * by_head + width
        if end * q.element_size() <= q.untyped_storage().nbytes():
            return q.as_strided((sequences, kv_heads, padded, width), (by_row, groups * by_head, by_head, 1), start)
    split = q.view(sequences, rows, kv_heads, groups, width).transpose(1, 2)
    if padded == folded:
        return split.reshape(sequences, kv_heads, folded, width)
    result = q.new_zeros(sequences, kv_heads, padded, width)
    result[:, :, :folded].view(split.shape).copy_(split)
    return result


def unfold(out: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """The reverse of ``fold``: [sequences * rows, heads * width]."""
    sequences, kv_heads, folded, width = out.shape
    if rows == 1:
        return (out if folded == groups else out[:, :, :groups]).reshape(sequences, kv_heads * groups * width)
    split: torch.Tensor = out[:, :, : rows * groups].unflatten(2, (rows, groups))
    return split.transpose(1, 2).reshape(sequences * rows, kv_heads * groups * width)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of q, k and v [sequences, kv heads, rows or keys, width]. ``mask`` is additive; ``sinks`` [kv heads,
    rows, 1] are the scores of one more key, without a value."""
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = torch.matmul(q, k.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.expand(len(scores), -1, -1, -1)], -1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[2]]
    return torch.matmul(weights.to(v.dtype), v)


def spread_bias(bias: torch.Tensor, span: Span) -> torch.Tensor:
    """``Query.bias`` [heads, reach] for a span's rows and entries: [heads, rows, entries]."""
    nodes = torch.tensor(span.depths(), dtype=torch.long) + span.start
    positions = torch.cat([torch.arange(span.start), nodes])
    distances = (nodes[span.stored :, None] - positions).clamp_(min=0).to(bias.device)
    return bias[:, bias.shape[1] - 1 - distances]

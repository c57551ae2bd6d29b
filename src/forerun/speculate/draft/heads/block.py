"""What heads share that fill a block of rows in one pass: rows see each other, and what was kept of the text before."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from forerun.core.request import RequestState
from forerun.speculate.draft.heads.head import FeedForward, Head, Norm, rotate

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values [n, kv heads, width] of each layer."""


class BlockLayer(nn.Module):
    """Attention of a block's rows and a feed-forward layer, without the norms before them. ``eps``: of norms of every
    head of queries and keys; None: there are none."""

    def __init__(
        self, size: int, options: Mapping[str, Any], *, eps: float | None = None, biased: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = options["heads"], options["kv_heads"], options["width"]
        self.theta = options["theta"]
        self.q_proj = nn.Linear(size, self.heads * self.width, bias=biased)
        self.k_proj = nn.Linear(size, self.kv_heads * self.width, bias=biased)
        self.v_proj = nn.Linear(size, self.kv_heads * self.width, bias=biased)
        self.o_proj = nn.Linear(self.heads * self.width, size, bias=biased)
        self.q_norm = None if eps is None else Norm(self.width, eps)
        self.k_norm = None if eps is None else Norm(self.width, eps)
        self.mlp = FeedForward(size, options["inner_size"])

    def keys(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [..., n, kv heads, width] of context features or block rows."""
        shape, norm = (*x.shape[:-1], self.kv_heads, self.width), self.k_norm
        k = self.k_proj(x).view(shape)
        return rotate(k if norm is None else norm(k), positions, self.theta), self.v_proj(x).view(shape)

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Queries [..., n, heads, width] of block rows."""
        q, norm = self.q_proj(x).view(*x.shape[:-1], self.heads, self.width), self.q_norm
        return rotate(q if norm is None else norm(q), positions, self.theta)

    def attend(
        self, normed: torch.Tensor, where: torch.Tensor, memories: Sequence[BlockMemory], index: int,
        seen: Sequence[torch.Tensor | None],
    ) -> torch.Tensor:  # fmt: skip
        """What attention finds for blocks of rows ``normed`` [sequences, rows, hidden size] at ``where``, each in its
        own memory of layer ``index`` and in itself, [sequences, rows, heads * width]. ``seen`` bool [rows, all] of
        each sequence; None: everything."""
        q, (own_k, own_v) = self.queries(normed, where), self.keys(normed, where)
        count, rows, groups = *q.shape[:2], self.heads // self.kv_heads
        folded = q.view(count, rows, -1, groups, self.width).permute(0, 2, 3, 1, 4).flatten(2, 3)
        parts = []
        for own_q, k, v, memory, mask in zip(folded, own_k, own_v, memories, seen, strict=True):
            memory.write(index, k, v)
            k, v = memory.read(index, rows)
            mask = None if mask is None else mask.repeat(groups, 1)
            parts.append(F.scaled_dot_product_attention(own_q[None], k, v, attn_mask=mask))
        out = torch.cat(parts).view(count, -1, groups, rows, self.width)
        return out.permute(0, 3, 1, 2, 4).flatten(2)


class BlockHead(Head):
    """A head of ``BlockLayer``s that read low, middle and last hidden states of the target."""

    blocks: nn.ModuleList

    def usual_layers(self, last: int) -> tuple[int, ...]:
        return tuple(sorted({max(1, last // 3), max(1, 2 * last // 3), last}))

    @abstractmethod
    def context(self, features: torch.Tensor) -> torch.Tensor:
        """[..., layers * hidden size] -> [..., hidden size]."""


class BlockMemory:
    """One sequence's context: keys and values of every layer, all of them or the newest ``window``, in one piece before
    ``end``; behind that there is room for the ``spare`` rows of a block."""

    def __init__(self, like: Pairs, spare: int, window: int | None = None) -> None:
        kv_heads, width = like[0][0].shape[1:]
        self.window, self.spare, self.end = window, spare, 0
        shape = (len(like), kv_heads, 0 if window is None else 2 * window + spare, width)
        self.keys, self.values = (like[0][0].new_zeros(shape) for _ in range(2))

    def add(self, pairs: Pairs) -> None:
        """Append keys and values."""
        count = len(pairs[0][0]) if self.window is None else min(len(pairs[0][0]), self.window)
        lacking = self.end + count + self.spare - self.keys.shape[2]
        if lacking > 0 and self.window is None:
            more = lacking + self.end + count + self.spare
            self.keys, self.values = (F.pad(side, (0, 0, 0, more)) for side in (self.keys, self.values))
        elif lacking > 0 and self.window is not None:
            kept = self.window - count
            for side in (self.keys, self.values):
                side[:, :, :kept] = side[:, :, self.end - kept : self.end].clone()
            self.end = kept
        for index, (k, v) in enumerate(pairs):
            if count < len(k):
                k, v = k[-count:], v[-count:]
            self.write(index, k, v)
        self.end += count

    def write(self, index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put [n, kv heads, width] behind the context of a layer, for now."""
        after = self.end + k.shape[0]
        self.keys[index, :, self.end : after] = k.transpose(0, 1)
        self.values[index, :, self.end : after] = v.transpose(0, 1)

    def read(self, index: int, own: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's context and the ``own`` rows behind it, [1, kv heads, n, width]."""
        first = 0 if self.window is None else max(0, self.end - self.window)
        return (
            self.keys[index, None, :, first : self.end + own],
            self.values[index, None, :, first : self.end + own],
        )


def remember(
    memories: dict[int, BlockMemory], sequence: RequestState, head: BlockHead, rows: torch.Tensor, spare: int,
    window: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Keep what a head needs of newly cached tokens, the target's hidden states ``rows`` of which are given; returns
    their features."""
    features = head.context(rows if window is None else rows[-window:])
    end = sequence.num_computed_tokens
    positions = torch.arange(end - len(features), end, device=rows.device)
    pairs = [block.keys(features, positions) for block in head.blocks]  # type: ignore[operator]
    if sequence.id not in memories:
        memories[sequence.id] = BlockMemory(pairs, spare, window)
    memories[sequence.id].add(pairs)
    return features

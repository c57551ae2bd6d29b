"""Layers of heads that predict a block of tokens in one pass: its rows attend to each other and to the context."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from forerun.core.request import Requests, RequestState
from forerun.models.run.rotary import default_frequencies
from forerun.speculate.draft.heads.head import FeedForward, Guess, Head, Norm, TrainingBatch, rotate

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values [n, kv heads, width] of each layer."""
STEP = 4
"""Positions from one anchor of a training batch to the next."""


class BlockLayer(nn.Module):
    """Attention and feed-forward weights of one layer, without norms before them.

    Subclasses define ``forward(x, attend)`` for rows x [..., block, hidden size], where ``attend`` maps normed rows to
    attention's output. ``eps`` is that of the norms of every head of queries and keys; None: there are none.
    """

    def __init__(
        self, size: int, options: Mapping[str, Any], *, eps: float | None = None, biased: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = options["heads"], options["kv_heads"], options["width"]
        self.frequencies = default_frequencies(self.width, options["theta"])
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
        return rotate(k if norm is None else norm(k), positions, self.frequencies), self.v_proj(x).view(shape)

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Queries [..., n, heads, width] of block rows."""
        q, norm = self.q_proj(x).view(*x.shape[:-1], self.heads, self.width), self.q_norm
        return rotate(q if norm is None else norm(q), positions, self.frequencies)

    def attend(
        self, normed: torch.Tensor, positions: torch.Tensor, caches: Sequence[ContextCache], index: int,
        masks: Sequence[torch.Tensor | None],
    ) -> torch.Tensor:  # fmt: skip
        """Attention of each sequence's block over its cached context and itself.

        Args:
            normed: rows [sequences, rows, hidden size] at ``positions`` int64 [sequences, rows].
            caches: the context of each sequence.
            index: of this layer.
            masks: for each sequence, bool [rows, context + rows]; None: everything is visible.

        Returns:
            [sequences, rows, heads * width].
        """
        q, (own_k, own_v) = self.queries(normed, positions), self.keys(normed, positions)
        count, rows, groups = *q.shape[:2], self.heads // self.kv_heads
        folded = q.view(count, rows, -1, groups, self.width).permute(0, 2, 3, 1, 4).flatten(2, 3)
        parts = []
        for own_q, k, v, cache, mask in zip(folded, own_k, own_v, caches, masks, strict=True):
            cache.write(index, k, v)
            k, v = cache.read(index, rows)
            mask = None if mask is None else mask.repeat(groups, 1)
            parts.append(F.scaled_dot_product_attention(own_q[None], k, v, attn_mask=mask))
        out = torch.cat(parts).view(count, -1, groups, rows, self.width)
        return out.permute(0, 3, 1, 2, 4).flatten(2)

    def attend_in_training(
        self, normed: torch.Tensor, positions: torch.Tensor, features: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """As ``attend``, for blocks at many anchors of a text: rows ``normed`` [batch, anchors, block, hidden size] at
        ``positions`` [anchors, block], context features [batch, length, hidden size], and ``mask`` bool [batch or 1,
        anchors, block, length + block]."""
        q, (own_k, own_v) = self.queries(normed, positions), self.keys(normed, positions)
        length = features.shape[1]
        k, v = self.keys(features, torch.arange(length, device=features.device))
        k, v, own_k, own_v = (x.repeat_interleave(self.heads // self.kv_heads, dim=-2) for x in (k, v, own_k, own_v))
        context, block = torch.einsum("badhw,blhw->bhadl", q, k), torch.einsum("badhw,baehw->bhade", q, own_k)
        scores = torch.cat([context, block], dim=-1) * self.width**-0.5
        scores = scores.masked_fill(~mask[:, None], float("-inf"))
        weights = torch.softmax(scores.float(), dim=-1).to(v.dtype)
        out = torch.einsum("bhadl,blhw->badhw", weights[..., :length], v)
        out = out + torch.einsum("bhade,baehw->badhw", weights[..., length:], own_v)
        return out.flatten(-2)


class BlockHead(Head):
    """A head of ``BlockLayer``s over the target's low, middle and last hidden states."""

    blocks: nn.ModuleList
    norm: Norm
    window: int | None = None
    """How many of the last context tokens are visible; None: all."""

    @property
    def block_size(self) -> int:
        """Rows of a block; the last ``sizes.depth`` of them predict tokens."""
        return self.sizes.depth

    @property
    def needs_mask(self) -> bool:
        """Whether some rows cannot attend to all of the cached context and the block."""
        return False

    def default_layers(self, last: int) -> tuple[int, ...]:
        return tuple(sorted({max(1, last // 3), max(1, 2 * last // 3), last}))

    def each_block(self) -> list[BlockLayer]:
        return list(self.blocks)  # type: ignore[arg-type]

    @abstractmethod
    def context(self, features: torch.Tensor) -> torch.Tensor:
        """Context features [..., hidden size] of the target's states [..., layers * hidden size]."""

    @abstractmethod
    def attention_mask(self, index: int, positions: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Attention mask of layer ``index``, bool [..., block, context + block], for rows at ``positions`` int64
        [..., block] and context tokens at ``context`` int64 [length]."""

    @abstractmethod
    def training_blocks(self, batch: TrainingBatch, anchors: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Input blocks [batch, anchors, block, hidden size] whose first rows are the tokens at ``anchors``."""

    def condition(self, logits: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Makes logits [n, own vocabulary] depend on the ``previous`` tokens int64 [n], if the head does that."""
        return logits

    def guesses(self, batch: TrainingBatch) -> Iterator[Guess]:
        """Trains blocks at anchors spread over the texts, with the text's own token before each predicted one."""
        length, depth = batch.tokens.shape[1], self.sizes.depth
        features = self.context(torch.cat([batch.hidden[layer] for layer in self.layers], dim=-1))
        first = 1 + int(torch.randint(STEP, (1,)))
        anchors = torch.arange(first, max(first, length - depth), STEP, device=features.device)
        trainable = batch.trainable(anchors, 1, depth)
        positions = anchors[:, None] + torch.arange(self.block_size, device=anchors.device)
        context = torch.arange(length, device=anchors.device)
        x = self.training_blocks(batch, anchors, features)
        for index, block in enumerate(self.each_block()):
            mask = self.attention_mask(index, positions, context)[None]
            if batch.segments is not None:
                same_text = batch.segments[:, None, :] == batch.segments[:, anchors, None]
                mask = mask & F.pad(same_text, (0, self.block_size), value=True)[:, :, None]
            x = block(x, partial(block.attend_in_training, positions=positions, features=features, mask=mask))
        states = self.norm(x)[:, :, -depth:]
        for step in range(depth):
            state, previous = states[:, :, step], batch.tokens[:, anchors + step]
            if trainable is not None:
                state, previous = state[trainable], previous[trainable]
            guess = self.guess(state, batch, batch.target_logits(anchors + step, trainable))
            yield guess._replace(logits=self.condition(guess.logits, previous))

    def add_context(
        self, caches: dict[int, ContextCache], sequence: RequestState, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Caches keys and values of newly read tokens with the target's ``hidden`` states; returns their features."""
        features = self.context(hidden if self.window is None else hidden[-self.window :])
        end = sequence.num_computed_tokens
        positions = torch.arange(end - len(features), end, device=hidden.device)
        pairs = [block.keys(features, positions) for block in self.each_block()]
        if sequence.id not in caches:
            caches[sequence.id] = ContextCache(pairs, self.block_size, self.window, end - len(features))
        caches[sequence.id].add(pairs)
        return features

    def run_blocks(self, x: torch.Tensor, sequences: Requests, caches: Mapping[int, ContextCache]) -> torch.Tensor:
        """States [sequences, block, hidden size], before the final norm, of input blocks ``x``. Their first rows are
        the last tokens of ``sequences``."""
        starts = torch.tensor([len(sequence.tokens) - 1 for sequence in sequences], device=x.device)
        positions = starts[:, None] + torch.arange(x.shape[1], device=x.device)
        own = [caches[sequence.id] for sequence in sequences]
        masks: list[torch.Tensor | None] = [None] * len(own)
        for index, block in enumerate(self.each_block()):
            if self.needs_mask:
                masks = [
                    self.attention_mask(index, rows, torch.arange(cache.end, device=x.device) + cache.first)
                    for rows, cache in zip(positions, own)
                ]
            x = block(x, partial(block.attend, positions=positions, caches=own, index=index, masks=masks))
        return x


class ContextCache:
    """Keys and values of one sequence's context, contiguous for every layer, of all tokens or the newest ``window``.
    They lie before ``end``; after it there is space for the ``spare`` rows of a block. ``first`` is the position of the
    first of all tokens."""

    def __init__(self, like: Pairs, spare: int, window: int | None = None, first: int = 0) -> None:
        kv_heads, width = like[0][0].shape[1:]
        self.window, self.spare, self.first, self.end = window, spare, first, 0
        shape = (len(like), kv_heads, 0 if window is None else 2 * window + spare, width)
        self.keys, self.values = (like[0][0].new_zeros(shape) for _ in range(2))

    def add(self, pairs: Pairs) -> None:
        """Appends keys and values; of a window, drops the oldest when the space is full."""
        count = len(pairs[0][0]) if self.window is None else min(len(pairs[0][0]), self.window)
        missing = self.end + count + self.spare - self.keys.shape[2]
        if missing > 0 and self.window is None:
            more = missing + self.end + count + self.spare
            self.keys, self.values = (F.pad(side, (0, 0, 0, more)) for side in (self.keys, self.values))
        elif missing > 0 and self.window is not None:
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
        """Writes [n, kv heads, width] after the context of a layer; ``end`` stays."""
        after = self.end + k.shape[0]
        self.keys[index, :, self.end : after] = k.transpose(0, 1)
        self.values[index, :, self.end : after] = v.transpose(0, 1)

    def read(self, index: int, own: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer's context and the ``own`` rows after it, [1, kv heads, n, width] each."""
        first, end = 0 if self.window is None else max(0, self.end - self.window), self.end + own
        return self.keys[index, None, :, first:end], self.values[index, None, :, first:end]

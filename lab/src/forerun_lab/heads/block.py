"""Training of heads that predict a block of tokens in one pass: its rows attend to each other and to the context."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from forerun.models.run.rotary import default_frequencies
from forerun_lab.heads.training import FeedForward, Guess, Norm, TrainedHead, TrainingBatch, rotate

STEP = 4
"""Positions from one anchor of a training batch to the next."""


class BlockAttention:
    """Attention of a layer's block rows over the context and each other."""

    heads: int
    kv_heads: int
    width: int
    frequencies: torch.Tensor
    """Rotary frequencies, float32 [width / 2]."""
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    q_norm: Any
    k_norm: Any

    def keys(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [..., n, kv heads, width] of context features or block rows."""
        shape, norm = (*x.shape[:-1], self.kv_heads, self.width), self.k_norm
        k = self.k_proj(x).view(shape)
        return rotate(k if norm is None else norm(k), positions, self.frequencies), self.v_proj(x).view(shape)

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Queries [..., n, heads, width] of block rows."""
        q, norm = self.q_proj(x).view(*x.shape[:-1], self.heads, self.width), self.q_norm
        return rotate(q if norm is None else norm(q), positions, self.frequencies)

    def attend_in_training(
        self, normed: torch.Tensor, positions: torch.Tensor, features: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Attention [batch, anchors, block, heads * width] of blocks at many anchors of a text, over its context and
        themselves: rows ``normed`` [batch, anchors, block, hidden size] at ``positions`` [anchors, block], context
        features [batch, length, hidden size], and ``mask`` bool [batch or 1, anchors, block, length + block]."""
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


class BlockLayer(BlockAttention, nn.Module):
    """Attention and feed-forward weights of one layer, without norms before them.

    Subclasses define ``forward(x, attend)`` for rows x [..., block, hidden size], where ``attend`` maps normed rows to
    attention's output.
    """

    def __init__(self, size: int, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = options["heads"], options["kv_heads"], options["width"]
        self.frequencies = default_frequencies(self.width, options["theta"])
        self.q_proj = nn.Linear(size, self.heads * self.width, bias=False)
        self.k_proj = nn.Linear(size, self.kv_heads * self.width, bias=False)
        self.v_proj = nn.Linear(size, self.kv_heads * self.width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.width, size, bias=False)
        self.q_norm = self.k_norm = None
        self.mlp = FeedForward(size, options["inner_size"])


class BlockHead(TrainedHead):
    """A head of ``BlockLayer``s over the target's low, middle and last hidden states."""

    blocks: nn.ModuleList
    norm: Norm

    @property
    def block_size(self) -> int:
        """Rows of a block; the last ``sizes.depth`` of them predict tokens."""
        return self.sizes.depth

    def default_layers(self, last: int) -> tuple[int, ...]:
        return tuple(sorted({max(1, last // 3), max(1, 2 * last // 3), last}))

    def each_block(self) -> list[BlockLayer]:
        return list(self.blocks)  # type: ignore[arg-type]

    @abstractmethod
    def feature(self, hidden: torch.Tensor) -> torch.Tensor:
        """What blocks attend to, [..., hidden size], of the target's hidden states [..., layers * hidden size]."""

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
        features = self.feature(torch.cat([batch.hidden[layer] for layer in self.layers], dim=-1))
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

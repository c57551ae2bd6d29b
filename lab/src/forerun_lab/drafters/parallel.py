"""``parallel`` predicts a block of tokens in one pass, as PARD (arXiv 2504.18583) and DFlash (2602.06036) do.

A block is the last committed token and trained mask tokens after it. Its rows attend to each other in both directions,
and to a window of the context, whose keys and values are projected from the target's low, middle and last hidden
states. Row i predicts the token i + 1 positions after the last committed one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from forerun.core.batch import HiddenStates
from forerun.core.inference import inference
from forerun.core.request import Requests, RequestState
from forerun.speculate.draft.heads.head import Sizes
from forerun_lab.drafters.block import BlockDrafter
from forerun_lab.heads.block import BlockHead, BlockLayer
from forerun_lab.heads.training import Norm, TrainingBatch, feed_forward

DEFAULTS = {"heads": 6, "kv_heads": 2, "width": 64, "inner_size": 768, "blocks": 1, "window": 256, "theta": 10000.0}


Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values [n, kv heads, width] of each layer."""


class _Block(BlockLayer):
    """Attention over context and block, then a feed-forward layer, each after a norm."""

    def __init__(self, size: int, options: dict[str, Any]) -> None:
        super().__init__(size, options)
        self.norm, self.norm_mlp = Norm(size), Norm(size)
        nn.init.zeros_(self.o_proj.weight)

    def forward(self, x: torch.Tensor, attend: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = x + self.o_proj(attend(self.norm(x)))
        return x + feed_forward(self.mlp, self.norm_mlp(x))

    def attend(
        self, normed: torch.Tensor, positions: torch.Tensor, caches: Sequence[ContextCache], index: int
    ) -> torch.Tensor:
        """Attention of each sequence's block over its cached context and itself.

        Args:
            normed: rows [sequences, rows, hidden size] at ``positions`` int64 [sequences, rows].
            caches: the context of each sequence.
            index: of this layer.

        Returns:
            [sequences, rows, heads * width].
        """
        q, (own_k, own_v) = self.queries(normed, positions), self.keys(normed, positions)
        count, rows, groups = *q.shape[:2], self.heads // self.kv_heads
        folded = q.view(count, rows, -1, groups, self.width).permute(0, 2, 3, 1, 4).flatten(2, 3)
        parts = []
        for own_q, k, v, cache in zip(folded, own_k, own_v, caches, strict=True):
            cache.write(index, k, v)
            parts.append(F.scaled_dot_product_attention(own_q[None], *cache.read(index, rows)))
        out = torch.cat(parts).view(count, -1, groups, rows, self.width)
        return out.permute(0, 3, 1, 2, 4).flatten(2)


class ParallelHead(BlockHead):
    """Head of ``parallel``. Options: sizes, and ``layers`` (hidden states read)."""

    method = "parallel"
    options_known = frozenset(DEFAULTS) | {"layers"}

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.options = {**DEFAULTS, **sizes.options}
        self.window: int = self.options["window"]
        size = sizes.hidden_size
        self.fuse = nn.Linear(len(self.layers) * size, size, bias=False)
        self.norm_context = Norm(size)
        self.mask = nn.Embedding(sizes.depth - 1, size)
        nn.init.normal_(self.mask.weight, std=0.5)
        self.norm_token = Norm(size)
        self.blocks = nn.ModuleList(_Block(size, self.options) for _ in range(self.options["blocks"]))
        self.norm = Norm(size)
        self.make_lm_head()

    def feature(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm_context(self.fuse(hidden))

    def rows(self, embedded: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
        """Input blocks [n, depth, hidden size]: the last token's embedding and the mask tokens, each with the newest
        context feature added. The embedding is normed, since features are much larger."""
        mask = self.mask.weight.to(newest.dtype).expand(embedded.shape[0], -1, -1)
        return torch.cat([self.norm_token(embedded)[:, None], mask], dim=1) + newest[:, None]

    def training_blocks(self, batch: TrainingBatch, anchors: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        embedded = batch.embedding[batch.tokens[:, anchors]].to(features.dtype)
        x = self.rows(embedded.flatten(0, 1), features[:, anchors - 1].flatten(0, 1))
        return x.unflatten(0, embedded.shape[:2])

    def attention_mask(self, index: int, positions: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        offsets = context - positions[..., :1]
        mask = F.pad((offsets < 0) & (offsets >= -self.window), (0, self.block_size), value=True)
        return mask[..., None, :].expand(*positions.shape, -1)

    def add_context(
        self, caches: dict[int, ContextCache], sequence: RequestState, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Caches keys and values of newly read tokens with the target's ``hidden`` states; returns their features."""
        features = self.feature(hidden if self.window is None else hidden[-self.window :])
        end = sequence.num_computed_tokens
        positions = torch.arange(end - len(features), end, device=hidden.device)
        pairs = [block.keys(features, positions) for block in self.each_block()]
        if sequence.id not in caches:
            caches[sequence.id] = ContextCache(pairs, self.block_size, self.window)
        caches[sequence.id].add(pairs)
        return features

    def run_blocks(self, x: torch.Tensor, sequences: Requests, caches: Mapping[int, ContextCache]) -> torch.Tensor:
        """States [sequences, block, hidden size], before the final norm, of input blocks ``x``. Their first rows are
        the last tokens of ``sequences``."""
        starts = torch.tensor([len(sequence.tokens) - 1 for sequence in sequences], device=x.device)
        positions = starts[:, None] + torch.arange(x.shape[1], device=x.device)
        own = [caches[sequence.id] for sequence in sequences]
        for index, block in enumerate(self.blocks):
            assert isinstance(block, _Block)
            x = block(x, partial(block.attend, positions=positions, caches=own, index=index))
        return x


class ContextCache:
    """Keys and values of one sequence's context, contiguous for every layer, of all tokens or the newest ``window``.
    They lie before ``end``; after it there is space for the ``spare`` rows of a block."""

    def __init__(self, like: Pairs, spare: int, window: int | None = None) -> None:
        kv_heads, width = like[0][0].shape[1:]
        self.window, self.spare, self.end = window, spare, 0
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


class Parallel(BlockDrafter):
    """Predicts a block of tokens in one pass, with bidirectional attention inside the block."""

    name = "parallel"
    head_class = ParallelHead
    head: ParallelHead
    per_sequence = ("seen", "skipped", "caches", "newest")
    caches: dict[int, ContextCache]
    newest: dict[int, torch.Tensor]

    @inference
    def add_hidden(self, sequence: RequestState, hidden: HiddenStates) -> None:
        super().add_hidden(sequence, hidden)
        rows = self.head.add_context(self.caches, sequence, hidden.joined(self.layers))
        self.newest[sequence.id] = rows[-1].clone()

    def all_logits(self, sequences: Requests) -> torch.Tensor:
        """Runs whole blocks, as in training, because rows attend to each other."""
        head = self.head
        last = torch.tensor([sequence.tokens[-1] for sequence in sequences], device=self.context.target.info.device)
        newest = torch.stack([self.newest[s.id] for s in sequences])
        x = head.rows(self.context.target.embed(last).to(newest.dtype), newest)
        x = head.run_blocks(x, sequences, self.caches)[:, : self.config.num_speculative_tokens]
        return self.predict(head.norm(x).flatten(0, 1)).unflatten(0, x.shape[:2])

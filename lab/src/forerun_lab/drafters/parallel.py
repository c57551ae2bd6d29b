"""``parallel`` predicts a block of tokens in one pass, as PARD (arXiv 2504.18583) and DFlash (2602.06036) do.

A block is the last committed token and trained mask tokens after it. Its rows attend to each other in both directions,
and to a window of the context, whose keys and values are projected from the target's low, middle and last hidden
states. Row i predicts the token i + 1 positions after the last committed one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from forerun.core.inference import inference
from forerun.core.request import Requests, RequestState
from forerun.speculate.draft.heads.block import BlockHead, BlockLayer, ContextCache
from forerun.speculate.draft.heads.head import Norm, Sizes, TrainingBatch
from forerun_lab.drafters.block import BlockDrafter

DEFAULTS = {"heads": 6, "kv_heads": 2, "width": 64, "inner_size": 768, "blocks": 1, "window": 256, "theta": 10000.0}


class _Block(BlockLayer):
    """Attention over context and block, then a feed-forward layer, each after a norm."""

    def __init__(self, size: int, options: dict[str, Any]) -> None:
        super().__init__(size, options)
        self.norm, self.norm_mlp = Norm(size), Norm(size)
        nn.init.zeros_(self.o_proj.weight)

    def forward(self, x: torch.Tensor, attend: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = x + self.o_proj(attend(self.norm(x)))
        return x + self.mlp(self.norm_mlp(x))


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

    def context(self, features: torch.Tensor) -> torch.Tensor:
        return self.norm_context(self.fuse(features))

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


class Parallel(BlockDrafter):
    """Predicts a block of tokens in one pass, with bidirectional attention inside the block."""

    name = "parallel"
    head_class = ParallelHead
    head: ParallelHead
    per_sequence = ("seen", "skipped", "caches", "newest")
    caches: dict[int, ContextCache]
    newest: dict[int, torch.Tensor]

    @inference
    def add_features(self, sequence: RequestState, rows: torch.Tensor) -> None:
        self.newest[sequence.id] = self.head.add_context(self.caches, sequence, rows)[-1].clone()

    def all_logits(self, sequences: Requests) -> torch.Tensor:
        """Runs whole blocks, as in training, because rows attend to each other."""
        head = self.head
        last = torch.tensor([sequence.tokens[-1] for sequence in sequences], device=self.context.target.info.device)
        newest = torch.stack([self.newest[s.id] for s in sequences])
        x = head.rows(self.context.target.embed(last).to(newest.dtype), newest)
        x = head.run_blocks(x, sequences, self.caches)[:, : self.config.num_speculative_tokens]
        return self.predict(head.norm(x).flatten(0, 1)).unflatten(0, x.shape[:2])

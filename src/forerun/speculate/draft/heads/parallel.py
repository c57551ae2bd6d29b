"""``parallel``: a block of guesses in one pass of a small head (in the spirit of PARD, arXiv 2504.18583, and DFlash,
2602.06036).

The block's rows are the last committed token and learnt mask tokens behind it. They see each other in both directions
and, through keys and values projected from the target's low, middle and last hidden states, a window of the committed
context. Row i guesses the token i + 1 places behind the last committed one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from forerun.core.inference import inference
from forerun.core.request import Requests, RequestState
from forerun.speculate.draft.base import DraftContext, drafters
from forerun.speculate.draft.heads.base import BlockConfig, BlockDrafter
from forerun.speculate.draft.heads.block import BlockHead, BlockLayer, BlockMemory
from forerun.speculate.draft.heads.head import Lesson, Norm, Sizes

DEFAULTS = {"heads": 6, "kv_heads": 2, "width": 64, "inner_size": 768, "blocks": 1, "window": 256, "theta": 10000.0}


class _Block(BlockLayer):
    """Attention over context and block, then a feed-forward layer."""

    def __init__(self, size: int, options: dict[str, Any]) -> None:
        super().__init__(size, options)
        self.norm, self.norm_mlp = Norm(size), Norm(size)
        nn.init.zeros_(self.o_proj.weight)

    def forward(self, x: torch.Tensor, attend: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = x + self.o_proj(attend(self.norm(x)))
        return x + self.mlp(self.norm_mlp(x))


class ParallelHead(BlockHead):
    """Options: sizes, and ``layers`` (hidden states read)."""

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
        self.make_output()

    def context(self, features: torch.Tensor) -> torch.Tensor:
        return self.norm_context(self.fuse(features))

    def rows(self, embedded: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
        """Inputs of the block [n, depth, hidden]: the last token's embedding and the masks, each with the newest
        context feature added. Embeddings are brought to the features' size, which would drown them otherwise."""
        mask = self.mask.weight.to(newest.dtype).expand(embedded.shape[0], -1, -1)
        return torch.cat([self.norm_token(embedded)[:, None], mask], dim=1) + newest[:, None]

    def anchored(self, lesson: Lesson, anchors: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        embedded = lesson.embedding[lesson.tokens[:, anchors]].to(features.dtype)
        x = self.rows(embedded.flatten(0, 1), features[:, anchors - 1].flatten(0, 1))
        return x.unflatten(0, embedded.shape[:2])

    def seen(self, index: int, indices: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        before = context - indices[..., :1]
        seen = F.pad((before < 0) & (before >= -self.window), (0, self.block_size), value=True)
        return seen[..., None, :].expand(*indices.shape, -1)


@drafters.register("parallel")
class Parallel(BlockDrafter):
    name = "parallel"
    head_class = ParallelHead
    head: ParallelHead

    def __init__(self, config: BlockConfig, context: DraftContext) -> None:
        super().__init__(config, context)
        self.memories: dict[int, BlockMemory] = {}
        self.newest: dict[int, torch.Tensor] = {}

    @inference
    def keep(self, sequence: RequestState, rows: torch.Tensor) -> None:
        self.newest[sequence.id] = self.head.remember(self.memories, sequence, rows)[-1].clone()

    def guess(self, sequences: Requests) -> torch.Tensor:
        """Always of a whole block, as in training: its rows see each other."""
        head = self.head
        last = torch.tensor([sequence.tokens[-1] for sequence in sequences], device=self.context.target.info.device)
        newest = torch.stack([self.newest[s.id] for s in sequences])
        x = head.rows(self.context.target.embed(last).to(newest.dtype), newest)
        x = head.fill(x, sequences, self.memories)[:, : self.config.num_speculative_tokens]
        return self.predict(head.norm(x).flatten(0, 1)).unflatten(0, x.shape[:2])

    def states(self) -> list[dict[int, Any]]:
        return [*super().states(), self.memories, self.newest]

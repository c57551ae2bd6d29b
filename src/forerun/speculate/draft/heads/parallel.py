"""``parallel``: a block of guesses in one pass of a small head (in the spirit of PARD, arXiv 2504.18583, and DFlash,
2602.06036).

The block's rows are the last committed token and learnt mask tokens behind it. They see each other in both directions
and, through keys and values projected from the target's low, middle and last hidden states, a window of the committed
context. Row i guesses the token i + 1 places behind the last committed one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from forerun.core.inference import inference
from forerun.core.request import Requests, RequestState
from forerun.speculate.draft.base import DraftContext, drafters
from forerun.speculate.draft.heads.base import BlockConfig, BlockDrafter
from forerun.speculate.draft.heads.block import BlockHead, BlockLayer, BlockMemory, remember
from forerun.speculate.draft.heads.head import Guess, Lesson, Norm, Sizes

DEFAULTS = {"heads": 6, "kv_heads": 2, "width": 64, "inner_size": 768, "blocks": 1, "window": 256, "theta": 10000.0}


class _Block(BlockLayer):
    """Attention over context and block, then a feed-forward layer."""

    def __init__(self, size: int, options: dict[str, Any]) -> None:
        super().__init__(size, options)
        self.norm, self.norm_mlp = Norm(size), Norm(size)
        nn.init.zeros_(self.o_proj.weight)


class ParallelHead(BlockHead):
    """Options: sizes, and ``layers`` (hidden states read)."""

    method = "parallel"
    options_known = frozenset(DEFAULTS) | {"layers"}

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.options = {**DEFAULTS, **sizes.options}
        size = sizes.hidden_size
        self.fuse = nn.Linear(len(self.layers) * size, size, bias=False)
        self.norm_context = Norm(size)
        self.mask = nn.Embedding(sizes.depth - 1, size)
        nn.init.normal_(self.mask.weight, std=0.5)
        self.norm_token = Norm(size)
        self.blocks = nn.ModuleList(_Block(size, self.options) for _ in range(self.options["blocks"]))
        self.norm = Norm(size)
        self.make_output()

    def each_block(self) -> list[_Block]:
        return list(self.blocks)  # type: ignore[arg-type]

    def context(self, features: torch.Tensor) -> torch.Tensor:
        return self.norm_context(self.fuse(features))

    def rows(self, embedded: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
        """Inputs of the block [n, depth, hidden]: the last token's embedding and the masks, each with the newest
        context feature added. Embeddings are brought to the features' size, which would drown them otherwise."""
        mask = self.mask.weight.to(newest.dtype).expand(embedded.shape[0], -1, -1)
        return torch.cat([self.norm_token(embedded)[:, None], mask], dim=1) + newest[:, None]

    def guesses(self, lesson: Lesson) -> Iterator[Guess]:
        """From anchors spread over the sequence."""
        batch, length = lesson.tokens.shape
        depth = self.sizes.depth
        features = self.context(torch.cat([lesson.hidden[layer] for layer in self.layers], dim=-1))
        step = 4
        first = 1 + int(torch.randint(step, (1,)))
        anchors = torch.arange(first, max(first, length - depth), step, device=features.device)
        indices = lesson.places(anchors, 1, depth)
        x = self.rows(
            lesson.embedding[lesson.tokens[:, anchors]].flatten(0, 1).to(features.dtype),
            features[:, anchors - 1].flatten(0, 1),
        ).unflatten(0, (batch, len(anchors)))
        where = anchors[:, None] + torch.arange(depth, device=anchors.device)
        before = torch.arange(length, device=anchors.device)[None, :] - anchors[:, None]
        seen = ((before < 0) & (before >= -self.options["window"]))[None]
        if lesson.segments is not None:
            seen = seen & (lesson.segments[:, None, :] == lesson.segments[:, anchors, None])
        mask = torch.where(seen, 0.0, float("-inf"))[:, None, :, None]
        for block in self.each_block():
            x = x + self._attend(block, x, features, where, mask)
            x = x + block.mlp(block.norm_mlp(x))
        said = self.norm(x) if indices is None else self.norm(x)[indices]
        for position in range(depth):
            yield self.guess(said[..., position, :], lesson, lesson.wanted(anchors + position, indices))

    def _attend(
        self, block: _Block, x: torch.Tensor, features: torch.Tensor, where: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Training form: x [batch, anchors, depth, hidden], context features [batch, length, hidden], ``mask`` over
        them [batch or 1, 1, anchors, 1, length]."""
        normed = block.norm(x)
        q = block.queries(normed, where)
        own_k, own_v = block.keys(normed, where)
        k, v = block.keys(features, torch.arange(features.shape[1], device=features.device))
        groups = block.heads // block.kv_heads
        k, v, own_k, own_v = (t.repeat_interleave(groups, dim=-2) for t in (k, v, own_k, own_v))
        scale = block.width**-0.5
        far = torch.einsum("badhw,blhw->bhadl", q, k) * scale + mask
        near = torch.einsum("badhw,baehw->bhade", q, own_k) * scale
        weights = torch.softmax(torch.cat([far, near], dim=-1).float(), dim=-1).to(v.dtype)
        length = features.shape[1]
        out = torch.einsum("bhadl,blhw->badhw", weights[..., :length], v)
        out = out + torch.einsum("bhade,baehw->badhw", weights[..., length:], own_v)
        return block.o_proj(out.flatten(-2))


@drafters.register("parallel")
class Parallel(BlockDrafter):
    name = "parallel"
    head_class = ParallelHead

    def __init__(self, config: BlockConfig, context: DraftContext) -> None:
        super().__init__(config, context)
        self.memories: dict[int, BlockMemory] = {}
        self.newest: dict[int, torch.Tensor] = {}

    @inference
    def keep(self, sequence: RequestState, rows: torch.Tensor) -> None:
        head = self.head
        assert isinstance(head, ParallelHead)
        features = remember(self.memories, sequence, head, rows, head.sizes.depth, head.options["window"])
        self.newest[sequence.id] = features[-1].clone()

    def guess(self, sequences: Requests) -> torch.Tensor:
        """Always of a whole block, as in training: its rows see each other."""
        head = self.head
        assert isinstance(head, ParallelHead)
        depth = head.sizes.depth
        device = self.context.target.info.device
        last = torch.tensor([sequence.tokens[-1] for sequence in sequences], device=device)
        newest = torch.stack([self.newest[s.id] for s in sequences])
        x = head.rows(self.context.target.embed(last).to(newest.dtype), newest)
        starts = torch.tensor([len(sequence.tokens) - 1 for sequence in sequences], device=device)
        where = starts[:, None] + torch.arange(depth, device=device)
        memories = [self.memories[sequence.id] for sequence in sequences]
        for index, block in enumerate(head.each_block()):
            x = x + block.o_proj(block.attend(block.norm(x), where, memories, index, [None] * len(memories)))
            x = x + block.mlp(block.norm_mlp(x))
        x = x[:, : self.config.num_speculative_tokens]
        return self.predict(head.norm(x).flatten(0, 1)).unflatten(0, x.shape[:2])

    def states(self) -> list[dict[int, Any]]:
        return [*super().states(), self.memories, self.newest]

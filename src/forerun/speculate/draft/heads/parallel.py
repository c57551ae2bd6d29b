"""``parallel``: a block of guesses in one pass of a small head (in the spirit of PARD, arXiv 2504.18583, and DFlash,
2602.06036).

The block's rows are the last committed token and learnt mask tokens behind it. They see each other in both directions
and, through keys and values projected from the target's low, middle and last hidden states, a window of the committed
context. Row i guesses the token i + 1 places behind the last committed one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from forerun.core.inference import inference
from forerun.core.request import RequestState
from forerun.speculate.draft.base import DraftContext, drafters
from forerun.speculate.draft.heads.base import BlockConfig, BlockDrafter
from forerun.speculate.draft.heads.head import FeedForward, Guess, Head, Lesson, Norm, Sizes, rotate

DEFAULTS = {"heads": 6, "kv_heads": 2, "width": 64, "inner_size": 768, "blocks": 1, "window": 256, "theta": 10000.0}


class _Block(nn.Module):
    """Attention over context and block, then a feed-forward layer."""

    def __init__(self, size: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = options["heads"], options["kv_heads"], options["width"]
        self.theta = options["theta"]
        self.norm = Norm(size)
        self.norm_mlp = Norm(size)
        self.q_proj = nn.Linear(size, self.heads * self.width, bias=False)
        self.k_proj = nn.Linear(size, self.kv_heads * self.width, bias=False)
        self.v_proj = nn.Linear(size, self.kv_heads * self.width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.width, size, bias=False)
        nn.init.zeros_(self.o_proj.weight)
        self.mlp = FeedForward(size, options["inner_size"])

    def keys(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [..., n, kv heads, width] of features or block rows."""
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.width))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.width))
        return rotate(k, positions, self.theta), v

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rotate(self.q_proj(x).unflatten(-1, (self.heads, self.width)), positions, self.theta)


class ParallelHead(Head):
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

    @property
    def layers(self) -> tuple[int, ...]:
        given, last = self.sizes.options.get("layers"), self.sizes.num_layers
        if given is not None:
            return tuple(given)
        return tuple(sorted({max(1, last // 3), max(1, 2 * last // 3), last}))

    def each_block(self) -> list[_Block]:
        return list(self.blocks)  # type: ignore[arg-type]

    def context(self, features: torch.Tensor) -> torch.Tensor:
        """[..., layers * hidden] -> [..., hidden]."""
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


class _Memory:
    """One sequence's context: keys and values of every block, its newest ``window`` entries in one piece before
    ``end``, and the newest feature. Behind ``end`` there is room for a block's own rows."""

    def __init__(self, blocks: int, window: int, depth: int, like: torch.Tensor) -> None:
        kv_heads, width = like.shape[1:]
        self.window, self.capacity = window, 2 * window
        shape = (blocks, kv_heads, self.capacity + depth, width)
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)
        self.end = 0
        self.newest = like

    def add(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], newest: torch.Tensor) -> None:
        """Append keys and values [n, kv heads, width] per block."""
        count = min(pairs[0][0].shape[0], self.window)
        if self.end + count > self.capacity:
            kept = self.window - count
            for side in (self.keys, self.values):
                side[:, :, :kept] = side[:, :, self.end - kept : self.end].clone()
            self.end = kept
        for index, (k, v) in enumerate(pairs):
            self.write(index, k[-count:], v[-count:])
        self.end += count
        self.newest = newest

    def write(self, index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put [n, kv heads, width] behind the context of a block, for now."""
        after = self.end + k.shape[0]
        self.keys[index, :, self.end : after] = k.transpose(0, 1)
        self.values[index, :, self.end : after] = v.transpose(0, 1)

    def read(self, index: int, extra: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A block's context and the ``extra`` rows behind it, [1, kv heads, n, width]."""
        rows = slice(max(0, self.end - self.window), self.end + extra)
        return self.keys[index, None, :, rows], self.values[index, None, :, rows]


@drafters.register("parallel")
class Parallel(BlockDrafter):
    name = "parallel"
    head_class = ParallelHead

    def __init__(self, config: BlockConfig, context: DraftContext) -> None:
        super().__init__(config, context)
        self.memory: dict[int, _Memory] = {}

    @inference
    def keep(self, sequence: RequestState, rows: torch.Tensor) -> None:
        head = self.head
        assert isinstance(head, ParallelHead)
        window = head.options["window"]
        features = head.context(rows[-window:])
        positions = torch.arange(
            sequence.num_computed_tokens - features.shape[0], sequence.num_computed_tokens, device=rows.device
        )
        pairs = [block.keys(features, positions) for block in head.each_block()]
        if sequence.id not in self.memory:
            self.memory[sequence.id] = _Memory(len(pairs), window, head.sizes.depth, pairs[0][0])
        self.memory[sequence.id].add(pairs, features[-1].clone())

    def guess(self, sequences: Sequence[RequestState]) -> torch.Tensor:
        """Always of a whole block, as in training: its rows see each other."""
        head = self.head
        assert isinstance(head, ParallelHead)
        depth = head.sizes.depth
        device = self.context.target.info.device
        last = torch.tensor([sequence.tokens[-1] for sequence in sequences], device=device)
        newest = torch.stack([self.memory[s.id].newest for s in sequences])
        x = head.rows(self.context.target.embed(last).to(newest.dtype), newest)
        starts = torch.tensor([len(sequence.tokens) - 1 for sequence in sequences], device=device)
        where = starts[:, None] + torch.arange(depth, device=device)
        for index, block in enumerate(head.each_block()):
            normed = block.norm(x)
            q = block.queries(normed, where)
            own_k, own_v = block.keys(normed, where)
            parts = []
            for i, sequence in enumerate(sequences):
                memory = self.memory[sequence.id]
                memory.write(index, own_k[i], own_v[i])
                k, v = memory.read(index, depth)
                groups = q.shape[2] // k.shape[1]
                folded = q[i].unflatten(1, (-1, groups)).permute(1, 2, 0, 3).flatten(1, 2)
                out = F.scaled_dot_product_attention(folded[None], k, v)[0]
                parts.append(out.unflatten(1, (groups, depth)).permute(2, 0, 1, 3).flatten(1))
            x = x + block.o_proj(torch.stack(parts))
            x = x + block.mlp(block.norm_mlp(x))
        x = x[:, : self.config.num_speculative_tokens]
        return self.predict(head.norm(x).flatten(0, 1)).unflatten(0, x.shape[:2])

    def states(self) -> list[dict[int, Any]]:
        return [*super().states(), self.memory]

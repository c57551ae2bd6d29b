"""Heads that fill a block of rows in one pass: rows see each other, and what was kept of the text before.

``parallel`` is the simplest (in the spirit of PARD, arXiv 2504.18583, and DFlash, 2602.06036; ``dflash.py`` has that
itself). Its block's rows are the last committed token and learnt mask tokens behind it. They see each other in both
directions and, through keys and values projected from the target's low, middle and last hidden states, a window of the
committed context. Row i guesses the token i + 1 places behind the last committed one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from forerun.core.inference import inference
from forerun.core.request import Requests, RequestState
from forerun.speculate.draft.base import drafters
from forerun.speculate.draft.heads.base import BlockDrafter
from forerun.speculate.draft.heads.head import FeedForward, Guess, Head, Norm, Sizes, TrainingBatch, rotate

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values [n, kv heads, width] of each layer."""
STEP = 4
"""Positions from one anchor of a training batch to the next."""


class BlockLayer(nn.Module):
    """Attention of a block's rows and a feed-forward layer, without the norms before them: ``forward`` takes rows [...,
    block, hidden size] and what gives attention's answer to normed rows. ``eps``: of norms of every head of queries and
    keys; None: there are none."""

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
        self, normed: torch.Tensor, where: torch.Tensor, memories: Sequence[ContextCache], index: int,
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

    def learn(
        self, normed: torch.Tensor, where: torch.Tensor, features: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        """As ``attend``, in training: of rows ``normed`` [batch, anchors, block, hidden size] at ``where`` [anchors,
        block] beside context features [batch, length, hidden size]. ``seen`` bool [batch or 1, anchors, block, length +
        block]."""
        q, (own_k, own_v) = self.queries(normed, where), self.keys(normed, where)
        length = features.shape[1]
        k, v = self.keys(features, torch.arange(length, device=features.device))
        k, v, own_k, own_v = (x.repeat_interleave(self.heads // self.kv_heads, dim=-2) for x in (k, v, own_k, own_v))
        far, near = torch.einsum("badhw,blhw->bhadl", q, k), torch.einsum("badhw,baehw->bhade", q, own_k)
        scores = torch.cat([far, near], dim=-1) * self.width**-0.5
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        weights = torch.softmax(scores.float(), dim=-1).to(v.dtype)
        out = torch.einsum("bhadl,blhw->badhw", weights[..., :length], v)
        out = out + torch.einsum("bhade,baehw->badhw", weights[..., length:], own_v)
        return out.flatten(-2)


class BlockHead(Head):
    """A head of ``BlockLayer``s that read low, middle and last hidden states of the target."""

    blocks: nn.ModuleList
    norm: Norm
    window: int | None = None
    """How many of a text's last tokens are seen; None: all."""

    @property
    def block_size(self) -> int:
        """Rows of a block; the last ``sizes.depth`` of them guess."""
        return self.sizes.depth

    @property
    def masked(self) -> bool:
        """Whether there is something in a memory and a block that a row does not see."""
        return False

    def usual_layers(self, last: int) -> tuple[int, ...]:
        return tuple(sorted({max(1, last // 3), max(1, 2 * last // 3), last}))

    def each_block(self) -> list[BlockLayer]:
        return list(self.blocks)  # type: ignore[arg-type]

    @abstractmethod
    def context(self, features: torch.Tensor) -> torch.Tensor:
        """[..., layers * hidden size] -> [..., hidden size]."""

    @abstractmethod
    def seen(self, index: int, indices: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """bool [..., block, context + block]: what rows at ``indices`` int64 [..., block] see in layer ``index`` of the
        ``context`` int64 [length] before the first of them, and of each other."""

    @abstractmethod
    def anchored(self, lesson: TrainingBatch, anchors: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """The blocks [batch, anchors, block, hidden size] that begin with the lesson's tokens at ``anchors``."""

    def correct(self, logits: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Logits [n, own vocabulary] behind the tokens ``before`` int64 [n]."""
        return logits

    def guesses(self, lesson: TrainingBatch) -> Iterator[Guess]:
        """From anchors spread over the texts, the tokens before each guessed one being the text's own."""
        length, depth = lesson.tokens.shape[1], self.sizes.depth
        features = self.context(torch.cat([lesson.hidden[layer] for layer in self.layers], dim=-1))
        first = 1 + int(torch.randint(STEP, (1,)))
        anchors = torch.arange(first, max(first, length - depth), STEP, device=features.device)
        kept = lesson.trainable(anchors, 1, depth)
        where = anchors[:, None] + torch.arange(self.block_size, device=anchors.device)
        context = torch.arange(length, device=anchors.device)
        x = self.anchored(lesson, anchors, features)
        for index, block in enumerate(self.each_block()):
            seen = self.seen(index, where, context)[None]
            if lesson.segments is not None:
                same = lesson.segments[:, None, :] == lesson.segments[:, anchors, None]
                seen = seen & F.pad(same, (0, self.block_size), value=True)[:, :, None]
            x = block(x, partial(block.learn, where=where, features=features, seen=seen))
        says = self.norm(x)[:, :, -depth:]
        for position in range(depth):
            state, before = says[:, :, position], lesson.tokens[:, anchors + position]
            if kept is not None:
                state, before = state[kept], before[kept]
            guess = self.guess(state, lesson, lesson.target_logits(anchors + position, kept))
            yield guess._replace(logits=self.correct(guess.logits, before))

    def remember(self, memories: dict[int, ContextCache], sequence: RequestState, hidden: torch.Tensor) -> torch.Tensor:
        """Keep what is needed of newly cached tokens, whose ``hidden`` states of the target are given; returns their
        features."""
        features = self.context(hidden if self.window is None else hidden[-self.window :])
        end = sequence.num_computed_tokens
        positions = torch.arange(end - len(features), end, device=hidden.device)
        pairs = [block.keys(features, positions) for block in self.each_block()]
        if sequence.id not in memories:
            memories[sequence.id] = ContextCache(pairs, self.block_size, self.window)
        memories[sequence.id].add(pairs)
        return features

    def fill(self, x: torch.Tensor, sequences: Requests, memories: Mapping[int, ContextCache]) -> torch.Tensor:
        """States [sequences, block, hidden size], not normed, of blocks ``x`` whose first rows are the last tokens of
        ``sequences``."""
        starts = torch.tensor([len(sequence.tokens) - 1 for sequence in sequences], device=x.device)
        where = starts[:, None] + torch.arange(x.shape[1], device=x.device)
        known = [memories[sequence.id] for sequence in sequences]
        seen: list[torch.Tensor | None] = [None] * len(known)
        for index, block in enumerate(self.each_block()):
            if self.masked:
                seen = [
                    self.seen(index, at, torch.arange(memory.end, device=x.device)) for at, memory in zip(where, known)
                ]
            x = block(x, partial(block.attend, where=where, memories=known, index=index, seen=seen))
        return x


class ContextCache:
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
        first, end = 0 if self.window is None else max(0, self.end - self.window), self.end + own
        return self.keys[index, None, :, first:end], self.values[index, None, :, first:end]


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
    """Of ``parallel``. Options: sizes, and ``layers`` (hidden states read)."""

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

    def anchored(self, lesson: TrainingBatch, anchors: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
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
    per_sequence = ("seen", "memories", "newest")
    memories: dict[int, ContextCache]
    newest: dict[int, torch.Tensor]

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

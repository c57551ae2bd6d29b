"""``eagle``, as it is trained: unrolled over a text, each step on the features of the step before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from forerun.models.run.rotary import rotary_frequencies
from forerun.speculate.draft.heads.eagle import EagleHead
from forerun.speculate.draft.heads.head import Sizes
from forerun_lab.heads.training import FeedForward, Guess, Norm, TrainedHead, TrainingBatch, feed_forward, rotate

MIN_FRACTION = 8
"""Each training step uses half of the positions of the step before, because deeper tokens are accepted less often, but
at least one of this many."""


class TrainedEagle(EagleHead, TrainedHead):
    """EAGLE-3's head with its passes over a text."""

    pack = TrainedHead.pack

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        size, o = sizes.hidden_size, self.options
        self.heads, self.kv_heads, self.width = o["heads"], o["kv_heads"], o["width"]
        self.fc = nn.Linear(len(self.layers) * size, size, bias=False)
        self.input_norm = Norm(self.fc.in_features, o["eps"]) if o.get("norm_before_fc") else None
        self.fc_norm = nn.ModuleList(Norm(size, o["eps"]) for _ in self.layers) if o.get("fc_norm") else None
        self.hidden_norm = Norm(size, o["eps"])
        self.post_attention_layernorm = Norm(size, o["eps"])
        self.norm = Norm(size, o["eps"])
        mixed = bool(o.get("mixed"))
        self.mix = nn.Linear(2 * size, size, bias=False) if mixed else None
        self.input_layernorm = None if mixed else Norm(size, o["eps"])
        read = size if self.mix is not None else 2 * size
        self.q_proj = nn.Linear(read, self.heads * self.width, bias=False)
        self.k_proj = nn.Linear(read, self.kv_heads * self.width, bias=False)
        self.v_proj = nn.Linear(read, self.kv_heads * self.width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.width, size, bias=False)
        nn.init.zeros_(self.o_proj.weight)
        self.mlp = FeedForward(size, o["inner_size"])
        self.make_lm_head(bool(o.get("own_head")))

    @cached_property
    def frequencies(self) -> torch.Tensor:
        """The rotary frequencies, float32 [width / 2]."""
        return rotary_frequencies(self.config, self.width)[0]

    def enter(self, embedded: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
        """The layer's input to the residual stream, [..., hidden size]."""
        if self.options.get("norm_before_residual"):
            return self.hidden_norm(feature)
        if self.mix is None:
            return feature
        return self.mix(torch.cat([embedded, feature], dim=-1))

    def qkv(
        self, embedded: torch.Tensor, stream: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [..., n, heads, width] of the residual stream that ``enter`` returned."""
        x = stream if self.options.get("norm_before_residual") else self.hidden_norm(stream)
        if self.input_layernorm is not None:
            x = torch.cat([self.input_layernorm(embedded), x], dim=-1)
        q, k = self.q_proj(x), self.k_proj(x)
        q = rotate(q.unflatten(-1, (self.heads, self.width)), positions, self.frequencies)
        k = rotate(k.unflatten(-1, (self.kv_heads, self.width)), positions, self.frequencies)
        return q, k, self.v_proj(x).unflatten(-1, (self.kv_heads, self.width))

    def finish(self, feature: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        x = feature + self.o_proj(attended)
        return x + feed_forward(self.mlp, self.post_attention_layernorm(x))

    def outputs(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The next step's features and the normed states, of the layer's output."""
        normed = self.norm(states)
        return normed if self.options.get("norm_output") else states, normed

    def guesses(self, batch: TrainingBatch) -> Iterator[Guess]:
        """Training-time test: ``sizes.depth`` unrolled steps. At step j, a position attends to the first step's keys
        up to itself and to its own keys of the later steps (the paper's figure 6). A later step can therefore train at
        some of the positions only (``MIN_FRACTION``)."""
        length = batch.tokens.shape[1] - self.sizes.depth - 1
        features = torch.cat([batch.hidden[layer] for layer in self.layers], dim=-1)
        mask = torch.ones(length, length, dtype=torch.bool, device=features.device).tril()[None]
        if batch.segments is not None:
            texts = batch.segments[:, :length]
            mask = mask & (texts[:, :, None] == texts[:, None, :])
        at = torch.arange(length, device=features.device)
        indices = batch.trainable(at, 2, self.sizes.depth)
        if indices is None:
            indices = torch.ones(len(features), length, dtype=torch.bool, device=features.device)
        stream, (q, k, v) = self._read(batch, self.feature(features[:, :length]), (slice(None), at), 1)
        keys, values = (self._shared(x).transpose(1, 2) for x in (k, v))
        result = functional.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask[:, None])
        feature = self.finish(stream, result.transpose(1, 2).flatten(-2))[indices]
        row, index = indices.nonzero(as_tuple=True)
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        for step in range(self.sizes.depth):
            if step:
                if self.training:
                    count = -(-int(indices.sum()) // min(MIN_FRACTION, 2**step))
                    chosen = torch.randperm(len(row), device=row.device)[:count].sort().values
                    row, index, feature = row[chosen], index[chosen], feature[chosen]
                    own = [(k[chosen], v[chosen]) for k, v in own]
                stream, (q, k, v) = self._read(batch, feature, (row, index), step + 1)
                own.append((self._shared(k), self._shared(v)))
                feature = self.finish(stream, self._unrolled(q, keys, values, own, mask, row, index).flatten(-2))
            feature, normed = self.outputs(feature)
            yield self.guess(normed, batch, batch.target_logits(at + step + 1, (row, index)))

    def _read(self, batch: TrainingBatch, feature: torch.Tensor, indices: tuple[Any, torch.Tensor], ahead: int) -> Any:
        """The layer's residual stream, and its queries, keys and values, from features [..., hidden size] and the
        tokens ``ahead`` of their positions."""
        row, at = indices
        embedded = batch.embedding[batch.tokens[row, at + ahead]].to(feature.dtype)
        stream = self.enter(embedded, feature)
        return stream, self.qkv(embedded, stream, at + ahead - 1)

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        """Keys or values [..., kv_heads, width], repeated for every head."""
        return x.repeat_interleave(self.heads // self.kv_heads, dim=-2)

    def _unrolled(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
        own: Sequence[tuple[torch.Tensor, torch.Tensor]], mask: torch.Tensor, row: torch.Tensor, slot: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of ``q`` [n, heads, width] at the positions (``row``, ``slot``), ascending, over the first step's
        ``keys`` and ``values`` [rows, heads, length, width] and over their ``own`` of later steps [n, heads, width]."""
        scale, length = self.width**-0.5, keys.shape[2]
        laid = q.new_zeros(len(keys), length, *q.shape[1:]).index_put((row, slot), q)
        scores = (laid.transpose(1, 2) @ keys.mT * scale).transpose(1, 2)[row, slot]
        scores = scores.masked_fill(~mask[row % len(mask), slot][:, None], float("-inf"))
        own_scores = [((q * k).sum(-1) * scale)[..., None] for k, _ in own]
        weights = torch.softmax(torch.cat([scores, *own_scores], dim=-1).float(), dim=-1).to(values.dtype)
        laid = weights.new_zeros(len(keys), length, *scores.shape[1:]).index_put((row, slot), weights[..., :length])
        result = (laid.transpose(1, 2) @ values).transpose(1, 2)[row, slot]
        for late, (_, v) in enumerate(own, length):
            result = result + weights[..., late, None] * v
        return result

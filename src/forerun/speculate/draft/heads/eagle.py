"""``eagle``: EAGLE-3 (Li et al., arXiv 2503.01840), a one-layer decoder on the target's low, middle and high features.

``layers.py`` says how it drafts. The vocabulary may be reduced: row i of its output layer then stands for token
i + d2t[i].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from forerun.models.architectures.drafters import eagle, head_config
from forerun.models.architectures.spec import Spec, bind
from forerun.models.run.rotary import rotary_frequencies
from forerun.models.weights.published import read_eagle
from forerun.speculate.draft.base import drafters
from forerun.speculate.draft.chain import FEEDS_NORMED, FEEDS_RAW
from forerun.speculate.draft.heads.head import FeedForward, Guess, Head, Norm, Sizes, TrainingBatch, rotate
from forerun.speculate.draft.heads.layers import HeadLayerDrafter, LayerConfig

DEFAULTS = {"heads": 6, "kv_heads": 2, "width": 64, "inner_size": 768, "theta": 10000.0, "eps": 1e-5}
MIN_FRACTION = 8
"""Each training step uses half of the positions of the step before, because deeper tokens are accepted less often, but
at least one of this many."""


class EagleHead(Head):
    """EAGLE-3's decoder layer, output layer and projection of hidden states.

    Options, besides sizes:

    - ``layers``: hidden states read.
    - ``draft_vocab_size`` (with ``d2t``) and ``own_head``: its output layer.
    - ``mixed``: one matrix projects the token's embedding and the feature to the layer's input, as in EAGLE (arXiv
      2401.15077), so that the embedding also reaches the output.
    - ``norm_before_residual``: the residual is the normed feature, as in some of speculators' heads.
    - ``norm_before_fc``: hidden states are normed together before they are projected.
    - ``fc_norm``: each hidden state is normed on its own before they are projected (EAGLE-3.1, arXiv 2605.09992).
    - ``norm_output``: the next step's feature is the normed output (EAGLE-3.1).
    - ``stretch``: the numbers ``LLAMA3`` of Llama 3's scaling of rotary frequencies.
    """

    method = "eagle"
    quantizes = True
    read_public = staticmethod(read_eagle)
    options_known = frozenset(DEFAULTS) | {
        "layers", "draft_vocab_size", "own_head", "mixed", "norm_before_residual", "norm_before_fc", "fc_norm",
        "norm_output", "stretch",
    }  # fmt: skip

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.options = {**DEFAULTS, **sizes.options}
        size, o = sizes.hidden_size, self.options
        self.heads, self.kv_heads, self.width = o["heads"], o["kv_heads"], o["width"]
        self.config = head_config(sizes, o)
        self.feeds = FEEDS_NORMED if o.get("norm_output") else FEEDS_RAW
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

    def default_layers(self, last: int) -> tuple[int, ...]:
        """Low, middle and high; the paper's 2, n / 2 and n - 3 where the target is deep enough."""
        return (2, last // 2, last - 3) if last >= 12 else tuple(sorted({1, max(1, last // 2), max(1, last - 1)}))

    def feature(self, hidden: torch.Tensor) -> torch.Tensor:
        """Projects the target's hidden states [..., layers * hidden size] to features [..., hidden size]."""
        if self.fc_norm is not None:
            parts = hidden.chunk(len(self.fc_norm), dim=-1)
            hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        return self.fc(hidden if self.input_norm is None else self.input_norm(hidden))

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
        return x + self.mlp(self.post_attention_layernorm(x))

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
        """Attention of ``q`` [n, heads, width] at the positions (``row``, ``slot``), in ascending order, over the first
        step's ``keys`` and ``values`` [rows, heads, length, width] and over their ``own`` of later steps [n, heads,
        width]."""
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

    def described(self) -> tuple[Any, Spec, dict[str, torch.Tensor]]:
        """Config, spec and weights of the layer, the final norm, and the output layer if it has its own."""
        tensors, normed = {}, bool(self.options.get("norm_before_residual"))
        outer = ("norm.", "mix.", "lm_head.", *(["hidden_norm."] if normed else []))
        for name, tensor in self.named_parameters():
            if not name.startswith(("fc.", "input_norm.", "fc_norm.")):
                tensors[name if name.startswith(outer) else f"layers.0.{name}"] = tensor.detach()
        return self.config, bind(self.config, eagle(mixed=self.mix is not None, normed=normed)), tensors


@dataclass(frozen=True)
class EagleConfig(LayerConfig):
    """Options of a head and of trees."""


@drafters.register("eagle")
class Eagle(HeadLayerDrafter[EagleConfig]):
    name = "eagle"
    config_class = EagleConfig
    head_class: ClassVar[type[Head]] = EagleHead

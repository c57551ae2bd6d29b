"""``eagle``: EAGLE-3 (Li et al., arXiv 2503.01840), a one-layer decoder on the target's low, middle and high features.

Entry t of its own cache combines the target's feature of token t with the embedding of token t + 1, and predicts token
t + 2. While drafting, its own output replaces the feature. After the round these entries are dropped, and read again
with true features. The vocabulary may be reduced: row i of its output layer then stands for token i + d2t[i].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from forerun.attention.base import Attention, Query
from forerun.attention.kernel import KernelAttention, can_attend
from forerun.attention.sdpa import SdpaAttention
from forerun.cache.pool import KVShape, Pool
from forerun.cache.prefix import PrefixTree
from forerun.core.batch import Batch, Span
from forerun.core.config import POSITIVE
from forerun.core.errors import ModelError, shown
from forerun.core.inference import inference
from forerun.core.request import Requests, RequestState
from forerun.core.tree import Draft, Drafts
from forerun.models.architectures.families import LLAMA
from forerun.models.architectures.spec import ALL, Spec
from forerun.models.files.checkpoint import CONFIG
from forerun.models.formats import ON_CPU, make_linear
from forerun.models.run import parts
from forerun.models.run.base import Model
from forerun.models.run.fused import RAW, Decoder, Fused
from forerun.models.run.layer import Layer
from forerun.models.run.rotary import Rotary
from forerun.speculate.draft.base import DraftContext, drafters
from forerun.speculate.draft.chain import CatchUpConfig, ChainRunner, can_chain
from forerun.speculate.draft.heads.base import HeadConfig, HeadDrafter
from forerun.speculate.draft.heads.gguf_files import read_drafter
from forerun.speculate.draft.heads.head import (
    FeedForward,
    Guess,
    Head,
    Llama3Scaling,
    Norm,
    Sizes,
    TrainingBatch,
    frequencies,
    rotate,
)
from forerun.speculate.draft.levels import Frontier, StepsConfig, grow, newest_level

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
    - ``stretch``: the four numbers of ``Llama3Scaling``.
    """

    method = "eagle"
    quantizes = True
    options_known = frozenset(DEFAULTS) | {
        "layers", "draft_vocab_size", "own_head", "mixed", "norm_before_residual", "norm_before_fc", "fc_norm",
        "norm_output", "stretch",
    }  # fmt: skip

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.options = {**DEFAULTS, **sizes.options}
        size, o = sizes.hidden_size, self.options
        self.heads, self.kv_heads, self.width = o["heads"], o["kv_heads"], o["width"]
        self.entry, self.scale = KVShape(self.kv_heads, self.width, self.width), self.width**-0.5
        self.rope_scaling = Llama3Scaling(*o["stretch"]) if o.get("stretch") else None
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
        rotary = positions, self.options["theta"], self.rope_scaling
        q = rotate(q.unflatten(-1, (self.heads, self.width)), *rotary)
        k = rotate(k.unflatten(-1, (self.kv_heads, self.width)), *rotary)
        return q, k, self.v_proj(x).unflatten(-1, (self.kv_heads, self.width))

    def finish(self, feature: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        x = feature + self.o_proj(attended)
        return x + self.mlp(self.post_attention_layernorm(x))

    def step(
        self, embedded: torch.Tensor, feature: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor,
        attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """One pass over embeddings and features [n, hidden size]. Returns the next step's features and the normed
        states for the output layer, [len(rows), hidden size] each."""
        stream = self.enter(embedded, feature)
        return self.outputs(self.finish(stream, attend(*self.qkv(embedded, stream, positions)))[rows])

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

    @torch.no_grad()
    def fuse(self, target: Model) -> Fused | None:
        """Layer, final norm and output layer as one compiled call, if ``target`` runs as one."""
        if target.fused is None or self.options.get("norm_before_residual") or self.options.get("norm_output"):
            return None
        whole, info = target.fused.decoder, target.info
        dtype, device = info.dtype, info.device
        rope: Any = SimpleNamespace(rope_parameters={"rope_theta": self.options["theta"]})
        rotary = Rotary(rope, self.width, device, dtype)
        rotary.frequencies = frequencies(self.width, self.options["theta"], device, self.rope_scaling)

        def pack(weight: torch.Tensor) -> Any:
            kind = self.quantization
            return ON_CPU[kind].make(weight, None) if kind else make_linear(weight, None, "streamed")

        def linear(*parts: nn.Linear) -> Any:
            return pack(torch.cat([part.weight for part in parts]))

        def norm(part: Norm) -> Any:
            return parts.KernelNorm(part.weight, part.eps)

        qkv = torch.cat([part.weight for part in (self.q_proj, self.k_proj, self.v_proj)])
        layer = Layer(
            qkv=pack(rotary.arrange_rows(qkv, self.heads + self.kv_heads)),
            out=linear(self.o_proj),
            gate_up=linear(self.mlp.gate_proj, self.mlp.up_proj),
            down=linear(self.mlp.down_proj),
            norm_attention=norm(self.hidden_norm),
            norm_mlp=norm(self.post_attention_layernorm),
            norm_token=None if self.input_layernorm is None else norm(self.input_layernorm),
            kv_heads=self.kv_heads,
            head_dim=self.width,
        )
        head, cap = (whole.head, whole.spec.logits_softcap) if self.lm_head is None else (linear(self.lm_head), None)
        spec = Spec(LLAMA, info.hidden_size, self.heads, self.kv_heads, self.width, self.norm.eps, self.scale,
                    logits_softcap=cap)  # fmt: skip
        mix = None if self.mix is None else linear(self.mix)
        decoder = Decoder(spec, whole.embedding, [layer], norm(self.norm), head, {ALL: rotary}, mix=mix)
        return Fused(decoder) if decoder.can_fuse() and can_attend(dtype, device, (self.entry,)) else None

    @classmethod
    def read_public(cls, folder: Path, num_layers: int) -> tuple[Sizes, dict[str, torch.Tensor]]:
        """Reads an EAGLE-3 head. Raises ModelError for anything else."""
        config, weights = read_drafter(folder, "eagle3")
        layer = config.get("transformer_layer_config", config)
        if not isinstance(layer, Mapping):
            raise ModelError(f"{folder} is not an EAGLE-3 head: its transformer_layer_config is no object")
        if "fc.weight" not in weights or not any(name.startswith(PREFIXES) for name in weights):
            raise ModelError(f"{folder} is not an EAGLE-3 head: it has no fc.weight or no decoder layer")
        names = ("hidden_size", "num_attention_heads", "intermediate_size")
        lacking = [name for name in names if not isinstance(layer.get(name), int) or layer[name] < 1]
        vocabulary = config.get("vocab_size") or layer.get("vocab_size")
        if lacking or not isinstance(vocabulary, int):
            raise ModelError(f"{folder}: its {CONFIG} lacks {', '.join(lacking) or 'vocab_size'}")
        try:
            sizes = Sizes(weights["fc.weight"].shape[0], vocabulary, num_layers, 16, _options(config, layer, weights))
        except ModelError as error:
            raise ModelError(f"{folder} is not an EAGLE-3 head: {error}") from error
        kept = {_rename(name): tensor for name, tensor in weights.items() if name not in IGNORED}
        if "q_proj.weight" in kept and kept["q_proj.weight"].shape[1] == sizes.hidden_size:
            raise ModelError(f"{folder} is a head of EAGLE or EAGLE-2, without the token's embedding; EAGLE-3 is read")
        if "d2t" in kept:
            indices = kept["d2t"].long() + torch.arange(len(kept["d2t"]))
            if indices.dim() != 1 or not bool(((indices >= 0) & (indices < vocabulary)).all()):
                raise ModelError(f"{folder}: its d2t names tokens outside a vocabulary of {vocabulary}")
        return sizes, kept


@dataclass(frozen=True)
class EagleConfig(StepsConfig, HeadConfig, CatchUpConfig):
    """Options of a head and of trees."""

    prefill_chunk: int = 128
    """As for a draft model, but a row costs more: features are as wide as the target's."""


@drafters.register("eagle")
class Eagle(HeadDrafter[EagleConfig]):
    name = "eagle"
    config_class = EagleConfig
    head_class: ClassVar[type[Head]] = EagleHead
    per_sequence = ("seen", "skipped", "pending")
    pending: dict[int, list[torch.Tensor]]
    head: Any

    def __init__(self, config: EagleConfig, context: DraftContext) -> None:
        super().__init__(config, context)
        info = context.target.info
        longest = context.max_model_len + config.rows_by_depth()[-1]
        page_size = (context.options or {}).get("page_size") or longest
        pages = context.max_num_seqs * -(-longest // page_size)
        self.fused, self.packed = self.head.fuse(context.target), self.head.packed
        backend: type[Attention] = SdpaAttention if self.fused is None else KernelAttention
        self.attention = backend(Pool([self.head.entry], pages, page_size, info.dtype, info.device))
        self.tree = PrefixTree(self.attention.pool) if context.prefix_caching else None
        self.chains = self._find_chains()

    def _find_chains(self) -> ChainRunner | None:
        ids = self.head.token_ids()
        return ChainRunner.find(
            self.fused, self.attention, self.chooser, self.config, feeds_hidden=True, output_ids=ids
        )

    def add_features(self, sequence: RequestState, rows: torch.Tensor) -> None:
        """Keeps rows until the token after each of them is known and the layer has read them."""
        self.pending.setdefault(sequence.id, []).append(rows.clone())

    def learn(self) -> None:
        super().learn()
        if self.packed != self.head.packed and self.fused is not None:
            self.fused, self.packed = self.head.fuse(self.context.target), self.head.packed
            self.chains = self._find_chains()

    @inference
    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        self.learn()
        nodes = self.config.rows_by_depth()
        fitting = [
            index
            for index, (sequence, depth) in enumerate(zip(sequences, budgets))
            if self.ready(sequence) and self._fits(sequence, nodes[depth] * len(sequence.sequences))
        ]
        drafts = [Draft() for _ in sequences]
        if not fitting:
            return drafts
        spans, feature, ready = self._missing(sequences, fitting)
        chosen = [sequences[index] for index in ready]
        if not ready:
            self._run(spans, feature)
        elif self.chains is not None and all(map(can_chain, chosen)):
            batch = Batch(spans, self.context.target.info.device)
            drafts = self.chains.draft(sequences, ready, budgets, batch, self.attention, feature)
        else:
            drafts = self._grow(sequences, budgets, ready, spans, feature)
        for sequence in chosen:
            self.attention.pool.truncate(sequence.id, self._end(sequence))
        for index in fitting:
            self._keep(sequences[index])
        return drafts

    def _end(self, sequence: RequestState) -> int:
        """How many entries its cache has if it has read all committed tokens."""
        return len(sequence.tokens) - 1 - self.skipped[sequence.id]

    def _fits(self, sequence: RequestState, rows: int) -> bool:
        """Reserves pages for its tokens and ``rows`` drafted ones; False if there are none. A new sequence starts from
        the prefix cache. Its entries are those that the target's tokens have there, as far as they were read."""
        pool, skipped = self.attention.pool, self.skipped[sequence.id]
        if skipped and self.tree is not None and sequence.id not in pool.block_tables:
            self.skipped[sequence.id] -= self.tree.match_prefix(sequence.id, sequence.tokens, skipped)
        return pool.try_reserve(sequence.id, self._end(sequence) + 1 + rows)

    def _keep(self, sequence: RequestState) -> None:
        """Adds its entries to the prefix cache, unless some are missing among them. The last one of a prefix may be of
        another text: it holds the token after that prefix."""
        if self.tree is not None and not self.skipped[sequence.id]:
            self.tree.insert(sequence.id, sequence.tokens, self.attention.pool.length(sequence.id))

    @inference
    def release(self, sequence: RequestState) -> None:
        """Reads what its last round left behind, so that the text's next reader finds all of it."""
        behind = sequence.id in self.pending and self.seen[sequence.id] >= len(sequence.tokens) - 1
        works = sequence.drafter is not None and sequence.group is None and self.tree is not None
        if behind and works and self._fits(sequence, 0):
            spans, feature, _ = self._missing([sequence], [0])
            self._run(spans, feature)
            self._keep(sequence)
        super().release(sequence)

    def _grow(
        self, sequences: Requests, budgets: Sequence[int], ready: list[int], spans: list[Span], feature: torch.Tensor
    ) -> list[Draft]:
        states: dict[tuple[int, int], torch.Tensor] = {}

        def score(depth: int, frontier: Frontier, drafts: Drafts) -> torch.Tensor:
            if depth:
                read = newest_level(sequences, frontier, drafts, self._end)
                features = torch.stack([states[index, drafts[index].parents[node]] for index, node in frontier])
            out, logits = self._run(read, features) if depth else self._run(spans, feature)
            states.update(zip(frontier, out))
            return logits

        return grow(sequences, ready, budgets, self.config, self.chooser, score)[0]

    def _run(self, spans: list[Span], feature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass of the layer over the spans' tokens and their ``feature`` rows [rows, hidden size]. Returns its
        output and the logits, for the rows whose logits the spans ask for."""
        batch = Batch(spans, self.context.target.info.device, hidden=(RAW,))
        if self.fused is not None:
            assert isinstance(self.attention, KernelAttention)
            out = self.fused(batch, self.attention, feature)
            return out.hidden[RAW], self.to_target_ids(out.logits)
        embedded = self.context.target.embed(batch.input_ids).to(feature.dtype)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            metadata = self.attention.begin(batch)
            attended = self.attention.run(Query(0, q, k, v, self.head.scale), metadata)
            self.attention.finish(metadata)
            return attended

        states, read = self.head.step(embedded, feature, batch.positions, batch.logit_rows, attend)
        return states, self.predict(read)

    def _missing(self, sequences: Requests, fitting: Sequence[int]) -> tuple[list[Span], torch.Tensor, list[int]]:
        """Spans to prefill now, their features, and the indices of the sequences that then have no backlog and can
        draft."""
        spans: list[Span] = []
        rows: list[torch.Tensor] = []
        ready: list[int] = []
        starts = [self.attention.pool.length(sequences[index].id) for index in fitting]
        missing = [self._end(sequences[index]) - start for index, start in zip(fitting, starts)]
        for index, start, backlog, count in zip(fitting, starts, missing, self.config.shares(missing)):
            if not count:
                continue
            sequence = sequences[index]
            pending = self.pending.pop(sequence.id)
            features = pending[0] if len(pending) == 1 else torch.cat(pending)
            rows.append(features[:count])
            if count == backlog:
                ready.append(index)
            else:
                self.pending[sequence.id] = [features[count:]]
            first = self.skipped[sequence.id] + start + 1
            tokens = sequence.tokens[first : first + count]
            spans.append(Span(sequence.id, start, tokens, logits=[count - 1] if count == backlog else []))
        return spans, self.head.feature(torch.cat(rows)).contiguous(), ready

    def pools(self) -> list[Pool]:
        return [self.attention.pool]


NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Options that are keys of published configs, too."""
PREFIXES = ("midlayer.", "layers.0.")
IGNORED = {"t2d", "embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
"""The inverse of d2t, and copies of the target's weights."""


def _rename(name: str) -> str:
    for prefix in PREFIXES:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
    return name.removeprefix("self_attn.")


def _options(config: Mapping[str, Any], layer: Mapping[str, Any], weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The head's options, from a checked config."""
    heads, rope, eagle = layer["num_attention_heads"], layer.get("rope_parameters"), config.get("eagle_config")
    rope = rope if isinstance(rope, Mapping) else {}
    eagle = eagle if isinstance(eagle, Mapping) else {}
    options: dict[str, Any] = {
        "heads": heads,
        "kv_heads": layer.get("num_key_value_heads") or heads,
        "width": layer.get("head_dim") or layer["hidden_size"] // heads,
        "inner_size": layer["intermediate_size"],
        "theta": rope.get("rope_theta") or layer.get("rope_theta") or 10000.0,
        "eps": layer.get("rms_norm_eps", 1e-5),
        "own_head": "lm_head.weight" in weights,
        "draft_vocab_size": weights["d2t"].shape[0] if "d2t" in weights else None,
    }
    tensors = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}
    for name in NORMS:
        if config.get(name) or eagle.get(name) or tensors.get(name) in weights:
            options[name] = True
    if scaling := _rope_scaling(rope or layer.get("rope_scaling") or {}):
        options["stretch"] = scaling
    ids, nested = config.get("eagle_aux_hidden_state_layer_ids"), eagle.get("eagle_aux_hidden_state_layer_ids")
    if isinstance(nested, list) and not ids and all(type(each) is int for each in nested):
        ids = [each + 1 for each in nested]  # SGLang's id i is the output of layer i
    if ids or nested:
        options["layers"] = ids or nested
    return options


def _rope_scaling(rope: Any) -> list[float] | None:
    """The numbers of ``Llama3Scaling``; None for the default. Raises ModelError for other kinds."""
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else shown(rope)
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if kind == "default":
        return None
    numbers = [rope.get(name) for name in names] if kind == "llama3" else []
    if not numbers or not all(map(POSITIVE.permits, numbers)) or not numbers[1] < numbers[2]:
        raise ModelError(f"an EAGLE-3 head supports the default RoPE and llama3, not {shown(rope)}")
    return numbers

"""Decoders that ``architectures`` describes, without modules.

The arithmetic is transformers' up to rounding. Query, key and value projections are one matrix, gate and up another;
rotary tables are computed once; nothing in the loop is an ``nn.Module``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from forerun.attention.base import Attention, Metadata, Query
from forerun.attention.kernel import AttentionPlan, KernelAttention
from forerun.core.batch import Batch, Output
from forerun.core.errors import ModelError
from forerun.core.inference import inference
from forerun.core.loading import watch
from forerun.kernels import gpu
from forerun.models import formats
from forerun.models.architectures.spec import ALL, OUTSIDE, bind, refusal, with_window
from forerun.models.formats import choose, describe, prefetch
from forerun.models.formats.base import Linear, size
from forerun.models.ranks import split
from forerun.models.ranks.team import Gathered, SplitEmbedding, Team
from forerun.models.run import activations
from forerun.models.run.base import LoadRequest, MixtureInfo, ModelInfo, Tiles
from forerun.models.run.experts import Experts
from forerun.models.run.fused import RAW, Decoder, Fused
from forerun.models.run.layer import Builder, LatentHeads, Layer, LayerTable
from forerun.models.run.parts import KernelGate, make_gate, softcap
from forerun.models.run.recurrent import lay_out
from forerun.models.run.rotary import Angles, Rotary
from forerun.models.weights import tiling
from forerun.models.weights.layout import Maker
from forerun.models.weights.tiling import TiledModel
from forerun.models.weights.transform import Weights

if TYPE_CHECKING:
    from forerun.models.run.graphs import Graphs, Steps


@dataclass(slots=True)
class Pass:
    """What the layers of one forward share."""

    attention: Attention
    metadata: Metadata
    angles: Mapping[str, Angles]
    states: Any
    """States of recurrent layers, and how to replay them."""
    replay: Any
    per_layer: torch.Tensor | None
    """Per-layer embeddings [rows, layers, width], if the model has them."""
    experts: int = 0
    """Experts read so far."""
    kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Keys and values by layer, in a model whose layers read those of others."""


class NativeModel(TiledModel):
    """A described decoder behind the engine's protocol.

    Args:
        tensors: the checkpoint's weights.
        requested: how to load them. ``outputs`` (int64, ascending) are the tokens to compute logits of; None: all.
        team: the ranks among which the model is split. This object is then this rank's shard.

    Raises:
        ModelError: no description covers ``config``.
    """

    def __init__(self, config: Any, tensors: Weights, requested: LoadRequest, team: Team | None = None) -> None:
        reason = refusal(config)
        if reason is not None:
            raise ModelError(f"the native path does not run this checkpoint: {reason}; use the transformers path")
        self._vocab_size = config.vocab_size
        self.spec, self.team = with_window(bind(config), requested.window), team
        if team is not None:
            tensors = split.SplitWeights(tensors, self.spec, config, team.rank, team.size)
            self.spec = split.own(self.spec, team.size)
        self.routes = any(layer.experts for layer in self.spec.layers)
        self.dtype, self.device = requested.dtype, requested.device
        self.invariant = requested.invariant is not False
        how = choose(self.dtype, self.device, requested.weights)
        self._kernels = how == "streamed"
        form = formats.check(requested.quantization, self.device, self.dtype, invariant=self.invariant)
        self._rotaries = {name: self._rotary(config, name) for name in self.spec.rotaries}
        with torch.inference_mode(), watch.get()(requested.name, tensors.nbytes) as advance:
            maker = Maker(tensors, self.dtype, self.device, how, form, advance, requested.numbers)
            if isinstance(tensors, split.SplitWeights):
                tensors.refuses_blocks = maker.reads_blocks
            self._build(maker, requested.outputs)
        self.info = self._describe(config, requested)
        compiled = self._compile()
        prefetch.autotune(self.linears(), self.dtype)
        if self.device.type == "cuda" and gpu.serves(self.device):
            from forerun.models.formats import triton

            triton.autotune(self.linears(), torch.cuda.get_device_name(self.device))
        self.fused = compiled if team is None else None
        """The whole decoder in one call, if every part has a kernel."""
        self.ranges = compiled if team is not None else None
        """This rank's layers in one call."""
        self.graphs = self._make_graphs()
        """Forwards of few rows as CUDA graphs, on a GPU."""
        exact = self._exact()
        if requested.invariant is None:
            self.invariant = exact
        if self.invariant and (team is None or team.leads) and not exact:
            self.tiles = self.find()

    def find(self) -> Tiles:
        with nullcontext() if self.team is None else self.team.apart():  # shards have one shape on every rank
            return super().find()

    def _rotary(self, config: Any, name: str) -> Rotary:
        latent = self.spec.latent
        interleaved = self.spec.architecture.attention.interleaved if latent is None else latent.interleaved
        layers = [index for index, layer in enumerate(self.spec.layers) if layer.rotary == name]
        width = self.spec.at(layers[0]).head_dim if layers else self.spec.head_dim
        return Rotary(config, width, self.device, self.dtype, None if name == ALL else name, interleaved=interleaved)

    def _build(self, maker: Maker, outputs: torch.Tensor | None) -> None:
        spec, names = self.spec, self.spec.architecture
        activation = partial(
            make_gate, spec.activation, self.dtype, kernels=self._kernels, invariant=self.invariant,
            gated=names.mlp.gated, params=torch.tensor(spec.activation_params) if spec.activation_params else None,
        )  # fmt: skip
        builder = Builder(spec, maker, self._rotaries, activation, kernels=self._kernels, team=self.team)
        self._layers = [builder.layer(index) for index in range(len(spec.layers))]
        for layer in self._layers:
            layer.fuse(spec.activation if names.mlp.gated else "not gated", parallel=names.parallel)
        self._norm = builder.norm(names.norm.checkpoint)
        self._sigmoid_gate = KernelGate("sigmoid", self.dtype) if self._kernels else None
        """sigmoid(gate) * output of [gate, output], of attention or of the MLP beside experts, as a kernel."""
        self._shares_kv = any(layer.kv_source is not None for layer in spec.layers)
        self._table: LayerTable | None = None
        if spec.per_layer_width and (table := names.per_layer) is not None:
            self._table = LayerTable(
                maker.embedding(table.table.checkpoint, None, self._rounded(spec.per_layer_width**0.5)),
                maker.linear(table.project.checkpoint),
                builder.norm(table.norm.checkpoint),
                spec.per_layer_width,
            )
        self._build_ends(builder, outputs)

    def _build_ends(self, builder: Builder, outputs: torch.Tensor | None) -> None:
        """Embedding and output layer."""
        spec, names, maker = self.spec, self.spec.architecture, builder.maker
        tied = f"{names.head.checkpoint}.weight" not in maker.weights
        source = (names.embedding if tied else names.head).checkpoint
        self._head = maker.linear(source, order=[] if outputs is None else [lambda rows: rows[outputs]])
        shared = self._head if tied and outputs is None else None
        scale = self._rounded(spec.embedding_scale) if names.embedding_scale == "root" else spec.embedding_scale
        self._embedding = maker.embedding(names.embedding.checkpoint, shared, scale)
        self._num_logits = self._embedding.count if outputs is None else len(outputs)
        if self.team is not None:
            self._head = Gathered(self._head, self.team, self._vocab_size)
            self._embedding = SplitEmbedding(self._embedding, self.team, self._vocab_size)

    def _rounded(self, scale: float) -> float:
        """A scale as Gemma's authors round it: to the model's dtype."""
        return float(torch.tensor(scale, dtype=self.dtype))

    def _compile(self) -> Fused | None:
        if self.team is not None and self.spec.states:
            return None
        total = None if self.team is None else self.team.sum
        ends = self._norm, self._head, self._rotaries
        decoder = Decoder(self.spec, self._embedding, self._layers, *ends, total=total, table=self._table)
        return Fused(decoder) if decoder.can_fuse() else None

    def _make_graphs(self) -> Graphs | None:
        """None if a layer asks the host, or is split over ranks."""
        if not gpu.serves(self.device):
            return None
        layers = self._layers
        parts: dict[str, list[Any]] = {
            "layers with state": [each.mixer for each in layers], "experts": [each.experts for each in layers],
            "latent attention": [each.latent for each in layers], "embeddings of layers": [self._table],
            "tensor parallelism": [self.team],
        }  # fmt: skip
        asks = [name for name, every in parts.items() if any(part is not None for part in every)]
        if asks:
            gpu.warn(f"no CUDA graphs, so that launches take most of the time: {' and '.join(asks)} ask the host")
            return None
        from forerun.models.run.graphs import Graphs

        return Graphs(self.device)

    def _at(self, size: int) -> tuple[int, ...]:
        """Where its tables of ``size`` positions are."""
        return tuple(each.table(size).data_ptr() for each in self._rotaries.values())

    def _exact(self) -> bool:
        """Whether our kernels compute every sum, and torch's functions, where they run, round alike at every index."""
        if gpu.serves(self.device):
            return self.graphs is not None and all(linear.exact for linear in self.linears())
        norms = [self._norm, *(norm for layer in self._layers for norm in layer.norms())]
        norms += [] if self._table is None else [self._table.norm]
        fused = self.fused is not None or self.ranges is not None
        return tiling.ordered(self.info, self.linears(), norms) and (fused or tiling.steady())

    def _describe(self, config: Any, requested: LoadRequest) -> ModelInfo:
        layers = list(self.linears())
        held = size(layers)
        mixtures = [layer.experts for layer in self._layers if layer.experts is not None]
        idle = sum(each.nbytes * (each.count - each.routing.top_k) // each.count for each in mixtures)
        table_bytes = 0 if self._table is None else self._table.table.nbytes
        return ModelInfo(
            name=requested.name,
            architecture=self.spec.architecture.causal,
            path=f"native, {describe(layers, self.dtype)}" + ("" if self.team is None else f", {self.team.size} ranks"),
            vocab_size=self._embedding.count,
            hidden_size=self.spec.hidden,
            num_layers=len(self._layers),
            max_len=int(config.max_position_embeddings),
            kv_shapes=tuple(self.spec.kv_shape(index) for index in range(len(self._layers))),
            state_shapes=self.spec.states,
            dtype=self.dtype,
            device=self.device,
            eos_ids=requested.eos_ids,
            weight_bytes=held + self._embedding.nbytes + table_bytes,
            token_bytes=held - idle,
            quantization=requested.quantization,
            outputs=requested.outputs,
            mixture=None if self.team is not None or not mixtures else MixtureInfo(
                mixtures[0].count, mixtures[0].routing.top_k, len(mixtures),
                (sum(experts.nbytes for experts in mixtures) - idle) / (held - idle),
            ),
        )  # fmt: skip

    def linears(self) -> Iterable[Linear]:
        for layer in self._layers:
            yield from layer.linears()
        if self._table is not None:
            yield self._table.project
        yield self._head

    @inference
    def forward(self, batch: Batch, attention: Attention) -> Output:
        self._check(batch)
        if self.fused is not None and isinstance(attention, KernelAttention):
            return self.fused(batch, attention)
        return self._in_graph(batch, attention) or super().forward(batch, attention)

    def _in_graph(self, batch: Batch, attention: Attention) -> Output | None:
        """A forward as a CUDA graph, if one holds the batch."""
        if self.graphs is None or self.tiles is not None or not self.graphs.serves(batch, attention):
            return None
        return self.graphs(batch, attention, partial(self.feed_begun, attention=attention), self._at)

    def _check(self, batch: Batch) -> None:
        """Raise ModelError for input rows without token ids, if layers embed tokens, and for a choice of layers that
        leaves out one whose keys and values are read."""
        name = self.info.architecture
        if self._table is not None and batch.embeds is not None:
            raise ModelError(f"{name} embeds tokens for each layer: it cannot be given other rows")
        chosen = batch.layers if self._shares_kv and batch.layers is not None else ()
        for index in chosen:
            source = self._layers[index].kv_source
            if source not in (None, OUTSIDE, *chosen):
                missing = f"layer {index} reads the keys and values of layer {source}, which is left out"
                raise ModelError(f"{name}: {missing}")

    def feed(self, batch: Batch, attention: Attention) -> Output:
        """A forward layer by layer, its rows padded to a call's size if the model is tiled."""
        metadata, team = attention.begin(batch), self.team
        with nullcontext() if team is None else team.feeding(batch, attention, self.tiles, invariant=self.invariant):
            return self.feed_begun(batch, metadata, attention)

    def steps(self, attention: Attention) -> Steps | None:
        """How chains are drafted without the host, if they can be."""
        if self.graphs is None or self.tiles is not None:
            return None
        from forerun.models.run.graphs import Steps

        body = partial(self.feed_begun, attention=attention)
        return Steps(self.graphs, self._at, self.forward, body, self._num_logits)

    def feed_begun(self, batch: Batch, metadata: Metadata, attention: Attention) -> Output:
        """A forward layer by layer, for which attention has begun."""
        x, last, experts = self._inputs(batch), len(self._layers), 0
        rows, normed = self._logit_rows(batch), last in batch.hidden
        if self.ranges is not None and isinstance(attention, KernelAttention) and isinstance(metadata, AttentionPlan):
            hidden = self.ranges.through(batch, attention, metadata, x)
            raw = hidden.pop(RAW)
            x = hidden[last] if normed else raw
        else:
            x, hidden, experts = self._through(batch, attention, metadata, x, None if normed else rows)
            if RAW in batch.hidden:
                hidden[RAW] = x[: batch.num_logits]
        if normed:
            x = x if rows is None else x.index_select(0, rows)
        if not batch.num_logits:
            return Output(x.new_zeros(0, self._num_logits, dtype=torch.float32), hidden, experts)
        x = (x if normed else self._norm(x))[: batch.num_logits]
        return Output(self._score(x), hidden, experts)

    def _score(self, x: torch.Tensor) -> torch.Tensor:
        """Float32 logits of normed states."""
        return self._scale_logits(self._head(self.pad_logits(x))[: len(x)].float())

    def _inputs(self, batch: Batch) -> torch.Tensor:
        x = self._embedding(batch.input_ids)
        if batch.embeds is not None:
            x[batch.embed_rows] = batch.embeds.to(x.dtype)
        return self.pad(x)

    def _logit_rows(self, batch: Batch) -> torch.Tensor | None:
        """The padded batch's rows to compute logits of; None: all of them."""
        if batch.scores_all:
            return None
        rows = batch.logit_rows
        return rows if not len(rows) else self.pad(rows[:, None])[:, 0]

    def _scale_logits(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self.spec.logits_softcap
        if self.spec.logits_scale != 1.0:
            logits = logits * self.spec.logits_scale
        if cap is None:
            return logits
        return softcap(logits, cap) if self._kernels else torch.tanh(logits / cap).mul_(cap)

    def _through(
        self, batch: Batch, attention: Attention, metadata: Metadata, x: torch.Tensor, kept: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor], int]:
        """Run the batch's layers. After attention of the last one, only the rows ``kept`` go on.

        Returns:
            The last layer's output, normed if the batch asks for that; the hidden states that it asks for; and how many
            experts were read.
        """
        hidden: dict[int, torch.Tensor] = {}
        angles = {name: rotary.angles(batch) for name, rotary in self._rotaries.items()}
        layers: Sequence[int] = range(len(self._layers)) if batch.layers is None else batch.layers
        states, replay, laid_out = attention.states, None, None
        if states is not None:
            replay = states.plan(batch)
            laid_out = lay_out(replay, states, batch.num_rows) if self._kernels else replay
        per_layer = None if self._table is None else self._table(x, self.pad(self._table.table(batch.input_ids)))
        run = Pass(attention, metadata, angles, states, laid_out, per_layer)
        for index in layers:
            if index in batch.hidden:
                hidden[index] = x[: batch.num_rows]
            x = self._run(index, x, kept if index == layers[-1] else None, run)
        attention.finish(metadata)
        if states is not None and replay is not None:
            states.commit(replay)
        if len(self._layers) in batch.hidden:
            x = self._norm(x)
            hidden[len(self._layers)] = x[: batch.num_rows]
        return x, hidden, run.experts

    # For Llama, and with torch in place of the kernels' fused calls, this is
    #
    #     normed = rms_norm(x)                                       layer.norm_attention
    #     q, k, v = (normed @ qkv.T).split(...)                      layer.qkv; _attend: apply_rotary to q and k
    #     x = x + attention(q, k, v, cache) @ out.T                  the cache gets k and v first; layer.out adds x
    #     x = x[kept]                                                of the last layer, only rows that need logits
    #     normed = rms_norm(x)                                       layer.norm_mlp
    #     gate, up = (normed @ gate_up.T).chunk(2)                   layer.gate_up
    #     x = x + (silu(gate) * up) @ down.T                         layer.activation, layer.down
    #
    # Other families add to it: norms after a part (Gemma), a mixer beside or in place of attention (Qwen3.5, LFM2),
    # experts in place of the MLP (Mixtral), latent attention (DeepSeek), an MLP beside attention (Cohere 2).
    def _run(self, index: int, x: torch.Tensor, kept: torch.Tensor | None, run: Pass) -> torch.Tensor:
        """One layer's output; after attention, only the rows ``kept`` go on."""
        layer, count = self._layers[index], run.metadata.batch.num_rows
        normed = x if layer.norm_attention is None else layer.norm_attention(x)
        if layer.norm_token is not None:
            token = layer.norm_token(self.pad(self.embed(run.metadata.batch.input_ids)))
            normed = torch.cat([token, normed], -1)

        def select(rows: torch.Tensor) -> torch.Tensor:
            if kept is not None:
                return rows.index_select(0, kept)
            return self.pad(rows) if rows.shape[0] != x.shape[0] else rows

        mixed = attended = None
        if layer.mixer is not None:
            mixed = select(layer.mixer(layer.mixer_in(normed)[:count], run.states, run.replay))
        if layer.qkv is not None:
            qkv = layer.qkv(normed)
            attended = select(self._attend(layer, index, qkv[:count] if layer.latent is None else qkv, run))
        x = select(x)
        if mixed is not None:
            x = self._add(layer.mixer_out, mixed, None, x)
        if attended is not None:
            x = self._add(layer.out, attended, layer.after_attention, x)
        if layer.gate_up is None and layer.experts is None:
            return x
        if self.spec.architecture.parallel:
            normed = normed if kept is None else normed.index_select(0, kept)
        else:
            normed = x if layer.norm_mlp is None else layer.norm_mlp(x)
        if layer.experts is not None:
            output = self._mixture(layer, layer.experts, normed, x, run)
            x = self._scaled_add(output, x) if layer.after_mlp is None else layer.after_mlp(output, x)
        else:
            x = self._add(layer.down, layer.activation(layer.gate_up(normed)), layer.after_mlp, x)
        if layer.per_layer_gate is not None:
            assert run.per_layer is not None
            embedding = run.per_layer[:, index] if kept is None else run.per_layer[:, index].index_select(0, kept)
            gated = layer.activation(torch.cat([layer.per_layer_gate(x), embedding], 1))
            x = self._add(layer.per_layer_out, gated, layer.after_inputs, x)
        return x if layer.scale is None else x * layer.scale

    def _add(self, linear: Linear, rows: torch.Tensor, norm: Any, x: torch.Tensor) -> torch.Tensor:
        """x + linear(rows), the latter normed if there is a ``norm``."""
        if norm is not None:
            result: torch.Tensor = norm(linear(rows), x)
            return result
        return linear(rows, x) if self.spec.residual_scale == 1.0 else self._scaled_add(linear(rows), x)

    def _scaled_add(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        scale = self.spec.residual_scale
        return x + (output if scale == 1.0 else output * scale)

    def _mixture(
        self, layer: Layer, experts: Experts, normed: torch.Tensor, x: torch.Tensor, run: Pass
    ) -> torch.Tensor:
        """The output of experts, and of the MLP beside them, for rows x whose norm is ``normed``."""
        sizes, own_norms = None if self.tiles is None else self.tiles.rows, layer.norm_experts is not None
        inputs = (layer.norm_experts(x), sizes, layer.norm_router(x)) if own_norms else (normed, sizes)
        output, read = experts(*inputs)
        run.experts += read
        if layer.gate_up is None:
            return output
        dense: torch.Tensor = layer.down(layer.activation(layer.gate_up(normed)))
        if own_norms:
            both: torch.Tensor = layer.after_experts(output, layer.after_beside(dense))
            return both
        if layer.shared_gate is None:
            return output + dense
        return output + self._gate(layer.shared_gate(normed), dense)

    def _gate(self, gate: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        if self._sigmoid_gate is None:
            return output * activations.sigmoid(gate)
        return self._sigmoid_gate(torch.cat([gate.expand_as(output), output], 1))

    def _attend(self, layer: Layer, index: int, qkv: torch.Tensor, run: Pass) -> torch.Tensor:
        """Attention's output [rows, heads * head_dim], before the output projection."""
        if layer.latent is not None:
            return self._attend_latents(layer, layer.latent, index, qkv, run)
        attended = self.spec.heads * layer.head_dim
        qkv, gate = (qkv[:, :-attended], qkv[:, -attended:]) if layer.gated else (qkv, None)
        q, k, v = self._heads(layer, qkv, run)
        if self._shares_kv and layer.kv_source is None:
            run.kv[index] = k, v
        elif layer.kv_source not in (None, OUTSIDE):  # attention stores them again: the same bits
            index = layer.kv_source
            k, v = run.kv[index]
        q = self._scale_query(q, run.metadata.batch)
        sizes = self.spec.scale, layer.window, self.spec.softcap, None, layer.sinks, layer.causal, layer.sink_tokens
        out = run.attention.run(Query(index, q, k, v, *sizes), run.metadata)
        return out if gate is None else self._gate(gate, out[: len(gate)])

    def _attend_latents(
        self, layer: Layer, latent: LatentHeads, index: int, first: torch.Tensor, run: Pass
    ) -> torch.Tensor:
        """The same for latent attention. Rows stay padded for the projections of heads."""
        batch = run.metadata.batch
        q, k = latent.project(first, batch.num_rows, partial(self._rotate, layer, run=run))
        v = k[..., : latent.sizes.rank]
        sizes = self.spec.scale, layer.window, self.spec.softcap
        query = Query(index, self._scale_query(q, batch), k, v, *sizes, sink_tokens=layer.sink_tokens)
        return latent.output(self.pad(run.attention.run(query, run.metadata)))

    def _scale_query(self, q: torch.Tensor, batch: Batch) -> torch.Tensor:
        factors = None if self.spec.query_scaling is None else self.spec.query_scaling.factors(batch.positions)
        return q if factors is None else q * factors.to(q.dtype)[:, None, None]

    def _rotate(self, layer: Layer, heads: torch.Tensor, run: Pass) -> torch.Tensor:
        """Heads [rows, heads, head_dim] with their rotary embedding, if the layer has one."""
        if layer.rotary is None:
            return heads
        return self._rotaries[layer.rotary].apply_rotary(heads, run.angles[layer.rotary])

    def _heads(self, layer: Layer, qkv: torch.Tensor, run: Pass) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [rows, heads, head_dim], normed and rotated."""
        norms, norm, rotate = self.spec.architecture.norms, layer.norm_qk, partial(self._rotate, layer, run=run)
        heads, kv_heads, width = self.spec.heads, layer.own_kv_heads, layer.head_dim
        every = qkv.view(qkv.shape[0], heads + 2 * kv_heads, width)
        if norm is not None and norms.norm_values:
            every, norm = norm(every), None
        qk, v = every.split_with_sizes((heads + kv_heads, kv_heads), 1)
        if layer.norm_query is not None:
            query, key = qkv[:, : heads * width], qkv[:, heads * width : (heads + kv_heads) * width]
            q, k = layer.norm_query(query).view(-1, heads, width), layer.norm_key(key).view(-1, kv_heads, width)
            return rotate(q), rotate(k), v
        if norm is None:
            qk = rotate(qk)
        else:
            qk = norm(rotate(qk)) if norms.after_rotary else rotate(norm(qk))
        q, k = qk.split_with_sizes((heads, kv_heads), 1)
        return q, k, v

    @inference
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        with nullcontext() if self.team is None else self.team.calling("embed", ids):
            return self._embedding(ids)

    @inference
    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        with nullcontext() if self.team is None else self.team.calling("lm_head", hidden):
            return self._scale_logits(self._head(hidden.to(self.dtype)).float())

    def signature(self) -> str:
        parts = {(linear.kind, linear.nbytes) for linear in self.linears()}
        return repr((self.spec, self.info.vocab_size, self.info.path, self.dtype, self.device.type, sorted(parts)))

    def kinds(self) -> list[tuple[int, ...] | None]:
        """Layers that stand for all: one for each choice of shapes, formats and parts."""
        result: dict[str, int] = {}
        for index, layer in enumerate(self._layers):
            parts = [(linear.kind, linear.nbytes) for linear in layer.linears()]
            missing = tuple(part is None for part in (layer.norm_qk, layer.mixer, layer.qkv, layer.gate_up))
            kind = parts, missing, layer.window, layer.rotary, layer.kv_source is None, layer.head_dim
            result.setdefault(repr(kind), index)
        sources = ((self._layers[index].kv_source, index) for index in result.values())
        return [(index,) if source is None else (source, index) for source, index in sources]

"""Decoders that ``architectures`` describes, without modules.

Same arithmetic as transformers up to rounding: query, key and value are one matrix, gate and up another; rotary
tables are computed once; nothing in the loop is an ``nn.Module``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from forerun.attention.base import Attention, Metadata, Query
from forerun.attention.kernel import AttentionPlan, KernelAttention
from forerun.core.batch import Batch, Output
from forerun.core.errors import ModelError
from forerun.core.inference import inference
from forerun.core.loading import watch
from forerun.models import activations, formats, tiling
from forerun.models.architectures.spec import ALL, OUTSIDE, applies, bind
from forerun.models.base import LoadRequest, MixtureInfo, ModelInfo, Tiles
from forerun.models.experts import Experts
from forerun.models.formats import choose, describe, prefetch
from forerun.models.formats.base import Linear, size
from forerun.models.fused import RAW, Decoder, Fused
from forerun.models.layer import Builder, LatentHeads, Layer, LayerTable
from forerun.models.layout import Maker
from forerun.models.parts import KernelGate, make_gate, softcap
from forerun.models.ranks import split
from forerun.models.ranks.team import Gathered, SplitWords, Team
from forerun.models.recurrent import lay_out
from forerun.models.rotary import Rotary
from forerun.models.tiling import TiledModel
from forerun.models.transform import Weights


@dataclass(slots=True)
class Pass:
    """What the layers of one forward read beside their rows."""

    attention: Attention
    metadata: Metadata
    angles: Mapping[str, torch.Tensor]
    states: Any
    """Of layers that keep some, and how they are replayed."""
    replay: Any
    inputs: torch.Tensor | None
    """[rows, layers, numbers]: per-layer embeddings, if the model has some."""
    experts: int = 0
    """How many were read so far."""
    entries: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Keys and values of the layers so far, in a model whose layers read those of others."""


class NativeModel(TiledModel):
    """A described decoder behind the engine's protocol, made of ``tensors`` as ``requested``; with a ``team``, this
    rank's part of it, and ``info`` tells of that. ``requested.outputs`` int64: the tokens that its logits are of, in
    ascending order; None: all. Raises ModelError for a config that no description covers."""

    def __init__(self, config: Any, tensors: Weights, requested: LoadRequest, team: Team | None = None) -> None:
        reason = applies(config)
        if reason is not None:
            raise ModelError(f"the native path does not run this checkpoint: {reason}; use the transformers path")
        self._tokens = config.vocab_size
        self.spec, self.team = bind(config), team
        if team is not None:
            tensors = split.SplitWeights(tensors, self.spec, team.rank, team.size)
            self.spec = split.own(self.spec, team.size)
        self.routes = any(layer.experts for layer in self.spec.layers)
        self.dtype, self.device = requested.dtype, requested.device
        self.invariant = bool(requested.invariant)
        self._how = choose(self.dtype, self.device, requested.weights)
        form = formats.check(requested.quantization, self.device, self.dtype, invariant=self.invariant)
        self._rotaries = {kind: self._rotary(config, kind) for kind in self.spec.rotaries}
        with torch.inference_mode(), watch.get()(requested.name, tensors.nbytes) as advance:
            self._build(Maker(tensors, self.dtype, self.device, self._how, form, advance), tensors, requested.outputs)
        self.info = self._describe(config, requested)
        compiled = self._compile()
        prefetch.settle(self.linears(), self.dtype)
        self.fused = compiled if team is None else None
        """The whole decoder in one call, where every part has a kernel."""
        self.ranges = compiled if team is not None else None
        """This rank's layers in one call."""
        if self.invariant and (team is None or team.leads) and not self._exact():
            self.tiles = self.find()

    def find(self) -> Tiles:
        with nullcontext() if self.team is None else self.team.apart():  # parts have one shape on every rank
            return super().find()

    def _rotary(self, config: Any, kind: str) -> Rotary:
        latent = self.spec.latent
        paired = self.spec.architecture.attention.paired if latent is None else latent.paired
        widths = [self.spec.at(i).width for i, layer in enumerate(self.spec.layers) if layer.rotary == kind]
        width = widths[0] if widths else self.spec.width
        return Rotary(config, width, self.device, self.dtype, None if kind == ALL else kind, paired=paired)

    def _build(self, maker: Maker, tensors: Weights, outputs: torch.Tensor | None) -> None:
        spec, tiled = self.spec, self._how == "streamed"
        embedding, head, norm = spec.architecture.embedding, spec.architecture.head, spec.architecture.norm

        def gate(numbers: torch.Tensor | None = None) -> Any:
            if spec.activation_numbers:
                numbers = torch.tensor(spec.activation_numbers)
            return make_gate(
                spec.activation, self.dtype, kernels=tiled, invariant=self.invariant,
                gated=spec.architecture.mlp.gated, numbers=numbers,
            )  # fmt: skip

        builder = Builder(spec, maker, self._rotaries, gate, kernels=tiled, team=self.team)
        self._layers = [builder.layer(index) for index in range(len(spec.layers))]
        self._norm = builder.norm(norm.checkpoint)
        self._close = KernelGate("sigmoid", self.dtype) if tiled else None
        """Of [gate, output] of attention or of the MLP beside experts, where a kernel does it."""
        self._borrows = any(layer.source is not None for layer in spec.layers)
        self._build_inputs(maker, builder)
        tied = f"{head.checkpoint}.weight" not in tensors
        source = (embedding if tied else head).checkpoint
        self._head = maker.linear(source, order=[] if outputs is None else [lambda rows: rows[outputs]])
        shared = self._head if tied and outputs is None else None
        scale = spec.embedding_scale
        if spec.architecture.embedding_scale == "root":
            scale = float(torch.tensor(scale, dtype=self.dtype))  # as Gemma's authors round it
        self._words = maker.words(embedding.checkpoint, shared, scale)
        self._predicted = self._words.count if outputs is None else len(outputs)
        if self.team is not None:
            self._head = Gathered(self._head, self.team, self._tokens)
            self._words = SplitWords(self._words, self.team, self._tokens)

    def _build_inputs(self, maker: Maker, builder: Builder) -> None:
        """The model's parts of per-layer embeddings."""
        names, width = self.spec.architecture.inputs, self.spec.inputs
        self._table: LayerTable | None = None
        if names is None or not width:
            return
        scale = float(torch.tensor(width**0.5, dtype=self.dtype))
        table = maker.words(names.table.checkpoint, None, scale)
        project, norm = maker.linear(names.project.checkpoint), builder.norm(names.norm.checkpoint)
        self._table = LayerTable(table, project, norm, width)

    def _compile(self) -> Fused | None:
        if self.team is not None and self.spec.states:
            return None
        total = None if self.team is None else self.team.sum
        ends = self._norm, self._head, self._rotaries
        decoder = Decoder(self.spec, self._words, self._layers, *ends, total=total, inputs=self._table)
        return Fused(decoder) if decoder.can_fuse() else None

    def _exact(self) -> bool:
        """Whether kernels compute all that has an order of additions, and torch rounds alike at every place, where it
        does the rest."""
        norms = [
            self._norm,
            *([] if self._table is None else [self._table.norm]),
            *(norm for layer in self._layers for norm in layer.norms()),
        ]
        fused = self.fused is not None or self.ranges is not None
        return tiling.ordered(self.info, self.linears(), norms) and (fused or tiling.steady())

    def _describe(self, config: Any, requested: LoadRequest) -> ModelInfo:
        layers = list(self.linears())
        held = size(layers)
        mixtures = [layer.experts for layer in self._layers if layer.experts is not None]
        idle = sum(experts.idle_bytes for experts in mixtures)
        return ModelInfo(
            name=requested.name,
            architecture=self.spec.architecture.causal,
            path=f"native, {describe(layers, self.dtype)}" + ("" if self.team is None else f", {self.team.size} ranks"),
            vocab_size=self._words.count,
            hidden_size=self.spec.hidden,
            num_layers=len(self._layers),
            max_len=int(config.max_position_embeddings),
            kv_shapes=tuple(self.spec.entry(index) for index in range(len(self._layers))),
            state_shapes=self.spec.states,
            dtype=self.dtype,
            device=self.device,
            eos_ids=requested.eos_ids,
            weight_bytes=held + self._words.nbytes + (0 if self._table is None else self._table.table.nbytes),
            token_bytes=held - idle,
            quantization=requested.quantization,
            outputs=requested.outputs,
            mixture=None if self.team is not None or not mixtures else MixtureInfo(
                mixtures[0].count, mixtures[0].chosen, len(mixtures),
                sum(experts.chosen_bytes for experts in mixtures) / (held - idle),
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
        return super().forward(batch, attention)

    def _check(self, batch: Batch) -> None:
        """Raise ModelError for rows that are no tokens', where layers embed tokens, and for layers whose keys and
        values would be missing."""
        name = self.info.architecture
        if self._table is not None and batch.embeds is not None:
            raise ModelError(f"{name} embeds tokens for each layer: it cannot be given other rows")
        run = batch.layers if self._borrows and batch.layers is not None else ()
        for index in run:
            source = self._layers[index].source
            if source not in (None, OUTSIDE, *run):
                missing = f"layer {index} reads the keys and values of layer {source}, which is left out"
                raise ModelError(f"{name}: {missing}")

    def feed(self, batch: Batch, attention: Attention) -> Output:
        """Layer by layer; padded to a call's size where there are such."""
        metadata = attention.begin(batch)
        if self.team is None:
            return self._feed(batch, attention, metadata)
        with self.team.feeding(batch, attention, self.tiles, invariant=self.invariant):
            return self._feed(batch, attention, metadata)

    def _feed(self, batch: Batch, attention: Attention, metadata: Metadata) -> Output:
        x, last, read = self._inputs(batch), len(self._layers), 0
        rows, normed = self._logit_rows(batch), last in batch.hidden
        if self.ranges is not None and isinstance(attention, KernelAttention) and isinstance(metadata, AttentionPlan):
            hidden = self.ranges.through(batch, attention, metadata, x)
            raw = hidden.pop(RAW)
            x = hidden[last] if normed else raw
        else:
            x, hidden, read = self._through(batch, attention, metadata, x, None if normed else rows)
        if normed:
            x = x if rows is None else x.index_select(0, rows)
        if not batch.num_logits:
            return Output(x.new_zeros(0, self._predicted, dtype=torch.float32), hidden, read)
        x = (x if normed else self._norm(x))[: batch.num_logits]
        logits = self._head(self.pad_logits(x))
        return Output(self._cap(logits[: batch.num_logits].float()), hidden, read)

    def _through(
        self, batch: Batch, attention: Attention, metadata: Metadata, x: torch.Tensor, only: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor], int]:
        """The batch's layers, one after the other, the hidden states that it asked for, and how many experts were read.
        ``only`` names the rows that go on behind the last one's attention. Where the normed output is asked for, that
        is returned."""
        hidden: dict[int, torch.Tensor] = {}
        angles = {kind: rotary.angles(batch) for kind, rotary in self._rotaries.items()}
        layers: Sequence[int] = range(len(self._layers)) if batch.layers is None else batch.layers
        states, replay, laid = attention.states, None, None
        if states is not None:
            replay = states.plan(batch)
            laid = lay_out(replay, states, batch.num_rows) if self._how == "streamed" else replay
        embedded = None if self._table is None else self._table(x, self.pad(self._table.table(batch.input_ids)))
        run = Pass(attention, metadata, angles, states, laid, embedded)
        for index in layers:
            if index in batch.hidden:
                hidden[index] = x[: batch.num_rows]
            x = self._run(self._layers[index], index, x, only if index == layers[-1] else None, run)
        attention.finish(metadata)
        if states is not None and replay is not None:
            states.commit(replay)
        if len(self._layers) in batch.hidden:
            x = self._norm(x)
            hidden[len(self._layers)] = x[: batch.num_rows]
        return x, hidden, run.experts

    def _cap(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self.spec.logits_softcap
        if self.spec.logits_scale != 1.0:
            logits = logits * self.spec.logits_scale
        if cap is None:
            return logits
        return softcap(logits, cap) if self._how == "streamed" else torch.tanh(logits / cap).mul_(cap)

    def _inputs(self, batch: Batch) -> torch.Tensor:
        x = self._words(batch.input_ids)
        if batch.embeds is not None:
            x[batch.embed_rows] = batch.embeds.to(x.dtype)
        return self.pad(x)

    def _logit_rows(self, batch: Batch) -> torch.Tensor | None:
        """The padded batch's rows whose logits are wanted; None: all of them."""
        if all(len(span.logits) == span.count for span in batch.spans):
            return None
        rows = batch.logit_rows
        return rows if not len(rows) else self.pad(rows[:, None])[:, 0]

    def _run(self, layer: Layer, index: int, x: torch.Tensor, only: torch.Tensor | None, run: Pass) -> torch.Tensor:
        """One layer; ``only`` names the rows that go on behind its attention."""
        normed, count = x if layer.norm_attention is None else layer.norm_attention(x), run.metadata.batch.num_rows

        def kept(rows: torch.Tensor) -> torch.Tensor:
            if only is not None:
                return rows.index_select(0, only)
            return self.pad(rows) if rows.shape[0] != x.shape[0] else rows

        made = out = None
        if layer.mixer is not None:
            made = kept(layer.mixer(layer.enter(normed)[:count], run.states, run.replay))
        if layer.qkv is not None:
            qkv = layer.qkv(normed)
            out = kept(self._attend(layer, index, qkv[:count] if layer.latent is None else qkv, run))
        x = kept(x)
        if made is not None:
            x = self._add(layer.leave, made, None, x)
        if out is not None:
            x = self._add(layer.out, out, layer.after_attention, x)
        if layer.gate_up is None and layer.experts is None:
            return x
        if self.spec.architecture.parallel:
            normed = normed if only is None else normed.index_select(0, only)
        else:
            normed = x if layer.norm_mlp is None else layer.norm_mlp(x)
        if layer.experts is not None:
            made = self._mix(layer, layer.experts, normed, x, run)
            x = self._scaled(made, x) if layer.after_mlp is None else layer.after_mlp(made, x)
        else:
            x = self._add(layer.down, layer.gate(layer.gate_up(normed)), layer.after_mlp, x)
        if layer.to_inputs is not None:
            assert run.inputs is not None
            own = run.inputs[:, index] if only is None else run.inputs[:, index].index_select(0, only)
            gated = layer.gate(torch.cat([layer.to_inputs(x), own], 1))
            x = self._add(layer.from_inputs, gated, layer.after_inputs, x)
        return x if layer.scale is None else x * layer.scale

    def _mix(self, layer: Layer, experts: Experts, normed: torch.Tensor, x: torch.Tensor, run: Pass) -> torch.Tensor:
        """What experts, and the MLP beside them if there is one, make of rows x whose norm is ``normed``."""
        sizes, apart = None if self.tiles is None else self.tiles.rows, layer.norm_experts is not None
        made, read = experts(layer.norm_experts(x), sizes, layer.norm_router(x)) if apart else experts(normed, sizes)
        run.experts += read
        if layer.gate_up is None:
            return made
        dense: torch.Tensor = layer.down(layer.gate(layer.gate_up(normed)))
        if apart:
            both: torch.Tensor = layer.after_experts(made, layer.after_beside(dense))
            return both
        if layer.share is None:
            return made + dense
        share = layer.share(normed)
        if self._close is None:
            return made + dense * activations.sigmoid(share)
        return made + self._close(torch.cat([share.expand_as(dense), dense], 1))

    def _attend(self, layer: Layer, index: int, qkv: torch.Tensor, run: Pass) -> torch.Tensor:
        if layer.latent is not None:
            return self._attend_latents(layer, layer.latent, index, qkv, run)
        attended = self.spec.heads * layer.width
        qkv, gate = (qkv[:, :-attended], qkv[:, -attended:]) if layer.gated else (qkv, None)
        q, k, v = self._heads(layer, qkv, run)
        if self._borrows and layer.source is None:
            run.entries[index] = k, v
        elif layer.source not in (None, OUTSIDE):  # stored again, to the bit
            k, v = run.entries[layer.source]
        index = index if layer.source in (None, OUTSIDE) else layer.source
        q = self._grown(q, run.metadata.batch)
        query = Query(index, q, k, v, self.spec.scale, layer.window, self.spec.softcap, sinks=layer.sinks)
        out = run.attention.run(query, run.metadata)
        if gate is None:
            return out
        out = out[: len(gate)]
        return out * activations.sigmoid(gate) if self._close is None else self._close(torch.cat([gate, out], 1))

    def _attend_latents(
        self, layer: Layer, latent: LatentHeads, index: int, made: torch.Tensor, run: Pass
    ) -> torch.Tensor:
        """As ``_attend``; rows stay padded where layers of their own read them."""
        batch = run.metadata.batch
        q, k = latent.ask(made, batch.num_rows, lambda side: self._turned(layer, side, run))
        v = k[..., : latent.sizes.rank]
        query = Query(index, self._grown(q, batch), k, v, self.spec.scale, layer.window, self.spec.softcap)
        return latent.answer(self.pad(run.attention.run(query, run.metadata)))

    def _grown(self, q: torch.Tensor, batch: Batch) -> torch.Tensor:
        factors = None if self.spec.growth is None else self.spec.growth.factors(batch.positions)
        return q if factors is None else q * factors.to(q.dtype)[:, None, None]

    def _add(self, linear: Linear, rows: torch.Tensor, after: Any, x: torch.Tensor) -> torch.Tensor:
        """x and what ``linear`` makes of ``rows``, normed by ``after`` if that is there."""
        if after is not None:
            made: torch.Tensor = after(linear(rows), x)
            return made
        return linear(rows, x) if self.spec.residual_scale == 1.0 else self._scaled(linear(rows), x)

    def _scaled(self, made: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        scale = self.spec.residual_scale
        return x + (made if scale == 1.0 else made * scale)

    def _turned(self, layer: Layer, heads: torch.Tensor, run: Pass) -> torch.Tensor:
        """[rows, heads, width] by their positions, if the layer turns any."""
        if layer.rotary is None:
            return heads
        return self._rotaries[layer.rotary].apply_rotary(heads, run.angles[layer.rotary])

    def _heads(self, layer: Layer, qkv: torch.Tensor, run: Pass) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [rows, heads, width]."""
        norms, norm, turned = self.spec.architecture.norms, layer.norm_qk, partial(self._turned, layer, run=run)
        heads, kv_heads, width = self.spec.heads, layer.made, layer.width
        every = qkv.view(qkv.shape[0], heads + 2 * kv_heads, width)
        if norm is not None and norms.values:
            every, norm = norm(every), None
        qk, v = every.split_with_sizes((heads + kv_heads, kv_heads), 1)
        if layer.norm_query is not None:
            query, key = qkv[:, : heads * width], qkv[:, heads * width : (heads + kv_heads) * width]
            q, k = layer.norm_query(query).view(-1, heads, width), layer.norm_key(key).view(-1, kv_heads, width)
            return turned(q), turned(k), v
        if norm is None:
            qk = turned(qk)
        else:
            qk = norm(turned(qk)) if norms.after_rotary else turned(norm(qk))
        q, k = qk.split_with_sizes((heads, kv_heads), 1)
        return q, k, v

    @inference
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        if self.team is None:
            return self._words(ids)
        with self.team.calling("embed", ids):
            return self._words(ids)

    @inference
    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.team is None:
            return self._cap(self._head(hidden.to(self.dtype)).float())
        with self.team.calling("lm_head", hidden):
            return self._cap(self._head(hidden.to(self.dtype)).float())

    def signature(self) -> str:
        parts = {(linear.kind, linear.nbytes) for linear in self.linears()}
        return repr((self.spec, self.info.vocab_size, self.info.path, self.dtype, self.device.type, sorted(parts)))

    def kinds(self) -> list[tuple[int, ...] | None]:
        """Layers that stand for all: one for each choice of shapes, formats and parts."""
        result: dict[str, int] = {}
        for index, layer in enumerate(self._layers):
            parts = [(linear.kind, linear.nbytes) for linear in layer.linears()]
            none = tuple(part is None for part in (layer.norm_qk, layer.mixer, layer.qkv, layer.gate_up))
            kind = parts, none, layer.window, layer.rotary
            result.setdefault(repr((kind, layer.source is None, layer.width)), index)
        sources = ((self._layers[index].source, index) for index in result.values())
        return [(index,) if source is None else (source, index) for source, index in sources]

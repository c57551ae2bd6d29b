"""Decoder layers of a drafter, between the embedding and the output layer of its target."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from forerun.attention.base import Attention, Metadata
from forerun.attention.kernel import KernelAttention, bidirectional, can_attend
from forerun.attention.layout import new_slots
from forerun.attention.sdpa import SdpaAttention
from forerun.cache.pool import Pool
from forerun.core.batch import Batch, Output
from forerun.core.inference import inference
from forerun.models.architectures.spec import Spec
from forerun.models.formats import choose
from forerun.models.formats.base import Format, Linear
from forerun.models.run.base import Model, attention_over
from forerun.models.run.fused import Decoder, Fused
from forerun.models.run.layer import Builder
from forerun.models.run.native import NativeModel, Pass
from forerun.models.weights.layout import Maker
from forerun.models.weights.transform import Weights

if TYPE_CHECKING:
    from forerun.models.run.graphs import Graphs

log = logging.getLogger("forerun")


class DraftDecoder(NativeModel):
    """A described drafter (``description.DraftInput``). A batch's ``embeds`` are its first layer's rows, one per token.

    Args:
        target: the model whose embedding it has, and whose output layer unless ``weights`` hold one.
        config: that of ``spec``.
        form: what its weights are quantized to; None: they stay as they are.
        outputs: int64, ascending: the tokens that an output layer of its own predicts; None: all of its rows.
        other: a drafter that has the same output layer; None: ``weights`` and ``outputs`` say which it has.
    """

    def __init__(
        self, target: Model, config: Any, spec: Spec, weights: Weights, form: Format | None = None,
        outputs: torch.Tensor | None = None, other: DraftDecoder | None = None,
    ) -> None:  # fmt: skip
        info = target.info
        self.spec, self.team, self.target, self.other = spec, None, target, other
        self.dtype, self.device, self.invariant, self.routes = info.dtype, info.device, False, False
        how = choose(self.dtype, self.device, "auto")
        self._kernels = how == "streamed"
        self._rotaries = {name: self._rotary(config, name) for name in spec.rotaries}
        with torch.inference_mode():
            self._build(Maker(weights, self.dtype, self.device, how, form, lambda _: None), outputs)
        self.info = replace(
            info, architecture=spec.architecture.causal, num_layers=len(self._layers), state_shapes=(), encoder=None,
            kv_shapes=tuple(spec.kv_shape(index) for index in range(len(self._layers))), mixture=None, outputs=None,
        )  # fmt: skip
        self._causal = self._layers[0].causal
        self.fused, self.ranges, self.graphs = self._compile(), None, self._make_graphs()

    def _make_graphs(self) -> Graphs | None:
        """Those of the target, whose embedding it has."""
        return None if super()._make_graphs() is None else getattr(self.target, "graphs", None)

    def attention(self, pool: Pool) -> Attention:
        """The attention for it on this machine."""
        result = attention_over(self, pool)
        both_ways = any(layer.window is not None and not layer.causal for layer in self._layers)
        if both_ways and isinstance(result, KernelAttention):
            log.warning("the drafter's attention runs in torch: our kernel has no sliding window without causality")
            return SdpaAttention(pool)
        return result

    def _build_ends(self, builder: Builder, outputs: torch.Tensor | None) -> None:
        given, maker, name = self.spec.architecture.draft_input, builder.maker, self.spec.architecture.head.checkpoint
        assert given is not None
        self._norm_embedding, self._norm_given = (
            None if each is None else builder.norm(each.checkpoint) for each in (given.norm_embedding, given.norm_given)
        )
        self.owns_head = f"{name}.weight" in maker.weights
        self._head: Any = None
        self._num_logits = self.target.info.vocab_size
        if (other := self.other) is not None:
            self.owns_head, self._head, self._num_logits = other.owns_head, other._head, other._num_logits
        elif self.owns_head:
            self._head = maker.linear(name, order=[] if outputs is None else [lambda rows: rows[outputs]])
            self._num_logits = maker.weights.values(f"{name}.weight").shape[0] if outputs is None else len(outputs)
        self._mix = None if given.mix is None else maker.linear(given.mix.checkpoint)
        self._context = builder.context() if given.block else None

    def _compile(self) -> Fused | None:
        whole = self.target.fused
        mixed = len({layer.causal for layer in self._layers}) > 1  # which have plans of their own
        if whole is None or mixed or any(layer.convolutions is not None for layer in self._layers):
            return None
        spec, head, target = self.spec, self._head, whole.decoder
        if not self.owns_head:
            head, of = target.head, target.spec
            spec = replace(spec, logits_softcap=of.logits_softcap, logits_scale=of.logits_scale)
        decoder = Decoder(
            spec, target.embedding, self._layers, self._norm, head, self._rotaries, mix=self._mix,
            norm_embedding=self._norm_embedding, norm_given=self._norm_given,
        )  # fmt: skip
        able = decoder.can_fuse() and can_attend(self.dtype, self.device, self.info.kv_shapes)
        return Fused(decoder) if able else None

    def linears(self) -> Iterable[Linear]:
        for layer in self._layers:
            yield from layer.linears()
        yield from (each for each in (self._mix, self._head) if each is not None)

    @inference
    def forward(self, batch: Batch, attention: Attention) -> Output:
        """Logits over the tokens of the output layer. ``hidden`` may ask for ``RAW``: the last layer's output, of rows
        with logits."""
        if self.fused is not None and isinstance(attention, KernelAttention):
            plan = None if self._causal else bidirectional(attention.begin(batch))
            return self.fused(batch, attention, batch.embeds, plan)
        return self._in_graph(batch, attention) or self.feed(batch, attention)

    @inference
    def read_context(self, batch: Batch, attention: Attention, rows: torch.Tensor) -> None:
        """Stores keys and values of given ``rows`` [rows, hidden size], which are the batch's, in all layers."""
        batch.embeds = rows
        graphs, body = self.graphs, partial(self._store_context, attention=attention)
        if graphs and graphs.serves(batch, attention, scored=False) and graphs(batch, attention, body, self._at):
            return
        pool = attention.pool
        for span in batch.spans:
            pool.reserve(span.key, span.end)
        slots = new_slots(pool, batch)
        for index, (k, v) in enumerate(self._context_of(batch)):
            pool.write(index, slots, k, v)
        attention.finish(Metadata(batch))

    def _store_context(self, batch: Batch, tables: Metadata, attention: Any) -> Output:
        """The same on a GPU, whose numbers are there already."""
        for index, (k, v) in enumerate(self._context_of(batch)):
            attention.store(index, k, v, tables)
        return Output(k.new_zeros(0, self._num_logits, dtype=torch.float32))

    def _context_of(self, batch: Batch) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values [rows, kv heads, width] of each layer for the given rows."""
        assert self._context is not None
        assert batch.embeds is not None
        (project, norm, rotary), heads = self._context, self.spec.kv_heads
        sides = project(batch.embeds.to(self.dtype)).unflatten(1, (2, len(self._layers) * heads, self.spec.head_dim))
        k, v = sides.unbind(1)
        k = rotary.apply_rotary(k if norm is None else norm(k), rotary.angles(batch))
        return zip(k.split(heads, 1), v.split(heads, 1))

    def _run(self, index: int, x: torch.Tensor, kept: torch.Tensor | None, run: Pass) -> torch.Tensor:
        layer = self._layers[index]
        if layer.convolutions is None:
            return super()._run(index, x, kept, run)
        attention, mlp = layer.convolutions
        rows, weights = attention.enter(layer.norm_attention(x))
        x = x + attention.leave(layer.out(self._attend(layer, index, layer.qkv(rows), run)), weights)
        rows, weights = mlp.enter(layer.norm_mlp(x))
        x = x + mlp.leave(layer.down(layer.activation(layer.gate_up(rows))), weights)
        return x if kept is None else x.index_select(0, kept)

    def _inputs(self, batch: Batch) -> torch.Tensor:
        given = batch.embeds
        assert given is not None
        given = given.to(self.dtype)
        given = given if self._norm_given is None else self._norm_given(given)
        if self._mix is None:
            return given
        embedded = self.embed(batch.input_ids)
        embedded = embedded if self._norm_embedding is None else self._norm_embedding(embedded)
        return self._mix(torch.cat([embedded, given], -1))

    def normed(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the last layer's output after the final norm."""
        normed: torch.Tensor = self._norm(rows)
        return normed

    def _score(self, x: torch.Tensor) -> torch.Tensor:
        return super()._score(x) if self.owns_head else self.target.lm_head(x)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.target.embed(ids)

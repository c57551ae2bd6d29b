"""Decoder layers of a drafter, between the embedding and the output layer of its target."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from forerun.attention.base import Attention
from forerun.attention.kernel import KernelAttention, can_attend
from forerun.core.batch import Batch, Output
from forerun.core.inference import inference
from forerun.models.architectures.spec import Spec
from forerun.models.formats import choose
from forerun.models.formats.base import Format, Linear
from forerun.models.run.base import Model
from forerun.models.run.fused import Decoder, Fused
from forerun.models.run.layer import Builder
from forerun.models.run.native import NativeModel
from forerun.models.weights.layout import Maker
from forerun.models.weights.transform import Weights


class DraftDecoder(NativeModel):
    """A described drafter (``description.DraftInput``). A batch's ``embeds`` are the rows that its first layer is
    given, one for each token.

    Args:
        target: the model whose embedding it has, and whose output layer unless ``weights`` hold one.
        config: that of ``spec``.
        form: what its weights are quantized to; None: they stay as they are.
        outputs: int64, ascending: the tokens that an output layer of its own predicts; None: all of its rows.
    """

    def __init__(
        self, target: Model, config: Any, spec: Spec, weights: Weights, form: Format | None = None,
        outputs: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        info = target.info
        self.spec, self.team, self.target = spec, None, target
        self.dtype, self.device, self.invariant, self.routes = info.dtype, info.device, False, False
        how = choose(self.dtype, self.device, "auto")
        self._kernels = how == "streamed"
        self._rotaries = {name: self._rotary(config, name) for name in spec.rotaries}
        with torch.inference_mode():
            maker = Maker(weights, self.dtype, self.device, how, form, lambda _: None)
            self._build(maker, outputs)
        self.info = replace(
            info, architecture=spec.architecture.causal, num_layers=len(self._layers), state_shapes=(), encoder=None,
            kv_shapes=tuple(spec.kv_shape(index) for index in range(len(self._layers))), mixture=None, outputs=None,
        )  # fmt: skip
        self.fused, self.ranges, self.graphs = self._compile(), None, None

    def _build_ends(self, builder: Builder, outputs: torch.Tensor | None) -> None:
        given, maker, name = self.spec.architecture.draft_input, builder.maker, self.spec.architecture.head.checkpoint
        assert given is not None
        self._norm_embedding, self._norm_given = (
            None if each is None else builder.norm(each.checkpoint) for each in (given.norm_embedding, given.norm_given)
        )
        self.owns_head = f"{name}.weight" in maker.weights
        self._head: Any = None
        self._num_logits = self.target.info.vocab_size
        if self.owns_head:
            self._head = maker.linear(name, order=[] if outputs is None else [lambda rows: rows[outputs]])
            self._num_logits = maker.weights.values(f"{name}.weight").shape[0] if outputs is None else len(outputs)
        self._mix = None if given.mix is None else maker.linear(given.mix.checkpoint)

    def _compile(self) -> Fused | None:
        whole = self.target.fused
        if whole is None:
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
            return self.fused(batch, attention, batch.embeds)
        return self.feed(batch, attention)

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

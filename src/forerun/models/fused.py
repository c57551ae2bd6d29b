"""All layers of a decoder in one call, ``kernels/decoder.cpp``: the kernels of ``streamed.py`` and of attention, with
the same bits, without Python between them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from forerun import kernels
from forerun.attention.streamed import Plan, StreamedAttention
from forerun.core.batch import Batch, Output
from forerun.kernels import structs
from forerun.models.architectures.spec import SILU, Spec
from forerun.models.formats.compiled import Compiled
from forerun.models.layer import Layer
from forerun.models.rotary import Rotary
from forerun.models.streamed import Norm
from forerun.models.words import NO_LAYER, Words

ALIGNED = 32
"""Numbers to which a piece of the working room is rounded up, ROUND_UP in the kernel."""
RAW = -1
"""Names, in ``Output.hidden``, the last layer's output before the final norm."""


def serves(spec: Spec) -> bool:
    """Whether the call computes such a decoder: norms before attention and MLP, silu, one set of rotary parameters, no
    soft caps, no experts."""
    norms = spec.architecture.norms
    return (
        None not in (norms.before_attention, norms.before_mlp)
        and norms.after_attention is norms.after_mlp is None
        and not (norms.whole or spec.softcap or spec.logits_softcap)
        and spec.activation == SILU
        and len(spec.rotaries) == 1
        and not any(layer.experts for layer in spec.layers)
    )


@dataclass(slots=True)
class Decoder:
    """What a call needs: sizes of a head, embeddings, layers, the final norm and output layer, and what scores are
    multiplied by."""

    heads: int
    kv_heads: int
    width: int
    words: Words
    layers: Seq[Layer]
    norm: Any
    head: Any
    rotary: Rotary
    scale: float
    mix: Any = None
    """Makes the first layer's input of [embedding of the token, given row]; None: that is the given row, or else the
    embedding."""

    def can_fuse(self) -> bool:
        """Whether the call is here and every linear layer and norm has a kernel."""
        linears = [
            self.head,
            *([self.mix] if self.mix is not None else []),
            *(linear for layer in self.layers for linear in layer.linears()),
        ]
        norms = [self.norm, *(norm for layer in self.layers for norm in layer.norms())]
        return (
            self.words.device.type == "cpu"
            and self.words.fields() is not None
            and kernels.has(f"decode_{kernels.dtype_name(self.words.dtype)}")
            and all(isinstance(linear, Compiled) for linear in linears)
            and all(isinstance(norm, Norm) for norm in norms)
        )

    def check(self) -> None:
        """Raise ValueError for parts that the call would misread; it compares the layers' sizes itself."""
        dtype, turned = self.words.dtype, self.heads + self.kv_heads
        parts = [self.norm, self.head, self.mix]
        for layer in self.layers:
            parts += [*layer.linears(), *layer.norms()]
            kinds = [layer.norm_attention, layer.norm_mlp, *([layer.norm_token] if layer.norm_token else [])]
            if any(norm.weight.numel() != self.words.width for norm in kinds):
                raise ValueError("a norm has other numbers than the hidden state")
            if layer.norm_qk is not None and layer.norm_qk.weight.shape != (turned, self.width):
                raise ValueError(f"a norm {[*layer.norm_qk.weight.shape]} for {turned} heads of {self.width} numbers")
        if any(_dtype(part) not in (None, dtype) for part in parts):
            raise ValueError(f"embeddings, layers and norms must all be in {dtype}")
        if self.norm.weight.numel() != self.words.width:
            raise ValueError("the final norm has other numbers than the hidden state")


def _dtype(part: Any) -> torch.dtype | None:
    """None: any."""
    dtype: torch.dtype | None = getattr(part, "dtype", None)
    return dtype


def _norm(norm: Norm | None) -> int:
    return norm.pointer if norm is not None else 0


@dataclass(slots=True)
class Prepared:
    """A call's arguments, and where its results will be."""

    address: int
    logits: torch.Tensor
    hidden: dict[int, torch.Tensor]
    plan: Plan
    kept: tuple[Any, ...]
    """What the arguments point to."""


class Fused:
    """A ``Decoder`` all of whose parts have kernels."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder  # it keeps what the addresses below point to
        self.dtype = decoder.words.dtype
        self.eps, self.scale = decoder.norm.eps, decoder.scale
        kind = kernels.dtype_name(self.dtype)
        self.call, self.draft = (getattr(kernels.library(), f"{verb}_{kind}") for verb in ("decode", "draft"))
        decoder.check()
        words, self.vocab_size = decoder.words, decoder.head.outputs
        self.known, self.hidden = words.count, words.width
        fields = words.fields()
        if fields is None:
            raise ValueError("embeddings that the call cannot read")
        numbers, rows = fields
        inner, attended = decoder.layers[0].down.inputs, decoder.heads * decoder.width
        model = structs.Model(
            decoder.heads, decoder.kv_heads, decoder.width, self.hidden, inner, len(decoder.layers), self.known,
            numbers, decoder.norm.pointer,
        )  # fmt: skip
        mix = NO_LAYER if decoder.mix is None else decoder.mix.fields()
        self.model = array("q", (*model, *decoder.head.fields(), *rows, *mix))
        self.layers = array("q")
        for layer in decoder.layers:
            addresses = structs.Layer(
                _norm(layer.norm_attention), _norm(layer.norm_qk), _norm(layer.norm_mlp), _norm(layer.norm_token),
                int(layer.rope), layer.window or 0,
            )  # fmt: skip
            self.layers.extend(addresses)
            for linear in layer.linears():
                self.layers.extend(linear.fields())
        self.addresses = self.model.buffer_info()[0], self.layers.buffer_info()[0]
        angles = decoder.width * (4 // self.dtype.itemsize)
        qkv = attended + 2 * decoder.kv_heads * decoder.width
        read = max(decoder.layers[0].qkv.inputs, 2 * self.hidden if decoder.mix is not None else 0)
        self.row = self.hidden, read, qkv, attended, 2 * inner, inner, angles
        """Numbers per row of every piece of the working room."""
        self._sizes: dict[int, int] = {}
        """Numbers of all pieces together, by rows."""
        self.all = array("q", range(len(decoder.layers)))

    def __call__(self, batch: Batch, cache: StreamedAttention, given: torch.Tensor | None = None) -> Output:
        """Logits and hidden states as ``Model.forward``; ``given`` [rows, hidden]: the first layer's input. Raises
        IndexError for a token without an embedding."""
        call = self.prepare(batch, cache, given)
        self.call(*self.addresses, call.address, self.eps, self.scale)
        cache.finish(call.plan)
        return Output(call.logits, call.hidden)

    def prepare(
        self, batch: Batch, cache: StreamedAttention, given: torch.Tensor | None = None, ahead: int = 0
    ) -> Prepared:
        """A call's arguments; positions up to ``ahead`` behind the batch's have angles too."""
        if cache.pool.dtype is not self.dtype or len(cache.pool.keys) < len(self.decoder.layers):
            raise ValueError(f"a cache of {len(cache.pool.keys)} layers in {cache.pool.dtype} for {self.dtype} layers")
        plan = cache.begin(batch)
        rows, wanted = batch.num_rows, batch.num_logits
        given = self._given(batch) if given is None else self._fitting(given, rows)
        angles, positions = self._angles(batch, ahead)
        which = self.all if batch.layers is None else array("q", batch.layers)
        hidden, keep = self._keep(batch, which)
        logits = torch.empty(wanted, self.vocab_size)
        room = self._room(rows, wanted)
        ids = self._ids(batch)
        if len(positions) != rows or len(ids) != rows:
            raise ValueError(f"{len(ids)} tokens and {len(positions)} positions for {rows} rows")
        out = array("q", _wanted(batch) if 0 < wanted < rows else ())
        lists = (ids, positions, which, keep, out)
        at = [numbers.buffer_info()[0] for numbers in lists]
        sides, pool = cache.sides()
        call = array("q", structs.Call(
            rows, torch.get_num_threads(), at[0], 0 if given is None else given.data_ptr(), at[1], angles.data_ptr(),
            len(angles), at[2], len(which), at[3], at[4], wanted, room.data_ptr(), len(room), logits.data_ptr(),
            sides, pool, plan.address,
        ))  # fmt: skip
        return Prepared(call.buffer_info()[0], logits, hidden, plan, (call, given, angles, room, lists))

    def _fitting(self, given: torch.Tensor, rows: int) -> torch.Tensor:
        if given.shape != (rows, self.hidden) or given.dtype is not self.dtype or not given.is_cpu:
            raise ValueError(
                f"input rows {given.dtype} {[*given.shape]} on {given.device} for {rows} rows of {self.hidden} numbers "
                f"in {self.dtype} on cpu"
            )
        return given.contiguous()

    def _ids(self, batch: Batch) -> array[int]:
        """The call checks nothing."""
        ids = array("q", [token for span in batch.spans for token in span.tokens])
        least, most = min(ids), max(ids)
        if least < 0 or most >= self.known:
            raise IndexError(f"tokens must be from 0 to {self.known - 1}, not {least if least < 0 else most}")
        return ids

    def _given(self, batch: Batch) -> torch.Tensor | None:
        """Input rows that are not all embeddings of tokens."""
        if batch.embeds is None:
            return None
        x = self.decoder.words(batch.input_ids)
        x[batch.embed_rows] = batch.embeds.to(x.dtype)
        return x

    def _angles(self, batch: Batch, ahead: int) -> tuple[torch.Tensor, array[int]]:
        positions = array("q")
        for span in batch.spans:
            positions.extend(span.positions())
        return self.decoder.rotary.table(max(span.end for span in batch.spans) + ahead), positions

    def _keep(self, batch: Batch, which: Seq[int]) -> tuple[dict[int, torch.Tensor], array[int]]:
        """Room for the hidden states that the batch asked for, and where each layer's input and the output go. The
        raw output has the rows alone whose logits are wanted, unless the normed one is asked for too."""
        if not batch.hidden:
            return {}, array("q", bytes(8 * (len(which) + 2)))
        last = len(self.decoder.layers)
        rows = dict.fromkeys((*which, last), batch.num_rows)
        rows[RAW] = batch.num_rows if last in batch.hidden else batch.num_logits
        hidden = {
            layer: torch.empty(count, self.hidden, dtype=self.dtype)
            for layer, count in rows.items()
            if layer in batch.hidden
        }
        return hidden, array("q", (hidden[i].data_ptr() if i in hidden else 0 for i in (*which, last, RAW)))

    def _room(self, rows: int, wanted: int) -> torch.Tensor:
        numbers = self._sizes.get(rows)
        if numbers is None:
            numbers = self._sizes[rows] = sum(-(-rows * width // ALIGNED) * ALIGNED for width in self.row)
        return torch.empty(numbers + wanted * self.vocab_size, dtype=self.dtype)


def _wanted(batch: Batch) -> list[int]:
    rows = [offset + row for span, offset in zip(batch.spans, batch.offsets) for row in span.logits]
    if any(after <= before for before, after in pairwise(rows)):
        raise ValueError("the rows of a span whose logits are wanted must ascend")
    return rows

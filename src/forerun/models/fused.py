"""All layers of a decoder in one call, ``kernels/decoder.cpp``: the kernels of ``streamed.py`` and of attention, with
the same bits, without Python between them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import Any

import torch

from forerun import kernels
from forerun.attention.streamed import StreamedAttention
from forerun.core.batch import Batch, Output
from forerun.models.rotary import Rotary
from forerun.models.streamed import Norm, Streamed, StreamedInt8

ALIGNED = 32
"""Numbers to which a piece of the working room is rounded up, as in the kernel."""


def can_fuse(dtype: torch.dtype, device: torch.device, layers: Seq[Any], norms: Seq[Any]) -> bool:
    """Whether the call is here and every linear layer and norm has a kernel."""
    able = device.type == "cpu" and kernels.has(f"decode_{kernels.dtype_name(dtype)}")
    return (
        able and all(isinstance(x, Streamed | StreamedInt8) for x in layers) and all(isinstance(x, Norm) for x in norms)
    )


def _linear(layer: Streamed | StreamedInt8) -> list[int]:
    weight, bias, *rest = layer.pointers
    scales, offsets = rest if rest else (None, None)
    return [weight or 0, bias or 0, scales or 0, offsets or 0, layer.outputs, layer.inputs]


class Fused:
    """The layers of a ``NativeModel`` whose parts all have kernels. Keeps addresses: the model keeps the tensors."""

    def __init__(self, model: Any) -> None:
        self.info, self.rotary, self.dtype = model.info, model._rotary, model.dtype
        self.embedding: torch.Tensor = model._embedding
        self.eps, self.scale = model._norm.eps, model.scale
        self.call = getattr(kernels.library(), f"decode_{kernels.dtype_name(self.dtype)}")
        self.hidden, inner = self.info.hidden_size, model._layers[0].down.inputs
        sizes = (model.heads, model.kv_heads, model.width, self.hidden, inner)
        self.model = array("q", (*sizes, self.embedding.data_ptr(), model._norm.pointer, *_linear(model._head)))
        self.layers = array("q")
        for layer in model._layers:
            of_heads = layer.norm_qk.pointer if layer.norm_qk is not None else 0
            self.layers.extend((layer.norm_attention.pointer, of_heads, layer.norm_mlp.pointer))
            self.layers.extend((int(layer.rope), layer.window or 0))
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
                self.layers.extend(_linear(linear))
        self.addresses = self.model.buffer_info()[0], self.layers.buffer_info()[0]
        attended = model.heads * model.width
        angles = model.width * (4 // self.dtype.itemsize)
        qkv = attended + 2 * model.kv_heads * model.width
        self.row = self.hidden, self.hidden, qkv, attended, 2 * inner, inner, angles
        """Numbers per row of every piece of the working room."""
        self.all = array("q", range(self.info.num_layers))

    def __call__(self, batch: Batch, cache: StreamedAttention) -> Output:
        cache.begin(batch)
        plan = cache.plan(batch)
        rows, wanted = batch.num_rows, batch.num_logits
        given = self._given(batch)
        angles, positions = self._angles(batch)
        which = self.all if batch.layers is None else array("q", batch.layers)
        hidden, keep = self._keep(batch, which)
        logits = torch.empty(wanted, self.info.vocab_size)
        room = self._room(rows, wanted)
        ids = array("q", [token for span in batch.spans for token in span.tokens])
        out = array("q", _wanted(batch) if 0 < wanted < rows else ())
        lists = (ids, positions, which, keep, out)
        at = [numbers.buffer_info()[0] for numbers in lists]
        sides, strides = cache.sides()
        call = array("q", (
            rows, torch.get_num_threads(), at[0], 0 if given is None else given.data_ptr(), at[1], angles.data_ptr(),
            at[2], len(which), at[3], at[4], wanted, room.data_ptr(), logits.data_ptr(), sides, strides,
            plan.addresses[0], len(batch.spans), *plan.addresses[1:],
        ))  # fmt: skip
        self.call(*self.addresses, call.buffer_info()[0], self.eps, self.scale)
        cache.finish(batch)
        return Output(logits, hidden)

    def _given(self, batch: Batch) -> torch.Tensor | None:
        """Input rows that are not all embeddings of tokens."""
        if batch.embeds is None:
            return None
        x = self.embedding.index_select(0, batch.input_ids)
        x[batch.embed_rows] = batch.embeds.to(x.dtype)
        return x

    def _angles(self, batch: Batch) -> tuple[torch.Tensor, array[int]]:
        positions = array("q")
        for span in batch.spans:
            positions.extend(span.positions())
        rotary: Rotary = self.rotary
        return rotary.table(max(span.end for span in batch.spans)), positions

    def _keep(self, batch: Batch, which: Seq[int]) -> tuple[dict[int, torch.Tensor], array[int]]:
        """Room for the hidden states that the batch asked for, and where each layer's input goes."""
        last = self.info.num_layers
        hidden = {
            layer: torch.empty(batch.num_rows, self.hidden, dtype=self.dtype)
            for layer in (*which, last)
            if layer in batch.hidden
        }
        return hidden, array("q", (hidden[i].data_ptr() if i in hidden else 0 for i in (*which, last)))

    def _room(self, rows: int, wanted: int) -> torch.Tensor:
        numbers = sum(-(-rows * width // ALIGNED) * ALIGNED for width in self.row)
        return torch.empty(numbers + wanted * self.info.vocab_size, dtype=self.dtype)


def _wanted(batch: Batch) -> list[int]:
    return [offset + row for span, offset in zip(batch.spans, batch.offsets) for row in span.logits]

"""All layers of a decoder in one compiled call, ``kernels/decoder.cpp``: the same kernels and the same bits as layer by
layer, without Python between them."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import torch

from forerun import kernels
from forerun.attention.kernel import AttentionPlan, KernelAttention
from forerun.cache.states import Replay
from forerun.core.batch import Batch, Output
from forerun.kernels import KernelError, structs
from forerun.models.architectures.spec import OUTSIDE, Spec
from forerun.models.formats.compiled import Compiled
from forerun.models.ranks.team import Summed
from forerun.models.run.layer import LINEARS, NORMS, Layer, LayerTable
from forerun.models.run.parts import KernelNorm
from forerun.models.run.recurrent import CompiledReplay, KernelMixer, lay_out
from forerun.models.run.rotary import Rotary
from forerun.models.weights.layout import Embedding

ALIGNED = 32
"""Numbers to which a piece of the workspace is rounded up, ROUND_UP in the kernel."""
RAW = -1
"""The key in ``Output.hidden`` of the last layer's output before the final norm."""


@dataclass(slots=True)
class Decoder:
    """The parts of a decoder that a compiled call reads. With ``total``, which sums over ranks, the layers are one
    rank's, and the caller computes embedding and output layer."""

    spec: Spec
    embedding: Embedding
    layers: Sequence[Layer]
    norm: Any
    head: Any
    rotaries: Mapping[str, Rotary]
    total: Callable[[torch.Tensor], torch.Tensor] | None = None
    mix: Any = None
    """Makes the first layer's input of [token embedding, given row]; None: the input is the given row, if there is one,
    or else the embedding."""
    norm_embedding: Any = None
    """Norms the embedding for ``mix``, as ``norm_given`` the given row."""
    norm_given: Any = None
    table: LayerTable | None = None

    def can_fuse(self) -> bool:
        """Whether this machine has the call, and every linear layer and norm a kernel."""
        linears = [linear for layer in self.layers for linear in layer.linears()]
        if self.total is None:
            linears += [self.head, *([self.mix] if self.mix is not None else [])]
        norms = [*self._norms(), *(norm for layer in self.layers for norm in layer.norms())]
        if (table := self.table) is not None:
            linears.append(table.project)
            norms.append(table.norm)
            readable = table.table.fields() is not None and table.table.count == self.embedding.count
            if not readable or not self.spec.architecture.mlp.gated:
                return False
        return (
            self.embedding.device.type == "cpu"
            and (self.total is not None or self.embedding.fields() is not None)
            and kernels.has(f"decode_{kernels.dtype_name(self.embedding.dtype)}")
            and all(isinstance(_own(linear), Compiled) for linear in linears)
            and all(isinstance(norm, KernelNorm) for norm in norms)
            and all(layer.experts is None or layer.experts.compiled is not None for layer in self.layers)
            and all(layer.mixer is None or isinstance(layer.mixer, KernelMixer) for layer in self.layers)
            and all(layer.latent is None or layer.latent.fields() is not None for layer in self.layers)
            and all(layer.norm_token is None or layer.norm_attention is not None for layer in self.layers)
        )

    def _norms(self) -> list[Any]:
        """Norms outside layers."""
        return [norm for norm in (self.norm, self.norm_embedding, self.norm_given) if norm is not None]

    def check(self) -> None:
        """Raise ValueError for parts that the call would misread. It compares the sizes of linear layers itself."""
        dtype, hidden, heads = self.embedding.dtype, self.embedding.width, self.spec.heads
        parts = self._norms() + ([] if self.total is not None else [self.head, self.mix])
        for layer in self.layers:
            parts += [*map(_own, layer.linears()), *layer.norms()]
            width, kv_heads = layer.head_dim, layer.own_kv_heads
            sizes: list[tuple[Any, int]] = [(norm, hidden) for norm in layer.outer_norms()]
            sizes += [(layer.norm_query, heads * width), (layer.norm_key, kv_heads * width)]
            if (latent := layer.latent) is not None:
                sizes += [(latent.kv_a_norm, latent.sizes.rank), (latent.q_a_norm, latent.sizes.query_rank)]
            for norm, size in sizes:
                if norm is not None and norm.weight.shape != (size,):
                    raise ValueError(f"a norm of {[*norm.weight.shape]} numbers where {size} are normed")
            per_head = layer.norm_qk
            if per_head is not None and (
                per_head.count - heads not in (kv_heads, 2 * kv_heads) or per_head.width != width
            ):
                raise ValueError(f"a norm of {[*per_head.weight.shape]} numbers for heads of {width}")
            rotary = None if layer.rotary is None else self.rotaries[layer.rotary]
            if rotary is not None and layer.qkv is not None and rotary.width != width:
                raise ValueError(f"angles for {rotary.width} numbers of a head of {width}")
        if (table := self.table) is not None:
            parts += [table.project, table.norm, table.table]
            if table.table.width != len(self.layers) * table.width or table.norm.weight.shape != (table.width,):
                raise ValueError(
                    f"a table of {table.table.width} numbers for {len(self.layers)} layers with {table.width} each"
                )
        if any(getattr(part, "dtype", None) not in (None, dtype) for part in parts):
            raise ValueError(f"embeddings, layers and norms must all be in {dtype}")
        outer = [*self._norms(), *(norm for layer in self.layers for norm in layer.outer_norms())]
        if any(norm.subtracts is not self.norm.subtracts for norm in outer):
            raise ValueError("layer norms beside RMS norms")
        if any(norm.weight.numel() != self.embedding.width for norm in self._norms()):
            raise ValueError("the final norm has other numbers than the hidden state")


def _own(linear: Any) -> Any:
    """This rank's shard of a linear layer."""
    return linear.linear if isinstance(linear, Summed) else linear


def _fields(layer: Layer, index: int, rotaries: list[str], shared_gate: int, latent: int) -> list[int]:
    """A ``structs.LayerStruct`` and its linear layers; ``shared_gate`` and ``latent`` are addresses of those fields."""
    norms = {name: getattr(layer, name) for name in NORMS}
    mixture = None if layer.experts is None else layer.experts.compiled
    own = structs.LayerStruct(
        **{name: 0 if norm is None else norm.pointer for name, norm in norms.items()},
        rotary=-1 if layer.rotary is None else rotaries.index(layer.rotary),
        window=layer.window or 0,
        sink_tokens=layer.sink_tokens,
        experts=0 if mixture is None else mixture.address,
        activation_params=0 if layer.activation is None else layer.activation.pointer,
        sinks=0 if layer.sinks is None else layer.sinks.data_ptr(),
        gated=layer.gated,
        mixer=layer.mixer.address if isinstance(layer.mixer, KernelMixer) else 0,
        latent=latent,
        shared_gate=shared_gate,
        width=layer.head_dim,
        kv_heads=layer.kv_heads,
        has_kv=layer.kv_source is None,
        kv_source=index if layer.kv_source in (None, OUTSIDE) else layer.kv_source,
        qk_norm_heads=0 if layer.norm_qk is None else layer.norm_qk.count,
        scale=structs.number(1.0 if layer.scale is None else float(layer.scale)),
    )
    linears = [getattr(layer, name) for name in LINEARS]
    fields = [structs.NO_LAYER if linear is None else _own(linear).fields() for linear in linears]
    return [field for part in (own, *fields) for field in part]


class PartialSums:
    """Lets compiled code call ``total``, which sums over ranks."""

    def __init__(self, total: Callable[[torch.Tensor], torch.Tensor], width: int, dtype: torch.dtype) -> None:
        self.total, self.width, self.dtype = total, width, dtype
        self.error: BaseException | None = None
        """What ended the last call."""
        own = weakref.ref(self)  # a cycle would keep other ranks' processes
        self.call = kernels.ALL_REDUCE(lambda *arguments: cast("PartialSums", own())._sum(*arguments))
        self.address = ctypes.cast(self.call, ctypes.c_void_p).value or 0

    def _sum(self, part: int, wide: int, total: int, rows: int) -> int:
        try:
            result = self.total(self._rows(part, rows, torch.float32 if wide else self.dtype))
            self._rows(total, rows, torch.float32).copy_(result)
        except BaseException as error:  # noqa: BLE001 - compiled code cannot pass it on, ``through`` raises it
            self.error = error
            return 1
        return 0

    def _rows(self, address: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
        numbers = (ctypes.c_char * (rows * self.width * dtype.itemsize)).from_address(address)
        return torch.frombuffer(numbers, dtype=dtype).view(rows, self.width)


@dataclass(slots=True)
class Prepared:
    """A call's arguments, and where its results will be."""

    address: int
    logits: torch.Tensor
    hidden: dict[int, torch.Tensor]
    plan: AttentionPlan
    kept: tuple[Any, ...]
    """Everything that the arguments point to."""
    replay: Replay | None = None
    """Of recurrent layers."""
    experts: array[int] = field(default_factory=lambda: array("q", [0]))
    """How many experts were read in all layers, after the call."""


class Fused:
    """A ``Decoder`` all of whose parts have kernels."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder  # it keeps what the addresses below point to
        self.dtype = decoder.embedding.dtype
        self.call, self.draft = kernels.kernel("decode", self.dtype), kernels.kernel("draft", self.dtype)
        decoder.check()
        self.num_ids, self.hidden = decoder.embedding.count, decoder.embedding.width
        self.sums = None if decoder.total is None else PartialSums(decoder.total, self.hidden, self.dtype)
        self.keeps_state = any(layer.mixer is not None for layer in decoder.layers)
        head = decoder.head.fields() if decoder.total is None else structs.NO_LAYER
        self.vocab_size = head.outputs
        inner = max((_own(layer.down).inputs for layer in decoder.layers if layer.down is not None), default=0)
        inner = inner if decoder.table is None else max(inner, decoder.table.width)
        self.model = self._model(decoder, head, inner)
        self.layers = array("q")
        extras: list[tuple[Any, Any]] = [(layer.shared_gate, layer.latent) for layer in decoder.layers]
        self.extra_fields = [[part and array("q", part.fields()) for part in parts] for parts in extras]
        """What each layer's ``shared_gate`` and ``latent`` point to."""
        for index, parts in enumerate(self.extra_fields):
            at = (structs.address(fields) for fields in parts)
            self.layers.extend(_fields(decoder.layers[index], index, [*decoder.rotaries], *at))
        self.addresses = structs.address(self.model), structs.address(self.layers)
        self.row = self._workspace_widths(decoder, inner)
        self._sizes: dict[int, int] = {}
        """Numbers of the workspace, by rows."""
        self.all = array("q", range(len(decoder.layers)))

    def _model(self, decoder: Decoder, head: structs.LinearStruct, inner: int) -> array[int]:
        """A ``structs.ModelStruct`` and what follows it."""
        embedding, table, spec, of = decoder.embedding, decoder.table, decoder.spec, decoder.spec.architecture
        fields = embedding.fields() if decoder.total is None else (0, structs.NO_LAYER)
        if fields is None:
            raise ValueError("embeddings that the call cannot read")
        numbers, rows = fields
        table_numbers, table_rows = (None if table is None else table.table.fields()) or (0, structs.NO_LAYER)
        scaling = spec.query_scaling
        real = {
            "eps": decoder.norm.eps, "scale": spec.scale, "softcap": spec.softcap or 0,
            "logits_softcap": spec.logits_softcap or 0, "embedding_scale": embedding.scale,
            "residual_scale": spec.residual_scale, "logits_scale": spec.logits_scale,
            "attn_temp_scale": 0 if scaling is None else scaling.beta,
            "per_layer_scale": 1 if table is None else table.table.scale,
        }  # fmt: skip
        model = structs.ModelStruct(
            heads=spec.heads, hidden=self.hidden, intermediate=inner, layers=len(decoder.layers),
            num_embeddings=embedding.count, embedding=numbers, norm=decoder.norm.pointer,
            norm_embedding=0 if decoder.norm_embedding is None else decoder.norm_embedding.pointer,
            norm_given=0 if decoder.norm_given is None else decoder.norm_given.pointer,
            rotaries=len(decoder.rotaries),
            activation=structs.ACTIVATIONS.index(spec.activation), gated=of.mlp.gated,
            layer_norm=decoder.norm.subtracts, parallel=of.parallel, norm_after_rope=of.norms.after_rotary,
            attn_temp_floor=1 if scaling is None else scaling.reach, per_layer_size=0 if table is None else table.width,
            per_layer_table=table_numbers, per_layer_norm=0 if table is None else table.norm.pointer,
            **{name: structs.number(value) for name, value in real.items()},
        )  # fmt: skip
        mix = structs.NO_LAYER if decoder.mix is None else decoder.mix.fields()
        project = structs.NO_LAYER if table is None else table.project.fields()
        return array("q", (*model, *head, *rows, *mix, *table_rows, *project))

    def _workspace_widths(self, decoder: Decoder, inner: int) -> tuple[int, ...]:
        """Numbers per row of every piece of the workspace."""
        layers, table = decoder.layers, decoder.table
        first = [part for layer in layers for part in (layer.qkv, layer.mixer_in) if part is not None]
        inputs = max([self.hidden if decoder.mix is None else 2 * self.hidden, *(part.inputs for part in first)])
        outputs = max((part.outputs for part in first), default=0)
        attended = max((_own(layer.out).inputs for layer in layers if layer.out is not None), default=0)
        mixed = max((layer.mixer_out.inputs for layer in layers if layer.mixer_out is not None), default=0)
        latents = [layer.latent.sizes for layer in layers if layer.latent is not None]
        latent = max((sizes.workspace(decoder.spec.heads) for sizes in latents), default=0)
        per_layer = 0 if table is None else table.table.width
        return self.hidden, inputs, outputs, attended, mixed, latent, 2 * inner, inner, per_layer

    def __call__(
        self, batch: Batch, attention: KernelAttention, given: torch.Tensor | None = None,
        plan: AttentionPlan | None = None,
    ) -> Output:  # fmt: skip
        """Logits and hidden states as ``Model.forward``; ``given`` and ``plan`` as for ``prepare``. Raises IndexError
        for a token without an embedding."""
        call = self.prepare(batch, attention, given, plan=plan)
        self.call(*self.addresses, call.address)
        attention.finish(call.plan)
        if attention.states is not None and call.replay is not None:
            attention.states.commit(call.replay)
        return Output(call.logits, call.hidden, call.experts[0])

    def through(
        self, batch: Batch, attention: KernelAttention, plan: AttentionPlan, x: torch.Tensor
    ) -> dict[int, torch.Tensor]:
        """Run the batch's layers of one rank. Raises what ``total`` raises.

        Returns:
            Hidden states as ``Output.hidden``, and under ``RAW`` the last layer's output: of all rows if the normed one
            is asked for too, otherwise of the rows with logits.
        """
        assert self.sums is not None
        call = self.prepare(batch, attention, x, plan=plan)
        self.sums.error = None
        try:
            self.call(*self.addresses, call.address)
        except KernelError:
            if self.sums.error is not None:
                raise self.sums.error from None
            raise
        attention.finish(plan)
        return call.hidden

    def prepare(
        self,
        batch: Batch,
        attention: KernelAttention,
        given: torch.Tensor | None = None,
        ahead: int = 0,
        wide: int = 0,
        plan: AttentionPlan | None = None,
    ) -> Prepared:
        """A call's arguments.

        Args:
            given: the first layer's input [rows, hidden]; None: embeddings.
            ahead: positions after the batch's that get rotary angles too, for calls that follow.
            wide: the most rows of those calls, which all have logits.
            plan: what attention's ``begin`` returned, if it has been called.
        """
        pool, rows, num_logits = attention.pool, batch.num_rows, batch.num_logits
        if pool.dtype is not self.dtype or len(pool.keys) < len(self.decoder.layers):
            raise ValueError(f"a cache of {len(pool.keys)} layers in {pool.dtype} for {self.dtype} layers")
        plan = attention.begin(batch) if plan is None else plan
        given = self._embeds(batch) if given is None else self._checked(given, rows)
        size = max(span.end for span in batch.spans) + ahead
        tables = [rotary.table(size) for rotary in self.decoder.rotaries.values()]
        ids, positions = self._ids(batch), array("q")
        for span in batch.spans:
            positions.extend(span.positions())
        if len(positions) != rows or len(ids) != rows:
            raise ValueError(f"{len(ids)} tokens and {len(positions)} positions for {rows} rows")
        layers = self.all if batch.layers is None else array("q", batch.layers)
        hidden, hidden_addresses = self._hidden(batch, layers)
        scored = max(num_logits, wide)
        logits, workspace = torch.empty(scored, self.vocab_size), self._workspace(max(rows, wide), scored)
        out = array("q", _logit_rows(batch) if 0 < num_logits < rows else ())
        angles, experts = array("q", (table.data_ptr() for table in tables)), array("q", [0])
        lists = (ids, positions, layers, hidden_addresses, out, angles, experts)
        kv, pools = attention.kv()
        replay, compiled_replay, state_addresses = None, None, array("q")
        if self.keeps_state:
            replay, compiled_replay, state_addresses = self._states(batch, attention)
        call = array("q", structs.Call(
            rows=rows, threads=kernels.threads(), ids=structs.address(ids),
            inputs_embeds=0 if given is None else given.data_ptr(), positions=structs.address(positions),
            angles=structs.address(angles), num_angles=min(map(len, tables)), layer_ids=structs.address(layers),
            num_layer_ids=len(layers), hidden_out=structs.address(hidden_addresses), logit_rows=structs.address(out),
            num_logits=num_logits, workspace=workspace.data_ptr(), workspace_size=len(workspace),
            logits=logits.data_ptr() if self.vocab_size else 0, kv=kv, pools=pools, plan=plan.address,
            all_reduce=0 if self.sums is None else self.sums.address,
            replay=0 if compiled_replay is None else compiled_replay.address,
            states=structs.address(state_addresses), experts=structs.address(experts),
        ))  # fmt: skip
        kept = call, given, tables, workspace, compiled_replay, state_addresses, lists
        return Prepared(structs.address(call), logits, hidden, plan, kept, replay, experts)

    def _states(self, batch: Batch, attention: KernelAttention) -> tuple[Replay, CompiledReplay, array[int]]:
        """How to replay states, for the cache and for the kernel, and the addresses of every layer's records and
        checkpoint. Raises ValueError for states that are not these layers'."""
        states, layers = attention.states, self.decoder.layers
        if states is None or any((a is None) != (b.mixer is None) for a, b in zip(states.layers, layers, strict=True)):
            raise ValueError("the cache's states are not those of these layers")
        replay = states.plan(batch)
        return replay, lay_out(replay, states, batch.num_rows), states.addresses

    def _checked(self, given: torch.Tensor, rows: int) -> torch.Tensor:
        if given.shape != (rows, self.hidden) or given.dtype is not self.dtype or not given.is_cpu:
            raise ValueError(
                f"input rows {given.dtype} {[*given.shape]} on {given.device} for {rows} rows of {self.hidden} numbers "
                f"in {self.dtype} on cpu"
            )
        return given.contiguous()

    def _ids(self, batch: Batch) -> array[int]:
        """Token ids. They are checked here: the kernel does not."""
        ids = array("q", [token for span in batch.spans for token in span.tokens])
        least, most = min(ids), max(ids)
        if least < 0 or most >= self.num_ids:
            raise IndexError(f"tokens must be from 0 to {self.num_ids - 1}, not {least if least < 0 else most}")
        return ids

    def _embeds(self, batch: Batch) -> torch.Tensor | None:
        """Input rows; None if all are embeddings of tokens."""
        if batch.embeds is None:
            return None
        x = self.decoder.embedding(batch.input_ids)
        x[batch.embed_rows] = batch.embeds.to(x.dtype)
        return x

    def _hidden(self, batch: Batch, layers: Sequence[int]) -> tuple[dict[int, torch.Tensor], array[int]]:
        """Tensors for the hidden states that the batch asks for, and the addresses where each layer's input and the
        outputs go. The raw output has the rows with logits alone, unless the normed one is asked for too."""
        asked, last = batch.hidden if self.sums is None else (*batch.hidden, RAW), len(self.decoder.layers)
        hidden, addresses = dict[int, torch.Tensor](), array("q", bytes(8 * (len(layers) + 2)))
        order = [*layers, last, RAW] if asked else []
        for layer in asked:
            if layer in order:
                scored = layer == RAW and last not in batch.hidden  # only rows with logits
                count = batch.num_logits if scored else batch.num_rows
                hidden[layer] = part = torch.empty(count, self.hidden, dtype=self.dtype)
                addresses[order.index(layer)] = part.data_ptr()
        return hidden, addresses

    def _workspace(self, rows: int, num_logits: int) -> torch.Tensor:
        numbers = self._sizes.get(rows)
        if numbers is None:
            numbers = self._sizes[rows] = sum(-(-rows * width // ALIGNED) * ALIGNED for width in self.row)
        return torch.empty(numbers + num_logits * self.vocab_size, dtype=self.dtype)


def _logit_rows(batch: Batch) -> list[int]:
    rows = [offset + row for span, offset in zip(batch.spans, batch.offsets) for row in span.logits]
    if any(after <= before for before, after in pairwise(rows)):
        raise ValueError("the rows of a span whose logits are requested must ascend")
    return rows

"""A decoder layer's parts, and how a description and a checkpoint's weights become one."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import torch
import torch.nn.functional as F

from forerun.kernels import structs
from forerun.models.architectures.description import Name, ShortConvSpec
from forerun.models.architectures.spec import ALL, LatentSpec, LayerSpec, Spec
from forerun.models.formats.base import Linear
from forerun.models.formats.compiled import Compiled
from forerun.models.ranks.team import OverAll, Summed, Team
from forerun.models.run import recurrent
from forerun.models.run.experts import Expert, Experts
from forerun.models.run.parts import BlockConvolution, Function, KernelEach, KernelNorm, make_norm
from forerun.models.run.rotary import Rotary
from forerun.models.weights.layout import Embedding, Maker, Order


class PerHead:
    """A linear layer for each head; one call for all of them, if they have kernels."""

    def __init__(self, layers: Sequence[Linear], dtype: torch.dtype) -> None:
        self.layers = tuple(layers)
        own = [layer for layer in layers if isinstance(layer, Compiled)]
        self.compiled = KernelEach(own, dtype) if len(own) == len(layers) else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs [rows, heads, outputs] of x [rows, heads, inputs]."""
        if self.compiled is not None:
            return self.compiled(x)
        return torch.stack([layer(part) for layer, part in zip(self.layers, x.transpose(0, 1).contiguous())], 1)


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1): what happens
    between a layer's first projection, attention and its output projection.

    A token's cache entry is its latent and one rotated key for all heads. A head's ``k_b`` is applied to its queries
    instead of to latents, and its ``v_b`` to attention's output, so that attention has a single key-value head. Prompts
    and rounds both do it this way, so that a row has the same bits in either. ``q_b`` and ``q_a_norm`` are None where
    queries have no latent.
    """

    sizes: LatentSpec
    q_b: Linear | None
    q_a_norm: Any
    kv_a_norm: Any
    k_b: PerHead
    v_b: PerHead

    def linears(self) -> Iterator[Linear]:
        yield from () if self.q_b is None else (self.q_b,)
        yield from (*self.k_b.layers, *self.v_b.layers)

    def norms(self) -> Iterator[Any]:
        yield from () if self.q_a_norm is None else (self.q_a_norm,)
        yield self.kv_a_norm

    def fields(self) -> array[int] | None:
        """The fields that a compiled decoder reads, which this object must outlive; None if a part has no kernel."""
        sizes, k_b, v_b, q_b = self.sizes, self.k_b.compiled, self.v_b.compiled, self.q_b
        if k_b is None or v_b is None or not all(isinstance(norm, KernelNorm) for norm in self.norms()):
            return None
        if not isinstance(q_b, (Compiled, NoneType)):
            return None
        own = structs.LatentStruct(
            kv_lora_rank=sizes.rank, q_lora_rank=sizes.query_rank, nope_dim=sizes.nope_dim, rope_dim=sizes.rope_dim,
            v_dim=sizes.value_dim, q_a_norm=0 if self.q_a_norm is None else self.q_a_norm.pointer,
            kv_a_norm=self.kv_a_norm.pointer, eps=structs.number(self.kv_a_norm.eps), k_b=k_b.address, v_b=v_b.address,
        )  # fmt: skip
        return array("q", (*own, *(structs.NO_LAYER if q_b is None else q_b.fields())))

    def project(self, first: torch.Tensor, count: int, rotate: Function) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and cache entries of the first ``count`` rows.

        Args:
            first: outputs of the layer's first projection.
            rotate: applies the rotary embedding to [count, heads, rope_dim].

        Returns:
            Queries [count, heads, rank + rope_dim] and entries [count, 1, rank + rope_dim].
        """
        sizes, heads = self.sizes, len(self.k_b.layers)
        query_inputs = sizes.query_rank or heads * sizes.query_dim
        query, latent, key = first.split_with_sizes((query_inputs, sizes.rank, sizes.rope_dim), 1)
        if self.q_b is not None:
            query = self.q_b(self.q_a_norm(query))
        nope, rope = query.view(-1, heads, sizes.query_dim).split_with_sizes((sizes.nope_dim, sizes.rope_dim), 2)
        absorbed = self.k_b(nope)[:count]
        rope, key = rotate(rope[:count].contiguous()), rotate(key[:count].contiguous()[:, None])
        entry = torch.cat([self.kv_a_norm(latent)[:count, None], key], 2)
        return torch.cat([absorbed, rope], 2), entry

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """Head outputs [rows, heads * value_dim] of attention's outputs [rows, heads * rank]."""
        return self.v_b(attended.view(-1, len(self.v_b.layers), self.sizes.rank)).flatten(1)


LINEARS = ("qkv", "out", "mixer_in", "mixer_out", "gate_up", "down", "per_layer_gate", "per_layer_out")
"""A layer's projections, in the order in which their fields follow a ``structs.LayerStruct``."""
OUTER_NORMS = (
    "norm_attention", "norm_mlp", "norm_token", "after_attention", "after_mlp", "after_inputs", "norm_experts",
    "after_experts", "after_beside", "norm_router",
)  # fmt: skip
"""Norms of rows of the hidden size."""
NORMS = (*OUTER_NORMS, "norm_qk", "norm_query", "norm_key")
"""A layer's norms, by the names of ``structs.LayerStruct``."""


@dataclass(slots=True)
class LayerTable:
    """The per-layer embeddings of all layers: rows of ``table`` [tokens, layers * width], added to a normed projection
    of the token's embedding."""

    table: Embedding
    project: Any
    norm: Any
    width: int

    def __call__(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Per-layer embeddings [rows, layers, width] of embeddings x and of ``rows`` of the table."""
        projected = self.project(x) * x.shape[-1] ** -0.5
        projected = self.norm(projected.unflatten(1, (-1, self.width)))
        result: torch.Tensor = (projected + rows.view(projected.shape)) * 2**-0.5
        return result


@dataclass(slots=True, kw_only=True)
class Layer:
    """One decoder layer. A part that is None does not exist in this layer."""

    norm_attention: Any = None
    """Before attention and mixer."""
    norm_token: Any = None
    """Attention reads [normed token embedding, normed input] (EAGLE-3, arXiv 2503.01840)."""
    qkv: Any = None
    """Queries, keys and values, and after them the gate if ``gated``."""
    out: Any = None
    latent: LatentHeads | None = None
    """Makes queries and cache entries of the outputs of ``qkv``."""
    norm_qk: Any = None
    """Of each head of queries and keys (and values)."""
    norm_query: Any = None
    """Of all heads of queries together, as ``norm_key`` of keys."""
    norm_key: Any = None
    after_attention: Any = None
    """A norm of attention's output before it is added to the residual; ``after_mlp`` is the MLP's."""
    mixer: recurrent.Mixer | None = None
    """A mixer with state, in place of attention or beside it."""
    mixer_in: Any = None
    mixer_out: Any = None
    convolutions: tuple[Any, Any] | None = None
    """``parts.BlockConvolution`` around attention and around the MLP."""
    norm_mlp: Any = None
    gate_up: Any = None
    activation: Any = None
    """Between ``gate_up`` and ``down``; None in a draft head, whose decoder has it."""
    down: Any = None
    after_mlp: Any = None
    experts: Experts | None = None
    """In place of the MLP, or beside it."""
    shared_gate: Any = None
    """A projection to one number, whose sigmoid multiplies the output of the MLP beside experts."""
    norm_experts: Any = None
    """The four norms of ``description.ExpertNorms``: of the experts' and the router's inputs, and of the experts' and
    the MLP's outputs."""
    norm_router: Any = None
    after_experts: Any = None
    after_beside: Any = None
    per_layer_gate: Any = None
    """The layer's part of ``description.PerLayerEmbeddings``: ``gate``, ``out`` and ``after``."""
    per_layer_out: Any = None
    after_inputs: Any = None
    scale: torch.Tensor | None = None
    """Multiplies the layer's output."""

    rotary: str | None = ALL
    """The name of the rotary table; None: no rotary embedding."""
    window: int | None = None
    sink_tokens: int = 0
    causal: bool = True
    gated: bool = False
    sinks: torch.Tensor | None = None
    """[heads] float32, as in ``attention.base.Query``."""
    kv_heads: int = 0
    """Of the keys and values that attention reads."""
    head_dim: int = 0
    """0: the model's."""
    kv_source: int | None = None
    """The layer whose keys and values are read; None: its own."""

    @property
    def own_kv_heads(self) -> int:
        """Key-value heads that ``qkv`` makes."""
        return self.kv_heads if self.kv_source is None else 0

    def linears(self) -> Iterator[Any]:
        yield from self._parts(*LINEARS, "shared_gate")
        for part in (self.latent, self.experts):
            yield from () if part is None else part.linears()

    def fuse(self, activation: str, *, parallel: bool) -> None:
        """Moves norms and the ``activation`` into the linear layers beside them that compute these too, as those of
        GPUs do. With ``parallel`` attention and MLP share a norm."""
        if not parallel and self.convolutions is None:
            if self.mixer is None and self.norm_token is None and _absorb(self.qkv, norm=self.norm_attention):
                self.norm_attention = None
            if self.experts is None and _absorb(self.gate_up, norm=self.norm_mlp):
                self.norm_mlp = None
        if self.per_layer_gate is None and self.experts is None and _absorb(self.gate_up, gate=activation):
            self.activation = lambda rows: rows

    def norms(self) -> Iterator[Any]:
        yield from self._parts(*NORMS)
        inside = self.mixer or self.latent
        yield from () if inside is None else inside.norms()

    def outer_norms(self) -> Iterator[Any]:
        """Norms of rows of the hidden size."""
        return self._parts(*OUTER_NORMS)

    def _parts(self, *names: str) -> Iterator[Any]:
        return (part for name in names if (part := getattr(self, name)) is not None)


def _absorb(linear: Any, **what: Any) -> bool:
    """Whether a linear layer now computes a norm or an activation too."""
    return hasattr(linear, "absorb") and linear.absorb(**what)


@dataclass(slots=True)
class Builder:
    """Makes layers and norms of what ``maker`` loads; with ``kernels``, of our own kernels."""

    spec: Spec
    maker: Maker
    rotaries: Mapping[str, Rotary]
    activation: Callable[..., Any]
    """Makes the activation of MLPs and experts; ``params`` are a layer's own."""
    kernels: bool
    team: Team | None
    prefix: str = field(default="", init=False)
    """The name of the layer in the making."""

    def norm(self, name: str) -> Any:
        """A norm of rows of the hidden size."""
        norms = self.spec.architecture.norms
        bias = self.maker.numbers(f"{name}.bias") if norms.bias else None
        return self._norm(self._norm_weight(name), layer_norm=norms.layer_norm, bias=bias)

    def layer(self, index: int) -> Layer:
        architecture, spec, sizes = self.spec.architecture, self.spec.layers[index], self.spec.at(index)
        self.prefix = f"{architecture.layers.checkpoint}.{index}"
        norms = architecture.norms
        layer = Layer(
            norm_attention=self._outer_norm(norms.before_attention) if spec.attention or spec.mixer else None,
            norm_token=self._outer_norm(norms.token),
            after_attention=self._outer_norm(norms.after_attention),
            norm_mlp=self._outer_norm(norms.before_mlp) if spec.mlp or spec.experts else None,
            after_mlp=self._outer_norm(norms.after_mlp),
            rotary=spec.rotary,
            window=spec.window,
            sink_tokens=spec.sink_tokens,
            causal=spec.causal,
            kv_heads=self.spec.kv_heads if spec.heads is None else spec.heads[0],
            head_dim=sizes.head_dim,
            kv_source=spec.kv_source,
        )
        if spec.attention:
            self._add_attention(layer, spec, sizes)
        if spec.mixer:
            self._add_mixer(layer, index)
        if spec.mlp:
            mlp = self.spec.mlp(spec)
            layer.gate_up, layer.down = self._linear(*mlp.gate_up), self._summed(self._linear(mlp.down))
            params = [self.maker.number(self._at(name)) for name in architecture.mlp.activation_params]
            layer.activation = self.activation(params=_xielu(params)) if params else self.activation()
        if spec.experts:
            self._add_experts(layer, spec)
        if self.spec.per_layer_width and (names := architecture.per_layer) is not None:
            layer.per_layer_gate, layer.per_layer_out = self._linear(names.gate), self._linear(names.out)
            layer.after_inputs = self._outer_norm(names.after)
        if (given := architecture.draft_input) is not None and given.convolutions is not None:
            around, beside = (self._convolution(name, given.block) for name in given.convolutions)
            layer.convolutions = around, beside
        if architecture.layer_scale is not None:
            layer.scale = self.maker.number(self._at(architecture.layer_scale))
        return layer

    def context(self) -> tuple[Linear, Any, Rotary]:
        """A projection of rows to all layers' keys and then values, the keys' norm, and their rotary embedding."""
        names, key, sizes = self.spec.architecture.attention.qkv, self.spec.architecture.norms.key, self.spec
        rotary, layers = self.rotaries[sizes.rotaries[0]], range(len(sizes.layers))
        prefixes = [f"{sizes.architecture.layers.checkpoint}.{index}." for index in layers]
        order = [lambda rows: rotary.arrange_rows(rows, sizes.kv_heads), None]
        project = self.maker.linear(
            *(f"{prefix}{name.checkpoint}" for name in names[1:] for prefix in prefixes),
            order=[each for each in order for _ in layers],
        )
        if key is None:
            return project, None, rotary
        weights = [rotary.arrange(self._norm_weight(f"{prefix}{key.checkpoint}")) for prefix in prefixes]
        return project, self._norm(torch.stack(weights).repeat_interleave(sizes.kv_heads, 0)), rotary

    def _convolution(self, name: Name, block: int) -> BlockConvolution:
        base = self.maker.numbers(f"{self._at(name)}.base_kernel").to(self.maker.dtype)
        return BlockConvolution(base, self.maker.linear(f"{self._at(name)}.kernel_projection"), block)

    def _at(self, name: Name) -> str:
        return f"{self.prefix}.{name.checkpoint}"

    def _linear(self, *names: Name, order: Sequence[Order] = ()) -> Linear:
        return self.maker.linear(*map(self._at, names), order=order)

    def _summed(self, linear: Linear) -> Linear:
        return linear if self.team is None else Summed(linear, self.team)

    def _floats(self, name: Name) -> torch.Tensor:
        return self.maker.numbers(self._at(name)).float()

    def _norm(self, weight: torch.Tensor, eps: float | None = None, **options: Any) -> Any:
        return make_norm(weight, eps or self.spec.eps, self.maker.dtype, kernels=self.kernels, **options)

    def _norm_weight(self, name: str) -> torch.Tensor:
        result, offset = self.maker.numbers(f"{name}.weight"), self.spec.architecture.norms.offset
        return result.float() + offset if offset else result

    def _outer_norm(self, name: Name | None) -> Any:
        return None if name is None else self.norm(self._at(name))

    def _add_attention(self, layer: Layer, spec: LayerSpec, sizes: Spec) -> None:
        """Makes projections in the order of their use, which is that in memory: kernels prefetch into the next one."""
        norms, attention = self.spec.architecture.norms, self.spec.architecture.attention
        rotary = self.rotaries[spec.rotary or self.spec.rotaries[0]]
        if self.spec.latent is not None:
            self._add_latent(layer, self.spec.latent, rotary)
        else:
            names = attention.qkv
            if spec.kv_source is not None:
                names = names[:1]
            elif spec.key_is_value:
                names = (names[0], names[1], names[1])
            layer.qkv = self._qkv(names, sizes, rotary)
        layer.out, layer.gated = self._summed(self._linear(attention.out)), attention.gated
        if attention.sinks is not None:
            layer.sinks = self._floats(attention.sinks)
        if norms.query is not None and norms.key is not None:
            query = self._norm_weight(self._at(norms.query))
            key = query if spec.kv_source is not None else self._norm_weight(self._at(norms.key))
            self._add_head_norms(layer, query, key, rotary)

    def _qkv(self, names: tuple[Name, ...], sizes: Spec, rotary: Rotary) -> Linear:
        width, rotated = sizes.head_dim, sizes.heads + sizes.kv_heads

        def arranged(rows: torch.Tensor) -> torch.Tensor:
            return rotary.arrange_rows(rows, len(rows) // width)

        def half(rows: torch.Tensor, which: int) -> torch.Tensor:
            pairs: torch.Tensor = rows.unflatten(0, (-1, 2, width))
            return pairs[:, which].flatten(0, 1)

        if self.spec.architecture.attention.gated:
            order = (lambda rows: arranged(half(rows, 0)), arranged, None, lambda rows: half(rows, 1))
            return self._linear(*names, names[0], order=order)
        if len(names) == 1:
            return self._linear(*names, order=[lambda rows: rotary.arrange_rows(rows, rotated)])
        return self._linear(*names, order=(arranged, arranged, None))

    def _add_head_norms(self, layer: Layer, query: torch.Tensor, key: torch.Tensor, rotary: Rotary) -> None:
        kv_heads = layer.own_kv_heads
        if self.spec.architecture.norms.over_heads:
            weights = (rotary.arrange(weight.view(-1, layer.head_dim)).flatten() for weight in (query, key))
            norms = map(self._norm, weights)
            layer.norm_query, layer.norm_key = norms if self.team is None else (OverAll(n, self.team) for n in norms)
            return
        weight = rotary.arrange(torch.cat([query.expand(self.spec.heads, -1), key.expand(kv_heads, -1)]))
        if self.spec.architecture.norms.norm_values:
            weight = torch.cat([weight, weight.new_ones(kv_heads, layer.head_dim)])
        layer.norm_qk = self._norm(weight)

    def _add_latent(self, layer: Layer, sizes: LatentSpec, rotary: Rotary) -> None:
        names, maker = self.spec.architecture.latent, self.maker
        assert names is not None

        def entry(rows: torch.Tensor) -> torch.Tensor:
            return torch.cat([rows[: sizes.rank], rotary.arrange_rows(rows[sizes.rank :], 1)])

        def queries(rows: torch.Tensor) -> torch.Tensor:
            nope, rope = rows.unflatten(0, (-1, sizes.query_dim)).split_with_sizes((sizes.nope_dim, sizes.rope_dim), 1)
            rope = rotary.arrange_rows(rope.flatten(0, 1), len(rope)).view(rope.shape)
            return torch.cat([nope, rope], 1).flatten(0, 1)

        def norm(name: Name) -> Any:
            return self._norm(maker.numbers(f"{self._at(name)}.weight"), names.eps)

        k_b, v_b = (
            PerHead([maker.linear(self._at(name).format(head)) for head in range(self.spec.heads)], maker.dtype)
            for name in (names.k_b, names.v_b)
        )
        q_b: Linear | None = None
        if sizes.query_rank:
            layer.qkv = self._linear(names.q_a, names.kv_a, order=(None, entry))
            q_b = self._linear(names.q_b, order=(queries,))
        else:
            layer.qkv = self._linear(names.q, names.kv_a, order=(queries, entry))
        q_a_norm = None if q_b is None else norm(names.q_a_norm)
        layer.latent = LatentHeads(sizes, q_b, q_a_norm, norm(names.kv_a_norm), k_b, v_b)

    def _add_mixer(self, layer: Layer, index: int) -> None:
        names, sizes, maker = self.spec.architecture.mixer, self.spec.mixer, self.maker
        assert names is not None
        assert sizes is not None
        if isinstance(names, ShortConvSpec):
            layer.mixer_in = self._linear(names.in_proj)
        elif names.kind == "delta":  # rows: q, k, v, beta, decay, then the output gate
            qkv, gate, beta, decay = names.in_proj
            layer.mixer_in = self._linear(qkv, beta, decay, gate)
        else:
            order = [lambda rows: torch.cat([rows[sizes.inner :], rows[: sizes.inner]])]
            layer.mixer_in = self._linear(*names.in_proj, order=order)
        layer.mixer_out = self._summed(self._linear(names.out))
        bias = maker.numbers(f"{self._at(names.conv)}.bias") if sizes.conv_bias else None
        conv = recurrent.Convolution(maker.numbers(f"{self._at(names.conv)}.weight"), bias)
        if isinstance(names, ShortConvSpec):
            short = recurrent.ShortConv(index, sizes, conv, maker.dtype)
            layer.mixer = recurrent.KernelMixer(short) if self.kernels else short
            return
        norm: Any = None
        if sizes.has_norm:
            weight = maker.numbers(f"{self._at(names.norm)}.weight")
            norm = self._norm(weight if names.skip is None or sizes.groups == 1 else weight.view(sizes.groups, -1))
        over_ranks = self.team if sizes.norm_over_ranks else None
        parts = (index, sizes, conv, norm if over_ranks is None else None, maker.dtype,
                 -torch.exp(self._floats(names.decay)), self._floats(names.dt_bias))  # fmt: skip
        made: recurrent.Recurrent
        if names.skip is None:
            made = recurrent.DeltaNet(*parts)
        else:
            made = recurrent.Mamba2(*parts, self._floats(names.skip))
        layer.mixer = recurrent.KernelMixer(made) if self.kernels else made
        if over_ranks is not None:
            layer.mixer = recurrent.NormedMixer(layer.mixer, OverAll(norm, over_ranks))

    def _add_experts(self, layer: Layer, spec: LayerSpec) -> None:
        names, routing, team, count = self.spec.architecture.experts, self.spec.routing, self.team, spec.experts
        assert names is not None
        assert routing is not None
        here = range(count)
        if team is not None:
            here = range(team.rank * (count // team.size), (team.rank + 1) * (count // team.size))

        def linear(expert: int, *parts: Name) -> Linear:
            return self.maker.linear(*(self._at(name).format(expert) for name in parts))

        router = self.maker.router(self._at(names.router))
        layer.experts = Experts(
            router, [Expert(linear(expert, *names.gate_up), linear(expert, names.down)) for expert in here],
            self.activation(), routing, count, here.start,
            score_bias=self._floats(names.score_bias) if names.score_bias and routing.has_score_bias else None,
            scales=None if names.norms is None else self._floats(names.norms.weights),
            **({} if team is None else {"total": team.sum}),
        )  # fmt: skip
        if spec.mlp and names.shared_gate is not None:
            layer.shared_gate = self.maker.router(self._at(names.shared_gate))
        if (norms := names.norms) is not None:
            layer.norm_experts = self._outer_norm(norms.before)
            layer.norm_router = self._norm(self._floats(norms.scale) * self.spec.hidden**-0.5)
            layer.after_experts, layer.after_beside = self._outer_norm(norms.after), self._outer_norm(norms.mlp)


def _xielu(params: list[torch.Tensor]) -> torch.Tensor:
    """The numbers of ``activations.xielu`` of a checkpoint's alpha_p, alpha_n, beta and eps."""
    alpha_p, alpha_n, beta, eps = params
    return torch.stack([F.softplus(alpha_p), beta + F.softplus(alpha_n), beta, eps])

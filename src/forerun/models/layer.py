"""One decoder layer's parts, and how they are made as an architecture's description says."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
import torch.nn.functional as F

from forerun.kernels import structs
from forerun.models import recurrent
from forerun.models.architectures.description import Mixer as Description
from forerun.models.architectures.description import Name, ShortConvSpec
from forerun.models.architectures.spec import ALL, LatentSpec, Spec
from forerun.models.experts import Choice, Expert, Experts
from forerun.models.formats.base import Linear
from forerun.models.formats.compiled import Compiled
from forerun.models.layout import Maker, Words
from forerun.models.parts import Function, KernelEach, KernelNorm, make_norm
from forerun.models.ranks.team import OverAll, Summed, Team
from forerun.models.rotary import Rotary


class Heads:
    """A layer for each head: in one call, where they have kernels."""

    def __init__(self, layers: Sequence[Linear], dtype: torch.dtype) -> None:
        self.layers = tuple(layers)
        own = [layer for layer in layers if isinstance(layer, Compiled)]
        self.compiled = KernelEach(own, dtype) if len(own) == len(layers) else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, heads, outputs] of [rows, heads, inputs]."""
        if self.compiled is not None:
            return self.compiled(x)
        return torch.stack([layer(part) for layer, part in zip(self.layers, x.transpose(0, 1).contiguous())], 1)


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1): what is between a
    layer's first projection, the cache and its last projection.

    A token's entry in the cache is its latent and one turned key for all heads. A head's projection of latents to keys
    is applied to its queries instead (``keys``), and that to values to what attention makes of latents, so that
    attention is one with a single key-value head. Every number of rows takes this way: a row has the same bits in a
    prompt and in a round. ``up`` and ``norm_query`` are None where queries have no latent.
    """

    sizes: LatentSpec
    up: Linear | None
    norm_query: Any
    norm: Any
    keys: Heads
    values: Heads

    def linears(self) -> Iterator[Linear]:
        yield from () if self.up is None else (self.up,)
        yield from (*self.keys.layers, *self.values.layers)

    def norms(self) -> Iterator[Any]:
        yield from () if self.norm_query is None else (self.norm_query,)
        yield self.norm

    def fields(self) -> array[int] | None:
        """What a compiled decoder reads, which this must outlive; None where some part has no kernel."""
        sizes, keys, values, up = self.sizes, self.keys.compiled, self.values.compiled, self.up
        if keys is None or values is None or not all(isinstance(norm, KernelNorm) for norm in self.norms()):
            return None
        if not isinstance(up, (Compiled, NoneType)):
            return None
        asked = 0 if self.norm_query is None else self.norm_query.pointer
        own = structs.LatentStruct(
            sizes.rank, sizes.query_rank, sizes.plain, sizes.turned, sizes.value, asked, self.norm.pointer,
            structs.number(self.norm.eps), keys.address, values.address,
        )  # fmt: skip
        return array("q", (*own, *(structs.NO_LAYER if up is None else up.fields())))

    def ask(self, made: torch.Tensor, count: int, turn: Function) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [count, heads, entry] and entries [count, 1, entry] of the first ``count`` rows of ``made``, the
        layer's first projection; ``turn`` turns heads [count, heads, turned] by their position."""
        sizes, heads = self.sizes, len(self.keys.layers)
        first = sizes.query_rank or heads * sizes.query
        query, latent, key = made.split_with_sizes((first, sizes.rank, sizes.turned), 1)
        if self.up is not None:
            query = self.up(self.norm_query(query))
        plain, turned = query.view(-1, heads, sizes.query).split_with_sizes((sizes.plain, sizes.turned), 2)
        absorbed = self.keys(plain)[:count]
        turned, key = turn(turned[:count].contiguous()), turn(key[:count].contiguous()[:, None])
        entry = torch.cat([self.norm(latent)[:count, None], key], 2)
        return torch.cat([absorbed, turned], 2), entry

    def answer(self, out: torch.Tensor) -> torch.Tensor:
        """[rows, heads * value] of what attention made of latents, [rows, heads * rank]."""
        return self.values(out.view(-1, len(self.values.layers), self.sizes.rank)).flatten(1)


LINEARS = ("qkv", "out", "enter", "leave", "gate_up", "down", "to_inputs", "from_inputs")
"""Parts of a layer, in the order in which their fields follow a ``structs.LayerStruct``."""
OUTER_NORMS = (
    "norm_attention", "norm_mlp", "norm_token", "after_attention", "after_mlp", "after_inputs", "norm_experts",
    "after_experts", "after_beside", "norm_router",
)  # fmt: skip
"""Of rows of the hidden size."""
NORMS = (*OUTER_NORMS, "norm_qk", "norm_query", "norm_key")
"""Names of ``structs.LayerStruct``, too."""


@dataclass(slots=True)
class LayerTable:
    """What all layers' per-layer embeddings are made of: rows of ``table`` [tokens, layers x width], and a normed
    projection of the embedding."""

    table: Words
    project: Any
    norm: Any
    width: int

    def __call__(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[rows, layers, width] of rows x of the embedding, and those of the table."""
        made = self.project(x) * x.shape[-1] ** -0.5
        made = self.norm(made.unflatten(1, (-1, self.width)))
        result: torch.Tensor = (made + rows.view(made.shape)) * 2**-0.5
        return result


@dataclass(slots=True)
class Layer:
    """One decoder layer's weights; None: there is no such part. Attention and mixer read the same input.
    ``norm_token``: its attention reads [normed embedding of the token, normed input] (EAGLE-3, arXiv 2503.01840)."""

    qkv: Any
    out: Any
    gate_up: Any
    down: Any
    norm_attention: Any
    norm_mlp: Any
    norm_qk: Any = None
    """Of every head of queries and keys."""
    norm_token: Any = None
    window: int | None = None
    norm_query: Any = None
    """Of all heads of queries together, as ``norm_key`` of keys."""
    norm_key: Any = None
    after_attention: Any = None
    """A norm of what attention adds, as ``after_mlp``."""
    after_mlp: Any = None
    experts: Experts | None = None
    """In place of ``gate_up`` and ``down``, or beside them."""
    share: Any = None
    """Of a row, one number: its sigmoid multiplies what ``down`` makes beside experts."""
    norm_experts: Any = None
    """Where experts and the MLP beside them have norms of their own (``description.ApartSpec``): of what experts read,
    of what the router reads, of what experts make and of what the MLP makes."""
    norm_router: Any = None
    after_experts: Any = None
    after_beside: Any = None
    rotary: str | None = ALL
    """Which of the model's tables turns queries and keys; None: none does."""
    gated: bool = False
    """``qkv`` makes a gate of the attention's output behind the values."""
    mixer: recurrent.Mixer | None = None
    """In the place of attention, or beside it."""
    enter: Any = None
    """Makes the mixer's inputs."""
    leave: Any = None
    """Reads its outputs."""
    latent: LatentHeads | None = None
    """Makes queries and entries of what ``qkv`` makes."""
    gate: Any = None
    """Between ``gate_up`` and ``down``; None in a head, whose decoder has it."""
    sinks: torch.Tensor | None = None
    """[heads] float32, as in ``attention.base.Query``."""
    kv_heads: int = 0
    """Of the keys and values that it reads."""
    width: int = 0
    """Of a head; 0: the model's."""
    source: int | None = None
    """The layer whose keys and values are read; None: its own."""
    to_inputs: Any = None
    """How it reads its per-layer embedding (``description.LayerInputs``): the projection to it and that from it, and
    the norm of what that makes."""
    from_inputs: Any = None
    after_inputs: Any = None
    scale: torch.Tensor | None = None
    """What the output is multiplied by."""

    @property
    def made(self) -> int:
        """Key-value heads that ``qkv`` makes."""
        return self.kv_heads if self.source is None else 0

    def linears(self) -> Iterator[Any]:
        yield from self._held(*LINEARS, "share")
        for part in (self.latent, self.experts):
            yield from () if part is None else part.linears()

    def norms(self) -> Iterator[Any]:
        yield from self._held(*NORMS)
        inside = self.mixer or self.latent
        yield from () if inside is None else inside.norms()

    def outer_norms(self) -> Iterator[Any]:
        """Of rows of the hidden size."""
        return self._held(*OUTER_NORMS)

    def _held(self, *names: str) -> Iterator[Any]:
        return (part for name in names if (part := getattr(self, name)) is not None)


@dataclass(slots=True)
class Builder:
    """Makes layers and norms; ``gate`` makes what MLPs and experts have between their layers, of its numbers."""

    spec: Spec
    maker: Maker
    rotaries: Mapping[str, Rotary]
    gate: Callable[..., Any]
    kernels: bool
    team: Team | None

    def norm(self, name: str) -> Any:
        """Of rows of the hidden size."""
        norms = self.spec.architecture.norms
        bias = self.maker.numbers(f"{name}.bias") if norms.bias else None
        return self._norm(self._numbers(name), centred=norms.centred, bias=bias)

    def _norm(self, weight: torch.Tensor, eps: float | None = None, **how: Any) -> Any:
        return make_norm(weight, eps or self.spec.eps, self.maker.dtype, kernels=self.kernels, **how)

    def _numbers(self, name: str) -> torch.Tensor:
        result, plus = self.maker.numbers(f"{name}.weight"), self.spec.architecture.norms.plus
        return result.float() + plus if plus else result

    def layer(self, index: int) -> Layer:
        architecture, spec, sized = self.spec.architecture, self.spec.layers[index], self.spec.at(index)
        rotary = self.rotaries[spec.rotary or self.spec.rotaries[0]]
        prefix = f"{architecture.layers.checkpoint}.{index}"
        norms, attention = architecture.norms, architecture.attention

        def at(name: Name) -> str:
            return f"{prefix}.{name.checkpoint}"

        def norm(name: Name | None) -> Any:
            return None if name is None else self.norm(at(name))

        def linear(*names: Name) -> Linear:
            return self.maker.linear(*map(at, names))

        mixer = architecture.mixer if spec.mixer else None
        mixes, changes = spec.attention or spec.mixer, spec.mlp or spec.experts > 0
        share = architecture.experts.gate if architecture.experts is not None and spec.experts and spec.mlp else None
        names = [at(name) for name in attention.qkv]
        if spec.source is not None:
            names = names[:1]
        elif spec.twice:
            names = [names[0], names[1], names[1]]
        mlp = self.spec.mlp(spec)
        qkv: Linear | None = None
        latent: LatentHeads | None = None
        if self.spec.latent is not None:
            qkv, latent = self._latent(at, rotary)
        elif spec.attention:
            qkv = self._projections(names, sized, rotary)
        layer = Layer(
            qkv=qkv,
            out=self._summed(linear(attention.out)) if spec.attention else None,
            enter=None if mixer is None else self._mixer_inputs(mixer, at),
            leave=None if mixer is None else self._summed(linear(mixer.out)),
            gate_up=linear(*mlp.gate_up) if spec.mlp else None,
            down=self._summed(linear(mlp.down)) if spec.mlp else None,
            norm_attention=norm(norms.before_attention) if mixes else None,
            norm_mlp=norm(norms.before_mlp) if changes else None,
            window=spec.window,
            after_attention=norm(norms.after_attention),
            after_mlp=norm(norms.after_mlp),
            experts=self._experts(prefix, spec.experts) if spec.experts else None,
            share=None if share is None else self.maker.router(at(share)),
            rotary=spec.rotary,
            gate=self._gate(prefix) if spec.mlp else None,
            sinks=None if attention.sinks is None else self.maker.numbers(at(attention.sinks)).float(),
            gated=attention.gated and spec.attention,
            mixer=None if mixer is None else self._mixer(mixer, at, index),
            latent=latent,
            kv_heads=self.spec.kv_heads if spec.heads is None else spec.heads[0],
            width=sized.width,
            source=spec.source,
            scale=None if architecture.layer_scale is None else self.maker.number(at(architecture.layer_scale)),
        )
        if self.spec.inputs and (own := architecture.inputs) is not None:
            layer.to_inputs, layer.from_inputs = linear(own.gate), linear(own.out)
            layer.after_inputs = norm(own.after)
        if spec.experts and architecture.experts is not None and (apart := architecture.experts.apart) is not None:
            scale = self.maker.numbers(at(apart.scale)).float() * self.spec.hidden**-0.5
            layer.norm_experts, layer.norm_router = norm(apart.before), self._norm(scale)
            layer.after_experts, layer.after_beside = norm(apart.after), norm(apart.mlp)
        if spec.attention and norms.query is not None and norms.key is not None:
            query = self._numbers(at(norms.query))
            key = query if spec.source is not None else self._numbers(at(norms.key))
            self._norm_heads(layer, query, key, rotary)
        return layer

    def _mixer_inputs(self, names: Description, at: Callable[[Name], str]) -> Linear:
        """The projection that makes a row's record, and the gate behind it."""
        if isinstance(names, ShortConvSpec):
            return self.maker.linear(at(names.inputs))
        if names.kind == "delta":
            qkv, gate, beta, decay = map(at, names.inputs)
            return self.maker.linear(qkv, beta, decay, gate)
        assert self.spec.mixer is not None
        inner = self.spec.mixer.inner
        return self.maker.linear(at(names.inputs[0]), order=[lambda rows: torch.cat([rows[inner:], rows[:inner]])])

    def _mixer(self, names: Description, at: Callable[[Name], str], index: int) -> recurrent.Mixer:
        """Of layer ``index``."""
        sizes, maker = self.spec.mixer, self.maker
        assert sizes is not None
        bias = maker.numbers(f"{at(names.conv)}.bias") if sizes.conv_biased else None
        conv = recurrent.Convolution(maker.numbers(f"{at(names.conv)}.weight"), bias)
        if isinstance(names, ShortConvSpec):
            short = recurrent.ShortConv(index, conv, maker.dtype)
            return recurrent.KernelMixer(short) if self.kernels else short
        norm: Any = None
        if sizes.normed:
            weight = maker.numbers(f"{at(names.norm)}.weight")
            norm = self._norm(weight if names.skip is None or sizes.groups == 1 else weight.view(sizes.groups, -1))
        decay, step = (maker.numbers(at(name)).float() for name in (names.decay, names.step))
        skip = None if names.skip is None else maker.numbers(at(names.skip)).float()
        team = self.team if sizes.norm_over_all else None
        parts = index, sizes, conv, norm if team is None else None, maker.dtype, -torch.exp(decay), step
        made = recurrent.DeltaNet(*parts) if skip is None else recurrent.Mamba2(*parts, skip)
        mixer = recurrent.KernelMixer(made) if self.kernels else made
        return mixer if team is None else recurrent.NormedMixer(mixer, OverAll(norm, team))

    def _latent(self, at: Callable[[Name], str], rotary: Rotary) -> tuple[Linear, LatentHeads]:
        """The first projection, of queries or their latent and of the entry, and what is behind it."""
        names, sizes, maker = self.spec.architecture.latent, self.spec.latent, self.maker
        assert names is not None
        assert sizes is not None

        def entry(rows: torch.Tensor) -> torch.Tensor:
            return torch.cat([rows[: sizes.rank], rotary.arrange_rows(rows[sizes.rank :], 1)])

        def queries(rows: torch.Tensor) -> torch.Tensor:
            plain, turned = rows.unflatten(0, (-1, sizes.query)).split_with_sizes((sizes.plain, sizes.turned), 1)
            turned = rotary.arrange_rows(turned.flatten(0, 1), len(turned)).view(turned.shape)
            return torch.cat([plain, turned], 1).flatten(0, 1)

        def norm(name: Name) -> Any:
            return self._norm(maker.numbers(f"{at(name)}.weight"), names.eps)

        keys, values = (
            Heads([maker.linear(at(name).format(head)) for head in range(self.spec.heads)], maker.dtype)
            for name in (names.keys, names.values)
        )
        if not sizes.query_rank:
            first = maker.linear(at(names.query), at(names.down), order=(queries, entry))
            return first, LatentHeads(sizes, None, None, norm(names.norm), keys, values)
        first = maker.linear(at(names.down_query), at(names.down), order=(None, entry))
        up = maker.linear(at(names.up_query), order=(queries,))
        return first, LatentHeads(sizes, up, norm(names.norm_query), norm(names.norm), keys, values)

    def _projections(self, names: list[str], sized: Spec, rotary: Rotary) -> Linear:
        """Queries, keys and values, and behind them the gate if there is one."""
        width, both = sized.width, sized.heads + sized.kv_heads

        def turned(rows: torch.Tensor) -> torch.Tensor:
            return rotary.arrange_rows(rows, len(rows) // width)

        def part(rows: torch.Tensor, which: int) -> torch.Tensor:
            return rows.unflatten(0, (-1, 2, width))[:, which].flatten(0, 1)

        if self.spec.architecture.attention.gated:
            order = (lambda rows: turned(part(rows, 0)), turned, None, lambda rows: part(rows, 1))
            return self.maker.linear(*names, names[0], order=order)
        joint = (lambda rows: rotary.arrange_rows(rows, both),)
        return self.maker.linear(*names, order=joint if len(names) == 1 else (turned, turned, None))

    def _gate(self, prefix: str) -> Any:
        names = self.spec.architecture.mlp.numbers
        numbers = [self.maker.number(f"{prefix}.{name.checkpoint}") for name in names]
        return self.gate(_xielu(numbers)) if numbers else self.gate()

    def _summed(self, linear: Linear) -> Linear:
        return linear if self.team is None else Summed(linear, self.team)

    def _norm_heads(self, layer: Layer, query: torch.Tensor, key: torch.Tensor, rotary: Rotary) -> None:
        heads, kv_heads = self.spec.heads, layer.made  # values follow where they are normed
        if self.spec.architecture.norms.whole:
            rotated = (rotary.arrange(weight.view(-1, layer.width)).flatten() for weight in (query, key))
            made = map(self._norm, rotated)
            layer.norm_query, layer.norm_key = made if self.team is None else (OverAll(n, self.team) for n in made)
        else:
            stacked = torch.cat([query.expand(heads, -1), key.expand(kv_heads, -1)])
            weights = rotary.arrange(stacked)
            if self.spec.architecture.norms.values:
                weights = torch.cat([weights, weights.new_ones(kv_heads, layer.width)])
            layer.norm_qk = self._norm(weights)

    def _experts(self, prefix: str, count: int) -> Experts:
        names = self.spec.architecture.experts
        assert names is not None
        router, team = self.maker.router(f"{prefix}.{names.router.checkpoint}"), self.team
        fraction = count if team is None else count // team.size
        first = 0 if team is None else team.rank * fraction

        def at(name: Name, expert: int) -> str:
            return f"{prefix}.{name.checkpoint.format(expert)}"

        experts = [
            Expert(
                self.maker.linear(*(at(name, expert) for name in names.gate_up)),
                self.maker.linear(at(names.down, expert)),
            )
            for expert in range(first, first + fraction)
        ]
        others: dict[str, Any] = {} if team is None else {"first": first, "total": team.sum}

        def numbers(name: Name | None) -> torch.Tensor | None:
            return None if name is None else self.maker.numbers(f"{prefix}.{name.checkpoint}").float()

        spec, scales = self.spec, None if names.apart is None else numbers(names.apart.weights)
        correction = numbers(names.correction) if spec.corrected else None
        choice = Choice(names.sigmoid, correction, spec.factor, spec.groups, names.best, names.eps, scales)
        return Experts(router, experts, self.gate(), spec.chosen, spec.normalised, choice, count, **others)


def _xielu(result: list[torch.Tensor]) -> torch.Tensor:
    """The numbers of ``activations.xielu`` of those in a checkpoint: alpha_p, alpha_n, beta, eps."""
    rise, fall, slope, eps = result
    return torch.stack([F.softplus(rise), slope + F.softplus(fall), slope, eps])

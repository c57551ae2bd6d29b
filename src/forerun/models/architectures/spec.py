"""An architecture at a checkpoint's sizes: a ``Spec`` is what a description and a config say together, read once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from forerun.cache.pool import KVShape
from forerun.cache.states import StateShape
from forerun.core.config import COUNT, NOT_NEGATIVE, POSITIVE, Within
from forerun.core.errors import shown
from forerun.models.architectures.description import (
    Architecture,
    Attention,
    ExpertsSpec,
    LatentAttention,
    Mixer,
    Mlp,
    Recurrence,
    ShortConvSpec,
)
from forerun.models.architectures.families import ARCHITECTURES
from forerun.models.run.rotary import ROPE_TYPES, is_constant

SILU, GELU_TANH, XIELU, CLAMPED, RELU2 = "silu", "gelu_tanh", "xielu", "clamped", "relu2"
ACTIVATIONS = {"silu": SILU, "swish": SILU, "gelu_pytorch_tanh": GELU_TANH, "gelu_new": GELU_TANH, "xielu": XIELU,
               "relu2": RELU2}  # fmt: skip
"""By their names in configs."""
LONGEST_KERNEL = 16
"""Rows that a convolution reads at most."""
LARGEST = 1 << 20
NO_LIMIT = (0.0, math.inf)
READS_TARGET = "reads_target"
"""A config key of a decoder whose layers all read the KV cache of another model (Gemma 4's assistant)."""
OUTSIDE = -1
"""The ``kv_source`` of such a layer."""
TILED_HEADS = "tiled_heads"
"""A config key that GGUF files of delta nets get: see ``MixerSpec.tiled``."""
SLIDING, FULL = "sliding_attention", "full_attention"
LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
"""Config keys of latent attention; queries have no latent where the last one is None."""
ALL = "all layers"
"""The name of the rotary parameters in a model that has one set."""
MLP_PARTS, MAMBA_PARTS = 2, 5
"""Entries of a list of multipliers: gate and output of an MLP; gate, x, B, C and time step of Mamba."""


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Llama 4's temperature: queries at position p are multiplied by 1 + beta log(1 + floor(p / reach))."""

    beta: float
    reach: int

    def factors(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Float32 factors, one for each row; None if all are 1."""
        steps = (positions // self.reach).tolist()
        if not any(steps):
            return None
        return torch.tensor([1.0 + self.beta * math.log(1.0 + step) for step in steps], device=positions.device)


SINK_TOKENS = 4
"""StreamingLLM's number of attention sinks (arXiv 2309.17453)."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    window: int | None
    """Positions that a row sees, its own included."""
    rotary: str | None
    """The name of the rotary parameters; None: no rotary embedding."""
    experts: int
    mlp: bool = True
    """Alone, or beside experts."""
    attention: bool = True
    mixer: bool = False
    """A mixer with state, in place of attention or beside it."""
    heads: tuple[int, int] | None = None
    """Number of key-value heads and a head's width; None: the model's."""
    intermediate: int | None = None
    """None: the model's."""
    kv_source: int | None = None
    """The layer whose keys and values are read; None: its own."""
    key_is_value: bool = False
    """One projection makes keys and values."""
    causal: bool = True
    """False: a row also sees later rows of its span."""
    sink_tokens: int = 0
    """First positions that a row sees besides ``window``."""


@dataclass(frozen=True, slots=True)
class MixerSpec:
    """The sizes of a mixer."""

    channels: int
    """Channels of the convolution."""
    columns: int
    """Earlier rows that it reads beside a row itself."""
    inner: int
    """Inputs of the output projection."""
    in_bias: bool = False
    out_bias: bool = False
    conv_bias: bool = False
    has_norm: bool = True
    heads: int = 0
    """0: a convolution without state."""
    groups: int = 0
    key_dim: int = 0
    value_dim: int = 0
    gates: int = 0
    """Numbers of a row's record after the channels."""
    tiled: bool = False
    """Head i belongs to group i modulo the groups, as in GGUF files' delta nets; else a group's heads are adjacent."""
    norm_over_ranks: bool = False
    """The norm goes over the heads of all ranks."""

    @property
    def shape(self) -> StateShape:
        numbers = (self.heads, self.key_dim, self.value_dim) if self.heads else ()
        return StateShape(self.channels + self.gates, self.columns, numbers)


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """The sizes of multi-head latent attention."""

    rank: int
    """Width of the latent of keys and values."""
    query_rank: int
    """Width of the latent of queries; 0: there is none."""
    nope_dim: int
    """Numbers of a head's query that are not rotated; they come first."""
    rope_dim: int
    value_dim: int
    interleaved: bool = False
    """Checkpoints have rotated pairs side by side."""

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(1, self.rank + self.rope_dim, self.rank, shared=True)

    def workspace(self, heads: int) -> int:
        """Numbers per row that a compiled decoder needs."""
        return self.query_rank + heads * (self.query_dim + self.kv_shape.key_dim + self.rank)


@dataclass(frozen=True, slots=True)
class Routing:
    """How rows choose experts: ``description.ExpertsSpec`` explains the fields."""

    top_k: int
    normalize: bool = True
    sigmoid: bool = False
    factor: float = 1.0
    groups: tuple[int, int] | None = None
    """The number of groups, and of those chosen among; None: all experts are chosen among."""
    group_best: int = 2
    eps: float = 0.0
    has_score_bias: bool = False


@dataclass(frozen=True, slots=True)
class ProjectionScale:
    """Factors of a projection's weight and bias: one for each part of this many rows."""

    rows: tuple[int, ...]
    weight: tuple[float, ...]
    bias: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Spec:
    architecture: Architecture
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    """With latent attention ``LatentSpec.rope_dim``."""
    eps: float
    scale: float
    """Multiplies attention scores."""
    softcap: float | None = None
    logits_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    activation: str = SILU
    activation_params: tuple[float, ...] = ()
    """Those that all layers share."""
    query_scaling: QueryScaling | None = None
    routing: Routing | None = None
    intermediate: int = 0
    layers: tuple[LayerSpec, ...] = ()
    mixer: MixerSpec | None = None
    per_layer_width: int = 0
    """Numbers of a per-layer embedding."""
    latent: LatentSpec | None = None
    projection_scales: tuple[tuple[str, ProjectionScale], ...] = ()
    """By a projection's name in its layer, where a factor is not 1."""

    def at(self, index: int) -> Spec:
        """The sizes of one layer; its key-value heads are 0 if it reads another layer's."""
        layer = self.layers[index]
        kv_heads, head_dim = layer.heads or (self.kv_heads, self.head_dim)
        kv_heads = kv_heads if layer.kv_source is None else 0
        intermediate = layer.intermediate or self.intermediate
        return replace(self, kv_heads=kv_heads, head_dim=head_dim, intermediate=intermediate)

    def kv_shape(self, index: int) -> KVShape:
        """A layer's entry in the KV cache for one token."""
        if self.latent is not None:
            return self.latent.kv_shape
        sizes = self.at(index)
        return KVShape(sizes.kv_heads if self.layers[index].attention else 0, sizes.head_dim, sizes.head_dim)

    def mlp(self, layer: LayerSpec) -> Mlp:
        """A layer's MLP, alone or beside experts."""
        experts = self.architecture.experts
        shared = experts.shared if experts is not None and layer.experts else None
        return self.architecture.mlp if shared is None else shared

    @property
    def uneven(self) -> bool:
        """Whether sizes, keys or inputs differ from layer to layer."""
        return bool(self.per_layer_width) or any(layer.heads or layer.kv_source is not None for layer in self.layers)

    @property
    def states(self) -> tuple[StateShape | None, ...]:
        """Each layer's state; () if no layer keeps one."""
        if self.mixer is None or not any(layer.mixer for layer in self.layers):
            return ()
        return tuple(self.mixer.shape if layer.mixer else None for layer in self.layers)

    @property
    def rotaries(self) -> tuple[str, ...]:
        """Names of the rotary parameters in use."""
        return tuple(sorted({layer.rotary for layer in self.layers if layer.rotary is not None})) or (ALL,)


# ---------------------------------------------------------------- what is not described


def refusal(config: Any, architecture: Architecture | None = None) -> str | None:
    """Why no description, or not this one, covers a checkpoint of this config; None if one does."""
    architecture = architecture or ARCHITECTURES.get(config.model_type)
    if architecture is None:
        return f"{config.model_type} is not among the described architectures ({', '.join(ARCHITECTURES)})"
    return next(_reasons(architecture, config), None)


def _reasons(architecture: Architecture, config: Any) -> Iterator[str]:
    """Reasons for a refusal. A check may rely on those before it."""
    attention, mixer, experts = architecture.attention, architecture.mixer, architecture.experts
    if architecture.causal not in (config.architectures or [architecture.causal]):
        yield f"{', '.join(config.architectures or [])} is not {architecture.causal}"
    if mixer is not None and not config.layer_types:
        yield "no layer_types, which say what each layer is"
    yield from _multiplier_reasons(architecture, config)
    count = getattr(config, experts.count) if experts is not None and _flag(config, experts.enabled, True) else 0
    if experts is not None and not NOT_NEGATIVE.permits(count):
        yield f"{experts.count} is {shown(count)}, not a number of experts"
    if getattr(config, "block_auto_adjust_ff_dim", False):
        by, multiple = config.block_ffn_dim_multiplier, config.block_multiple_of
        if by is not None and not (POSITIVE.permits(by) and COUNT.permits(multiple)):
            yield f"block_ffn_dim_multiplier {shown(by)} and block_multiple_of {shown(multiple)}"
    activation = _activation(architecture, config)
    if activation not in ACTIVATIONS or (ACTIVATIONS[activation] == XIELU) != bool(architecture.mlp.activation_params):
        yield f"activation {activation!r}"
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):  # that is pictures alone
        yield "attention to later tokens"
    unknown = {*(getattr(config, "layer_types", None) or ())} - {SLIDING, FULL, *architecture.layer_types}
    if unknown and (attention.window == "layer_types" or mixer is not None):
        yield f"layers of type {unknown.pop()!r}"
    for key in () if experts is None else experts.unsupported:
        if getattr(config, key) not in (None, 0, 1):
            yield f"{key} {shown(getattr(config, key))}"
    shared = 0 if getattr(config, READS_TARGET, False) else _shared_kv_layers(attention, config)
    if shared and {*config.layer_types[-shared:]} - {*config.layer_types[:-shared]}:
        yield f"{attention.shared_kv_layers} {shared}: layers that borrow keys of a type that none before them has"
    if mixer is not None and mixer.layer_type in config.layer_types:
        yield from _mixer_reasons(mixer, config)
    if architecture.latent is not None:
        yield from _latent_reasons(config)
    if experts is not None:
        yield from _experts_reasons(experts, config)
    if attention.rotary != "none":
        yield from _rope_reasons(architecture, config)


def _multiplier_reasons(architecture: Architecture, config: Any) -> Iterator[str]:
    experts = architecture.experts
    factors = [
        architecture.embedding_scale, architecture.residual_scale, architecture.logits_scale,
        architecture.logits_divisor, architecture.attention.multiplier, None if experts is None else experts.factor,
        *(each.inputs for each in architecture.multipliers),
    ]  # fmt: skip
    for key in factors:
        if isinstance(key, str) and key != "root" and not Within().permits(getattr(config, key)):
            yield f"{key} is {shown(getattr(config, key))}, not a number"
    for each in architecture.multipliers:
        value: Any = 1.0 if each.outputs is None else getattr(config, each.outputs)
        numbers = value if isinstance(value, (list, tuple)) else [value]
        count = 1 if numbers is not value else MLP_PARTS if each.index is not None else MAMBA_PARTS
        if len(numbers) != count or not all(map(Within().permits, numbers)):
            yield f"{each.outputs} is {shown(value)}, not {count} number{'s' if count > 1 else ''}"


def _mixer_reasons(mixer: Mixer, config: Any) -> Iterator[str]:
    if tuple(getattr(config, "time_step_limit", None) or NO_LIMIT) != NO_LIMIT:
        yield f"time steps with limits, {shown(config.time_step_limit)}"
    if isinstance(mixer, Recurrence) and getattr(config, mixer.activation, "silu") not in ("silu", "swish"):
        yield f"a convolution's activation {getattr(config, mixer.activation)!r}"
    yield from _not_integers(config, (mixer.kernel,), 2, LONGEST_KERNEL)
    if (isinstance(mixer, ShortConvSpec) or not mixer.beside_attention) and FULL not in config.layer_types:
        yield "no layer with attention"
    if isinstance(mixer, ShortConvSpec):
        return
    norm_first = getattr(config, "mamba_norm_before_gate", False)
    if mixer.has_norm is not None and getattr(config, mixer.has_norm) and norm_first:
        yield "mamba_norm_before_gate: a norm before Mamba's gate"
    yield from _not_integers(config, (mixer.heads, mixer.groups, mixer.key_dim, mixer.value_dim), 1, LARGEST)
    heads, groups = getattr(config, mixer.heads), getattr(config, mixer.groups)
    if heads % groups:
        yield f"{mixer.heads} ({heads}) is no multiple of {mixer.groups} ({groups})"


def _not_integers(config: Any, keys: tuple[str, ...], least: int, most: int) -> Iterator[str]:
    for key in keys:
        value = getattr(config, key)
        if not isinstance(value, int) or not least <= value <= most:
            yield f"{key} is {shown(value)}, not an integer from {least} to {most}"


def _latent_reasons(config: Any) -> Iterator[str]:
    for key in LATENT_SIZES:
        value = getattr(config, key, None)
        if not (value is None and key == LATENT_SIZES[-1]) and not COUNT.permits(value):
            yield f"{key} is {shown(value)}, not an integer of at least 1"
    rope_dim, rope = config.qk_rope_head_dim, config.rope_parameters or {}
    partial = float(rope.get("partial_rotary_factor") or 1.0)
    whole = rope.get("rope_type", "default") in ("default", "proportional")  # in transformers, of head_dim
    if rope_dim % 2 or int(config.head_dim * partial) != rope_dim or (whole and partial != 1.0):
        yield f"qk_rope_head_dim {rope_dim}, where rotary parameters rotate {partial:g} of {config.head_dim} numbers"
    if config.num_key_value_heads != config.num_attention_heads:
        yield f"num_key_value_heads {config.num_key_value_heads}: latent attention has as many as query heads"


def _experts_reasons(experts: ExpertsSpec, config: Any) -> Iterator[str]:
    method = None if experts.method is None else getattr(config, experts.method, None)
    if experts.method is not None and method not in ("greedy", "group_limited_greedy"):
        yield f"{experts.method} {shown(method)}"
    if experts.method is not None and experts.normalize is not None and getattr(config, experts.normalize):
        yield f"{experts.normalize} True"  # transformers ignores it
    if experts.groups is None:
        return
    count, top_k = getattr(config, experts.count), getattr(config, experts.top_k)
    for key, value in ((experts.top_k, top_k), (experts.groups[0], getattr(config, experts.groups[0], None) or 1)):
        if not COUNT.permits(value):
            yield f"{key} is {shown(value)}, not an integer of at least 1"
    factor = None if experts.shared is None else experts.shared.width_factor
    if factor is not None and not COUNT.permits(getattr(config, factor, None)):
        yield f"{factor} is {shown(getattr(config, factor, None))}"
    groups, kept = _groups(experts, config) or (1, 1)
    if count % groups or (groups > 1 and count // groups < experts.group_best) or kept * (count // groups) < top_k:
        yield f"{top_k} of {count} experts in {kept} of {groups} groups"


def _rope_reasons(architecture: Architecture, config: Any) -> Iterator[str]:
    value = config.rope_parameters or {}
    partial = architecture.attention.partial_rotary or architecture.latent is not None
    for rope in value.values() if architecture.attention.rotary == "layer_types" else [value]:
        if not isinstance(rope, dict) or any(isinstance(each, dict) for each in rope.values()):
            yield "rotary parameters by layer where there should be one set, or one where they should be by layer"
        if rope.get("rope_type", "default") not in ROPE_TYPES and not is_constant(rope):
            yield f"rope type {rope.get('rope_type')!r}"
        whole = partial or rope.get("rope_type") == "proportional"  # with frequencies for a whole head
        if rope.get("partial_rotary_factor", 1.0) != 1.0 and not whole:
            yield "partial rotary embeddings"


# ---------------------------------------------------------------- a config, read by its description


def is_sized(config: Any) -> bool:
    """Whether a description covers the model and its layers may differ in size."""
    architecture = ARCHITECTURES.get(config.model_type)
    return architecture is not None and architecture.attention.per_layer_sizes


def keeps_state(config: Any) -> bool:
    """Whether a description covers the model and some of its layers keep a state beside the KV cache."""
    architecture = ARCHITECTURES.get(config.model_type)
    mixer = None if architecture is None else architecture.mixer
    return mixer is not None and mixer.layer_type in (config.layer_types or ())


def bind(config: Any, architecture: Architecture | None = None) -> Spec:
    """The spec of a checkpoint that ``refusal`` does not refuse."""
    architecture = architecture or ARCHITECTURES[config.model_type]
    attention, experts = architecture.attention, architecture.experts
    clamp = () if experts is None else experts.clamp
    first = config.per_layer_config[0] if attention.per_layer_sizes else config
    head_dim = getattr(first, "head_dim", None) or config.hidden_size // config.num_attention_heads
    latent = None if architecture.latent is None else _latent(architecture.latent, config)
    return Spec(
        architecture=architecture,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=first.num_key_value_heads if latent is None else 1,
        head_dim=head_dim if latent is None else latent.rope_dim,
        eps=getattr(config, architecture.norms.eps),
        scale=_scale(attention, config, head_dim) if latent is None else _latent_scale(latent, config),
        softcap=_optional(config, attention.softcap),
        logits_softcap=_optional(config, architecture.logits_softcap),
        embedding_scale=_number(config, architecture.embedding_scale),
        residual_scale=_number(config, architecture.residual_scale),
        logits_scale=_number(config, architecture.logits_scale) / _number(config, architecture.logits_divisor),
        activation=CLAMPED if clamp else ACTIVATIONS[_activation(architecture, config)],
        activation_params=tuple(float(getattr(config, key, usual)) for key, usual in clamp),
        query_scaling=_query_scaling(attention, config),
        routing=None if experts is None else _routing(experts, config),
        intermediate=_intermediate(architecture.mlp, config),
        layers=tuple(_layer(architecture, config, index) for index in range(config.num_hidden_layers)),
        mixer=None if architecture.mixer is None else _mixer(architecture.mixer, config),
        per_layer_width=0 if architecture.per_layer is None else int(config.hidden_size_per_layer_input or 0),
        latent=latent,
        projection_scales=tuple(_projection_scales(architecture, config)),
    )


def with_window(spec: Spec, window: int | None) -> Spec:
    """The same layers, which see ``SINK_TOKENS`` first positions and the last ``window`` ones; None: as they are."""
    if window is None:
        return spec
    layers = (
        replace(each, window=window, sink_tokens=SINK_TOKENS) if each.attention and (each.window or window + 1) > window
        else each
        for each in spec.layers
    )  # fmt: skip
    return replace(spec, layers=tuple(layers))


def _number(config: Any, key: str | None) -> float:
    """A factor; 1 where there is no key."""
    return 1.0 if key is None else float(config.hidden_size**0.5 if key == "root" else getattr(config, key))


def _optional(config: Any, key: str | None) -> float | None:
    return getattr(config, key, None) if key is not None else None


def _flag(config: Any, key: str | None, default: bool = False) -> bool:
    return default if key is None else bool(getattr(config, key))


def _activation(architecture: Architecture, config: Any) -> str:
    key = architecture.mlp.activation
    return SILU if key is None else getattr(config, key)


def _scale(attention: Attention, config: Any, head_dim: int) -> float:
    if attention.multiplier is not None:
        value = attention.multiplier
        return value if isinstance(value, float) else float(getattr(config, value))
    return float((head_dim if attention.scale is None else getattr(config, attention.scale)) ** -0.5)


def _latent_scale(sizes: LatentSpec, config: Any) -> float:
    """The scale of attention scores, which YaRN's ``mscale_all_dim`` raises (arXiv 2309.00071, section 3.4)."""
    rope = config.rope_parameters or {}
    mscale = rope.get("mscale_all_dim") if rope.get("rope_type", "default") != "default" else None
    raised = 1.0 + 0.1 * float(mscale) * math.log(rope["factor"]) if mscale and rope["factor"] > 1 else 1.0
    return float(sizes.query_dim**-0.5) * raised * raised


def _query_scaling(attention: Attention, config: Any) -> QueryScaling | None:
    if not attention.llama4_scaling or not config.rope_parameters.get("llama_4_scaling_beta"):
        return None
    rope = config.rope_parameters
    length = rope.get("original_max_position_embeddings") or config.max_position_embeddings  # as in llama.cpp
    return QueryScaling(float(rope["llama_4_scaling_beta"]), int(length))


def _routing(experts: ExpertsSpec, config: Any) -> Routing:
    return Routing(
        top_k=getattr(config, experts.top_k) or 0,
        normalize=_flag(config, experts.normalize, True),
        sigmoid=experts.sigmoid,
        factor=_number(config, experts.factor),
        groups=_groups(experts, config),
        group_best=experts.group_best,
        eps=experts.eps,
        has_score_bias=experts.score_bias is not None and _flag(config, experts.has_score_bias, True),
    )


def _groups(experts: ExpertsSpec, config: Any) -> tuple[int, int] | None:
    if experts.groups is None or (experts.method is not None and getattr(config, experts.method) == "greedy"):
        return None
    count, kept = (int(getattr(config, key, None) or 1) for key in experts.groups)
    return (count, kept) if kept < count else None


def _intermediate(mlp: Mlp, config: Any) -> int:
    width = int(getattr(config, mlp.width) * _number(config, mlp.width_factor))
    if not getattr(config, "block_auto_adjust_ff_dim", False):
        return width
    width = 2 * width // 3
    if config.block_ffn_dim_multiplier is None:
        return width
    width, multiple = int(config.block_ffn_dim_multiplier * width), int(config.block_multiple_of)
    return -(-width // multiple) * multiple


def _mixer(mixer: Mixer, config: Any) -> MixerSpec:
    columns, bias = getattr(config, mixer.kernel) - 1, _flag(config, mixer.bias)
    if isinstance(mixer, ShortConvSpec):
        return MixerSpec(config.hidden_size, columns, config.hidden_size, bias, bias, bias)
    keys = mixer.heads, mixer.groups, mixer.key_dim, mixer.value_dim
    heads, groups, key_dim, value_dim = (int(getattr(config, key)) for key in keys)
    return MixerSpec(
        channels=heads * value_dim + 2 * groups * key_dim,
        columns=columns,
        inner=heads * value_dim,
        in_bias=bias,
        out_bias=_flag(config, mixer.out_bias, bias),
        conv_bias=_flag(config, mixer.conv_bias),
        has_norm=_flag(config, mixer.has_norm, True),
        heads=heads,
        groups=groups,
        key_dim=key_dim,
        value_dim=value_dim,
        gates=2 * heads if mixer.kind == "delta" else heads,
        tiled=mixer.kind == "delta" and bool(getattr(config, TILED_HEADS, False)),
    )


def _latent(names: LatentAttention, config: Any) -> LatentSpec:
    rank, nope_dim, rope_dim, value_dim, query_rank = (int(getattr(config, key) or 0) for key in LATENT_SIZES)
    interleaved = names.interleaved is None or bool(getattr(config, names.interleaved, True))
    return LatentSpec(rank, query_rank, nope_dim, rope_dim, value_dim, interleaved)


def _projection_scales(architecture: Architecture, config: Any) -> Iterator[tuple[str, ProjectionScale]]:
    for each in architecture.multipliers:
        value: Any = 1.0 if each.outputs is None else getattr(config, each.outputs)
        value = value if each.index is None else value[each.index]
        rows: tuple[int, ...] = (1,)
        if isinstance(value, (list, tuple)):
            assert architecture.mixer is not None
            sizes = _mixer(architecture.mixer, config)
            keys = sizes.groups * sizes.key_dim
            rows = sizes.inner, sizes.inner, keys, keys, sizes.heads  # gate, x, B, C and time step
        else:
            value = [value]
        outputs, inputs = tuple(map(float, value)), _number(config, each.inputs)
        result = ProjectionScale(rows, tuple(inputs * by for by in outputs), outputs)
        if {*result.weight, *result.bias} != {1.0}:
            yield each.name.checkpoint, result


def _layer(architecture: Architecture, config: Any, index: int) -> LayerSpec:
    attention, mixer, experts, mlp = architecture.attention, architecture.mixer, architecture.experts, architecture.mlp
    typed = mixer is not None or "layer_types" in (attention.window, attention.rotary)
    kind, count = config.layer_types[index] if typed else None, _num_experts(experts, config, index)
    slides = kind == SLIDING and attention.window == "layer_types" and getattr(config, "use_sliding_window", True)
    mixes = mixer is not None and kind == mixer.layer_type
    shared = None if experts is None or not count else experts.shared
    result = LayerSpec(
        window=getattr(config, "sliding_window", None) if attention.window == "all" or slides else None,
        rotary=_rotary(attention, config, index, kind),
        experts=count,
        mlp=experts.beside_mlp if experts is not None and count else mlp.layer_type in (None, kind),
        attention=isinstance(mixer, Recurrence) and mixer.beside_attention if mixes else kind in (None, SLIDING, FULL),
        mixer=mixes,
        intermediate=None if shared is None else _intermediate(shared, config),
    )
    if not attention.per_layer_sizes:
        return result
    types, own_kv = config.layer_types, config.num_hidden_layers - _shared_kv_layers(attention, config)
    source = max((i for i in range(own_kv) if types[i] == kind), default=OUTSIDE) if index >= own_kv else None
    own, double = config.per_layer_config[index], source is not None and _flag(config, mlp.double_wide)
    return replace(
        result, heads=(own.num_key_value_heads, own.head_dim), kv_source=source,
        intermediate=2 * _intermediate(mlp, config) if double else None,
        key_is_value=source is None and kind != SLIDING and _flag(config, attention.key_is_value),
    )  # fmt: skip


def _rotary(attention: Attention, config: Any, index: int, kind: str | None) -> str | None:
    match attention.rotary:
        case "none":
            has = False
        case "no_rope_layers":
            has = bool(config.no_rope_layers[index])
        case "sliding":
            has = kind == SLIDING or getattr(config, "sliding_window", None) is None
        case "position_embedding_type":
            has = config.position_embedding_type == "rope"
        case "layer_types":
            return kind
        case _:
            has = True
    return ALL if has else None


def _shared_kv_layers(attention: Attention, config: Any) -> int:
    key = attention.shared_kv_layers
    return 0 if key is None else int(getattr(config, key) or 0)


def _num_experts(experts: ExpertsSpec | None, config: Any, index: int) -> int:
    if experts is None or not _flag(config, experts.enabled, True):
        return 0
    if experts.layer_type is not None:
        has = config.layer_types[index] == experts.layer_type
    elif experts.placement == "decoder_sparse_step":
        has = index not in config.mlp_only_layers and (index + 1) % config.decoder_sparse_step == 0
    elif experts.placement == "mlp_layer_types":
        has = config.mlp_layer_types[index] == "sparse"
    else:
        has = experts.first_dense is None or index >= int(getattr(config, experts.first_dense))
    return int(getattr(config, experts.count)) if has else 0

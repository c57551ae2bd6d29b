"""An architecture at a checkpoint's sizes: what its config says, read once."""

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
    Latent,
    Mixer,
    Mlp,
    Recurrence,
    ShortConvSpec,
)
from forerun.models.architectures.families import ARCHITECTURES
from forerun.models.rotary import ROPE_TYPES, is_constant

SILU, GELU_TANH, XIELU, CLAMPED, RELU2 = "silu", "gelu_tanh", "xielu", "clamped", "relu2"
ACTIVATIONS = {"silu": SILU, "swish": SILU, "gelu_pytorch_tanh": GELU_TANH, "gelu_new": GELU_TANH, "xielu": XIELU,
               "relu2": RELU2}  # fmt: skip
"""By their names in configs."""
LONGEST_KERNEL = 16
"""Rows that a convolution reads."""
LARGEST = 1 << 20
NO_LIMIT = (0.0, math.inf)
READS = "reads_target"
"""A config key of a decoder whose layers have no keys and values: all of them read another model's."""
OUTSIDE = -1
"""The layer whose keys and values such a layer reads."""
TILED_HEADS = "tiled_heads"
"""A config key that GGUF files of delta nets get: see ``MixerSpec.tiled``."""
SLIDING, FULL = "sliding_attention", "full_attention"
ALL = "all layers"
"""Names the rotary parameters of a model that has one set."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Queries at position p are multiplied by 1 + rate log(1 + floor(p / reach)): Llama 4's temperature."""

    rate: float
    reach: int

    def factors(self, positions: torch.Tensor) -> torch.Tensor | None:
        """float32, by rows; None: they are all 1."""
        steps = (positions // self.reach).tolist()
        if not any(steps):
            return None
        return torch.tensor([1.0 + self.rate * math.log(1.0 + step) for step in steps], device=positions.device)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    window: int | None
    """Positions that a row sees, its own among them."""
    rotary: str | None
    """Which rotary parameters; None: nothing is turned."""
    experts: int
    mlp: bool = True
    """Beside experts, if there are such."""
    attention: bool = True
    mixer: bool = False
    """In the place of attention, or beside it."""
    heads: tuple[int, int] | None = None
    """Key-value heads, and the width of a head; None: the model's."""
    inner: int | None = None
    """Outputs of the gate of an MLP; None: the model's."""
    source: int | None = None
    """The layer whose keys and values are read; None: its own; ``OUTSIDE``: one of another model."""
    twice: bool = False
    """One projection makes keys and values."""


@dataclass(frozen=True, slots=True)
class MixerSpec:
    """The sizes of what keeps a state."""

    channels: int
    """That a convolution over ``columns`` rows before a row and the row itself reads."""
    columns: int
    inner: int
    """Inputs of the projection behind it."""
    biased: bool = False
    """The projection before it."""
    out_biased: bool = False
    conv_biased: bool = False
    normed: bool = True
    """There is a norm of the output."""
    heads: int = 0
    groups: int = 0
    key_dim: int = 0
    value_dim: int = 0
    gates: int = 0
    """Numbers of a row's record behind the channels."""
    tiled: bool = False
    """Head i has keys and queries of group i modulo the groups, as GGUF files order a delta net's heads; else the heads
    of a group follow one another."""

    norm_over_all: bool = False
    """The norm goes over the heads of all ranks."""

    @property
    def shape(self) -> StateShape:
        numbers = (self.heads, self.key_dim, self.value_dim) if self.heads else ()
        return StateShape(self.channels + self.gates, self.columns, numbers)


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """The sizes of latent attention."""

    rank: int
    """Of the latent that keys and values are made of."""
    query_rank: int
    """0: queries have none."""
    plain: int
    """Numbers of a head's queries that are not turned, before those that are."""
    turned: int
    value: int
    """Numbers of a head's values."""
    paired: bool

    @property
    def query(self) -> int:
        """Numbers of a head's queries."""
        return self.plain + self.turned

    def needed(self, heads: int) -> int:
        """Numbers of a row of a compiled decoder's workspace."""
        return self.query_rank + heads * (self.query + self.entry.key_dim + self.rank)

    @property
    def entry(self) -> KVShape:
        return KVShape(1, self.rank + self.turned, self.rank, shared=True)


@dataclass(frozen=True, slots=True)
class Multiples:
    """What a layer's projection is multiplied by: a number for each of its parts of so many rows."""

    rows: tuple[int, ...]
    weight: tuple[float, ...]
    bias: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Spec:
    architecture: Architecture
    hidden: int
    heads: int
    kv_heads: int
    width: int
    """Of a head."""
    eps: float
    scale: float
    softcap: float | None = None
    logits_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    activation: str = SILU
    activation_numbers: tuple[float, ...] = ()
    """Of the activation, where all layers have the same."""
    growth: Growth | None = None
    chosen: int = 0
    """Experts per row."""
    normalised: bool = False
    corrected: bool = False
    """A number is added to each expert's score where some are chosen."""
    factor: float = 1.0
    """Of the experts' weights."""
    groups: tuple[int, int] | None = None
    """Of experts, and how many of them are chosen among."""
    inner: int = 0
    """Outputs of the gate of an MLP."""
    layers: tuple[LayerSpec, ...] = ()
    mixer: MixerSpec | None = None
    inputs: int = 0
    """Numbers of a row of per-layer embeddings."""
    latent: LatentSpec | None = None
    """``width`` is then that of what is turned."""
    multiples: tuple[tuple[str, Multiples], ...] = ()
    """By projections' names in a layer, where they are not all 1."""

    def at(self, index: int) -> Spec:
        """The sizes of one layer; it has no key-value heads where it reads another's."""
        layer = self.layers[index]
        kv_heads, width = layer.heads or (self.kv_heads, self.width)
        kv_heads = kv_heads if layer.source is None else 0
        return replace(self, kv_heads=kv_heads, width=width, inner=layer.inner or self.inner)

    def entry(self, index: int) -> KVShape:
        """What a layer keeps of a token."""
        if self.latent is not None:
            return self.latent.entry
        sizes = self.at(index)
        return KVShape(sizes.kv_heads if self.layers[index].attention else 0, sizes.width, sizes.width)

    def mlp(self, layer: LayerSpec) -> Mlp:
        """The one that a layer has, alone or beside experts."""
        experts = self.architecture.experts
        shared = experts.shared if experts is not None and layer.experts else None
        return self.architecture.mlp if shared is None else shared

    @property
    def uneven(self) -> bool:
        """Whether layers have sizes, keys or inputs that differ from layer to layer."""
        return bool(self.inputs) or any(layer.heads or layer.source is not None for layer in self.layers)

    @property
    def states(self) -> tuple[StateShape | None, ...]:
        """Per layer; () where no layer keeps a state."""
        if self.mixer is None or not any(layer.mixer for layer in self.layers):
            return ()
        return tuple(self.mixer.shape if layer.mixer else None for layer in self.layers)

    @property
    def rotaries(self) -> tuple[str, ...]:
        """The sets of rotary parameters in use."""
        return tuple(sorted({layer.rotary for layer in self.layers if layer.rotary is not None})) or (ALL,)


def applies(config: Any) -> str | None:
    """None if the description of an architecture covers such a checkpoint, otherwise the reason why none does."""
    kind = config.model_type
    result = ARCHITECTURES.get(kind)
    if result is None:
        return f"{kind} is not among the described architectures ({', '.join(ARCHITECTURES)})"
    if result.causal not in (config.architectures or [result.causal]):
        return f"{', '.join(config.architectures or [])} is not {result.causal}"
    if result.mixer is not None and not config.layer_types:
        return "no layer_types, which say what each layer is"
    if (reason := _numbers_apply(result, config)) is not None:
        return reason
    activation = _activation(result, config)
    if activation not in ACTIVATIONS or (ACTIVATIONS[activation] == XIELU) != bool(result.mlp.numbers):
        return f"activation {activation!r}"
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):  # that is pictures alone
        return "attention to later tokens"
    types = set(getattr(config, "layer_types", None) or ()) - {SLIDING, FULL}
    types -= {*result.kinds}
    if (result.attention.window == "typed" or result.mixer is not None) and types:
        return f"layers of type {types.pop()!r}"
    for key in () if result.experts is None else result.experts.other:
        if getattr(config, key) not in (None, 0, 1):
            return f"{key} {shown(getattr(config, key))}"
    borrowed = 0 if getattr(config, READS, False) else _borrowed(result, config)
    if borrowed and set(config.layer_types[-borrowed:]) - set(config.layer_types[:-borrowed]):
        return f"{result.attention.borrowed} {borrowed}: layers that borrow keys of a type that none before them has"
    reason = None if result.mixer is None else _mixer_applies(result.mixer, config)
    reason = reason or (None if result.latent is None else _latent_applies(result.latent, config))
    reason = reason or (None if result.experts is None else _experts_apply(result.experts, config))
    return reason or _rope_applies(result, config)


def _numbers_apply(architecture: Architecture, config: Any) -> str | None:
    """Why factors and counts that only some architectures have cannot be used, if so."""
    experts = architecture.experts
    factors = [
        architecture.embedding_scale, architecture.residual_scale, architecture.logits_scale,
        architecture.logits_divisor, architecture.attention.multiplier, None if experts is None else experts.factor,
        *(each.inputs for each in architecture.multiplied),
    ]  # fmt: skip
    for key in factors:
        if isinstance(key, str) and key != "root" and not Within().permits(getattr(config, key)):
            return f"{key} is {shown(getattr(config, key))}, not a number"
    for each in architecture.multiplied:
        given: Any = 1.0 if each.outputs is None else getattr(config, each.outputs)
        numbers = given if isinstance(given, (list, tuple)) else [given]
        count = 1 if not isinstance(given, (list, tuple)) else MLP_PARTS if each.place is not None else MAMBA_PARTS
        if len(numbers) != count or not all(Within().permits(number) for number in numbers):
            return f"{each.outputs} is {shown(given)}, not {count} number{'s' if count > 1 else ''}"
    used = experts is not None and _says(config, experts.enabled, True)
    if experts is not None and used and not NOT_NEGATIVE.permits(getattr(config, experts.count)):
        return f"{experts.count} is {shown(getattr(config, experts.count))}, not a number of experts"
    if getattr(config, "block_auto_adjust_ff_dim", False):
        by, multiple = config.block_ffn_dim_multiplier, config.block_multiple_of
        if by is not None and not (POSITIVE.permits(by) and COUNT.permits(multiple)):
            return f"block_ffn_dim_multiplier {shown(by)} and block_multiple_of {shown(multiple)}"
    return None


MLP_PARTS, MAMBA_PARTS = 2, 5
"""Gate and output of an MLP; gate, x, B, C and time step of Mamba's projection."""


def is_sized(config: Any) -> bool:
    """Whether an architecture is described whose layers may have heads of sizes of their own."""
    result = ARCHITECTURES.get(config.model_type)
    return result is not None and result.attention.sized


def keeps_state(config: Any) -> bool:
    """Whether an architecture is described whose layers keep more of a text than keys and values."""
    result = ARCHITECTURES.get(config.model_type)
    return result is not None and result.mixer is not None and result.mixer.layers in (config.layer_types or ())


def _rope_applies(architecture: Architecture, config: Any) -> str | None:
    if architecture.attention.rotary == "none":
        return None
    given = config.rope_parameters or {}
    sets = list(given.values()) if architecture.attention.rotary == "typed" else [given]
    for rope in sets:
        if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
            return "rotary parameters by layer where there should be one set, or one where they should be by layer"
        if rope.get("rope_type", "default") not in ROPE_TYPES and not is_constant(rope):
            return f"rope type {rope.get('rope_type')!r}"
        partial = architecture.attention.partial or architecture.latent is not None
        if rope.get("partial_rotary_factor", 1.0) != 1.0 and not partial:
            return "partial rotary embeddings"
    return None


def bind(config: Any) -> Spec:
    """The spec of a checkpoint that ``applies``."""
    result = ARCHITECTURES[config.model_type]
    attention, experts = result.attention, result.experts
    heads, clamp = config.num_attention_heads, experts.clamp if experts is not None else ()
    own = config.per_layer_config[0] if attention.sized else config
    width = getattr(own, "head_dim", None) or config.hidden_size // heads
    latent = None if result.latent is None else _latent(result.latent, config)
    width = width if latent is None else latent.turned
    return Spec(
        architecture=result,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=own.num_key_value_heads if latent is None else 1,
        width=width,
        eps=getattr(config, result.norms.eps),
        scale=_scale(result, config, width) if latent is None else _latent_scale(latent, config),
        softcap=_optional(config, attention.softcap),
        logits_softcap=_optional(config, result.logits_softcap),
        embedding_scale=_factor(config, result.embedding_scale),
        residual_scale=_factor(config, result.residual_scale),
        logits_scale=_factor(config, result.logits_scale) / _factor(config, result.logits_divisor),
        activation=CLAMPED if clamp else ACTIVATIONS[_activation(result, config)],
        activation_numbers=tuple(float(getattr(config, key)) for key in clamp),
        growth=_growth(result, config),
        chosen=getattr(config, experts.chosen) or 0 if experts is not None else 0,
        normalised=experts is not None and _says(config, experts.normalised, True),
        corrected=experts is not None and experts.correction is not None and _says(config, experts.corrected, True),
        factor=_factor(config, None if experts is None else experts.factor),
        groups=None if experts is None else _groups(experts, config),
        inner=_inner(result.mlp, config),
        layers=tuple(_layer(result, config, index) for index in range(config.num_hidden_layers)),
        mixer=None if result.mixer is None else _mixer(result.mixer, config),
        inputs=0 if result.inputs is None else int(getattr(config, result.inputs.width) or 0),
        latent=latent,
        multiples=tuple(_multiples(result, config)),
    )


def _multiples(architecture: Architecture, config: Any) -> Iterator[tuple[str, Multiples]]:
    for each in architecture.multiplied:
        given: Any = 1.0 if each.outputs is None else getattr(config, each.outputs)
        given = given if each.place is None else given[each.place]
        parts = isinstance(given, (list, tuple))
        outputs = [float(by) for by in (given if parts else (given,))]
        rows, inputs = _mamba_parts(architecture.mixer, config) if parts else (1,), _factor(config, each.inputs)
        result = Multiples(rows, tuple(inputs * by for by in outputs), tuple(outputs))
        if {*result.weight, *result.bias} != {1.0}:
            yield each.name.checkpoint, result


def _mamba_parts(mixer: Mixer | None, config: Any) -> tuple[int, ...]:
    """Rows of gate, x, B, C and time step."""
    assert mixer is not None
    sizes = _mixer(mixer, config)
    keys = sizes.groups * sizes.key_dim
    return sizes.inner, sizes.inner, keys, keys, sizes.heads


def _activation(architecture: Architecture, config: Any) -> str:
    key = architecture.mlp.activation
    return SILU if key is None else getattr(config, key)


def _inner(mlp: Mlp, config: Any) -> int:
    width = int(getattr(config, mlp.width)) * (1 if mlp.times is None else int(getattr(config, mlp.times)))
    if not getattr(config, "block_auto_adjust_ff_dim", False):
        return width
    width = 2 * width // 3
    if config.block_ffn_dim_multiplier is None:
        return width
    width, multiple = int(config.block_ffn_dim_multiplier * width), config.block_multiple_of
    return -(-width // multiple) * multiple


def _mixer(mixer: Mixer, config: Any) -> MixerSpec:
    columns = getattr(config, mixer.kernel) - 1
    biased = _says(config, mixer.bias)
    if isinstance(mixer, ShortConvSpec):
        return MixerSpec(config.hidden_size, columns, config.hidden_size, biased, biased, biased)
    keys = mixer.heads, mixer.groups, mixer.key_dim, mixer.value_dim
    heads, groups, key_dim, value_dim = (int(getattr(config, key)) for key in keys)
    return MixerSpec(
        channels=heads * value_dim + 2 * groups * key_dim,
        columns=columns,
        inner=heads * value_dim,
        biased=biased,
        out_biased=_says(config, mixer.out_bias, biased),
        conv_biased=_says(config, mixer.conv_bias),
        normed=_says(config, mixer.normed, True),
        heads=heads,
        groups=groups,
        key_dim=key_dim,
        value_dim=value_dim,
        gates=2 * heads if mixer.kind == "delta" else heads,
        tiled=mixer.kind == "delta" and bool(getattr(config, TILED_HEADS, False)),
    )


def _mixer_applies(mixer: Mixer, config: Any) -> str | None:
    """Why the layers with a state cannot be run, if so."""
    if mixer.layers not in config.layer_types:
        return None
    if tuple(getattr(config, "time_step_limit", None) or NO_LIMIT) != NO_LIMIT:
        return f"time steps with limits, {shown(config.time_step_limit)}"
    if isinstance(mixer, Recurrence) and getattr(config, mixer.activation, "silu") not in ("silu", "swish"):
        return f"a convolution's activation {getattr(config, mixer.activation)!r}"
    kernel = getattr(config, mixer.kernel)
    if not isinstance(kernel, int) or not 2 <= kernel <= LONGEST_KERNEL:
        return f"{mixer.kernel} is {shown(kernel)}, not an integer from 2 to {LONGEST_KERNEL}"
    if (isinstance(mixer, ShortConvSpec) or not mixer.joint) and FULL not in config.layer_types:
        return "no layer with attention"
    if isinstance(mixer, ShortConvSpec):
        return None
    if mixer.normed is not None and getattr(config, mixer.normed) and getattr(config, "mamba_norm_before_gate", False):
        return "mamba_norm_before_gate: a norm before Mamba's gate"
    for key in (mixer.heads, mixer.groups, mixer.key_dim, mixer.value_dim):
        value = getattr(config, key)
        if not isinstance(value, int) or not 1 <= value <= LARGEST:
            return f"{key} is {shown(value)}, not an integer from 1 to {LARGEST}"
    heads, groups = getattr(config, mixer.heads), getattr(config, mixer.groups)
    return None if heads % groups == 0 else f"{mixer.heads} ({heads}) is no multiple of {mixer.groups} ({groups})"


def _latent(names: Latent, config: Any) -> LatentSpec:
    keys = names.rank, names.query_rank, names.plain, names.turned, names.value
    rank, query_rank, plain, turned, value = (int(getattr(config, key) or 0) for key in keys)
    paired = names.paired is None or bool(getattr(config, names.paired, True))
    return LatentSpec(rank, query_rank, plain, turned, value, paired)


def _latent_applies(names: Latent, config: Any) -> str | None:
    """Why latent attention cannot be run, if so."""
    for key in (names.rank, names.plain, names.turned, names.value, names.query_rank):
        value = getattr(config, key, None)
        if not (value is None and key == names.query_rank) and not COUNT.permits(value):
            return f"{key} is {shown(value)}, not an integer of at least 1"
    turned, rope = getattr(config, names.turned), config.rope_parameters or {}
    partial = float(rope.get("partial_rotary_factor") or 1.0)
    default = rope.get("rope_type", "default") == "default"  # which turns a part of what is turned
    if turned % 2 or int(config.head_dim * partial) != turned or (default and partial != 1.0):
        return f"{names.turned} {turned}, where rotary parameters turn {partial:g} of {config.head_dim} numbers"
    if config.num_key_value_heads != config.num_attention_heads:
        return f"num_key_value_heads {config.num_key_value_heads}: latent attention has as many as query heads"
    return None


def _latent_scale(sizes: LatentSpec, config: Any) -> float:
    """Of attention's scores: YaRN's ``mscale_all_dim`` raises it (arXiv 2309.00071, section 3.4)."""
    rope = config.rope_parameters or {}
    given = rope.get("mscale_all_dim") if rope.get("rope_type", "default") != "default" else None
    raised = 1.0 + 0.1 * float(given) * math.log(rope["factor"]) if given and rope["factor"] > 1 else 1.0
    return float(sizes.query**-0.5) * raised * raised


def _groups(experts: ExpertsSpec, config: Any) -> tuple[int, int] | None:
    """None: all experts are chosen among."""
    if experts.groups is None or (experts.method is not None and getattr(config, experts.method) == "greedy"):
        return None
    count, kept = (int(getattr(config, key, None) or 1) for key in experts.groups)
    return (count, kept) if kept < count else None


def _experts_apply(experts: ExpertsSpec, config: Any) -> str | None:
    """Why experts cannot be chosen, if so."""
    method = None if experts.method is None else getattr(config, experts.method, None)
    if experts.method is not None and method not in ("greedy", "group_limited_greedy"):
        return f"{experts.method} {shown(method)}"
    if experts.method is not None and experts.normalised is not None and getattr(config, experts.normalised):
        return f"{experts.normalised} True"  # which transformers leaves out
    if experts.groups is None:
        return None
    count, chosen = getattr(config, experts.count), getattr(config, experts.chosen)
    for key, value in ((experts.chosen, chosen), (experts.groups[0], getattr(config, experts.groups[0], None) or 1)):
        if not COUNT.permits(value):
            return f"{key} is {shown(value)}, not an integer of at least 1"
    times = None if experts.shared is None else experts.shared.times
    if times is not None and not COUNT.permits(getattr(config, times, None)):
        return f"{times} is {shown(getattr(config, times, None))}"
    groups, kept = _groups(experts, config) or (1, 1)
    if count % groups or (groups > 1 and count // groups < experts.best) or kept * (count // groups) < chosen:
        return f"{chosen} of {count} experts in {kept} of {groups} groups"
    return None


def _scale(architecture: Architecture, config: Any, width: int) -> float:
    """Of attention's scores."""
    attention = architecture.attention
    if attention.multiplier is not None:
        given = attention.multiplier
        return given if isinstance(given, float) else float(getattr(config, given))
    return float((width if attention.scale is None else getattr(config, attention.scale)) ** -0.5)


def _growth(architecture: Architecture, config: Any) -> Growth | None:
    if not architecture.attention.grows or not config.rope_parameters.get("llama_4_scaling_beta"):
        return None
    rope = config.rope_parameters
    return Growth(float(rope["llama_4_scaling_beta"]), int(rope["original_max_position_embeddings"]))


def _factor(config: Any, key: str | None) -> float:
    return 1.0 if key is None else float(config.hidden_size**0.5 if key == "root" else getattr(config, key))


def _optional(config: Any, key: str | None) -> float | None:
    return getattr(config, key, None) if key is not None else None


def _says(config: Any, key: str | None, default: bool = False) -> bool:
    """What a key says; None: ``default``."""
    return default if key is None else bool(getattr(config, key))


def _layer(architecture: Architecture, config: Any, index: int) -> LayerSpec:
    attention, mixer, experts = architecture.attention, architecture.mixer, architecture.experts
    typed = mixer is not None or "typed" in (attention.window, attention.rotary)
    kind, count = config.layer_types[index] if typed else None, _experts(experts, config, index)
    slides = attention.window == "typed" and kind == SLIDING and getattr(config, "use_sliding_window", True)
    mixes = mixer is not None and kind == mixer.layers
    shared = None if experts is None or not count else experts.shared
    result = LayerSpec(
        window=getattr(config, "sliding_window", None) if attention.window == "every" or slides else None,
        rotary=(kind if attention.rotary == "typed" else ALL) if _turns(attention, config, index, kind) else None,
        experts=count,
        mlp=experts.beside if experts is not None and count else architecture.mlp.layers in (None, kind),
        attention=isinstance(mixer, Recurrence) and mixer.joint if mixes else kind in (None, SLIDING, FULL),
        mixer=mixes,
        inner=None if shared is None else _inner(shared, config),
    )
    return _sized(result, architecture, config, index) if attention.sized else result


def _turns(attention: Attention, config: Any, index: int, kind: str | None) -> bool:
    """Whether a layer has a rotary embedding."""
    match attention.rotary:
        case "none":
            return False
        case "listed":
            return bool(config.no_rope_layers[index])
        case "sliding":
            return kind == SLIDING or getattr(config, "sliding_window", None) is None
        case "named":
            return bool(config.position_embedding_type == "rope")
        case _:
            return True


def _borrowed(architecture: Architecture, config: Any) -> int:
    """How many last layers have no keys and values."""
    key = architecture.attention.borrowed
    return 0 if key is None else int(getattr(config, key) or 0)


def _sized(layer: LayerSpec, architecture: Architecture, config: Any, index: int) -> LayerSpec:
    """A layer with the sizes of its own, and where its keys and values are."""
    attention, mlp, own = architecture.attention, architecture.mlp, config.per_layer_config[index]
    types, first = config.layer_types, config.num_hidden_layers - _borrowed(architecture, config)
    source = max((i for i in range(first) if types[i] == types[index]), default=OUTSIDE) if index >= first else None
    doubled = source is not None and _says(config, mlp.doubled)
    return replace(
        layer, heads=(own.num_key_value_heads, own.head_dim), inner=2 * _inner(mlp, config) if doubled else None,
        source=source, twice=source is None and types[index] != SLIDING and _says(config, attention.twice),
    )  # fmt: skip


def _experts(experts: ExpertsSpec | None, config: Any, index: int) -> int:
    """How many a layer has."""
    if experts is None or not _says(config, experts.enabled, True):
        return 0
    if experts.layers is not None:
        has = config.layer_types[index] == experts.layers
    elif experts.placed == "stepped":
        has = index not in config.mlp_only_layers and (index + 1) % config.decoder_sparse_step == 0
    elif experts.placed == "listed":
        has = config.mlp_layer_types[index] == "sparse"
    else:
        has = experts.dense is None or index >= int(getattr(config, experts.dense))
    return int(getattr(config, experts.count)) if has else 0

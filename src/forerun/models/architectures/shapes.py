"""The tensors that a description and a config's sizes ask for: names, shapes, and how ranks split them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from forerun.models.architectures.description import SUFFIXES, Architecture, Mlp, Name, ShortConvSpec
from forerun.models.architectures.spec import LayerSpec, Spec, bind

Shape = tuple[int, ...]
Units = tuple[int, int]
"""A number of units (heads, neurons, channels) and the width of each."""
Axis = int | tuple[Units, ...]
"""An axis that every rank has whole: its length; or sections of units, of which every rank has its share."""
Axes = tuple[Axis, ...]
Tensors = Iterator[tuple[str, Axes]]


def shapes(config: Any, spec: Spec | None = None) -> dict[str, Shape]:
    """Shapes by name of every weight and bias that a checkpoint of a described ``config``, or a drafter of this spec,
    must hold. Projections are [outputs, inputs]; a tied output layer has no tensor."""
    return {
        name: tuple(axis if isinstance(axis, int) else sum(count * width for count, width in axis) for axis in axes)
        for name, axes in tensors(spec or bind(config), config).items()
    }


def random_weights(shapes: Mapping[str, Shape]) -> dict[str, torch.Tensor]:
    """Numbers of the size that trained weights have: ones for vectors, which are norms mostly."""
    return {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }


def tensors(spec: Spec, config: Any) -> dict[str, Axes]:
    """The same tensors' axes. Ranks split embedding and output layer by tokens, which axes do not say."""
    architecture, words = spec.architecture, (config.vocab_size, spec.hidden)
    given = architecture.draft_input
    result: dict[str, Axes] = {} if given else {f"{architecture.embedding.checkpoint}.weight": words}
    for each in (given.norm_embedding, given.norm_given) if given else ():
        result |= {} if each is None else _norm(architecture, each, spec.hidden)
    if given and given.mix is not None:
        result[f"{given.mix.checkpoint}.weight"] = (spec.hidden, 2 * spec.hidden)
    if spec.per_layer_width and (names := architecture.per_layer) is not None:
        every = len(spec.layers) * spec.per_layer_width
        result[f"{names.table.checkpoint}.weight"] = (config.vocab_size_per_layer_input, every)
        result[f"{names.project.checkpoint}.weight"] = (every, spec.hidden)
        result[f"{names.norm.checkpoint}.weight"] = (spec.per_layer_width,)
    for index, layer in enumerate(spec.layers):
        for name, axes in _layer(spec.at(index), layer, config):
            result[f"{architecture.layers.checkpoint}.{index}.{name}"] = axes
    result |= _norm(architecture, architecture.norm, spec.hidden)
    if not given and not config.tie_word_embeddings:
        result[f"{architecture.head.checkpoint}.weight"] = words
    return result


def unread(spec: Spec) -> set[str]:
    """Names of tensors that checkpoints may hold for layers which read the keys and values of others."""
    norms, attention, prefix = spec.architecture.norms, spec.architecture.attention, spec.architecture.layers.checkpoint
    names = [name.checkpoint for name in (*attention.qkv[1:], norms.key) if name is not None]
    layers = [index for index, layer in enumerate(spec.layers) if layer.kv_source is not None]
    return {f"{prefix}.{index}.{name}.{suffix}" for index in layers for name in names for suffix in SUFFIXES}


def _layer(spec: Spec, layer: LayerSpec, config: Any) -> Tensors:
    architecture, norms = spec.architecture, spec.architecture.norms
    if layer.attention:
        yield from _attention(spec, layer, config) if spec.latent is None else _latent(spec, config)
    if layer.mixer:
        yield from _mixer(spec)
    if layer.mlp:
        yield from _mlp(spec.mlp(layer), spec, config)
    if layer.experts:
        yield from _experts(spec, layer.experts, config)
    if architecture.layer_scale is not None:
        yield architecture.layer_scale.checkpoint, (1,)
    if spec.per_layer_width and (names := architecture.per_layer) is not None:
        yield from _linear(names.gate, spec.per_layer_width, spec.hidden)
        yield from _linear(names.out, spec.hidden, spec.per_layer_width)
        yield from _norm(architecture, names.after, spec.hidden).items()
    for name in (norms.before_attention, norms.token, norms.after_attention, norms.before_mlp, norms.after_mlp):
        if name is not None:
            yield from _norm(architecture, name, spec.hidden).items()


def _attention(spec: Spec, layer: LayerSpec, config: Any) -> Tensors:
    norms, attention, shares = spec.architecture.norms, spec.architecture.attention, layer.kv_source is not None
    heads, kv_heads = (spec.heads, spec.head_dim), (spec.kv_heads, spec.head_dim)
    queries = (spec.heads, 2 * spec.head_dim) if attention.gated else heads
    names = attention.qkv[: 1 if shares else 2 if layer.key_is_value else 3]
    read = spec.hidden if norms.token is None else 2 * spec.hidden
    yield from _linears(names, (queries, kv_heads, kv_heads), read, bias=_has(config, attention.bias))
    yield from _linear(attention.out, spec.hidden, (heads,), bias=_has(config, attention.out_bias))
    if attention.sinks is not None:
        yield attention.sinks.checkpoint, (spec.heads,)
    for name, count in ((norms.query, spec.heads), (norms.key, spec.kv_heads)):
        if name is not None and not (shares and name is norms.key):
            yield f"{name.checkpoint}.weight", (count * spec.head_dim if norms.over_heads else spec.head_dim,)


def _latent(spec: Spec, config: Any) -> Tensors:
    names, sizes, attention = spec.architecture.latent, spec.latent, spec.architecture.attention
    assert names is not None
    assert sizes is not None
    bias, queries = _has(config, attention.bias), spec.heads * sizes.query_dim
    if sizes.query_rank:
        yield from _linear(names.q_a, sizes.query_rank, spec.hidden, bias=bias)
        yield f"{names.q_a_norm.checkpoint}.weight", (sizes.query_rank,)
        yield from _linear(names.q_b, queries, sizes.query_rank)
    else:
        yield from _linear(names.q, queries, spec.hidden)
    yield from _linear(names.kv_a, sizes.rank + sizes.rope_dim, spec.hidden, bias=bias)
    yield f"{names.kv_a_norm.checkpoint}.weight", (sizes.rank,)
    for head in range(spec.heads):
        yield f"{names.k_b.checkpoint.format(head)}.weight", (sizes.rank, sizes.nope_dim)
        yield f"{names.v_b.checkpoint.format(head)}.weight", (sizes.value_dim, sizes.rank)
    yield from _linear(attention.out, spec.hidden, spec.heads * sizes.value_dim, bias=_has(config, attention.out_bias))


def _mixer(spec: Spec) -> Tensors:
    names, sizes = spec.architecture.mixer, spec.mixer
    assert names is not None
    assert sizes is not None
    channels: tuple[Units, ...] = ((sizes.channels, 1),)
    values = channels
    if isinstance(names, ShortConvSpec):
        yield from _linear(names.in_proj, channels * 3, spec.hidden, bias=sizes.in_bias)
    else:
        turns = sizes.heads // sizes.groups if sizes.tiled else 1  # heads alternate between groups, which ranks share
        values = ((sizes.heads // turns, sizes.value_dim),) * turns
        scalars: tuple[Units, ...] = ((sizes.heads // turns, 1),) * turns
        keys: tuple[Units, ...] = ((sizes.groups, sizes.key_dim),) * 2
        delta = names.kind == "delta"
        channels = keys + values if delta else values + keys
        if delta:
            for name, outputs in zip(names.in_proj, (channels, values, scalars, scalars), strict=True):
                yield from _linear(name, outputs, spec.hidden, bias=sizes.in_bias)
        else:
            yield from _linear(names.in_proj[0], values + channels + scalars, spec.hidden, bias=sizes.in_bias)
        for each in (names.decay, names.dt_bias, names.skip):
            if each is not None:
                yield each.checkpoint, (scalars,)
        if sizes.has_norm:
            split = values if sizes.groups > 1 else sizes.inner
            yield f"{names.norm.checkpoint}.weight", (sizes.value_dim if delta else split,)
    yield from _linear(names.out, spec.hidden, values, bias=sizes.out_bias)
    yield f"{names.conv.checkpoint}.weight", (channels, 1, sizes.columns + 1)
    if sizes.conv_bias:
        yield f"{names.conv.checkpoint}.bias", (channels,)


def _mlp(mlp: Mlp, spec: Spec, config: Any) -> Tensors:
    neurons, bias = (spec.intermediate, 1), _has(config, mlp.bias)
    yield from _linears(mlp.gate_up, (neurons,) * (1 + mlp.gated), spec.hidden, bias=bias)
    yield from _linear(mlp.down, spec.hidden, (neurons,), bias=bias)
    for name in mlp.activation_params:
        yield name.checkpoint, (1,)


def _experts(spec: Spec, count: int, config: Any) -> Tensors:
    experts, routing = spec.architecture.experts, spec.routing
    assert experts is not None
    assert routing is not None
    width = getattr(config, experts.width)
    yield from _linear(experts.router, count, spec.hidden, bias=experts.bias)
    if experts.shared_gate is not None:
        yield from _linear(experts.shared_gate, 1, spec.hidden)
    if (norms := experts.norms) is not None:
        for name in (norms.before, norms.after, norms.mlp):
            yield from _norm(spec.architecture, name, spec.hidden).items()
        yield norms.scale.checkpoint, (spec.hidden,)
        yield norms.weights.checkpoint, (count,)
    if experts.score_bias is not None and routing.has_score_bias:
        yield experts.score_bias.checkpoint, (count,)
    for expert in range(count):
        for name in (*experts.gate_up, experts.down):
            outputs, inputs = (spec.hidden, width) if name is experts.down else (width, spec.hidden)
            yield from _linear(Name(name.checkpoint.format(expert), name.gguf), outputs, inputs, bias=experts.bias)


def _norm(architecture: Architecture, name: Name, width: int) -> dict[str, Axes]:
    suffixes = SUFFIXES if architecture.norms.bias else SUFFIXES[:1]
    return {f"{name.checkpoint}.{suffix}": (width,) for suffix in suffixes}


def _has(config: Any, bias: str | None) -> bool:
    return bias is not None and (bias == "always" or bool(getattr(config, bias)))


def _linears(names: tuple[Name, ...], outputs: tuple[Units, ...], inputs: int, *, bias: bool) -> Tensors:
    """Projections over the same inputs; a single name is fused: it has all outputs."""
    for name, axis in zip(names, [(units,) for units in outputs] if len(names) > 1 else [outputs]):
        yield from _linear(name, axis, inputs, bias=bias)


def _linear(name: Name, outputs: Axis, inputs: Axis, *, bias: bool = False) -> Tensors:
    yield f"{name.checkpoint}.weight", (outputs, inputs)
    if bias:
        yield f"{name.checkpoint}.bias", (outputs,)

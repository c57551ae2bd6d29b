"""A checkpoint's tensors by name, as a description and a config's sizes ask for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forerun.models.architectures.description import SUFFIXES, Architecture, Mlp, Name, ShortConvSpec
from forerun.models.architectures.spec import LayerSpec, Spec, bind

Shape = tuple[int, ...]
Shapes = Iterator[tuple[str, Shape]]


def shapes(config: Any) -> dict[str, Shape]:
    """Shapes by name of every weight and bias that a checkpoint of a described ``config`` must hold. Projections are
    [outputs, inputs]; a tied output layer has no tensor."""
    spec = bind(config)
    architecture, words = spec.architecture, (config.vocab_size, spec.hidden)
    result: dict[str, Shape] = {f"{architecture.embedding.checkpoint}.weight": words}
    if spec.per_layer_width and (names := architecture.per_layer) is not None:
        every = len(spec.layers) * spec.per_layer_width
        result[f"{names.table.checkpoint}.weight"] = (getattr(config, names.vocab), every)
        result[f"{names.project.checkpoint}.weight"] = (every, spec.hidden)
        result[f"{names.norm.checkpoint}.weight"] = (spec.per_layer_width,)
    for index, layer in enumerate(spec.layers):
        for name, shape in _layer(spec.at(index), layer, config):
            result[f"{architecture.layers.checkpoint}.{index}.{name}"] = shape
    result |= _norm(architecture, architecture.norm, spec.hidden)
    if not config.tie_word_embeddings:
        result[f"{architecture.head.checkpoint}.weight"] = words
    return result


def unread(config: Any) -> set[str]:
    """Names of tensors that checkpoints may hold for layers which read the keys and values of others."""
    spec = bind(config)
    norms, attention, prefix = spec.architecture.norms, spec.architecture.attention, spec.architecture.layers.checkpoint
    names = [name.checkpoint for name in (*attention.qkv[1:], norms.key) if name is not None]
    layers = [index for index, layer in enumerate(spec.layers) if layer.kv_source is not None]
    return {f"{prefix}.{index}.{name}.{suffix}" for index in layers for name in names for suffix in SUFFIXES}


def _layer(spec: Spec, layer: LayerSpec, config: Any) -> Shapes:
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
        yield from _linears((names.gate,), (spec.per_layer_width,), spec.hidden)
        yield from _linears((names.out,), (spec.hidden,), spec.per_layer_width)
        yield from _norm(architecture, names.after, spec.hidden).items()
    for name in (norms.before_attention, norms.after_attention, norms.before_mlp, norms.after_mlp):
        if name is not None:
            yield from _norm(architecture, name, spec.hidden).items()


def _attention(spec: Spec, layer: LayerSpec, config: Any) -> Shapes:
    norms, attention, shares = spec.architecture.norms, spec.architecture.attention, layer.kv_source is not None
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    names = attention.qkv[: 1 if shares else 2 if layer.key_is_value else 3]
    outputs = (2 * queries if attention.gated else queries, keys, keys)
    yield from _linears(names, outputs, spec.hidden, bias=_has(config, attention.bias))
    yield from _linears((attention.out,), (spec.hidden,), queries, bias=_has(config, attention.out_bias))
    if attention.sinks is not None:
        yield attention.sinks.checkpoint, (spec.heads,)
    for name, width in ((norms.query, queries), (norms.key, keys)):
        if name is not None and not (shares and name is norms.key):
            yield f"{name.checkpoint}.weight", (width if norms.over_heads else spec.head_dim,)


def _latent(spec: Spec, config: Any) -> Shapes:
    names, sizes, attention = spec.architecture.latent, spec.latent, spec.architecture.attention
    assert names is not None
    assert sizes is not None
    bias, queries = _has(config, attention.bias), spec.heads * sizes.query_dim
    if sizes.query_rank:
        yield from _linears((names.q_a,), (sizes.query_rank,), spec.hidden, bias=bias)
        yield f"{names.q_a_norm.checkpoint}.weight", (sizes.query_rank,)
        yield from _linears((names.q_b,), (queries,), sizes.query_rank)
    else:
        yield from _linears((names.q,), (queries,), spec.hidden)
    yield from _linears((names.kv_a,), (sizes.rank + sizes.rope_dim,), spec.hidden, bias=bias)
    yield f"{names.kv_a_norm.checkpoint}.weight", (sizes.rank,)
    for head in range(spec.heads):
        yield f"{names.k_b.checkpoint.format(head)}.weight", (sizes.rank, sizes.nope_dim)
        yield f"{names.v_b.checkpoint.format(head)}.weight", (sizes.value_dim, sizes.rank)
    values = spec.heads * sizes.value_dim
    yield from _linears((attention.out,), (spec.hidden,), values, bias=_has(config, attention.out_bias))


def _mixer(spec: Spec) -> Shapes:
    names, sizes = spec.architecture.mixer, spec.mixer
    assert names is not None
    assert sizes is not None
    if isinstance(names, ShortConvSpec):
        yield from _linears((names.in_proj,), (3 * sizes.inner,), spec.hidden, bias=sizes.in_bias)
    else:
        delta = names.kind == "delta"
        outputs = (sizes.channels, sizes.inner, sizes.heads, *((sizes.heads,) if delta else ()))
        yield from _linears(names.in_proj, outputs, spec.hidden, bias=sizes.in_bias)
        for each in (names.decay, names.dt_bias, names.skip):
            if each is not None:
                yield each.checkpoint, (sizes.heads,)
        if sizes.has_norm:
            yield f"{names.norm.checkpoint}.weight", (sizes.value_dim if delta else sizes.inner,)
    yield from _linears((names.out,), (spec.hidden,), sizes.inner, bias=sizes.out_bias)
    yield f"{names.conv.checkpoint}.weight", (sizes.channels, 1, sizes.columns + 1)
    if sizes.conv_bias:
        yield f"{names.conv.checkpoint}.bias", (sizes.channels,)


def _mlp(mlp: Mlp, spec: Spec, config: Any) -> Shapes:
    width, bias = spec.intermediate, _has(config, mlp.bias)
    yield from _linears(mlp.gate_up, (width, width) if mlp.gated else (width,), spec.hidden, bias=bias)
    yield from _linears((mlp.down,), (spec.hidden,), width, bias=bias)
    for name in mlp.activation_params:
        yield name.checkpoint, (1,)


def _experts(spec: Spec, count: int, config: Any) -> Shapes:
    experts, routing = spec.architecture.experts, spec.routing
    assert experts is not None
    assert routing is not None
    width = getattr(config, experts.width)
    yield from _linears((experts.router,), (count,), spec.hidden, bias=experts.bias)
    if experts.shared_gate is not None:
        yield from _linears((experts.shared_gate,), (1,), spec.hidden)
    if (norms := experts.norms) is not None:
        for name in (norms.before, norms.after, norms.mlp):
            yield from _norm(spec.architecture, name, spec.hidden).items()
        yield norms.scale.checkpoint, (spec.hidden,)
        yield norms.weights.checkpoint, (count,)
    if experts.score_bias is not None and routing.has_score_bias:
        yield experts.score_bias.checkpoint, (count,)
    for expert in range(count):
        *gate_up, down = (Name(name.checkpoint.format(expert), "") for name in (*experts.gate_up, experts.down))
        yield from _linears(tuple(gate_up), (width,) * len(gate_up), spec.hidden, bias=experts.bias)
        yield from _linears((down,), (spec.hidden,), width, bias=experts.bias)


def _norm(architecture: Architecture, name: Name, width: int) -> dict[str, Shape]:
    suffixes = SUFFIXES if architecture.norms.bias else SUFFIXES[:1]
    return {f"{name.checkpoint}.{suffix}": (width,) for suffix in suffixes}


def _has(config: Any, bias: str | None) -> bool:
    return bias is not None and (bias == "always" or bool(getattr(config, bias)))


def _linears(names: tuple[Name, ...], outputs: Shape, inputs: int, *, bias: bool = False) -> Shapes:
    """Projections over the same inputs; a single name is fused: it has all outputs."""
    for name, count in zip(names, outputs if len(names) > 1 else (sum(outputs),)):
        yield f"{name.checkpoint}.weight", (count, inputs)
        if bias:
            yield f"{name.checkpoint}.bias", (count,)

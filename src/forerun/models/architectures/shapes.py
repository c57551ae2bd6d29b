"""The tensors of a checkpoint, by name, as a description and a config's sizes ask for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forerun.models.architectures.description import KINDS, Architecture, Name, ShortConvSpec
from forerun.models.architectures.spec import LayerSpec, Spec, bind

Shape = tuple[int, ...]


def shapes(config: Any) -> dict[str, Shape]:
    """Name to shape of every weight and bias that a checkpoint of ``config``, which ``applies``, must hold; projections
    are [outputs, inputs]. A tied output layer has none."""
    spec = bind(config)
    architecture, rows = spec.architecture, (config.vocab_size, spec.hidden)
    result: dict[str, Shape] = {f"{architecture.embedding.checkpoint}.weight": rows}
    if spec.inputs and architecture.inputs is not None:
        names, every = architecture.inputs, len(spec.layers) * spec.inputs
        result[f"{names.table.checkpoint}.weight"] = (getattr(config, names.tokens), every)
        result[f"{names.project.checkpoint}.weight"] = (every, spec.hidden)
        result[f"{names.norm.checkpoint}.weight"] = (spec.inputs,)
    for index, layer in enumerate(spec.layers):
        for part, shape in _layer(spec.at(index), layer, config):
            result[f"{architecture.layers.checkpoint}.{index}.{part}"] = shape
    result |= _norm(architecture, architecture.norm.checkpoint, spec.hidden)
    if not config.tie_word_embeddings:
        result[f"{architecture.head.checkpoint}.weight"] = rows
    return result


def unread(config: Any) -> set[str]:
    """Names of tensors that checkpoints hold for layers which read keys and values of others."""
    spec = bind(config)
    norms, attention, at = spec.architecture.norms, spec.architecture.attention, spec.architecture.layers.checkpoint
    names = [name.checkpoint for name in (*attention.qkv[1:], norms.key) if name is not None]
    return {
        f"{at}.{index}.{name}.{kind}"
        for index, layer in enumerate(spec.layers)
        if layer.source is not None
        for name in names
        for kind in KINDS
    }


def _layer(spec: Spec, layer: LayerSpec, config: Any) -> Iterator[tuple[str, Shape]]:
    norms = spec.architecture.norms
    if layer.attention:
        yield from _attention(spec, layer, config) if spec.latent is None else _latent(spec, config)
    if layer.mixer:
        yield from _mixer(spec)
    if layer.mlp:
        yield from _mlp(spec, layer, config)
    if layer.experts:
        yield from _experts(spec, layer.experts, config)
    if spec.architecture.layer_scale is not None:
        yield spec.architecture.layer_scale.checkpoint, (1,)
    if spec.inputs and spec.architecture.inputs is not None:
        names = spec.architecture.inputs
        yield from _linears((names.gate,), (spec.inputs,), spec.hidden, bias=False)
        yield from _linears((names.out,), (spec.hidden,), spec.inputs, bias=False)
        yield from _norm(spec.architecture, names.after.checkpoint, spec.hidden).items()
    outer = (norms.before_attention, norms.after_attention, norms.before_mlp, norms.after_mlp)
    for name in outer:
        if name is not None:
            yield from _norm(spec.architecture, name.checkpoint, spec.hidden).items()


def _attention(spec: Spec, layer: LayerSpec, config: Any) -> Iterator[tuple[str, Shape]]:
    norms, attention = spec.architecture.norms, spec.architecture.attention
    queries, shared = spec.heads * spec.width, spec.kv_heads * spec.width
    first = 2 * queries if attention.gated else queries
    names = attention.qkv[:1] if layer.source is not None else attention.qkv[:2] if layer.twice else attention.qkv
    yield from _linears(names, (first, shared, shared), spec.hidden, bias=_has(config, attention.bias))
    yield from _linears((attention.out,), (spec.hidden,), queries, bias=_has(config, attention.out_bias))
    if attention.sinks is not None:
        yield attention.sinks.checkpoint, (spec.heads,)
    for name, whole in ((norms.query, queries), (norms.key, shared)):
        if name is not None and (layer.source is None or name is norms.query):
            yield f"{name.checkpoint}.weight", (whole if norms.whole else spec.width,)


def _latent(spec: Spec, config: Any) -> Iterator[tuple[str, Shape]]:
    names, sizes, attention = spec.architecture.latent, spec.latent, spec.architecture.attention
    assert names is not None
    assert sizes is not None
    bias, queries = _has(config, attention.bias), spec.heads * sizes.query
    if sizes.query_rank:
        yield from _linears((names.down_query,), (sizes.query_rank,), spec.hidden, bias=bias)
        yield f"{names.norm_query.checkpoint}.weight", (sizes.query_rank,)
        yield from _linears((names.up_query,), (queries,), sizes.query_rank, bias=False)
    else:
        yield from _linears((names.query,), (queries,), spec.hidden, bias=False)
    yield from _linears((names.down,), (sizes.rank + sizes.turned,), spec.hidden, bias=bias)
    yield f"{names.norm.checkpoint}.weight", (sizes.rank,)
    for head in range(spec.heads):
        yield f"{names.keys.checkpoint.format(head)}.weight", (sizes.rank, sizes.plain)
        yield f"{names.values.checkpoint.format(head)}.weight", (sizes.value, sizes.rank)
    out = spec.heads * sizes.value
    yield from _linears((attention.out,), (spec.hidden,), out, bias=_has(config, attention.out_bias))


def _mixer(spec: Spec) -> Iterator[tuple[str, Shape]]:
    names, sizes = spec.architecture.mixer, spec.mixer
    assert names is not None
    assert sizes is not None
    if isinstance(names, ShortConvSpec):
        yield from _linears((names.inputs,), (3 * sizes.inner,), spec.hidden, bias=sizes.biased)
    else:
        outputs: Shape = (sizes.channels, sizes.inner, sizes.heads, sizes.heads)
        outputs = outputs if names.kind == "delta" else outputs[:3]
        yield from _linears(names.inputs, outputs, spec.hidden, bias=sizes.biased)
        for each in (names.decay, names.step, names.skip):
            if each is not None:
                yield each.checkpoint, (sizes.heads,)
        if sizes.normed:
            yield f"{names.norm.checkpoint}.weight", (sizes.value_dim if names.kind == "delta" else sizes.inner,)
    yield from _linears((names.out,), (spec.hidden,), sizes.inner, bias=sizes.out_biased)
    yield f"{names.conv.checkpoint}.weight", (sizes.channels, 1, sizes.columns + 1)
    if sizes.conv_biased:
        yield f"{names.conv.checkpoint}.bias", (sizes.channels,)


def _norm(architecture: Architecture, name: str, width: int) -> dict[str, Shape]:
    kinds = ("weight", "bias") if architecture.norms.bias else ("weight",)
    return {f"{name}.{kind}": (width,) for kind in kinds}


def _has(config: Any, bias: str | None) -> bool:
    """Whether projections have biases."""
    return bias is not None and (bias == "always" or bool(getattr(config, bias)))


def _linears(names: tuple[Name, ...], outputs: Shape, inputs: int, *, bias: bool) -> Iterator[tuple[str, Shape]]:
    """Projections over the same inputs; one name holds all outputs end to end."""
    for name, count in zip(names, outputs if len(names) > 1 else (sum(outputs),)):
        yield f"{name.checkpoint}.weight", (count, inputs)
        if bias:
            yield f"{name.checkpoint}.bias", (count,)


def _mlp(spec: Spec, layer: LayerSpec, config: Any) -> Iterator[tuple[str, Shape]]:
    mlp, width = spec.mlp(layer), spec.inner
    bias = _has(config, mlp.bias)
    yield from _linears(mlp.gate_up, (width, width) if mlp.gated else (width,), spec.hidden, bias=bias)
    yield from _linears((mlp.down,), (spec.hidden,), width, bias=bias)
    for name in mlp.numbers:
        yield name.checkpoint, (1,)


def _experts(spec: Spec, count: int, config: Any) -> Iterator[tuple[str, Shape]]:
    experts = spec.architecture.experts
    assert experts is not None
    width = getattr(config, experts.width)
    yield from _linears((experts.router,), (count,), spec.hidden, bias=experts.bias)
    if experts.gate is not None:
        yield from _linears((experts.gate,), (1,), spec.hidden, bias=False)
    if (apart := experts.apart) is not None:
        for name in (apart.before, apart.after, apart.mlp):
            yield from _norm(spec.architecture, name.checkpoint, spec.hidden).items()
        yield apart.scale.checkpoint, (spec.hidden,)
        yield apart.weights.checkpoint, (count,)
    if experts.correction is not None and spec.corrected:
        yield experts.correction.checkpoint, (count,)
    for expert in range(count):
        *both, down = (Name(name.checkpoint.format(expert), name.gguf) for name in (*experts.gate_up, experts.down))
        yield from _linears(tuple(both), (width,) * len(both), spec.hidden, bias=experts.bias)
        yield from _linears((down,), (spec.hidden,), width, bias=experts.bias)

"""The tensors of a checkpoint, by name, as a description and a config's sizes ask for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forerun.models.architectures.description import Name
from forerun.models.architectures.spec import LayerSpec, Spec, bind

Shape = tuple[int, ...]


def shapes(config: Any) -> dict[str, Shape]:
    """Name to shape of every weight and bias that a checkpoint of ``config``, which ``applies``, must hold; projections
    are [outputs, inputs]. A tied output layer has none."""
    spec = bind(config)
    architecture, rows = spec.architecture, (config.vocab_size, spec.hidden)
    result: dict[str, Shape] = {f"{architecture.embedding.checkpoint}.weight": rows}
    for index, layer in enumerate(spec.layers):
        for part, shape in _layer(spec, layer, config):
            result[f"{architecture.layers.checkpoint}.{index}.{part}"] = shape
    result[f"{architecture.norm.checkpoint}.weight"] = (spec.hidden,)
    if not config.tie_word_embeddings:
        result[f"{architecture.head.checkpoint}.weight"] = rows
    return result


def _layer(spec: Spec, layer: LayerSpec, config: Any) -> Iterator[tuple[str, Shape]]:
    norms = spec.architecture.norms
    yield from _attention(spec, config) if not layer.mixer else _mixer(spec)
    yield from _mlp(spec, config) if not layer.experts else _experts(spec, layer.experts, config)
    outer = (norms.before_attention, norms.after_attention, norms.before_mlp, norms.after_mlp)
    for name in outer:
        if name is not None:
            yield f"{name.checkpoint}.weight", (spec.hidden,)


def _attention(spec: Spec, config: Any) -> Iterator[tuple[str, Shape]]:
    norms, attention = spec.architecture.norms, spec.architecture.attention
    queries, shared = spec.heads * spec.width, spec.kv_heads * spec.width
    asked = attention.bias is not None
    inputs = asked and (attention.bias == "inputs" or bool(getattr(config, str(attention.bias))))
    yield from _linears(attention.qkv, (queries, shared, shared), spec.hidden, bias=inputs)
    yield from _linears((attention.out,), (spec.hidden,), queries, bias=inputs and attention.bias != "inputs")
    for name, whole in ((norms.query, queries), (norms.key, shared)):
        if name is not None:
            yield f"{name.checkpoint}.weight", (whole if norms.whole else spec.width,)


def _mixer(spec: Spec) -> Iterator[tuple[str, Shape]]:
    names, sizes = spec.architecture.mixer, spec.mixer
    assert names is not None
    assert sizes is not None
    yield from _linears((names.inputs,), (3 * sizes.inner,), spec.hidden, bias=sizes.biased)
    yield from _linears((names.out,), (spec.hidden,), sizes.inner, bias=sizes.biased)
    yield f"{names.conv.checkpoint}.weight", (sizes.channels, 1, sizes.columns + 1)
    if sizes.biased:
        yield f"{names.conv.checkpoint}.bias", (sizes.channels,)


def _linears(names: tuple[Name, ...], outputs: Shape, inputs: int, *, bias: bool) -> Iterator[tuple[str, Shape]]:
    """Projections over the same inputs; one name holds all outputs end to end."""
    for name, count in zip(names, outputs if len(names) > 1 else (sum(outputs),)):
        yield f"{name.checkpoint}.weight", (count, inputs)
        if bias:
            yield f"{name.checkpoint}.bias", (count,)


def _mlp(spec: Spec, config: Any) -> Iterator[tuple[str, Shape]]:
    mlp, width = spec.architecture.mlp, spec.inner
    bias = mlp.bias is not None and bool(getattr(config, mlp.bias))
    yield from _linears(mlp.gate_up, (width, width), spec.hidden, bias=bias)
    yield from _linears((mlp.down,), (spec.hidden,), width, bias=bias)


def _experts(spec: Spec, count: int, config: Any) -> Iterator[tuple[str, Shape]]:
    experts = spec.architecture.experts
    assert experts is not None
    width = getattr(config, experts.width)
    yield f"{experts.router.checkpoint}.weight", (count, spec.hidden)
    for expert in range(count):
        for name in experts.gate_up:
            yield f"{name.checkpoint.format(expert)}.weight", (width, spec.hidden)
        yield f"{experts.down.checkpoint.format(expert)}.weight", (spec.hidden, width)

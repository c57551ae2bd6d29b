"""Which part of which weight a rank has, derived from an architecture's description.

Queries, keys, values, gates and what they gate are split by their outputs (heads, neurons), what comes behind them by
its inputs, experts one by one, the embedding and the output layer by tokens. Layers with state are split by heads, or
by channels where they have none. Norms and routers are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from forerun.core.errors import ConfigError
from forerun.models.architectures.description import Name, Recurrence, ShortConvSpec
from forerun.models.architectures.spec import MixerSpec, Spec
from forerun.models.formats.base import MadeRows, Rows
from forerun.models.formats.blocks import Blocks
from forerun.models.formats.int8 import Levels
from forerun.models.transform import ChangedWeights, Weights


def check(spec: Spec, config: Any, size: int) -> None:
    """Raise ConfigError unless ``size`` ranks can have equal parts."""
    if spec.uneven or spec.latent is not None:
        raise ConfigError(
            f"tensor_parallel_size splits layers of one size: leave it out for {spec.architecture.causal}"
        )
    if spec.architecture.attention.sinks is not None:
        raise ConfigError(f"tensor_parallel_size {size}: {spec.architecture.causal} has sinks, which are not split")
    if any(layer.experts and layer.mlp for layer in spec.layers):
        raise ConfigError(
            f"tensor_parallel_size {size}: {spec.architecture.causal} has an MLP beside experts, which is not split"
        )
    counts = {"heads": spec.heads}
    layers = {layer.experts for layer in spec.layers}
    if 0 in layers:
        counts["intermediate size"] = spec.inner
    if spec.states and (mixer := spec.mixer) is not None:
        counts["heads with state" if mixer.heads else "channels of a convolution"] = mixer.heads or mixer.channels
        if mixer.groups > 1 or mixer.tiled:
            counts["groups of heads with state"] = mixer.groups
    experts = max(layers)
    if experts:
        counts["number of experts"] = experts
    for what, count in counts.items():
        if count % size:
            raise ConfigError(f"tensor_parallel_size {size} does not divide the model's {what}, {count}")
    if spec.kv_heads % size and size % spec.kv_heads:
        raise ConfigError(
            f"tensor_parallel_size {size} neither divides the model's key-value heads, {spec.kv_heads}, nor is a "
            "multiple of them"
        )


def own(spec: Spec, size: int) -> Spec:
    """What a rank's layers look like. Where there are more ranks than key-value heads, some have the same one."""
    mixer = None if spec.mixer is None else _own_mixer(spec, spec.mixer, size)
    return replace(spec, heads=spec.heads // size, kv_heads=max(1, spec.kv_heads // size), mixer=mixer)


def _own_mixer(spec: Spec, mixer: MixerSpec, size: int) -> MixerSpec:
    if not mixer.heads:
        return replace(mixer, channels=mixer.channels // size, inner=mixer.inner // size)
    heads, groups, names = mixer.heads // size, max(1, mixer.groups // size), spec.architecture.mixer
    inner = heads * mixer.value_dim
    return replace(
        mixer, heads=heads, groups=groups, inner=inner, channels=inner + 2 * groups * mixer.key_dim,
        gates=mixer.gates // size,
        norm_over_all=mixer.groups == 1 and mixer.normed and isinstance(names, Recurrence) and names.kind == "mamba",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cut:
    """Along ``axis`` a weight consists of sections of so many ``units`` (heads, neurons), of so many numbers each; all
    of one width, if ``widths`` says nothing."""

    axis: int
    units: tuple[int, ...]
    widths: tuple[int, ...] = ()

    def places(self, length: int, rank: int, size: int) -> torch.Tensor:
        """Which of ``length`` rows or columns the rank has: its share of every section."""
        first, result = 0, []
        widths = self.widths or (length // sum(self.units),) * len(self.units)
        for units, width in zip(self.units, widths, strict=True):
            begin, count = rank * units // size, max(1, units // size)
            result.append(torch.arange(first + begin * width, first + (begin + count) * width))
            first += units * width
        return torch.cat(result)


def vocabulary(tokens: int, rank: int, size: int) -> torch.Tensor:
    """The tokens that a rank has, as many as every other: behind the last token come -1."""
    each = -(-tokens // size)
    indices = torch.arange(rank * each, (rank + 1) * each)
    return indices.where(indices < tokens, -1)


def cuts(spec: Spec) -> dict[str, Cut]:
    """By the names of a layer's projections, without the layer's own."""
    attention, mlp = spec.architecture.attention, spec.architecture.mlp
    heads, inner = (spec.heads, spec.kv_heads, spec.kv_heads), (spec.inner, spec.inner)[: 1 + mlp.gated]
    result = {attention.out.checkpoint: Cut(1, heads[:1]), mlp.down.checkpoint: Cut(1, inner[:1])}
    result |= _by_outputs(attention.qkv, heads) | _by_outputs(mlp.gate_up, inner)
    if spec.mixer is not None and (names := spec.architecture.mixer) is not None:
        result |= _of_channels(names, spec.mixer) if isinstance(names, ShortConvSpec) else _of_heads(names, spec.mixer)
    return result


def _of_channels(names: ShortConvSpec, sizes: MixerSpec) -> dict[str, Cut]:
    one = (sizes.channels,)
    cut = {names.inputs: Cut(0, one * 3), names.conv: Cut(0, one), names.out: Cut(1, one)}
    return {name.checkpoint: each for name, each in cut.items()}


def _of_heads(names: Recurrence, sizes: MixerSpec) -> dict[str, Cut]:
    """Values, gates and what each head has alone; keys and queries by groups. Where heads take turns at groups, a rank
    has those of its groups."""
    turns = sizes.heads // sizes.groups if sizes.tiled else 1
    heads = (sizes.heads // turns,) * turns
    groups, keys, values, ones = (sizes.groups,) * 2, (sizes.key_dim,) * 2, (sizes.value_dim,) * turns, (1,) * turns
    whole, each = Cut(0, heads, values), Cut(0, heads, ones)
    result = {names.out: Cut(1, heads, values), names.decay: each, names.step: each}
    if names.kind == "delta":
        mixed = Cut(0, groups + heads, keys + values)
        result |= dict(zip(names.inputs, (mixed, whole, each, each), strict=True))
    else:
        mixed = Cut(0, heads + groups, values + keys)
        result[names.inputs[0]] = Cut(0, heads + mixed.units + heads, values + mixed.widths + ones)
        if names.skip is not None:
            result[names.skip] = each
        if sizes.groups > 1:
            result[names.norm] = whole
    result[names.conv] = mixed
    return {name.checkpoint: cut for name, cut in result.items()}


def _by_outputs(names: tuple[Name, ...], units: tuple[int, ...]) -> dict[str, Cut]:
    if len(names) == 1:
        return {names[0].checkpoint: Cut(0, units)}
    return {name.checkpoint: Cut(0, (count,)) for name, count in zip(names, units, strict=True)}


def shard(weight: Rows, rows: torch.Tensor | None, columns: torch.Tensor | None) -> MadeRows:
    """Some rows and columns of a weight; a row -1 is zeros."""
    outputs = weight.shape[0] if rows is None else len(rows)
    inputs = weight.shape[1] if columns is None else len(columns)
    chosen: slice | torch.Tensor = slice(None)
    if columns is not None:
        ahead = torch.equal(columns, torch.arange(len(columns)) + columns[0])
        chosen = slice(int(columns[0]), int(columns[-1]) + 1) if ahead else columns

    def make(which: slice | torch.Tensor) -> torch.Tensor:
        if rows is None:
            return weight[which][:, chosen]  # of a mapped tensor a view: the rest is never read
        indices = rows[which]
        result = weight[indices.clamp(min=0)][:, chosen]
        missing = indices < 0
        if missing.any():
            result[missing] = 0  # a copy, as of every choice of rows
        return result

    shape = torch.Size((outputs, inputs))
    return MadeRows(shape, make, shape.numel() * weight.dtype.itemsize, weight.dtype, weight.device)


class SplitWeights(ChangedWeights):
    """The part of ``weights`` that a rank has. Raises ConfigError for weights in blocks, which are not split."""

    def __init__(self, weights: Weights, spec: Spec, rank: int, size: int) -> None:
        super().__init__(weights, {})
        self.rank, self.size = rank, size
        self.cuts: Mapping[str, Cut] = cuts(spec)
        self.layers = f"{spec.architecture.layers.checkpoint}."
        self.words = {spec.architecture.embedding.checkpoint, spec.architecture.head.checkpoint}

    def __contains__(self, name: str) -> bool:
        if name not in self.weights:
            return False
        cut = self._cut(name)
        return not (name.endswith(".bias") and cut is not None and cut.axis == 1 and self.rank)  # it is added once

    def _cut(self, name: str) -> Cut | None:
        if not name.startswith(self.layers):
            return None
        inside = name.removeprefix(self.layers).partition(".")[2]
        return self.cuts.get(inside) or self.cuts.get(inside.rpartition(".")[0])

    def values(self, name: str) -> Rows:
        result, (stem, _, kind) = self.weights.values(name), name.rpartition(".")
        if stem in self.words:
            return shard(result, vocabulary(result.shape[0], self.rank, self.size), None)
        cut = self._cut(name)
        if cut is None or (kind == "bias" and cut.axis == 1):
            return result
        indices = cut.places(result.shape[cut.axis], self.rank, self.size)
        if len(result.shape) != 2:
            return result[indices]
        return shard(result, indices, None) if cut.axis == 0 else shard(result, None, indices)

    def blocks(self, name: str) -> Blocks | Levels | None:
        if self.weights.blocks(name) is not None:
            raise ConfigError(
                f"tensor_parallel_size splits weights that are numbers, and {name} is in blocks: "
                "quantization='bfloat16' (or float32) reads it as numbers"
            )
        return None

"""Each rank's shard of every weight, derived from an architecture's description.

Queries, keys, values, gate and up are split by outputs (heads, neurons), the projections after them by inputs; experts
one by one; embedding and output layer by tokens; recurrent layers by heads, or by channels if they have none. Every
rank has all norms and routers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from forerun.core.errors import ConfigError
from forerun.models.architectures.description import Name, Recurrence, ShortConvSpec
from forerun.models.architectures.spec import MixerSpec, Spec
from forerun.models.formats.base import LazyRows, Rows
from forerun.models.formats.blocks import Blocks
from forerun.models.formats.int8 import Levels
from forerun.models.transform import ChangedWeights, Weights


def check(spec: Spec, config: Any, size: int) -> None:
    """Raise ConfigError unless ``size`` ranks can have equal shards."""
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
        counts["intermediate size"] = spec.intermediate
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
    """The spec of one rank's layers. With more ranks than key-value heads, several ranks have the same head."""
    mixer = None if spec.mixer is None else _own_mixer(spec, spec.mixer, size)
    return replace(spec, heads=spec.heads // size, kv_heads=max(1, spec.kv_heads // size), mixer=mixer)


def _own_mixer(spec: Spec, mixer: MixerSpec, size: int) -> MixerSpec:
    names = spec.architecture.mixer
    if not isinstance(names, Recurrence):
        return replace(mixer, channels=mixer.channels // size, inner=mixer.inner // size)
    heads, groups = mixer.heads // size, max(1, mixer.groups // size)
    inner = heads * mixer.value_dim
    return replace(
        mixer, heads=heads, groups=groups, inner=inner, channels=inner + 2 * groups * mixer.key_dim,
        gates=mixer.gates // size, norm_over_ranks=mixer.groups == 1 and mixer.has_norm and names.skip is not None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cut:
    """How ranks share an axis of a weight: it has sections of so many ``units`` (heads, neurons) of so many numbers
    each. Without ``widths`` all units are of one width."""

    axis: int
    units: tuple[int, ...]
    widths: tuple[int, ...] = ()

    def indices(self, length: int, rank: int, size: int) -> torch.Tensor:
        """The rank's rows or columns of ``length``: its share of every section."""
        first, result = 0, []
        widths = self.widths or (length // sum(self.units),) * len(self.units)
        for units, width in zip(self.units, widths, strict=True):
            begin, count = rank * units // size, max(1, units // size)
            result.append(torch.arange(first + begin * width, first + (begin + count) * width))
            first += units * width
        return torch.cat(result)


def vocabulary(tokens: int, rank: int, size: int) -> torch.Tensor:
    """The rank's tokens. Every rank has equally many: those after the last token are -1."""
    each = -(-tokens // size)
    indices = torch.arange(rank * each, (rank + 1) * each)
    return indices.where(indices < tokens, -1)


def cuts(spec: Spec) -> dict[str, Cut]:
    """Cuts of a layer's tensors, by their names in the layer."""
    attention, mlp = spec.architecture.attention, spec.architecture.mlp
    heads, neurons = (spec.heads, spec.kv_heads, spec.kv_heads), (spec.intermediate,) * (1 + mlp.gated)
    result = {attention.out: Cut(1, heads[:1]), mlp.down: Cut(1, neurons[:1])}
    result |= _by_outputs(attention.qkv, heads) | _by_outputs(mlp.gate_up, neurons)
    if spec.mixer is not None and (names := spec.architecture.mixer) is not None:
        result |= _by_channels(names, spec.mixer) if isinstance(names, ShortConvSpec) else _by_heads(names, spec.mixer)
    return {name.checkpoint: cut for name, cut in result.items()}


def _by_outputs(names: tuple[Name, ...], units: tuple[int, ...]) -> dict[Name, Cut]:
    if len(names) == 1:
        return {names[0]: Cut(0, units)}
    return {name: Cut(0, (count,)) for name, count in zip(names, units, strict=True)}


def _by_channels(names: ShortConvSpec, sizes: MixerSpec) -> dict[Name, Cut]:
    channels = (sizes.channels,)
    return {names.in_proj: Cut(0, channels * 3), names.conv: Cut(0, channels), names.out: Cut(1, channels)}


def _by_heads(names: Recurrence, sizes: MixerSpec) -> dict[Name, Cut]:
    """Values, gates and each head's own numbers by heads; keys and queries by groups. If heads alternate between
    groups, a rank has the heads of its groups."""
    turns = sizes.heads // sizes.groups if sizes.tiled else 1
    heads = (sizes.heads // turns,) * turns
    groups, keys, values, ones = (sizes.groups,) * 2, (sizes.key_dim,) * 2, (sizes.value_dim,) * turns, (1,) * turns
    whole, each = Cut(0, heads, values), Cut(0, heads, ones)
    result = {names.out: Cut(1, heads, values), names.decay: each, names.dt_bias: each}
    if names.skip is None:
        mixed = Cut(0, groups + heads, keys + values)
        result |= zip(names.in_proj, (mixed, whole, each, each), strict=True)
    else:
        mixed = Cut(0, heads + groups, values + keys)
        result |= {
            names.in_proj[0]: Cut(0, heads + mixed.units + heads, values + mixed.widths + ones),
            names.skip: each,
        }
        if sizes.groups > 1:
            result[names.norm] = whole
    return result | {names.conv: mixed}


def shard(weight: Rows, rows: torch.Tensor | None, columns: torch.Tensor | None) -> LazyRows:
    """Some rows and columns of a weight; a row -1 is zeros."""
    outputs = weight.shape[0] if rows is None else len(rows)
    inputs = weight.shape[1] if columns is None else len(columns)
    chosen: slice | torch.Tensor = slice(None)
    if columns is not None:
        contiguous = torch.equal(columns, torch.arange(len(columns)) + columns[0])
        chosen = slice(int(columns[0]), int(columns[-1]) + 1) if contiguous else columns

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
    return LazyRows(shape, make, shape.numel() * weight.dtype.itemsize, weight.dtype, weight.device)


class SplitWeights(ChangedWeights):
    """A rank's shards of ``weights``. Raises ConfigError for weights in blocks, which are not split."""

    def __init__(self, weights: Weights, spec: Spec, rank: int, size: int) -> None:
        super().__init__(weights, {})
        self.rank, self.size = rank, size
        self.cuts: Mapping[str, Cut] = cuts(spec)
        self.layers = f"{spec.architecture.layers.checkpoint}."
        self.by_token = {spec.architecture.embedding.checkpoint, spec.architecture.head.checkpoint}

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
        if stem in self.by_token:
            return shard(result, vocabulary(result.shape[0], self.rank, self.size), None)
        cut = self._cut(name)
        if cut is None or (kind == "bias" and cut.axis == 1):
            return result
        indices = cut.indices(result.shape[cut.axis], self.rank, self.size)
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

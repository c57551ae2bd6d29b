"""Each rank's shard of every weight, derived from an architecture's description.

Queries, keys, values, gate and up are split by outputs (heads, neurons), the projections after them by inputs; experts
one by one; embedding and output layer by tokens; recurrent layers by heads, or by channels if they have none. Every
rank has all norms and routers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from forerun.core.errors import ConfigError
from forerun.models.architectures.description import Recurrence
from forerun.models.architectures.shapes import Units, tensors
from forerun.models.architectures.spec import MixerSpec, Spec
from forerun.models.formats.base import LazyRows, Rows
from forerun.models.weights.layout import as_blocks
from forerun.models.weights.transform import ChangedWeights, Weights


def check(spec: Spec, config: Any, size: int) -> None:
    """Raise ConfigError unless ``size`` ranks can have equal shards."""
    if spec.uneven or spec.latent is not None:
        raise ConfigError(
            f"tensor parallelism does not support the layers of {spec.architecture.causal}: remove tensor_parallel_size"
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


def indices(axis: tuple[Units, ...], rank: int, size: int) -> torch.Tensor:
    """The rank's rows or columns along an axis: its share of every section's units."""
    first, result = 0, []
    for units, width in axis:
        begin, count = rank * units // size, max(1, units // size)
        result.append(torch.arange(first + begin * width, first + (begin + count) * width))
        first += units * width
    return torch.cat(result)


def vocabulary(tokens: int, rank: int, size: int) -> torch.Tensor:
    """The rank's tokens. Every rank has equally many: those after the last token are -1."""
    each = -(-tokens // size)
    indices = torch.arange(rank * each, (rank + 1) * each)
    return indices.where(indices < tokens, -1)


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
    """A rank's shards of ``weights``. With ``refuses_blocks``, raises ConfigError for a weight in blocks, which is not
    split; without, blocks are read as numbers."""

    refuses_blocks = False

    def __init__(self, weights: Weights, spec: Spec, config: Any, rank: int, size: int) -> None:
        super().__init__(weights, {})
        self.rank, self.size = rank, size
        self.axes = tensors(spec, config)
        self.by_token = {f"{name.checkpoint}.weight" for name in (spec.architecture.embedding, spec.architecture.head)}

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes // self.size

    def __contains__(self, name: str) -> bool:
        weight = self.axes.get(f"{name.removesuffix('.bias')}.weight", ())
        summed = len(weight) == 2 and not isinstance(weight[1], int)
        return name in self.weights and not (name.endswith(".bias") and summed and self.rank)  # it is added once

    def values(self, name: str) -> Rows:
        result = self.weights.values(name)
        if self.refuses_blocks and as_blocks(result) is not None:
            raise ConfigError(
                f"tensor_parallel_size splits weights that are numbers, and {name} is in blocks: "
                "quantization='bfloat16' (or float32) reads it as numbers"
            )
        if name in self.by_token:
            return shard(result, vocabulary(result.shape[0], self.rank, self.size), None)
        rows, *columns = (
            None if isinstance(axis, int) else indices(axis, self.rank, self.size) for axis in self.axes[name]
        )
        if len(columns) == 1:
            return result if rows is None and columns[0] is None else shard(result, rows, columns[0])
        return result if rows is None else result[rows]

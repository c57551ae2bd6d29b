"""Stage two of loading, transform: an open file's tensors become weights under the names of transformers' checkpoints.

GGUF names and row orders become a checkpoint's; stacks of experts and projections of all heads are split; quantized
weights stay in blocks or become numbers; LoRA adapters are merged. A tensor is read when it is asked for, so that a
load needs the memory that stays and one tensor more. ``prequantized.py`` reads AWQ, GPTQ, FP8 and others,
``architectures/families.py`` has the names, ``lora.py`` reads adapters.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from forerun.core.config import Within
from forerun.core.errors import ModelError, shown
from forerun.models.architectures.description import SUFFIXES, Architecture, Recurrence
from forerun.models.architectures.gguf_config import FREQUENCIES
from forerun.models.architectures.shapes import Shape, shapes, unread
from forerun.models.architectures.spec import TILED_HEADS, Spec, bind
from forerun.models.files import checkpoint
from forerun.models.files.checkpoint import Safetensors
from forerun.models.files.gguf import GGUFFile, GGUFTensor
from forerun.models.files.open import Files
from forerun.models.formats.base import LazyRows, Rows
from forerun.models.formats.blocks import Blocks
from forerun.models.formats.gguf_types import FLOATS, TYPES
from forerun.models.weights import lora, sanity
from forerun.models.weights.prequantized import Grouped, gather

log = logging.getLogger("forerun")
BASE = "model."
"""The prefix of a decoder's tensors; a checkpoint that was saved without an output layer leaves it out."""
MTP = "mtp."
"""The prefix of layers for multi-token prediction."""
GGUF_SENSES = ("v.", "mm.", "a.")
"""Prefixes in a GGUF file of the parts that read pictures and sound."""


class Weights(Protocol):
    """Tensors by name."""

    def __contains__(self, name: str) -> bool: ...

    def values(self, name: str) -> Rows:
        """A tensor: a vector is a torch tensor, a matrix may be in blocks."""

    def release(self) -> None:
        """Give memory of tensors back that a finished layer has read."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in their files."""


def transform(files: Files, config: Any, *, adapters: Sequence[lora.Adapter] = ()) -> Weights:
    """The weights in ``files`` for a described decoder, adapters merged, scaled as configured. Raises ModelError."""
    if adapters and getattr(config, TILED_HEADS, False):
        raise ModelError(
            f"{files.path} orders its heads as GGUF does: merge an adapter into the checkpoint it was made of"
        )
    weights: Weights
    if isinstance(files, Safetensors):
        weights = CheckpointWeights(files, config)
    else:
        weights = GGUFWeights(files, config)
    weights = with_adapters(weights, adapters, config, str(files.path)) if adapters else weights
    return scaled(weights, bind(config))


class TensorWeights:
    """Weights that are in memory, or mapped."""

    def __init__(self, tensors: Mapping[str, Rows]) -> None:
        self.tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def values(self, name: str) -> Rows:
        return self.tensors[name]

    def release(self) -> None:
        """There is no source."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class CheckpointWeights(TensorWeights):
    """The weights in a checkpoint's safetensors files. Raises ModelError for a tensor that is missing, has another
    shape or no floating-point numbers, or belongs to a part that the config leaves out."""

    def __init__(
        self, files: Safetensors, config: Any, spec: Spec | None = None, names: Mapping[str, str] | None = None
    ) -> None:
        """``spec``: a drafter's, whose weights are among others: ``names`` has theirs by those in the files. None: the
        model's."""
        self.files, folder, scheme = files, files.path, getattr(config, "quantization_config", None)
        if spec is None:
            sanity.check_fit(config, files.tensors, folder / checkpoint.CONFIG)
            spec = bind(config)
        listed = _names(files, spec.architecture) if names is None else names
        views = {
            own: files.values(name) for name, own in listed.items() if files.tensors[name].kind in checkpoint.DTYPES
        }
        views = unstacked(views, spec)
        tensors: dict[str, Rows] = {**views} if scheme is None else gather(views, scheme, str(folder))
        self.grouped = [tensor for tensor in tensors.values() if isinstance(tensor, Grouped)]
        _split_kv_b(tensors, spec, folder)
        self.tensors = tensors
        _check(folder, tensors, config, spec)
        if names is not None:
            extra = sorted(tensors.keys() - shapes(config, spec).keys())
            sanity.check_names(folder, (), extra, extra, config)

    def release(self) -> None:
        for tensor in self.grouped:
            tensor.close()
        self.files.release()


def _names(files: Safetensors, architecture: Architecture) -> dict[str, str]:
    """A model's names of its tensors by those in the files."""
    if any(name.startswith(architecture.skipped) and not name.startswith(MTP) for name in files.tensors):
        log.info("%s also reads pictures: that part is left out", files.path)
    kept = (name for name in files.tensors if not name.startswith(architecture.skipped))
    return {name: _full_name(name, architecture.prefixes) for name in kept}


def _full_name(name: str, prefixes: Iterable[str]) -> str:
    prefix = next((f"{each}." for each in prefixes if name.startswith(f"{each}.")), "")
    name = name.removeprefix(prefix)
    return name if name.startswith((BASE, "lm_head.")) else f"{BASE}{name}"


def _check(folder: Path, tensors: Mapping[str, Rows], config: Any, spec: Spec) -> None:
    requested = shapes(config, spec)
    for name in sorted(requested.keys() & tensors.keys()):
        tensor = tensors[name]
        if (tuple(tensor.shape) or (1,)) != requested[name]:  # a single number may have no dimension
            raise ModelError(f"{folder}: {name} has shape {[*tensor.shape]}; its config asks for {[*requested[name]]}")
        if not tensor.dtype.is_floating_point:
            raise ModelError(f"{folder}: {name} holds {tensor.dtype} numbers")
    extra = tensors.keys() - requested.keys() - unread(spec)
    sanity.check_names(folder, sorted(requested.keys() - tensors.keys()), extra, requested, config)


def unstacked(tensors: dict[str, torch.Tensor], spec: Spec) -> dict[str, torch.Tensor]:
    """``tensors`` with stacks of a layer's experts split, in place. Raises ModelError for a stack of another shape."""
    names = spec.architecture.experts
    for index, layer in enumerate(spec.layers):
        prefix = f"{spec.architecture.layers.checkpoint}.{index}."
        if names is not None and names.interleaved and layer.experts:
            _unstack_interleaved(tensors, f"{prefix}mlp.experts", layer.experts)
            continue
        if names is None or not layer.experts or any(f"{prefix}{stack}" not in tensors for stack in names.stacks):
            continue
        gate_up, down = (tensors.pop(f"{prefix}{stack}") for stack in names.stacks)
        if (gate := tensors.pop(f"{prefix}mlp.gate.weight", None)) is not None:
            tensors[f"{prefix}{names.router.checkpoint}.weight"] = gate
        for expert, (both, last) in enumerate(zip(gate_up.detach(), down.detach())):
            for name, part in zip((*names.gate_up, names.down), (*both.chunk(len(names.gate_up)), last)):
                tensors[f"{prefix}{name.checkpoint.format(expert)}.weight"] = part
    return tensors


def _unstack_interleaved(tensors: dict[str, torch.Tensor], prefix: str, count: int) -> None:
    """Split the stacks of a layer's experts, in which gate and up outputs alternate (gpt-oss)."""
    ends = {"_bias": ("bias", 2), "": ("weight", 3), "_blocks": ("mxfp4_blocks", 4), "_scales": ("mxfp4_scales", 3)}
    for (end, (kind, dims)), part in product(ends.items(), ("gate_up_proj", "down_proj")):
        stack = tensors.pop(f"{prefix}.{part}{end}", None)
        if stack is None:
            continue
        if stack.dim() != dims or len(stack) != count:
            raise ModelError(f"{prefix}.{part}{end} has shape {[*stack.shape]}, where {count} experts are stacked")
        for expert, own in enumerate(stack.detach()):
            rows = own.T if kind == "weight" else own  # outputs first
            parts = {part: rows} if part == "down_proj" else {"gate_proj": rows[::2], "up_proj": rows[1::2]}
            tensors |= {f"{prefix}.{expert}.{name}.{kind}": rows for name, rows in parts.items()}


def _split_kv_b(tensors: dict[str, Rows], spec: Spec, folder: Path) -> None:
    """Split each layer's ``kv_b`` of latent attention into ``k_b`` and ``v_b`` of every head, in place."""
    names, sizes = spec.architecture.latent, spec.latent
    if names is None or sizes is None:
        return
    width = sizes.nope_dim + sizes.value_dim
    for index in range(len(spec.layers)):
        prefix = f"{spec.architecture.layers.checkpoint}.{index}."
        weight = tensors.pop(f"{prefix}{names.kv_b}", None)
        if weight is None:
            raise ModelError(f"{folder}: {prefix}{names.kv_b} is missing")
        if tuple(weight.shape) != (spec.heads * width, sizes.rank):
            raise ModelError(f"{folder}: {prefix}{names.kv_b} has shape {[*weight.shape]}; its config asks for "
                             f"{[spec.heads * width, sizes.rank]}")  # fmt: skip
        for head in range(spec.heads):
            first, middle, last = head * width, head * width + sizes.nope_dim, (head + 1) * width
            for name, rows in ((names.k_b, slice(first, middle)), (names.v_b, slice(middle, last))):
                part = _some_rows(weight, rows, transposed=name is names.k_b)
                tensors[f"{prefix}{name.checkpoint.format(head)}.weight"] = part


def _some_rows(weight: Rows, rows: slice, *, transposed: bool) -> LazyRows:
    def make(which: slice | torch.Tensor) -> torch.Tensor:
        part = weight[rows]
        return (part.T if transposed else part)[which]

    count, inputs = rows.stop - rows.start, weight.shape[1]
    shape = torch.Size((inputs, count) if transposed else (count, inputs))
    return LazyRows(shape, make, count * inputs * weight.dtype.itemsize, weight.dtype, weight.device)


def deinterleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection with rotated pairs half a head apart, where they were side by side."""
    return weight.reshape(heads, weight.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


class GGUFPart(NamedTuple):
    """A checkpoint's tensor in a GGUF file: a whole tensor of the file, an entry of a stack, or two tensors."""

    tensor: GGUFTensor
    shape: tuple[int, ...]
    entry: int = 0
    """Its number in a stack."""
    second: GGUFTensor | None = None
    """Holds the later rows."""

    def reshaped(self, shape: tuple[int, ...]) -> GGUFPart:
        """The same in ``shape``, if that differs by dimensions of 1 only or is a vector."""
        own, other = ([size for size in each if size != 1] for each in (self.shape, shape))
        vector = len(shape) == 1 and math.prod(self.shape) == math.prod(shape)
        return self._replace(shape=shape) if own == other or vector else self

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes * math.prod(self.shape) // self.tensor.numel


class GGUFWeights:
    """The weights in a GGUF file as a checkpoint has them: its names, its order of query and key rows, and norms
    without their offset. Raises ModelError for a missing or unknown tensor, or one of another shape or unknown type."""

    def __init__(self, file: GGUFFile, config: Any, spec: Spec | None = None) -> None:
        """``spec``: a drafter's, whose weights are the file's; None: the model's."""
        self.file = file
        spec = spec or bind(config)
        architecture = spec.architecture
        kv_heads = config.num_key_value_heads or config.num_attention_heads
        heads = {"q_proj": config.num_attention_heads, "k_proj": kv_heads}
        self.heads = heads if architecture.gguf_interleaved else {}
        mixer = architecture.mixer
        self.decay = mixer.decay.checkpoint if isinstance(mixer, Recurrence) else None
        self.offset = architecture.norms.offset
        self.norms = {name.checkpoint for name in architecture.outer_norms()}
        self.prefix = f"{architecture.layers.checkpoint}."
        self.nbytes = sum(tensor.nbytes for tensor in file.tensors.values())
        requested = shapes(config, spec)
        self.parts = self._parts(spec, config, requested)
        self.lists = _activation_params(file, architecture, config.num_hidden_layers)
        sanity.check_names(file.path, [name for name in requested if name not in self], (), (), config)

    def _parts(self, spec: Spec, config: Any, requested: Mapping[str, Shape]) -> dict[str, GGUFPart]:
        file, ignored, architecture = self.file, unread(spec), spec.architecture
        result: dict[str, GGUFPart] = {}
        layers, more = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 0
        mtp = (MTP, *(f"{architecture.layers.gguf}.{index}." for index in range(layers, layers + more)))
        if any(name.startswith(GGUF_SENSES) for name in file.tensors):
            log.info("%s also reads pictures or sound: that part is left out", file.path)
        for name, tensor in file.tensors.items():
            if name == FREQUENCIES or name.startswith((*mtp, *GGUF_SENSES)):
                continue  # the config has the frequencies; the drafter mtp reads its layers
            names, pair = architecture.checkpoint_names(name), architecture.gguf_pair(name)
            if not names:
                raise ModelError(f"{file.path} has a tensor {name}, which {architecture.causal} does not have")
            if pair is not None and name == pair[1]:
                continue  # read with the first
            for own, part in _split(names, tensor, None if pair is None else _second(file, *pair)):
                if own in ignored:
                    continue
                if own not in requested:
                    raise ModelError(f"{file.path} has a tensor {name}, which its metadata leave out")
                part = part.reshaped(requested[own])
                if part.shape != requested[own]:
                    asked = [*tensor.shape[: len(tensor.shape) - len(part.shape)], *requested[own]]
                    raise ModelError(f"{file.path}: {name} has shape {list(tensor.shape)}, which its metadata "
                                     f"contradict: they ask for {asked}")  # fmt: skip
                result[own] = part
            if tensor.kind.name not in TYPES:
                raise ModelError(f"{file.path}: {name} is of type {tensor.kind.name}; {', '.join(TYPES)} are read")
        return result

    def __contains__(self, name: str) -> bool:
        return name in self.parts or name in self.lists

    def values(self, name: str) -> Rows:
        if name in self.lists:
            return self.lists[name]
        part = self.parts[name]
        if len(part.shape) == 2:
            return self._matrix(name)
        result = self.file.values(part.tensor.name)
        if part.nbytes != part.tensor.nbytes:  # an entry of a stack
            result = result[part.entry]
        result = result.view(part.shape)
        inside = name.split(".", 3)[-1] if name.startswith(self.prefix) else name.removesuffix(".weight")
        if name.endswith(".bias"):
            order = self._order(name)
            result = result if order is None else result[order]
        elif inside == self.decay:  # a checkpoint has the logarithm, without the sign
            if not bool((result < 0).all()):
                raise ModelError(f"{self.file.path}: {part.tensor.name} holds numbers that are not negative")
            result = torch.log(-result)
        elif self.offset and inside.removesuffix(".weight") in self.norms:
            result = result - self.offset
        return result.to(FLOATS.get(part.tensor.kind.name, torch.float32))

    def release(self) -> None:
        self.file.release()

    def _matrix(self, name: str) -> Blocks:
        part, order = self.parts[name], self._order(name)
        first = part.entry * part.shape[0]
        raw = self.file.rows(part.tensor.name)[first : first + part.shape[0]]
        if part.second is not None:
            raw = np.concatenate([raw, self.file.rows(part.second.name)])
        result = Blocks(part.tensor.kind.name.lower(), raw, part.shape[1])
        return result if order is None else result.rows(order)

    def _order(self, name: str) -> torch.Tensor | None:
        """A checkpoint's order of the rows, if the file has another."""
        heads = self.heads.get(name.split(".")[-2])
        if heads is None:
            return None
        return deinterleaved(torch.arange(self.parts[name].shape[0])[:, None], heads)[:, 0]


def _activation_params(file: GGUFFile, architecture: Architecture, layers: int) -> dict[str, torch.Tensor]:
    """Parameters of activations, which are lists in GGUF metadata, by a checkpoint's names."""
    result: dict[str, torch.Tensor] = {}
    for name in architecture.mlp.activation_params:
        values = file.metadata.get(name.gguf)
        if not isinstance(values, list) or len(values) != layers or not all(map(Within().permits, values)):
            raise ModelError(
                f"{file.path} has {shown(values)} as {name.gguf}, not a number for each of {layers} layers"
            )
        for index, value in enumerate(values):
            result[f"{architecture.layers.checkpoint}.{index}.{name.checkpoint}"] = torch.tensor([float(value)])
    return result


def _second(file: GGUFFile, first: str, second: str) -> GGUFTensor:
    one, two = file.tensors[first], file.tensors.get(second)
    if two is None or (two.shape, two.kind) != (one.shape, one.kind):
        raise ModelError(f"{file.path} has no {second} of the shape and type of {first}, {one.kind.name}")
    return two


def _split(names: tuple[str, ...], tensor: GGUFTensor, second: GGUFTensor | None) -> Iterator[tuple[str, GGUFPart]]:
    """The parts of a GGUF tensor by a checkpoint's names: of a stack, every expert's entries."""
    if second is not None:
        yield names[0], GGUFPart(tensor, (2 * tensor.shape[0], *tensor.shape[1:]), second=second)
        return
    if "{}" not in names[0]:
        yield names[0], GGUFPart(tensor, tensor.shape)
        return
    rows, *inputs = tensor.shape[1:] or (0,)
    for index in range(len(names) * tensor.shape[0]):
        expert, which = divmod(index, len(names))
        yield names[which].format(expert), GGUFPart(tensor, (rows // len(names), *inputs), index)


class ChangedWeights:
    """``weights`` of which some are changed, by name; those are numbers then. ``others`` are there instead."""

    def __init__(
        self, weights: Weights, changes: Mapping[str, Callable[[Rows], Rows]], others: Mapping[str, Rows] | None = None
    ) -> None:
        self.weights, self.changes, self.others = weights, changes, others or {}

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes

    def __contains__(self, name: str) -> bool:
        return name in self.others or name in self.weights

    def values(self, name: str) -> Rows:
        result, change = self.others.get(name), self.changes.get(name)
        result = self.weights.values(name) if result is None else result
        return result if change is None else change(result)

    def release(self) -> None:
        self.weights.release()


def scaled(weights: Weights, spec: Spec) -> Weights:
    """``weights`` with ``spec.projection_scales`` applied."""
    changes = {
        f"{spec.architecture.layers.checkpoint}.{index}.{name}.{suffix}": partial(
            _scaled, factors=getattr(scale, suffix), rows=scale.rows
        )
        for (name, scale), index, suffix in product(spec.projection_scales, range(len(spec.layers)), SUFFIXES)
    }
    return ChangedWeights(weights, changes) if changes else weights


def _scaled(weight: Rows, factors: Sequence[float], rows: Sequence[int]) -> Rows:
    """A weight or bias times a factor for each part of this many ``rows``; a single factor is for all rows."""
    counts = torch.tensor(rows if len(rows) > 1 else weight.shape[:1])
    by_row = torch.tensor(factors, dtype=torch.float32).repeat_interleave(counts)
    if len(weight.shape) == 1:
        return weight[:].float() * by_row
    return LazyRows(
        weight.shape, lambda which: weight[which].float() * by_row[which, None], weight.nbytes, device=weight.device
    )


def with_adapters(weights: Weights, adapters: Sequence[lora.Adapter], config: Any, model: str) -> Weights:
    """``weights`` with adapters merged; ``config`` gets as many tokens. Raises ModelError for another model's."""
    architecture = bind(config).architecture
    embedding, head = (f"{each.checkpoint}.weight" for each in (architecture.embedding, architecture.head))
    others: dict[str, Rows] = {}
    for adapter in adapters:
        for name, tensor in adapter.whole.items():
            shape: Sequence[int] | None = weights.values(name).shape if name in weights else None
            shape = [len(tensor), config.hidden_size] if name in (embedding, head) else shape
            lora.check_fit(adapter, name, tensor.shape, shape, model)
            others[name] = tensor
    config.vocab_size = lora.vocabulary(adapters, (embedding, head), config.vocab_size)
    if embedding in others and head not in others and head not in weights:  # it was tied to the old embedding
        others[head] = weights.values(embedding)[:]
    weights = ChangedWeights(weights, {}, others)
    pairs: dict[str, list[tuple[float, lora.Pair]]] = {}
    for adapter in adapters:
        for layer, pair in adapter.pairs.items():
            name = f"{layer}.weight"
            lora.check_fit(adapter, layer, pair.shape, weights.values(name).shape if name in weights else None, model)
            pairs.setdefault(name, []).append((adapter.weight, pair))
    return ChangedWeights(weights, {name: partial(_merged, pairs=each) for name, each in pairs.items()})


def _merged(weight: Rows, pairs: Sequence[tuple[float, lora.Pair]]) -> Rows:
    """A weight with adapters merged in float32."""

    def make(rows: slice | torch.Tensor) -> torch.Tensor:
        result = weight[rows].to(torch.float32, copy=True)
        for factor, pair in pairs:
            result = pair.merge(result, rows, factor)
        return result

    return LazyRows(weight.shape, make, weight.nbytes, device=weight.device)

"""Stage two, transform: an open file's tensors become a decoder's weights, as transformers' checkpoints have them.

Names and the order of rows become a checkpoint's, stacks of experts and projections of all heads are taken apart,
quantized weights stay in blocks or become numbers, and LoRA adapters are merged. Nothing is read before it is asked
for, so that a load takes the memory that stays and one tensor more. Tables of formats: ``prequantized.py`` (AWQ, GPTQ,
FP8 and others), ``architectures/families.py`` (names), ``lora.py`` (adapters).
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
from forerun.models import checkpoint, lora, sanity
from forerun.models.architectures.description import KINDS, Architecture
from forerun.models.architectures.families import ARCHITECTURES
from forerun.models.architectures.shapes import Shape, shapes, unread
from forerun.models.architectures.spec import TILED_HEADS, Spec, bind
from forerun.models.checkpoint import Safetensors
from forerun.models.formats.base import MadeRows, Rows
from forerun.models.formats.blocks import Blocks
from forerun.models.formats.gguf_types import FLOATS, PACKED, TYPES, described
from forerun.models.formats.int8 import Levels
from forerun.models.gguf import GGUFFile, GGUFTensor
from forerun.models.gguf_config import FREQUENCIES
from forerun.models.open import Files
from forerun.models.prequantized import Grouped, gather

log = logging.getLogger("forerun")
BASE = "model."
"""What the names of a decoder's tensors begin with, but in a checkpoint that was saved without an output layer."""
PREDICTING = "mtp."
"""As those of layers for multi-token prediction."""


class Weights(Protocol):
    """Tensors by name."""

    def __contains__(self, name: str) -> bool: ...

    def values(self, name: str) -> Rows:
        """Numbers; a vector is a tensor."""

    def blocks(self, name: str) -> Blocks | Levels | None:
        """None where a tensor is numbers."""

    def release(self) -> int:
        """A layer has been made of what was asked for: memory that it took may be given back. Returns the bytes read
        since the last call."""

    @property
    def nbytes(self) -> int:
        """Of all of them, as they lie in files."""


def transform(files: Files, config: Any, *, numbers: bool = False, adapters: Sequence[lora.Adapter] = ()) -> Weights:
    """The weights in ``files`` for a decoder of ``config``, which a description covers: all of them as ``numbers``, or
    in blocks where files have such; with ``adapters`` merged, and multiplied as the config says. Raises ModelError."""
    if adapters and getattr(config, TILED_HEADS, False):
        raise ModelError(
            f"{files.path} orders its heads as GGUF does: merge an adapter into the checkpoint it was made of"
        )
    weights: Weights
    if isinstance(files, Safetensors):
        weights = CheckpointWeights(files, config, numbers=numbers)
    else:
        weights = GGUFWeights(files, config, numbers=numbers)
    weights = merged(weights, adapters, str(files.path)) if adapters else weights
    return multiplied(weights, bind(config))


class FileWeights:
    """Weights of open ``files``, as ``numbers`` only where that is asked for. The bytes that are read are counted."""

    def __init__(self, files: Files, *, numbers: bool) -> None:
        self.files, self.numbers = files, numbers
        self._asked: set[str] = set()
        self._bytes = 0

    def _count(self, name: str, nbytes: int) -> None:
        """A tensor is asked for: its bytes count once."""
        if name not in self._asked:
            self._asked.add(name)
            self._bytes += nbytes

    def release(self) -> int:
        self.files.release()
        result, self._bytes = self._bytes, 0
        return result


class CheckpointWeights(FileWeights):
    """The weights of a folder's files for a decoder of ``config``, which a description covers.

    Raises ModelError for a tensor that is missing, has another shape or no floating-point numbers, or belongs to a part
    that the config leaves out.
    """

    def __init__(self, files: Safetensors, config: Any, *, numbers: bool = False) -> None:
        super().__init__(files, numbers=numbers)
        folder, scheme = files.path, getattr(config, "quantization_config", None)
        sanity.check_fit(config, files.tensors, folder / checkpoint.CONFIG)
        spec = bind(config)
        within, beside = spec.architecture.within, spec.architecture.beside
        if any(name.startswith(beside) and not name.startswith(PREDICTING) for name in files.tensors):
            log.info("%s also reads pictures: that part is left out", folder)
        views = {
            _full(name, within): files.values(name)
            for name, tensor in files.tensors.items()
            if tensor.kind in checkpoint.DTYPES and not name.startswith(beside)
        }
        views = unstacked(views, spec)
        self.found: dict[str, Rows] = {**views} if scheme is None else gather(views, scheme, str(folder))
        self.grouped = [part for part in self.found.values() if isinstance(part, Grouped)]
        by_heads(self.found, spec, folder)
        self.nbytes = sum(part.nbytes for part in self.found.values())
        _check(folder, self.found, shapes(config), config)

    def __contains__(self, name: str) -> bool:
        return name in self.found

    def values(self, name: str) -> Rows:
        result = self.found[name]
        self._count(name, result.nbytes)
        return result

    def blocks(self, name: str) -> Blocks | Levels | None:
        result = self.values(name)
        if self.numbers:
            return None
        if isinstance(result, Blocks):
            return result
        return result.blocks() if isinstance(result, Grouped) else None

    def release(self) -> int:
        for part in self.grouped:
            part.close()
        return super().release()


def _full(name: str, within: Iterable[str]) -> str:
    prefix = next((f"{each}." for each in within if name.startswith(f"{each}.")), "")
    name = name.removeprefix(prefix)
    return name if name.startswith((BASE, "lm_head.")) else f"{BASE}{name}"


def _check(folder: Path, result: Mapping[str, Rows], requested: Mapping[str, Shape], config: Any) -> None:
    for name in sorted(requested.keys() & result.keys()):
        if (tuple(result[name].shape) or (1,)) != requested[name]:  # one number may be of no dimension
            shapes = [*result[name].shape], [*requested[name]]
            raise ModelError(f"{folder}: {name} has shape {shapes[0]}; its config asks for {shapes[1]}")
        if not result[name].dtype.is_floating_point:
            raise ModelError(f"{folder}: {name} holds {result[name].dtype} numbers")
    extra = result.keys() - requested.keys() - unread(config)
    sanity.check_held(folder, sorted(requested.keys() - result.keys()), extra, requested, config)


def unstacked(result: dict[str, torch.Tensor], spec: Spec) -> dict[str, torch.Tensor]:
    """Tensors under a checkpoint's names, where a module of transformers' stacks the experts of a layer."""
    names = spec.architecture.experts
    for index, layer in enumerate(spec.layers):
        at = f"{spec.architecture.layers.checkpoint}.{index}."
        if names is not None and names.interleaved and layer.experts:
            _unstack(result, f"{at}mlp.experts", layer.experts)
            continue
        if names is None or not layer.experts or any(f"{at}{stack}" not in result for stack in names.stacks):
            continue
        gate_up, down = (result.pop(f"{at}{stack}") for stack in names.stacks)
        if (gate := result.pop(f"{at}mlp.gate.weight", None)) is not None:
            result[f"{at}{names.router.checkpoint}.weight"] = gate
        for expert, (both, last) in enumerate(zip(gate_up.detach(), down.detach())):
            for name, part in zip((*names.gate_up, names.down), (*both.chunk(len(names.gate_up)), last)):
                result[f"{at}{name.checkpoint.format(expert)}.weight"] = part
    return result


def _unstack(result: dict[str, torch.Tensor], at: str, count: int) -> None:
    """Take the stacks of a layer's experts apart whose gate and up have outputs by turns. Raises ModelError."""
    ends = {"_bias": ("bias", 2), "": ("weight", 3), "_blocks": ("mxfp4_blocks", 4), "_scales": ("mxfp4_scales", 3)}
    for (end, (kind, dims)), part in product(ends.items(), ("gate_up_proj", "down_proj")):
        stack = result.pop(f"{at}.{part}{end}", None)
        if stack is None:
            continue
        if stack.dim() != dims or len(stack) != count:
            raise ModelError(f"{at}.{part}{end} has shape {[*stack.shape]}, where {count} experts are stacked")
        for expert, own in enumerate(stack.detach()):
            rows = own.T if kind == "weight" else own  # outputs first
            sides = {part: rows} if part == "down_proj" else {"gate_proj": rows[::2], "up_proj": rows[1::2]}
            result |= {f"{at}.{expert}.{name}.{kind}": side for name, side in sides.items()}


def by_heads(result: dict[str, Rows], spec: Spec, place: object) -> None:
    """Take the projections of latents apart, which checkpoints hold for all heads together. Raises ModelError for
    one of another shape; ``place`` begins it."""
    names, sizes = spec.architecture.latent, spec.latent
    if names is None or sizes is None:
        return
    each = sizes.plain + sizes.value
    for index in range(len(spec.layers)):
        at = f"{spec.architecture.layers.checkpoint}.{index}."
        weight = result.pop(f"{at}{names.both}", None)
        if weight is None:
            raise ModelError(f"{place}: {at}{names.both} is missing")
        if tuple(weight.shape) != (spec.heads * each, sizes.rank):
            raise ModelError(f"{place}: {at}{names.both} has shape {[*weight.shape]}; its config asks for "
                             f"{[spec.heads * each, sizes.rank]}")  # fmt: skip
        for head in range(spec.heads):
            first, second = head * each, head * each + sizes.plain
            keys = _of_head(weight, slice(first, second), transposed=True)
            result[f"{at}{names.keys.checkpoint.format(head)}.weight"] = keys
            values = _of_head(weight, slice(second, first + each), transposed=False)
            result[f"{at}{names.values.checkpoint.format(head)}.weight"] = values


def _of_head(weight: Rows, rows: slice, *, transposed: bool) -> MadeRows:
    """Some rows of a weight of all heads, perhaps transposed."""

    def make(which: slice | torch.Tensor) -> torch.Tensor:
        part = weight[rows]
        return (part.T if transposed else part)[which]

    count, inputs = rows.stop - rows.start, weight.shape[1]
    shape = torch.Size((inputs, count) if transposed else (count, inputs))
    return MadeRows(shape, make, count * inputs * weight.dtype.itemsize, weight.dtype, weight.device)


def rows_as_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection whose rotated pairs lie side by side, with the pairs half a head apart."""
    rows = weight.shape[0]
    return weight.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


class Held(NamedTuple):
    """What a checkpoint has as one tensor: a whole one of the file, or one expert of a stack."""

    tensor: GGUFTensor
    shape: tuple[int, ...]
    place: int = 0
    behind: GGUFTensor | None = None
    """Holds the later rows."""

    def like(self, shape: tuple[int, ...]) -> Held:
        """In ``shape``, where that differs by dimensions of one alone, or is that of a vector."""
        mine, other = ([size for size in each if size != 1] for each in (self.shape, shape))
        vector = len(shape) == 1 and math.prod(self.shape) == math.prod(shape)
        return self._replace(shape=shape) if mine == other or vector else self

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes * math.prod(self.shape) // self.tensor.numel


class GGUFWeights(FileWeights):
    """A model's weights as a checkpoint has them: by its names, with its order of the rows of queries and keys, and
    without what its norms add to their weights.

    Raises ModelError for a tensor that a model of this config does not have, that is missing, or that has another
    shape or a kind that is not served.
    """

    def __init__(self, file: GGUFFile, config: Any, *, numbers: bool = False) -> None:
        super().__init__(file, numbers=numbers)
        self.file = file
        self.untold = described(file.types()) if not numbers else ""
        architecture = ARCHITECTURES[config.model_type]
        shared = config.num_key_value_heads or config.num_attention_heads
        counts = {"q_proj": config.num_attention_heads, "k_proj": shared}
        self.heads = counts if architecture.interleaved else {}
        self.plus, self.decay = architecture.norms.plus, architecture.decay
        self.norms = {name.checkpoint for name in architecture.outer_norms()}
        self.prefix = f"{architecture.layers.checkpoint}."
        self.nbytes = sum(tensor.nbytes for tensor in file.tensors.values())
        self.tensors: dict[str, Held] = {}
        requested, ignored = shapes(config), unread(config)
        first, more = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 0
        predicting = tuple(f"{architecture.layers.gguf}.{index}." for index in range(first, first + more))
        for name, tensor in file.tensors.items():
            if name == FREQUENCIES or name.startswith(predicting):
                continue  # the config has what they say; the drafter mtp reads the others
            names = architecture.checkpoint_names(name)
            if not names:
                raise ModelError(f"{file.path} has a tensor {name}, which {architecture.causal} does not have")
            joined = architecture.joined(name)
            if joined is not None and name == joined[1]:
                continue  # read with the first
            behind = None if joined is None else _second(file, *joined)
            for own, held in _parts(names, tensor, behind):
                if own in ignored:
                    continue
                if own not in requested:
                    raise ModelError(f"{file.path} has a tensor {name}, which its metadata leave out")
                held = held.like(requested[own])
                if held.shape != requested[own]:
                    asked = [*tensor.shape[: len(tensor.shape) - len(held.shape)], *requested[own]]
                    raise ModelError(f"{file.path}: {name} has shape {list(tensor.shape)}, which its metadata "
                                     f"contradict: they ask for {asked}")  # fmt: skip
                self.tensors[own] = held
            if tensor.kind.name not in TYPES:
                raise ModelError(f"{file.path}: {name} is of type {tensor.kind.name}; {', '.join(TYPES)} are read")
        self.listed = _listed(file, architecture, config.num_hidden_layers)
        missing = [name for name in requested if name not in self]
        sanity.check_held(file.path, missing, (), (), config)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors or name in self.listed

    def values(self, name: str) -> Rows:
        if name in self.listed:
            return self.listed[name]
        held = self.tensors[name]
        self._count(name, held.nbytes)
        if len(held.shape) == 2:
            return self._matrix(name)
        result = self.file.values(held.tensor.name)
        if held.nbytes != held.tensor.nbytes:  # one expert's of a stack
            result = result[held.place]
        result = result.view(held.shape)
        part = name.split(".", 3)[-1] if name.startswith(self.prefix) else name.removesuffix(".weight")
        if name.endswith(".bias"):
            order = self._order(name)
            result = result if order is None else result[order]
        elif part == self.decay:
            result = self._log(name, result)
        elif self.plus and part.removesuffix(".weight") in self.norms:
            result = result - self.plus
        return result.to(FLOATS.get(held.tensor.kind.name, torch.float32))

    def _log(self, name: str, decay: torch.Tensor) -> torch.Tensor:
        """What a checkpoint has of a recurrence's decay: its logarithm, without the sign."""
        if not bool((decay < 0).all()):
            raise ModelError(f"{self.file.path}: {self.tensors[name].tensor.name} holds numbers that are not negative")
        return torch.log(-decay)

    def blocks(self, name: str) -> Blocks | None:
        self._count(name, self.tensors[name].nbytes)
        if self.untold:
            log.warning("%s holds types that take more room in memory: %s", self.file.path, self.untold)
            self.untold = ""
        result = self._matrix(name)
        return None if self.numbers or result.kind not in PACKED else result

    def _matrix(self, name: str) -> Blocks:
        held, order = self.tensors[name], self._order(name)
        first = held.place * held.shape[0]
        raw = self.file.rows(held.tensor.name)[first : first + held.shape[0]]
        if held.behind is not None:
            raw = np.concatenate([raw, self.file.rows(held.behind.name)])
        result = Blocks(held.tensor.kind.name.lower(), raw, held.shape[1])
        return result if order is None else result.rows(order)

    def _order(self, name: str) -> torch.Tensor | None:
        """Of the rows, where the file has another."""
        heads = self.heads.get(name.split(".")[-2])
        return (
            None if heads is None else rows_as_halves(torch.arange(self.tensors[name].shape[0])[:, None], heads)[:, 0]
        )


def _listed(file: GGUFFile, architecture: Architecture, layers: int) -> dict[str, torch.Tensor]:
    """Numbers of activations, which are lists in the metadata, by their names in a checkpoint. Raises ModelError."""
    result: dict[str, torch.Tensor] = {}
    for name in architecture.mlp.numbers:
        values = file.metadata.get(name.gguf)
        if not isinstance(values, list) or len(values) != layers or not all(map(Within().permits, values)):
            raise ModelError(
                f"{file.path} has {shown(values)} as {name.gguf}, not a number for each of {layers} layers"
            )
        for index, value in enumerate(values):
            result[f"{architecture.layers.checkpoint}.{index}.{name.checkpoint}"] = torch.tensor([float(value)])
    return result


def _second(file: GGUFFile, first: str, second: str) -> GGUFTensor:
    """The tensor whose rows come behind another's. Raises ModelError unless it is like that one."""
    one, two = file.tensors[first], file.tensors.get(second)
    if two is None or (two.shape, two.kind) != (one.shape, one.kind):
        raise ModelError(f"{file.path} has no {second} of the shape and type of {first}, {one.kind.name}")
    return two


def _parts(names: tuple[str, ...], tensor: GGUFTensor, behind: GGUFTensor | None) -> Iterator[tuple[str, Held]]:
    """By their names in a checkpoint: of a stack, those of every expert, whose rows follow one another."""
    if behind is not None:
        yield names[0], Held(tensor, (2 * tensor.shape[0], *tensor.shape[1:]), behind=behind)
        return
    if "{}" not in names[0]:
        yield names[0], Held(tensor, tensor.shape)
        return
    rows, *inputs = tensor.shape[1:] or (0,)
    for place in range(len(names) * tensor.shape[0]):
        expert, which = divmod(place, len(names))
        yield names[which].format(expert), Held(tensor, (rows // len(names), *inputs), place)


class ChangedWeights:
    """``weights``, some of them changed, by their names: to numbers, whatever they are held in."""

    def __init__(self, weights: Weights, changes: Mapping[str, Callable[[Rows], Rows]]) -> None:
        self.weights, self.changes = weights, changes

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes

    def __contains__(self, name: str) -> bool:
        return name in self.weights

    def values(self, name: str) -> Rows:
        result, change = self.weights.values(name), self.changes.get(name)
        return result if change is None else change(result)

    def blocks(self, name: str) -> Blocks | Levels | None:
        return None if name in self.changes else self.weights.blocks(name)

    def release(self) -> int:
        return self.weights.release()


def multiplied(weights: Weights, spec: Spec) -> Weights:
    """``weights`` with the projections multiplied as ``spec`` says."""
    changes = {
        f"{spec.architecture.layers.checkpoint}.{index}.{part}.{kind}": partial(
            _times, by=getattr(by, kind), rows=by.rows
        )
        for (part, by), index, kind in product(spec.multiples, range(len(spec.layers)), KINDS)
    }
    return ChangedWeights(weights, changes) if changes else weights


def _times(weight: Rows, by: Sequence[float], rows: Sequence[int]) -> Rows:
    """A weight or bias, each part of so many ``rows`` multiplied by a number of its own; one number is for all."""
    counts = torch.tensor(rows if len(rows) > 1 else weight.shape[:1])
    factors = torch.tensor(by, dtype=torch.float32).repeat_interleave(counts)
    if len(weight.shape) == 1:
        return weight[:].float() * factors
    return MadeRows(
        weight.shape, lambda rows: weight[rows].float() * factors[rows, None], weight.nbytes, device=weight.device
    )


def merged(weights: Weights, adapters: Sequence[lora.Adapter], model: str) -> Weights:
    """``weights`` with adapters merged into them. Raises ModelError for an adapter that was made for another model."""
    pairs: dict[str, list[tuple[float, lora.Pair]]] = {}
    for adapter in adapters:
        for layer, pair in adapter.pairs.items():
            name = f"{layer}.weight"
            lora.check_fit(adapter, layer, pair, weights.values(name).shape if name in weights else None, model)
            pairs.setdefault(name, []).append((adapter.weight, pair))
    return ChangedWeights(weights, {name: partial(_with_added, pairs=each) for name, each in pairs.items()})


def _with_added(weight: Rows, pairs: Sequence[tuple[float, lora.Pair]]) -> Rows:
    """A weight with what adapters add to it, in float32."""

    def make(rows: slice | torch.Tensor) -> torch.Tensor:
        result = weight[rows].to(torch.float32, copy=True)
        for factor, pair in pairs:
            result.add_(pair.rows(rows), alpha=factor)
        return result

    return MadeRows(weight.shape, make, weight.nbytes, device=weight.device)

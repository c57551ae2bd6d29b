"""Models out of GGUF files: weights as they lie in the file, and modules with the weights dequantized."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from forerun.core.config import Within
from forerun.core.errors import ModelError, shown
from forerun.models.architectures.description import Architecture
from forerun.models.architectures.families import ARCHITECTURES
from forerun.models.architectures.shapes import shapes, unread
from forerun.models.architectures.spec import TILED_HEADS
from forerun.models.formats.base import Rows
from forerun.models.formats.gguf_blocks import Blocks
from forerun.models.formats.gguf_types import FLOATS, PACKED, TYPES, described
from forerun.models.gguf import PARTS, GGUFFile, GGUFTensor, SplitGGUF, parts_of
from forerun.models.gguf_config import FREQUENCIES
from forerun.models.weights import Read

log = logging.getLogger("forerun")
SUFFIX = ".gguf"


def is_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX


def open_gguf(path: Path) -> GGUFFile:
    """The file, or all parts of a model that it is one of; headers are read once while files stay the same. Raises
    ModelError."""
    about = []
    for part in parts_of(path):
        try:
            result = part.stat()
            about.append((result.st_mtime_ns, result.st_size))
        except OSError as error:
            if part == path:
                raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    return _opened(path, tuple(about))


@lru_cache(maxsize=2)
def _opened(path: Path, about: tuple[tuple[int, int], ...]) -> GGUFFile:
    file = GGUFFile(path)
    return SplitGGUF(path) if file.metadata.get(PARTS, 1) not in (0, 1) else file


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
    def size(self) -> int:
        return self.tensor.size * math.prod(self.shape) // math.prod(self.tensor.shape)


class GGUFWeights:
    """A model's weights as a checkpoint has them: by its names, with its order of the rows of queries and keys, and
    without what its norms add to their weights.

    Raises ModelError for a tensor that a model of this config does not have, that is missing, or that has another
    shape or a kind that is not served.
    """

    def __init__(self, file: GGUFFile, config: Any, *, numbers: bool = False) -> None:
        self.file = file
        self.numbers = numbers  # as which all of them are to be had
        self.untold = described(file.types()) if not numbers else ""
        architecture = ARCHITECTURES[config.model_type]
        shared = config.num_key_value_heads or config.num_attention_heads
        counts = {"q_proj": config.num_attention_heads, "k_proj": shared}
        self.heads = counts if architecture.interleaved else {}
        self.plus, self.decay = architecture.norms.plus, architecture.decay
        self.norms = {name.checkpoint for name in architecture.outer_norms()}
        self.prefix = f"{architecture.layers.checkpoint}."
        self.nbytes = sum(tensor.size for tensor in file.tensors.values())
        self.read = Read()
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
        missing = [name for name in requested if name not in self.tensors and name not in self.listed]
        if missing:
            raise ModelError(f"{file.path} lacks {len(missing)} weights, {missing[0]} among them")

    def __contains__(self, name: str) -> bool:
        return name in self.tensors or name in self.listed

    def values(self, name: str) -> Rows:
        if name in self.listed:
            return self.listed[name]
        held = self.tensors[name]
        self.read.add(name, held.size)
        if len(held.shape) == 2:
            return self._matrix(name)
        result = self.file.values(held.tensor.name)
        if held.size != held.tensor.size:  # one expert's of a stack
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
        self.read.add(name, self.tensors[name].size)
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

    def release(self) -> int:
        self.file.release()
        return self.read.done()


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


def read_weights(file: GGUFFile, config: Any, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
    """Every weight by its name in a checkpoint, dequantized. Raises ModelError."""
    if getattr(config, TILED_HEADS, False) or ARCHITECTURES[config.model_type].latent is not None:
        raise ModelError(f"{file.path} has its heads in an order of its own, which only the native path computes with")
    weights = GGUFWeights(file, config)
    return {name: weights.values(name)[:].to(dtype) for name in (*weights.tensors, *weights.listed)}

"""Models out of GGUF files: weights as they lie in the file, and modules with the weights dequantized."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.quants import dequantize
from transformers import AutoModelForCausalLM, PreTrainedModel

from forerun.core.errors import ModelError
from forerun.models import gguf_split
from forerun.models.architectures.families import ARCHITECTURES
from forerun.models.formats.base import Rows
from forerun.models.formats.gguf_blocks import UNPACK, Blocks
from forerun.models.gguf import GGUFFile, GGUFTensor
from forerun.models.gguf_config import FLOATS
from forerun.models.weights import Read

SUFFIX = ".gguf"


def is_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX


def open_gguf(path: Path) -> GGUFFile:
    """The file, or all parts of a model that it is one of; headers are read once while files stay the same. Raises
    ModelError."""
    about = []
    for part in gguf_split.parts_of(path):
        try:
            found = part.stat()
            about.append((found.st_mtime_ns, found.st_size))
        except OSError as error:
            if part == path:
                raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    return _opened(path, tuple(about))


@lru_cache(maxsize=2)
def _opened(path: Path, about: tuple[tuple[int, int], ...]) -> GGUFFile:
    file = GGUFFile(path)
    return gguf_split.SplitGGUF(path) if file.metadata.get(gguf_split.COUNT, 1) not in (0, 1) else file


def rows_as_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection whose rotated pairs lie side by side, with the pairs half a head apart."""
    rows = weight.shape[0]
    return weight.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


class Dequantized:
    """Rows of a tensor [rows, numbers], in another order where one is given: exact, in the dtype of numbers that are
    not quantized, else in float32."""

    device = torch.device("cpu")

    def __init__(self, file: GGUFFile, tensor: GGUFTensor, order: torch.Tensor | None) -> None:
        self.file, self.kind, self.order = file, tensor.kind, order
        self.raw = file.rows(tensor.name)
        self.shape = torch.Size(tensor.shape)
        self.dtype = FLOATS.get(tensor.kind.name, torch.float32)
        self.nbytes = tensor.size

    def __getitem__(self, rows: slice | torch.Tensor) -> torch.Tensor:
        places = rows if self.order is None else self.order[rows]
        found = dequantize(self.raw[places if isinstance(places, slice) else places.numpy()], self.kind)
        return torch.from_numpy(np.array(found, dtype=np.float32)).to(self.dtype)

    def blocks(self) -> Blocks | None:
        if self.kind.name in FLOATS:
            return None
        found = Blocks(self.kind.name.lower(), self.raw, self.shape[1])
        return found if self.order is None else found.rows(self.order)


class GGUFWeights:
    """A model's weights as a checkpoint has them: by its names, with its order of the rows of queries and keys, and
    without what its norms add to their weights.

    Raises ModelError for a tensor that a model of this config does not have, that is missing, or that has another
    shape or a kind that is not served.
    """

    def __init__(self, file: GGUFFile, config: Any, *, numbers: bool = False) -> None:
        self.file = file
        self.numbers = numbers  # as which all of them are to be had
        architecture = ARCHITECTURES[config.model_type]
        shared = config.num_key_value_heads or config.num_attention_heads
        counts = {"q_proj": config.num_attention_heads, "k_proj": shared}
        self.heads = counts if architecture.interleaved else {}
        self.plus = architecture.norms.plus
        self.nbytes = sum(tensor.size for tensor in file.tensors.values())
        self.read = Read()
        self.tensors: dict[str, GGUFTensor] = {}
        wanted = {name: tuple(part.shape) for name, part in skeleton(config, torch.float32).named_parameters()}
        for name, tensor in file.tensors.items():
            to = architecture.checkpoint_name(name)
            if to is None:
                raise ModelError(f"{file.path} has a tensor {name}, which {architecture.causal} does not have")
            if to not in wanted:
                raise ModelError(f"{file.path} has a tensor {name}, which its metadata leave out")
            if tensor.shape != wanted[to]:
                raise ModelError(f"{file.path}: {name} has shape {list(tensor.shape)}, which its metadata contradict: "
                                 f"they ask for {list(wanted[to])}")  # fmt: skip
            if tensor.kind.name not in FLOATS and tensor.kind.name.lower() not in UNPACK:
                served = ", ".join([*FLOATS, *map(str.upper, UNPACK)])
                raise ModelError(f"{file.path}: {name} is of type {tensor.kind.name}; {served} are read")
            self.tensors[to] = tensor
        missing = [name for name in wanted if name not in self.tensors]
        if missing:
            raise ModelError(f"{file.path} lacks {len(missing)} weights, {missing[0]} among them")

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def values(self, name: str) -> Rows:
        tensor = self.tensors[name]
        self.read.add(name, tensor.size)
        if len(tensor.shape) > 1:
            return self._matrix(name)
        found = self.file.values(tensor.name)
        found = found - self.plus if self.plus else found  # norms alone are vectors
        return found.to(FLOATS.get(tensor.kind.name, torch.float32))

    def blocks(self, name: str) -> Blocks | None:
        self.read.add(name, self.tensors[name].size)
        return None if self.numbers else self._matrix(name).blocks()

    def _matrix(self, name: str) -> Dequantized:
        tensor, part = self.tensors[name], name.split(".")[-2]
        order = None
        if part in self.heads:
            order = rows_as_halves(torch.arange(tensor.shape[0])[:, None], self.heads[part])[:, 0]
        return Dequantized(self.file, tensor, order)

    def release(self) -> int:
        self.file.release()
        return self.read.done()


def skeleton(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """The model without its weights. Takes no memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def read_weights(file: GGUFFile, config: Any, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
    """Every weight by its name in a checkpoint, dequantized. Raises ModelError."""
    weights = GGUFWeights(file, config)
    return {name: weights.values(name)[:].to(dtype) for name in weights.tensors}

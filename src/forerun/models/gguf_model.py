"""Models out of GGUF files: weights as they lie in the file, and modules with the weights dequantized."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from forerun.core.errors import ModelError
from forerun.models.architectures.families import ARCHITECTURES
from forerun.models.formats.gguf_blocks import UNPACK, Blocks
from forerun.models.gguf import GGUFFile, GGUFTensor
from forerun.models.gguf_config import FLOATS

SUFFIX = ".gguf"


def is_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX


def open_gguf(path: Path) -> GGUFFile:
    """The file, whose header is read once while it stays the same. Raises ModelError."""
    try:
        about = path.stat()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    return _opened(path, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=2)
def _opened(path: Path, changed: int, size: int) -> GGUFFile:
    return GGUFFile(path)


def rows_as_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection whose rotated pairs lie side by side, with the pairs half a head apart."""
    rows = weight.shape[0]
    return weight.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


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

    def values(self, name: str) -> torch.Tensor:
        """Exact: in the dtype of numbers that are not quantized, else in float32."""
        tensor = self.tensors[name]
        found = self.file.values(tensor.name)
        dtype = FLOATS.get(tensor.kind.name)
        part = name.split(".")[-2]
        found = rows_as_halves(found, self.heads[part]) if part in self.heads else found
        if self.plus and found.dim() == 1:  # norms alone are vectors
            found = found - self.plus
        return (found if dtype is None else found.to(dtype)).contiguous()

    def blocks(self, name: str) -> Blocks | None:
        tensor = self.tensors[name]
        if self.numbers or tensor.kind.name in FLOATS:
            return None
        raw = self.file.packed(tensor.name).reshape(tensor.shape[0], -1)
        found = Blocks(tensor.kind.name.lower(), raw, tensor.shape[1])
        part = name.split(".")[-2]
        if part not in self.heads:
            return found
        places = torch.arange(tensor.shape[0])
        return found.rows(rows_as_halves(places[:, None], self.heads[part])[:, 0])

    def taken(self) -> None:
        pass


def skeleton(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """The model without its weights. Takes no memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def read_weights(file: GGUFFile, config: Any, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
    """Every weight by its name in a checkpoint, dequantized. Raises ModelError."""
    weights = GGUFWeights(file, config)
    return {name: weights.values(name).to(dtype) for name in weights.tensors}

"""Models out of GGUF files: config, weights as they lie in the file, and modules with the weights dequantized."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from forerun.core.errors import ModelError, shown
from forerun.models.formats.gguf_blocks import UNPACK, Blocks
from forerun.models.gguf import GGUFFile, GGUFTensor
from forerun.models.gguf_names import checkpoint_name

SUFFIX = ".gguf"
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Kinds of tensors that are numbers."""


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


def read_config(file: GGUFFile) -> dict[str, Any]:
    """What ``config.json`` would say. Raises ModelError for a model that is no Llama, or of a kind not read here."""
    found = file.metadata
    architecture = found.get("general.architecture")
    if architecture != "llama":
        raise ModelError(
            f"{file.path} holds a model of architecture {shown(architecture)}; only 'llama' is read from GGUF"
        )

    def whole(key: str, default: int | None = None) -> int:
        value = found.get(f"llama.{key}", default)
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{file.path} has {shown(value)} as llama.{key}, not a positive integer")
        return value

    if found.get("llama.expert_count"):
        raise ModelError(f"{file.path} holds a mixture of experts, which is not read from GGUF")
    parts = found.get("split.count", 1)
    if parts not in (0, 1):
        raise ModelError(
            f"{file.path} is one of {shown(parts)} parts of a model: merge them (llama-gguf-split --merge)"
        )
    scaling = found.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in file.tensors:
        raise ModelError(f"{file.path} scales its rotary frequencies, which is not read from GGUF")
    hidden, heads = whole("embedding_length"), whole("attention.head_count")
    width = whole("attention.key_length", hidden // heads or None)
    if width < 2 or width % 2:
        raise ModelError(f"{file.path} has heads of {width} numbers, which cannot be rotated in pairs")
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := whole(key, width)) != width:
            raise ModelError(f"{file.path} has heads of {width} numbers, but {other} as llama.{key}")
    vocabulary = _vocabulary(file)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": whole("feed_forward_length"),
        "num_hidden_layers": whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": whole("attention.head_count_kv", heads),
        "head_dim": width,
        "max_position_embeddings": whole("context_length"),
        "rms_norm_eps": _positive(file, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": _positive(file, "llama.rope.freq_base", 10000.0),
        "vocab_size": vocabulary,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
    }
    absent = {"bos_token_id": None, "eos_token_id": None}  # transformers has defaults for Llama
    return config | absent | _special_ids(file, vocabulary)


def _dtype(file: GGUFFile) -> str:
    """That of rows: the one in which most of the matrices' bytes are numbers, bfloat16 where they are quantized."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.kind.name] = sizes.get(tensor.kind.name, 0) + tensor.size
    most = max(sizes, key=lambda kind: sizes[kind], default="BF16")
    return str(FLOATS.get(most, torch.bfloat16)).removeprefix("torch.")


def _positive(file: GGUFFile, key: str, default: float | None = None) -> float:
    value = file.metadata.get(key, default)
    if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ModelError(f"{file.path} has {shown(value)} as {key}, not a positive number")
    return float(f"{value:.7g}")  # written in single precision


def _vocabulary(file: GGUFFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} has no tensor token_embd.weight: it holds no whole model")
    return file.tensors["token_embd.weight"].shape[0]


def _special_ids(file: GGUFFile, vocabulary: int) -> dict[str, Any]:
    """The ids that begin and end texts, and padding's. Raises ModelError."""
    ids: dict[str, int] = {}
    for name in ("bos", "eos", "padding", "eot", "eom"):
        value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            continue
        if not isinstance(value, int) or not 0 <= value < vocabulary:
            raise ModelError(f"{file.path} has {shown(value)} as tokenizer.ggml.{name}_token_id, not one of its tokens")
        ids[name] = value
    found: dict[str, Any] = {
        f"{to}_token_id": ids[name] for name, to in (("bos", "bos"), ("padding", "pad")) if name in ids
    }
    ends = sorted({ids[name] for name in ("eos", "eot", "eom") if name in ids})
    return found | ({"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {})


class GGUFWeights:
    """A Llama's weights by their names in a checkpoint, with the rows of queries and keys in a checkpoint's order.

    Raises ModelError for a tensor that a Llama of this config does not have, that is missing, or that has another shape
    or a kind that is not served.
    """

    def __init__(self, file: GGUFFile, config: LlamaConfig, *, numbers: bool = False) -> None:
        self.file = file
        self.numbers = numbers  # as which all of them are to be had
        shared = config.num_key_value_heads or config.num_attention_heads
        self.heads = {"q_proj": config.num_attention_heads, "k_proj": shared}
        self.tensors: dict[str, GGUFTensor] = {}
        wanted = {name: tuple(part.shape) for name, part in skeleton(config, torch.float32).named_parameters()}
        for name, tensor in file.tensors.items():
            to = checkpoint_name(name)
            if to is None:
                raise ModelError(f"{file.path} has a tensor {name}, which a Llama does not have")
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


def read_weights(file: GGUFFile, config: LlamaConfig, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
    """Every weight by its name in a checkpoint, dequantized. Raises ModelError."""
    weights = GGUFWeights(file, config)
    return {name: weights.values(name).to(dtype) for name in weights.tensors}

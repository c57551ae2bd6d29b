"""From a GGUF file to a checkpoint folder: config, weights, tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from forerun.core.errors import ModelError
from forerun.models.gguf import GGUFFile
from forerun.models.gguf_names import checkpoint_name
from forerun.models.gguf_tokenizer import make_tokenizer


def rows_as_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection whose rotated pairs lie side by side, with the pairs half a head apart."""
    rows = weight.shape[0]
    return weight.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def read_config(file: GGUFFile) -> dict[str, Any]:
    """The checkpoint's ``config.json``. Raises ModelError for a model that is no Llama, or of a kind not read here."""
    found = file.metadata
    architecture = found.get("general.architecture")
    if architecture != "llama":
        raise ModelError(f"{file.path} holds a model of architecture {architecture!r}; only 'llama' is read from GGUF")

    def whole(key: str, default: int | None = None) -> int:
        value = found.get(f"llama.{key}", default)
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{file.path} has {value!r} as llama.{key}, not a positive integer")
        return value

    if found.get("llama.expert_count"):
        raise ModelError(f"{file.path} holds a mixture of experts, which is not read from GGUF")
    scaling = found.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in file.tensors:
        raise ModelError(f"{file.path} scales its rotary frequencies, which is not read from GGUF")
    hidden, heads = whole("embedding_length"), whole("attention.head_count")
    width = whole("attention.key_length", hidden // heads or None)
    if width < 2 or width % 2:
        raise ModelError(f"{file.path} has heads of {width} numbers, which cannot be rotated in pairs")
    for key in ("attention.value_length", "rope.dimension_count"):
        if whole(key, width) != width:
            raise ModelError(f"{file.path} has heads of {width} numbers, but {found[f'llama.{key}']} as llama.{key}")
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
    }
    absent = {"bos_token_id": None, "eos_token_id": None}  # transformers has defaults for Llama
    return config | absent | generation_config(file, vocabulary)


def _positive(file: GGUFFile, key: str, default: float | None = None) -> float:
    value = file.metadata.get(key, default)
    if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ModelError(f"{file.path} has {value!r} as {key}, not a positive number")
    return float(f"{value:.7g}")  # written in single precision


def _vocabulary(file: GGUFFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} has no tensor token_embd.weight: it holds no whole model")
    return file.tensors["token_embd.weight"].shape[0]


def generation_config(file: GGUFFile, vocabulary: int) -> dict[str, Any]:
    """What ``generation_config.json`` says: the ids that begin and end texts, and padding's. Raises ModelError."""
    ids: dict[str, int] = {}
    for name in ("bos", "eos", "padding", "eot", "eom"):
        value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            continue
        if not isinstance(value, int) or not 0 <= value < vocabulary:
            raise ModelError(f"{file.path} has {value!r} as tokenizer.ggml.{name}_token_id, not one of its tokens")
        ids[name] = value
    found: dict[str, Any] = {
        f"{to}_token_id": ids[name] for name, to in (("bos", "bos"), ("padding", "pad")) if name in ids
    }
    ends = sorted({ids[name] for name in ("eos", "eot", "eom") if name in ids})
    return found | ({"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {})


def read_weights(file: GGUFFile, config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every weight by its name in the checkpoint. Raises ModelError for one that does not belong to a Llama."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    weights = {}
    for name, tensor in file.tensors.items():
        to = checkpoint_name(name)
        if to is None:
            raise ModelError(f"{file.path} has a tensor {name}, which a Llama does not have")
        part = to.split(".")[-2]
        if part in heads and (len(tensor.shape) != 2 or tensor.shape[0] != heads[part] * config["head_dim"]):
            raise ModelError(f"{file.path}: {name} has shape {list(tensor.shape)}, which its metadata contradict")
        values = file.values(name)
        weights[to] = (rows_as_halves(values, heads[part]) if part in heads else values).to(dtype).contiguous()
    return weights


def write_checkpoint(path: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the model of a GGUF file into ``folder``, which exists, its weights dequantized to ``dtype``.

    Raises ModelError for a file that is damaged or holds what is not read here, OSError where ``folder`` cannot be
    written.
    """
    file = GGUFFile(path)
    config = read_config(file) | {"dtype": str(dtype).removeprefix("torch.")}
    tokenizer = make_tokenizer(file.metadata, str(path))
    tokenizer.model_max_length = config["max_position_embeddings"]
    for name, content in (("config", config), ("generation_config", generation_config(file, config["vocab_size"]))):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(folder)
    try:
        save_file(read_weights(file, config, dtype), folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{folder}/model.safetensors cannot be written: {error}") from error

"""Reads drafters in GGUF files (llama.cpp's architectures ``eagle3`` and ``dflash``) like Hugging Face folders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType

from forerun.core.errors import ModelError, shown
from forerun.models.architectures.gguf_config import FREQUENCIES, read_divisors
from forerun.models.files.checkpoint import CONFIG, read_object, read_tensors
from forerun.models.files.gguf import GGUFFile
from forerun.models.files.open import Checkpoint
from forerun.models.weights.transform import deinterleaved

LAYER = {
    "attn_norm": "input_layernorm", "attn_norm_2": "hidden_norm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_conv_base": "attention_conv.base_kernel", "attn_conv_proj": "attention_conv.kernel_projection",
    "ffn_conv_base": "mlp_conv.base_kernel", "ffn_conv_proj": "mlp_conv.kernel_projection",
}  # fmt: skip
OTHERS = {
    "output_norm": "norm", "enc.output_norm": "hidden_norm", "output": "lm_head", "token_embd": "embed_tokens",
    "selector_predecessor": "candidate_selector.predecessor_codebook",
    "selector_successor": "candidate_selector.successor_codebook",
    "selector_hidden": "candidate_selector.hidden_projection", "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2", "conf_proj": "confidence_head.proj",
}  # fmt: skip
WITHOUT_SUFFIX = ("base_kernel", "_codebook")
"""Names that end so have no ``.weight`` suffix in folders."""
KEYS = {
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta", "block_size": "block_size", "sample_from_anchor": "sample_from_anchor",
    "selector_top_k": "selector_top_k", "norm_before_residual": "norm_before_residual",
    "logit_scale": "output_multiplier",
    "final_logit_softcapping": "final_logit_softcapping", "attention.sliding_window": "sliding_window",
}  # fmt: skip


def read_drafter(path: Path, architecture: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config and tensors of a drafter, in a folder or in a GGUF file of llama.cpp's ``architecture``. Raises ModelError
    for a GGUF file of another architecture."""
    file = Checkpoint.at(path).gguf
    if file is None:
        return read_object(path / CONFIG), read_tensors(path)
    actual = file.metadata.get("general.architecture")
    if actual != architecture:
        raise ModelError(f"{path} holds a model of architecture {shown(actual)}, not a drafter ({architecture})")
    config = _config(file, architecture)
    weights = {_name(name): _values(file, name) for name in file.tensors if name != FREQUENCIES}
    heads = config.get("num_attention_heads")
    width = config.get("head_dim") or (config["hidden_size"] // heads if heads and "hidden_size" in config else 0)
    if FREQUENCIES in file.tensors:
        config["rope_scaling"] = read_divisors(file, config.get("rope_theta", 10000.0), width)
    if architecture == "eagle3":  # rotated pairs lie side by side
        if "hidden_norm.weight" in weights:
            weights["input_norm.weight"] = weights.pop("hidden_norm.weight")
        for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
            name = f"layers.0.self_attn.{part}_proj.weight"
            if name in weights and config.get(heads):
                weights[name] = deinterleaved(weights[name], config[heads])
    if "d2t" in weights:  # token ids here, offsets from the row's number in folders
        weights["d2t"] = weights["d2t"] - torch.arange(len(weights["d2t"]))
    projection = weights.get("layers.0.attention_conv.kernel_projection.weight")
    if projection is not None:
        config["conv_group_size"] = 4 * projection.shape[1] // projection.shape[0]
    return config, weights


def _config(file: GGUFFile, architecture: str) -> dict[str, Any]:
    """The folder's ``config.json``."""
    values = {key: file.metadata.get(f"{architecture}.{key}") for key in KEYS}
    config: dict[str, Any] = {KEYS[key]: value for key, value in values.items() if value is not None}
    layers = file.metadata.get(f"{architecture}.target_layers") or file.metadata.get(f"{architecture}.extract_layers")
    if not isinstance(layers, list) or not layers:
        raise ModelError(
            f"{file.path} does not say which of the target's layers it reads ({architecture}.target_layers)"
        )
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    config["vocab_size"] = len(tokens) if isinstance(tokens, list) else None
    if architecture == "eagle3":
        return config | {"eagle_aux_hidden_state_layer_ids": layers}
    pattern = file.metadata.get(f"{architecture}.attention.sliding_window_pattern")
    if isinstance(pattern, list):
        config["layer_types"] = ["sliding_attention" if each else "full_attention" for each in pattern]
    # id i is the input of layer i, which is the output of layer i - 1
    mask = file.metadata.get("tokenizer.ggml.mask_token_id")
    return config | {"target_layer_ids": [layer - 1 for layer in layers], "mask_token_id": mask}


def _name(name: str) -> str:
    """The tensor's name in a folder."""
    if name.removesuffix(".weight") == "d2t":
        return "d2t"
    index = re.fullmatch(r"blk\.(\d+)\.(\w+?)(?:\.(weight|bias))?", name)
    if index is not None:
        stem = f"layers.{index[1]}.{LAYER.get(index[2], index[2])}"
        return stem if stem.endswith(WITHOUT_SUFFIX) else f"{stem}.{index[3] or 'weight'}"
    stem, _, kind = name.rpartition(".")
    renamed = OTHERS.get(stem, stem)
    return renamed if renamed.endswith(WITHOUT_SUFFIX) else f"{renamed}.{kind}"


def _values(file: GGUFFile, name: str) -> torch.Tensor:
    tensor = file.tensors[name]
    if tensor.kind in (GGMLQuantizationType.I64, GGMLQuantizationType.I32):
        kind = np.int64 if tensor.kind is GGMLQuantizationType.I64 else np.int32
        return torch.from_numpy(file.packed(name).view(kind).astype(np.int64)).reshape(tensor.shape)
    return file.values(name)

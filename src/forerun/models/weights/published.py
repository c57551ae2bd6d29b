"""Published heads, EAGLE-3's and DFlash's: their files' configs and tensors as the arguments and weights of ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from forerun.core.config import POSITIVE, Within
from forerun.core.errors import ModelError, shown
from forerun.models.architectures.drafters import LLAMA3
from forerun.models.files.checkpoint import CONFIG
from forerun.models.run.parts import BlockConvolution
from forerun.models.weights.gguf_drafters import read_drafter

Tensors = dict[str, torch.Tensor]
Read = tuple[dict[str, Any], Tensors]
"""Arguments of ``head.Sizes``, and weights by our names."""
COPIES = {"embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight", "t2d", "rotary_emb.inv_freq"}
"""Copies of the target's weights, and the inverse of d2t."""
EAGLE_PREFIXES = ("midlayer.", "layers.0.")
EAGLE_DEPTH = 16
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Options of an EAGLE head that are keys of published configs, too."""
CANDIDATES = 16
RENAMED = {
    "prefix_gru.weight_ih_l0": "domino.gru.weight_ih", "prefix_gru.weight_hh_l0": "domino.gru.weight_hh",
    "embed_proj.0.": "domino.enter.", "embed_proj.2.": "domino.leave.", "markov_head.": "",
    "confidence_head.proj.": "confidence.", "predecessor_codebook.weight": "predecessor_codebook",
    "successor_codebook.weight": "successor_codebook",
}  # fmt: skip
"""Parts of DFlash's names, and ours."""
NEUTRAL = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}
"""Config keys that are not supported, and their neutral values."""
KINDS = ("dflash", "dflash2", "dspark")


def _layer_options(layer: Mapping[str, Any], rope: Mapping[str, Any], size: int, eps: float) -> dict[str, Any]:
    """Options of a head's decoder layers, from a checked config."""
    heads = layer["num_attention_heads"]
    return {
        "heads": heads,
        "kv_heads": layer.get("num_key_value_heads") or heads,
        "width": layer.get("head_dim") or size // heads,
        "inner_size": layer["intermediate_size"],
        "theta": rope.get("rope_theta") or layer.get("rope_theta") or 10000.0,
        "eps": layer.get("rms_norm_eps", eps),
    }


def read_eagle(folder: Path, num_layers: int) -> Read:
    """Reads an EAGLE-3 head. Raises ModelError for anything else."""
    config, weights = read_drafter(folder, "eagle3")
    layer = config.get("transformer_layer_config", config)
    if not isinstance(layer, Mapping):
        raise ModelError(f"{folder} is not an EAGLE-3 head: its transformer_layer_config is no object")
    if "fc.weight" not in weights or not any(name.startswith(EAGLE_PREFIXES) for name in weights):
        raise ModelError(f"{folder} is not an EAGLE-3 head: it has no fc.weight or no decoder layer")
    names = ("hidden_size", "num_attention_heads", "intermediate_size")
    lacking = [name for name in names if not isinstance(layer.get(name), int) or layer[name] < 1]
    vocabulary, size = config.get("vocab_size") or layer.get("vocab_size"), weights["fc.weight"].shape[0]
    if lacking or not isinstance(vocabulary, int):
        raise ModelError(f"{folder}: its {CONFIG} lacks {', '.join(lacking) or 'vocab_size'}")
    options = _eagle_options(config, layer, weights)
    kept = {_eagle_name(name): tensor for name, tensor in weights.items() if name not in COPIES}
    if "q_proj.weight" in kept and kept["q_proj.weight"].shape[1] == size:
        raise ModelError(f"{folder} is a head of EAGLE or EAGLE-2, without the token's embedding; EAGLE-3 is read")
    if "d2t" in kept:
        indices = kept["d2t"].long() + torch.arange(len(kept["d2t"]))
        if indices.dim() != 1 or not bool(((indices >= 0) & (indices < vocabulary)).all()):
            raise ModelError(f"{folder}: its d2t names tokens outside a vocabulary of {vocabulary}")
    return _arguments(size, vocabulary, num_layers, EAGLE_DEPTH, options), kept


def _arguments(size: int, vocabulary: Any, num_layers: int, depth: int, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_size": size, "vocab_size": vocabulary, "num_layers": num_layers, "depth": depth, "options": options
    }  # fmt: skip


def _eagle_name(name: str) -> str:
    for prefix in EAGLE_PREFIXES:
        name = name.removeprefix(prefix)
    return name.removeprefix("self_attn.")


def _eagle_options(config: Mapping[str, Any], layer: Mapping[str, Any], weights: Tensors) -> dict[str, Any]:
    rope, eagle = layer.get("rope_parameters"), config.get("eagle_config")
    rope = rope if isinstance(rope, Mapping) else {}
    eagle = eagle if isinstance(eagle, Mapping) else {}
    options = _layer_options(layer, rope, layer["hidden_size"], 1e-5) | {
        "own_head": "lm_head.weight" in weights,
        "draft_vocab_size": weights["d2t"].shape[0] if "d2t" in weights else None,
    }
    tensors = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}
    for name in NORMS:
        if config.get(name) or eagle.get(name) or tensors.get(name) in weights:
            options[name] = True
    if scaling := _rope_scaling(rope or layer.get("rope_scaling") or {}):
        options["stretch"] = scaling
    ids, nested = config.get("eagle_aux_hidden_state_layer_ids"), eagle.get("eagle_aux_hidden_state_layer_ids")
    if isinstance(nested, list) and not ids and all(type(each) is int for each in nested):
        ids = [each + 1 for each in nested]  # SGLang's id i is the output of layer i
    if ids or nested:
        options["layers"] = ids or nested
    return options


def _rope_scaling(rope: Any) -> list[float] | None:
    """The numbers ``LLAMA3``; None for the default. Raises ModelError for other kinds."""
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else shown(rope)
    if kind == "default":
        return None
    numbers = [rope.get(name) for name in LLAMA3] if kind == "llama3" else []
    if not numbers or not all(map(POSITIVE.permits, numbers)) or not numbers[1] < numbers[2]:
        raise ModelError(f"an EAGLE-3 head supports the default RoPE and llama3, not {shown(rope)}")
    return numbers


def read_dflash(folder: Path, num_layers: int) -> Read:
    """Reads a DFlash, DFlash2 or DSpark checkpoint of z-lab, SGLang, speculators or llama.cpp, or raises ModelError."""
    config, tensors = read_drafter(folder, "dflash")
    inner = config.get("transformer_layer_config", config)
    own = config.get("dflash_config") or config.get("dspark_config") or {}
    if not isinstance(inner, Mapping) or not isinstance(own, Mapping):
        raise ModelError(f"{folder} is not a DFlash drafter: its {CONFIG} has no usable sizes")
    keys = {**inner, **config, **own}
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    weights = {name: tensor for name, tensor in tensors.items() if name not in COPIES}
    kind = config.get("speculators_model_type")
    if "hidden_norm.weight" not in weights or "fc.weight" not in weights or kind not in (None, *KINDS):
        raise ModelError(
            f"{folder} is no DFlash drafter: {'it is ' + shown(kind) if kind else 'it has no fc and hidden_norm'}; "
            f"{', '.join(KINDS)} files are read"
        )
    options = _dflash_options(folder, config, keys, weights, num_layers)
    block = keys.get("block_size", 16)
    if not Within(least=2, whole=True).permits(block):
        raise ModelError(f"{folder}: block_size is an integer of at least 2, not {shown(block)}")
    size, vocabulary = weights["fc.weight"].shape[0], keys.get("vocab_size")
    for name in ("predecessor_codebook", "successor_codebook"):
        codes = weights.get(f"candidate_selector.{name}")
        if codes is not None and codes.shape[0] != vocabulary:
            raise ModelError(f"{folder}: its {name} is of {codes.shape[0]} tokens, its vocabulary of {vocabulary}")
    if not options["own_head"]:
        weights.pop("lm_head.weight", None)  # the target's again
    arguments = _arguments(size, vocabulary, num_layers, block - (not options["from_anchor"]), options)
    return arguments, {_dflash_name(name): tensor for name, tensor in weights.items()}


def _dflash_name(name: str) -> str:
    for old, new in RENAMED.items():
        name = name.replace(old, new)
    return name.replace("self_attn.", "").replace("layers.", "blocks.", 1) if name.startswith("layers.") else name


def _dflash_options(
    folder: Path, config: Mapping[str, Any], keys: Mapping[str, Any], weights: Tensors, depth: int
) -> dict[str, Any]:
    """The head's options. Raises ModelError for unsupported ones."""
    for key, neutral in NEUTRAL.items():
        if keys.get(key, neutral) not in (neutral, None):
            raise ModelError(f"{folder}: {key} {shown(keys[key])} is not served")
    if keys.get("markov_head_type", "vanilla") != "vanilla":
        raise ModelError(f"{folder}: markov_head_type {shown(keys['markov_head_type'])} is not served, only 'vanilla'")
    rope = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ModelError(f"{folder}: its block supports the default RoPE only, not {shown(rope)}")
    counts = {name: keys.get(name) for name in ("num_attention_heads", "intermediate_size", "num_hidden_layers")}
    mask, vocabulary = keys.get("mask_token_id"), keys.get("vocab_size")
    counts |= {"mask_token_id": mask, "vocab_size": vocabulary}
    for name, value in counts.items():
        if not Within(least=name != "mask_token_id", whole=True).permits(value):
            raise ModelError(f"{folder}: its {CONFIG} has {shown(value)} as {name}")
    if mask >= vocabulary:  # type: ignore[operator]
        raise ModelError(f"{folder}: mask_token_id {mask} is outside a vocabulary of {vocabulary}")
    blocks, size = counts["num_hidden_layers"], weights["fc.weight"].shape[0]
    options: dict[str, Any] = _layer_options(keys, rope, size, 1e-6) | {
        "blocks": blocks,
        "mask": mask,
        "layers": _taps(folder, config, keys, weights["fc.weight"].shape, depth),
        "biased": "layers.0.self_attn.q_proj.bias" in weights,
        "own_head": "d2t" in weights and "lm_head.weight" in weights,
        "draft_vocab_size": weights["d2t"].shape[0] if "d2t" in weights else None,
    }
    dspark = "markov_head.markov_w1.weight" in weights
    options["from_anchor"] = keys.get("sample_from_anchor", dspark and "speculators_model_type" not in config)
    if dspark:
        options["markov"] = weights["markov_head.markov_w1.weight"].shape[1]
    if "prefix_gru.weight_hh_l0" in weights and "embed_proj.0.weight" in weights:
        first = keys.get("pure_draft_prefix_len", 0)
        if not Within(least=0, whole=True).permits(first):
            raise ModelError(f"{folder}: its {CONFIG} has {shown(first)} as pure_draft_prefix_len")
        sizes = {"state": weights["prefix_gru.weight_hh_l0"].shape[1], "inner": len(weights["embed_proj.0.weight"])}
        options |= {"domino": {**sizes, "first": first}, "from_anchor": bool(keys.get("shift_label", False))}
    if "confidence_head.proj.weight" in weights:
        options["confidence"] = "markov" if weights["confidence_head.proj.weight"].shape[1] > size else "plain"
    if "layers.0.attention_conv.base_kernel" in weights:
        options["group"] = keys.get("conv_group_size", CANDIDATES)
        taps = keys.get("conv_kernel_size", BlockConvolution.TAPS)
        if taps != BlockConvolution.TAPS:
            raise ModelError(f"{folder}: convolutions over {shown(taps)} rows are not served, 2 are")
    if "candidate_selector.hidden_projection.weight" in weights:
        rank = weights["candidate_selector.hidden_projection.weight"].shape[0]
        options["selector"] = {"rank": rank, "top": keys.get("selector_top_k", CANDIDATES)}
    types = keys.get("layer_types") or []
    sliding = [kind == "sliding_attention" for kind in types][: counts["num_hidden_layers"]]
    if any(sliding):
        options["windows"] = [keys.get("sliding_window") if each else None for each in sliding]
    causal = keys.get("is_causal")
    options["causal"] = [bool(causal)] * blocks if causal is not None else (sliding or None)  # type: ignore[operator]
    return options


def _taps(folder: Path, config: Mapping[str, Any], keys: Mapping[str, Any], fc: torch.Size, depth: int) -> list[int]:
    """Indices of the hidden states that the block reads, 0 being the embeddings. In z-lab's and SGLang's files, id i is
    the output of layer i; speculators count from the embeddings. Raises ModelError for ids that the target lacks."""
    ids, shift = keys.get("target_layer_ids"), 1
    if "speculators_model_type" in config or ids is None:
        ids, shift = keys.get("aux_hidden_state_layer_ids", ids), 0 if "speculators_model_type" in config else 1
    if not isinstance(ids, list) or not ids or any(type(each) is not int for each in ids):
        raise ModelError(
            f"{folder}: its {CONFIG} does not say which of the target's layers it reads (target_layer_ids)"
        )
    layers = [each + shift for each in ids]
    if max(layers) > depth or min(layers) < 0:
        raise ModelError(f"{folder} reads the target's layers {ids}; the target has {depth}: it was made for another")
    if fc[1] != len(layers) * fc[0]:
        raise ModelError(
            f"{folder}: its fc takes {fc[1]} numbers, {len(layers)} hidden states of {fc[0]} have another count"
        )
    return layers

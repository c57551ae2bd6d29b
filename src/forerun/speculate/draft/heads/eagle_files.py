"""Public EAGLE-3 checkpoints: SGLang's layout (``midlayer.*``), the speculators one (``layers.0.*``) and GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from forerun.core.errors import ModelError
from forerun.models.checkpoint import CONFIG
from forerun.speculate.draft.heads.gguf_files import is_ours, read_drafter
from forerun.speculate.draft.heads.head import FORMAT, Sizes

PREFIXES = ("midlayer.", "layers.0.")
IGNORED = {"t2d", "embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
"""The inverse of d2t; the target's embedding, which the engine takes from the target itself."""


def is_public(folder: Path) -> bool:
    return not is_ours(folder, FORMAT)


def _rename(name: str) -> str:
    for prefix in PREFIXES:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
    return name.removeprefix("self_attn.")


def read_public(folder: Path, num_layers: int) -> tuple[Sizes, dict[str, torch.Tensor]]:
    """Sizes and renamed weights; such files do not say how deep their target is. Raises ModelError for anything that is
    not an EAGLE-3 head."""
    config, weights = read_drafter(folder, "eagle3")
    layer = config.get("transformer_layer_config", config)
    if not isinstance(layer, Mapping):
        raise ModelError(f"{folder} is not an EAGLE-3 head: its transformer_layer_config is no object")
    if "fc.weight" not in weights or not any(name.startswith(PREFIXES) for name in weights):
        raise ModelError(f"{folder} is not an EAGLE-3 head: it has no fc.weight or no decoder layer")
    names = ("hidden_size", "num_attention_heads", "intermediate_size")
    lacking = [name for name in names if not isinstance(layer.get(name), int) or layer[name] < 1]
    vocabulary = config.get("vocab_size") or layer.get("vocab_size")
    if lacking or not isinstance(vocabulary, int):
        raise ModelError(f"{folder}: its {CONFIG} lacks {', '.join(lacking) or 'vocab_size'}")
    try:
        sizes = Sizes(weights["fc.weight"].shape[0], vocabulary, num_layers, 16, _options(config, layer, weights))
    except ModelError as error:
        raise ModelError(f"{folder} is not an EAGLE-3 head: {error}") from error
    kept = {_rename(name): tensor for name, tensor in weights.items() if name not in IGNORED}
    if "d2t" in kept:
        indices = kept["d2t"].long() + torch.arange(len(kept["d2t"]))
        if indices.dim() != 1 or not bool(((indices >= 0) & (indices < vocabulary)).all()):
            raise ModelError(f"{folder}: its d2t names tokens outside a vocabulary of {vocabulary}")
    return sizes, kept


def _options(config: Mapping[str, Any], layer: Mapping[str, Any], weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The head's own options, from a checked config."""
    heads, rope, eagle = layer["num_attention_heads"], layer.get("rope_parameters"), config.get("eagle_config")
    rope = rope if isinstance(rope, Mapping) else {}
    eagle = eagle if isinstance(eagle, Mapping) else {}
    options: dict[str, Any] = {
        "heads": heads,
        "kv_heads": layer.get("num_key_value_heads") or heads,
        "width": layer.get("head_dim") or layer["hidden_size"] // heads,
        "inner_size": layer["intermediate_size"],
        "theta": rope.get("rope_theta") or layer.get("rope_theta") or 10000.0,
        "eps": layer.get("rms_norm_eps", 1e-5),
        "own_head": "lm_head.weight" in weights,
        "draft_vocab_size": weights["d2t"].shape[0] if "d2t" in weights else None,
    }
    if config.get("norm_before_residual"):
        options["norm_before_residual"] = True
    ids = config.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
    if ids:
        options["layers"] = ids
    return options

"""Public EAGLE-3 checkpoints: SGLang's layout (``midlayer.*``) and the speculators one (``layers.0.*``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from forerun.core.errors import ModelError
from forerun.speculate.draft.heads.head import FORMAT, Sizes

PREFIXES = ("midlayer.", "layers.0.")
IGNORED = {"t2d", "embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
"""The inverse of d2t; the target's embedding, which the engine takes from the target itself."""


def _config(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} holds no readable head: {str(error).splitlines()[0]}") from error


def is_public(folder: Path) -> bool:
    return FORMAT not in _config(folder)


def _rename(name: str) -> str:
    for prefix in PREFIXES:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
    return name.removeprefix("self_attn.")


def read_public(folder: Path, num_layers: int) -> tuple[Sizes, dict[str, torch.Tensor]]:
    """Sizes and renamed weights; such files do not say how deep their target is. Raises ModelError for anything that is
    not an EAGLE-3 head."""
    config = _config(folder)
    layer = config.get("transformer_layer_config", config)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no safetensors weights")
    weights: dict[str, torch.Tensor] = {}
    try:
        for file in files:
            weights.update(load_file(file))
    except SafetensorError as error:
        raise ModelError(f"{folder}: a safetensors file is truncated or damaged: {error}") from error
    if "fc.weight" not in weights or not any(name.startswith(PREFIXES) for name in weights):
        raise ModelError(f"{folder} is not an EAGLE-3 head: it has no fc.weight or no decoder layer")
    size = weights["fc.weight"].shape[0]
    rows = weights["d2t"].shape[0] if "d2t" in weights else None
    width = layer.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"]
    options: dict[str, Any] = {
        "heads": layer["num_attention_heads"],
        "kv_heads": layer.get("num_key_value_heads") or layer["num_attention_heads"],
        "width": width,
        "inner_size": layer["intermediate_size"],
        "theta": (layer.get("rope_parameters") or {}).get("rope_theta") or layer.get("rope_theta") or 10000.0,
        "eps": layer.get("rms_norm_eps", 1e-5),
        "own_head": "lm_head.weight" in weights,
        "draft_vocab_size": rows,
    }
    ids = config.get("eagle_aux_hidden_state_layer_ids") or (config.get("eagle_config") or {}).get(
        "eagle_aux_hidden_state_layer_ids"
    )
    if ids:
        options["layers"] = list(ids)
    sizes = Sizes(size, int(config.get("vocab_size") or layer["vocab_size"]), num_layers, 16, options)
    kept = {_rename(name): tensor for name, tensor in weights.items() if name not in IGNORED}
    return sizes, {name: t if name == "d2t" else t.float() for name, t in kept.items()}

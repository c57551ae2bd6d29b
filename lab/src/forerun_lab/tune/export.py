"""Exports EAGLE heads to other engines: folders of ``speculators``, which vLLM serves, and of SGLang."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from forerun.core.errors import ConfigError, ModelError
from forerun.core.folders import let_read
from forerun.models.files.checkpoint import CONFIG, read_object, read_tensors
from forerun.models.files.open import resolve
from forerun.models.weights.published import NORMS
from forerun.speculate.draft.heads.eagle import EagleHead

SPECULATORS, SGLANG = "speculators", "sglang"
FORMS = (SPECULATORS, SGLANG)
LAYER = ("hidden_norm.", "input_layernorm.", "post_attention_layernorm.", "mlp.")
ATTENTION = ("q_proj.", "k_proj.", "v_proj.", "o_proj.")
EMBEDDING = "model.embed_tokens.weight"


def export_head(head: str, target: str, out: Path, form: str) -> str:
    """Write an ``eagle`` head made for ``target`` to the folder ``out``. Returns the command that serves both. Raises
    ConfigError for an unknown form or an ``out`` that has a model, ModelError for a head of another target or of a kind
    that those engines do not run, and for a target without safetensors."""
    if form not in FORMS:
        raise ConfigError(f"a head is exported as {' or '.join(FORMS)}, not {form!r}")
    folder = resolve(target)
    if not folder.is_dir():
        raise ModelError(f"{target} is a GGUF file: other engines need its checkpoint folder")
    config = read_object(folder / CONFIG)
    made = EagleHead.load(resolve(head), int(config.get("num_hidden_layers", 0)))
    assert isinstance(made, EagleHead)
    sizes = made.sizes
    for name, value in (
        ("hidden_size", sizes.hidden_size), ("vocab_size", sizes.vocab_size), ("num_hidden_layers", sizes.num_layers),
    ):  # fmt: skip
        if config.get(name) != value:
            raise ModelError(
                f"{head} was made for a target whose {name} is {value}, and {target}'s is {config.get(name)}"
            )
    if made.options.get("mixed"):
        raise ModelError(f"{head} is 'mixed', which is a kind of ours: other engines have no code for it")
    if len(made.layers) != 3 and form == SGLANG:
        raise ModelError(f"{head} reads {len(made.layers)} layers of its target; SGLang's heads read three")
    if sizes.num_layers in made.layers and form == SGLANG:
        raise ModelError(f"{head} reads its target's last hidden state, which SGLang's targets do not give")
    weights = _weights(made, folder, "midlayer." if form == SGLANG else "layers.0.")
    if (out / CONFIG).exists():
        raise ConfigError(f"{out} has a model already: choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    let_read(out / "model.safetensors")
    written = _sglang(made, config) if form == SGLANG else _speculators(made, config, str(folder))
    written |= {name: True for name in NORMS if made.options.get(name)}
    (out / CONFIG).write_text(json.dumps(written, indent=1) + "\n", encoding="utf8")
    if form == SGLANG:
        steps = sizes.depth
        return (
            f"python -m sglang.launch_server --model-path {folder} --speculative-algorithm EAGLE3 "
            f"--speculative-draft-model-path {out} --speculative-num-steps {steps} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {steps + 1}"
        )
    return f"vllm serve {out}"


def _weights(head: EagleHead, target: Path, layer: str) -> dict[str, torch.Tensor]:
    """Tensors by the engines' names, with the target's output layer if the head has none. ``speculators`` also gets the
    target's embedding, which its loader does not read from the target."""
    result: dict[str, torch.Tensor] = {}
    of_target = read_tensors(target)
    for name, tensor in head.tensors.items():
        prefix = layer if name.startswith(LAYER) else f"{layer}self_attn." if name.startswith(ATTENTION) else ""
        result[prefix + name] = (tensor.bfloat16() if tensor.is_floating_point() else tensor).contiguous()
    if "lm_head.weight" not in result:
        result["lm_head.weight"] = of_target.get("lm_head.weight", of_target[EMBEDDING]).bfloat16().contiguous()
    if layer == "layers.0.":
        result["embed_tokens.weight"] = of_target[EMBEDDING].bfloat16().clone()
    if "d2t" in result:
        drafted = torch.zeros(head.sizes.vocab_size, dtype=torch.bool)
        drafted[result["d2t"] + torch.arange(len(result["d2t"]))] = True
        result["t2d"] = drafted
    return result


def _layer(head: EagleHead, target: dict[str, Any]) -> dict[str, Any]:
    """The decoder layer as a Llama config."""
    options = head.options
    return {
        "model_type": "llama",
        "hidden_size": head.sizes.hidden_size,
        "intermediate_size": options["inner_size"],
        "num_attention_heads": options["heads"],
        "num_key_value_heads": options["kv_heads"],
        "head_dim": options["width"],
        "num_hidden_layers": 1,
        "rms_norm_eps": options["eps"],
        "rope_parameters": {"rope_type": "default", "rope_theta": options["theta"]},
        "vocab_size": head.sizes.vocab_size,
        "max_position_embeddings": target.get("max_position_embeddings", 2048),
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }


def _speculators(head: EagleHead, target: dict[str, Any], path: str) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": head.sizes.depth}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": path, "architectures": target.get("architectures", [])},
        },
        "transformer_layer_config": _layer(head, target),
        "draft_vocab_size": head.options.get("draft_vocab_size") or head.sizes.vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(head.layers),
        "norm_before_residual": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def _sglang(head: EagleHead, target: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer(head, target),
        "rope_theta": head.options["theta"],
        "draft_vocab_size": head.options.get("draft_vocab_size") or head.sizes.vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(head.layers),
        "eagle_config": {
            # SGLang counts the layer that outputs a state, from 0; vLLM and we count the layers before it.
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in head.layers],
            "use_aux_hidden_state": True,
        },
        "bos_token_id": target.get("bos_token_id"),
        "eos_token_id": target.get("eos_token_id"),
        "torch_dtype": "bfloat16",
    }

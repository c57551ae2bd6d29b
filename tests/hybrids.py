"""Tiny random models of layers with state and layers of attention."""

import json

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tiny import ALPHABET, CONTEXT, EOS, save_tokenizer

FULL, LINEAR = "full_attention", "linear_attention"
SIZES = {
    "vocab_size": len(ALPHABET), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": CONTEXT,
    "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
KINDS = {
    "lfm2": {"layer_types": ["conv", FULL, "conv", "conv"], "head_dim": 8, "tie_word_embeddings": False},
    "qwen3_5_text": {
        "layer_types": [LINEAR, FULL, LINEAR, LINEAR],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "tie_word_embeddings": True,
    },
    "granitemoehybrid": {
        "layer_types": [LINEAR, FULL, LINEAR, LINEAR],
        "mamba_n_heads": 4,
        "mamba_d_head": "auto",
        "mamba_d_state": 8,
        "mamba_n_groups": 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
        "head_dim": 8,
        "residual_multiplier": 0.8,
        "embedding_multiplier": 1.3,
        "attention_multiplier": 0.3,
        "logits_scaling": 0.5,
        "tie_word_embeddings": True,
    },
    "falcon_h1": {
        "num_hidden_layers": 3,
        "head_dim": 8,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "key_multiplier": 0.6,
        "ssm_multipliers": [0.7, 1.1, 0.9, 1.2, 0.8],
        "mlp_multipliers": [0.8, 0.9],
    },
    "nemotron_h": {
        "layers_block_type": [LINEAR, "mlp", FULL, LINEAR],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
    },
}
"""By ``model_type``: what differs from ``SIZES``."""
MIXTURES = {
    "lfm2_moe": {**KINDS["lfm2"], **EXPERTS, "num_dense_layers": 1},
    "qwen3_5_moe_text": {**KINDS["qwen3_5_text"], **EXPERTS, "shared_expert_intermediate_size": 24},
    "granitemoehybrid-experts": {
        **KINDS["granitemoehybrid"], "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24,
    },
    "nemotron_h-experts": {
        **KINDS["nemotron_h"], "layers_block_type": [LINEAR, "moe", FULL, "moe"], "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24,
    },
}  # fmt: skip
"""Some layers have experts."""
KINDS |= MIXTURES


def hybrid(kind, **options):
    """A random model whose logits are peaked enough that a wrong state changes its choices."""
    torch.manual_seed(list(KINDS).index(kind) % 2)
    config = AutoConfig.for_model(kind.removesuffix("-experts"), **{**SIZES, **KINDS[kind], **options})
    module = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.5 if "conv" in name else 0.3)
            elif "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            else:
                torch.nn.init.uniform_(parameter, -1.0, 1.0)
    module.tie_weights()
    return module


def save_hybrid(kind, folder, **options):
    hybrid(kind, **options).save_pretrained(folder)
    save_tokenizer(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token": EOS}))  # else Qwen's classes add a token
    return str(folder)

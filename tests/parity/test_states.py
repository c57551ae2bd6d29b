"""Models that keep state beside keys and values: each is refused by what its config says, and, where that says nothing,
by what its modules read; however small its weights are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from forerun.core.errors import ModelError
from forerun.models import sanity
from forerun.models.load import load_model

SIZES = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0, "num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 32,
}  # fmt: skip
LINEAR, CONV, FULL = "linear_attention", "conv", "full_attention"
HEADS = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2, "mamba_d_state": 8}
GDN = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": [LINEAR, FULL], "shared_expert_intermediate_size": 32,
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "bailing_hybrid": ({}, LINEAR, "x"),
    "bamba": ({**HEADS, "attn_layer_indices": [1]}, LINEAR, "x"),
    "falcon_h1": ({"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}, "hybrid", "x"),
    "falcon_mamba": ({"state_size": 4}, LINEAR, "x"),
    "granitemoehybrid": ({**HEADS, "layer_types": [LINEAR, FULL]}, LINEAR, "x"),
    "inkling_text": ({}, "hybrid", "x"),
    "jamba": ({"mamba_d_state": 4, "attn_layer_period": 2, "attn_layer_offset": 1}, LINEAR, "x"),
    "kimi_linear": ({}, LINEAR, "x"),
    "lara_mini": ({}, LINEAR, "x"),
    "lfm2": ({"layer_types": [CONV, FULL]}, CONV, "x"),
    "lfm2_moe": ({"layer_types": [CONV, FULL]}, CONV, "x"),
    "lfm3": ({"layer_types": [CONV, FULL]}, CONV, "x"),
    "mamba": ({"state_size": 4}, LINEAR, "x"),
    "mamba2": ({"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2}, LINEAR, "x"),
    "minimax": ({"layer_types": [LINEAR, FULL]}, LINEAR, "x"),
    "nemotron_h": ({}, LINEAR, "x"),
    "olmo_hybrid": ({"layer_types": [LINEAR, FULL]}, LINEAR, "x"),
    "qwen3_5_moe_text": (GDN, LINEAR, "x"),
    "qwen3_5_text": (GDN, LINEAR, "x"),
    "qwen3_next": (GDN, LINEAR, "x"),
    "qwen4_exp_text": ({}, LINEAR, "x"),
    "recurrent_gemma": ({"block_types": ["recurrent", "attention"]}, LINEAR, "x"),
    "rwkv": ({"attention_hidden_size": 32}, "", "x"),
    "xlstm": ({"num_heads": 4}, "", "x"),
    "zamba": ({"layers_block_type": ["linear_attention", "hybrid"]}, "hybrid", "x"),
    "zamba2": ({"layers_block_type": ["linear_attention", "hybrid"]}, "hybrid", "x"),
    "zaya": ({}, "hybrid", "x"),
}  # fmt: skip

"""Random checkpoints of the described architectures."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Mistral4ForCausalLM

from tiny import ALPHABET, save_checkpoint

TOKENS = len(ALPHABET)
SIZES = {
    "vocab_size": TOKENS, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "intermediate_size": 72, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
TYPES = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 7}
TWO_BASES = {"rope_parameters": {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}}  # fmt: skip
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}
GROWING = {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 11}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
YARN_AND_PLAIN = {"rope_parameters": {
    "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}}  # fmt: skip
GRANITE = {
    "embedding_multiplier": 1.3, "attention_multiplier": 0.3, "residual_multiplier": 0.4, "logits_scaling": 2.5,
}  # fmt: skip
STRETCHED = {"rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4}}
CASES = {
    "gemma2": ("gemma2", {**TYPES, **CAPS, "query_pre_attn_scalar": 24}),
    "gemma2-untied": ("gemma2", {**TYPES, "head_dim": 24, "attention_bias": True, "tie_word_embeddings": False}),
    "gemma3": ("gemma3_text", {**TYPES, **TWO_BASES, "query_pre_attn_scalar": 24}),
    "gemma3-cap": ("gemma3_text", {"sliding_window_pattern": 2, "sliding_window": 5, "final_logit_softcapping": 3.0}),
    "phi3": ("phi3", {"sliding_window": 9}),
    "phi3-partial": ("phi3", {**PARTIAL, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", {}),
    "olmo2-tied": ("olmo2", {"tie_word_embeddings": True, "attention_bias": True}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 11}),
    "mixtral-tied": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
                                "norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 6}),
    "qwen3_moe-some": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
                                     "norm_topk_prob": False, "mlp_only_layers": [1]}),
    "granite": ("granite", {**GRANITE, "tie_word_embeddings": True}),
    "granite-biases": ("granite", {**GRANITE, "attention_bias": True, "mlp_bias": True}),
    "olmo3": ("olmo3", {**TYPES, **YARN_AND_PLAIN}),
    "exaone4": ("exaone4", TYPES),
    "exaone4-full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3,
                                 "tie_word_embeddings": True}),
    "glm4": ("glm4", {"attention_bias": True, "rope_parameters": HALF}),
    "hunyuan": ("hunyuan_v1_dense", {**STRETCHED, "tie_word_embeddings": True}),
    "ernie4_5": ("ernie4_5", {"use_bias": True}),
    "ernie4_5-tied": ("ernie4_5", {"tie_word_embeddings": True}),
    "seed_oss": ("seed_oss", {"attention_bias": True}),
    "apertus": ("apertus", {"rope_parameters": YARN}),
    "cohere2": ("cohere2", {**TYPES, "logit_scale": 0.3}),
    "cohere2-biases": ("cohere2", {**TYPES, "attention_bias": True, "tie_word_embeddings": False}),
    "starcoder2": ("starcoder2", {"use_bias": True, "sliding_window": 9, "tie_word_embeddings": True}),
    "starcoder2-bare": ("starcoder2", {"use_bias": False, "sliding_window": None, "tie_word_embeddings": False}),
    "gpt_oss": ("gpt_oss", {**TYPES, "num_local_experts": 5, "num_experts_per_tok": 2, "swiglu_limit": 0.7}),
    "ministral3": ("ministral3", {"sliding_window": None, "rope_parameters": {**YARN, **GROWING}}),
}  # fmt: skip
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": "auto", "mamba_d_state": 8, "num_local_experts": 0,
    "shared_intermediate_size": 56,
}  # fmt: skip
FALCON = {"mamba_d_ssm": 48, "mamba_n_heads": 4, "mamba_d_head": 12, "mamba_d_state": 8}
MULTIPLIERS = {
    "embedding_multiplier": 1.7, "lm_head_multiplier": 0.6, "key_multiplier": 0.4, "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 1.2, "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.9, "mlp_multipliers": [0.6, 1.5],
    "ssm_multipliers": [0.7, 1.1, 0.5, 1.4, 0.8],
}  # fmt: skip
NEMOTRON = {
    "mamba_num_heads": 4, "mamba_head_dim": 12, "ssm_state_size": 8, "n_groups": 2,
    "time_step_min": 1e-30,  # transformers keeps time steps above it in a prompt, and not behind it
}  # fmt: skip
HYBRIDS = {
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"], "conv_bias": True}),
    "lfm2-wide": ("lfm2", {"layer_types": ["conv", "conv", "full_attention"], "block_auto_adjust_ff_dim": True,
                           "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.3, "conv_L_cache": 5}),
    "qwen3_5": ("qwen3_5_text", {"layer_types": ["linear_attention", "full_attention", "linear_attention"], **DELTA}),
    "qwen3_5-grouped": ("qwen3_5_text", {"layer_types": ["full_attention", "linear_attention", "full_attention"],
                                         **DELTA, "linear_num_key_heads": 4, "tie_word_embeddings": True}),
    "granite-h": ("granitemoehybrid", {"layer_types": ["linear_attention", "full_attention", "linear_attention"],
                                       **MAMBA, **GRANITE, "tie_word_embeddings": True}),
    "granite-h-grouped": ("granitemoehybrid", {
        "layer_types": ["linear_attention", "linear_attention", "full_attention"], **MAMBA, **GRANITE,
        "mamba_n_groups": 2, "position_embedding_type": "rope", "mamba_proj_bias": True, "mamba_conv_bias": False,
    }),
    "bamba": ("bamba", {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 2}),
    "falcon_h1": ("falcon_h1", {**FALCON, **MULTIPLIERS, "tie_word_embeddings": True}),
    "falcon_h1-normed": ("falcon_h1", {
        **FALCON, **MULTIPLIERS, "mamba_n_groups": 2, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
        "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "projectors_bias": True,
    }),
    "nemotron_h": ("nemotron_h", {"layers_block_type": ["linear_attention", "full_attention", "mlp"], **NEMOTRON}),
    "nemotron_h-biases": ("nemotron_h", {
        "layers_block_type": ["mlp", "linear_attention", "full_attention"], **NEMOTRON, "use_bias": True,
        "use_conv_bias": False, "mlp_bias": True,
    }),
}  # fmt: skip
"""Some layers keep a state."""
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_experts": 5}
SHARED_EXPERTS = {
    "lfm2_moe": ("lfm2_moe", {"layer_types": ["conv", "full_attention", "conv"], **EXPERTS, "num_dense_layers": 1,
                              "routed_scaling_factor": 1.3}),
    "lfm2_moe-bare": ("lfm2_moe", {"layer_types": ["full_attention", "conv", "conv"], **EXPERTS, "num_dense_layers": 0,
                                   "use_expert_bias": False, "norm_topk_prob": False}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**HYBRIDS["qwen3_5-grouped"][1], **EXPERTS,
                                         "shared_expert_intermediate_size": 24}),
    "granite-h-experts": ("granitemoehybrid", {**HYBRIDS["granite-h"][1], "num_local_experts": 5,
                                               "num_experts_per_tok": 2, "intermediate_size": 40}),
    "nemotron_h-experts": ("nemotron_h", {
        **NEMOTRON, "layers_block_type": ["moe", "full_attention", "linear_attention"], "n_routed_experts": 5,
        "num_experts_per_tok": 2, "moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 24,
        "routed_scaling_factor": 2.5,
    }),
}  # fmt: skip
"""Experts beside an MLP, or with weights that are sigmoids. Layers keep a state."""
HYBRIDS |= SHARED_EXPERTS
CASES["granitemoe"] = ("granitemoe", {**GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2})
CASES["granitemoeshared"] = ("granitemoeshared", {**CASES["granitemoe"][1], "shared_intermediate_size": 40})
CASES["granite-h-dense"] = ("granitemoehybrid", {
    "layer_types": ["full_attention"] * 3, **MAMBA, **GRANITE, "position_embedding_type": "rope",
})  # fmt: skip
CASES |= HYBRIDS
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6, "sliding_window": 7}
EMBEDS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": TOKENS}
PLAIN = {"hidden_size_per_layer_input": 0}
UNEVEN = {
    "gemma4": ("gemma4_text", {**ALTERNATING, **EMBEDS, "global_head_dim": 32, "num_kv_shared_layers": 2,
                               "use_double_wide_mlp": True, "final_logit_softcapping": 3.0}),
    "gemma4-dense": ("gemma4_text", {**TYPES, **PLAIN, "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
                                     "global_head_dim": 32, "num_global_key_value_heads": 1,
                                     "attention_k_eq_v": True}),
    "gemma4-experts": ("gemma4_text", {**ALTERNATING, **PLAIN, "global_head_dim": 32, "num_global_key_value_heads": 1,
                                       "attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 5,
                                       "top_k_experts": 2, "moe_intermediate_size": 40}),
}  # fmt: skip
"""Layers have sizes of their own, or read others' keys and values."""
CASES |= UNEVEN
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
LLAMAS = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-eps": ("llama", {"rms_norm_eps": 0.3, "head_dim": 10}),
    "mistral": ("mistral", {"sliding_window": 7, "head_dim": 24}),
    "mistral-whole": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-biases": ("qwen3", {"attention_bias": True, "use_sliding_window": True, "sliding_window": 6,
                               "max_window_layers": 2}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "smollm3-window": ("smollm3", {**TYPES, "no_rope_layers": [1, 0, 1], "use_sliding_window": True}),
}  # fmt: skip
CASES |= LLAMAS
LATENT = {
    "num_key_value_heads": 4, "head_dim": 8, "kv_lora_rank": 24, "q_lora_rank": None, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "moe_intermediate_size": 20, "n_routed_experts": 8, "n_shared_experts": 2,
    "num_experts_per_tok": 3, "routed_scaling_factor": 1.5,
}  # fmt: skip
MSCALES = {"mscale": 0.8, "mscale_all_dim": 0.6}
LATENTS = {
    "deepseek_v2": ("deepseek_v2", {**LATENT, "rope_parameters": {**YARN, **MSCALES}, "first_k_dense_replace": 1,
                                    "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
    "deepseek_v2-lite": ("deepseek_v2", {**LATENT, "routed_scaling_factor": 1.0, "mlp_bias": True,
                                         "attention_bias": True}),
    "deepseek_v3": ("deepseek_v3", {**LATENT, "q_lora_rank": 20, "first_k_dense_replace": 1, "n_group": 4,
                                    "topk_group": 2, "rope_parameters": {**YARN, **MSCALES}, "attention_bias": True}),
    "deepseek_v3-halves": ("deepseek_v3", {**LATENT, "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1,
                                           "norm_topk_prob": False, "rope_interleave": False}),
    "glm4_moe_lite": ("glm4_moe_lite", {**LATENT, "q_lora_rank": 20, "n_shared_experts": 1, "rms_norm_eps": 1e-3}),
    "mistral4": ("mistral4", {**LATENT, "head_dim": 20, "q_lora_rank": 20, "n_group": 2, "topk_group": 1,
                              "rope_parameters": {**YARN, **GROWING, "mscale": 1.0, "mscale_all_dim": 1.0}}),
}  # fmt: skip
"""The cache has a latent of each token."""
CASES |= LATENTS
MAIN = (
    "gemma2", "gemma3", "phi3-partial", "olmo2", "mixtral", "qwen3_moe-some", "granite", "olmo3", "exaone4", "glm4",
    "hunyuan", "ernie4_5", "seed_oss", "apertus", "cohere2", "starcoder2", "gpt_oss", "ministral3", "lfm2",
    "gemma4", "gemma4-experts", "lfm2_moe", "qwen3_5_moe", "granite-h-experts", "bamba", "falcon_h1", "nemotron_h",
    "nemotron_h-experts", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4",
)  # fmt: skip
"""One of each beside Llama's family."""


def save_described(name, folder, **more):
    """As transformers saves it, float32, with the tokenizer of ``tiny.py``; ``more`` differs in its config.
    Returns the module."""
    kind, options = CASES[name]
    late = {*SHARED_EXPERTS, "bamba"}  # the seeds of others stay
    early = [each for each in CASES if each not in LATENTS]
    last = ["gemma4-experts", *(name for name in early if name.startswith(("falcon", "nemotron")))]
    order = sorted(
        early,
        key=lambda each: (
            each in last and last.index(each) + 1,
            each in late,
            each in LLAMAS,
            each.startswith("granite-h"),
            each,
        ),
    )
    order += LATENTS
    torch.manual_seed(order.index(name))
    config = AutoConfig.for_model(kind, **{**SIZES, **options, **more})
    module = Mistral4ForCausalLM(config) if kind == "mistral4" else AutoModelForCausalLM.from_config(config)
    for part, parameter in module.named_parameters():
        around_one = part.endswith("norm.weight") and not name.startswith(("gemma2", "gemma3", "qwen3_5_moe"))
        around_one |= part.endswith(("layernorm_1.weight", "layernorm_2.weight", "per_expert_scale"))
        torch.nn.init.normal_(parameter, 4.0 if part.endswith("router.scale") else float(around_one), 0.2)
    for part, buffer in module.named_buffers():
        if part.endswith("layer_scalar"):
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
        elif part.endswith(("expert_bias", "correction_bias")):
            torch.nn.init.normal_(buffer, 0.0, 0.5)
    module.tie_weights()
    save_checkpoint(module, folder)
    return module

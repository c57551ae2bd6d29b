"""Every described architecture out of a GGUF file: written here from a checkpoint by the names that the gguf package
gives, and with the order of rows and the numbers in norms that llama.cpp's converter has."""

import json
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kinds
from transformers import AutoConfig, AutoModelForCausalLM, Mistral4ForCausalLM

import one_call
from forerun import LLM, SamplingParams
from forerun.core.errors import ConfigError, ModelError
from forerun.measure.environment import logits
from forerun.models.architectures.spec import bind
from forerun.models.formats import blocks
from forerun.models.gguf_config import FREQUENCIES
from forerun.models.load import KeptConfig, load_model, quick_config, read_config
from forerun.models.modules import read_module
from forerun.models.quantize import error
from forerun.models.tokenizer import load_tokenizer
from gguf_files import TOKENS, VOCABULARY, add, finish
from here import where

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
SIZES = {
    "vocab_size": len(TOKENS), "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 256, "bos_token_id": 1,
    "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
LFM2 = {"layer_types": ["conv", "full_attention", "conv"], "head_dim": 16, "tie_word_embeddings": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
TYPES = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 7}
DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "head_dim": 16, "kv_lora_rank": 32, "q_lora_rank": 64, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 24, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 2,
    "num_experts_per_tok": 3, "routed_scaling_factor": 1.5,
}  # fmt: skip
FALCON = {
    "mamba_n_heads": 4, "mamba_d_state": 16, "embedding_multiplier": 1.7, "lm_head_multiplier": 0.6,
    "key_multiplier": 0.4, "attention_in_multiplier": 0.8, "attention_out_multiplier": 1.2, "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.9, "mlp_multipliers": [0.6, 1.5], "ssm_multipliers": [0.7, 1.1, 0.5, 1.4, 0.8],
}  # fmt: skip
NEMOTRON = {
    "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "head_dim": 16,
    "time_step_min": 1e-30,  # transformers keeps time steps above it in a prompt, and not behind it
}  # fmt: skip
CASES = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama-3.2": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {"head_dim": 16}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
                                "norm_topk_prob": True}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32, "sliding_window": 7, "attn_logit_softcapping": 5.0,
                          "final_logit_softcapping": 3.0}),
    "phi3": ("phi3", {"sliding_window": 9, "head_dim": 16}),
    "phi3-partial": ("phi3", {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                                  "partial_rotary_factor": 0.5}}),
    "olmo2": ("olmo2", {"head_dim": 16}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "granite": ("granite", {"tie_word_embeddings": True, "embedding_multiplier": 1.3, "attention_multiplier": 0.3,
                            "residual_multiplier": 0.4, "logits_scaling": 2.5}),
    "olmo3": ("olmo3", {**TYPES, "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}}),
    "exaone4": ("exaone4", {**TYPES, "rope_parameters": LLAMA3}),
    "glm4": ("glm4", {"attention_bias": True, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}),
    "hunyuan": ("hunyuan_v1_dense", {"tie_word_embeddings": True}),
    "ernie4_5": ("ernie4_5", {"use_bias": True}),
    "seed_oss": ("seed_oss", {"attention_bias": True}),
    "apertus": ("apertus", {"rope_parameters": YARN, "head_dim": 16}),
    "cohere2": ("cohere2", {**TYPES, "logit_scale": 0.3, "head_dim": 16}),
    "gpt_oss": ("gpt_oss", {**TYPES, "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 7.0,
                            "rope_parameters": {**YARN, "truncate": False}}),
    "ministral3": ("ministral3", {"sliding_window": None, "rope_parameters": {
        **YARN, "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 11,
    }}),
    "starcoder2": ("starcoder2", {"use_bias": True, "sliding_window": 9, "head_dim": 16}),
    "lfm2": ("lfm2", {**LFM2, "block_auto_adjust_ff_dim": False}),
    "qwen3_5": ("qwen3_5_text", {**DELTA, "linear_num_key_heads": 4}),
    "qwen3_5-grouped": ("qwen3_5_text", DELTA),
    "lfm2_moe": ("lfm2_moe", {**LFM2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
                              "num_dense_layers": 1}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**DELTA, "linear_num_key_heads": 4, "num_experts": 4, "num_experts_per_tok": 2,
                                         "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56}),
    "granite-h": ("granitemoehybrid", {
        "layer_types": DELTA["layer_types"], "mamba_n_heads": 4, "mamba_d_head": "auto", "mamba_d_state": 16,
        "num_local_experts": 0, "shared_intermediate_size": 96, "embedding_multiplier": 1.3, "head_dim": 16,
        "attention_multiplier": 0.3, "residual_multiplier": 0.4, "logits_scaling": 2.5, "tie_word_embeddings": True,
    }),
    "deepseek_v2": ("deepseek_v2", {**LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4,
                                    "topk_group": 2,
                                    "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}),
    "deepseek_v3": ("deepseek_v3", {**LATENT, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}),
    "mistral4": ("mistral4", {**LATENT, "head_dim": 48, "n_group": 1, "topk_group": 1, "rope_parameters": {
        **YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
        "original_max_position_embeddings": 11,
    }}),
    "falcon_h1": ("falcon_h1", {**FALCON, "head_dim": 16, "mamba_d_ssm": 48, "mamba_d_head": 12}),
    "falcon_h1-normed": ("falcon_h1", {
        "mamba_n_heads": 4, "mamba_d_state": 16, "head_dim": 16, "mamba_n_groups": 2, "mamba_rms_norm": True,
        "mamba_norm_before_gate": False, "mamba_d_ssm": 64, "mamba_d_head": 16,
    }),
    "nemotron_h": ("nemotron_h", {**NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention"]}),
    "nemotron_h_moe": ("nemotron_h", {
        **NEMOTRON, "layers_block_type": ["moe", "full_attention", "linear_attention"], "n_routed_experts": 4,
        "moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 56, "routed_scaling_factor": 2.5,
    }),
}  # fmt: skip
NAMES = {"deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
         "mixtral": "llama", "qwen3_moe": "qwen3moe", "olmo3": "olmo2", "hunyuan_v1_dense": "hunyuan-dense",
         "gpt_oss": "gpt-oss", "ministral3": "mistral3", "qwen3_5_text": "qwen35",
         "lfm2_moe": "lfm2moe", "qwen3_5_moe_text": "qwen35moe",
         "granitemoehybrid": "granitehybrid", "falcon_h1": "falcon-h1"}  # fmt: skip
DELTAS = ("qwen3_5_text", "qwen3_5_moe_text")
MAMBAS = ("granitemoehybrid", "falcon_h1", "nemotron_h")
STATEFUL = ("lfm2", "lfm2_moe", *DELTAS, *MAMBAS)
LATENTS = {"deepseek_v2", "deepseek_v3", "mistral4"}
MIXTURES = {"qwen3_moe", "gpt_oss", "lfm2_moe", "qwen3_5_moe_text", *LATENTS}
"""Beside Mixtral, which is a Llama there."""
SIDE_BY_SIDE = ("llama", "mixtral", "smollm3", "granite", "ministral3", "granitemoehybrid")
"""Whose rotated pairs the converter puts side by side."""
NO_MATRICES = ("conv.weight", "conv1d.weight", "norm.weight", "ssm_a", "ssm_d")
"""Ends of names of what is written with two dimensions, and never in blocks."""
IDS = torch.randint(3, len(TOKENS), (40,), generator=torch.Generator().manual_seed(1)).tolist()


def make(kind, options):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **options})
    module = (Mistral4ForCausalLM(config) if kind == "mistral4" else AutoModelForCausalLM.from_config(config)).eval()
    for name, parameter in module.named_parameters():
        around_one = parameter.dim() == 1 and kind != "gemma2" and not name.endswith("bias")
        torch.nn.init.normal_(parameter, mean=float(around_one), std=0.2)
    for name, buffer in module.named_buffers():
        if name.endswith(("expert_bias", "correction_bias")):
            torch.nn.init.normal_(buffer, std=0.5)
    module.tie_weights()
    return module


def called(config):
    """The name of the architecture."""
    name = NAMES.get(config.model_type, config.model_type)
    return f"{name}_moe" if name == "nemotron_h" and "moe" in config.layer_types else name


def converted(module):
    """Name of a tensor in llama.cpp, and its numbers."""
    config, kind = module.config, module.config.model_type
    arch = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[called(config)]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, weight in module.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads and kind in SIDE_BY_SIDE:
            weight = weight.reshape(heads, 2, len(weight) // heads // 2, -1).transpose(1, 2).reshape(weight.shape)
        if kind == "gemma2" and name.endswith("norm.weight"):
            weight = weight + 1
        if ".act_fn." in name:
            continue  # a list in the metadata
        if kind == "gpt_oss" and (".experts." in name or ".sinks" in name or ".router." in name):
            yield from gpt_oss(name, weight)
        elif name.endswith(".experts.gate_up_proj"):
            at = f"blk.{name.split('.')[2]}."
            gate, up = weight.chunk(2, dim=1)
            yield f"{at}ffn_gate_exps.weight", gate
            yield f"{at}ffn_up_exps.weight", up
        elif name.endswith(("mixer.experts.up_proj", ".experts.down_proj")):
            yield f"blk.{name.split('.')[2]}.ffn_{name.split('.')[-1].split('_')[0]}_exps.weight", weight
        elif name.endswith(".kv_b_proj.weight"):
            heads = weight.unflatten(0, (config.num_attention_heads, -1))
            yield f"blk.{name.split('.')[2]}.attn_k_b.weight", heads[:, : config.qk_nope_head_dim].transpose(1, 2)
            yield f"blk.{name.split('.')[2]}.attn_v_b.weight", heads[:, config.qk_nope_head_dim :]
        elif name.endswith((".expert_bias", ".e_score_correction_bias")):
            yield f"blk.{name.split('.')[2]}.exp_probs_b.bias", weight
        elif kind in STATEFUL:
            yield from stateful(name, weight, config, names)
        else:
            yield names.get_name(name, (".weight", ".bias")), weight
    rope = base_rope(config)
    if rope["rope_type"] == "llama3":
        yield FREQUENCIES, divisors(rope, config.head_dim)


def stateful(name, weight, config, names):
    """What the converter does to models with state: heads in tiles, decays as they multiply, flat convolutions."""
    if "shared_mlp" in name:
        at = f"blk.{name.split('.')[2]}."
        ends, parts = (("ffn_gate", "ffn_up"), weight.chunk(2)) if "input" in name else (("ffn_down",), (weight,))
        yield from ((f"{at}{end}.weight", part) for end, part in zip(ends, parts))
        return
    if config.model_type in DELTAS:
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        width = 1 if ".in_proj_b" in name or ".in_proj_a" in name or weight.dim() == 1 else config.linear_value_head_dim
        order = torch.arange(values * width).view(keys, values // keys, width).transpose(0, 1).flatten()
        before = 2 * keys * config.linear_key_head_dim
        if "in_proj_qkv" in name or "conv1d" in name:
            weight = torch.cat([weight[:before], weight[before:][order]])
        elif "linear_attn.out_proj" in name:
            weight = weight[:, order]
        elif "linear_attn" in name and not name.endswith("norm.weight"):
            weight = weight[order]
        if name.endswith("norm.weight") and "linear_attn.norm" not in name:
            weight = weight + 1
    if name.endswith("A_log"):
        weight = -weight.exp()
    if config.model_type == "falcon_h1":
        weight = weight * multiplier(name, config)
    if config.model_type == "nemotron_h":
        name = name.replace("model.", "backbone.")
    to = names.get_name(name.replace(".dt_bias", ".dt_proj.bias"), (".weight", ".bias"))
    if config.model_type in MAMBAS and name.endswith(("A_log", ".D")):
        weight = weight[:, None]
    elif "mamba.norm" in name or "mixer.norm" in name:
        weight = weight.view(config.n_groups if config.model_type == "nemotron_h" else config.mamba_n_groups, -1)
    yield to, weight.squeeze(1) if "conv" in name and weight.dim() == 3 else weight


def multiplier(name, config):
    """What Falcon-H1's converter multiplies a weight by, in the order of its own conditions."""
    if "in_proj" in name:
        inner, keys = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        sizes = torch.tensor([inner, inner, keys, keys, config.mamba_n_heads])
        return config.ssm_in_multiplier * torch.tensor(config.ssm_multipliers).repeat_interleave(sizes)[:, None]
    factors = {
        "down_proj": config.mlp_multipliers[1], "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * config.attention_in_multiplier, "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier, "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier, "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }  # fmt: skip
    return next((factor for part, factor in factors.items() if f".{part}." in f".{name}"), 1.0)


def gpt_oss(name, weight):
    """Sinks, router and stacked experts: inputs first, outputs of gate and up by turns."""
    at, _, end = f"blk.{name.split('.')[2]}.", *name.rpartition("_" if "_bias" in name else ".")[1:]
    part = name.split(".")[-1].removesuffix("_bias")
    if part == "sinks":
        yield f"{at}attn_sinks.weight", weight
    elif ".router." in name:
        yield f"{at}ffn_gate_inp.{end}", weight
    else:
        kind = "bias" if end == "bias" else "weight"
        outputs = weight if kind == "bias" else weight.transpose(1, 2)
        sides = {"down": outputs} if part == "down_proj" else {"gate": outputs[:, ::2], "up": outputs[:, 1::2]}
        for side, numbers in sides.items():
            yield f"{at}ffn_{side}_exps.{kind}", numbers


def base_rope(config):
    """Of layers without a window."""
    rope = getattr(config, "rope_parameters", PLAIN)
    return rope.get("full_attention", rope)


def divisors(rope, width):
    """By wavelengths, as the model's authors published it."""
    result = []
    for pair in range(width // 2):
        wavelength = 2 * torch.pi * rope["rope_theta"] ** (2 * pair / width)
        long = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
        short = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
        if wavelength < short:
            result.append(1.0)
        elif wavelength > long:
            result.append(rope["factor"])
        else:
            fraction = (rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            result.append(1 / ((1 - fraction) / rope["factor"] + fraction))
    return torch.tensor(result)


def add_state(writer, config, recurrent):
    """The sizes of layers with state."""
    if config.model_type not in (*DELTAS, *MAMBAS):
        return
    if config.model_type == "nemotron_h":
        writer.add_ssm_conv_kernel(config.conv_kernel)
        writer.add_ssm_state_size(config.ssm_state_size)
        writer.add_ssm_group_count(config.n_groups)
        writer.add_ssm_time_step_rank(config.mamba_num_heads)
        writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
        if "moe" in config.layer_types:
            writer.add_expert_count(config.n_routed_experts)
            writer.add_expert_used_count(config.num_experts_per_tok)
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
            writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
            writer.add_expert_weights_norm(config.norm_topk_prob)
            writer.add_expert_weights_scale(config.routed_scaling_factor)
            writer.add_expert_group_count(config.n_group)
        return
    delta = config.model_type in DELTAS
    heads = config.linear_num_value_heads if delta else config.mamba_n_heads
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim if delta else config.mamba_d_conv)
    writer.add_ssm_state_size(config.linear_key_head_dim if delta else config.mamba_d_state)
    writer.add_ssm_group_count(config.linear_num_key_heads if delta else config.mamba_n_groups)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * (config.linear_value_head_dim if delta else config.mamba_d_head))
    if delta:
        writer.add_rope_dimension_sections([2, 1, 1, 0])
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
    elif config.model_type == "granitemoehybrid":
        writer.add_rope_scaling_finetuned(False)


def add_latent(writer, config):
    """The sizes of latent attention, and how its experts are chosen."""
    rank, turned = config.kv_lora_rank, config.qk_rope_head_dim
    writer.kv_data[0][f"{writer.arch}.attention.head_count_kv"].value = 1
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + turned)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + turned)
    writer.add_value_length_mla(config.v_head_dim)
    if config.rope_parameters.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    sigmoid = config.model_type == "deepseek_v3"
    kinds = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(kinds.SIGMOID if sigmoid else kinds.SOFTMAX)
    if (config.n_group or 1) > 1:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def write(module, path, changes=None, experts=Kinds.F32, matrices=Kinds.F32):
    config, kind = module.config, module.config.model_type
    name = called(config)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    inner = {"mlp": config.intermediate_size, "moe": getattr(config, "moe_intermediate_size", 0)}
    some = [inner.get(each, 0) for each in config.layer_types] if kind == "nemotron_h" else config.intermediate_size
    writer.add_feed_forward_length(some)
    writer.add_head_count(config.num_attention_heads)
    recurrent = [each != "full_attention" for each in getattr(config, "layer_types", None) or ()]
    listed = [0 if each else config.num_key_value_heads for each in recurrent]
    own = kind in STATEFUL and kind not in (*DELTAS, "falcon_h1")
    writer.add_head_count_kv(listed if own else config.num_key_value_heads)
    if kind in ("cohere2", "starcoder2", "nemotron_h"):
        names = ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon")
        writer.add_layer_norm_eps(next(getattr(config, name) for name in names if hasattr(config, name)))
    else:
        writer.add_layer_norm_rms_eps(config.norm_eps if kind.startswith("lfm2") else config.rms_norm_eps)
    if kind.startswith("lfm2"):
        writer.add_shortconv_l_cache(config.conv_L_cache)
    add_state(writer, config, recurrent)
    rope = base_rope(config)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    turned = int(width * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(turned)
    if kind in LATENTS:
        add_latent(writer, config)
    elif width != config.hidden_size // config.num_attention_heads:
        writer.add_key_length(width)
        writer.add_value_length(width)
    if kind in ("gemma2", "phi3", "olmo3", "exaone4", "cohere2", "starcoder2", "gpt_oss") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if kind in ("olmo3", "exaone4", "cohere2"):
        writer.add_sliding_window_pattern([each == "sliding_attention" for each in config.layer_types])
    if kind == "cohere2":
        writer.add_logit_scale(config.logit_scale)
    if kind in ("granite", "granitemoehybrid"):
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if kind == "apertus":
        for each in ("alpha_p", "alpha_n", "beta", "eps"):
            values = [getattr(layer.mlp.act_fn, each).item() for layer in module.model.layers]
            getattr(writer, f"add_xielu_{each}")(values)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if kind in {"mixtral", *MIXTURES}:
        routed = config.n_routed_experts if kind in LATENTS else None
        local = kind in ("mixtral", "gpt_oss")
        writer.add_expert_count(routed or (config.num_local_experts if local else config.num_experts))
        writer.add_expert_used_count(config.num_experts_per_tok)
    if kind in MIXTURES:
        expert = config.intermediate_size if kind == "gpt_oss" else config.moe_intermediate_size
        writer.add_expert_feed_forward_length(expert)
    if kind == "qwen3_5_moe_text":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if kind == "lfm2_moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
    if "llama_4_scaling_beta" in rope:
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    for key, value in {**VOCABULARY, **(changes or {})}.items():
        if key in writer.kv_data[0]:
            writer.kv_data[0][key].value = value
        else:
            add(writer, key, value)
    for to, weight in converted(module):
        matrix = (weight.dim() == 2 or ".attn_" in to) and not to.endswith(NO_MATRICES)
        kind = experts if "_exps.weight" in to else matrices if matrix else Kinds.F32
        raw = gguf.quants.quantize(weight.detach().float().contiguous().numpy(), kind)
        writer.add_tensor(to, raw, raw_dtype=kind)
    return finish(writer, path)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Case -> the module, and the GGUF file of it."""
    made = {}

    def get(case):
        if case not in made:
            module = make(*CASES[case])
            made[case] = module, write(module, tmp_path_factory.mktemp(case) / "model.gguf")
        return made[case]

    return get


@pytest.mark.parametrize("case", CASES)
def test_the_logits_are_those_of_the_checkpoint(models, case):
    module, path = models(case)
    llm = LLM(str(path))
    assert llm.model.info.path.startswith("native")
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3)
    with torch.inference_mode():
        expected = module(torch.tensor([IDS])).logits[0].float().log_softmax(-1)
    for index, result in enumerate(llm.generate({"prompt_token_ids": IDS}, params)[0].prompt_logprobs[1:]):
        for token, given in result.items():
            assert given.logprob == pytest.approx(float(expected[index, token]), abs=2e-4)


@pytest.mark.parametrize("case", where(blocks.can_run(), ["qwen3_moe"]))
def test_stacks_of_experts_stay_packed(tmp_path, case):
    module = make(*CASES[case])
    path = write(module, tmp_path / "model.gguf", experts=Kinds.MXFP4)
    for name, weight in module.named_parameters():
        if ".experts." in name:
            raw = gguf.quants.quantize(weight.detach().numpy(), Kinds.MXFP4)
            weight.data = torch.from_numpy(np.array(gguf.quants.dequantize(raw, Kinds.MXFP4)))
    with torch.inference_mode():
        expected = module(torch.tensor([IDS])).logits[0]
    model = LLM(str(path)).model
    assert "MXFP4" in model.info.path
    assert error(expected, logits(model, [IDS])) < 0.03
    assert error(expected, logits(LLM(str(path), quantization="float32").model, [IDS])) < 1e-5


@pytest.mark.parametrize("kind", where(blocks.can_run(), [Kinds.Q8_0, Kinds.Q4_0]))
@pytest.mark.parametrize("case", sorted(LATENTS))
def test_layers_of_heads_stay_packed_in_one_call(tmp_path, case, kind):
    """With the bits of layer by layer; weights are those that gguf reads."""
    module = make(*CASES[case])
    path = write(module, tmp_path / "model.gguf", matrices=kind, experts=kind)
    model = load_model(path, dtype="float32", invariant=True)
    assert model.fused is not None
    assert {layer.kind for layer in model._layers[1].latent.linears()} == {kind.name}
    expected = logits(load_model(path, dtype="float32", quantization="float32"), [IDS])
    off = (logits(model, [IDS]) - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert off.median() < 0.07  # a row of 8-bit inputs may go to another expert
    one_call.check(model)


@pytest.mark.parametrize(
    "case", where(blocks.can_run(), ["llama", "lfm2", "qwen3_5", "granite-h", "falcon_h1-normed", "nemotron_h"])
)
def test_blocks_of_8_bits_in_every_matrix(tmp_path, case):
    """The weights are those that gguf reads, in float64; that inputs are rounded to 8 bits costs what it costs with the
    blocks that llama.cpp rounds them to."""
    module = make(*CASES[case])
    path = write(module, tmp_path / "model.gguf", matrices=Kinds.Q8_0)

    def rounded(numbers):
        raw = gguf.quants.quantize(numbers.detach().float().contiguous().numpy(), Kinds.Q8_0)
        return torch.from_numpy(np.array(gguf.quants.dequantize(raw, Kinds.Q8_0))).to(numbers.dtype)

    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear | torch.nn.Embedding):
            layer.weight.data = rounded(layer.weight)
    module.double()
    with torch.inference_mode():
        expected = module(torch.tensor([IDS])).logits[0]
        assert error(expected, logits(load_model(path, dtype="float32", quantization="float32"), [IDS]).double()) < 1e-5
        for layer in module.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
        theirs = error(expected, module(torch.tensor([IDS])).logits[0])
    assert error(expected, logits(load_model(path, dtype="float32"), [IDS]).double()) < 1.25 * theirs


@pytest.mark.parametrize("case", CASES)
def test_the_config_and_weights_are_those_of_the_checkpoint(models, case):
    module, path = models(case)
    config = read_config(path)
    assert type(config) is type(module.config)
    if module.config.model_type in {"mixtral", *MIXTURES} or case == "nemotron_h_moe":
        with pytest.raises(ModelError, match="only the native path"):  # experts are stacked, latents split by heads
            read_module(path, config, torch.float32, attention=None)
        return
    if case == "falcon_h1":
        return  # its multipliers are in the file's weights
    if case == "qwen3_5-grouped":
        with pytest.raises(ModelError, match="which only the native path computes with"):
            read_module(path, config, torch.float32, attention=None)
        return
    result = dict(read_module(path, config, torch.float32, attention=None).named_parameters())
    for name, weight in module.named_parameters():
        assert torch.allclose(result.pop(name), weight, atol=1e-6), name
    assert result == {}


@pytest.mark.parametrize("case", ["qwen2", "gemma2", "qwen3_moe", "deepseek_v3"])
def test_drafts_change_no_token(models, case):
    _, path = models(case)
    llm = LLM(str(path), speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)
    drafted, plain = (llm.generate({"prompt_token_ids": IDS}, params, speculate=on)[0] for on in (True, False))
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert llm.engine.identity


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("qwen2", {"qwen2.rope.scaling.type": "longrope"}, "scales its rotary frequencies .'longrope'."),
        ("apertus", {"xielu.alpha_p": [0.5]}, "as xielu.alpha_p, not a number for each of 3 layers"),
        ("granite", {"granite.residual_scale": 0.0}, "has 0.0 as granite.residual_scale, not a positive number"),
        ("cohere2", {"cohere2.attention.sliding_window_pattern": [True]}, "has 3 layers, but says of 1"),
        ("qwen3_moe", {"qwen3moe.expert_count": 2**31 - 1}, "has 2147483647 experts by its metadata, and 4 by its"),
        ("mixtral", {"llama.expert_count": 2**31 - 1}, "has 2147483647 experts by its metadata, and 4 by its"),
        ("qwen3_moe", {"qwen3moe.expert_used_count": 9}, "num_experts_per_tok must be an integer"),
        ("gemma2", {"gemma2.attention.sliding_window_pattern": [True]}, "has 3 layers, but says of 1"),
        ("phi3", {"phi3.rope.dimension_count": 7}, "heads of 16 numbers, but 7"),
        ("lfm2", {"lfm2.attention.head_count_kv": [0, 2]}, "has 3 layers, but does not say of each"),
        ("lfm2", {"lfm2.attention.head_count_kv": [1, 2, 0]}, r"layers of \[1, 2\] heads of keys"),
        ("qwen3_5", {"qwen35.ssm.inner_size": 63}, "has 63 numbers in 4 heads"),
        ("granite-h", {"granitehybrid.expert_count": 4}, "granitehybrid.expert_used_count, not a positive integer"),
        ("granite-h", {"granitehybrid.ssm.inner_size": 96}, "has 96 numbers in Mamba-2, 64 in a row"),
        ("falcon_h1", {"falcon-h1.ssm.inner_size": 50}, "has 50 numbers in 4 heads of Mamba-2"),
        ("nemotron_h", {"nemotron_h.feed_forward_length": [0, 96]}, "has 3 layers, but does not say of each what"),
        ("nemotron_h", {"nemotron_h.feed_forward_length": [8, 96, 0]}, "not one number and zeros"),
        ("nemotron_h_moe", {"nemotron_h_moe.moe_latent_size": 32}, "moe_latent_size 32"),
        ("deepseek_v2", {"deepseek2.expert_weights_norm": True}, "True as expert_weights_norm, which no model of Deep"),
        ("deepseek_v3", {"deepseek2.expert_gating_func": 3}, "has 3 as deepseek2.expert_gating_func"),
        ("deepseek_v3", {"deepseek2.rope.dimension_count": 48}, "has heads of 48 numbers, 48 of them turned"),
        ("deepseek_v3", {"deepseek2.attention.kv_lora_rank": 16}, "attn_kv_a_.* has shape .* contradict"),
        ("qwen3_5", {"qwen35.ssm.state_size": 8}, "ssm_conv1d.weight has shape .* contradict"),
    ],
)
def test_what_is_not_read_is_named(tmp_path, models, case, changes, message):
    path = write(models(case)[0], tmp_path / "model.gguf", changes)
    with pytest.raises((ConfigError, ModelError), match=message):
        load_model(path)


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma2", "smollm3"])
def test_layers_are_compared_with_the_tensors_before_a_config_is_made_of_them(tmp_path, models, monkeypatch, case):
    kind = NAMES.get(CASES[case][0], CASES[case][0])
    path = write(models(case)[0], tmp_path / "model.gguf", {f"{kind}.block_count": 2**31 - 1})
    monkeypatch.setattr("transformers.CONFIG_MAPPING", None)
    with pytest.raises(ModelError, match=r"has 2147483647 layers in \d+ tensors"):
        load_model(path)


KEPT = ("llama", "llama-biases", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma2", "phi3", "phi3-partial", "olmo2",
        "smollm3")  # fmt: skip


@pytest.mark.parametrize("case", KEPT)
def test_the_second_start_has_the_same_config(tmp_path, models, monkeypatch, case):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    _, path = models(case)
    expected = read_config(path)
    for _ in range(2):
        config = quick_config(path)
        assert isinstance(config, KeptConfig)
        assert bind(config) == bind(expected)
        for name, value in expected.to_dict().items():
            if name not in ("dtype", "id2label", "label2id", "transformers_version"):
                assert getattr(config, name) == value, name


def test_frequencies_that_transformers_computes_keep_its_config(models):
    assert not isinstance(quick_config(models("llama-3.2")[1]), KeptConfig)


START = """
import sys, json
from forerun import LLM, SamplingParams
llm = LLM(sys.argv[1])
ids = llm.generate("b c", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids
print(json.dumps([ids, sorted({"transformers", "huggingface_hub.errors"} & set(sys.modules))]))
"""


def test_the_second_start_leaves_transformers_alone(models):
    path = models("qwen2")[1]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    expected = LLM(str(path)).generate("b c", params)[0].outputs[0].token_ids  # the first start
    started = subprocess.run([sys.executable, "-c", START, path], capture_output=True, check=True)
    assert json.loads(started.stdout) == [expected, []]


@pytest.mark.parametrize("text", ["", "b c", " c\n\nb ", "<eos>b<eos>", "unknown words"])
def test_the_tokenizer_is_transformers_own(models, text):
    tokenizer = load_tokenizer(models("qwen2")[1])
    full = tokenizer.full
    ids = full.encode(text)
    assert tokenizer.encode(text) == ids
    assert tokenizer.encode(text, add_special_tokens=False) == full.encode(text, add_special_tokens=False)
    for skip in (False, True):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == full.decode(ids, skip_special_tokens=skip)
    assert (len(tokenizer), tokenizer.get_vocab()) == (len(full), full.get_vocab())
    assert tokenizer.all_special_tokens == full.all_special_tokens
    assert tokenizer.eos_token_id == full.eos_token_id
    assert tokenizer.get_added_vocab() == full.get_added_vocab()
    assert tokenizer.convert_ids_to_tokens(ids) == full.convert_ids_to_tokens(ids)

"""What ``config.json`` would say, out of a GGUF file's metadata."""

from __future__ import annotations

import math
from typing import Any

import torch

from forerun.core.config import COUNT, POSITIVE
from forerun.core.errors import ModelError, shown
from forerun.models.architectures.description import Architecture, Recurrence
from forerun.models.architectures.families import (
    APERTUS,
    ARCHITECTURES,
    COHERE2,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    EXAONE4,
    FALCON_H1,
    GEMMA2,
    GEMMA3,
    GEMMA4,
    GPT_OSS,
    GRANITE,
    GRANITE_HYBRID,
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
    LFM2,
    LFM2_MOE,
    LLAMA,
    MINISTRAL3,
    MISTRAL4,
    MIXTRAL,
    NEMOTRON_H,
    OLMO2,
    OLMO3,
    PHI3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_MOE,
    STARCODER2,
)
from forerun.models.architectures.spec import FULL, SLIDING, TILED_HEADS
from forerun.models.formats.gguf_types import FLOATS
from forerun.models.gguf import GGUFFile

READ = {each.gguf: each for each in reversed(ARCHITECTURES.values())} | {f"{NEMOTRON_H.gguf}_moe": NEMOTRON_H}
"""By ``general.architecture``; Mistral and Mixtral are Llamas there, and OLMo 3 an OLMo 2 with windows."""
FREQUENCIES = "rope_freqs.weight"
"""By what Llama 3 divides its rotary frequencies."""
ROUTER = ".ffn_gate_inp.weight"
"""How the name of the layer that chooses experts ends."""
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXTS = 1.0, 4.0, (8192, *(2**power for power in range(11, 18)))
"""Its other parameters, which files leave out, and the lengths of a text that it may have been stretched from."""
LARGEST = {GEMMA2.gguf: 46, GEMMA3.gguf: 62}
"""The depth of the Gemma (27B) whose scores are scaled by another width than a head's."""
GPT_OSS_PERIOD = 2
OLMO3_PERIOD = EXAONE4_PERIOD = COHERE2_PERIOD = 4
QWEN3_5_PERIOD = 4
SOFTMAX, SIGMOID = 1, 2
"""As ``expert_gating_func``."""
GEMMA2_PERIOD, GEMMA3_PERIOD, GEMMA3_LOCAL_BASE = 2, 6, 10000.0
"""Of llama.cpp's Gemmas, which their files leave out: every so many layers one without a window, and the rotary base of
those with one."""


ENDS = frozenset(
    ("<|im_end|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>",
     "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>")
)  # fmt: skip
"""Tokens that end a turn or a text by their name, as in llama.cpp: most files name but one of a model's ends."""


class Keys:
    """A file's numbers, by their names behind the architecture's. Raises ModelError for what is none."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = file.metadata["general.architecture"]

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if not COUNT.permits(value):
            raise ModelError(
                f"{self.file.path} has {shown(value)} as {self.architecture}.{key}, not a positive integer"
            )
        return value

    def each(self, key: str, layers: int, default: int | None = None) -> list[int]:
        """One for each layer; where they may not differ, the same for all."""
        value = self.get(key)
        if self.architecture != GEMMA4.gguf or not isinstance(value, list):
            return [self.whole(key, default)] * layers
        if len(value) != layers or not all(isinstance(each, int) and each > 0 for each in value):
            raise ModelError(f"{self.file.path} has {shown(value)} as {self.architecture}.{key}, for {layers} layers")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if not POSITIVE.permits(value):
            raise ModelError(f"{self.file.path} has {shown(value)} as {self.architecture}.{key}, not a positive number")
        return float(f"{value:.7g}")  # written in single precision


def read_config(file: GGUFFile) -> dict[str, Any]:
    """Raises ModelError for a model of an architecture, or of a kind, that is not read here."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in READ:
        raise ModelError(f"{file.path} holds a model of architecture {shown(architecture)}; only {', '.join(READ)} "
                         "are read from GGUF")  # fmt: skip
    keys, result = Keys(file), READ[architecture]
    predicting = keys.get("nextn_predict_layers") or 0
    layers = keys.whole("block_count") - predicting
    if not layers > 0:
        raise ModelError(f"{file.path} has {layers} layers before {predicting} for multi-token prediction")
    if layers > len(file.tensors):
        raise ModelError(f"{file.path} has {layers} layers in {len(file.tensors)} tensors")
    vocabulary, (hidden, heads, width) = _vocabulary(file), _widths(file, keys)
    config: dict[str, Any] = {
        "architectures": [result.causal],
        "model_type": result.model_type,
        "hidden_size": hidden,
        "intermediate_size": _inner(keys, layers),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(keys, heads),
        "head_dim": width,
        "max_position_embeddings": keys.whole("context_length"),
        result.norms.eps: _epsilon(keys, centred=result.norms.centred),
        "vocab_size": vocabulary,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
    }
    config |= {"num_nextn_predict_layers": predicting} if predicting else {}
    config |= _biases(file, result, layers)
    if result.attention.rotary != "none":
        config["rope_parameters"] = {} if architecture == GEMMA4.gguf else _rope(file, keys, width)
    config |= _further(file, keys, config)
    return config | {"pad_token_id": None} | _special_ids(file, vocabulary)  # transformers has defaults


def _inner(keys: Keys, layers: int) -> int:
    """Of the MLPs; Nemotron-H lists them, with 0 for layers without one. Raises ModelError."""
    given = keys.get("feed_forward_length")
    if READ[keys.architecture] is not NEMOTRON_H or not isinstance(given, list):
        return keys.each("feed_forward_length", layers, keys.get("expert_feed_forward_length"))[0]
    counts = {count for count in given if count != 0} or {1}
    if len(counts) != 1 or not COUNT.permits(count := min(counts)):
        raise ModelError(f"{keys.file.path} has {shown(given)} as {keys.architecture}.feed_forward_length, not one "
                         "number and zeros")  # fmt: skip
    return count


def _epsilon(keys: Keys, *, centred: bool) -> float:
    """Nemotron-H's files may have that of RMS norms under the other name."""
    key = f"attention.layer_norm_{'' if centred else 'rms_'}epsilon"
    other = READ[keys.architecture] is NEMOTRON_H and keys.get(key) is None
    return keys.positive("attention.layer_norm_epsilon" if other else key)


def _kv_heads(keys: Keys, heads: int) -> int:
    """Of the layers with attention; a list has 0 for others. Raises ModelError."""
    given = keys.get("attention.head_count_kv")
    if isinstance(given, list) and keys.architecture == GEMMA4.gguf:
        return keys.each("attention.head_count_kv", len(given))[0]  # layers have counts of their own
    if not isinstance(given, list):
        return keys.whole("attention.head_count_kv", heads)
    counts = {count for count in given if count != 0}
    if len(counts) != 1 or not isinstance(count := min(counts), int) or not 0 < count <= heads:
        raise ModelError(f"{keys.file.path} has layers of {shown(sorted(counts))} heads of keys, not all of one number")
    return count


def _biases(file: GGUFFile, of: Architecture, layers: int) -> dict[str, bool]:
    """The config keys that say whether projections have biases."""
    parts = (
        (of.attention.bias, of.latent.down if of.latent is not None else of.attention.qkv[0]),
        (of.attention.out_bias, of.attention.out),
        (of.mlp.bias, of.mlp.down),
    )
    return {
        key: any(f"blk.{index}.{name.gguf}.bias" in file.tensors for index in range(layers))
        for key, name in parts if key not in (None, "always")
    }  # fmt: skip


def _further(file: GGUFFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """What one architecture alone has."""
    kind = keys.architecture
    if kind == GEMMA2.gguf:
        return _gemma(keys, config, GEMMA2_PERIOD) | {
            "attn_logit_softcapping": _cap(keys, "attn_logit_softcapping"),
        }
    if kind == GEMMA3.gguf:
        local = keys.positive("rope.freq_base_swa", GEMMA3_LOCAL_BASE)
        base = {**config["rope_parameters"], "rope_theta": keys.positive("rope.freq_base", 1e6)}
        rope = {FULL: base, SLIDING: {"rope_type": "default", "rope_theta": local}}
        return _gemma(keys, config, GEMMA3_PERIOD) | {"rope_parameters": rope}
    if kind == GEMMA4.gguf:
        return _gemma4(file, keys, config)
    if kind in (PHI3.gguf, STARCODER2.gguf):
        return {"sliding_window": _window(keys)}
    if kind == OLMO2.gguf and keys.get("attention.sliding_window"):
        rope = {FULL: config["rope_parameters"], SLIDING: {
            "rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"],
        }}  # fmt: skip
        return _windows(keys, config, OLMO3_PERIOD) | {
            "architectures": [OLMO3.causal], "model_type": OLMO3.model_type, "rope_parameters": rope,
        }  # fmt: skip
    if kind == EXAONE4.gguf:
        return _windows(keys, config, EXAONE4_PERIOD)
    if kind == COHERE2.gguf:
        return _windows(keys, config, COHERE2_PERIOD) | {"logit_scale": keys.positive("logit_scale")}
    if kind in (GRANITE.gguf, GRANITE_MOE.gguf, GRANITE_HYBRID.gguf):
        return {
            **(_granite_hybrid(keys, config) if kind == GRANITE_HYBRID.gguf else _granite_experts(keys)),
            "embedding_multiplier": keys.positive("embedding_scale", 1.0),
            "residual_multiplier": keys.positive("residual_scale", 1.0),
            "attention_multiplier": keys.positive("attention.scale", config["head_dim"] ** -0.5),
            "logits_scaling": keys.positive("logit_scale", 1.0),
        }
    if kind == FALCON_H1.gguf:
        return _mamba(keys, config, FALCON_H1) | {
            "mamba_d_ssm": keys.whole("ssm.inner_size"), "mamba_norm_before_gate": False,
            "mamba_rms_norm": _has(keys, config, "ssm_norm.weight"),
            "projectors_bias": _has(keys, config, "ssm_out.bias"),
        }  # fmt: skip
    if READ[kind] is NEMOTRON_H:
        return _nemotron_h(keys, config)
    if kind == GPT_OSS.gguf:
        return {
            **_windows(keys, config, GPT_OSS_PERIOD), **_experts(keys, "num_local_experts"),
            "rope_parameters": {**config["rope_parameters"], "truncate": False},
            "intermediate_size": keys.whole("expert_feed_forward_length"),
        }  # fmt: skip
    if kind == MINISTRAL3.gguf:
        grows = keys.get("attention.temperature_scale")
        scale = {"llama_4_scaling_beta": keys.positive("attention.temperature_scale")} if grows else {}
        return {"sliding_window": _window(keys), "rope_parameters": {**config["rope_parameters"], **scale}}
    if READ[kind].latent is not None:
        return _latent(file, keys, config)
    if kind == APERTUS.gguf:
        return {"hidden_act": "xielu"}
    if kind in (LFM2.gguf, LFM2_MOE.gguf):
        return (_lfm2_moe(keys, config) if kind == LFM2_MOE.gguf else {}) | {
            "layer_types": _mixed(keys, config, LFM2), "conv_L_cache": keys.whole("shortconv.l_cache"),
            "block_auto_adjust_ff_dim": False,
        }  # fmt: skip
    if kind == QWEN3_5.gguf:
        return _qwen3_5(keys, config)
    if kind == QWEN3_5_MOE.gguf:
        return _qwen3_5(keys, config) | _experts(keys, "num_experts") | {
            "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
            "shared_expert_intermediate_size": keys.whole("expert_shared_feed_forward_length"),
        }  # fmt: skip
    if kind == QWEN3_MOE.gguf:
        return _experts(keys, "num_experts") | {
            "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
    if kind == LLAMA.gguf and keys.get("expert_count"):
        result = {"architectures": [MIXTRAL.causal], "model_type": MIXTRAL.model_type, "sliding_window": None}
        return result | _experts(keys, "num_local_experts")
    return {}


def _latent(file: GGUFFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Of latent attention, and of the experts beside it."""
    if any(name.endswith("attn_kv_b.weight") for name in file.tensors):
        raise ModelError(f"{file.path} has keys and values of latents in one tensor, attn_kv_b, as older converters "
                         "wrote it: convert the model again (attn_k_b and attn_v_b are read)")  # fmt: skip
    turned, whole = config["head_dim"], keys.whole("attention.key_length_mla")
    func, rope = keys.get("expert_gating_func") or SOFTMAX, dict(config["rope_parameters"])
    mistral, normalised = keys.architecture == MISTRAL4.gguf, bool(keys.get("expert_weights_norm"))
    kind = MISTRAL4 if mistral else DEEPSEEK_V3 if func == SIGMOID else DEEPSEEK_V2
    wrong = func not in (SOFTMAX, SIGMOID) or (mistral and func == SIGMOID)
    if wrong or (kind is DEEPSEEK_V2 and normalised):
        raise ModelError(f"{file.path} has {shown(func)} as {keys.architecture}.expert_gating_func and "
                         f"{normalised} as expert_weights_norm, which no model of {kind.causal} has")  # fmt: skip
    if not turned < whole:
        raise ModelError(f"{file.path} has heads of {whole} numbers, {turned} of them turned")
    if rope["rope_type"] == "yarn":  # its attention_factor is that of mscale over mscale_all_dim, which are one number
        raised = 10.0 * float(keys.get("rope.scaling.yarn_log_multiplier") or 0.0)
        if raised:
            rope |= {"mscale": raised, "mscale_all_dim": raised}
            del rope["attention_factor"]
    if mistral:
        rope["partial_rotary_factor"] = turned / whole
        if keys.get("attention.temperature_scale"):
            rope["llama_4_scaling_beta"] = keys.positive("attention.temperature_scale")
    dense, groups = keys.get("leading_dense_block_count"), keys.get("expert_group_count") or 1
    return _experts(keys, "n_routed_experts") | {
        "architectures": [kind.causal], "model_type": kind.model_type, "rope_parameters": rope,
        "num_key_value_heads": config["num_attention_heads"], "head_dim": whole if mistral else turned,
        "q_lora_rank": keys.whole("attention.q_lora_rank") if keys.get("attention.q_lora_rank") else None,
        "kv_lora_rank": keys.whole("attention.kv_lora_rank"), "qk_rope_head_dim": turned,
        "qk_nope_head_dim": whole - turned, "v_head_dim": keys.whole("attention.value_length_mla"),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"), "norm_topk_prob": normalised,
        "n_shared_experts": keys.whole("expert_shared_count"),
        "routed_scaling_factor": keys.positive("expert_weights_scale", 1.0),
        "first_k_dense_replace": 0 if dense == 0 else keys.whole("leading_dense_block_count"),
        "n_group": groups, "topk_group": keys.whole("expert_group_used_count", 1),
        "topk_method": "greedy" if groups == 1 else "group_limited_greedy",
    }  # fmt: skip


def _lfm2_moe(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    held = [f"blk.{index}.exp_probs_b.bias" in keys.file.tensors for index in range(config["num_hidden_layers"])]
    dense = keys.get("leading_dense_block_count")
    return _experts(keys, "num_experts") | {
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"), "use_expert_bias": any(held),
        "num_dense_layers": 0 if dense == 0 else keys.whole("leading_dense_block_count"), "norm_topk_prob": True,
        "routed_scaling_factor": keys.positive("expert_weights_scale", 1.0),
    }  # fmt: skip


def _qwen3_5(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    heads, groups, inner = (keys.whole(f"ssm.{key}") for key in ("time_step_rank", "group_count", "inner_size"))
    if inner % heads:
        raise ModelError(f"{keys.file.path} has {inner} numbers in {heads} heads of a delta net")
    return {
        "layer_types": _mixed(keys, config, QWEN3_5), "linear_num_value_heads": heads, "linear_num_key_heads": groups,
        "linear_key_head_dim": keys.whole("ssm.state_size"), "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": keys.whole("ssm.conv_kernel"), TILED_HEADS: heads != groups,
    }  # fmt: skip


def _granite_experts(keys: Keys) -> dict[str, Any]:
    """Of a mixture, which is another class without state where an MLP is beside the experts."""
    if not keys.get("expert_count"):
        return {}
    shared = keys.get("expert_shared_feed_forward_length")
    if not shared:
        return _experts(keys, "num_local_experts")
    named = GRANITE_MOE_SHARED if keys.architecture == GRANITE_MOE.gguf else GRANITE_HYBRID
    return _experts(keys, "num_local_experts") | {
        "architectures": [named.causal], "model_type": named.model_type,
        "shared_intermediate_size": keys.whole("expert_shared_feed_forward_length"),
    }  # fmt: skip


def _granite_hybrid(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    inner = keys.whole("ssm.inner_size")
    if inner % config["hidden_size"]:
        raise ModelError(f"{keys.file.path} has {inner} numbers in Mamba-2, {config['hidden_size']} in a row")
    return _mamba(keys, config, GRANITE_HYBRID) | {
        "layer_types": _mixed(keys, config, GRANITE_HYBRID), "mamba_expand": inner // config["hidden_size"],
        "num_local_experts": 0, "shared_intermediate_size": config["intermediate_size"], **_granite_experts(keys),
        "position_embedding_type": None if keys.get("rope.scaling.finetuned") is False else "rope",
    }  # fmt: skip


def _has(keys: Keys, config: dict[str, Any], end: str) -> bool:
    """Whether a layer has a tensor that is called so."""
    return any(f"blk.{index}.{end}" in keys.file.tensors for index in range(config["num_hidden_layers"]))


def _mamba(keys: Keys, config: dict[str, Any], of: Architecture) -> dict[str, Any]:
    """The sizes of Mamba-2's layers, by the config keys that the description names."""
    mixer = of.mixer
    assert isinstance(mixer, Recurrence)
    assert mixer.bias is not None
    assert mixer.conv_bias is not None
    heads, inner = keys.whole("ssm.time_step_rank"), keys.whole("ssm.inner_size")
    if inner % heads:
        raise ModelError(f"{keys.file.path} has {inner} numbers in {heads} heads of Mamba-2")
    return {
        mixer.heads: heads, mixer.value_dim: inner // heads, mixer.groups: keys.whole("ssm.group_count"),
        mixer.key_dim: keys.whole("ssm.state_size"), mixer.kernel: keys.whole("ssm.conv_kernel"),
        mixer.conv_bias: _has(keys, config, "ssm_conv1d.bias"), mixer.bias: _has(keys, config, "ssm_in.bias"),
    }  # fmt: skip


def _nemotron_h(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """A layer has heads of keys, or an MLP or experts, or a state. Raises ModelError."""
    layers, types = config["num_hidden_layers"], []
    lists = [keys.get("attention.head_count_kv"), keys.get("feed_forward_length")]
    if not all(isinstance(each, list) and len(each) >= layers for each in lists):
        raise ModelError(f"{keys.file.path} has {layers} layers, but does not say of each what it is")
    for index, (heads, inner) in enumerate(zip(*(each[:layers] for each in lists))):
        routed = f"blk.{index}{ROUTER}" in keys.file.tensors
        types.append(FULL if heads else "linear_attention" if not inner else "moe" if routed else "mlp")
    result = {"layers_block_type": types, **_mamba(keys, config, NEMOTRON_H)}
    if "moe" not in types:
        return result
    normalised, factor = keys.get("expert_weights_norm"), keys.positive("expert_weights_scale", 1.0)
    return result | _experts(keys, "n_routed_experts") | {
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "n_group": keys.whole("expert_group_count", 1), "topk_group": keys.whole("expert_group_used_count", 1),
        "moe_shared_expert_intermediate_size": keys.whole("expert_shared_feed_forward_length"),
        "norm_topk_prob": normalised is not False, "routed_scaling_factor": factor,
        "moe_latent_size": keys.get("moe_latent_size"),
    }  # fmt: skip


def _mixed(keys: Keys, config: dict[str, Any], of: Architecture) -> list[str]:
    """The kinds of layers where some keep a state: those without keys, those that a list says, or all but one in so
    many. Raises ModelError."""
    assert of.mixer is not None
    layers = config["num_hidden_layers"]
    given, heads = keys.get("attention.recurrent_layers"), keys.get("attention.head_count_kv")
    if given is None and isinstance(heads, list):
        given = [count == 0 for count in heads]
    if given is None:
        period = keys.whole("full_attention_interval", QWEN3_5_PERIOD)
        given = [bool((index + 1) % period) for index in range(layers)]
    if not isinstance(given, list) or len(given) < layers:
        raise ModelError(f"{keys.file.path} has {layers} layers, but does not say of each whether it keeps a state")
    return [of.mixer.layers if recurrent else FULL for recurrent in given[:layers]]


def _window(keys: Keys) -> int | None:
    return keys.whole("attention.sliding_window") if keys.get("attention.sliding_window") else None


def _windows(keys: Keys, config: dict[str, Any], period: int) -> dict[str, Any]:
    """Of layers some of which have a window."""
    layers, window = config["num_hidden_layers"], _window(keys)
    types = _sliding(keys, layers, period) if window else [FULL] * layers
    return {"sliding_window": window, "layer_types": types}


def _experts(keys: Keys, count: str) -> dict[str, Any]:
    experts = keys.whole("expert_count")
    held = {tensor.shape[0] for name, tensor in keys.file.tensors.items() if name.endswith(ROUTER)}
    if held - {experts}:
        raise ModelError(f"{keys.file.path} has {experts} experts by its metadata, and {max(held)} by its tensors")
    return {count: experts, "num_experts_per_tok": keys.whole("expert_used_count")}


def _rope(file: GGUFFile, keys: Keys, width: int) -> dict[str, Any]:
    """Rotary parameters of all layers. Raises ModelError for a scaling that is not read."""
    result: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.positive("rope.freq_base", 10000.0)}
    rotated = keys.whole("rope.dimension_count", width)
    if rotated != width:
        if not READ[keys.architecture].attention.partial or rotated > width or rotated % 2:
            other = f"{shown(rotated)} as {keys.architecture}.rope.dimension_count"
            raise ModelError(f"{file.path} has heads of {width} numbers, but {other}")
        result["partial_rotary_factor"] = rotated / width
    kind, factor = keys.get("rope.scaling.type") or "linear", 1.0
    for name in ("rope.scaling.factor", "rope.scale_linear"):  # the older key counts where the other is missing
        if keys.get(name):
            factor = keys.positive(name)
            break
    if kind == "linear" and factor == 1:
        kind = "none"
    factors = any(name.startswith("rope_factors") for name in file.tensors)
    if kind not in ("none", "linear", "yarn") or factors or (FREQUENCIES in file.tensors and kind != "none"):
        how = "longrope" if factors else shown(kind)
        raise ModelError(f"{file.path} scales its rotary frequencies ({how}), which is not read from GGUF")
    if kind == "linear":
        return result | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return result | _yarn(keys, factor)
    return result | read_divisors(file, result["rope_theta"], width) if FREQUENCIES in file.tensors else result


def _yarn(keys: Keys, factor: float) -> dict[str, Any]:
    """llama.cpp scales cosines and sines by the file's number and by (1 + 0.1 log(factor)) / (1 + 0.1 m log(factor)); m
    is its ``yarn_log_multiplier``."""
    divided = 0.1 * math.log(factor) * float(keys.get("rope.scaling.yarn_log_multiplier") or 0.0)
    scale = keys.positive("rope.scaling.attn_factor", 1.0) * (1.0 + 0.1 * math.log(factor)) / (1.0 + divided)
    return {
        "rope_type": "yarn", "factor": factor, "attention_factor": scale,
        "original_max_position_embeddings": keys.whole("rope.scaling.original_context_length"),
        "beta_fast": keys.positive("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.positive("rope.scaling.yarn_beta_slow", 1.0),
    }  # fmt: skip


def read_divisors(file: GGUFFile, theta: float, width: int) -> dict[str, Any]:
    """The parameters of Llama 3's formula that give the divisors in the file. Raises ModelError where none do."""
    given = file.values(FREQUENCIES).double()
    frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    factor = float(f"{given.max().item():.7g}") if given.shape == frequencies.shape else 0.0
    for context in LLAMA3_CONTEXTS:
        rotations = context * frequencies / (2 * torch.pi)  # in a text of that length
        smooth = ((rotations - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)).clamp(0, 1)
        if factor >= 1 and torch.allclose(1 / ((1 - smooth) / factor + smooth), given, rtol=1e-4, atol=0):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": LLAMA3_LOW,
                "high_freq_factor": LLAMA3_HIGH, "original_max_position_embeddings": context,
            }  # fmt: skip
    raise ModelError(f"{file.path} divides its rotary frequencies ({FREQUENCIES}) in another way than Llama 3 does")


def _widths(file: GGUFFile, keys: Keys) -> tuple[int, int, int]:
    """Of the hidden state, the number of heads, and the width of one."""
    hidden, heads = keys.whole("embedding_length"), keys.whole("attention.head_count")
    if READ[keys.architecture].latent is not None:  # of what is turned
        width = keys.whole("rope.dimension_count")
        if width % 2:
            raise ModelError(f"{file.path} turns {width} numbers, which are not pairs")
        return hidden, heads, width
    width = keys.whole("attention.key_length", hidden // heads or None)
    if width < 2 or width % 2:
        raise ModelError(f"{file.path} has heads of {width} numbers, which cannot be rotated in pairs")
    if keys.whole("attention.value_length", width) != width:
        other = f"{shown(keys.get('attention.value_length'))} as {keys.architecture}.attention.value_length"
        raise ModelError(f"{file.path} has heads of {width} numbers, but {other}")
    return hidden, heads, width


def _gemma(keys: Keys, config: dict[str, Any], period: int) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    width = config["hidden_size"] // config["num_attention_heads"]
    return {
        "sliding_window": keys.whole("attention.sliding_window"),
        "layer_types": _sliding(keys, layers, period),
        "query_pre_attn_scalar": width if layers == LARGEST[keys.architecture] else config["head_dim"],
        "final_logit_softcapping": _cap(keys, "final_logit_softcapping"),
    }


def _gemma4(file: GGUFFile, keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Its layers have two kinds of heads; ``config`` has the width of those without a window."""
    layers, width, narrow = config["num_hidden_layers"], config["head_dim"], keys.whole("attention.key_length_swa")
    inner, kv_heads = (keys.each(key, layers) for key in ("feed_forward_length", "attention.head_count_kv"))
    borrowed = keys.whole("attention.shared_kv_layers") if keys.get("attention.shared_kv_layers") else 0
    doubled = borrowed > 0 and inner[-1] == 2 * inner[0]
    if inner != [inner[0]] * (layers - borrowed) + [inner[0] * (1 + doubled)] * borrowed:
        raise ModelError(
            f"{file.path} has {shown(inner)} as {keys.architecture}.feed_forward_length, which is not read"
        )
    types = _sliding(keys, layers, GEMMA3_PERIOD)
    own = {index: {"head_dim": width, "num_key_value_heads": kv_heads[index]} for index in range(layers)}
    full = {str(index): sizes for index, sizes in own.items() if types[index] == FULL}
    few = {kv_heads[index] for index in range(layers) if types[index] == SLIDING}
    rotated = (keys.whole("rope.dimension_count", width), keys.whole("rope.dimension_count_swa", narrow))
    if len(few) > 1 or rotated != (width, narrow):
        raise ModelError(f"{file.path} has {shown(kv_heads)} key-value heads and rotates {shown(rotated)} numbers of "
                         f"heads of {(width, narrow)}, which is not read")  # fmt: skip
    table = file.tensors.get("per_layer_token_embd.weight")
    return {
        "head_dim": narrow, "num_key_value_heads": few.pop() if few else kv_heads[0], "per_layer_config": full,
        "layer_types": types, "sliding_window": keys.whole("attention.sliding_window"),
        "num_kv_shared_layers": borrowed, "use_double_wide_mlp": doubled,
        "attention_k_eq_v": any(f"blk.{index}.attn_v.weight" not in file.tensors for index in map(int, full)
                                if index < layers - borrowed),
        "hidden_size_per_layer_input": keys.get("embedding_length_per_layer_input") or 0,
        "vocab_size_per_layer_input": config["vocab_size"] if table is None else table.shape[0],
        "final_logit_softcapping": _cap(keys, "final_logit_softcapping"),
        **_gemma4_experts(keys),
        "rope_parameters": {
            FULL: _proportional(file, keys, width),
            SLIDING: {"rope_type": "default", "rope_theta": keys.positive("rope.freq_base_swa", GEMMA3_LOCAL_BASE)},
        },
    }  # fmt: skip


def _gemma4_experts(keys: Keys) -> dict[str, Any]:
    if not keys.get("expert_count"):
        return {"enable_moe_block": False}
    given = _experts(keys, "num_experts")
    return {
        "enable_moe_block": True, "num_experts": given["num_experts"], "top_k_experts": given["num_experts_per_tok"],
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
    }  # fmt: skip


def _proportional(file: GGUFFile, keys: Keys, width: int) -> dict[str, Any]:
    """Rotary parameters where the file divides the frequencies of the pairs that stay by 1e30, those of others by 1."""
    base = keys.positive("rope.freq_base", 1e6)
    if FREQUENCIES not in file.tensors:
        return {"rope_type": "default", "rope_theta": base}
    given = file.values(FREQUENCIES).double()
    turned = int((given == 1).sum())
    if given.shape != (width // 2,) or not (given[:turned] == 1).all() or not (given[turned:] >= 1e20).all():
        raise ModelError(f"{file.path} divides its rotary frequencies ({FREQUENCIES}) in another way than Gemma 4 does")
    factor = turned / (width // 2)
    return {"rope_type": "proportional", "rope_theta": base, "partial_rotary_factor": factor}


def _cap(keys: Keys, name: str) -> float | None:
    return None if keys.get(name) is None else keys.positive(name)


def _sliding(keys: Keys, layers: int, usual: int) -> list[str]:
    pattern = keys.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        period = keys.whole("attention.sliding_window_pattern", usual)
        pattern = [bool((index + 1) % period) for index in range(layers)]
    if len(pattern) != layers:
        raise ModelError(f"{keys.file.path} has {layers} layers, but says of {len(pattern)} whether they have a window")
    return [SLIDING if slides else FULL for slides in pattern]


def _dtype(file: GGUFFile) -> str:
    """That of rows: the one in which most of the matrices' bytes are numbers, bfloat16 where they are quantized."""
    most = next(iter(file.types()), "BF16")
    return str(FLOATS.get(most, torch.bfloat16)).removeprefix("torch.")


def _vocabulary(file: GGUFFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} has no tensor token_embd.weight: it holds no whole model")
    return file.tensors["token_embd.weight"].shape[0]


def _special_ids(file: GGUFFile, vocabulary: int) -> dict[str, Any]:
    """The ids that begin and end texts. Raises ModelError."""
    ids: dict[str, int] = {}
    for name in ("bos", "eos", "eot", "eom"):
        value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            continue
        if not isinstance(value, int) or not 0 <= value < vocabulary:
            raise ModelError(f"{file.path} has {shown(value)} as tokenizer.ggml.{name}_token_id, not one of its tokens")
        ids[name] = value
    begin = ids.pop("bos", None)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    named = enumerate(tokens[:vocabulary] if isinstance(tokens, list) else ())
    ends = sorted({*ids.values(), *(index for index, token in named if token in ENDS)})
    return {"bos_token_id": begin, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}

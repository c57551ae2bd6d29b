"""What ``config.json`` would say, out of a GGUF file's metadata."""

from __future__ import annotations

import math
from typing import Any

import torch

from forerun.core.config import COUNT, POSITIVE, Within
from forerun.core.errors import ModelError, shown
from forerun.models.architectures.description import Architecture, Recurrence
from forerun.models.architectures.families import ARCHITECTURES, NEMOTRON_H
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
LARGEST = {"gemma2": 46, "gemma3": 62}
"""The depth of the Gemma (27B) whose scores are scaled by another width than a head's."""
PERIODS = {"gemma2": 2, "gemma3": 6, "gemma4": 6, "gpt-oss": 2, "olmo2": 4, "exaone4": 4, "cohere2": 4}
"""Every so many layers one has no window, where files leave that out, as in llama.cpp."""
QWEN3_5_PERIOD = 4
GEMMA_LOCAL_BASE = 10000.0
"""The rotary base of layers with a window in llama.cpp's Gemmas, which their files leave out."""
SOFTMAX, SIGMOID = 1, 2
"""As ``expert_gating_func``."""
ENDS = frozenset(
    ("<|im_end|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>",
     "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>")
)  # fmt: skip
"""Tokens that end a turn or a text by their name, as in llama.cpp: most files name but one of a model's ends."""


class Keys:
    """A file's values, by their names behind the architecture's. Raises ModelError for an architecture that is not
    read, for layers that cannot be, and for numbers that are none."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        named = file.metadata.get("general.architecture")
        if not isinstance(named, str) or named not in READ:
            raise self.error(f"holds a model of architecture {shown(named)}; only {', '.join(READ)} are read from GGUF")
        self.architecture, self.of = named, READ[named]
        self.predicting = self.get("nextn_predict_layers") or 0
        """Layers for multi-token prediction, behind the others."""
        self.layers = self.whole("block_count") - self.predicting
        if not self.layers > 0:
            raise self.error(f"has {self.layers} layers before {self.predicting} for multi-token prediction")
        if self.layers > len(file.tensors):
            raise self.error(f"has {self.layers} layers in {len(file.tensors)} tensors")

    def error(self, reason: str) -> ModelError:
        return ModelError(f"{self.file.path} {reason}")

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def held(self, key: str) -> str:
        """A key and its value, for an error."""
        return f"{shown(self.get(key))} as {self.architecture}.{key}"

    def _checked(self, key: str, default: Any, limit: Within, kind: str) -> Any:
        value = self.get(key)
        value = default if value is None else value
        if not limit.permits(value):
            raise self.error(f"has {shown(value)} as {self.architecture}.{key}, not a positive {kind}")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        return int(self._checked(key, default, COUNT, "integer"))

    def positive(self, key: str, default: float | None = None) -> float:
        return float(f"{self._checked(key, default, POSITIVE, 'number'):.7g}")  # written in single precision

    def whole_or(self, key: str, other: Any) -> Any:
        """``other`` where the file has 0 or nothing."""
        return self.whole(key) if self.get(key) else other

    def positive_or_none(self, key: str) -> float | None:
        return None if self.get(key) is None else self.positive(key)

    def each(self, key: str, default: int | None = None) -> list[int]:
        """One for each layer; where they may not differ, the same for all."""
        value = self.get(key)
        if self.architecture != "gemma4" or not isinstance(value, list):
            return [self.whole(key, default)] * self.layers
        if len(value) != self.layers or not all(isinstance(each, int) and each > 0 for each in value):
            raise self.error(f"has {self.held(key)}, for {self.layers} layers")
        return value

    def has(self, end: str) -> bool:
        """Whether a layer has a tensor that is called so."""
        return any(f"blk.{index}.{end}" in self.file.tensors for index in range(self.layers))


def read_config(file: GGUFFile) -> dict[str, Any]:
    """Raises ModelError for a model of an architecture, or of a kind, that is not read here."""
    keys = Keys(file)
    result = keys.of
    if "token_embd.weight" not in file.tensors:
        raise keys.error("has no tensor token_embd.weight: it holds no whole model")
    vocabulary, (hidden, heads, width) = file.tensors["token_embd.weight"].shape[0], _widths(keys)
    config: dict[str, Any] = {
        "architectures": [result.causal],
        "model_type": result.model_type,
        "hidden_size": hidden,
        "intermediate_size": _inner(keys),
        "num_hidden_layers": keys.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(keys, heads),
        "head_dim": width,
        "max_position_embeddings": keys.whole("context_length"),
        result.norms.eps: _epsilon(keys, centred=result.norms.layer_norm),
        "vocab_size": vocabulary,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
    }
    config |= {"num_nextn_predict_layers": keys.predicting} if keys.predicting else {}
    config |= _biases(keys)
    if result.attention.rotary != "none":
        config["rope_parameters"] = {} if keys.architecture == "gemma4" else _rope(keys, width)
    config |= _further(keys, config)
    return config | {"pad_token_id": None} | _special_ids(file, vocabulary)  # transformers has defaults


def _class(of: Architecture) -> dict[str, Any]:
    """Of another architecture than most files of the same name hold."""
    return {"architectures": [of.causal], "model_type": of.model_type}


def _inner(keys: Keys) -> int:
    """Of the MLPs; Nemotron-H lists them, with 0 for layers without one. Raises ModelError."""
    given = keys.get("feed_forward_length")
    if keys.of is not NEMOTRON_H or not isinstance(given, list):
        return keys.each("feed_forward_length", keys.get("expert_feed_forward_length"))[0]
    counts = {count for count in given if count != 0} or {1}
    if len(counts) != 1 or not COUNT.permits(count := min(counts)):
        raise keys.error(f"has {keys.held('feed_forward_length')}, not one number and zeros")
    return count


def _epsilon(keys: Keys, *, centred: bool) -> float:
    """Nemotron-H's files may have that of RMS norms under the other name."""
    key = f"attention.layer_norm_{'' if centred else 'rms_'}epsilon"
    other = keys.of is NEMOTRON_H and keys.get(key) is None
    return keys.positive("attention.layer_norm_epsilon" if other else key)


def _kv_heads(keys: Keys, heads: int) -> int:
    """Of the layers with attention; a list has 0 for others. Raises ModelError."""
    given = keys.get("attention.head_count_kv")
    if keys.architecture == "gemma4" or not isinstance(given, list):
        return keys.each("attention.head_count_kv", heads)[0]
    counts = {count for count in given if count != 0}
    if len(counts) != 1 or not isinstance(count := min(counts), int) or not 0 < count <= heads:
        raise keys.error(f"has layers of {shown(sorted(counts))} heads of keys, not all of one number")
    return count


def _biases(keys: Keys) -> dict[str, bool]:
    """The config keys that say whether projections have biases."""
    of = keys.of
    parts = (
        (of.attention.bias, of.latent.kv_a if of.latent is not None else of.attention.qkv[0]),
        (of.attention.out_bias, of.attention.out),
        (of.mlp.bias, of.mlp.down),
    )
    return {key: keys.has(f"{name.gguf}.bias") for key, name in parts if key not in (None, "always")}


def _further(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """What one architecture alone has."""
    kind = keys.architecture
    if kind == "gemma2":
        cap = keys.positive_or_none("attn_logit_softcapping")
        return _gemma(keys, config) | {"attn_logit_softcapping": cap}
    if kind == "gemma3":
        local = keys.positive("rope.freq_base_swa", GEMMA_LOCAL_BASE)
        base = {**config["rope_parameters"], "rope_theta": keys.positive("rope.freq_base", 1e6)}
        rope = {FULL: base, SLIDING: {"rope_type": "default", "rope_theta": local}}
        return _gemma(keys, config) | {"rope_parameters": rope}
    if kind == "gemma4":
        return _gemma4(keys, config)
    if kind in ("phi3", "starcoder2"):
        return {"sliding_window": keys.whole_or("attention.sliding_window", None)}
    if kind == "olmo2" and keys.get("attention.sliding_window"):
        rope = {FULL: config["rope_parameters"], SLIDING: {
            "rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"],
        }}  # fmt: skip
        return _class(ARCHITECTURES["olmo3"]) | _windows(keys) | {"rope_parameters": rope}
    if kind == "exaone4":
        return _windows(keys)
    if kind == "cohere2":
        return _windows(keys) | {"logit_scale": keys.positive("logit_scale")}
    if kind in ("granite", "granitemoe", "granitehybrid"):
        return {
            **(_granite_hybrid(keys, config) if kind == "granitehybrid" else _granite_experts(keys)),
            "embedding_multiplier": keys.positive("embedding_scale", 1.0),
            "residual_multiplier": keys.positive("residual_scale", 1.0),
            "attention_multiplier": keys.positive("attention.scale", config["head_dim"] ** -0.5),
            "logits_scaling": keys.positive("logit_scale", 1.0),
        }
    if kind == "falcon-h1":
        return _recurrence(keys) | {"mamba_d_ssm": keys.whole("ssm.inner_size"), "mamba_norm_before_gate": False}
    if keys.of is NEMOTRON_H:
        return _nemotron_h(keys)
    if kind == "gpt-oss":
        return {
            **_windows(keys), **_experts(keys, keys.of), "intermediate_size": keys.whole("expert_feed_forward_length"),
            "rope_parameters": {**config["rope_parameters"], "truncate": False},
        }  # fmt: skip
    if kind == "mistral3":
        window = keys.whole_or("attention.sliding_window", None)
        return {"sliding_window": window, "rope_parameters": {**config["rope_parameters"], **_growth(keys)}}
    if keys.of.latent is not None:
        return _latent(keys, config)
    if kind == "apertus":
        return {"hidden_act": "xielu"}
    if kind in ("lfm2", "lfm2moe"):
        corrected = {"use_expert_bias": keys.has("exp_probs_b.bias"), "norm_topk_prob": True}
        return (_experts(keys, keys.of) | corrected if kind == "lfm2moe" else {}) | {
            "layer_types": _mixed(keys), "conv_L_cache": keys.whole("shortconv.l_cache"),
            "block_auto_adjust_ff_dim": False,
        }  # fmt: skip
    if kind in ("qwen35", "qwen35moe"):
        mixer = _recurrence(keys)
        tiled = mixer["linear_num_value_heads"] != mixer["linear_num_key_heads"]
        shared = "expert_shared_feed_forward_length"
        experts = {} if kind == "qwen35" else _experts(keys, keys.of) | {keys.of.mlp.width: keys.whole(shared)}
        return {"layer_types": _mixed(keys), **mixer, TILED_HEADS: tiled, **experts}
    if kind == "qwen3moe":
        more = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
        return _experts(keys, keys.of) | more
    if kind == "llama" and keys.get("expert_count"):
        mixtral = ARCHITECTURES["mixtral"]
        return _class(mixtral) | {"sliding_window": None} | _experts(keys, mixtral)
    return {}


def _growth(keys: Keys) -> dict[str, float]:
    """The rotary parameter that has queries grow with the position, if there is one."""
    key = "attention.temperature_scale"
    return {"llama_4_scaling_beta": keys.positive(key)} if keys.get(key) else {}


def _latent(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Of latent attention, and of the experts beside it."""
    if any(name.endswith("attn_kv_b.weight") for name in keys.file.tensors):
        raise keys.error("has keys and values of latents in one tensor, attn_kv_b, as older converters wrote it: "
                         "convert the model again (attn_k_b and attn_v_b are read)")  # fmt: skip
    turned, whole = config["head_dim"], keys.whole("attention.key_length_mla")
    func, rope = keys.get("expert_gating_func") or SOFTMAX, dict(config["rope_parameters"])
    mistral, normalised = keys.architecture == "mistral4", bool(keys.get("expert_weights_norm"))
    kind = ARCHITECTURES["mistral4" if mistral else "deepseek_v3" if func == SIGMOID else "deepseek_v2"]
    wrong = func not in (SOFTMAX, SIGMOID) or (mistral and func == SIGMOID)
    if wrong or (kind.model_type == "deepseek_v2" and normalised):
        raise keys.error(f"has {shown(func)} as {keys.architecture}.expert_gating_func and {normalised} as "
                         f"expert_weights_norm, which no model of {kind.causal} has")  # fmt: skip
    if not turned < whole:
        raise keys.error(f"has heads of {whole} numbers, {turned} of them turned")
    if rope["rope_type"] == "yarn":  # its attention_factor is that of mscale over mscale_all_dim, which are one number
        raised = 10.0 * float(keys.get("rope.scaling.yarn_log_multiplier") or 0.0)
        if raised:
            rope |= {"mscale": raised, "mscale_all_dim": raised}
            del rope["attention_factor"]
    if mistral:
        rope |= {"partial_rotary_factor": turned / whole, **_growth(keys)}
    return _class(kind) | _experts(keys, kind) | {
        "rope_parameters": rope, "norm_topk_prob": normalised,
        "num_key_value_heads": config["num_attention_heads"], "head_dim": whole if mistral else turned,
        "q_lora_rank": keys.whole_or("attention.q_lora_rank", None),
        "kv_lora_rank": keys.whole("attention.kv_lora_rank"), "qk_rope_head_dim": turned,
        "qk_nope_head_dim": whole - turned, "v_head_dim": keys.whole("attention.value_length_mla"),
        "topk_method": "group_limited_greedy" if (keys.get("expert_group_count") or 1) != 1 else "greedy",
    }  # fmt: skip


def _granite_experts(keys: Keys) -> dict[str, Any]:
    """Of a mixture, which is another class without state where an MLP is beside the experts."""
    if not keys.get("expert_count"):
        return {}
    experts = _experts(keys, keys.of)
    if not keys.get("expert_shared_feed_forward_length"):
        return experts
    named = ARCHITECTURES["granitemoeshared" if keys.architecture == "granitemoe" else "granitemoehybrid"]
    return experts | _class(named) | {"shared_intermediate_size": keys.whole("expert_shared_feed_forward_length")}


def _granite_hybrid(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    inner = keys.whole("ssm.inner_size")
    if inner % config["hidden_size"]:
        raise keys.error(f"has {inner} numbers in Mamba-2, {config['hidden_size']} in a row")
    return _recurrence(keys) | {
        "layer_types": _mixed(keys), "mamba_expand": inner // config["hidden_size"],
        "num_local_experts": 0, "shared_intermediate_size": config["intermediate_size"], **_granite_experts(keys),
        "position_embedding_type": None if keys.get("rope.scaling.finetuned") is False else "rope",
    }  # fmt: skip


def _recurrence(keys: Keys) -> dict[str, Any]:
    """The sizes of layers with a state per head, by the config keys that the description names."""
    mixer = keys.of.mixer
    assert isinstance(mixer, Recurrence)
    heads, inner = keys.whole("ssm.time_step_rank"), keys.whole("ssm.inner_size")
    if inner % heads:
        what = "Mamba-2" if mixer.kind == "mamba" else "a delta net"
        raise keys.error(f"has {inner} numbers in {heads} heads of {what}")
    parts = {
        mixer.conv_bias: "ssm_conv1d.bias", mixer.bias: "ssm_in.bias", mixer.out_bias: "ssm_out.bias",
        mixer.has_norm: "ssm_norm.weight",
    }  # fmt: skip
    return {
        mixer.heads: heads, mixer.value_dim: inner // heads, mixer.groups: keys.whole("ssm.group_count"),
        mixer.key_dim: keys.whole("ssm.state_size"), mixer.kernel: keys.whole("ssm.conv_kernel"),
        **{key: keys.has(end) for key, end in parts.items() if key is not None},
    }  # fmt: skip


def _nemotron_h(keys: Keys) -> dict[str, Any]:
    """A layer has heads of keys, or an MLP or experts, or a state. Raises ModelError."""
    layers, types = keys.layers, []
    lists = [keys.get("attention.head_count_kv"), keys.get("feed_forward_length")]
    if not all(isinstance(each, list) and len(each) >= layers for each in lists):
        raise keys.error(f"has {layers} layers, but does not say of each what it is")
    for index, (heads, inner) in enumerate(zip(*(each[:layers] for each in lists))):
        routed = f"blk.{index}{ROUTER}" in keys.file.tensors
        types.append(FULL if heads else "linear_attention" if not inner else "moe" if routed else "mlp")
    result = {"layers_block_type": types, **_recurrence(keys)}
    if "moe" not in types:
        return result
    normalised = keys.get("expert_weights_norm") is not False
    more = {"norm_topk_prob": normalised, "moe_latent_size": keys.get("moe_latent_size")}
    return result | _experts(keys, keys.of) | more


def _mixed(keys: Keys) -> list[str]:
    """The kinds of layers where some keep a state: those without keys, those that a list says, or all but one in so
    many. Raises ModelError."""
    assert keys.of.mixer is not None
    given, heads = keys.get("attention.recurrent_layers"), keys.get("attention.head_count_kv")
    if given is None and isinstance(heads, list):
        given = [count == 0 for count in heads]
    if given is None:
        period = keys.whole("full_attention_interval", QWEN3_5_PERIOD)
        given = [bool((index + 1) % period) for index in range(keys.layers)]
    if not isinstance(given, list) or len(given) < keys.layers:
        raise keys.error(f"has {keys.layers} layers, but does not say of each whether it keeps a state")
    return [keys.of.mixer.layer_type if recurrent else FULL for recurrent in given[: keys.layers]]


def _windows(keys: Keys) -> dict[str, Any]:
    """Of layers some of which have a window."""
    window = keys.whole_or("attention.sliding_window", None)
    return {"sliding_window": window, "layer_types": _sliding(keys) if window else [FULL] * keys.layers}


def _experts(keys: Keys, of: Architecture) -> dict[str, Any]:
    """The sizes of experts and of what is shared beside them, by the config keys that the description names."""
    names = of.experts
    assert names is not None
    experts = keys.whole("expert_count")
    held = {tensor.shape[0] for name, tensor in keys.file.tensors.items() if name.endswith(ROUTER)}
    if held - {experts}:
        raise keys.error(f"has {experts} experts by its metadata, and {max(held)} by its tensors")
    result: dict[str, Any] = {names.count: experts, names.top_k: keys.whole("expert_used_count")}
    if names.width != "intermediate_size":
        result[names.width] = keys.whole("expert_feed_forward_length")
    if names.factor is not None:
        result[names.factor] = keys.positive("expert_weights_scale", 1.0)
    if names.first_dense is not None:
        dense = keys.get("leading_dense_block_count")
        result[names.first_dense] = 0 if dense == 0 else keys.whole("leading_dense_block_count")
    if names.groups is not None:
        counts = keys.get("expert_group_count") or 1, keys.whole("expert_group_used_count", 1)
        result |= zip(names.groups, counts)
    if names.shared is not None and names.shared.width_factor is not None:
        result[names.shared.width_factor] = keys.whole("expert_shared_count")
    elif names.shared is not None:
        result[names.shared.width] = keys.whole("expert_shared_feed_forward_length")
    return result


def _rope(keys: Keys, width: int) -> dict[str, Any]:
    """Rotary parameters of all layers. Raises ModelError for a scaling that is not read."""
    file = keys.file
    result: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.positive("rope.freq_base", 10000.0)}
    rotated = keys.whole("rope.dimension_count", width)
    if rotated != width:
        if not keys.of.attention.partial_rotary or rotated > width or rotated % 2:
            raise keys.error(f"has heads of {width} numbers, but {keys.held('rope.dimension_count')}")
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
        raise keys.error(f"scales its rotary frequencies ({how}), which is not read from GGUF")
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


def _widths(keys: Keys) -> tuple[int, int, int]:
    """Of the hidden state, the number of heads, and the width of one."""
    hidden, heads = keys.whole("embedding_length"), keys.whole("attention.head_count")
    if keys.of.latent is not None:  # of what is turned
        width = keys.whole("rope.dimension_count")
        if width % 2:
            raise keys.error(f"turns {width} numbers, which are not pairs")
        return hidden, heads, width
    width = keys.whole("attention.key_length", hidden // heads or None)
    if width < 2 or width % 2:
        raise keys.error(f"has heads of {width} numbers, which cannot be rotated in pairs")
    if keys.whole("attention.value_length", width) != width:
        raise keys.error(f"has heads of {width} numbers, but {keys.held('attention.value_length')}")
    return hidden, heads, width


def _gemma(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    width = config["hidden_size"] // config["num_attention_heads"]
    return {
        "sliding_window": keys.whole("attention.sliding_window"),
        "layer_types": _sliding(keys),
        "query_pre_attn_scalar": width if keys.layers == LARGEST[keys.architecture] else config["head_dim"],
        "final_logit_softcapping": keys.positive_or_none("final_logit_softcapping"),
    }


def _gemma4(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Its layers have two kinds of heads; ``config`` has the width of those without a window."""
    file, layers, width, narrow = keys.file, keys.layers, config["head_dim"], keys.whole("attention.key_length_swa")
    inner, kv_heads = keys.each("feed_forward_length"), keys.each("attention.head_count_kv")
    borrowed = keys.whole_or("attention.shared_kv_layers", 0)
    doubled = borrowed > 0 and inner[-1] == 2 * inner[0]
    if inner != [inner[0]] * (layers - borrowed) + [inner[0] * (1 + doubled)] * borrowed:
        raise keys.error(f"has {shown(inner)} as {keys.architecture}.feed_forward_length, which is not read")
    types = _sliding(keys)
    own = {index: {"head_dim": width, "num_key_value_heads": kv_heads[index]} for index in range(layers)}
    full = {str(index): sizes for index, sizes in own.items() if types[index] == FULL}
    few = {kv_heads[index] for index in range(layers) if types[index] == SLIDING}
    rotated = (keys.whole("rope.dimension_count", width), keys.whole("rope.dimension_count_swa", narrow))
    if len(few) > 1 or rotated != (width, narrow):
        raise keys.error(f"has {shown(kv_heads)} key-value heads and rotates {shown(rotated)} numbers of heads of "
                         f"{(width, narrow)}, which is not read")  # fmt: skip
    table = file.tensors.get("per_layer_token_embd.weight")
    return {
        "head_dim": narrow, "num_key_value_heads": few.pop() if few else kv_heads[0], "per_layer_config": full,
        "layer_types": types, "sliding_window": keys.whole("attention.sliding_window"),
        "num_kv_shared_layers": borrowed, "use_double_wide_mlp": doubled,
        "attention_k_eq_v": any(f"blk.{index}.attn_v.weight" not in file.tensors for index in map(int, full)
                                if index < layers - borrowed),
        "hidden_size_per_layer_input": keys.get("embedding_length_per_layer_input") or 0,
        "vocab_size_per_layer_input": config["vocab_size"] if table is None else table.shape[0],
        "final_logit_softcapping": keys.positive_or_none("final_logit_softcapping"),
        **({"enable_moe_block": True, **_experts(keys, keys.of)} if keys.get("expert_count")
           else {"enable_moe_block": False}),
        "rope_parameters": {
            FULL: _proportional(keys, width),
            SLIDING: {"rope_type": "default", "rope_theta": keys.positive("rope.freq_base_swa", GEMMA_LOCAL_BASE)},
        },
    }  # fmt: skip


def _proportional(keys: Keys, width: int) -> dict[str, Any]:
    """Rotary parameters where the file divides the frequencies of the pairs that stay by 1e30, those of others by 1."""
    file, base = keys.file, keys.positive("rope.freq_base", 1e6)
    if FREQUENCIES not in file.tensors:
        return {"rope_type": "default", "rope_theta": base}
    given = file.values(FREQUENCIES).double()
    turned = int((given == 1).sum())
    if given.shape != (width // 2,) or not (given[:turned] == 1).all() or not (given[turned:] >= 1e20).all():
        raise keys.error(f"divides its rotary frequencies ({FREQUENCIES}) in another way than Gemma 4 does")
    factor = turned / (width // 2)
    return {"rope_type": "proportional", "rope_theta": base, "partial_rotary_factor": factor}


def _sliding(keys: Keys) -> list[str]:
    """The kinds of layers, some of which have a window. Raises ModelError."""
    pattern = keys.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        period = keys.whole("attention.sliding_window_pattern", PERIODS[keys.architecture])
        pattern = [bool((index + 1) % period) for index in range(keys.layers)]
    if len(pattern) != keys.layers:
        raise keys.error(f"has {keys.layers} layers, but says of {len(pattern)} whether they have a window")
    return [SLIDING if slides else FULL for slides in pattern]


def _dtype(file: GGUFFile) -> str:
    """That of rows: the one in which most of the matrices' bytes are numbers, bfloat16 where they are quantized."""
    most = next(iter(file.types()), "BF16")
    return str(FLOATS.get(most, torch.bfloat16)).removeprefix("torch.")


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

"""The keys of ``config.json``, made from a GGUF file's metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from forerun.core.config import COUNT, POSITIVE, Within
from forerun.core.errors import ModelError, shown
from forerun.models.architectures.description import Architecture, ExpertsSpec, Recurrence
from forerun.models.architectures.families import ARCHITECTURES, NEMOTRON_H
from forerun.models.architectures.spec import FULL, SLIDING, TILED_HEADS
from forerun.models.files.gguf import GGUFFile
from forerun.models.formats.gguf_types import FLOATS

FREQUENCIES = "rope_freqs.weight"
"""The divisors of Llama 3's rotary frequencies."""
ROUTER = ".ffn_gate_inp.weight"
"""Suffix of the router's name."""
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXTS = 1.0, 4.0, (8192, *(2**power for power in range(11, 18)))
"""Its other rotary parameters, which files leave out: the usual factors, and possible original context lengths."""
LARGEST = {"gemma2": 46, "gemma3": 62}
"""The depth of the 27B Gemma, which scales scores by hidden size over heads instead of the head's width."""
PERIODS = {"gemma2": 2, "gemma3": 6, "gemma4": 6, "gpt-oss": 2, "olmo2": 4, "exaone4": 4, "cohere2": 4}
"""Every n-th layer has no window, where files leave that out (as in llama.cpp)."""
QWEN3_5_PERIOD = 4
GEMMA_LOCAL_BASE = 10000.0
"""Gemma's rotary base in layers with a window, where files leave it out (as in llama.cpp)."""
SOFTMAX, SIGMOID = 1, 2
"""Values of ``expert_gating_func``."""
ENDS = frozenset(
    ("<|im_end|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>",
     "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>")
)  # fmt: skip
"""Tokens that end a message or a text by their name (as in llama.cpp): most files name only one of a model's ends."""


def readable() -> dict[str, Architecture]:
    """Families by ``general.architecture``, the first of those that share a name (``_variant`` distinguishes them)."""
    return {each.gguf: each for each in reversed(ARCHITECTURES.values())} | {f"{NEMOTRON_H.gguf}_moe": NEMOTRON_H}


class Keys:
    """A file's metadata, by key without the architecture's prefix. Raises ModelError for an unknown architecture, for
    an impossible number of layers, and for values that are not numbers where numbers are needed."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        named = file.metadata.get("general.architecture")
        if not isinstance(named, str) or named not in (read := readable()):
            raise self.error(f"holds a model of architecture {shown(named)}; only {', '.join(read)} are read from GGUF")
        self.name = named
        self.architecture = _variant(self)
        self.predicting = self.get("nextn_predict_layers") or 0
        """Layers for multi-token prediction, after the others."""
        self.layers = self.integer("block_count") - self.predicting
        if not self.layers > 0:
            raise self.error(f"has {self.layers} layers before {self.predicting} for multi-token prediction")
        if self.layers > len(file.tensors):
            raise self.error(f"has {self.layers} layers in {len(file.tensors)} tensors")

    def error(self, reason: str) -> ModelError:
        return ModelError(f"{self.file.path} {reason}")

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.name}.{key}")

    def stated(self, key: str) -> str:
        """A key and its value, for an error."""
        return f"{shown(self.get(key))} as {self.name}.{key}"

    def _number(self, key: str, default: Any, limit: Within, kind: str) -> Any:
        value = self.get(key)
        value = default if value is None else value
        if not limit.permits(value):
            raise self.error(f"has {shown(value)} as {self.name}.{key}, not a positive {kind}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._number(key, default, COUNT, "integer"))

    def number(self, key: str, default: float | None = None) -> float:
        return float(f"{self._number(key, default, POSITIVE, 'number'):.7g}")  # files have single precision

    def optional_integer(self, key: str) -> int | None:
        """None where the file has 0 or nothing."""
        return self.integer(key) if self.get(key) else None

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def by_layer(self, key: str, default: int | None = None) -> list[int]:
        """An integer for each layer, 0 where a layer lacks the part."""
        value = self.get(key)
        if not isinstance(value, list):
            return [self.integer(key, default)] * self.layers
        if len(value) < self.layers or not all(type(each) is int and each >= 0 for each in value):
            raise self.error(f"has {self.layers} layers, but does not say of each what it is: {self.stated(key)}")
        return value[: self.layers]

    def has(self, suffix: str) -> bool:
        """Whether any layer has a tensor of this name."""
        return any(f"blk.{index}.{suffix}" in self.file.tensors for index in range(self.layers))


def read_config(file: GGUFFile) -> dict[str, Any]:
    """``config.json``'s keys. Raises ModelError for a model of an architecture, or of a kind, that is not read here."""
    keys = Keys(file)
    architecture = keys.architecture
    if "token_embd.weight" not in file.tensors:
        raise keys.error("has no tensor token_embd.weight: it holds no whole model")
    vocabulary, (hidden, heads, width) = file.tensors["token_embd.weight"].shape[0], _widths(keys)
    config: dict[str, Any] = {
        "architectures": [architecture.causal],
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "intermediate_size": _intermediate_size(keys),
        "num_hidden_layers": keys.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(keys, heads),
        "head_dim": width,
        "max_position_embeddings": keys.integer("context_length"),
        architecture.norms.eps: _epsilon(keys, centred=architecture.norms.layer_norm),
        "vocab_size": vocabulary,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
    }
    config |= {"num_nextn_predict_layers": keys.predicting} if keys.predicting else {}
    config |= _biases(keys)
    if architecture.attention.rotary != "none":
        config["rope_parameters"] = {} if keys.name == "gemma4" else _rope(keys, width)
    config |= _described_keys(keys, config)
    config |= _family_keys(keys, config)
    return config | {"pad_token_id": None} | _special_ids(file, vocabulary)  # transformers has defaults


def _variant(keys: Keys) -> Architecture:
    """The architecture, which ``general.architecture`` alone does not tell for some."""
    experts, shared = keys.get("expert_count"), keys.get("expert_shared_feed_forward_length")
    if keys.name == "llama" and experts:
        return ARCHITECTURES["mixtral"]
    if keys.name == "olmo2" and keys.get("attention.sliding_window"):
        return ARCHITECTURES["olmo3"]
    if keys.name == "granitemoe" and experts and shared:
        return ARCHITECTURES["granitemoeshared"]
    if keys.name == "deepseek2":
        return ARCHITECTURES["deepseek_v3" if keys.get("expert_gating_func") == SIGMOID else "deepseek_v2"]
    return readable()[keys.name]


def _intermediate_size(keys: Keys) -> int:
    """The MLPs' width. Gemma 4 has several, Nemotron-H's files have 0 for layers without an MLP."""
    sizes = keys.by_layer("feed_forward_length", keys.get("expert_feed_forward_length"))
    if keys.architecture.attention.per_layer_sizes:
        return sizes[0]
    counts = set(sizes) - {0} or {1}
    if len(counts) != 1:
        raise keys.error(f"has {keys.stated('feed_forward_length')}, not one number and zeros")
    return counts.pop()


def _kv_heads(keys: Keys, heads: int) -> int:
    """Key-value heads of the layers with attention; files have 0 for other layers."""
    counts = keys.by_layer("attention.head_count_kv", heads)
    distinct = set(counts) - {0}
    if keys.architecture.attention.per_layer_sizes:
        return counts[0]
    if len(distinct) != 1 or not max(distinct) <= heads:
        raise keys.error(f"has layers of {shown(sorted(distinct))} heads of keys, not all of one number")
    return distinct.pop()


def _epsilon(keys: Keys, *, centred: bool) -> float:
    """The norms' epsilon. Nemotron-H's files may have that of RMS norms under layer norms' name."""
    key = f"attention.layer_norm_{'' if centred else 'rms_'}epsilon"
    other = keys.architecture is NEMOTRON_H and keys.get(key) is None
    return keys.number("attention.layer_norm_epsilon" if other else key)


def _biases(keys: Keys) -> dict[str, bool]:
    """The config keys that say whether projections have biases."""
    attention, latent, mlp = keys.architecture.attention, keys.architecture.latent, keys.architecture.mlp
    parts = (
        (attention.bias, attention.qkv[0] if latent is None else latent.kv_a),
        (attention.out_bias, attention.out),
        (mlp.bias, mlp.down),
    )
    return {key: keys.has(f"{name.gguf}.bias") for key, name in parts if key not in (None, "always")}


def _described_keys(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """The keys that the architecture's description names."""
    of, attention = keys.architecture, keys.architecture.attention
    numbers = {
        attention.multiplier: ("attention.scale", config["head_dim"] ** -0.5),
        of.embedding_scale: ("embedding_scale", 1.0), of.residual_scale: ("residual_scale", 1.0),
        of.logits_divisor: ("logit_scale", 1.0),
    }  # fmt: skip
    result: dict[str, Any] = {
        key: keys.number(*own) for key, own in numbers.items() if isinstance(key, str) and key != "root"
    }
    softcaps = {attention.softcap: "attn_logit_softcapping", of.logits_softcap: "final_logit_softcapping"}
    result |= {key: keys.optional_number(own) for key, own in softcaps.items() if key is not None}
    if attention.window == "all":
        result["sliding_window"] = None if keys.name == "llama" else keys.optional_integer("attention.sliding_window")
    elif attention.window == "layer_types" and keys.name in PERIODS:
        result |= _windows(keys)
    if of.experts is not None and keys.get("expert_count"):
        result |= _experts(keys, of.experts)
    if isinstance(of.mixer, Recurrence):
        result |= _recurrence(keys, of.mixer)
    if of.mixer is not None and not of.mlp.layer_type and of.mixer.layer_type != "hybrid":
        result["layer_types"] = _mixed(keys, of.mixer.layer_type)
    if of.mlp.width != "intermediate_size":
        result[of.mlp.width] = keys.integer("expert_shared_feed_forward_length", config["intermediate_size"])
    return result


def _family_keys(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """The keys of one family alone."""
    family, rope = keys.name, config.get("rope_parameters", {})
    if family in LARGEST:
        width = config["hidden_size"] // config["num_attention_heads"]
        scalar = width if keys.layers == LARGEST[family] else config["head_dim"]
        if family == "gemma3":
            rope = {FULL: {**rope, "rope_theta": keys.number("rope.freq_base", 1e6)}, SLIDING: _local_rope(keys)}
        return {"query_pre_attn_scalar": scalar, "rope_parameters": rope}
    if family == "gemma4":
        return _gemma4(keys, config)
    if keys.architecture.model_type == "olmo3":
        return {"rope_parameters": {FULL: rope, SLIDING: {"rope_type": "default", "rope_theta": rope["rope_theta"]}}}
    if family == "cohere2":
        return {"logit_scale": keys.number("logit_scale")}
    if family == "granitehybrid":
        return _granite_hybrid(keys, config)
    if family == "falcon-h1":
        return {"mamba_d_ssm": keys.integer("ssm.inner_size"), "mamba_norm_before_gate": False}
    if keys.architecture is NEMOTRON_H:
        return {"layers_block_type": _nemotron_layers(keys), "moe_latent_size": keys.get("moe_latent_size")}
    if family == "gpt-oss":
        inner = keys.integer("expert_feed_forward_length")
        return {"intermediate_size": inner, "rope_parameters": {**rope, "truncate": False}}
    if family == "mistral3":
        return {"rope_parameters": {**rope, **_query_growth(keys)}}
    if keys.architecture.latent is not None:
        return _latent(keys, config)
    if family == "apertus":
        return {"hidden_act": "xielu"}
    if family in ("lfm2", "lfm2moe"):
        return {"conv_L_cache": keys.integer("shortconv.l_cache"), "block_auto_adjust_ff_dim": False}
    if family in ("qwen35", "qwen35moe"):
        return {TILED_HEADS: config["linear_num_value_heads"] != config["linear_num_key_heads"]}
    if family == "qwen3moe":
        return {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return {}


def _local_rope(keys: Keys) -> dict[str, Any]:
    """Gemma's rotary parameters in layers with a window."""
    return {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", GEMMA_LOCAL_BASE)}


def _query_growth(keys: Keys) -> dict[str, float]:
    """The rotary parameters by which queries grow with the position, if they do."""
    beta, length = "attention.temperature_scale", keys.optional_integer("rope.scaling.original_context_length")
    original = {"original_max_position_embeddings": length} if length else {}
    return {"llama_4_scaling_beta": keys.number(beta), **original} if keys.get(beta) else {}


def _latent(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Keys of multi-head latent attention, and of the experts beside it."""
    if any(name.endswith("attn_kv_b.weight") for name in keys.file.tensors):
        raise keys.error("has keys and values of latents in one tensor, attn_kv_b, as older converters wrote it: "
                         "convert the model again (attn_k_b and attn_v_b are read)")  # fmt: skip
    rotated, width = config["head_dim"], keys.integer("attention.key_length_mla")
    func, rope = keys.get("expert_gating_func") or SOFTMAX, dict(config["rope_parameters"])
    mistral, normalised = keys.name == "mistral4", bool(keys.get("expert_weights_norm"))
    wrong = func not in (SOFTMAX, SIGMOID) or (mistral and func == SIGMOID)
    if wrong or (keys.architecture.model_type == "deepseek_v2" and normalised):
        raise keys.error(f"has {shown(func)} as {keys.name}.expert_gating_func and {normalised} as "
                         f"expert_weights_norm, which no model of {keys.architecture.causal} has")  # fmt: skip
    if not rotated < width:
        raise keys.error(f"has heads of {width} numbers, {rotated} of them rotated")
    if rope["rope_type"] == "yarn":  # its attention_factor is mscale over mscale_all_dim, which are one number
        mscale = 10.0 * float(keys.get("rope.scaling.yarn_log_multiplier") or 0.0)
        if mscale:
            rope |= {"mscale": mscale, "mscale_all_dim": mscale}
            del rope["attention_factor"]
    if mistral:
        rope |= {"partial_rotary_factor": rotated / width, **_query_growth(keys)}
    return {
        "rope_parameters": rope, "norm_topk_prob": normalised,
        "num_key_value_heads": config["num_attention_heads"], "head_dim": width if mistral else rotated,
        "q_lora_rank": keys.optional_integer("attention.q_lora_rank"),
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"), "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": width - rotated, "v_head_dim": keys.integer("attention.value_length_mla"),
        "topk_method": "group_limited_greedy" if (keys.get("expert_group_count") or 1) != 1 else "greedy",
    }  # fmt: skip


def _granite_hybrid(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    inner, hidden = keys.integer("ssm.inner_size"), config["hidden_size"]
    if inner % hidden:
        raise keys.error(f"has {inner} numbers in Mamba-2, {hidden} in a row")
    without_rope = keys.get("rope.scaling.finetuned") is False
    return {
        "mamba_expand": inner // hidden, "position_embedding_type": None if without_rope else "rope",
        "num_local_experts": keys.get("expert_count") or 0,
    }  # fmt: skip


def _recurrence(keys: Keys, mixer: Recurrence) -> dict[str, Any]:
    """The sizes of layers with a state per head, by the config keys that the description names."""
    heads, inner = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    if inner % heads:
        what = "Mamba-2" if mixer.kind == "mamba" else "a delta net"
        raise keys.error(f"has {inner} numbers in {heads} heads of {what}")
    parts = {
        mixer.conv_bias: "ssm_conv1d.bias", mixer.bias: "ssm_in.bias", mixer.out_bias: "ssm_out.bias",
        mixer.has_norm: "ssm_norm.weight",
    }  # fmt: skip
    return {
        mixer.heads: heads, mixer.value_dim: inner // heads, mixer.groups: keys.integer("ssm.group_count"),
        mixer.key_dim: keys.integer("ssm.state_size"), mixer.kernel: keys.integer("ssm.conv_kernel"),
        **{key: keys.has(end) for key, end in parts.items() if key is not None},
    }  # fmt: skip


def _nemotron_layers(keys: Keys) -> list[str]:
    """A layer has attention, or an MLP, or experts, or a state."""
    sizes = zip(keys.by_layer("attention.head_count_kv"), keys.by_layer("feed_forward_length"))
    types = []
    for index, (heads, inner) in enumerate(sizes):
        routed = f"blk.{index}{ROUTER}" in keys.file.tensors
        types.append(FULL if heads else "linear_attention" if not inner else "moe" if routed else "mlp")
    return types


def _mixed(keys: Keys, kind: str) -> list[str]:
    """Layer types where layers of this ``kind`` keep a state: those that a list names, those without key-value heads,
    or all but every n-th. Raises ModelError."""
    recurrent = keys.get("attention.recurrent_layers")
    if recurrent is None and isinstance(keys.get("attention.head_count_kv"), list):
        recurrent = [count == 0 for count in keys.by_layer("attention.head_count_kv")]
    if recurrent is None:
        period = keys.integer("full_attention_interval", QWEN3_5_PERIOD)
        recurrent = [bool((index + 1) % period) for index in range(keys.layers)]
    if not isinstance(recurrent, list) or len(recurrent) < keys.layers:
        raise keys.error(f"has {keys.layers} layers, but does not say of each whether it keeps a state")
    return [kind if each else FULL for each in recurrent[: keys.layers]]


def _windows(keys: Keys) -> dict[str, Any]:
    """The sliding window, and which layers have it."""
    get = keys.integer if keys.name.startswith("gemma") else keys.optional_integer
    window = get("attention.sliding_window")
    return {"sliding_window": window, "layer_types": _sliding(keys) if window else [FULL] * keys.layers}


def _experts(keys: Keys, names: ExpertsSpec) -> dict[str, Any]:
    """The sizes of experts, and of what all rows share beside them, by the description's config keys."""
    experts = keys.integer("expert_count")
    routed = {tensor.shape[0] for name, tensor in keys.file.tensors.items() if name.endswith(ROUTER)}
    if routed - {experts}:
        raise keys.error(f"has {experts} experts by its metadata, and {max(routed)} by its tensors")
    result: dict[str, Any] = {names.count: experts, names.top_k: keys.integer("expert_used_count")}
    if names.width != "intermediate_size":
        result[names.width] = keys.integer("expert_feed_forward_length")
    if names.normalize is not None:
        result[names.normalize] = keys.get("expert_weights_norm") is not False
    if names.has_score_bias is not None and names.score_bias is not None:
        result[names.has_score_bias] = keys.has(f"{names.score_bias.gguf}.bias")
    if names.factor is not None:
        result[names.factor] = keys.number("expert_weights_scale", 1.0)
    if names.first_dense is not None:
        dense = keys.get("leading_dense_block_count")
        result[names.first_dense] = 0 if dense == 0 else keys.integer("leading_dense_block_count")
    if names.groups is not None:
        result |= zip(names.groups, (keys.get("expert_group_count") or 1, keys.integer("expert_group_used_count", 1)))
    if names.shared is not None and names.shared.width_factor is not None:
        result[names.shared.width_factor] = keys.integer("expert_shared_count")
    elif names.shared is not None:
        result[names.shared.width] = keys.integer("expert_shared_feed_forward_length")
    return result


def _rope(keys: Keys, width: int) -> dict[str, Any]:
    """Rotary parameters that hold in all layers. Raises ModelError for a scaling that is not read."""
    file = keys.file
    result: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base", 10000.0)}
    rotated = keys.integer("rope.dimension_count", width)
    if rotated != width:
        if not keys.architecture.attention.partial_rotary or rotated > width or rotated % 2:
            raise keys.error(f"has heads of {width} numbers, but {keys.stated('rope.dimension_count')}")
        result["partial_rotary_factor"] = rotated / width
    kind = keys.get("rope.scaling.type") or "linear"
    older = keys.number("rope.scale_linear") if keys.get("rope.scale_linear") else 1.0
    factor = keys.number("rope.scaling.factor") if keys.get("rope.scaling.factor") else older
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
    return result | read_divisors(file, result["rope_theta"], rotated) if FREQUENCIES in file.tensors else result


def _yarn(keys: Keys, factor: float) -> dict[str, Any]:
    """As in llama.cpp, cosines and sines are scaled by the file's ``attn_factor`` times
    (1 + 0.1 log(factor)) / (1 + 0.1 m log(factor)). m is its ``yarn_log_multiplier``."""
    divided = 0.1 * math.log(factor) * float(keys.get("rope.scaling.yarn_log_multiplier") or 0.0)
    scale = keys.number("rope.scaling.attn_factor", 1.0) * (1.0 + 0.1 * math.log(factor)) / (1.0 + divided)
    return {
        "rope_type": "yarn", "factor": factor, "attention_factor": scale,
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
    }  # fmt: skip


def read_divisors(file: GGUFFile, theta: float, width: int) -> dict[str, Any]:
    """The parameters for which Llama 3's formula gives the file's divisors. Raises ModelError if there are none."""
    divisors = file.values(FREQUENCIES).double()
    frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    factor = float(f"{divisors.max().item():.7g}") if divisors.shape == frequencies.shape else 0.0
    for context in LLAMA3_CONTEXTS:
        rotations = context * frequencies / (2 * torch.pi)  # in a text of that length
        smooth = ((rotations - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)).clamp(0, 1)
        if factor >= 1 and torch.allclose(1 / ((1 - smooth) / factor + smooth), divisors, rtol=1e-4, atol=0):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": LLAMA3_LOW,
                "high_freq_factor": LLAMA3_HIGH, "original_max_position_embeddings": context,
            }  # fmt: skip
    raise ModelError(f"{file.path} divides its rotary frequencies ({FREQUENCIES}) in another way than Llama 3 does")


def _widths(keys: Keys) -> tuple[int, int, int]:
    """The hidden size, the number of heads, and the width of one (of its rotated part in latent attention)."""
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    if keys.architecture.latent is not None:
        width = keys.integer("rope.dimension_count")
        if width % 2:
            raise keys.error(f"rotates {width} numbers, which are not pairs")
        return hidden, heads, width
    width = keys.integer("attention.key_length", hidden // heads or None)
    if width < 2 or width % 2:
        raise keys.error(f"has heads of {width} numbers, which cannot be rotated in pairs")
    if keys.integer("attention.value_length", width) != width:
        raise keys.error(f"has heads of {width} numbers, but {keys.stated('attention.value_length')}")
    return hidden, heads, width


def _gemma4(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Gemma 4's layers have heads of two sizes. ``config`` has the width of those without a window."""
    file, layers, width, narrow = keys.file, keys.layers, config["head_dim"], keys.integer("attention.key_length_swa")
    inner, kv_heads = keys.by_layer("feed_forward_length"), keys.by_layer("attention.head_count_kv")
    borrowed = keys.optional_integer("attention.shared_kv_layers") or 0
    doubled = borrowed > 0 and inner[-1] == 2 * inner[0]
    if inner != [inner[0]] * (layers - borrowed) + [inner[0] * (1 + doubled)] * borrowed:
        raise keys.error(f"has {shown(inner)} as {keys.name}.feed_forward_length, which is not read")
    types = config["layer_types"]
    own = {index: {"head_dim": width, "num_key_value_heads": kv_heads[index]} for index in range(layers)}
    full = {str(index): sizes for index, sizes in own.items() if types[index] == FULL}
    few = {kv_heads[index] for index in range(layers) if types[index] == SLIDING}
    rotated = (keys.integer("rope.dimension_count", width), keys.integer("rope.dimension_count_swa", narrow))
    if len(few) > 1 or rotated != (width, narrow):
        raise keys.error(f"has {shown(kv_heads)} key-value heads and rotates {shown(rotated)} numbers of heads of "
                         f"{(width, narrow)}, which is not read")  # fmt: skip
    table = file.tensors.get("per_layer_token_embd.weight")
    return {
        "head_dim": narrow, "num_key_value_heads": few.pop() if few else kv_heads[0], "per_layer_config": full,
        "num_kv_shared_layers": borrowed, "use_double_wide_mlp": doubled,
        "attention_k_eq_v": any(f"blk.{index}.attn_v.weight" not in file.tensors for index in map(int, full)
                                if index < layers - borrowed),
        "hidden_size_per_layer_input": keys.get("embedding_length_per_layer_input") or 0,
        "vocab_size_per_layer_input": config["vocab_size"] if table is None else table.shape[0],
        "enable_moe_block": bool(keys.get("expert_count")),
        "rope_parameters": {FULL: _proportional(keys, width), SLIDING: _local_rope(keys)},
    }  # fmt: skip


def _proportional(keys: Keys, width: int) -> dict[str, Any]:
    """Rotary parameters where only some pairs rotate: the file divides their frequencies by 1, the others' by 1e30."""
    file, base = keys.file, keys.number("rope.freq_base", 1e6)
    if FREQUENCIES not in file.tensors:
        return {"rope_type": "default", "rope_theta": base}
    divisors = file.values(FREQUENCIES).double()
    rotated = int((divisors == 1).sum())
    if divisors.shape != (width // 2,) or not (divisors[:rotated] == 1).all() or not (divisors[rotated:] >= 1e20).all():
        raise keys.error(f"divides its rotary frequencies ({FREQUENCIES}) in another way than Gemma 4 does")
    return {"rope_type": "proportional", "rope_theta": base, "partial_rotary_factor": rotated / (width // 2)}


def _sliding(keys: Keys) -> list[str]:
    """Layer types where some have a window. Raises ModelError."""
    pattern = keys.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        period = keys.integer("attention.sliding_window_pattern", PERIODS[keys.name])
        pattern = [bool((index + 1) % period) for index in range(keys.layers)]
    if len(pattern) != keys.layers:
        raise keys.error(f"has {keys.layers} layers, but says of {len(pattern)} whether they have a window")
    return [SLIDING if slides else FULL for slides in pattern]


def _dtype(file: GGUFFile) -> str:
    """The dtype of activations: that of most of the matrices' bytes, bfloat16 where these are quantized."""
    most = next(iter(file.types()), "BF16")
    return str(FLOATS.get(most, torch.bfloat16)).removeprefix("torch.")


def _special_ids(file: GGUFFile, vocabulary: int) -> dict[str, Any]:
    """The ids of tokens that begin and end texts. Raises ModelError."""
    begin, *others = [special_id(file.metadata, n, vocabulary, str(file.path)) for n in ("bos", "eos", "eot", "eom")]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    named = enumerate(tokens[:vocabulary] if isinstance(tokens, list) else ())
    ends = sorted({index for index in others if index is not None} | {i for i, token in named if token in ENDS})
    return {"bos_token_id": begin, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}


def special_id(metadata: Mapping[str, Any], name: str, count: int, where: str) -> int | None:
    """The id of ``bos`` or the like. Raises ModelError if it is none of ``count`` tokens."""
    result = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if result is not None and (type(result) is not int or not 0 <= result < count):
        raise ModelError(f"{where} has {shown(result)} as tokenizer.ggml.{name}_token_id; there are {count} tokens")
    return result

"""Checks a checkpoint's config before anything is built from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from forerun.core.config import NOT_NEGATIVE, POSITIVE, Within
from forerun.core.errors import ModelError, shown
from forerun.models.architectures import seq2seq
from forerun.models.architectures.description import Architecture
from forerun.models.architectures.families import ARCHITECTURES
from forerun.models.files import checkpoint
from forerun.models.files.checkpoint import Tensor
from forerun.models.files.gguf import GGUFTensor
from forerun.models.weights.prequantized import SCHEMES, refusal

LARGEST = 2**31 - 1
SHORTEST_CONTEXT = 32
"""Tokens. Nobody trains shorter contexts, and the tests that run while a model is loaded need some."""
SIZE = Within(least=1, most=LARGEST, whole=True)
CONTEXT = Within(least=SHORTEST_CONTEXT, most=LARGEST, whole=True)
_is_integer = Within(whole=True).permits
_is_count = SIZE.permits
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "num_decoder_layers", "d_ff", "encoder_layers", "decoder_layers",
    "encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
LAYERS = ("full_attention", "sliding_attention", "dense", "sparse")
"""Layer types that are run: attention over all tokens or the last ones, an MLP or experts."""
SCALES = (
    "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "attention_multiplier",
    "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale",
)  # fmt: skip
DEPTHS = (
    "num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_blocks", "num_encoder_layers", "num_decoder_layers",
    "encoder_layers", "decoder_layers",
)  # fmt: skip
"""Names of the number of layers."""
DEEP = 1000
"""No model has more layers: a larger number is compared with the weights before transformers loops over it."""
COMMON_ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
ROPE_NUMBERS = (
    "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow",
    "original_max_position_embeddings", "partial_rotary_factor",
)  # fmt: skip
FIELDS = (
    (SIZES, SIZE, f"an integer from 1 to {LARGEST}"),
    (("max_position_embeddings",), CONTEXT, f"an integer from {SHORTEST_CONTEXT} to {LARGEST}"),
    (EPSILONS, NOT_NEGATIVE, "a number of at least 0"),
    (SCALES, POSITIVE, "a number above 0, or null"),
)
"""Permitted values of config keys, where they are present. Sizes may be lists, one for each layer."""


def check_given(raw: Mapping[str, Any], path: Path) -> None:
    """Check ``config.json`` before transformers reads it. Raises ModelError for quantization that is not read, for a
    checkpoint that needs code of its own, and for keys that make transformers read other files."""
    text, mlx = raw.get("text_config"), raw.get("quantization")
    if isinstance(mlx, Mapping) and "group_size" in mlx:
        raise ModelError(
            f"{path.parent} holds weights quantized for MLX, Apple's framework: use the checkpoint they were made "
            "from, or a GGUF file of the model"
        )
    for part in (raw, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            if part.get(key) is not None and (reason := refusal(part[key])) is not None:
                raise ModelError(
                    f"{path.parent} holds weights quantized with {scheme(part[key])}, {reason}: "
                    "use the checkpoint they were made from (quantization= rounds it to 4 or 8 bits while loading)"
                )
    kind = raw.get("model_type")
    if raw.get("auto_map") and (not isinstance(kind, str) or not _is_known(kind)):
        raise ModelError(
            f"{path.parent} is a model of type {shown(kind)} that runs code of its own (auto_map in {path.name}); "
            "such code is never run, and transformers knows no such type"
        )
    if not isinstance(kind, str):
        raise ModelError(f"{path} cannot be used: model_type is {shown(kind)}, not the name of an architecture")
    for key in ("transformers_weights", "configuration_files"):
        if raw.get(key) is not None:
            raise ModelError(f"{path} names other files ({key}), which are not loaded: remove that key")
    for key in ("dtype", "torch_dtype"):
        if raw.get(key) is not None and not isinstance(raw[key], str):
            raise ModelError(f"{path} cannot be used: {key} must be a name, not {shown(raw[key])}")
    names = raw.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ModelError(f"{path} cannot be used: architectures is {shown(names)}, not a list of names")


def check_tokenizer(raw: Mapping[str, Any], path: Path) -> None:
    """Raise ModelError where a tokenizer's settings name files to read: those could be anywhere on this machine."""
    for key in ("vocab", "merges", "init_inputs", "fast_tokenizer_files"):
        if raw.get(key):
            raise ModelError(f"{path} names other files ({key}), which are not loaded: remove that key")


def check_depth(raw: Mapping[str, Any], path: Path) -> None:
    """Raise ModelError where ``config.json`` has more layers than the weights have tensors."""
    for part in (raw, *(value for value in raw.values() if isinstance(value, Mapping))):
        for name in DEPTHS:
            depth: Any = part.get(name)
            if not _is_integer(depth) or depth <= DEEP:
                continue
            count = len(checkpoint.read_headers(checkpoint.weight_files(path.parent), packed=True))
            if depth > count:
                raise ModelError(
                    f"{path} does not fit its weights: {name} is {shown(depth)}, but they are {count} tensors"
                )


def scheme(quantization: Any) -> str:
    """A ``quantization_config``'s scheme, for a message."""
    if not isinstance(quantization, Mapping):
        return f"an unknown scheme ({shown(quantization)})"
    method = str(quantization.get("quant_method", "an unknown scheme"))[:40]
    bits = quantization.get("bits", quantization.get("w_bit"))
    for count in (4, 8):
        if quantization.get(f"load_in_{count}bit") is True:
            bits = count
    name = SCHEMES[method.lower()].name if method.lower() in SCHEMES else method
    return f"{name} ({shown(bits)} bits)" if isinstance(bits, int) else name


def has_encoder(config: Any) -> bool:
    if not getattr(config, "is_encoder_decoder", False):
        return False
    from transformers import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

    return type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING


def check_config(config: Any, path: Path) -> None:
    """Check the config as transformers parsed it. Raises ModelError, naming the key, for values that no decoder can
    have, and for architectures that are not run."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PretrainedConfig

    text = config.get_text_config()
    if not isinstance(text, PretrainedConfig):
        raise ModelError(f"{path} cannot be used: text_config must be an object, not {shown(text)}")
    described = ARCHITECTURES.get(text.model_type)
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or config.model_type in ARCHITECTURES
    within = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and described is not None and bool(described.prefixes)
    if not has_encoder(config) and not known and not within:
        raise ModelError(f"{path.parent}: {config.model_type} is not a language model that transformers can run")
    _check_layers(text, described, path)
    _check_values(text, path)
    check_rope(getattr(text, "rope_parameters", None), path)
    reason = seq2seq.refusal(config) if has_encoder(config) else None
    if reason is not None:
        raise ModelError(f"{path.parent} is an encoder-decoder that forerun does not run: {reason}")


def _check_layers(text: Any, described: Architecture | None, path: Path) -> None:
    """Check the types of layers, and those that have sizes of their own."""
    differing = text.per_layer_attributes
    if differing and described is not None and described.attention.per_layer_sizes:
        text.allow_global_per_layer_attribute_access = True
        for layer, name in product(text.per_layer_config, ("num_key_value_heads", "head_dim")):
            if not _is_count(getattr(layer, name)):
                raise ModelError(f"{path} cannot be used: {name} of a layer is {shown(getattr(layer, name))}")
    elif differing:
        raise ModelError(
            f"{path.parent} ({text.model_type}) gives its layers sizes of their own ({', '.join(sorted(differing))}), "
            "which forerun does not run"
        )
    own = () if described is None else described.layer_types
    for kind in _as_list(getattr(text, "layer_types", None)):
        if kind not in (*LAYERS, *own):
            runs = " and ".join(["full_attention", "sliding_attention", *own])
            raise ModelError(
                f"{path.parent} has layers of kind {shown(kind)}, which forerun does not run ({text.model_type}); it "
                f"runs models of {runs}"
            )


def _check_values(text: Any, path: Path) -> None:
    def refuse(name: str, expected: str) -> None:
        raise ModelError(f"{path} cannot be used: {name} must be {expected}, not {shown(getattr(text, name))}")

    def get(name: str) -> Any:
        return getattr(text, name, None)

    for names, limit, expected in FIELDS:
        for name in names:
            value = get(name)
            if not all(map(limit.permits, [value] if value is not None and names is not SIZES else _as_list(value))):
                refuse(name, expected)
    heads, shared = get("num_attention_heads"), get("num_key_value_heads")
    if _is_count(heads) and _is_count(shared) and heads % shared:
        refuse("num_attention_heads", f"a multiple of num_key_value_heads ({shared})")
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        if get("enable_moe_block") and not _is_count(get(name)):
            refuse(name, f"an integer from 1 to {LARGEST}")
    for name, key in product(EXPERTS, ("num_experts_per_tok", "top_k_experts")):
        experts, chosen = get(name), get(key)
        if _is_count(experts) and chosen is not None and not (_is_count(chosen) and chosen <= experts):
            refuse(key, f"an integer from 1 to {name} ({experts})")
    for name in ACTIVATIONS:
        if get(name) is not None and not _is_activation(get(name)):
            refuse(name, "an activation that transformers knows")
    window = get("sliding_window")
    unused = window == 0 and get("use_sliding_window") is False  # as transformers reads Qwen 2's experts
    if window is not None and not _is_count(window) and not unused:
        refuse("sliding_window", "an integer of at least 1, or null")
    vocabulary, padding = get("vocab_size"), get("pad_token_id")
    if _is_count(vocabulary) and padding is not None and not (_is_integer(padding) and -1 <= padding < vocabulary):
        refuse("pad_token_id", f"a token id below {vocabulary}")


def check_rope(rope: Any, path: Path) -> None:
    """Check rotary parameters: one set, or one for each layer type. Raises ModelError."""
    if rope is None:
        return
    if not isinstance(rope, Mapping):
        raise ModelError(f"{path} cannot be used: rope_parameters must be an object, not {shown(rope)}")
    for name, value in rope.items():
        if name in ("rope_type", "type"):
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            if value not in ("default", *ROPE_INIT_FUNCTIONS):
                raise ModelError(f"{path} cannot be used: transformers knows no rope type {shown(value)}")
        elif isinstance(value, Mapping):
            check_rope(value, path)
        elif name in ROPE_NUMBERS and value is not None and not POSITIVE.permits(value):
            raise ModelError(f"{path} cannot be used: {name} of rope_parameters must be above 0, not {shown(value)}")
        elif name in ("mscale", "mscale_all_dim") and value is not None and not NOT_NEGATIVE.permits(value):
            reason = f"{name} of rope_parameters must be a number of at least 0, not {shown(value)}"
            raise ModelError(f"{path} cannot be used: {reason}")


def check_fit(config: Any, tensors: Mapping[str, Tensor | GGUFTensor], path: Path) -> None:
    """Raise ModelError where the config asks for more than the weights can hold, before memory is allocated for it."""
    text = config.get_text_config()
    total = sum(tensor.numel for tensor in tensors.values())
    layers = getattr(text, "num_hidden_layers", None) or 1
    vocabulary, width = (_largest(getattr(text, name, None)) for name in ("vocab_size", "hidden_size"))
    fits = {
        f"num_hidden_layers is {layers}": layers <= len(tensors),
        f"vocab_size is {vocabulary} and hidden_size {width}": vocabulary * width <= 4 * total,
    }
    for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", *EXPERTS):
        size = _largest(getattr(text, name, None))
        fits[f"{name} is {size}"] = size * width <= 4 * total
    for value, fit in fits.items():
        if not fit:
            raise ModelError(
                f"{path} does not fit its weights: {value}, but there are {len(tensors)} tensors with {total} numbers"
            )


def check_names(
    where: object, missing: Sequence[str], unexpected: Iterable[str], parameters: Iterable[str], config: Any
) -> None:
    """Raise ModelError for weights that ``where`` lacks, and for those that its config leaves out.

    The latter are unexpected tensors of parts that the model has, in this or in another layer. Layers for multi-token
    prediction, after the model's own, belong to the drafter ``mtp``.
    """
    parts = {_part(name) for name in parameters}
    text = config.get_text_config()
    first, predicting = text.num_hidden_layers, getattr(text, "num_nextn_predict_layers", None)
    last = first + (predicting if _is_integer(predicting) else 0)
    extra = sorted(
        name
        for name in unexpected
        if _part(name) in parts
        and not any(first <= int(layer) < last for layer in re.findall(r"\blayers\.(\d+)\.", name))
    )
    for names, reason in ((missing, "lacks {} weights"), (extra, "has {} weights that its config leaves out")):
        if names:
            raise ModelError(f"{where} {reason.format(len(names))}, {names[0]} among them")


def _part(name: str) -> str:
    """The part of a layer that a tensor belongs to, whatever the layer's number."""
    return re.sub(r"\.\d+\.", ".#.", name).rpartition(".")[0]


def check_ids(result: Any, vocabulary: int, path: Path) -> frozenset[int]:
    """The ids in ``eos_token_id``, which is None, an id or a list. Ids beyond the vocabulary, as small test models have
    them, are left out. Raises ModelError for anything that is not an id."""
    if result is None:
        return frozenset()
    ids = result if isinstance(result, list) else [result]
    for token in ids:
        if not _is_integer(token) or token < 0:
            raise ModelError(f"{path} cannot be used: eos_token_id {shown(token)} is not a token id")
    return frozenset(token for token in ids if token < vocabulary)


def _is_known(kind: str) -> bool:
    from transformers import CONFIG_MAPPING

    return kind in CONFIG_MAPPING


def _is_activation(name: Any) -> bool:
    if name in COMMON_ACTIVATIONS:
        return True
    from transformers.activations import ACT2FN  # takes as long as torch to import

    return name in ACT2FN


def _as_list(value: Any) -> list[Any]:
    """Some architectures have one size per layer."""
    return [] if value is None else value if isinstance(value, list) and value else [value]


def _largest(value: Any) -> int:
    return max(_as_list(value), default=1)

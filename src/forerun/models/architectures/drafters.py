"""Drafters' decoder layers as data, which run like any model's: EAGLE-3's, and layers for multi-token prediction that
checkpoints bring along (DeepSeek-V3, arXiv 2412.19437, section 2.2).

The latter are layers of their family with full attention. Names: Qwen 3.5's and Qwen3-Next's ``mtp.*``, DeepSeek's and
GLM's ``model.layers.N.{enorm,hnorm,eh_proj,...}``, MiMo's ``model.mtp_layers.0.*``, GGUF's ``blk.N.nextn.*``.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from forerun.core.errors import ModelError
from forerun.models.architectures.description import Architecture, Attention, DraftInput, Name, Norms
from forerun.models.architectures.families import ARCHITECTURES, HEAD_NORMS, LLAMA, QWEN3_5_MOE, SIGMOID_GROUPS
from forerun.models.architectures.shapes import random_weights, shapes
from forerun.models.architectures.spec import FULL, Spec, bind, refusal
from forerun.models.files.open import CachedConfig

MTP_MIX = Name("model.eh_proj", "nextn.eh_proj")
MTP_INPUT = DraftInput(
    mix=MTP_MIX, norm_embedding=Name("model.enorm", "nextn.enorm"), norm_given=Name("model.hnorm", "nextn.hnorm")
)
MTP_NORM = Name("model.norm", "nextn.shared_head_norm")
GLM4_MOE = Architecture(
    model_type="glm4_moe", causal="Glm4MoeForCausalLM", gguf="glm4moe",
    norms=replace(HEAD_NORMS, before_mlp=Name("post_attention_layernorm", "post_attention_norm")),
    attention=Attention(bias="attention_bias", partial_rotary=True), experts=SIGMOID_GROUPS,
)  # fmt: skip
QWEN3_NEXT = replace(QWEN3_5_MOE, model_type="qwen3_next", causal="Qwen3NextForCausalLM", gguf="qwen3next")
OTHERS = {each.model_type: each for each in (GLM4_MOE, QWEN3_NEXT)}
"""Families of which only this layer is described."""
RENAMED = {
    "fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm", "input_proj": "eh_proj", "final_layernorm": "norm", "shared_head.norm": "norm",
}  # fmt: skip
OUTER = ("eh_proj", "enorm", "hnorm", "norm")
MIMO = "mtp_layers"
"""In names of MiMo, whose ``eh_proj`` reads the hidden state first."""
PATTERNS = (
    r"(?:model\.)?(?:language_model\.)?mtp\.(?:layers\.{m}\.)?(.*)", rf"(?:model\.)?{MIMO}\.{{m}}\.(.*)",
    r"(?:model\.)?(?:language_model\.)?layers\.{n}\.(.*)", r"blk\.{n}\.(.*)",
)  # fmt: skip
"""Patterns of a module's tensor names; ``{m}`` is its number, ``{n}`` that plus the number of the target's layers."""
IGNORED = ("embed_tokens.weight", "shared_head.head.weight", "shared_head_head.weight", "rotary_emb.inv_freq")
"""Copies of the target's embedding and output layer."""
FURTHER_LAYERS = re.compile(r"layers\.\d+\.")


def mtp_names(names: Iterable[str], num_layers: int, module: int = 0) -> dict[str, str]:
    """A module's tensors: the names that ``mtp_spec`` describes, or GGUF's for them, by a file's. Empty if there is no
    such module. Qwen's share all but the decoder layer."""
    numbers = {"{m}": str(module), "{n}": str(num_layers + module)}
    patterns = [re.compile(re.sub(r"\{[mn]\}", lambda found: numbers[found[0]], pattern)) for pattern in PATTERNS]
    result: dict[str, str] = {}
    for name in names:
        match = next((found for pattern in patterns if (found := pattern.fullmatch(name))), None)
        if match is None or match[1].endswith(IGNORED) or FURTHER_LAYERS.match(match[1]):
            continue
        if name.startswith("blk."):
            result[name] = match[1] if match[1].startswith("nextn.") else f"blk.0.{match[1]}"
            continue
        stem, _, kind = match[1].removeprefix("mtp_block.").rpartition(".")
        stem = RENAMED.get(stem, stem)
        result[name] = f"model.{stem}.{kind}" if stem in OUTER else f"model.layers.0.{stem}.{kind}".replace("..", ".")
    mixes = {f"{MTP_MIX.checkpoint}.weight", f"{MTP_MIX.gguf}.weight"} & {*result.values()}
    return result if mixes and any(own.startswith(("model.layers.0.", "blk.0.")) for own in result.values()) else {}


def gguf_names(architecture: Architecture) -> dict[str, str]:
    """GGUF's names of the layer's tensors by a checkpoint's."""
    result = {each.checkpoint: each.gguf for each in architecture.outer_names()}
    return result | {f"model.layers.0.{each.checkpoint}": f"blk.0.{each.gguf}" for each in architecture.layer_names()}


def mtp_spec(config: Any, names: Collection[str] | None = None) -> tuple[Any, Spec]:
    """The layer's config and spec, for a target of ``config``. ``names`` are its tensors, a checkpoint's or GGUF's,
    which say whether it has experts and query and key norms; None: as its family. Raises ModelError if unsupported."""
    family = ARCHITECTURES.get(config.model_type) or OTHERS.get(config.model_type)
    if family is None or family.attention.per_layer_sizes or family.mlp.layer_type is not None:
        family, config = LLAMA, _plain(config)

    def has(name: Name | None) -> bool:
        if name is None or names is None:
            return name is not None
        return f"model.layers.0.{name.checkpoint}.weight" in names or f"blk.0.{name.gguf}.weight" in names

    norms, experts = family.norms, family.experts
    architecture = replace(
        family, norm=MTP_NORM, layers=Name("model.layers", "blk"), draft_input=MTP_INPUT, mixer=None, multipliers=(),
        norms=norms if has(norms.query) else replace(norms, query=None, key=None),
        experts=experts if experts is not None and has(experts.router) else None,
    )  # fmt: skip
    one = copy.copy(config)
    layer = {
        "num_hidden_layers": 1, "layer_types": [FULL], "no_rope_layers": [1], "mlp_layer_types": ["sparse"],
        "first_k_dense_replace": 0, "num_dense_layers": 0, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "num_nextn_predict_layers": 0,
    }  # fmt: skip
    for key, value in layer.items():
        setattr(one, key, value)
    one.architectures = None
    if (reason := refusal(one, architecture)) is not None:
        raise ModelError(f"mtp does not run a layer of {config.model_type}: {reason}")
    return one, bind(one, architecture)


def _plain(config: Any) -> Any:
    """The config of a Llama of the same width."""
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    return llama_config(
        hidden_size=config.hidden_size, vocab_size=config.vocab_size, num_attention_heads=heads,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        rope_parameters={"rope_theta": float(rope.get("rope_theta") or 10000.0)},
    )  # fmt: skip


def llama_config(**sizes: Any) -> Any:
    """The config of a Llama without biases, of one layer unless ``sizes`` say more."""
    if sizes["rope_parameters"].get("rope_type", "default") == "default":
        kind: Any = CachedConfig
    else:  # whose frequencies transformers computes, of a config of its own
        from transformers import LlamaConfig

        kind = LlamaConfig
    return kind(
        model_type=LLAMA.model_type, hidden_act="silu", attention_bias=False, mlp_bias=False,
        **{"num_hidden_layers": 1, **sizes},
    )  # fmt: skip


def mtp_example(config: Any) -> dict[str, torch.Tensor]:
    """Random weights of such a layer, by Qwen 3.5's names."""
    one, spec = mtp_spec(config)
    fc = {f"model.{new}.weight": f"mtp.{old}.weight" for old, new in list(RENAMED.items())[:3]}
    weights = random_weights(shapes(one, spec))
    return {fc.get(name, name.replace("model.", "mtp.", 1)): tensor for name, tensor in weights.items()}


HEAD_ATTENTION = Attention(qkv=(Name("q_proj", ""), Name("k_proj", ""), Name("v_proj", "")), out=Name("o_proj", ""))
"""As trained heads name it."""
EAGLE_NORM = Name("hidden_norm", "")
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Numbers of Llama 3's scaling of rotary frequencies."""


def eagle(*, mixed: bool, normed: bool) -> Architecture:
    """EAGLE-3's layer; ``mixed`` and ``normed`` are ``mixed`` and ``norm_before_residual`` of ``EagleHead``."""
    norms = Norms(before_attention=None if normed else EAGLE_NORM, token=None if mixed else Name("input_layernorm", ""))
    given = DraftInput(mix=Name("mix", "") if mixed else None, norm_given=EAGLE_NORM if normed else None)
    return replace(
        LLAMA, causal="EAGLE-3", norms=norms, norm=Name("norm", ""), layers=Name("layers", ""), draft_input=given,
        attention=HEAD_ATTENTION,
    )  # fmt: skip


def dflash(config: Any, block: int, options: Mapping[str, Any]) -> Spec:
    """The spec of DFlash's layers for blocks of ``block`` rows, of a head's ``options``."""
    norms = Norms(query=Name("q_norm", ""), key=Name("k_norm", ""))
    names = [Name(f"{part}_conv", "") for part in ("attention", "mlp")]
    given = DraftInput(block=block, convolutions=None if options["group"] is None else (names[0], names[1]))
    spec = bind(config, replace(
        LLAMA, causal="DFlash", norms=norms, norm=Name("norm", ""), layers=Name("blocks", ""), draft_input=given,
        attention=HEAD_ATTENTION,
    ))  # fmt: skip
    windows, causal = (options[name] or [None] * len(spec.layers) for name in ("windows", "causal"))
    layers = zip(spec.layers, windows, causal, strict=True)
    return replace(spec, layers=tuple(replace(each, window=w, causal=bool(c)) for each, w, c in layers))


def head_config(sizes: Any, options: Mapping[str, Any]) -> Any:
    """The layers' config, of a head's sizes and options."""
    rope = {"rope_type": "default", "rope_theta": options["theta"]}
    if options.get("stretch"):
        rope |= {"rope_type": "llama3", **dict(zip(LLAMA3, options["stretch"]))}
    return llama_config(
        hidden_size=sizes.hidden_size, vocab_size=sizes.vocab_size, intermediate_size=options["inner_size"],
        num_attention_heads=options["heads"], num_key_value_heads=options["kv_heads"], head_dim=options["width"],
        rms_norm_eps=options["eps"], rope_parameters=rope, num_hidden_layers=options.get("blocks", 1),
    )  # fmt: skip

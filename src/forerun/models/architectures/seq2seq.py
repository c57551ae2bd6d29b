"""Encoder-decoders: what their stacks are made of, at a checkpoint's sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

UNBOUNDED = 512
"""Positions where positions are relative and neither the config nor the caller says how many."""
SPARE = 64
"""Relative positions beyond those, for drafts that reach behind the last one."""
ACTIVATIONS = {
    "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu",
    "swish": "silu",
}  # fmt: skip
"""By their names in configs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePart:
    """An attention or an MLP of a layer, by its tensors' names behind the layer's; ``norm`` is the norm before or
    behind it."""

    weights: tuple[str, ...]
    """Queries, keys and values; or the gate, if there is one, and the inner layer."""
    out: str
    norm: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStack:
    """The encoder or the decoder. Names without ``.weight``; None: there is no such part."""

    embedding: str
    layers: str
    count: int
    heads: int
    attention: ModulePart
    mlp: ModulePart
    cross: ModulePart | None = None
    norm_embedding: str | None = None
    norm: str | None = None
    """Behind the last layer."""
    positions: str | None = None
    """Learned ones."""
    bias: str | None = None
    """Relative ones: a number for each bucket of distances and each head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2Seq:
    causal: str
    """transformers' class with the output layer."""
    hidden: int
    width: int
    """Of a head."""
    encoder: LayerStack
    decoder: LayerStack
    norm_first: bool
    """Norms before attentions and MLPs, which are then added to what was; or behind the sum."""
    rms: bool
    """Norms without mean and bias."""
    eps: float
    scale: float
    """Of attention scores."""
    activation: str
    max_len: int
    """Positions of each side."""
    embedding_scale: float = 1.0
    head_scale: float = 1.0
    """Of what the output layer reads."""
    skipped_positions: int = 0
    """Rows of learned positions before that of the first."""
    buckets: int = 0
    farthest: int = 0
    """Distance from which on all are in the last bucket."""


def _t5(config: Any, max_model_len: int | None) -> Seq2Seq:
    gated = config.is_gated_act

    def attention(index: int, name: str) -> ModulePart:
        inside = f"layer.{index}.{name}"
        weights = tuple(f"{inside}.{each}" for each in "qkv")
        return ModulePart(weights=weights, out=f"{inside}.o", norm=f"layer.{index}.layer_norm")

    def stack(name: str, count: int, *, decodes: bool) -> LayerStack:
        last = f"layer.{2 if decodes else 1}"
        inner = tuple(f"{last}.DenseReluDense.{each}" for each in (("wi_0", "wi_1") if gated else ("wi",)))
        return LayerStack(
            embedding=f"{name}.embed_tokens",
            layers=f"{name}.block",
            count=count,
            heads=config.num_heads,
            attention=attention(0, "SelfAttention"),
            cross=attention(1, "EncDecAttention") if decodes else None,
            mlp=ModulePart(weights=inner, out=f"{last}.DenseReluDense.wo", norm=f"{last}.layer_norm"),
            norm=f"{name}.final_layer_norm",
            bias=f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias",
        )

    positions = max(max_model_len or 0, getattr(config, "n_positions", None) or UNBOUNDED)
    return Seq2Seq(
        causal="T5ForConditionalGeneration" if config.model_type == "t5" else "MT5ForConditionalGeneration",
        hidden=config.d_model,
        width=config.d_kv,
        encoder=stack("encoder", config.num_layers, decodes=False),
        decoder=stack("decoder", config.num_decoder_layers, decodes=True),
        norm_first=True,
        rms=True,
        eps=config.layer_norm_epsilon,
        scale=1.0,
        activation=config.dense_act_fn,
        max_len=positions,
        head_scale=config.d_model**-0.5 if getattr(config, "scale_decoder_outputs", False) else 1.0,
        buckets=config.relative_attention_num_buckets,
        farthest=config.relative_attention_max_distance,
    )


def _bart(config: Any, max_model_len: int | None) -> Seq2Seq:
    def attention(name: str) -> ModulePart:
        weights = tuple(f"{name}.{each}_proj" for each in "qkv")
        return ModulePart(weights=weights, out=f"{name}.out_proj", norm=f"{name}_layer_norm")

    def stack(name: str, count: int, heads: int, cross: ModulePart | None = None) -> LayerStack:
        return LayerStack(
            embedding=f"model.{name}.embed_tokens",
            layers=f"model.{name}.layers",
            count=count,
            heads=heads,
            attention=attention("self_attn"),
            cross=cross,
            mlp=ModulePart(weights=("fc1",), out="fc2", norm="final_layer_norm"),
            norm_embedding=f"model.{name}.layernorm_embedding",
            positions=f"model.{name}.embed_positions",
        )

    width = config.d_model // config.decoder_attention_heads
    return Seq2Seq(
        causal="BartForConditionalGeneration",
        hidden=config.d_model,
        width=width,
        encoder=stack("encoder", config.encoder_layers, config.encoder_attention_heads),
        decoder=stack("decoder", config.decoder_layers, config.decoder_attention_heads, attention("encoder_attn")),
        norm_first=False,
        rms=False,
        eps=1e-5,
        scale=width**-0.5,
        activation=config.activation_function,
        max_len=config.max_position_embeddings,
        embedding_scale=config.d_model**0.5 if config.scale_embedding else 1.0,
        skipped_positions=2,
    )


SEQ2SEQ: dict[str, Callable[[Any, int | None], Seq2Seq]] = {"t5": _t5, "mt5": _t5, "bart": _bart}
"""By ``model_type``."""


def refusal(config: Any) -> str | None:
    """None if a description covers such an encoder-decoder, otherwise the reason why none does."""
    kind = config.model_type
    if kind not in SEQ2SEQ:
        return f"{kind} is not among the described encoder-decoders ({', '.join(SEQ2SEQ)})"
    if kind == "bart":
        heads = {config.encoder_attention_heads, config.decoder_attention_heads}
        if len(heads) > 1 or config.d_model % heads.pop():
            return "encoder and decoder must have one number of heads, which divides d_model"
    buckets = getattr(config, "relative_attention_num_buckets", 4)
    if kind != "bart" and not 4 <= buckets <= 2 * config.relative_attention_max_distance - 1:
        return f"{buckets} buckets of relative positions up to {config.relative_attention_max_distance}"
    activation = config.activation_function if kind == "bart" else config.dense_act_fn
    return None if activation in ACTIVATIONS else f"activation {activation!r}"


def bind(config: Any, max_model_len: int | None = None) -> Seq2Seq:
    """What describes a checkpoint that nothing refuses. Where positions are relative, ``max_model_len`` is how many
    there may be."""
    return SEQ2SEQ[config.model_type](config, max_model_len)

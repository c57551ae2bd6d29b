"""Encoder-decoders as data: what their stacks are made of, at a checkpoint's sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

UNBOUNDED = 512
"""Positions of a model with relative positions, if neither config nor caller says how many."""
SPARE = 64
"""Relative positions beyond those, for drafts that go past the last one."""
ACTIVATIONS = {
    "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu",
    "swish": "silu",
}  # fmt: skip
"""By their names in configs."""


@dataclass(frozen=True, slots=True)
class BlockNames:
    """Names in its layer of an attention's or MLP's tensors, without ``.weight``."""

    in_proj: tuple[str, ...]
    """Queries, keys and values; or the inner layer, after its gate if there is one."""
    out_proj: str
    norm: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StackNames:
    """The encoder or the decoder: its tensors' names, without ``.weight``; None where it has no such part."""

    embedding: str
    layers: str
    count: int
    heads: int
    attention: BlockNames
    mlp: BlockNames
    cross: BlockNames | None = None
    embedding_norm: str | None = None
    norm: str | None = None
    """After the last layer."""
    positions: str | None = None
    """Learned position embeddings."""
    bias: str | None = None
    """Relative positions: biases [buckets of distances, heads]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2Seq:
    causal: str
    """transformers' class with the output layer."""
    hidden: int
    head_dim: int
    encoder: StackNames
    decoder: StackNames
    norm_first: bool
    """Norms come before attentions and MLPs; otherwise after the residual is added."""
    rms: bool
    """RMS norms; otherwise layer norms."""
    eps: float
    scale: float
    """Multiplies attention scores."""
    activation: str
    max_len: int
    """Positions of encoder and decoder each."""
    embedding_scale: float = 1.0
    head_scale: float = 1.0
    """Multiplies inputs of the output layer."""
    skipped_positions: int = 0
    """Rows of learned positions before that of position 0."""
    buckets: int = 0
    farthest: int = 0
    """The distance from which on all are in the last bucket."""


def _t5(config: Any, max_model_len: int | None) -> Seq2Seq:
    def attention(index: int, name: str) -> BlockNames:
        prefix = f"layer.{index}.{name}"
        return BlockNames(tuple(f"{prefix}.{each}" for each in "qkv"), f"{prefix}.o", f"layer.{index}.layer_norm")

    def mlp(index: int) -> BlockNames:
        prefix, inner = f"layer.{index}.DenseReluDense", ("wi_0", "wi_1") if config.is_gated_act else ("wi",)
        return BlockNames(tuple(f"{prefix}.{each}" for each in inner), f"{prefix}.wo", f"layer.{index}.layer_norm")

    def stack(name: str, count: int, *, decodes: bool) -> StackNames:
        return StackNames(
            embedding=f"{name}.embed_tokens",
            layers=f"{name}.block",
            count=count,
            heads=config.num_heads,
            attention=attention(0, "SelfAttention"),
            cross=attention(1, "EncDecAttention") if decodes else None,
            mlp=mlp(2 if decodes else 1),
            norm=f"{name}.final_layer_norm",
            bias=f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias",
        )

    return Seq2Seq(
        causal="T5ForConditionalGeneration" if config.model_type == "t5" else "MT5ForConditionalGeneration",
        hidden=config.d_model,
        head_dim=config.d_kv,
        encoder=stack("encoder", config.num_layers, decodes=False),
        decoder=stack("decoder", config.num_decoder_layers, decodes=True),
        norm_first=True,
        rms=True,
        eps=config.layer_norm_epsilon,
        scale=1.0,
        activation=config.dense_act_fn,
        max_len=max(max_model_len or 0, getattr(config, "n_positions", None) or UNBOUNDED),
        head_scale=config.d_model**-0.5 if getattr(config, "scale_decoder_outputs", False) else 1.0,
        buckets=config.relative_attention_num_buckets,
        farthest=config.relative_attention_max_distance,
    )


def _bart(config: Any, max_model_len: int | None) -> Seq2Seq:
    def attention(name: str) -> BlockNames:
        return BlockNames(tuple(f"{name}.{each}_proj" for each in "qkv"), f"{name}.out_proj", f"{name}_layer_norm")

    def stack(name: str, count: int, heads: int, cross: BlockNames | None = None) -> StackNames:
        return StackNames(
            embedding=f"model.{name}.embed_tokens",
            layers=f"model.{name}.layers",
            count=count,
            heads=heads,
            attention=attention("self_attn"),
            cross=cross,
            mlp=BlockNames(("fc1",), "fc2", "final_layer_norm"),
            embedding_norm=f"model.{name}.layernorm_embedding",
            positions=f"model.{name}.embed_positions",
        )

    head_dim = config.d_model // config.decoder_attention_heads
    return Seq2Seq(
        causal="BartForConditionalGeneration",
        hidden=config.d_model,
        head_dim=head_dim,
        encoder=stack("encoder", config.encoder_layers, config.encoder_attention_heads),
        decoder=stack("decoder", config.decoder_layers, config.decoder_attention_heads, attention("encoder_attn")),
        norm_first=False,
        rms=False,
        eps=1e-5,
        scale=head_dim**-0.5,
        activation=config.activation_function,
        max_len=config.max_position_embeddings,
        embedding_scale=config.d_model**0.5 if config.scale_embedding else 1.0,
        skipped_positions=2,
    )


SEQ2SEQ: dict[str, Callable[[Any, int | None], Seq2Seq]] = {"t5": _t5, "mt5": _t5, "bart": _bart}
"""By ``model_type``. A model with relative positions has as many as the second argument says."""


def refusal(config: Any) -> str | None:
    """Why no description covers such an encoder-decoder; None if one does."""
    kind = config.model_type
    if kind not in SEQ2SEQ:
        return f"{kind} is not among the described encoder-decoders ({', '.join(SEQ2SEQ)})"
    if kind == "bart":
        heads, activation = {config.encoder_attention_heads, config.decoder_attention_heads}, config.activation_function
        if len(heads) > 1 or config.d_model % heads.pop():
            return "encoder and decoder must have one number of heads, which divides d_model"
    else:
        buckets, activation = config.relative_attention_num_buckets, config.dense_act_fn
        if not 4 <= buckets <= 2 * config.relative_attention_max_distance - 1:
            return f"{buckets} buckets of relative positions up to {config.relative_attention_max_distance}"
    return None if activation in ACTIVATIONS else f"activation {activation!r}"

"""What a decoder's architecture is made of, as data; everything that runs or loads a model derives from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

KINDS = ("weight", "bias")
"""How a tensor's name ends."""


@dataclass(frozen=True, slots=True)
class Name:
    """What a tensor is called in a checkpoint's safetensors files and in GGUF files, without ``.weight`` or ``.bias``;
    in a layer, behind the layer's own name. ``{}`` in the first is an expert's number: GGUF stacks experts."""

    checkpoint: str
    gguf: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """A layer's RMS norms; None: there is none at that place."""

    before_attention: Name | None = Name("input_layernorm", "attn_norm")
    after_attention: Name | None = None
    """Of what attention adds to the residual."""
    before_mlp: Name | None = Name("post_attention_layernorm", "ffn_norm")
    after_mlp: Name | None = None
    query: Name | None = None
    key: Name | None = None
    whole: bool = False
    """Query and key are normed over all heads together, not head by head."""
    eps: str = "rms_norm_eps"
    """A config key."""
    plus: float = 0.0
    """Added to the weights that a checkpoint has; in GGUF files it is in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """``scale`` and ``softcap`` name config keys."""

    qkv: tuple[Name, ...] = (
        Name("self_attn.q_proj", "attn_q"), Name("self_attn.k_proj", "attn_k"), Name("self_attn.v_proj", "attn_v")
    )  # fmt: skip
    """Three projections, or one that holds them end to end."""
    out: Name = Name("self_attn.o_proj", "attn_output")
    bias: str | None = None
    """A config key that says whether projections have biases; ``inputs``: all but ``out`` do."""
    scale: str | None = None
    """Scores are multiplied by its power of -1/2; None: by that of a head's width."""
    softcap: str | None = None
    window: Literal["none", "every", "typed"] = "none"
    """``sliding_window`` holds in no layer, in every one, or in those that ``layer_types`` calls sliding."""
    rotary: Literal["every", "listed", "typed"] = "every"
    """Every layer turns queries and keys; those that ``no_rope_layers`` has a 1 for; or every one with the rotary
    parameters of its type in ``layer_types``."""
    partial: bool = False
    """``partial_rotary_factor`` of a head may be turned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """down(activation(gate) * up)."""

    gate_up: tuple[Name, ...] = (Name("mlp.gate_proj", "ffn_gate"), Name("mlp.up_proj", "ffn_up"))
    """Two projections, or one that holds them end to end."""
    down: Name = Name("mlp.down_proj", "ffn_down")
    activation: str | None = "hidden_act"
    """The config key that names it; None: silu."""
    width: str = "intermediate_size"
    """The config key of the outputs of the gate; LFM2's ``block_*`` keys change what it says."""
    bias: str | None = None
    """A config key that says whether projections have biases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Instead of the MLP: those experts whose router scores are highest, added up with weights that are the softmax of
    all scores. All other fields but ``placed`` name config keys."""

    router: Name
    gate_up: tuple[Name, Name]
    down: Name
    count: str
    width: str = "intermediate_size"
    chosen: str = "num_experts_per_tok"
    normalised: str | None = None
    """Whether the chosen experts' weights are divided by their sum; None: always."""
    placed: Literal["every", "stepped"] = "every"
    """In every layer, or in those of ``decoder_sparse_step`` that are not in ``mlp_only_layers``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv:
    """out(C * conv(B * x)) of one projection's [B, C, x], in layers of the kind ``layers``. ``kernel`` and ``bias`` are
    config keys."""

    inputs: Name = Name("conv.in_proj", "shortconv.in_proj")
    conv: Name = Name("conv.conv", "shortconv.conv")
    out: Name = Name("conv.out_proj", "shortconv.out_proj")
    layers: str = "conv"
    kernel: str = "conv_L_cache"
    bias: str = "conv_bias"


Mixer = ShortConv
"""What a layer may have in the place of attention: it keeps a state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One kind of decoder."""

    model_type: str
    """In ``config.json``."""
    causal: str
    """transformers' class with the output layer."""
    gguf: str
    """``general.architecture`` in GGUF files."""
    interleaved: bool = False
    """GGUF files have the rows of queries and keys with rotated pairs side by side, not half a head apart."""
    embedding: Name = Name("model.embed_tokens", "token_embd")
    norm: Name = Name("model.norm", "output_norm")
    head: Name = Name("lm_head", "output")
    """Where a model has none, the embedding is the output layer."""
    layers: Name = Name("model.layers", "blk")
    embedding_scale: Literal["one", "root"] = "one"
    """Embeddings are multiplied by the square root of the hidden size."""
    logits_softcap: str | None = None
    """A config key."""
    norms: Norms = Norms()
    attention: Attention = Attention()
    mlp: Mlp = Mlp()
    experts: Experts | None = None
    mixer: Mixer | None = None

    def checkpoint_name(self, gguf: str) -> str | None:
        """A weight or bias of a GGUF file in a checkpoint; None for one that such a model does not have. GGUF stacks
        experts: their names have ``{}`` for the number of one."""
        stem, _, kind = gguf.rpartition(".")
        ends = {name.gguf: name.checkpoint for name in (self.embedding, self.norm, self.head)}
        if stem in ends:
            return f"{ends[stem]}.weight" if kind == "weight" else None
        block, _, rest = stem.partition(".")
        index, _, part = rest.partition(".")
        inside = {name.gguf: name.checkpoint for name in self.names()}
        if block != self.layers.gguf or not index.isdecimal() or part not in inside or kind not in KINDS:
            return None
        return f"{self.layers.checkpoint}.{index}.{inside[part]}.{kind}"

    def gguf_name(self, checkpoint: str) -> str | None:
        """The other way, for what is not stacked."""
        stem, _, kind = checkpoint.rpartition(".")
        ends = {name.checkpoint: name.gguf for name in (self.embedding, self.norm, self.head)}
        if stem in ends:
            return f"{ends[stem]}.weight" if kind == "weight" else None
        index, _, part = stem.removeprefix(f"{self.layers.checkpoint}.").partition(".")
        inside = {name.checkpoint: name.gguf for name in self.names() if "{}" not in name.checkpoint}
        return f"{self.layers.gguf}.{index}.{inside[part]}.{kind}" if part in inside and kind in KINDS else None

    def names(self) -> Iterator[Name]:
        """Of every tensor of a layer."""
        for part in (self.norms, self.attention, self.mlp, self.experts, self.mixer):
            for field in fields(part) if part is not None else ():
                value = getattr(part, field.name)
                result = value if isinstance(value, tuple) else (value,)
                yield from (name for name in result if isinstance(name, Name))

"""What a decoder's architecture is made of, as data. Everything that runs, loads or splits a model derives from it.

``families.py`` has the architectures, ``spec.py`` reads a checkpoint's config by one. Fields that are strings are keys
of ``config.json``, unless their comment says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

SUFFIXES = ("weight", "bias")
"""How a tensor's name ends."""


@dataclass(frozen=True, slots=True)
class Name:
    """A tensor's name in safetensors files and in GGUF files, without ``.weight`` or ``.bias``; for a tensor of a
    layer, without the layer's prefix. ``{}`` stands for an expert's number: GGUF stacks experts."""

    checkpoint: str
    gguf: str
    no_suffix: bool = False
    """Checkpoints add no ``.weight``."""
    gguf_second: str | None = None
    """A second GGUF tensor, which holds the later rows."""
    gguf_no_suffix: bool = False
    """GGUF files add no ``.weight``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """A layer's norms; None where a layer has no such norm."""

    before_attention: Name | None = Name("input_layernorm", "attn_norm")
    after_attention: Name | None = None
    """Norms attention's output before it is added to the residual."""
    token: Name | None = None
    """Norms the token's embedding: attention reads [this, its normed input] (EAGLE-3, arXiv 2503.01840)."""
    before_mlp: Name | None = Name("post_attention_layernorm", "ffn_norm")
    after_mlp: Name | None = None
    query: Name | None = None
    key: Name | None = None
    norm_values: bool = False
    """Values are normed per head too, without weights."""
    over_heads: bool = False
    """Query and key norms go over all heads together, not head by head."""
    after_rotary: bool = False
    """Query and key norms come after the rotary embedding."""
    offset: float = 0.0
    """Added to a checkpoint's weights (Gemma's 1 + w). GGUF files have it added already."""
    layer_norm: bool = False
    """The outer norms and the final one are layer norms, otherwise RMS norms."""
    bias: bool = False
    """Layer norms have biases."""
    eps: str = "rms_norm_eps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    qkv: tuple[Name, ...] = (
        Name("self_attn.q_proj", "attn_q"), Name("self_attn.k_proj", "attn_k"), Name("self_attn.v_proj", "attn_v")
    )  # fmt: skip
    """Three projections, or a fused one."""
    out: Name = Name("self_attn.o_proj", "attn_output")
    bias: str | None = None
    """Whether queries, keys and values have biases; ``always``: they do."""
    out_bias: str | None = None
    """The same for ``out``."""
    scale: str | None = None
    """Key of the value whose power -0.5 scales the scores (``query_pre_attn_scalar``); None: that of head_dim."""
    multiplier: str | float | None = None
    """Key of the factor that scales the scores instead (``attention_multiplier``), or the number itself."""
    softcap: str | None = None
    window: Literal["none", "all", "layer_types"] = "none"
    """Where ``sliding_window`` applies: in no layer, in all, or in those that ``layer_types`` calls sliding."""
    rotary: Literal["all", "no_rope_layers", "layer_types", "sliding", "position_embedding_type", "none"] = "all"
    """Which layers have a rotary embedding: all; those with a 1 in ``no_rope_layers``; all, with the parameters of
    their type in ``layer_types``; sliding ones (all, where the config has no window); all if
    ``position_embedding_type`` is ``rope``; or none."""
    llama4_scaling: bool = False
    """Queries grow with the position, by ``llama_4_scaling_beta``."""
    per_layer_sizes: bool = False
    """``per_layer_config`` gives each layer's head width and number of key-value heads."""
    shared_kv_layers: str | None = None
    """How many last layers read the KV cache of the last earlier layer of their type."""
    key_is_value: str | None = None
    """Whether in full-attention layers one projection makes both keys and values."""
    sinks: Name | None = None
    """Attention sinks: a score per head that takes part in the softmax and has no value."""
    gated: bool = False
    """The query projection has twice as many outputs: each head's queries, then its gate. The gate's sigmoid multiplies
    the head's output."""
    partial_rotary: bool = False
    """``partial_rotary_factor`` may be below 1."""
    interleaved: bool = False
    """Checkpoints have rotated pairs side by side (GPT-J's layout), not half a head apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). ``kv_a`` makes a row's latent, from
    which every head makes keys and values, and one rotated key for all heads. Queries come from the row, or from a
    latent of their own where the config has a ``q_lora_rank``. Checkpoints hold ``k_b`` and ``v_b`` of all heads as one
    ``kv_b``."""

    q: Name = Name("self_attn.q_proj", "attn_q")
    q_a: Name = Name("self_attn.q_a_proj", "attn_q_a")
    q_a_norm: Name = Name("self_attn.q_a_layernorm", "attn_q_a_norm")
    q_b: Name = Name("self_attn.q_b_proj", "attn_q_b")
    kv_a: Name = Name("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa")
    kv_a_norm: Name = Name("self_attn.kv_a_layernorm", "attn_kv_a_norm")
    k_b: Name = Name("self_attn.k_b_proj.{}", "attn_k_b")
    """One head's, transposed: it takes queries to the latent's width."""
    v_b: Name = Name("self_attn.v_b_proj.{}", "attn_v_b")
    kv_b: str = "self_attn.kv_b_proj.weight"
    """A checkpoint's tensor."""
    interleaved: str | None = "rope_interleave"
    """Whether checkpoints have rotated pairs side by side; None: they do."""
    eps: float = 1e-6
    """Of its norms, whatever the config says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """down(activation(gate) * up), or down(activation(up))."""

    gate_up: tuple[Name, ...] = (Name("mlp.gate_proj", "ffn_gate"), Name("mlp.up_proj", "ffn_up"))
    """Two projections, or a fused one; up alone where not ``gated``."""
    gated: bool = True
    down: Name = Name("mlp.down_proj", "ffn_down")
    activation: str | None = "hidden_act"
    """None: silu."""
    width: str = "intermediate_size"
    """LFM2's ``block_*`` keys change what it says."""
    width_factor: str | None = None
    """Multiplies ``width``."""
    double_wide: str | None = None
    """Whether layers that share keys and values are twice as wide."""
    bias: str | None = None
    layer_type: str | None = None
    """The type of layers that are an MLP alone; None: every layer has one, after attention or its replacement."""
    gguf_suffix: str = ""
    """GGUF files add this to its tensors' names in models with experts."""
    activation_params: tuple[Name, ...] = ()
    """Parameters of the activation, one number per layer: a tensor in checkpoints, a list in GGUF metadata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts in place of the MLP, or beside it. Of each row it takes the experts with the highest router
    scores and adds up their outputs, weighted by the softmax (or sigmoid) of the scores."""

    router: Name
    gate_up: tuple[Name, ...]
    """As the MLP's."""
    down: Name
    count: str
    width: str = "intermediate_size"
    top_k: str = "num_experts_per_tok"
    normalize: str | None = None
    """Whether the chosen experts' weights are divided by their sum; None: always."""
    eps: float = 1e-6
    """Added to that sum where weights are sigmoids."""
    bias: bool = False
    """Router and experts have biases."""
    clamp: tuple[tuple[str, float], ...] = ()
    """Keys and default values of steepness and limit, where the activation is (clamp(up) + 1) * gate *
    sigmoid(steepness * gate) with gates limited from above (gpt-oss)."""
    interleaved: bool = False
    """A checkpoint stacks a layer's experts, [experts, inputs, outputs], gate and up outputs alternating."""
    stacks: tuple[str, str] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    """A checkpoint's names of stacks [experts, outputs, inputs], gate before up."""
    gguf_fused: str = "ffn_gate_up_exps"
    """Some GGUF files' name of a stack that has gate and then up of each expert."""
    sigmoid: bool = False
    """Weights are the sigmoids of the scores."""
    score_bias: Name | None = None
    """Added to the sigmoids when experts are chosen, not to their weights."""
    has_score_bias: str | None = None
    """None: always."""
    factor: str | None = None
    """Multiplies the chosen experts' weights."""
    groups: tuple[str, str] | None = None
    """Keys: how many groups of equal size experts form, and how many groups are chosen among: those whose
    ``group_best`` highest scores have the largest sums."""
    group_best: int = 2
    method: str | None = None
    """Whether groups count (``group_limited_greedy``) or not (``greedy``); None: they do."""
    unsupported: tuple[str, ...] = ()
    """Keys of what is not described: refused unless their value is None, 0 or 1."""
    enabled: str | None = None
    """Whether there are experts; None: there are."""
    placement: Literal["all", "decoder_sparse_step", "mlp_layer_types"] = "all"
    """Which layers have experts: all; every ``decoder_sparse_step``-th that is not in ``mlp_only_layers``; or those
    that ``mlp_layer_types`` calls sparse."""
    layer_type: str | None = None
    """The type of layers that are experts alone; None: see ``placement``."""
    first_dense: str | None = None
    """How many first layers have the MLP alone."""
    beside_mlp: bool = False
    """Layers have an MLP beside the experts, whose output is added: the shared expert."""
    shared: Mlp | None = None
    """The MLP beside experts, where it is not that of layers without experts."""
    shared_gate: Name | None = None
    """A projection to one number, whose sigmoid multiplies the MLP's output."""
    norms: ExpertNorms | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNorms:
    """Norms of experts and of the MLP beside them (Gemma 4). Experts read ``before`` of the layer's residual, their sum
    goes through ``after``, and the MLP's output through ``mlp``. The router reads the residual normed and multiplied by
    ``scale`` [hidden size] / sqrt(hidden size). ``weights`` [experts] multiply the experts' weights."""

    before: Name
    after: Name
    mlp: Name
    scale: Name
    weights: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerEmbeddings:
    """Embeddings of each token for each layer (Gemma 3n and 4): e = (norm(project(embedding)) + row of ``table``) /
    sqrt(2). A layer adds after(out(activation(gate(x)) * e)). The first three names are the model's, the others a
    layer's. A ``hidden_size_per_layer_input`` of 0: there are none."""

    table: Name = Name("model.embed_tokens_per_layer", "per_layer_token_embd")
    project: Name = Name("model.per_layer_model_projection", "per_layer_model_proj")
    norm: Name = Name("model.per_layer_projection_norm", "per_layer_proj_norm")
    gate: Name = Name("per_layer_input_gate", "inp_gate")
    out: Name = Name("per_layer_projection", "proj")
    after: Name = Name("post_per_layer_input_norm", "post_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec:
    """LFM2's short convolution: out(C * conv(B * x)), where ``in_proj`` makes [B, C, x]."""

    in_proj: Name = Name("conv.in_proj", "shortconv.in_proj")
    conv: Name = Name("conv.conv", "shortconv.conv")
    out: Name = Name("conv.out_proj", "shortconv.out_proj")
    layer_type: str = "conv"
    """As in ``layer_types``."""
    kernel: str = "conv_L_cache"
    bias: str = "conv_bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """A recurrent layer: a causal convolution, then a state per head that every row decays and adds to. A gated delta
    net (arXiv 2412.06464) or Mamba-2 (arXiv 2405.21060)."""

    kind: Literal["delta", "mamba"]
    in_proj: tuple[Name, ...]
    """Delta net: qkv, gate, beta, decay. Mamba: one projection of gate, x, B, C and time step."""
    conv: Name
    decay: Name
    """``A_log``."""
    dt_bias: Name
    norm: Name
    """Of the output; in Mamba after its gate."""
    out: Name
    heads: str
    groups: str
    """Groups of keys and queries (B and C); each serves the same number of heads."""
    key_dim: str
    value_dim: str
    kernel: str
    skip: Name | None = None
    """Mamba's D, which multiplies x."""
    bias: str | None = None
    out_bias: str | None = None
    """None: as ``bias``."""
    conv_bias: str | None = None
    has_norm: str | None = None
    """None: there is a norm."""
    activation: str = "hidden_act"
    """The convolution's; it must be silu."""
    layer_type: str = "linear_attention"
    """As in ``layer_types``."""
    beside_attention: bool = False
    """These layers have attention too: both read the same normed input, and both outputs are added (Falcon-H1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftInput:
    """What a drafter's first layer reads, of a token's embedding and a row that it is given: the product of ``mix`` and
    [embedding, row], each after its norm; without a ``mix`` the row. Embedding and output layer are the target's."""

    mix: Name | None = None
    norm_embedding: Name | None = None
    norm_given: Name | None = None
    block: int = 0
    """Rows of a block, whose layers also attend to given rows of earlier tokens, of which each makes keys and values
    without a norm before (DFlash, arXiv 2602.06036); 0: rows are single tokens."""
    convolutions: tuple[Name, Name] | None = None
    """Of the block's rows, around attention and around the MLP (DFlash2)."""


Mixer = ShortConvSpec | Recurrence
"""A layer's sequence mixer that keeps a state, in place of attention or beside it."""


@dataclass(frozen=True, slots=True)
class Multiplier:
    """Numbers of the config that multiply a projection's inputs or outputs; GGUF files have them in the weights
    already. ``outputs``: one number, entry ``index`` of a list, or a list of numbers for gate, x, B, C and time step of
    Mamba."""

    name: Name
    inputs: str | None = None
    outputs: str | None = None
    index: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One kind of decoder."""

    model_type: str
    """In ``config.json``."""
    causal: str
    """transformers' class with the output layer."""
    gguf: str
    """``general.architecture`` in GGUF files."""
    gguf_interleaved: bool = False
    """GGUF files have rotated pairs of query and key rows side by side, where checkpoints have them half a head
    apart."""
    embedding: Name = Name("model.embed_tokens", "token_embd")
    norm: Name = Name("model.norm", "output_norm")
    head: Name = Name("lm_head", "output")
    """The output layer; a file without one ties it to the embedding."""
    layers: Name = Name("model.layers", "blk")
    embedding_scale: str | None = None
    """Multiplies embeddings; ``root``: the square root of the hidden size."""
    residual_scale: str | None = None
    """Multiplies what attention and MLP add to the residual."""
    logits_scale: str | None = None
    logits_divisor: str | None = None
    logits_softcap: str | None = None
    parallel: bool = False
    """Attention and MLP read the same normed input, and both outputs are added to the residual."""
    norms: Norms = Norms()
    attention: Attention = Attention()
    latent: LatentAttention | None = None
    """Replaces ``attention.qkv``."""
    mlp: Mlp = Mlp()
    experts: ExpertsSpec | None = None
    mixer: Mixer | None = None
    multipliers: tuple[Multiplier, ...] = ()
    per_layer: PerLayerEmbeddings | None = None
    layer_scale: Name | None = None
    """One number that multiplies a layer's output."""
    draft_input: DraftInput | None = None
    """None: it is no drafter."""
    prefixes: tuple[str, ...] = ()
    """Prefixes of the decoder's tensors in some checkpoints, such as those of models that also read pictures."""
    skipped: tuple[str, ...] = ()
    """Prefixes of tensors that are left out, such as a vision tower's."""

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Types of layers that are not attention and an MLP."""
        parts = (self.mixer, self.mlp, self.experts)
        return tuple(part.layer_type for part in parts if part is not None and part.layer_type is not None)

    def checkpoint_names(self, gguf: str) -> tuple[str, ...]:
        """Translates a GGUF name of a weight or bias to names of a checkpoint, with ``{}`` for an expert's number.

        Returns:
            One name; two for a stack of every expert's gate and up; none if such a model has no such tensor.
        """
        stem, _, suffix = gguf.rpartition(".")
        if suffix not in SUFFIXES:
            stem, suffix = gguf, ""
        outer = {name.gguf: name.checkpoint for name in self.outer_names()}
        if stem in outer:
            bias = self.norms.bias and outer[stem] == self.norm.checkpoint
            return (f"{outer[stem]}.{suffix}",) if suffix == "weight" or (suffix == "bias" and bias) else ()
        block, _, rest = stem.partition(".")
        index, _, part = rest.partition(".")
        names: dict[str, tuple[Name, ...]] = {
            key: (name,) for name in self.layer_names() for key in (name.gguf, name.gguf_second) if key is not None
        }
        if self.experts is not None and len(self.experts.gate_up) == 2 and suffix == "weight":
            names[self.experts.gguf_fused] = self.experts.gate_up
        found = names.get(part) or names.get(part.removesuffix(self.mlp.gguf_suffix), ())
        if block != self.layers.gguf or not index.isdecimal():
            return ()
        if not suffix and not any(name.no_suffix or name.gguf_no_suffix for name in found):
            return ()
        prefix, end = f"{self.layers.checkpoint}.{index}", f".{suffix or 'weight'}"
        return tuple(f"{prefix}.{name.checkpoint}{'' if name.no_suffix else end}" for name in found)

    def gguf_pair(self, gguf: str) -> tuple[str, str] | None:
        """The two tensors of a GGUF file that are one in a checkpoint, if ``gguf`` is one of them."""
        for name in self.layer_names():
            parts, suffix = f"{name.gguf}|{name.gguf_second}", f"(?:{self.mlp.gguf_suffix})?"
            match = re.fullmatch(rf"(.+\.)(?:{parts})({suffix}\.weight)", gguf)
            if name.gguf_second is not None and match is not None:
                return f"{match[1]}{name.gguf}{match[2]}", f"{match[1]}{name.gguf_second}{match[2]}"
        return None

    def outer_norms(self) -> Iterator[Name]:
        """Every norm but a mixer's."""
        values = [getattr(self.norms, field.name) for field in fields(self.norms)]
        if self.draft_input is not None:
            values += [self.draft_input.norm_embedding, self.draft_input.norm_given]
        yield from (self.norm, *(value for value in values if isinstance(value, Name)))

    def outer_names(self) -> tuple[Name, ...]:
        """Names of the tensors outside layers."""
        table = () if self.per_layer is None else (self.per_layer.table, self.per_layer.project, self.per_layer.norm)
        own: tuple[Name | None, ...] = self.embedding, self.head
        if (given := self.draft_input) is not None:
            own = given.mix, given.norm_embedding, given.norm_given
        return self.norm, *(name for name in own if name is not None), *table

    def layer_names(self) -> Iterator[Name]:
        """Names of a layer's tensors."""
        yield from () if self.layer_scale is None else (self.layer_scale,)
        experts = self.experts
        inner = () if experts is None else (experts, experts.norms, experts.shared)
        for part in (self.norms, self.attention, self.latent, self.mlp, *inner, self.mixer, self.per_layer):
            for field in fields(part) if part is not None else ():
                value = getattr(part, field.name)
                each = () if field.name == "activation_params" else value if isinstance(value, tuple) else (value,)
                yield from (name for name in each if isinstance(name, Name))

"""What a decoder's architecture is made of, as data; everything that runs or loads a model derives from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import product
from typing import Literal

KINDS = ("weight", "bias")
"""How a tensor's name ends."""


@dataclass(frozen=True, slots=True)
class Name:
    """What a tensor is called in a checkpoint's safetensors files and in GGUF files, without ``.weight`` or ``.bias``;
    in a layer, behind the layer's own name. ``{}`` in the first is an expert's number: GGUF stacks experts."""

    checkpoint: str
    gguf: str
    bare: bool = False
    """In a checkpoint the name is whole."""
    behind: str | None = None
    """The tensor of GGUF files that holds the later rows."""
    whole: bool = False
    """In a GGUF file the name of the weight is whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """A layer's norms; None: there is none here."""

    before_attention: Name | None = Name("input_layernorm", "attn_norm")
    after_attention: Name | None = None
    """Of what attention adds to the residual."""
    before_mlp: Name | None = Name("post_attention_layernorm", "ffn_norm")
    after_mlp: Name | None = None
    query: Name | None = None
    key: Name | None = None
    values: bool = False
    """Values are normed head by head too, without weights."""
    whole: bool = False
    """Query and key are normed over all heads together, not head by head."""
    after_rotary: bool = False
    """Query and key are normed behind the rotary embedding, not before it."""
    plus: float = 0.0
    """Added to the weights that a checkpoint has; in GGUF files it is in them."""
    centred: bool = False
    """The outer norms and the final one are layer norms: they subtract the mean. Others are RMS norms."""
    bias: bool = False
    """Layer norms have biases."""
    eps: str = "rms_norm_eps"
    """A config key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """``scale``, ``multiplier`` and ``softcap`` name config keys."""

    qkv: tuple[Name, ...] = (
        Name("self_attn.q_proj", "attn_q"), Name("self_attn.k_proj", "attn_k"), Name("self_attn.v_proj", "attn_v")
    )  # fmt: skip
    """Three projections, or one that holds them end to end."""
    out: Name = Name("self_attn.o_proj", "attn_output")
    bias: str | None = None
    """A config key that says whether queries, keys and values have biases; ``always``: they do."""
    out_bias: str | None = None
    """As ``bias``, of ``out``."""
    scale: str | None = None
    """Scores are multiplied by its power of -1/2; None: by that of a head's width."""
    multiplier: str | float | None = None
    """Scores are multiplied by this instead; a number is itself."""
    softcap: str | None = None
    window: Literal["none", "every", "typed"] = "none"
    """``sliding_window`` holds in no layer, in every one, or in those that ``layer_types`` calls sliding."""
    rotary: Literal["every", "listed", "typed", "sliding", "named", "none"] = "every"
    """Which layers have a rotary embedding: every layer; those that ``no_rope_layers`` has a 1 for; every one, with
    the parameters of its type in ``layer_types``; those with a window (all, where the config has none); every one
    where ``position_embedding_type`` is ``rope``, else none; or none."""
    grows: bool = False
    """Queries are multiplied by a factor that grows with the position, as ``llama_4_scaling_beta`` says."""
    sized: bool = False
    """Heads have a width and a number of their own in each layer, as ``per_layer_config`` says."""
    borrowed: str | None = None
    """So many last layers have no keys and values: they read those of the last layer of their type before them."""
    twice: str | None = None
    """Whether layers without a window make keys and values by one projection: it stands for both."""
    sinks: Name | None = None
    """A score for each head that takes its part in the softmax and has no value."""
    gated: bool = False
    """The first projection has twice as many outputs: each head's queries, then its gate, whose sigmoid the head's
    output is multiplied by."""
    partial: bool = False
    """``partial_rotary_factor`` of a head may be rotated."""
    paired: bool = False
    """In checkpoints the numbers that are rotated together are neighbours, not half a head apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): ``down`` makes a latent of each row, of
    which every head makes its keys and values, and a key beside it that is turned and that all heads share. Queries are
    made of the row, or of a latent of their own where ``query_rank`` is a number. What names no tensor is a config key;
    checkpoints hold ``keys`` and ``values``, each head's by itself here, as one projection, ``both``."""

    query: Name = Name("self_attn.q_proj", "attn_q")
    down_query: Name = Name("self_attn.q_a_proj", "attn_q_a")
    norm_query: Name = Name("self_attn.q_a_layernorm", "attn_q_a_norm")
    up_query: Name = Name("self_attn.q_b_proj", "attn_q_b")
    down: Name = Name("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa")
    norm: Name = Name("self_attn.kv_a_layernorm", "attn_kv_a_norm")
    keys: Name = Name("self_attn.k_b_proj.{}", "attn_k_b")
    """Transposed: from a query's numbers to those of a latent."""
    values: Name = Name("self_attn.v_b_proj.{}", "attn_v_b")
    both: str = "self_attn.kv_b_proj.weight"
    rank: str = "kv_lora_rank"
    query_rank: str = "q_lora_rank"
    plain: str = "qk_nope_head_dim"
    turned: str = "qk_rope_head_dim"
    value: str = "v_head_dim"
    paired: str | None = "rope_interleave"
    """Whether the numbers that are turned together are neighbours in checkpoints; None: they are."""
    eps: float = 1e-6
    """Of its norms, whatever the config says of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """down(activation(gate) * up), or down(activation(up))."""

    gate_up: tuple[Name, ...] = (Name("mlp.gate_proj", "ffn_gate"), Name("mlp.up_proj", "ffn_up"))
    """Two projections, or one that holds them end to end; not ``gated``: up alone."""
    gated: bool = True
    down: Name = Name("mlp.down_proj", "ffn_down")
    activation: str | None = "hidden_act"
    """The config key that names it; None: silu."""
    width: str = "intermediate_size"
    """The config key of the outputs of the gate; LFM2's ``block_*`` keys change what it says."""
    times: str | None = None
    """A config key of what ``width`` is multiplied by."""
    doubled: str | None = None
    """Whether layers that borrow keys and values have twice as many."""
    bias: str | None = None
    """A config key that says whether projections have biases."""
    layers: str | None = None
    """The kind of those that have nothing else; None: every layer has it, behind attention or what is there instead."""
    beside: str = ""
    """What GGUF files add to its tensors' names where there are experts too."""
    numbers: tuple[Name, ...] = ()
    """Of the activation, one each and layer: a whole tensor's name in checkpoints, a list's key in GGUF files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """Instead of the MLP, or beside it: those experts whose router scores are highest, added up with weights that are
    the softmax of all scores. ``count``, ``width``, ``chosen``, ``normalised``, ``corrected``, ``factor``, ``dense``
    and ``enabled`` name config keys."""

    router: Name
    gate_up: tuple[Name, ...]
    """As the MLP's."""
    down: Name
    count: str
    width: str = "intermediate_size"
    chosen: str = "num_experts_per_tok"
    normalised: str | None = None
    """Whether the chosen experts' weights are divided by their sum; None: always."""
    bias: bool = False
    """Router and experts have biases."""
    clamp: tuple[str, ...] = ()
    """Config keys of the steepness and limit of (clamp(up) + 1) * gate * sigmoid(steepness * gate), gates being limited
    from above: what experts have between their layers instead of the MLP's activation."""
    interleaved: bool = False
    """A checkpoint stacks a layer's experts, [experts, inputs, outputs], the outputs of gate and up by turns."""
    stacks: tuple[str, str] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    """What a checkpoint calls its other stacks, [experts, outputs, inputs], gate before up in the first."""
    sigmoid: bool = False
    """Weights are the scores' sigmoids."""
    correction: Name | None = None
    """Added to the sigmoids where the highest are chosen, not to weights; ``corrected``: whether there is one, None:
    always."""
    corrected: str | None = None
    factor: str | None = None
    """What the weights of the chosen are multiplied by."""
    other: tuple[str, ...] = ()
    """Config keys of what is not described, where their value is neither None nor 0 or 1."""
    beside: bool = False
    """What the MLP makes is added to what the experts make."""
    layers: str | None = None
    """The kind of those that have nothing else; None: every layer has them, but for what follows."""
    gate: Name | None = None
    """A projection to one number, whose sigmoid that of the MLP is multiplied by."""
    dense: str | None = None
    """So many first layers have the MLP alone."""
    shared: Mlp | None = None
    """What is beside experts, where layers without experts have another MLP."""
    groups: tuple[str, str] | None = None
    """Config keys: experts lie in so many groups of equal size, and those of so many groups are chosen among: of the
    groups whose ``best`` highest scores add up to most."""
    best: int = 2
    method: str | None = None
    """A config key: whether groups count (``group_limited_greedy``) or not (``greedy``); None: they do."""
    eps: float = 1e-6
    """Added to the sum that weights are divided by, where that is done to sigmoids."""
    placed: Literal["every", "stepped", "listed"] = "every"
    """In every layer; in those of ``decoder_sparse_step`` that are not in ``mlp_only_layers``; or in those that
    ``mlp_layer_types`` calls sparse."""
    enabled: str | None = None
    """Whether there are any; None: there are."""
    fused: str = "ffn_gate_up_exps"
    """What some GGUF files call a stack that has each expert's gate and up, the one behind the other."""
    apart: ApartSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApartSpec:
    """Experts and the MLP beside them have norms of their own (Gemma 4): experts read the norm ``before`` of what the
    MLP's norm reads, their sum goes through ``after`` and the MLP's output through ``mlp``. The router reads the same
    rows, normed, times ``scale`` [hidden size] over the root of the hidden size; ``weights`` [experts] multiply the
    experts' weights."""

    before: Name
    after: Name
    mlp: Name
    scale: Name
    weights: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """Per-layer embeddings (Gemma 3n and 4): beside its rows each layer reads (normed projection of the embedding + row
    of a table) / sqrt(2), and adds norm(out(activation(gate(x)) * that)). ``width`` and ``tokens`` are config keys; a
    width of 0: there are none. ``table``, ``project`` and ``norm`` are whole names, the others a layer's."""

    table: Name = Name("model.embed_tokens_per_layer", "per_layer_token_embd")
    project: Name = Name("model.per_layer_model_projection", "per_layer_model_proj")
    norm: Name = Name("model.per_layer_projection_norm", "per_layer_proj_norm")
    gate: Name = Name("per_layer_input_gate", "inp_gate")
    out: Name = Name("per_layer_projection", "proj")
    after: Name = Name("post_per_layer_input_norm", "post_norm")
    width: str = "hidden_size_per_layer_input"
    tokens: str = "vocab_size_per_layer_input"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec:
    """out(C * conv(B * x)) of one projection's [B, C, x], in layers of the kind ``layers``. ``kernel`` and ``bias`` are
    config keys."""

    inputs: Name = Name("conv.in_proj", "shortconv.in_proj")
    conv: Name = Name("conv.conv", "shortconv.conv")
    out: Name = Name("conv.out_proj", "shortconv.out_proj")
    layers: str = "conv"
    kernel: str = "conv_L_cache"
    bias: str = "conv_bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """A state per head that every row decays and adds to, behind a convolution: a gated delta net (arXiv 2412.06464) or
    Mamba-2 (arXiv 2405.21060), in layers of the kind ``layers``. What names no tensor is a config key."""

    kind: Literal["delta", "mamba"]
    inputs: tuple[Name, ...]
    """Delta: queries, keys and values, gate, beta, decay; Mamba: one projection of gate, x, B, C and time step."""
    conv: Name
    decay: Name
    step: Name
    norm: Name
    """Of the output, behind its gate in Mamba."""
    out: Name
    heads: str
    groups: str
    """Of keys and queries (B and C), each for the same number of heads."""
    key_dim: str
    value_dim: str
    kernel: str
    skip: Name | None = None
    """What Mamba multiplies x by and adds."""
    bias: str | None = None
    out_bias: str | None = None
    """None: as ``bias``."""
    conv_bias: str | None = None
    normed: str | None = None
    """Whether there is a norm; None: there is."""
    activation: str = "hidden_act"
    """Of the convolution; it must be silu."""
    layers: str = "linear_attention"
    joint: bool = False
    """They have attention too: both read the same normed input, and both are added to what that was made of."""


Mixer = ShortConvSpec | Recurrence
"""What a layer may have in the place of attention, or beside it: it keeps a state."""


@dataclass(frozen=True, slots=True)
class Multiplied:
    """A projection of a layer whose input or outputs are multiplied by numbers of the config. In GGUF files, and in
    memory, the weights are. ``outputs``: one number, number ``place`` of a list, or a list of numbers for gate, x, B, C
    and time step of Mamba's projection."""

    name: Name
    inputs: str | None = None
    outputs: str | None = None
    place: int | None = None


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
    """GGUF files have the rows of queries and keys with rotated pairs side by side, where checkpoints have them half a
    head apart."""
    embedding: Name = Name("model.embed_tokens", "token_embd")
    norm: Name = Name("model.norm", "output_norm")
    head: Name = Name("lm_head", "output")
    """Where a model has none, the embedding is the output layer."""
    layers: Name = Name("model.layers", "blk")
    embedding_scale: str | None = None
    """What embeddings are multiplied by, a config key; ``root``: the square root of the hidden size."""
    residual_scale: str | None = None
    """What attention and MLP add to the residual is multiplied by this, a config key."""
    logits_scale: str | None = None
    """Logits are multiplied by this, a config key."""
    logits_divisor: str | None = None
    """As ``logits_scale``: they are divided by it."""
    logits_softcap: str | None = None
    """A config key."""
    parallel: bool = False
    """Attention and MLP read the same normed input: both are added to what that was made of."""
    norms: Norms = Norms()
    attention: Attention = Attention()
    latent: Latent | None = None
    """How queries, keys and values are made, in the place of ``attention.qkv``."""
    mlp: Mlp = Mlp()
    experts: ExpertsSpec | None = None
    mixer: Mixer | None = None
    multiplied: tuple[Multiplied, ...] = ()
    inputs: LayerInputs | None = None
    layer_scale: Name | None = None
    """A number that a layer's output is multiplied by."""
    within: tuple[str, ...] = ()
    """Where the decoder or its ``model`` is in some checkpoints, as in those that also read pictures."""
    beside: tuple[str, ...] = ()
    """How names of tensors begin that are left out."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of layers that have not attention alone before an MLP."""
        parts = (self.mixer, self.mlp, self.experts)
        return tuple(part.layers for part in parts if part is not None and part.layers is not None)

    def checkpoint_names(self, gguf: str) -> tuple[str, ...]:
        """What a checkpoint calls a weight or bias of a GGUF file; two names, of gate and up, for a stack that has both
        of every expert; () for one that such a model does not have. Names of experts have ``{}`` for their number."""
        stem, _, kind = gguf.rpartition(".")
        if kind not in KINDS:
            stem, kind = gguf, ""
        ends = {name.gguf: name.checkpoint for name in self._ends()}
        if stem in ends:
            return (f"{ends[stem]}.{kind}",) if self._has(ends[stem], kind) else ()
        block, _, rest = stem.partition(".")
        index, _, part = rest.partition(".")
        inside: dict[str, tuple[Name, ...]] = {
            gguf: (name,) for name in self.names() for gguf in (name.gguf, name.behind) if gguf is not None
        }
        if self.experts is not None and len(self.experts.gate_up) == 2 and kind == "weight":
            inside[self.experts.fused] = self.experts.gate_up
        part = part if part in inside else part.removesuffix(self.mlp.beside)
        if block != self.layers.gguf or not index.isdecimal() or part not in inside:
            return ()
        if not kind and not any(name.bare or name.whole for name in inside[part]):
            return ()
        at, end = f"{self.layers.checkpoint}.{index}", f".{kind or 'weight'}"
        return tuple(f"{at}.{name.checkpoint}{'' if name.bare else end}" for name in inside[part])

    def joined(self, gguf: str) -> tuple[str, str] | None:
        """The two tensors of a GGUF file whose rows are one's in a checkpoint, if ``gguf`` is one of them."""
        for name in self.names():
            ends = [f"{self.mlp.beside}.weight", ".weight"]
            for end, part in product(ends, (name.gguf, name.behind) if name.behind is not None else ()):
                if gguf.endswith(f".{part}{end}"):
                    at = gguf.removesuffix(f"{part}{end}")
                    return f"{at}{name.gguf}{end}", f"{at}{name.behind}{end}"
        return None

    @property
    def decay(self) -> str | None:
        """What a recurrence's decay is called in a checkpoint's layer."""
        return self.mixer.decay.checkpoint if isinstance(self.mixer, Recurrence) else None

    def outer_norms(self) -> Iterator[Name]:
        """Every norm but those inside a mixer."""
        values = (getattr(self.norms, field.name) for field in fields(self.norms))
        yield from (self.norm, *(value for value in values if isinstance(value, Name)))

    def _ends(self) -> tuple[Name, ...]:
        more = () if self.inputs is None else (self.inputs.table, self.inputs.project, self.inputs.norm)
        return self.embedding, self.norm, self.head, *more

    def _has(self, end: str, kind: str) -> bool:
        """Whether the embedding, the final norm or the output layer has such a tensor, by its name in a checkpoint."""
        return kind == "weight" or (kind == "bias" and self.norms.bias and end == self.norm.checkpoint)

    def names(self) -> Iterator[Name]:
        """Of every tensor of a layer."""
        yield from () if self.layer_scale is None else (self.layer_scale,)
        own = None if self.experts is None else self.experts.apart
        shared = None if self.experts is None else self.experts.shared
        parts = self.norms, self.attention, self.latent, self.mlp, self.experts, own, shared, self.mixer, self.inputs
        for part in parts:
            for field in fields(part) if part is not None else ():
                value = getattr(part, field.name)
                each = () if field.name == "numbers" else value if isinstance(value, tuple) else (value,)
                yield from (name for name in each if isinstance(name, Name))

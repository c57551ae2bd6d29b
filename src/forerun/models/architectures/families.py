"""The described architectures. A new family is an entry here: see ``description.py`` for what a field means."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forerun.models.architectures.description import (
    Architecture,
    Attention,
    ExpertNorms,
    ExpertsSpec,
    LatentAttention,
    Mlp,
    Multiplier,
    Name,
    Norms,
    PerLayerEmbeddings,
    Recurrence,
    ShortConvSpec,
)  # fmt: skip

PROJECTIONS = "gate_proj", "up_proj", "down_proj"


def _mlp(prefix: str, names: tuple[str, str, str] = PROJECTIONS, gguf_suffix: str = "", **fields: Any) -> Mlp:
    """A gated MLP whose projections are called ``names``."""
    gate, up, down = (
        Name(f"{prefix}.{name}", f"ffn_{part}{gguf_suffix}")
        for name, part in zip(names, ("gate", "up", "down"), strict=True)
    )
    return Mlp(gate_up=(gate, up), down=down, **fields)


def _experts(prefix: str, router: str, names: tuple[str, str, str] = PROJECTIONS, **fields: Any) -> ExpertsSpec:
    """Gated experts, ``prefix.0`` and so on."""
    one = _mlp(f"{prefix}.{{}}", names, "_exps")
    return ExpertsSpec(router=Name(router, "ffn_gate_inp"), gate_up=one.gate_up, down=one.down, **fields)


def _mamba(prefix: str, **fields: Any) -> Recurrence:
    """Mamba-2."""
    return Recurrence(
        kind="mamba", in_proj=(Name(f"{prefix}.in_proj", "ssm_in"),), conv=Name(f"{prefix}.conv1d", "ssm_conv1d"),
        decay=Name(f"{prefix}.A_log", "ssm_a", no_suffix=True), norm=Name(f"{prefix}.norm", "ssm_norm"),
        dt_bias=Name(f"{prefix}.dt_bias", "ssm_dt", no_suffix=True), out=Name(f"{prefix}.out_proj", "ssm_out"),
        skip=Name(f"{prefix}.D", "ssm_d", no_suffix=True), **fields,
    )  # fmt: skip


HEAD_NORMS = Norms(query=Name("self_attn.q_norm", "attn_q_norm"), key=Name("self_attn.k_norm", "attn_k_norm"))
AFTER_ATTENTION = Name("post_attention_layernorm", "post_attention_norm")
AFTER_MLP = Name("post_feedforward_layernorm", "post_ffw_norm")
SANDWICH = Norms(
    after_attention=AFTER_ATTENTION, before_mlp=Name("pre_feedforward_layernorm", "ffn_norm"), after_mlp=AFTER_MLP,
    offset=1.0,
)  # fmt: skip

BIAS = "attention_bias"
BIASED = Attention(bias=BIAS, out_bias=BIAS)

LLAMA = Architecture(
    model_type="llama", causal="LlamaForCausalLM", gguf="llama", gguf_interleaved=True, attention=BIASED,
    mlp=Mlp(bias="mlp_bias"),
)  # fmt: skip
MISTRAL = replace(
    LLAMA, model_type="mistral", causal="MistralForCausalLM", attention=Attention(window="all"), mlp=Mlp()
)  # fmt: skip
QWEN2 = Architecture(
    model_type="qwen2", causal="Qwen2ForCausalLM", gguf="qwen2",
    attention=Attention(bias="always", window="layer_types"),
)  # fmt: skip
QWEN3 = replace(
    QWEN2, model_type="qwen3", causal="Qwen3ForCausalLM", gguf="qwen3", norms=HEAD_NORMS,
    attention=replace(BIASED, window="layer_types"),
)  # fmt: skip
SMOLLM3 = Architecture(
    model_type="smollm3", causal="SmolLM3ForCausalLM", gguf="smollm3", gguf_interleaved=True,
    attention=replace(BIASED, window="layer_types", rotary="no_rope_layers"), mlp=LLAMA.mlp,
)  # fmt: skip
GEMMA2 = Architecture(
    model_type="gemma2", causal="Gemma2ForCausalLM", gguf="gemma2", embedding_scale="root",
    logits_softcap="final_logit_softcapping", norms=SANDWICH, mlp=Mlp(activation="hidden_activation"),
    attention=replace(
        BIASED, scale="query_pre_attn_scalar", softcap="attn_logit_softcapping", window="layer_types"
    ),
)  # fmt: skip
GEMMA3 = replace(
    GEMMA2, model_type="gemma3_text", causal="Gemma3ForCausalLM", gguf="gemma3",
    norms=replace(SANDWICH, query=HEAD_NORMS.query, key=HEAD_NORMS.key),
    attention=replace(GEMMA2.attention, softcap=None, rotary="layer_types"),
)  # fmt: skip
PHI3 = Architecture(
    model_type="phi3", causal="Phi3ForCausalLM", gguf="phi3",
    attention=Attention(qkv=(Name("self_attn.qkv_proj", "attn_qkv"),), window="all", partial_rotary=True),
    mlp=Mlp(gate_up=(Name("mlp.gate_up_proj", "ffn_up"),)),
)  # fmt: skip
OLMO2 = Architecture(
    model_type="olmo2", causal="Olmo2ForCausalLM", gguf="olmo2", attention=BIASED,
    norms=replace(
        HEAD_NORMS, before_attention=None, after_attention=AFTER_ATTENTION, before_mlp=None, after_mlp=AFTER_MLP,
        over_heads=True,
    ),
)  # fmt: skip
MIXTRAL = replace(
    MISTRAL, model_type="mixtral", causal="MixtralForCausalLM",
    experts=_experts(
        "block_sparse_moe.experts", "block_sparse_moe.gate", ("w1", "w3", "w2"), count="num_local_experts"
    ),
)  # fmt: skip
MOE = _experts("mlp.experts", "mlp.gate", count="num_experts", width="moe_intermediate_size")
QWEN3_MOE = replace(
    QWEN3, model_type="qwen3_moe", causal="Qwen3MoeForCausalLM", gguf="qwen3moe",
    attention=replace(BIASED, window="all"),
    experts=replace(MOE, normalize="norm_topk_prob", placement="decoder_sparse_step"),
)  # fmt: skip
GRANITE = replace(
    LLAMA, model_type="granite", causal="GraniteForCausalLM", gguf="granite", embedding_scale="embedding_multiplier",
    residual_scale="residual_multiplier", logits_divisor="logits_scaling",
    attention=replace(BIASED, multiplier="attention_multiplier"),
)  # fmt: skip
GRANITE_EXPERTS = _experts(
    "block_sparse_moe.experts",
    "block_sparse_moe.router.layer",
    count="num_local_experts",
    stacks=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
)
GRANITE_MOE = replace(
    GRANITE, model_type="granitemoe", causal="GraniteMoeForCausalLM", gguf="granitemoe", experts=GRANITE_EXPERTS
)  # fmt: skip
OLMO3 = replace(
    OLMO2, model_type="olmo3", causal="Olmo3ForCausalLM",
    attention=replace(BIASED, window="layer_types", rotary="layer_types"),
)  # fmt: skip
EXAONE4 = Architecture(
    model_type="exaone4", causal="Exaone4ForCausalLM", gguf="exaone4", norms=replace(OLMO2.norms, over_heads=False),
    attention=Attention(window="layer_types", rotary="sliding"),
)  # fmt: skip
GLM4 = Architecture(
    model_type="glm4", causal="Glm4ForCausalLM", gguf="glm4",
    norms=Norms(
        after_attention=Name("post_self_attn_layernorm", "post_attention_norm"),
        after_mlp=Name("post_mlp_layernorm", "post_ffw_norm"),
    ),
    attention=Attention(bias=BIAS, partial_rotary=True, interleaved=True), mlp=PHI3.mlp,
)  # fmt: skip
HUNYUAN = Architecture(
    model_type="hunyuan_v1_dense", causal="HunYuanDenseV1ForCausalLM", gguf="hunyuan-dense",
    norms=Norms(
        query=Name("self_attn.query_layernorm", "attn_q_norm"), key=Name("self_attn.key_layernorm", "attn_k_norm"),
        after_rotary=True,
    ),
    attention=BIASED,
)  # fmt: skip
ERNIE4_5 = Architecture(
    model_type="ernie4_5", causal="Ernie4_5ForCausalLM", gguf="ernie4_5",
    attention=Attention(bias="use_bias", out_bias="use_bias", interleaved=True), mlp=Mlp(bias="use_bias"),
)  # fmt: skip
SEED_OSS = Architecture(
    model_type="seed_oss", causal="SeedOssForCausalLM", gguf="seed_oss",
    norms=Norms(before_mlp=Name("post_attention_layernorm", "post_attention_norm")),
    attention=Attention(bias=BIAS, out_bias="attention_out_bias"), mlp=LLAMA.mlp,
)  # fmt: skip
APERTUS = Architecture(
    model_type="apertus", causal="ApertusForCausalLM", gguf="apertus",
    norms=replace(
        HEAD_NORMS, before_attention=Name("attention_layernorm", "attn_norm"),
        before_mlp=Name("feedforward_layernorm", "ffn_norm"),
    ),
    attention=BIASED,
    mlp=Mlp(
        gate_up=(Name("mlp.up_proj", "ffn_up"),), gated=False,
        activation_params=tuple(
            Name(f"mlp.act_fn.{each}", f"xielu.{each}") for each in ("alpha_p", "alpha_n", "beta", "eps")
        ),
    ),
)  # fmt: skip
COHERE2 = Architecture(
    model_type="cohere2", causal="Cohere2ForCausalLM", gguf="cohere2", parallel=True, logits_scale="logit_scale",
    norms=Norms(before_mlp=None, layer_norm=True, eps="layer_norm_eps"),
    attention=replace(BIASED, window="layer_types", rotary="sliding", interleaved=True),
)  # fmt: skip
STARCODER2 = Architecture(
    model_type="starcoder2", causal="Starcoder2ForCausalLM", gguf="starcoder2",
    norms=Norms(layer_norm=True, bias=True, eps="norm_epsilon"),
    attention=Attention(bias="use_bias", out_bias="use_bias", window="all"),
    mlp=Mlp(
        gate_up=(Name("mlp.c_fc", "ffn_up"),), gated=False, down=Name("mlp.c_proj", "ffn_down"), bias="use_bias"
    ),
)  # fmt: skip
GPT_OSS = Architecture(
    model_type="gpt_oss", causal="GptOssForCausalLM", gguf="gpt-oss", norms=SEED_OSS.norms,
    attention=replace(BIASED, window="layer_types", sinks=Name("self_attn.sinks", "attn_sinks", no_suffix=True)),
    experts=_experts(
        "mlp.experts", "mlp.router", count="num_local_experts", bias=True, interleaved=True,
        clamp=(("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)),
    ),
)  # fmt: skip
PIXTRAL: dict[str, Any] = {
    "prefixes": ("model.language_model", "language_model"),
    "skipped": ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
}
"""Where a ``mistral3``, which reads pictures, has its decoder."""
MINISTRAL3 = replace(
    MISTRAL, model_type="ministral3", causal="Ministral3ForCausalLM", gguf="mistral3",
    attention=Attention(window="all", llama4_scaling=True), **PIXTRAL,
)  # fmt: skip
LFM2 = Architecture(
    model_type="lfm2", causal="Lfm2ForCausalLM", gguf="lfm2", norm=Name("model.embedding_norm", "token_embd_norm"),
    norms=Norms(
        before_attention=Name("operator_norm", "attn_norm"), before_mlp=Name("ffn_norm", "ffn_norm"),
        query=Name("self_attn.q_layernorm", "attn_q_norm"), key=Name("self_attn.k_layernorm", "attn_k_norm"),
        eps="norm_eps",
    ),
    attention=Attention(out=Name("self_attn.out_proj", "attn_output")),
    mlp=_mlp("feed_forward", ("w1", "w3", "w2"), activation=None),
    mixer=ShortConvSpec(),
)  # fmt: skip
LFM2_MOE = replace(
    LFM2, model_type="lfm2_moe", causal="Lfm2MoeForCausalLM", gguf="lfm2moe",
    experts=_experts(
        "feed_forward.experts", "feed_forward.gate", ("w1", "w3", "w2"), count="num_experts",
        width="moe_intermediate_size", normalize="norm_topk_prob", sigmoid=True,
        score_bias=Name("feed_forward.expert_bias", "exp_probs_b", no_suffix=True),
        has_score_bias="use_expert_bias", factor="routed_scaling_factor", first_dense="num_dense_layers",
        stacks=("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
    ),
)  # fmt: skip
DELTA_NET = Recurrence(
    kind="delta",
    in_proj=(
        Name("linear_attn.in_proj_qkv", "attn_qkv"), Name("linear_attn.in_proj_z", "attn_gate"),
        Name("linear_attn.in_proj_b", "ssm_beta"), Name("linear_attn.in_proj_a", "ssm_alpha"),
    ),
    conv=Name("linear_attn.conv1d", "ssm_conv1d"), decay=Name("linear_attn.A_log", "ssm_a", no_suffix=True),
    dt_bias=Name("linear_attn.dt_bias", "ssm_dt", no_suffix=True), norm=Name("linear_attn.norm", "ssm_norm"),
    out=Name("linear_attn.out_proj", "ssm_out"), heads="linear_num_value_heads", groups="linear_num_key_heads",
    key_dim="linear_key_head_dim", value_dim="linear_value_head_dim", kernel="linear_conv_kernel_dim",
)  # fmt: skip
QWEN3_5 = Architecture(
    model_type="qwen3_5_text", causal="Qwen3_5ForCausalLM", gguf="qwen35",
    norms=replace(HEAD_NORMS, before_mlp=Name("post_attention_layernorm", "post_attention_norm"), offset=1.0),
    attention=replace(BIASED, gated=True, partial_rotary=True), mixer=DELTA_NET,
    prefixes=("model.language_model",), skipped=("model.visual.", "mtp."),
)  # fmt: skip
QWEN3_5_MOE = replace(
    QWEN3_5, model_type="qwen3_5_moe_text", causal="Qwen3_5MoeForCausalLM", gguf="qwen35moe",
    mlp=_mlp("mlp.shared_expert", gguf_suffix="_shexp", width="shared_expert_intermediate_size"),
    experts=replace(MOE, beside_mlp=True, shared_gate=Name("mlp.shared_expert_gate", "ffn_gate_inp_shexp")),
)  # fmt: skip
GEMMA4 = replace(
    GEMMA3, model_type="gemma4_text", causal="Gemma4ForCausalLM", gguf="gemma4",
    norms=replace(GEMMA3.norms, offset=0.0, norm_values=True),
    attention=replace(
        BIASED, multiplier=1.0, window="layer_types", rotary="layer_types", per_layer_sizes=True,
        shared_kv_layers="num_kv_shared_layers", key_is_value="attention_k_eq_v",
    ),
    mlp=replace(GEMMA3.mlp, double_wide="use_double_wide_mlp"), per_layer=PerLayerEmbeddings(),
    layer_scale=Name("layer_scalar", "layer_output_scale", no_suffix=True),
    experts=_experts(
        "experts", "router.proj", count="num_experts", width="moe_intermediate_size", top_k="top_k_experts",
        stacks=("experts.gate_up_proj", "experts.down_proj"), beside_mlp=True, enabled="enable_moe_block",
        norms=ExpertNorms(
            before=Name("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
            after=Name("post_feedforward_layernorm_2", "post_ffw_norm_2"),
            mlp=Name("post_feedforward_layernorm_1", "post_ffw_norm_1"),
            scale=Name("router.scale", "ffn_gate_inp.scale", no_suffix=True),
            weights=Name("router.per_expert_scale", "ffn_down_exps.scale", no_suffix=True),
        ),
    ),
    prefixes=("model.language_model",),
    skipped=("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio."),
)  # fmt: skip
MAMBA = _mamba(
    "mamba", heads="mamba_n_heads", groups="mamba_n_groups", key_dim="mamba_d_state", value_dim="mamba_d_head",
    kernel="mamba_d_conv", bias="mamba_proj_bias", conv_bias="mamba_conv_bias",
)  # fmt: skip
GRANITE_HYBRID = replace(
    GRANITE, model_type="granitemoehybrid", causal="GraniteMoeHybridForCausalLM", gguf="granitehybrid",
    attention=replace(GRANITE.attention, rotary="position_embedding_type"),
    mlp=Mlp(
        gate_up=(Name("shared_mlp.input_linear", "ffn_gate", gguf_second="ffn_up"),),
        down=Name("shared_mlp.output_linear", "ffn_down"), width="shared_intermediate_size", gguf_suffix="_shexp",
    ),
    mixer=MAMBA, experts=replace(GRANITE_EXPERTS, beside_mlp=True),
)  # fmt: skip
GRANITE_MOE_SHARED = replace(
    GRANITE_HYBRID, model_type="granitemoeshared", causal="GraniteMoeSharedForCausalLM", gguf="granitemoe",
    attention=GRANITE.attention, mixer=None,
)  # fmt: skip
BAMBA = Architecture(
    model_type="bamba", causal="BambaForCausalLM", gguf="granitehybrid",
    norm=Name("model.final_layernorm", "output_norm"), norms=Norms(before_mlp=Name("pre_ff_layernorm", "ffn_norm")),
    attention=replace(BIASED, partial_rotary=True), mlp=_mlp("feed_forward", bias="mlp_bias"), mixer=MAMBA,
)  # fmt: skip
FALCON_H1 = Architecture(
    model_type="falcon_h1", causal="FalconH1ForCausalLM", gguf="falcon-h1", norm=BAMBA.norm,
    embedding_scale="embedding_multiplier", logits_scale="lm_head_multiplier",
    norms=Norms(before_mlp=Name("pre_ff_layernorm", "ffn_norm", gguf_no_suffix=True)), attention=BIASED, mlp=BAMBA.mlp,
    mixer=replace(
        MAMBA, layer_type="hybrid", beside_attention=True, has_norm="mamba_rms_norm", out_bias="projectors_bias"
    ),
    multipliers=(
        Multiplier(BIASED.qkv[0], inputs="attention_in_multiplier"),
        Multiplier(BIASED.qkv[1], inputs="attention_in_multiplier", outputs="key_multiplier"),
        Multiplier(BIASED.qkv[2], inputs="attention_in_multiplier"),
        Multiplier(BIASED.out, outputs="attention_out_multiplier"),
        Multiplier(MAMBA.in_proj[0], inputs="ssm_in_multiplier", outputs="ssm_multipliers"),
        Multiplier(MAMBA.out, outputs="ssm_out_multiplier"),
        Multiplier(BAMBA.mlp.gate_up[0], outputs="mlp_multipliers", index=0),
        Multiplier(BAMBA.mlp.down, outputs="mlp_multipliers", index=1),
    ),
)  # fmt: skip
NEMOTRON_H = Architecture(
    model_type="nemotron_h", causal="NemotronHForCausalLM", gguf="nemotron_h", prefixes=("backbone",),
    skipped=("mtp.",), embedding=Name("model.embeddings", "token_embd"), norm=Name("model.norm_f", "output_norm"),
    norms=Norms(before_attention=Name("norm", "attn_norm"), before_mlp=Name("norm", "attn_norm"),
                eps="layer_norm_epsilon"),
    attention=Attention(
        qkv=(Name("mixer.q_proj", "attn_q"), Name("mixer.k_proj", "attn_k"), Name("mixer.v_proj", "attn_v")),
        out=Name("mixer.o_proj", "attn_output"), rotary="none",
    ),
    mlp=Mlp(
        gate_up=(Name("mixer.up_proj", "ffn_up"),), gated=False, down=Name("mixer.down_proj", "ffn_down"),
        activation="mlp_hidden_act", bias="mlp_bias", layer_type="mlp",
    ),
    mixer=_mamba(
        "mixer", heads="mamba_num_heads", groups="n_groups", key_dim="ssm_state_size", value_dim="mamba_head_dim",
        kernel="conv_kernel", bias="use_bias", conv_bias="use_conv_bias", activation="mamba_hidden_act",
    ),
    experts=ExpertsSpec(
        router=Name("mixer.gate", "ffn_gate_inp"), gate_up=(Name("mixer.experts.{}.up_proj", "ffn_up_exps"),),
        down=Name("mixer.experts.{}.down_proj", "ffn_down_exps"), count="n_routed_experts",
        width="moe_intermediate_size", normalize="norm_topk_prob", sigmoid=True, eps=1e-20,
        groups=("n_group", "topk_group"), unsupported=("moe_latent_size",),
        score_bias=Name("mixer.gate.e_score_correction_bias", "exp_probs_b", no_suffix=True),
        factor="routed_scaling_factor", layer_type="moe", stacks=("mixer.experts.up_proj", "mixer.experts.down_proj"),
        beside_mlp=True,
        shared=Mlp(
            gate_up=(Name("mixer.shared_experts.up_proj", "ffn_up_shexp"),), gated=False,
            down=Name("mixer.shared_experts.down_proj", "ffn_down_shexp"), bias="mlp_bias",
            width="moe_shared_expert_intermediate_size",
        ),
    ),
)  # fmt: skip
SHARED = _mlp(
    "mlp.shared_experts", gguf_suffix="_shexp", width="moe_intermediate_size", width_factor="n_shared_experts"
)
SOFTMAX_GROUPS = replace(
    MOE, count="n_routed_experts", beside_mlp=True, shared=SHARED, factor="routed_scaling_factor",
    groups=("n_group", "topk_group"), normalize="norm_topk_prob", first_dense="first_k_dense_replace", eps=1e-20,
)  # fmt: skip
SIGMOID_GROUPS = replace(
    SOFTMAX_GROUPS, sigmoid=True, score_bias=Name("mlp.gate.e_score_correction_bias", "exp_probs_b", no_suffix=True)
)
DEEPSEEK_V3 = Architecture(
    model_type="deepseek_v3", causal="DeepseekV3ForCausalLM", gguf="deepseek2", latent=LatentAttention(),
    attention=Attention(qkv=(), bias=BIAS, out_bias=BIAS),
    experts=SIGMOID_GROUPS,
)  # fmt: skip
DEEPSEEK_V2 = replace(
    DEEPSEEK_V3, model_type="deepseek_v2", causal="DeepseekV2ForCausalLM", latent=LatentAttention(interleaved=None),
    mlp=LLAMA.mlp,
    experts=replace(SOFTMAX_GROUPS, shared=replace(SHARED, bias="mlp_bias"), group_best=1, method="topk_method"),
)  # fmt: skip
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3, model_type="glm4_moe_lite", causal="Glm4MoeLiteForCausalLM",
    experts=replace(SIGMOID_GROUPS, first_dense=None, placement="mlp_layer_types"),
)  # fmt: skip
MISTRAL4 = replace(
    DEEPSEEK_V3, model_type="mistral4", causal="Mistral4ForCausalLM", gguf="mistral4",
    attention=replace(DEEPSEEK_V3.attention, llama4_scaling=True), experts=SOFTMAX_GROUPS, **PIXTRAL,
)  # fmt: skip

ARCHITECTURES = {
    each.model_type: each
    for each in (
        LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, GEMMA2, GEMMA3, PHI3, OLMO2, MIXTRAL, QWEN3_MOE, GRANITE, GRANITE_MOE,
        GRANITE_MOE_SHARED, OLMO3, EXAONE4, GLM4, HUNYUAN, ERNIE4_5, SEED_OSS, APERTUS, COHERE2, STARCODER2, GPT_OSS,
        MINISTRAL3, LFM2, LFM2_MOE, QWEN3_5, QWEN3_5_MOE, GRANITE_HYBRID, BAMBA, FALCON_H1, NEMOTRON_H, GEMMA4,
        DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, MISTRAL4,
    )
}  # fmt: skip

"""The architectures that are described."""

from __future__ import annotations

from dataclasses import replace

from forerun.models.architectures.description import (
    Architecture,
    Attention,
    Experts,
    Mlp,
    Name,
    Norms,
    ShortConv,
)  # fmt: skip

HEAD_NORMS = Norms(query=Name("self_attn.q_norm", "attn_q_norm"), key=Name("self_attn.k_norm", "attn_k_norm"))
AFTER_ATTENTION = Name("post_attention_layernorm", "post_attention_norm")
AFTER_MLP = Name("post_feedforward_layernorm", "post_ffw_norm")
SANDWICH = Norms(
    after_attention=AFTER_ATTENTION, before_mlp=Name("pre_feedforward_layernorm", "ffn_norm"), after_mlp=AFTER_MLP,
    plus=1.0,
)  # fmt: skip

BIAS = "attention_bias"

LLAMA = Architecture(
    model_type="llama", causal="LlamaForCausalLM", gguf="llama", interleaved=True, attention=Attention(bias=BIAS),
    mlp=Mlp(bias="mlp_bias"),
)  # fmt: skip
MISTRAL = replace(
    LLAMA, model_type="mistral", causal="MistralForCausalLM", attention=Attention(window="every"), mlp=Mlp()
)  # fmt: skip
QWEN2 = Architecture(
    model_type="qwen2", causal="Qwen2ForCausalLM", gguf="qwen2",
    attention=Attention(bias="inputs", window="typed"),
)  # fmt: skip
QWEN3 = replace(
    QWEN2, model_type="qwen3", causal="Qwen3ForCausalLM", gguf="qwen3", norms=HEAD_NORMS,
    attention=Attention(bias=BIAS, window="typed"),
)  # fmt: skip
SMOLLM3 = Architecture(
    model_type="smollm3", causal="SmolLM3ForCausalLM", gguf="smollm3", interleaved=True,
    attention=Attention(bias=BIAS, window="typed", rotary="listed"), mlp=Mlp(bias="mlp_bias"),
)  # fmt: skip
GEMMA2 = Architecture(
    model_type="gemma2", causal="Gemma2ForCausalLM", gguf="gemma2", embedding_scale="root",
    logits_softcap="final_logit_softcapping", norms=SANDWICH, mlp=Mlp(activation="hidden_activation"),
    attention=Attention(
        bias=BIAS, scale="query_pre_attn_scalar", softcap="attn_logit_softcapping", window="typed"
    ),
)  # fmt: skip
GEMMA3 = replace(
    GEMMA2, model_type="gemma3_text", causal="Gemma3ForCausalLM", gguf="gemma3",
    norms=replace(SANDWICH, query=HEAD_NORMS.query, key=HEAD_NORMS.key),
    attention=Attention(bias=BIAS, scale="query_pre_attn_scalar", window="typed", rotary="typed"),
)  # fmt: skip
PHI3 = Architecture(
    model_type="phi3", causal="Phi3ForCausalLM", gguf="phi3",
    attention=Attention(qkv=(Name("self_attn.qkv_proj", "attn_qkv"),), window="every", partial=True),
    mlp=Mlp(gate_up=(Name("mlp.gate_up_proj", "ffn_up"),)),
)  # fmt: skip
OLMO2 = Architecture(
    model_type="olmo2", causal="Olmo2ForCausalLM", gguf="olmo2", attention=Attention(bias=BIAS),
    norms=replace(
        HEAD_NORMS, before_attention=None, after_attention=AFTER_ATTENTION, before_mlp=None, after_mlp=AFTER_MLP,
        whole=True,
    ),
)  # fmt: skip
MIXTRAL = replace(
    MISTRAL, model_type="mixtral", causal="MixtralForCausalLM",
    experts=Experts(
        router=Name("block_sparse_moe.gate", "ffn_gate_inp"),
        gate_up=(
            Name("block_sparse_moe.experts.{}.w1", "ffn_gate_exps"),
            Name("block_sparse_moe.experts.{}.w3", "ffn_up_exps"),
        ),
        down=Name("block_sparse_moe.experts.{}.w2", "ffn_down_exps"),
        count="num_local_experts",
    ),
)  # fmt: skip
QWEN3_MOE = replace(
    QWEN3, model_type="qwen3_moe", causal="Qwen3MoeForCausalLM", gguf="qwen3moe",
    attention=Attention(bias=BIAS, window="every"),
    experts=Experts(
        router=Name("mlp.gate", "ffn_gate_inp"),
        gate_up=(
            Name("mlp.experts.{}.gate_proj", "ffn_gate_exps"), Name("mlp.experts.{}.up_proj", "ffn_up_exps"),
        ),
        down=Name("mlp.experts.{}.down_proj", "ffn_down_exps"),
        count="num_experts",
        width="moe_intermediate_size",
        normalised="norm_topk_prob",
        placed="stepped",
    ),
)  # fmt: skip
LFM2 = Architecture(
    model_type="lfm2", causal="Lfm2ForCausalLM", gguf="lfm2", norm=Name("model.embedding_norm", "token_embd_norm"),
    norms=Norms(
        before_attention=Name("operator_norm", "attn_norm"), before_mlp=Name("ffn_norm", "ffn_norm"),
        query=Name("self_attn.q_layernorm", "attn_q_norm"), key=Name("self_attn.k_layernorm", "attn_k_norm"),
        eps="norm_eps",
    ),
    attention=Attention(out=Name("self_attn.out_proj", "attn_output")),
    mlp=Mlp(
        gate_up=(Name("feed_forward.w1", "ffn_gate"), Name("feed_forward.w3", "ffn_up")),
        down=Name("feed_forward.w2", "ffn_down"), activation=None,
    ),
    mixer=ShortConv(),
)  # fmt: skip

ARCHITECTURES = {
    each.model_type: each
    for each in (
        LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, GEMMA2, GEMMA3, PHI3, OLMO2, MIXTRAL, QWEN3_MOE, LFM2,
    )
}  # fmt: skip

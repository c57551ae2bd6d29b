"""What a Llama's weights are called in GGUF files and in checkpoints."""

from __future__ import annotations

ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's names of a Llama's weights and the checkpoint's."""


def checkpoint_name(name: str) -> str | None:
    """A weight's name in the checkpoint; None for one that a Llama does not have."""
    stem, _, kind = name.rpartition(".")
    if kind != "weight":
        return None
    if stem in ENDS:
        return f"{ENDS[stem]}.weight"
    block, _, rest = stem.partition(".")
    place, _, part = rest.partition(".")
    if block != "blk" or not place.isdecimal() or part not in LAYER:
        return None
    return f"model.layers.{place}.{LAYER[part]}.weight"

"""The tensors that a description asks for, against the modules that transformers makes of the same config."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from forerun.models.architectures.families import ARCHITECTURES
from forerun.models.architectures.shapes import shapes
from forerun.models.architectures.spec import bind
from forerun.models.weights.transform import unstacked

SIZES = {
    "vocab_size": 51, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 40, "moe_intermediate_size": 24, "pad_token_id": 0, "num_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "mamba_n_heads": 4, "mamba_d_head": 16,
    "mamba_d_ssm": 64,
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}])
# Gemma 4's config refuses one head_dim for all layers, latents are split by heads, and Granite's checkpoints call their
# experts otherwise than modules: their parity tests load what transformers saved.
@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind, each in ARCHITECTURES.items()
        if kind not in ("gemma4_text", "granitemoe", "granitemoeshared") and not each.latent
    ],
)
def test_they_are_transformers_own(kind, options):
    known = AutoConfig.for_model(kind)
    given = {name: value for name, value in {**SIZES, **options}.items() if hasattr(known, name)}
    if kind == "granitemoehybrid":
        given["num_local_experts"] = 0
    config = AutoConfig.for_model(kind, tie_word_embeddings=False) if not options else known
    if kind == "nemotron_h":
        given.pop("tie_word_embeddings", None)  # its modules tie nothing
    for name, value in given.items():
        setattr(config, name, value)
    if kind == "lfm2_moe":
        config.layer_types = ["conv", "full_attention", "conv"]  # there is no default
    if getattr(config, "layer_types", None) and kind not in ("bamba", "falcon_h1"):  # whose types come of other keys
        config.layer_types = config.layer_types[:3]
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    kept = {name: part for name, part in module.named_buffers() if name in module.state_dict()}  # numbers of xIELU
    expected = unstacked({**dict(module.named_parameters()), **kept}, bind(config))
    assert shapes(config) == {name: tuple(part.shape) or (1,) for name, part in expected.items()}

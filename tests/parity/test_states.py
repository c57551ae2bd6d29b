"""Models that keep state beside keys and values: each is refused by what its config says, and, where that says nothing,
by what its modules read; however small its weights are."""

import json
from pathlib import Path

import pytest
import test_hf
import torch
from safetensors.torch import save_file
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from described import HYBRIDS
from forerun.core.errors import ConfigError, ModelError
from forerun.models.load import load_model
from forerun.models.run.hf import HFModel
from forerun.models.weights import sanity
from hybrids import save_hybrid
from modules import logits_of, requested
from refusals import refused

SIZES = {**test_hf.SIZES, **test_hf.EXPERTS}
LINEAR, CONV, FULL = "linear_attention", "conv", "full_attention"
HEADS = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2, "mamba_d_state": 8}
GDN = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": [LINEAR, FULL], "shared_expert_intermediate_size": 32,
}  # fmt: skip
CASES = {
    "bailing_hybrid": ({}, LINEAR, "BailingHybridDeltaAttention"),
    "falcon_mamba": ({"state_size": 4}, LINEAR, "FalconMambaMixer"),
    "jamba": ({"mamba_d_state": 4, "attn_layer_period": 2, "attn_layer_offset": 1}, LINEAR, "JambaMambaMixer"),
    "kimi_linear": ({}, LINEAR, "KimiLinearDeltaAttention"),
    "lara_mini": ({}, LINEAR, "LaraMiniGatedDeltaNet"),
    "lfm3": ({"layer_types": [CONV, FULL]}, CONV, "Lfm3ShortConv"),
    "mamba": ({"state_size": 4}, LINEAR, "MambaMixer"),
    "mamba2": ({"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2}, LINEAR, "Mamba2Mixer"),
    "minimax": ({"layer_types": [LINEAR, FULL]}, LINEAR, "MiniMaxLightningAttention"),
    "olmo_hybrid": ({"layer_types": [LINEAR, FULL]}, LINEAR, "OlmoHybridGatedDeltaNet"),
    "qwen3_next": (GDN, LINEAR, "Qwen3NextGatedDeltaNet"),
    "qwen4_exp_text": ({}, LINEAR, "Qwen4ExpTextGatedDeltaNet"),
    "recurrent_gemma": ({"block_types": ["recurrent", "attention"]}, LINEAR, "RecurrentGemmaRecurrentBlock"),
    "rwkv": ({"attention_hidden_size": 32}, "", "RwkvSelfAttention"),
    "xlstm": ({"num_heads": 4}, "", "xLSTMBackend"),
    "zamba": ({"num_hidden_layers": 3, "layers_block_type": [LINEAR, "hybrid", "hybrid"]}, LINEAR, "ZambaAttention"),
    "zamba2": ({"layers_block_type": [LINEAR, "hybrid"]}, LINEAR, "Zamba2MambaMixer"),
    "zaya": ({"num_experts_per_tok": 1}, "hybrid", "ZayaCCA"),
}  # fmt: skip
WORKS = {
    "granitemoehybrid": {"layer_types": [FULL, FULL], **HEADS},
    "lfm2": {"layer_types": [FULL, FULL]},
    "minimax": {"layer_types": [FULL, FULL]},
    "phimoe": {"sliding_window": 8},
    "qwen2_moe": {"use_sliding_window": False, "shared_expert_intermediate_size": 32},
}
"""Classes that may have no state, and what others got wrong."""


@pytest.mark.parametrize("kind", CASES)
def test_a_model_with_state_is_refused_by_name(tmp_path, monkeypatch, kind):
    options, layers, reader = CASES[kind]
    test_hf.save(kind, {**SIZES, **options}, tmp_path, 1e-3)
    if layers:
        message = rf"has layers of kind '{layers}', which forerun does not run \({kind}\)"
        refused(ModelError, message, load_model, tmp_path, invariant=False)
        monkeypatch.setattr(sanity, "LAYERS", (*sanity.LAYERS, LINEAR, CONV, "hybrid", "moe"))
    refused(ModelError, reader, load_model, tmp_path, invariant=False)


def test_every_class_with_state_is_tried():
    """Of those that transformers calls so. DeepSeek V4 says it in its layers: compressed attention."""
    stateful = {
        config.model_type for config, module in MODEL_FOR_CAUSAL_LM_MAPPING.items()
        if getattr(module, "_is_stateful", False)
    }  # fmt: skip
    whole = {"qwen3_5", "qwen3_5_moe", "qwen4_exp"}  # with eyes: the same text models
    assert stateful - whole - {"deepseek_v4"} <= CASES.keys() | {kind for kind, _ in HYBRIDS.values()}


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_model_with_state_runs_on_the_native_path_alone(described, name):
    with pytest.raises(ConfigError, match="a model with state needs the native path: model_path is hf"):
        load_model(described(name), model_path="hf")


@pytest.mark.parametrize("types", [["telepathy", FULL], [FULL, "chunked_attention"], ["moe", FULL]])
def test_layers_of_unknown_kinds_are_refused(types):
    config = AutoConfig.for_model("qwen3", **SIZES)
    config.layer_types = types
    with pytest.raises(ModelError, match=f"has layers of kind {next(kind for kind in types if kind != FULL)!r}"):
        sanity.check_config(config, Path("m/config.json"))


@pytest.mark.parametrize(("kind", "changes", "message"), [
    ("lfm2", {"conv_L_cache": 5}, r"has shape \[64, 1, 3\]; its config asks for \[64, 1, 5\]"),
    ("lfm2", {"conv_L_cache": 0}, "conv_L_cache is 0, not an integer from 2 to 16"),
    ("lfm2", {"layer_types": ["conv", FULL, "mamba"]}, "of kind .*; it runs models of .* and conv"),
    ("lfm2", {"layer_types": [FULL, FULL, "conv"]}, r"lacks 6 weights, model\.layers\.0\.self_attn"),
    ("qwen3_5", {"linear_key_head_dim": 16}, r"has shape \[80, 1, 4\]; its config asks for \[112, 1, 4\]"),
    ("qwen3_5", {"linear_num_value_heads": 3}, r"_heads \(3\) is no multiple of .*_heads \(2\)"),
    ("qwen3_5", {"linear_value_head_dim": 2**40}, "is 1099511627776, not an integer from 1 to 1048576"),
    ("qwen3_5", {"layer_types": [LINEAR] * 3}, "no layer with attention"),
    ("granite-h", {"mamba_d_state": 16}, r"has shape \[144\]; its config asks for \[160\]"),
    ("granite-h", {"mamba_d_conv": 3}, r"has shape \[144, 1, 4\]; its config asks for \[144, 1, 3\]"),
    ("granite-h", {"mamba_n_heads": 8}, "do not match the model intermediate_size"),
    ("lfm2", {"block_multiple_of": 0}, "block_ffn_dim_multiplier 1.0 and block_multiple_of 0"),
    ("granite-h", {"residual_multiplier": None}, "residual_multiplier is None, not a number"),
    ("granite-h", {"num_local_experts": None}, "num_local_experts is None, not a number of experts"),
    ("falcon_h1", {"ssm_in_multiplier": None}, "ssm_in_multiplier is None, not a number"),
    ("falcon_h1", {"ssm_multipliers": []}, r"ssm_multipliers is \[\], not 5 numbers"),
    ("falcon_h1", {"mlp_multipliers": [1.0]}, r"mlp_multipliers is \[1.0\], not 2 numbers"),
    ("nemotron_h", {"conv_kernel": 3}, r"has shape \[80, 1, 4\]; its config asks for \[80, 1, 3\]"),
])  # fmt: skip
def test_sizes_that_do_not_fit_are_named_in_one_line(tmp_path, kind, changes, message):
    save_hybrid(kind, tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    refused((ConfigError, ModelError), message, load_model, tmp_path)


def test_a_number_of_layers_for_prediction_takes_no_memory(tmp_path):
    save_hybrid("nemotron_h", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 2**40}))
    assert load_model(tmp_path).info.num_layers == 3


class Shifted(torch.nn.Module):
    """An MLP that reads the token before, however little."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return self.inner(hidden) + 1e-30 * hidden.roll(1, 1)


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gpt2"])
def test_a_module_that_reads_other_tokens_is_found_however_little_it_adds(kind):
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256} if kind == "gpt2" else {}
    config = AutoConfig.for_model(kind, **{**SIZES, **sizes})
    module = AutoModelForCausalLM.from_config(config, attn_implementation="forerun")
    assert HFModel(module, requested()).info.num_layers == 2
    layer = module.transformer.h[1] if kind == "gpt2" else module.model.layers[1]
    layer.mlp = Shifted(layer.mlp)
    refused(ModelError, "its Shifted reads other tokens than its own", HFModel, module, requested())


@pytest.mark.parametrize("kind", WORKS)
def test_a_class_that_may_have_state_runs_without(tmp_path, kind):
    test_hf.save(kind, {**SIZES, **WORKS[kind]}, tmp_path)
    model = load_model(tmp_path, model_path="hf", invariant=False)
    ids = torch.randint(3, SIZES["vocab_size"], (30,)).tolist()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids]), use_cache=False).logits[0]
    assert (logits_of(model, ids, [1, 13]) - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_a_decoder_out_of_a_model_that_reads_pictures(tmp_path, caplog, kind):
    """The same tokens with the rest left out; its tensors are called otherwise. Published mixtures stack experts."""
    text = {**SIZES, **GDN, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 0, 0]}}
    sight = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=sight)
    torch.manual_seed(0)
    module = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    module.save_pretrained(tmp_path)
    if kind == "qwen3_5_moe":
        save_file(module.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
        assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in module.state_dict()
    ids = torch.randint(3, SIZES["vocab_size"], (30,)).tolist()
    with torch.inference_mode():
        expected = module(torch.tensor([ids]), use_cache=False).logits[0]
    with caplog.at_level("INFO", logger="forerun"):
        model = load_model(tmp_path)
    assert "also reads pictures: that part is left out" in caplog.text
    assert (logits_of(model, ids) - expected).abs().max() < 2e-4 * expected.abs().max()

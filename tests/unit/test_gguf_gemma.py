"""Gemma 3 out of GGUF files that are written here from checkpoints, as llama.cpp's converter does it."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kinds
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Gemma4ForCausalLM, Gemma4TextConfig

from forerun import LLM, SamplingParams
from forerun.core.errors import ModelError
from forerun.measure.environment import logits
from forerun.models.formats import blocks
from forerun.models.load import load_model, read_config
from forerun.models.modules import read_module
from forerun.models.quantize import error
from gguf_files import TOKENS, VOCABULARY, add, finish
from here import where

IDS = torch.randint(3, len(TOKENS), (40,), generator=torch.Generator().manual_seed(1)).tolist()
LINEAR = {"rope_parameters": {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}}  # fmt: skip

SIZES = {
    "vocab_size": len(TOKENS), "hidden_size": 64, "num_hidden_layers": 7, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 256, "sliding_window": 7,
    "eos_token_id": 0,
}  # fmt: skip


def make(**options):
    torch.manual_seed(0)
    module = Gemma3ForCausalLM(Gemma3TextConfig(**{**SIZES, "query_pre_attn_scalar": 32, **options})).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    module.tie_weights()
    return module


def write(module, path, kind=Kinds.F32, **changes):
    config = module.config
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_sliding_window(config.sliding_window)
    rope = config.rope_parameters["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    for key, value in {**VOCABULARY, **changes}.items():
        add(writer, key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, config.num_hidden_layers)
    for name, weight in module.named_parameters():
        weight = weight.detach() + 1 if name.endswith("norm.weight") else weight.detach()
        own = Kinds.F32 if weight.dim() == 1 else kind
        writer.add_tensor(names.get_name(name, (".weight",)), gguf.quants.quantize(weight.numpy(), own), raw_dtype=own)
    return finish(writer, path)


@pytest.mark.parametrize("options", [{}, LINEAR, {"tie_word_embeddings": False}], ids=["tied", "linear", "untied"])
def test_a_gemma_comes_back_as_it_went(tmp_path, options):
    module = make(**options)
    path = write(module, tmp_path / "model.gguf")
    with torch.inference_mode():
        expected = module(torch.tensor([IDS])).logits[0]
    model = load_model(path)
    assert model.info.path.startswith("native, ")
    assert (logits(model, [IDS]) - expected).abs().max() < 1e-4
    for name, weight in read_module(path, read_config(path), torch.float32, attention=None).named_parameters():
        assert torch.allclose(weight, module.get_parameter(name), rtol=0, atol=1e-7), name


@pytest.mark.parametrize("kind", where(blocks.can_run(), [Kinds.Q8_0, Kinds.Q4_0]))
def test_packed_weights_stay_as_they_are(tmp_path, kind):
    path = write(make(), tmp_path / "model.gguf", kind)
    llm = LLM(str(path), speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    assert llm.model.info.path == f"native, {kind.name}"
    exact = read_module(path, read_config(path), torch.float32, attention=None)
    with torch.inference_mode():
        expected = exact(torch.tensor([IDS])).logits[0]
    assert error(expected, logits(llm.model, [IDS])) < 0.04
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
    drafted, plain = (llm.generate(["the 12 the 12"], params, speculate=each)[0] for each in (True, False))
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert drafted.metrics.num_draft_tokens > 0


def test_which_layers_have_a_window_may_be_listed(tmp_path):
    every = [True, False, True, True, False, True, True]
    path = write(make(), tmp_path / "model.gguf", **{"gemma3.attention.sliding_window_pattern": every})
    types = read_config(path).layer_types
    assert [kind == "sliding_attention" for kind in types] == every
    path = write(make(), tmp_path / "model.gguf", **{"gemma3.attention.sliding_window_pattern": 3})
    assert [kind == "full_attention" for kind in read_config(path).layer_types] == [False, False, True] * 2 + [False]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gemma3.attention.sliding_window_pattern": [True, False]}, "has 7 layers, but says of 2"),
        ({"gemma3.attention.sliding_window_pattern": 0}, "0 as gemma3.attention.sliding_window_pattern"),
        ({"gemma3.rope.scaling.type": "longrope"}, "scales its rotary frequencies"),
        ({"gemma3.final_logit_softcapping": "x"}, "'x' as gemma3.final_logit_softcapping"),
    ],
)
def test_what_is_not_read_is_named(tmp_path, changes, message):
    path = write(make(), tmp_path / "model.gguf", **changes)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


def test_the_transformers_path_reads_the_same_file(tmp_path):
    module = make()
    model = load_model(write(module, tmp_path / "model.gguf"), model_path="hf")
    assert model.info.path.startswith("hf")
    with torch.inference_mode():
        assert (logits(model, [IDS]) - module(torch.tensor([IDS])).logits[0]).abs().max() < 1e-4


GEMMA4 = {
    "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3,
    "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": len(TOKENS), "global_head_dim": 64,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True, "final_logit_softcapping": 3.0,
}  # fmt: skip


MIXTURE = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 64}
SCALES = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}


def write_gemma4(path, kind=Kinds.F32, *, fused=True, **options):
    """``fused``: experts' gate and up are one tensor, as llama.cpp's converter writes them."""
    torch.manual_seed(0)
    module = Gemma4ForCausalLM(Gemma4TextConfig(**{**SIZES, **GEMMA4, **options})).eval()
    for name, parameter in module.named_parameters():
        torch.nn.init.normal_(parameter, 3.0 if name.endswith("router.scale") else 0.0, 0.2)
    module.tie_weights()
    writer = gguf.GGUFWriter(path, "gemma4")
    first, slides = 4, [True, False] * 3
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.add_embedding_length(64)
    writer.add_block_count(6)
    writer.add_feed_forward_length([96] * first + [192] * 2)
    writer.add_head_count(4)
    writer.add_head_count_kv([2] * 6)
    writer.add_layer_norm_rms_eps(module.config.rms_norm_eps)
    writer.add_sliding_window(7)
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(2)
    writer.add_embedding_length_per_layer_input(32)
    for add_width, width in (
        (writer.add_key_length, 64), (writer.add_value_length, 64), (writer.add_key_length_swa, 32),
        (writer.add_value_length_swa, 32), (writer.add_rope_dimension_count, 64),
        (writer.add_rope_dimension_count_swa, 32),
    ):  # fmt: skip
        add_width(width)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_freq_base_swa(1e4)
    writer.add_final_logit_softcapping(3.0)
    if options:
        writer.add_expert_count(5)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(64)
    for key, value in VOCABULARY.items():
        add(writer, key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, 6)
    held = {
        **dict(module.named_parameters()),
        **{n: b for n, b in module.named_buffers() if n.endswith("layer_scalar")},
    }
    for name, weight in held.items():
        own = Kinds.F32 if weight.dim() == 1 or ".router." in name else kind
        end = name.split(".", 3)[-1]
        parts = {f"{names.get_name(name.removesuffix('.weight'))}.weight": weight.detach()}
        if end in SCALES:
            parts = {f"blk.{name.split('.')[2]}.{SCALES[end]}": weight.detach()}
        elif end == "experts.gate_up_proj" and not fused:
            stacks = zip(("gate", "up"), weight.detach().chunk(2, dim=1), strict=True)
            parts = {f"blk.{name.split('.')[2]}.ffn_{which}_exps.weight": part for which, part in stacks}
        for part, data in parts.items():
            writer.add_tensor(part, gguf.quants.quantize(data.contiguous().numpy(), own), raw_dtype=own)
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * 8 + [1e30] * 24, np.float32))
    writer.add_tensor("blk.5.attn_k.weight", np.ones((128, 64), np.float32))  # which nobody reads
    return module, finish(writer, path)


def test_gemma_4_comes_back_as_it_went(tmp_path):
    """Heads of two widths, borrowed keys, embeddings for each layer."""
    module, path = write_gemma4(tmp_path / "model.gguf")
    with torch.inference_mode():
        expected = module(torch.tensor([IDS])).logits[0]
    assert (logits(load_model(path), [IDS]) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("fused", [True, False])
def test_its_mixture_comes_back_as_it_went(tmp_path, fused):
    module, path = write_gemma4(tmp_path / "model.gguf", fused=fused, **MIXTURE)
    with torch.inference_mode():
        expected = module(torch.tensor([IDS])).logits[0]
    assert (logits(load_model(path), [IDS]) - expected).abs().max() < 1e-4


def test_packed_experts_stay_as_they_are(tmp_path):
    """Gate and up of a stack of Q8_0 are cut from each other row by row."""
    module, path = write_gemma4(tmp_path / "model.gguf", Kinds.Q8_0, **MIXTURE)
    with torch.inference_mode():
        for name, weight in module.named_parameters():
            if weight.dim() > 1 and ".router." not in name:
                rounded = gguf.quants.quantize(weight.numpy(), Kinds.Q8_0)
                weight.copy_(torch.from_numpy(gguf.quants.dequantize(rounded, Kinds.Q8_0)))
        expected = module(torch.tensor([IDS])).logits[0]
    llm = LLM(str(path), speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    assert error(expected, logits(llm.model, [IDS])) < 0.04
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
    drafted, plain = (llm.generate(["the 12 the 12"], params, speculate=each)[0] for each in (True, False))
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert drafted.metrics.num_draft_tokens > 0

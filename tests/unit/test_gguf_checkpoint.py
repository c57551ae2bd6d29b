"""Checkpoints out of GGUF files: a Llama that went there and back, and files that hold something else."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from forerun import LLM, SamplingParams
from forerun.bench.peers.gguf import write_gguf
from forerun.bench.shapes import random_checkpoint
from forerun.core.errors import ModelError
from forerun.models.gguf import GGUFFile
from forerun.models.gguf_checkpoint import read_config, read_weights, write_checkpoint
from forerun.models.gguf_names import checkpoint_name
from gguf_files import write_model


def test_a_llama_comes_back_as_it_went(tmp_path):
    folder = random_checkpoint(tmp_path / "tiny", "tiny", vocabulary=120)
    file = GGUFFile(write_gguf(folder, tmp_path / "model.gguf", torch.float32))
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = read_config(file)
    theta = config.pop("rope_theta")
    for name in config.keys() - {"architectures", "bos_token_id", "eos_token_id"}:
        assert config[name] == getattr(wanted.config, name), name
    assert theta == wanted.config.rope_parameters["rope_theta"]
    weights = read_weights(file, config, torch.float32)
    for name, weight in wanted.state_dict().items():
        if name != "lm_head.weight":  # tied
            assert torch.equal(weights.pop(name), weight), name
    assert weights == {}


def test_a_checkpoint_holds_the_weights_that_transformers_reads_from_the_file(tmp_path):
    path = write_model(tmp_path / "model.gguf")
    write_checkpoint(path, tmp_path, torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(ours.config)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=shape)["tensors"]
    for name, weight in ours.state_dict().items():
        if name != "lm_head.weight":
            assert torch.equal(torch.as_tensor(theirs.pop(name)).float(), weight), name
    assert theirs == {}


def test_a_checkpoint_is_whole(tmp_path):
    write_checkpoint(write_model(tmp_path / "model.gguf", {"tokenizer.ggml.eot_token_id": 2}), tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": [0, 2]}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.model_max_length == 128
    text = tokenizer.apply_chat_template([{"content": "the"}], tokenize=False, add_generation_prompt=True)
    assert text == "<|start|>the<|end|><|start|>"
    llm = LLM(str(tmp_path))
    assert llm.model.info.dtype == torch.bfloat16
    assert llm.model.info.eos_ids == {0, 2}
    answer = llm.generate(["the 12"], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0]
    assert len(answer.outputs[0].token_ids) == 4


@pytest.mark.parametrize(
    ("changes", "extra", "message"),
    [
        ({"general.architecture": "qwen2"}, None, "architecture 'qwen2'; only 'llama'"),
        ({"llama.block_count": None}, None, "None as llama.block_count"),
        ({"llama.attention.head_count": [4, 4]}, None, r"\[4, 4\] as llama.attention.head_count"),
        ({"llama.expert_count": 8}, None, "mixture of experts"),
        ({"llama.rope.scaling.type": "yarn"}, None, "scales its rotary frequencies"),
        ({}, {"rope_freqs.weight": (4,)}, "scales its rotary frequencies"),
        ({"llama.rope.dimension_count": 4}, None, "heads of 8 numbers, but 4"),
        ({"llama.attention.head_count": 32}, None, "heads of 1 numbers"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, None, "0.0 as llama.attention.layer_norm_rms_epsilon"),
        ({"llama.attention.head_count": 2}, None, "blk.0.attn_k.weight has shape"),
        ({}, {"blk.0.attn_q.bias": (32,)}, "a tensor blk.0.attn_q.bias, which a Llama does not have"),
        ({"tokenizer.ggml.eot_token_id": 999}, None, "999 as tokenizer.ggml.eot_token_id"),
    ],
)
def test_what_is_not_read_is_named(tmp_path, changes, extra, message):
    path = write_model(tmp_path / "model.gguf", changes, extra)
    with pytest.raises(ModelError, match=message) as caught:
        write_checkpoint(path, tmp_path)
    assert "\n" not in str(caught.value)


def test_names_of_weights_have_one_form():
    assert checkpoint_name("blk.11.ffn_down.weight") == "model.layers.11.mlp.down_proj.weight"
    for name in (
        "blk.x.ffn_down.weight",
        "blk..ffn_down.weight",
        "blk.1.ffn_down",
        "ffn_down.weight",
        "blk.1.other.weight",
    ):
        assert checkpoint_name(name) is None

"""The transformers adapter against transformers itself, on random tiny checkpoints of many architectures."""

from functools import cache

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from forerun.core.errors import ModelError
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.models.load import load_model
from forerun.models.run.base import new_attention
from forerun.models.run.hf import HFModel
from modules import check_chunks_and_trees, logits_of, randomise
from refusals import refused
from rounding import by_chance
from tiny import tiny_llama

VOCABULARY = 101
WINDOW = 8
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
ARCHITECTURES = {
    "llama": ("llama", {}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "mistral-window": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {**MIXED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 8.0}),
    "gemma3": ("gemma3_text", MIXED),
    "phi3-window": ("phi3", {"sliding_window": WINDOW}),
    "olmo2": ("olmo2", {}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "gpt_neox": ("gpt_neox", {}),
    "mixtral": ("mixtral", EXPERTS),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "granite": ("granite", {"attention_multiplier": 0.4, "residual_multiplier": 0.7, "logits_scaling": 2.0}),
    "starcoder2-window": ("starcoder2", {"sliding_window": WINDOW}),
    "cohere": ("cohere", {"logit_scale": 1.0}),
    "glm4": ("glm4", {}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
}


def some_tokens(count, seed=0):
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def save(kind, options, folder, spread=0.15, **saving):
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **options}))
    randomise(module, spread)
    module.save_pretrained(folder, **saving)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    @cache
    def get(name):
        folder = str(tmp_path_factory.mktemp(name))
        save(*ARCHITECTURES[name], folder)
        return folder

    return get


@cache
def theirs(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


@cache
def ours(folder, dtype="auto"):
    return load_model(folder, model_path="hf", dtype=dtype, invariant=False)


@torch.inference_mode()
def reference(folder, tokens, dtype=torch.float32):
    """transformers' float32 [tokens, vocabulary] logits."""
    return theirs(folder, dtype)(torch.tensor([tokens]), use_cache=False).logits[0].float()


def close(got, expected, tolerance=1e-4):
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= tolerance


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_of_chunks_batches_and_trees(checkpoint, name, page_size):
    folder = checkpoint(name)
    model, first, second = ours(folder), some_tokens(40), some_tokens(33, seed=1)
    assert isinstance(model, HFModel)
    attention = new_attention(model, max_seqs=2, max_len=64, page_size=page_size)
    assert 0.3 < reference(folder, first).std() < 20
    check_chunks_and_trees(model, attention, [first, second], lambda _, tokens: reference(folder, tokens), close)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "qwen3_moe"])
def test_half_precision(checkpoint, name, dtype):
    folder, tokens = checkpoint(name), some_tokens(24)
    model = ours(folder, dtype)
    assert model.info.dtype == getattr(torch, dtype)
    got = logits_of(model, tokens)
    exact = reference(folder, tokens)
    theirs = reference(folder, tokens, getattr(torch, dtype))
    assert (got - exact).norm() <= by_chance(len(tokens)) * (theirs - exact).norm()


def test_identity_is_promised_where_bits_do_not_depend_on_the_batch(checkpoint):
    """A mixture of experts groups its rows by expert, so that a row's bits change with its neighbours."""
    with pytest.warns(RuntimeWarning, match="invariant mode is off"):
        model = load_model(checkpoint("mixtral"), invariant=None, model_path="hf")
    assert not Engine(model, None, EngineConfig(max_model_len=96)).identity
    assert Engine(load_model(checkpoint("gpt2"), invariant=None), None, EngineConfig(max_model_len=96)).identity


def test_dtype_auto_is_the_checkpoints(tmp_path):
    tiny_llama().to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_model(tmp_path).info.dtype == torch.bfloat16
    assert load_model(tmp_path, dtype="float32").info.dtype == torch.float32


def test_sharded_weights(checkpoint, tmp_path):
    save(*ARCHITECTURES["llama"], str(tmp_path), max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    tokens = some_tokens(10)
    got = logits_of(load_model(tmp_path, model_path="hf"), tokens)
    close(got, reference(checkpoint("llama"), tokens))


@pytest.mark.parametrize(("kind", "options", "reason"), [
    ("bloom", {"n_layer": 2, "n_head": 4}, "its BloomAttention reads other tokens than its own"),
    ("bert", {}, "attention to later tokens"),
    ("mamba", {"state_size": 4}, "has layers of kind 'linear_attention'"),
])  # fmt: skip
def test_an_architecture_outside_the_interface_is_named(tmp_path, kind, options, reason):
    save(kind, options, str(tmp_path))
    refused(ModelError, reason, load_model, tmp_path)


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LONG = {
    "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0, "rope_theta": 1e4,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(("kind", "rope", "limit"), [("llama", DYNAMIC, 256), ("phi3", LONG, 64)])
def test_frequencies_that_depend_on_the_longest_position(tmp_path, kind, rope, limit):
    save(kind, {"rope_parameters": rope, "original_max_position_embeddings": limit}, str(tmp_path))
    for length in (None, limit + 1):
        with pytest.raises(ModelError, match=rf"{rope['rope_type']}.*set max_model_len to at most {limit}"):
            load_model(tmp_path, max_model_len=length)
    tokens = some_tokens(20)
    model = load_model(tmp_path, max_model_len=limit)
    close(logits_of(model, tokens, [13]), reference(str(tmp_path), tokens))


def test_an_unknown_keyword_of_attention_is_named(tmp_path):
    save("gpt_oss", {**EXPERTS, **MIXED}, str(tmp_path))
    refused(ModelError, "s_aux, which forerun does not implement", load_model, tmp_path, model_path="hf")

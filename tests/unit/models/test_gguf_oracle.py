"""Files of llama.cpp's own converter and quantizer, and what llama.cpp makes of them: ``tests/oracle``, written by
``lab/tools/llama_oracle.py`` and ``llama_words.py``."""

import json
import lzma
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unicodedata import category

import gguf
import numpy as np
import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import one_call
from forerun import LLM, SamplingParams
from forerun.core.errors import ConfigError, ModelError
from forerun.measure.environment import logits
from forerun.models.architectures.families import ARCHITECTURES, LLAMA
from forerun.models.architectures.gguf_config import Keys
from forerun.models.architectures.spec import bind
from forerun.models.files.open import CachedConfig, Checkpoint
from forerun.models.formats import blocks, error
from forerun.models.load import load_model
from forerun.models.run.hf import read_module
from forerun.models.text.gguf_tokenizer import PRE_TOKENIZERS, make_tokenizer
from forerun.models.text.tokenizer import load_tokenizer
from gguf_files import add, finish, write_model
from here import where
from refusals import refused

KEPT = Path(__file__).parents[2] / "oracle"
FILES = [tuple(path.name.removesuffix(".gguf.xz").rsplit("-", 1)) for path in sorted(KEPT.glob("*.gguf.xz"))]
GELUS = ("gemma2", "gemma3", "gemma4", "gemma4-experts", "starcoder2")
"""llama.cpp looks gelu up in a table by half precision: two roundings of 2^-11, in every layer."""
NATIVE = {
    "deepseek_v2", "deepseek_v3", "gemma4-experts", "glm4_moe_lite", "gpt_oss", "granite-4-experts",
    "granite-h-experts", "granitemoe", "lfm2_moe", "mistral4", "mixtral", "nemotron_h-experts", "qwen3_5-grouped",
    "qwen3_5_moe", "qwen3_moe",
}  # fmt: skip
"""What transformers' modules cannot be given: stacks of experts, and heads in an order of llama.cpp's own."""


@pytest.fixture
def opened(tmp_path):
    """The file of a case and a kind, ids, and llama.cpp's logits of some of them, by what they were made from."""

    def get(case, kind):
        path = tmp_path / f"{case}-{kind}.gguf"
        path.write_bytes(lzma.decompress((KEPT / f"{path.name}.xz").read_bytes()))
        kept = np.load(KEPT / f"{case}.npz")
        theirs = {name: torch.from_numpy(kept[name]) for name in kept.files if name.startswith(kind)}
        return path, kept["ids"].tolist(), torch.from_numpy(kept["rows"]), theirs

    return get


@pytest.fixture
def edited(opened, tmp_path):
    """A case's file in float32 with other metadata, None for a key that is left out, and with further tensors."""

    def get(case, changes, extra=()):
        reader = gguf.GGUFReader(opened(case, "f32")[0])
        fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        path = tmp_path / "edited.gguf"
        writer = gguf.GGUFWriter(path, fields.pop("general.architecture"))
        for key, value in {**fields, **changes}.items():
            if value is not None:
                add(writer, key, value)
        for tensor in reader.tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        for name, values in dict(extra).items():
            writer.add_tensor(name, values)
        return finish(writer, path)

    return get


def same(case, expected, given):
    """The largest difference is small beside the largest logit."""
    return float((expected - given).abs().max() / expected.abs().max()) < (2e-3 if case in GELUS else 1e-4)


@pytest.mark.parametrize("case", [case for case, kind in FILES if kind == "f32"])
def test_numbers_are_read_and_computed_as_llama_cpp_does(opened, case):
    """By the native path, and by transformers' module with the weights of the same file."""
    path, ids, rows, theirs = opened(case, "f32")
    model = load_model(path, dtype="float32")
    assert model.info.path.startswith("native")
    assert same(case, theirs["f32"], logits(model, [ids])[rows])
    if case in NATIVE:
        refused(ModelError, "only the native path", read_module, Checkpoint.at(path), torch.float32, attention=None)
        return
    module = read_module(Checkpoint.at(path), torch.float32, attention=None).eval()
    with torch.inference_mode():
        assert same(case, theirs["f32"], module(torch.tensor([ids])).logits[0][rows])


@pytest.mark.slow
@pytest.mark.parametrize(("case", "kind"), where(blocks.can_run(), [each for each in FILES if each[1] != "f32"]))
def test_blocks_are_read_and_computed_as_llama_cpp_does(opened, case, kind):
    """From the same numbers in float32 both make the same logits. In blocks, both round the rows that they multiply to
    8 bits, Forerun in other blocks than llama.cpp: so both are as far from those logits, and as far from each other as
    two such errors that know nothing of each other.

    No formula says what other blocks cost, and four rows are too few for statistics. One bit less doubles an error: so
    ours is less than twice llama.cpp's."""
    path, ids, rows, theirs = opened(case, kind)
    exact, rounded = theirs[f"{kind}-numbers"], theirs[kind]
    assert same(case, exact, logits(load_model(path, dtype="float32", quantization="float32"), [ids])[rows])
    ours = logits(load_model(path, dtype="float32"), [ids])[rows]
    usual = error(exact, rounded)
    assert error(exact, ours) < 2 * usual
    assert error(rounded, ours) < math.hypot(usual, 2 * usual)
    first, second = exact.topk(2).values.unbind(-1)
    clear = first - second > 6 * usual * exact.std(-1)
    assert torch.equal(ours.argmax(-1)[clear], rounded.argmax(-1)[clear])


@pytest.mark.parametrize("case", where(blocks.can_run(), ["deepseek_v2", "deepseek_v3", "mistral4", "qwen3_moe"]))
def test_packed_layers_in_one_call_have_the_bits_of_layer_by_layer(opened, case):
    model = load_model(opened(case, "q8_0")[0], dtype="float32", invariant=True)
    if case != "qwen3_moe":
        assert {layer.kind for layer in model._layers[1].latent.linears()} == {"Q8_0"}
    one_call.check(model)


GEMMA3 = "gemma3.attention.sliding_window_pattern"
SOME = [True, False, True, True, False, True]


@pytest.mark.parametrize(
    ("case", "changes", "name", "expected"),
    [
        ("gemma3", {GEMMA3: SOME}, "layer_types", [("full", "sliding")[each] + "_attention" for each in SOME]),
        ("gemma3", {GEMMA3: 3}, "layer_types", [*["sliding_attention"] * 2, "full_attention"] * 2),
        ("phi3", {"phi3.attention.sliding_window": 9}, "sliding_window", 9),
        ("qwen3_5", {"qwen35.attention.recurrent_layers": None}, "layer_types", ["linear_attention", "full_attention"]),
    ],
)
def test_what_other_files_say_is_read(edited, case, changes, name, expected):
    assert getattr(Checkpoint.at(edited(case, changes)).transformers_config(), name) == expected


def test_a_gemma_may_stretch_its_whole_layers(edited):
    config = Checkpoint.at(
        edited("gemma3", {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0})
    ).transformers_config()
    ropes = config.rope_parameters
    assert (ropes["full_attention"]["rope_type"], ropes["full_attention"]["factor"]) == ("linear", 8.0)
    assert ropes["sliding_attention"]["rope_type"] == "default"


STRETCHED = {"factor": 4.0, "original_max_position_embeddings": 2048}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS = {
    "linear": {"scaling.type": "linear", "scaling.factor": 4.0},
    "yarn": {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 2048},
    "llama3": {},
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize(("case", "name", "width", "part"), [
    ("llama-biases", "llama", 16, 1.0), ("glm4", "glm4", 32, 0.5), ("qwen3_5", "qwen35", 32, 0.25),
])  # fmt: skip
@torch.inference_mode()
def test_every_scaling_with_parts_of_heads(opened, edited, case, name, width, part, kind):
    """Against transformers' module with rotary parameters written by hand."""
    _, ids, _, _ = opened(case, "f32")
    path, rotated = edited(case, {f"{name}.rope.{key}": value for key, value in SCALINGS[kind].items()}), width * part
    module = read_module(Checkpoint.at(path), torch.float32, attention=None).eval()
    rope = {"rope_type": kind, "rope_theta": module.config.rope_parameters["rope_theta"], **STRETCHED, **BANDS}
    module.config.rope_parameters = {**rope, "partial_rotary_factor": part}
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](module.config, "cpu")
    assert len(frequencies) == rotated / 2
    rotary = module.model.rotary_emb
    rotary.inv_freq, rotary.attention_scaling = frequencies, factor
    if kind == "llama3":
        plain = rope["rope_theta"] ** (-torch.arange(0, rotated, 2) / rotated)
        path = edited(case, {}, {"rope_freqs.weight": (plain / frequencies).numpy()})
    assert same(case, module(torch.tensor([ids])).logits[0], logits(load_model(path, dtype="float32"), [ids]))


def test_a_family_that_was_added_is_found(monkeypatch):
    mine = replace(LLAMA, model_type="mine", gguf="mine")
    monkeypatch.setitem(ARCHITECTURES, "mine", mine)
    file = SimpleNamespace(metadata={"general.architecture": "mine", "mine.block_count": 1}, tensors=["blk.0"])
    assert Keys(file).architecture is mine


@pytest.mark.parametrize(("stated", "length"), [({}, 256), ({"mistral3.rope.scaling.original_context_length": 7}, 7)])
@torch.inference_mode()
def test_queries_grow_without_yarn_too(opened, edited, stated, length):
    """From the original context length on; from the context length, where a file has no other (as in llama.cpp)."""
    _, ids, _, _ = opened("ministral3", "f32")
    kept = ("type", "factor", "original_context_length", "yarn_beta_fast", "yarn_beta_slow", "yarn_log_multiplier")
    changes = {f"mistral3.rope.scaling.{key}": None for key in kept}
    path = edited("ministral3", {**changes, **stated})
    model = Checkpoint(path)
    config = model.transformers_config()
    assert config.rope_parameters["rope_type"] == "default"
    assert config.rope_parameters["llama_4_scaling_beta"] > 0
    assert config.max_position_embeddings == 256
    config.rope_parameters["original_max_position_embeddings"] = length
    model.transformers_config = lambda: config
    module = read_module(model, torch.float32, attention=None).eval()
    assert same("ministral3", module(torch.tensor([ids])).logits[0], logits(load_model(path, dtype="float32"), [ids]))


@pytest.mark.parametrize(("case", "changes", "message"), [
    ("qwen2", {"qwen2.rope.scaling.type": "longrope"}, "scales its rotary frequencies .'longrope'."),
    ("gemma3", {"gemma3.rope.scaling.type": "longrope"}, "scales its rotary frequencies"),
    ("gemma3", {GEMMA3: [True, False]}, "has 6 layers, but says of 2"),
    ("gemma3", {GEMMA3: 0}, f"0 as {GEMMA3}"),
    ("gemma3", {"gemma3.final_logit_softcapping": "x"}, "'x' as gemma3.final_logit_softcapping"),
    ("apertus", {"xielu.alpha_p": [0.5]}, "as xielu.alpha_p, not a number for each of 2 layers"),
    ("granite", {"granite.residual_scale": 0.0}, "has 0.0 as granite.residual_scale, not a positive number"),
    ("cohere2", {"cohere2.attention.sliding_window_pattern": [True]}, "has 4 layers, but says of 1"),
    ("qwen3_moe", {"qwen3moe.expert_count": 2**31 - 1}, "has 2147483647 experts by its metadata, and 4 by its"),
    ("mixtral", {"llama.expert_count": 2**31 - 1}, "has 2147483647 experts by its metadata, and 4 by its"),
    ("qwen3_moe", {"qwen3moe.expert_used_count": 9}, "num_experts_per_tok must be an integer"),
    ("gemma2", {"gemma2.attention.sliding_window_pattern": [True]}, "has 2 layers, but says of 1"),
    ("phi3", {"phi3.rope.dimension_count": 7}, "heads of 16 numbers, but 7"),
    ("lfm2", {"lfm2.attention.head_count_kv": [2]}, "has 2 layers, but does not say of each"),
    ("nemotron_h", {"nemotron_h.attention.head_count_kv": [1, 2, 0]}, r"layers of \[1, 2\] heads of keys"),
    ("qwen3_5", {"qwen35.ssm.inner_size": 63}, "has 63 numbers in 4 heads"),
    ("granite-h", {"granitehybrid.expert_count": 4}, "granitehybrid.expert_used_count, not a positive integer"),
    ("granite-h", {"granitehybrid.ssm.inner_size": 96}, "has 96 numbers in Mamba-2, 64 in a row"),
    ("falcon_h1", {"falcon-h1.ssm.inner_size": 50}, "has 50 numbers in 4 heads of Mamba-2"),
    ("nemotron_h", {"nemotron_h.feed_forward_length": [0, 96]}, "has 3 layers, but does not say of each what"),
    ("nemotron_h", {"nemotron_h.feed_forward_length": [8, 96, 0]}, "not one number and zeros"),
    ("nemotron_h-experts", {"nemotron_h_moe.moe_latent_size": 32}, "moe_latent_size 32"),
    ("deepseek_v2", {"deepseek2.expert_weights_norm": True}, "True as expert_weights_norm, which no model of Deep"),
    ("deepseek_v3", {"deepseek2.expert_gating_func": 3}, "has 3 as deepseek2.expert_gating_func"),
    ("deepseek_v3", {"deepseek2.rope.dimension_count": 48}, "has heads of 48 numbers, 48 of them rotated"),
    ("deepseek_v3", {"deepseek2.attention.kv_lora_rank": 16}, "attn_kv_a_.* has shape .* contradict"),
    ("qwen3_5", {"qwen35.ssm.state_size": 8}, "ssm_conv1d.weight has shape .* contradict"),
])  # fmt: skip
def test_what_is_not_read_is_named(edited, case, changes, message):
    refused((ConfigError, ModelError), message, load_model, edited(case, changes))


@pytest.mark.parametrize(("case", "name"), [("llama", "llama"), ("qwen3", "qwen3"), ("smollm3", "smollm3")])
def test_layers_are_compared_with_the_tensors_before_a_config_is_made_of_them(edited, monkeypatch, case, name):
    path = edited(case, {f"{name}.block_count": 2**31 - 1})
    monkeypatch.setattr("transformers.CONFIG_MAPPING", None)
    refused(ModelError, r"has 2147483647 layers in \d+ tensors", load_model, path)


@pytest.mark.parametrize(
    "case", ["llama-biases", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma2", "phi3", "olmo2", "smollm3"]
)
def test_the_second_start_has_the_same_config(tmp_path, opened, monkeypatch, case):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    path = opened(case, "f32")[0]
    expected = Checkpoint.at(path).transformers_config()
    for _ in range(2):
        config = Checkpoint(path).config
        assert isinstance(config, CachedConfig)
        assert bind(config) == bind(expected)
        for name, value in expected.to_dict().items():
            if name not in ("dtype", "id2label", "label2id", "transformers_version"):
                assert getattr(config, name) == value, name


def test_frequencies_that_transformers_computes_keep_its_config(opened):
    assert not isinstance(Checkpoint.at(opened("llama", "f32")[0]).config, CachedConfig)


START = """
import sys, json
from forerun import LLM, SamplingParams
llm = LLM(sys.argv[1])
ids = llm.generate("b c", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids
print(json.dumps([ids, sorted({"transformers", "huggingface_hub.errors"} & set(sys.modules))]))
"""


@pytest.mark.slow
def test_the_second_start_leaves_transformers_alone(tmp_path):
    path = write_model(tmp_path / "model.gguf")
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    expected = LLM(str(path)).generate("b c", params)[0].outputs[0].token_ids  # the first start
    started = subprocess.run([sys.executable, "-c", START, path], capture_output=True, check=True)
    assert json.loads(started.stdout) == [expected, []]


@pytest.mark.parametrize("text", ["", "b c", " c\n\nb ", "<|end|>b<|end|>", "unknown words"])
def test_the_tokenizer_is_transformers_own(tmp_path, text):
    tokenizer = load_tokenizer(write_model(tmp_path / "model.gguf"))
    full = tokenizer.full
    ids = full.encode(text)
    assert tokenizer.encode(text) == ids
    assert tokenizer.encode(text, add_special_tokens=False) == full.encode(text, add_special_tokens=False)
    for skip in (False, True):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == full.decode(ids, skip_special_tokens=skip)
    assert (len(tokenizer), tokenizer.get_vocab()) == (len(full), full.get_vocab())
    assert tokenizer.all_special_tokens == full.all_special_tokens
    assert tokenizer.eos_token_id == full.eos_token_id
    assert tokenizer.get_added_vocab() == full.get_added_vocab()
    assert tokenizer.convert_ids_to_tokens(ids) == full.convert_ids_to_tokens(ids)


def has(text, *kinds):
    return any(category(letter) in kinds and ord(letter) > 127 for letter in text)


UNLIKE = {
    **dict.fromkeys(("gpt-4o", "llama4", "tekken"), ("Mn", "Mc", "Lu", "Ll", "Lt")),
    **dict.fromkeys(("deepseek-llm", "deepseek-coder"), ("Zs",)),
}
"""Where Forerun follows the models' own rules and llama.cpp others: of which letters a word is made, and whether wide
spaces are among the CJK range."""


@pytest.fixture(scope="module")
def words():
    return json.loads(lzma.decompress((KEPT / "words.json.xz").read_bytes()))


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_texts_are_cut_as_llama_cpp_does(words, pre):
    given = {"model": "gpt2", "pre": pre, "tokens": words["tokens"], "merges": words["merges"], "add_bos_token": False}
    tokenizer = make_tokenizer({f"tokenizer.ggml.{key}": value for key, value in given.items()}, "words.gguf")
    like = [index for index, text in enumerate(words["texts"]) if not has(text, *UNLIKE.get(pre, ()))]
    assert len(like) > 150
    for index in like:
        assert tokenizer.encode(words["texts"][index]) == words["ids"][pre][index], words["texts"][index]

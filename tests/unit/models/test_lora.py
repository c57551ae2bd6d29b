"""LoRA adapters merged at load, against plain W + scale B A."""

import json
import math
import re
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from described import CASES, SIZES
from forerun import LLM, ConfigError, ModelError, SamplingParams
from forerun.cli.main import run
from forerun.engine.tuned import load, save
from forerun.measure.environment import logits
from forerun.models.files.open import Checkpoint
from forerun.models.formats import blocks
from forerun.models.load import load_model
from forerun.models.weights.lora import parse, read
from gguf_files import write_model
from here import where
from refusals import refused
from tiny import ALPHABET, save_checkpoint, save_tokenizer, tiny_llama

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj")
TEXTS = [[5, 9, 12, 40, 33, 7, 21, 20]]
CONFIG = {"peft_type": "LORA", "base_model_name_or_path": "some/base", "r": 4, "lora_alpha": 8, "bias": "none"}


def adapter(folder, base, seed=0, rank=4, **changes):
    """A random one, and what B A is for each layer."""
    folder.mkdir()
    torch.manual_seed(seed)
    module = AutoModelForCausalLM.from_pretrained(base)
    tensors, products = {}, {}
    for layer in LAYERS:
        outputs, inputs = module.get_submodule(layer).weight.shape
        a, b = torch.randn(rank, inputs) * 0.2, torch.randn(outputs, rank) * 0.2
        tensors |= {f"base_model.model.{layer}.lora_A.weight": a, f"base_model.model.{layer}.lora_B.weight": b}
        products[layer] = b @ a
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, "r": rank, **changes}))
    return products


def merged(base, *added):
    """Logits of transformers' own module with so much of each product added."""
    module = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.inference_mode():
        for scale, products in added:
            for layer, product in products.items():
                module.get_submodule(layer).weight += scale * product
        return module(torch.tensor(TEXTS)).logits[0]


def close(got, expected):
    return bool((got - expected).abs().max() < 1e-3 * expected.abs().max())


@pytest.mark.parametrize("path", ["native", "hf"])
def test_an_adapter_is_added_to_the_weights(tiny_target, tmp_path, path):
    products = adapter(tmp_path / "a", tiny_target)
    result = load_model(tiny_target, lora=str(tmp_path / "a"), model_path=path, dtype="float32", invariant=False)
    assert result.info.lora == (str(tmp_path / "a"),)
    assert close(logits(result, TEXTS), merged(tiny_target, (8 / 4, products)))
    assert not close(logits(result, TEXTS), merged(tiny_target))


def test_several_with_weights(tiny_target, tmp_path):
    one, two = adapter(tmp_path / "a", tiny_target), adapter(tmp_path / "b", tiny_target, 1, use_rslora=True)
    lora = [f"{tmp_path / 'a'}=0.5", f"{tmp_path / 'b'}=-0.25"]
    result = load_model(tiny_target, lora=lora, dtype="float32", invariant=False)
    expected = merged(tiny_target, (0.5 * 8 / 4, one), (-0.25 * 8 / math.sqrt(4), two))
    assert close(logits(result, TEXTS), expected)


def test_scales_of_single_layers(tiny_target, tmp_path):
    products = adapter(tmp_path / "a", tiny_target, alpha_pattern={"self_attn.q_proj": 2}, rank=2)
    result = load_model(tiny_target, lora=str(tmp_path / "a"), dtype="float32", invariant=False)
    own = {LAYERS[0]: products.pop(LAYERS[0])}
    assert close(logits(result, TEXTS), merged(tiny_target, (1, own), (4, products)))


def get_pattern_key(pattern_keys, key_to_match):
    """PEFT's own (peft/utils/other.py of 0.21)."""
    for key in pattern_keys:
        match = re.match(rf"(.*\.)?({key})$", key_to_match)
        if not match:
            continue
        return key

    return key_to_match


PATTERNS = [
    {"q_proj": 2}, {"proj": 2}, {"_proj": 2}, {".*_proj": 2}, {"q_proj|v_proj": 2}, {"layers.0": 2},
    {r".*\.layers\.1\..*": 2}, {r"model\.layers\.[01]\.self_attn\.q_proj": 2}, {"^model.*q_proj": 2},
    {r"layers\.0.*": 2, "q_proj": 4}, {"q_proj": 4, r"layers\.0.*": 2}, {"q_proj$": 2}, {"": 2}, {"LAYERS.*": 2},
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_patterns_are_matched_as_peft_matches_them(tiny_target, tmp_path, pattern):
    adapter(tmp_path / "a", tiny_target, alpha_pattern=pattern)
    result = {name: pair.scale for name, pair in read(tmp_path / "a")[0].pairs.items()}
    assert result == {name: pattern.get(get_pattern_key(pattern, name), 8) / 4 for name in LAYERS}
    ranks = {name: pattern.get(get_pattern_key(pattern, name), 4) for name in LAYERS}
    adapter(tmp_path / "b", tiny_target, rank_pattern=pattern)
    if set(ranks.values()) == {4}:
        assert read(tmp_path / "b")[0].pairs.keys() == ranks.keys()
    else:
        refuse(tiny_target, tmp_path / "b", "is 2 by its adapter_config.json and 4 by its weights")


PEFT = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None, "bias": "none",
    "corda_config": None, "ensure_weight_tying": False, "eva_config": None, "exclude_modules": None,
    "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True, "kasa_config": None,
    "layer_replication": None, "layers_pattern": None, "layers_to_transform": None, "loftq_config": {},
    "lora_bias": False, "lora_dropout": 0.05, "lora_ga_config": None, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "monteclora_config": None, "peft_version": "0.21.2",
    "qalora_group_size": 16, "rank_pattern": {}, "revision": None, "target_modules": ["q_proj"],
    "target_parameters": None, "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_bdlora": None,
    "use_dora": False, "use_qalora": False, "use_rslora": False, "velora_config": None,
}  # fmt: skip
"""What PEFT 0.21 writes where nothing is asked for."""


def test_what_peft_writes_by_default_is_merged(tiny_target, tmp_path):
    products = adapter(tmp_path / "a", tiny_target, **PEFT)
    result = load_model(tiny_target, lora=str(tmp_path / "a"), dtype="float32", invariant=False)
    assert close(logits(result, TEXTS), merged(tiny_target, (2, products)))


@pytest.mark.parametrize("begun", [False, "gaussian", "orthogonal", "eva"])
def test_beginnings_that_leave_the_weights(tiny_target, tmp_path, begun):
    adapter(tmp_path / "a", tiny_target, init_lora_weights=begun, loftq_config={"loftq_bits": 4})
    assert len(read(tmp_path / "a")[0].pairs) == len(LAYERS)


@pytest.mark.parametrize("quantization", where(blocks.can_run(), ["int8_rows", "q8_0"]))
def test_merged_weights_may_be_rounded(tiny_target, tmp_path, quantization):
    products = adapter(tmp_path / "a", tiny_target)
    result = load_model(tiny_target, lora=str(tmp_path / "a"), quantization=quantization, invariant=False)
    expected = merged(tiny_target, (2, products))
    assert (logits(result, TEXTS) - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("path", where(blocks.can_run(), ["a GGUF file"]))
def test_what_an_adapter_touches_is_unpacked(tmp_path, path):
    model = write_model(tmp_path / "model.gguf")
    layer = "base_model.model.model.layers.0.mlp.up_proj"
    (tmp_path / "a").mkdir()
    tensors = {f"{layer}.lora_A.weight": torch.ones(1, 32), f"{layer}.lora_B.weight": torch.ones(64, 1)}
    save_file(tensors, tmp_path / "a" / "adapter_model.safetensors")
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps({**CONFIG, "r": 1, "lora_alpha": 1}))
    plain, result = load_model(model), load_model(model, lora=str(tmp_path / "a"))
    assert plain.info.path == "native, Q4_1 and Q8_0"
    assert "streamed" in result.info.path
    assert "Q4_1" in result.info.path
    assert not close(logits(result, TEXTS), logits(plain, TEXTS))


def test_texts_keep_their_promises(tiny_target, tmp_path):
    adapter(tmp_path / "a", tiny_target)
    llm = LLM(tiny_target, lora=[str(tmp_path / "a")], speculative_config={"method": "ngram"})
    drafted = llm.generate("the cat the cat", GREEDY)[0].outputs[0].token_ids
    assert drafted == llm.generate("the cat the cat", GREEDY, speculate=False)[0].outputs[0].token_ids
    assert drafted != LLM(tiny_target).generate("the cat the cat", GREEDY)[0].outputs[0].token_ids


def test_the_command_line(tiny_target, tmp_path, capsys):
    adapter(tmp_path / "a", tiny_target)
    common = ["generate", "the cat", "--model", tiny_target, "--max-tokens", "8", "--ignore-eos", "--json"]
    texts = []
    for more in ([], ["--lora", str(tmp_path / "a")], ["--lora", f"{tmp_path / 'a'}=0"]):
        assert run([*common, *more]) == 0
        texts.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert texts[0] == texts[2] != texts[1]
    assert run([*common, "--lora", str(tmp_path / "nowhere")]) == 2
    assert "is not a LoRA adapter" in capsys.readouterr().err


def test_fingerprints_tell_adapters_apart(tiny_target, tmp_path):
    adapter(tmp_path / "a", tiny_target)
    adapter(tmp_path / "b", tiny_target, 1)
    adapter(tmp_path / "c", tiny_target, lora_alpha=16)
    cases = [None, "a", "a=0.5", "b", "c"]
    marks = {Checkpoint.at(Path(tiny_target)).fingerprint(case and str(tmp_path / case)) for case in cases}
    assert len(marks) == len(cases)
    assert Checkpoint.at(Path(tiny_target)).fingerprint(()) == Checkpoint.at(Path(tiny_target)).fingerprint()
    (tmp_path / "tuned").mkdir()
    save(tmp_path / "tuned", tiny_target, {"method": "ngram"}, [])
    assert load(tmp_path / "tuned", tiny_target) == {"method": "ngram"}
    refused(ConfigError, "was tuned for", LLM, tiny_target, tuned=tmp_path / "tuned", lora=str(tmp_path / "a"))


def test_weights_behind_a_folder():
    assert parse("a/b") == ((Path("a/b"), 1.0),)
    assert parse(["a=2", Path("b")]) == ((Path("a"), 2.0), (Path("b"), 1.0))
    for text in ("a=x", "a=nan", "a="):
        refused(ConfigError, "FOLDER or FOLDER=WEIGHT", parse, text)


NOTHING = "is 0 by its adapter_config.json and 0 by its weights; both must be the same, and at least 1"
BAD = {
    "another kind": ({"peft_type": "IA3"}, "an adapter of type 'IA3'; only LORA"),
    "dora": ({"use_dora": True}, "has no norms of DoRA"),
    "biases": ({"bias": "all"}, "holds biases"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "initialised with 'pissa_niter_4'"),
    "lora_ga": ({"init_lora_weights": "lora_ga"}, "initialised with 'lora_ga'"),
    "mica": ({"init_lora_weights": "mica"}, "initialised with 'mica'"),
    "a beginning that is none": ({"init_lora_weights": {"a": 1}}, "initialised with {'a': 1}"),
    "alora": ({"alora_invocation_tokens": [5, 9]}, "asks for alora_invocation_tokens"),
    "bdlora": ({"use_bdlora": {"nblocks": 2}}, "asks for use_bdlora "),
    "arrow": ({"arrow_config": {"top_k": 3}}, "asks for arrow_config "),
    "monteclora": ({"monteclora_config": {"num_samples": 8}}, "asks for monteclora_config "),
    "kasa": ({"kasa_config": {"beta": 1.0}}, "asks for kasa_config "),
    "velora": ({"velora_config": {"scale": 1.0}}, "asks for velora_config "),
    "tied": ({"ensure_weight_tying": True}, r"asks for ensure_weight_tying \(True\)"),
    "unknown": ({"use_telepathy": "on"}, r"asks for use_telepathy \('on'\)"),
    "a pattern": ({"alpha_pattern": {"q_proj(": 2}}, r"'q_proj\(' is no regular expression"),
    "patterns": ({"rank_pattern": ["q_proj"]}, r"rank_pattern must be an object, not \['q_proj'\]"),
    "rank": ({"r": 8}, "the rank of .* is 8 by its adapter_config.json and 4 by its weights"),
    "nothing": ({"rank": 0, "use_rslora": False}, NOTHING),
    "nothing, scaled by its rank": ({"rank": 0, "use_rslora": True}, NOTHING),
    "no rank": ({"r": None}, "is None by its adapter_config.json and 4 by its weights"),
    "a rank beyond floats": ({"r": 10**400}, "is 1000.* by its adapter_config.json and 4"),
    "alpha beyond floats": ({"lora_alpha": 10**400}, "lora_alpha must be a number, not 1000"),
    "alpha beyond 32 bits": ({"lora_alpha": 1e300}, r"lora_alpha 1e\+300 is beyond 32-bit numbers"),
    "alpha": ({"lora_alpha": "x"}, "lora_alpha must be a number, not 'x'"),
    "alphas": ({"alpha_pattern": {"q_proj": None}}, "lora_alpha must be a number, not None"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_merged_is_named(tiny_target, tmp_path, name):
    changes, message = BAD[name]
    adapter(tmp_path / "a", tiny_target, **changes)
    refuse(tiny_target, tmp_path / "a", message)


def refuse(model, folder, message):
    for path in ("native", "hf"):
        refused(ModelError, message, load_model, model, lora=str(folder), model_path=path)


def trained(folder, module, **options):
    """An adapter of PEFT's own with random numbers, and the logits of PEFT's model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied embeddings
        model = get_peft_model(module, LoraConfig(r=4, lora_alpha=8, **options))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "magnitude" in name:
                torch.nn.init.uniform_(parameter, 0.5, 2.0)
            elif parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(folder)
    with torch.inference_mode():
        return model.eval()(torch.tensor(TEXTS)).logits[0]


ENDS = ["embed_tokens", "lm_head"]
SOME = ["q_proj", "down_proj"]


@pytest.mark.parametrize("path", ["native", "hf"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("options", [
    {"target_modules": SOME, "use_dora": True},
    {"target_modules": ["v_proj"], "use_dora": True, "use_rslora": True, "modules_to_save": ["norm"]},
    {"target_modules": SOME, "modules_to_save": ENDS},
    {"target_modules": SOME, "modules_to_save": ENDS[:1]},
    {"target_modules": SOME, "modules_to_save": ENDS[1:]},
], ids=str)  # fmt: skip
def test_what_peft_trains_is_merged_as_peft_merges_it(tmp_path, path, tied, options):
    module = tiny_llama(tie_word_embeddings=tied)
    save_checkpoint(module, tmp_path / "base")
    expected = trained(tmp_path / "a", module, **options)
    own = {"model_path": path, "dtype": "float32", "invariant": False}
    result = load_model(tmp_path / "base", lora=str(tmp_path / "a"), **own)
    assert close(logits(result, TEXTS), expected)
    assert not close(logits(load_model(tmp_path / "base", **own), TEXTS), expected)
    half = f"{tmp_path / 'a'}=0.5"
    if "modules_to_save" in options:
        with pytest.raises(ConfigError, match=r"replaces whole weights .*: its weight is 1, not 0\.5"):
            load_model(tmp_path / "base", lora=half, **own)
    else:
        assert not close(logits(load_model(tmp_path / "base", lora=half, **own), TEXTS), expected)


@pytest.mark.parametrize("path", ["native", "hf"])
@pytest.mark.parametrize("tied", [True, False])
def test_added_tokens_come_with_their_tokenizer(tmp_path, path, tied):
    module, count = tiny_llama(tie_word_embeddings=tied), len(ALPHABET)
    save_checkpoint(module, tmp_path / "base")
    module.resize_token_embeddings(count + 2)
    expected = trained(tmp_path / "a", module, target_modules=SOME, modules_to_save=ENDS)
    save_tokenizer(tmp_path / "a", [*ALPHABET, "<call>", "<answer>"])
    llm = LLM(str(tmp_path / "base"), lora=[str(tmp_path / "a")], model_path=path, dtype="float32")
    assert llm.model.info.vocab_size == count + 2
    assert close(logits(llm.model, TEXTS), expected)
    assert llm.tokenizer.convert_tokens_to_ids("<answer>") == count + 1
    assert len(llm.generate([[count, count + 1]], GREEDY)[0].outputs[0].token_ids) == 8
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    del tensors["base_model.model.lm_head.weight"]
    save_file(tensors, tmp_path / "a" / "adapter_model.safetensors")
    refused(ModelError, "adds tokens, so it needs both model.embed_tokens.weight and lm_head.weight", load_model,
            tmp_path / "base", lora=str(tmp_path / "a"), model_path=path)  # fmt: skip


@pytest.mark.parametrize(("made_on", "used_on"), [("pictures", "text"), ("text", "pictures"), ("pictures", "pictures")])
def test_names_of_the_class_that_reads_pictures(tmp_path, caplog, made_on, used_on):
    kind, options = CASES["ministral3"]
    text = AutoConfig.for_model(kind, **{**SIZES, **options})
    sight = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
             "head_dim": 8, "patch_size": 4, "image_size": 16}  # fmt: skip
    both = AutoConfig.for_model("mistral3", text_config=text.to_dict(), vision_config=sight, tie_word_embeddings=False)
    torch.manual_seed(0)
    modules = {"pictures": AutoModelForImageTextToText.from_config(both).eval(),
               "text": AutoModelForCausalLM.from_config(text).eval()}  # fmt: skip
    modules["text"].model.load_state_dict(modules["pictures"].model.language_model.state_dict())
    modules["text"].lm_head.load_state_dict(modules["pictures"].lm_head.state_dict())
    for name, module in modules.items():
        module.save_pretrained(tmp_path / name)
    expected = trained(tmp_path / "a", modules[made_on], target_modules=["q_proj"], modules_to_save=ENDS)
    caplog.clear()
    with caplog.at_level("INFO", logger="forerun"):
        result = load_model(tmp_path / used_on, lora=str(tmp_path / "a"), dtype="float32", invariant=False)
    assert close(logits(result, TEXTS), expected)
    assert ("also adapts what reads pictures" in caplog.text) == (made_on == "pictures")
    if used_on == "text":
        module = load_model(tmp_path / "text", lora=str(tmp_path / "a"), model_path="hf", dtype="float32")
        assert close(logits(module, TEXTS), expected)


def test_adapters_for_another_model(tiny_target, tmp_path):
    layer = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    shape = {f"{layer}A.weight": torch.ones(4, 33), f"{layer}B.weight": torch.ones(64, 4)}
    cases = {
        "it is for another model": shape,
        "which .* does not have": {name.replace(".0.", ".7."): part for name, part in shape.items()},
        "do not belong together": {**shape, f"{layer}B.weight": torch.ones(64, 3)},
        "embed_tokens.weight .* it is for another model": {
            "base_model.model.model.embed_tokens.weight": torch.ones(len(ALPHABET), 5)
        },
        "which .* does not have.*": {"base_model.model.model.layers.7.mlp.up_proj.weight": torch.ones(4, 9)},
        "lora_magnitude_vector .* no part": {f"{layer}magnitude_vector": torch.ones(4, 4)},
        "no part of a LoRA": {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 9)},
        "is empty": {},
    }
    for number, (message, tensors) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        adapter(folder, tiny_target)
        save_file(tensors, folder / "adapter_model.safetensors")
        refuse(tiny_target, folder, message)
    (folder / "adapter_model.safetensors").write_bytes(b"\x09" * 40)
    refuse(tiny_target, folder, "adapter_model.safetensors cannot be read")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    refuse(tiny_target, folder, "adapters are read from safetensors")

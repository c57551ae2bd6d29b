"""LoRA adapters merged at load, against plain W + scale B A."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from forerun import LLM, ConfigError, ModelError, SamplingParams
from forerun.bench.weights import logits
from forerun.cli.main import run
from forerun.engine.tuned import load, save
from forerun.models.fingerprint import fingerprint
from forerun.models.formats import blocks
from forerun.models.load import load_model
from forerun.models.lora import parse
from gguf_files import write_model
from here import where

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj")
TEXTS = [[5, 9, 12, 40, 33, 7, 21, 20]]
CONFIG = {"peft_type": "LORA", "base_model_name_or_path": "some/base", "r": 4, "lora_alpha": 8, "bias": "none"}


def adapter(folder: Path, base: Path | str, seed: int = 0, rank: int = 4, **changes: Any) -> dict[str, torch.Tensor]:
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


def merged(base: Path | str, *added: tuple[float, dict[str, torch.Tensor]]) -> torch.Tensor:
    """Logits of transformers' own module with so much of each product added."""
    module: LlamaForCausalLM = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.inference_mode():
        for scale, products in added:
            for layer, product in products.items():
                module.get_submodule(layer).weight += scale * product
        return module(torch.tensor(TEXTS)).logits[0]


def close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((got - wanted).abs().max() < 1e-3 * wanted.abs().max())


@pytest.mark.parametrize("path", ["native", "hf"])
def test_an_adapter_is_added_to_the_weights(tiny_target, tmp_path, path):
    products = adapter(tmp_path / "a", tiny_target)
    found = load_model(tiny_target, lora=str(tmp_path / "a"), model_path=path, dtype="float32", invariant=False)
    assert found.info.lora == (str(tmp_path / "a"),)
    assert close(logits(found, TEXTS), merged(tiny_target, (8 / 4, products)))
    assert not close(logits(found, TEXTS), merged(tiny_target))


def test_several_with_weights(tiny_target, tmp_path):
    one, two = adapter(tmp_path / "a", tiny_target), adapter(tmp_path / "b", tiny_target, 1, use_rslora=True)
    lora = [f"{tmp_path / 'a'}=0.5", f"{tmp_path / 'b'}=-0.25"]
    found = load_model(tiny_target, lora=lora, dtype="float32", invariant=False)
    wanted = merged(tiny_target, (0.5 * 8 / 4, one), (-0.25 * 8 / math.sqrt(4), two))
    assert close(logits(found, TEXTS), wanted)


def test_scales_of_single_layers(tiny_target, tmp_path):
    products = adapter(tmp_path / "a", tiny_target, alpha_pattern={"self_attn.q_proj": 2}, rank=2)
    found = load_model(tiny_target, lora=str(tmp_path / "a"), dtype="float32", invariant=False)
    own = {LAYERS[0]: products.pop(LAYERS[0])}
    assert close(logits(found, TEXTS), merged(tiny_target, (1, own), (4, products)))


@pytest.mark.parametrize("quantization", where(blocks.can_run(), ["int8_rows", "q8_0"]))
def test_merged_weights_may_be_rounded(tiny_target, tmp_path, quantization):
    products = adapter(tmp_path / "a", tiny_target)
    found = load_model(tiny_target, lora=str(tmp_path / "a"), quantization=quantization, invariant=False)
    wanted = merged(tiny_target, (2, products))
    assert (logits(found, TEXTS) - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize("path", where(blocks.can_run(), ["a GGUF file"]))
def test_what_an_adapter_touches_is_unpacked(tmp_path, path):
    model = write_model(tmp_path / "model.gguf")
    layer = "base_model.model.model.layers.0.mlp.up_proj"
    (tmp_path / "a").mkdir()
    tensors = {f"{layer}.lora_A.weight": torch.ones(1, 32), f"{layer}.lora_B.weight": torch.ones(64, 1)}
    save_file(tensors, tmp_path / "a" / "adapter_model.safetensors")
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps({**CONFIG, "r": 1, "lora_alpha": 1}))
    plain, found = load_model(model), load_model(model, lora=str(tmp_path / "a"))
    assert plain.info.path == "native, Q4_1 and Q8_0"
    assert "streamed" in found.info.path
    assert "Q4_1" in found.info.path
    assert not close(logits(found, TEXTS), logits(plain, TEXTS))


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
    assert "is no LoRA adapter" in capsys.readouterr().err


def test_fingerprints_tell_adapters_apart(tiny_target, tmp_path):
    adapter(tmp_path / "a", tiny_target)
    adapter(tmp_path / "b", tiny_target, 1)
    adapter(tmp_path / "c", tiny_target, lora_alpha=16)
    cases = [None, "a", "a=0.5", "b", "c"]
    marks = {fingerprint(Path(tiny_target), case and str(tmp_path / case)) for case in cases}
    assert len(marks) == len(cases)
    assert fingerprint(Path(tiny_target), ()) == fingerprint(Path(tiny_target))
    (tmp_path / "tuned").mkdir()
    save(tmp_path / "tuned", tiny_target, {"method": "ngram"}, [])
    assert load(tmp_path / "tuned", tiny_target) == {"method": "ngram"}
    with pytest.raises(ConfigError, match="was tuned for"):
        LLM(tiny_target, tuned=tmp_path / "tuned", lora=str(tmp_path / "a"))


def test_weights_behind_a_folder():
    assert parse("a/b") == ((Path("a/b"), 1.0),)
    assert parse(["a=2", Path("b")]) == ((Path("a"), 2.0), (Path("b"), 1.0))
    for text in ("a=x", "a=nan", "a="):
        with pytest.raises(ConfigError, match="FOLDER or FOLDER=WEIGHT"):
            parse(text)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"peft_type": "IA3"}, "an adapter of type 'IA3'; only LORA"),
    "dora": ({"use_dora": True}, r"asks for DoRA, whose norms are learnt too \(use_dora\)"),
    "modules": ({"modules_to_save": ["lm_head"]}, "whole modules beside the adapter"),
    "biases": ({"bias": "all"}, "holds biases"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "begun with 'pissa_niter_4'"),
    "alpha": ({"lora_alpha": "x"}, "lora_alpha must be a number, not 'x'"),
    "alphas": ({"alpha_pattern": {"q_proj": None}}, "lora_alpha must be a number, not None"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_merged_is_named(tiny_target, tmp_path, name):
    changes, message = BAD[name]
    adapter(tmp_path / "a", tiny_target, **changes)
    refuse(tiny_target, tmp_path / "a", message)


def refuse(model: str, folder: Path, message: str) -> None:
    for path in ("native", "hf"):
        with pytest.raises(ModelError, match=message) as caught:
            load_model(model, lora=str(folder), model_path=path)
        assert "\n" not in str(caught.value)


def test_adapters_for_another_model(tiny_target, tmp_path):
    layer = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    shape = {f"{layer}A.weight": torch.ones(4, 33), f"{layer}B.weight": torch.ones(64, 4)}
    cases = {
        "it is for another model": shape,
        "which .* does not have": {name.replace(".0.", ".7."): part for name, part in shape.items()},
        "do not belong together": {**shape, f"{layer}B.weight": torch.ones(64, 3)},
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

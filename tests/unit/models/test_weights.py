"""Weights as they are held: their bytes, what 8 bits cost, and who is compared with whom."""

import json

import pytest
import torch
from transformers import LlamaForCausalLM

from forerun import kernels
from forerun.cli.main import run
from forerun.measure import bench as bench_run
from forerun.measure.environment import line, logits, weights
from forerun.measure.rounds import EngineContender
from forerun.models.formats import int8, tiled
from forerun.models.formats.base import size
from forerun.models.load import load_model
from here import where

pytestmark = pytest.mark.slow

IN_ROWS = where(kernels.has("linear_int8_float32"), ["int8_rows"])
"""Without kernels of ours so small layers stay as they are."""
SMALL = "--prompts 2 --prompt-tokens 12 --max-tokens 12 --prompt-set random --repeats 1 --temperature 0"


@pytest.fixture
def command(capsys, tiny_target):
    def call(*options):
        assert run([*options, "--model", tiny_target]) == 0
        return capsys.readouterr()

    return call


def matrices(folder):
    """Numbers in every matrix of a checkpoint, by transformers' names; a tied head counts as one of its own."""
    model = LlamaForCausalLM.from_pretrained(folder)
    result = {name: part.numel() for name, part in model.named_parameters() if part.dim() > 1}
    return result | {"lm_head.weight": model.lm_head.weight.numel()}


@pytest.mark.parametrize("path", ["native", "hf"])
@pytest.mark.parametrize("layout", ["auto", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_knows_its_bytes(tiny_target, path, layout, dtype):
    sizes = matrices(tiny_target)
    info = load_model(tiny_target, model_path=path, weights=layout, dtype=dtype).info
    embedding = sizes["model.embed_tokens.weight"]
    assert info.token_bytes == (sum(sizes.values()) - embedding) * dtype.itemsize
    assert info.weight_bytes == sum(sizes.values()) * dtype.itemsize
    assert info.quantization is None


@pytest.mark.parametrize("weights", [*where(tiled.can_tile(torch.bfloat16), ["streamed"]), "plain"])
def test_a_tied_head_is_counted_as_often_as_it_is_held(weights):
    plain = load_model("forerun:draft", model_path="hf", weights="plain").info
    assert plain.weight_bytes == plain.token_bytes
    native = load_model("forerun:draft", model_path="native", weights=weights).info
    assert native.weight_bytes == native.token_bytes == plain.token_bytes
    if not int8.can_run():
        return
    smaller = load_model("forerun:draft", model_path="native", quantization="int8_rows").info
    table = native.vocab_size * native.hidden_size
    assert smaller.weight_bytes == smaller.token_bytes + table * native.dtype.itemsize


@pytest.mark.parametrize("method", ["cascade", "draft_model", "merged", "staged", "ngram"])
def test_a_drafters_models_are_found(llm, method):
    target = llm(model="forerun:target")
    engine = EngineContender(target, {"method": method}, max_num_seqs=1).engine
    result = weights([target.engine, engine, engine], [[5, 6, 7, 8] * 4])
    drafts = [item["model"] for item in result if item["role"] == "draft"]
    assert result[0]["role"] == "target"
    assert drafts == ([] if method == "ngram" else ["forerun:draft"])


def test_a_draft_with_fewer_outputs_is_compared_where_it_has_some(llm):
    target = llm(model="forerun:target")
    method = {"method": "draft_model", "quantization": "int8_rows", "draft_vocab_size": 300}
    engine = EngineContender(target, method, max_num_seqs=1).engine
    prompt = engine.tokenizer.encode("def add(first, second):\n    return first + second")
    _, result = weights([engine], [prompt])
    (draft,) = engine.router.models()
    got = logits(draft, [prompt]).double()
    whole = logits(load_model("forerun:draft", dtype=draft.info.dtype), [prompt]).double()
    assert got.shape == (len(prompt), 300)
    expected = whole[:, engine.router.drafters["draft_model"].output_ids]
    off, scale = (rows - rows.mean(dim=1, keepdim=True) for rows in (got - expected, expected))
    assert 0.001 < result["error"] < 0.1
    assert result["error"] == pytest.approx((off.square().sum() / scale.square().sum()).sqrt().item(), rel=1e-2)


@pytest.mark.parametrize("quantization", IN_ROWS)
def test_the_error_is_that_of_the_logits(tiny_target, llm, quantization):
    prompts = [[(5 * i + 7 * j) % 98 for i in range(20)] for j in range(3)]
    quantized = llm(quantization=quantization)
    (result,) = weights([quantized.engine], prompts)
    with torch.no_grad():
        expected = torch.cat(list(LlamaForCausalLM.from_pretrained(tiny_target)(torch.tensor(prompts)).logits)).double()
    got = logits(quantized.model, prompts).double()
    off, scale = (rows - rows.mean(dim=1, keepdim=True) for rows in (got - expected, expected))
    assert 0.001 < result["error"] < 0.1
    assert result["error"] == pytest.approx((off.square().sum() / scale.square().sum()).sqrt().item(), rel=1e-3)
    sizes = matrices(tiny_target)
    assert result["original_bytes"] == 4 * sum(sizes.values())
    assert result["bytes_per_token"] == size(quantized.model.linears())
    kept = result["bytes"] - 4 * sizes["model.embed_tokens.weight"]
    assert result["bytes_per_token"] == kept < 0.4 * 4 * (sum(sizes.values()) - sizes["model.embed_tokens.weight"])
    assert f"({result['original_dtype']}: 0.1 MB, logits off by {100 * result['error']:.1f}%)" in line(result)


@pytest.mark.parametrize("quantization", IN_ROWS)
def test_the_share_of_bandwidth_is_of_bytes_as_held_and_of_plain_rows(command, monkeypatch, tiny_target, quantization):
    monkeypatch.setattr(bench_run, "OUT_OF_CACHE", 0)
    monkeypatch.setattr(bench_run, "read_bandwidth", lambda device: 1e9)
    never = '{"synthetic_acceptance_rates": [0.0, 0.0], "num_speculative_tokens": 2}'
    options = [*SMALL.split(), "--methods", "random", "--speculative-config", never, "--quantization", quantization]
    result = json.loads(command("bench", *options, "--json")[0])
    rows = {row["method"]: row for row in result["rows"]}
    held = result["environment"]["weight_bytes_per_token"]
    assert held == result["environment"]["weights"][0]["bytes_per_token"]
    assert held < 0.4 * 4 * sum(matrices(tiny_target).values())
    assert rows["random"]["tokens_per_round"] == 1.0
    assert "bandwidth_share" not in rows["random"]
    for name in ("none", "none_fastest"):
        assert rows[name]["bandwidth_share"] == pytest.approx(held * rows[name]["tokens_per_second"] / 1e9)


def test_bench_says_what_8_bits_cost_and_that_peers_do_without(command):
    options = ["bench", *SMALL.split(), "--methods", "none", "--peers", "transformers", "--no-fastest"]
    out, err = command(*options, "--quantization", "int8_rows")
    assert "MB of weights in int8_rows (float32: 0.1 MB, logits off by " in " ".join(out.split())
    assert "peers (transformers) run float32 weights, not int8_rows" in err
    out, err = command(*options)
    assert "int8" not in out
    assert err == ""


def test_plan_and_generate_name_the_bytes(command, capsys):
    small = "--prompts 1 --prompt-tokens 12 --max-tokens 12 --prompt-set random --methods random"
    out, _ = command("plan", *small.split(), "--quantization", "int8_rows", "--json")
    assert json.loads(out)["environment"]["weights"][0]["error"] < 0.1
    out, _ = command("plan", *small.split())
    assert " 0.1 MB of weights" in out
    assert run(["generate", "x", "--max-tokens", "2"]) == 0
    held = load_model("forerun:target").info.weight_bytes / 1e6
    assert f"invariant), {held:.1f} MB" in capsys.readouterr().out

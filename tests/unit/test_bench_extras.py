"""What the bench extra brings: pictures, and the same weights for llama.cpp. Without it, an error that says so."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from forerun.bench.peers import peer_contenders
from forerun.bench.peers.gguf import gguf_name, write_gguf
from forerun.bench.plot import check_plot, label, plot
from forerun.bench.shapes import random_checkpoint
from forerun.cli.main import run
from forerun.core.errors import ConfigError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gguf_holds_the_weights_as_transformers_reads_them(tmp_path, dtype):
    folder = random_checkpoint(tmp_path / "tiny", "tiny", vocabulary=120)
    path = write_gguf(folder, tmp_path / "model.gguf", dtype)
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(wanted.config)
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=shape)
    config = read["config"]
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"):
        assert config[name] == getattr(wanted.config, name)
    weights = {name: torch.as_tensor(value) for name, value in read["tensors"].items()}
    for name, weight in wanted.state_dict().items():
        if name != "lm_head.weight":  # tied
            assert torch.equal(weights.pop(name).float(), weight), name
    assert weights == {}


def test_gguf_refuses_what_llama_does_not_have():
    assert gguf_name("model.layers.3.mlp.down_proj.weight") == "blk.3.ffn_down.weight"
    for name in ("model.layers.3.self_attn.q_norm.weight", "model.layers.3.self_attn.q_proj.bias", "visual.weight"):
        with pytest.raises(ConfigError, match="no place"):
            gguf_name(name)


def test_missing_extras_are_named(monkeypatch, llm, tmp_path):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(ConfigError, match=r"llama-cpp-python: pip install 'forerun\[bench\]'"):
        peer_contenders(["llama-cpp"], llm(), None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"matplotlib: pip install 'forerun\[bench\]'"):
        check_plot(tmp_path / "plot.png")


def test_a_plot_that_cannot_be_written_is_refused_first(tmp_path):
    with pytest.raises(ConfigError, match=r"\.png"):
        check_plot(tmp_path / "plot.txt")
    with pytest.raises(ConfigError, match="no folder"):
        check_plot(tmp_path / "nowhere" / "plot.png")


def test_plot_draws_every_row(tmp_path: Path, tiny_target, capsys):
    file = tmp_path / "plot.svg"
    small = "--prompts 1 --prompt-tokens 8 --max-tokens 8 --prompt-set random --repeats 1 --temperature 0,1"
    code = run(["bench", "--model", tiny_target, "--methods", "ngram", *small.split(), "--plot", str(file), "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert code == 0
    drawing = file.read_text(encoding="utf-8")
    assert drawing.count("<!-- temperature ") == 2
    for row in rows:
        assert f"<!-- {label(row)} -->" in drawing
    assert label({**rows[0], "method": "ngram", "num_speculative_tokens": 4, "accept": "token", "synthetic": True}) == (
        "ngram k=4 token (synthetic)"
    )
    result = {"rows": rows, "environment": {"model": "m", "model_path": "p", "invariant": True, "threads": 1}}
    plot(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")

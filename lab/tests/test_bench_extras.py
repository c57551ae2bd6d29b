"""What the extra plots brings, pictures, and the same weights for llama.cpp. Without matplotlib, an error that
say so."""

import json
import re
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from forerun.cli.main import run
from forerun.core.errors import ConfigError
from forerun_lab.peers.gguf import gguf_name, write_gguf
from forerun_lab.plots import GAIN, INK, LOSS, check_folder, label, plots
from forerun_lab.shapes import random_checkpoint

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gguf_holds_the_weights_as_transformers_reads_them(tmp_path, dtype):
    folder = random_checkpoint(tmp_path / "tiny", "tiny", vocabulary=120)
    path = write_gguf(folder, tmp_path / "model.gguf", dtype)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(expected.config)
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=shape)
    config = read["config"]
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"):
        assert config[name] == getattr(expected.config, name)
    weights = {name: torch.as_tensor(value) for name, value in read["tensors"].items()}
    for name, weight in expected.state_dict().items():
        if name != "lm_head.weight":  # tied
            assert torch.equal(weights.pop(name).float(), weight), name
    assert weights == {}


def test_gguf_refuses_what_llama_does_not_have():
    assert gguf_name("model.layers.3.mlp.down_proj.weight", 4) == "blk.3.ffn_down.weight"
    for name in ("model.layers.3.self_attn.q_norm.weight", "model.layers.3.self_attn.q_proj.scales", "visual.weight"):
        with pytest.raises(ConfigError, match="no place"):
            gguf_name(name, 4)


def test_missing_extras_are_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"matplotlib: pip install '\./lab\[plots\]'"):
        check_folder(tmp_path / "plots")


def test_plots_that_cannot_be_written_are_refused_first(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="is a file"):
        check_folder(tmp_path / "file")
    with pytest.raises(ConfigError, match="no folder"):
        check_folder(tmp_path / "nowhere" / "plots")


def test_plots_draw_every_row(tmp_path, tiny_target, capsys):
    folder = tmp_path / "plots"
    small = "--prompts 1 --prompt-tokens 8 --max-tokens 8 --prompt-set random --repeats 1 --temperature 0,1 --trees 4"
    code = run(
        [
            "bench",
            "--model",
            tiny_target,
            "--methods",
            "suffix,random",
            *small.split(),
            "--plots",
            str(folder),
            "--json",
        ]
    )
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert code == 0
    drawings = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    assert set(drawings) == {"speedup.svg", "acceptance.svg", "trees.svg"}
    assert sum(map(len, drawings.values())) < 200_000
    for row in rows:
        assert f">{label(row)}</text>" in drawings["speedup.svg"]
        assert (f">{label(row)}</text>" in drawings["trees.svg"]) == (row["tree"] is not None)
    assert all(drawing.count(">T = 1, 1 at a time<") >= 1 for drawing in drawings.values())
    named = {"method": "ngram", "num_speculative_tokens": 4, "accept": "token", "tree": "2x1", "synthetic": True}
    assert label({**rows[0], **named}) == "ngram k=4 tree 2x1 token (synthetic)"


def test_a_plain_run_has_no_trees_to_draw(tmp_path):
    row = {
        "method": "none", "temperature": 0.0, "concurrency": 1, "speedup": 1.0, "speedup_range": [1.0, 1.0],
        "predicted_speedup": None, "tree": None, "over_chain": None, "acceptance_by_position": None, "synthetic": False,
    }  # fmt: skip
    about = {"model": "m", "dtype": "float32", "prompt_set": "random", "invariant": True, "threads": 1}
    assert [path.name for path in plots({"rows": [row], "environment": about}, tmp_path)] == ["speedup.svg"]


def test_drafts_that_were_all_rejected_are_drawn_and_old_pictures_go(tmp_path):
    row = {
        "method": "random", "temperature": 0.0, "concurrency": 1, "speedup": 0.9, "speedup_range": [0.9, 0.9],
        "predicted_speedup": None, "tree": None, "over_chain": None, "acceptance_by_position": [], "synthetic": False,
    }  # fmt: skip
    about = {"model": "m", "dtype": "float32", "prompt_set": "random", "invariant": True, "threads": 1}
    (tmp_path / "trees.svg").write_text("old", encoding="utf-8")
    (tmp_path / "mine.svg").write_text("kept", encoding="utf-8")
    plots({"rows": [row], "environment": about}, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"speedup.svg", "acceptance.svg", "mine.svg"}


def drawn_row(speedup, spread, temperature, method):
    return {
        "method": method, "temperature": temperature, "concurrency": 1, "speedup": speedup,
        "speedup_range": [speedup - spread, speedup + spread], "predicted_speedup": None, "tree": None,
        "over_chain": None, "acceptance_by_position": None, "synthetic": False, "tokens_per_round": 1.0 + speedup,
    }  # fmt: skip


def panels(drawing):
    """What is drawn in each panel, as SVG."""
    axes = drawing.read_text(encoding="utf-8").split('<g id="legend_')[0]
    return re.split(r'<g id="axes_\d+">', axes)[1:]


def numbers_below(panel):
    return re.findall(r">([\d.]+)</text>", panel.split('id="matplotlib.axis_')[1])


def test_compared_panels_have_one_scale_and_noise_no_colour(tmp_path):
    rows = [drawn_row(speed * (1 + 2 * t), spread, t, f"m{speed}") for t in (0.0, 1.0) for speed, spread in SPEEDS]
    about = {"model": "m", "dtype": "float32", "prompt_set": "random", "invariant": True, "threads": 1}
    plots({"rows": rows, "environment": about}, tmp_path)
    cold, hot = panels(tmp_path / "speedup.svg")
    assert numbers_below(cold) == numbers_below(hot)
    # At T = 0 one is faster, one slower, and one both, as its repeats go; at T = 1 all are faster.
    fills = [re.findall(r'd="[^"]*z\s*"[^>]*fill: (#\w{6})', panel) for panel in (cold, hot)]
    assert [(each.count(GAIN), each.count(LOSS), each.count(INK)) for each in fills] == [(1, 1, 1), (3, 0, 0)]
    assert cold.count("stroke-width: 1.8") == hot.count("stroke-width: 1.8") == 3  # the ranges


SPEEDS = ((1.5, 0.1), (0.5, 0.1), (1.02, 0.1))


def test_trees_beside_their_chains_have_the_range_of_their_repeats(tmp_path):
    chains = [drawn_row(speed, 0.1, t, "eagle") for t, speed in ((0.0, 1.2), (1.0, 0.6))]
    trees = [{**chain, "tree": "best 8", "over_chain": 1.1, "speedup": chain["speedup"] + 0.05} for chain in chains]
    about = {"model": "m", "dtype": "float32", "prompt_set": "random", "invariant": True, "threads": 1}
    plots({"rows": [*chains, *trees], "environment": about}, tmp_path)
    drawn = panels(tmp_path / "trees.svg")
    assert [re.search(">(tokens per round|speed over plain decoding)<", panel)[1] for panel in drawn] == [
        "tokens per round", "tokens per round", "speed over plain decoding", "speed over plain decoding",
    ]  # fmt: skip
    assert numbers_below(drawn[0]) == numbers_below(drawn[1])
    assert numbers_below(drawn[2]) == numbers_below(drawn[3])
    assert [panel.count("stroke-width: 1.8") for panel in drawn] == [0, 0, 2, 2]  # tree and chain

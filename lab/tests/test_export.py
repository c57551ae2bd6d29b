"""Heads exported to other engines' folders; ``lab/benchmarks/*_round_trip.py`` read them there."""

import json

import pytest
import torch

from forerun import LLM, SamplingParams, pretrained
from forerun.cli.main import run
from forerun.core.errors import ConfigError, ModelError
from forerun.models.files.checkpoint import read_tensors
from forerun.speculate.draft.heads.head import Sizes
from forerun_lab.heads.eagle import TrainedEagle
from forerun_lab.tune.export import FORMS, export_head
from refusals import refused

TARGET = "forerun:target"


def drafted(model):
    """Greedy ids, drafts and accepted tokens with a head."""
    named = {} if model is None else {"model": model}
    llm = LLM(speculative_config={"method": "eagle", "num_speculative_tokens": 3, **named})
    output = llm.generate("def read(path):\n", SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)[0]
    return list(output.outputs[0].token_ids), output.metrics.num_drafts, output.metrics.num_accepted_draft_tokens


@pytest.mark.parametrize("form", FORMS)
def test_an_exported_head_drafts_as_before(tmp_path, form, capsys):
    """Read back by the reader of public checkpoints, which other engines' folders were its models for."""
    out = tmp_path / form
    assert run(["export", "forerun:eagle", "--out", str(out), "--as", form]) == 0
    command = capsys.readouterr().out
    assert str(out) in command
    assert drafted(str(out)) == drafted(None)
    refused(ConfigError, "has a model already", export_head, "forerun:eagle", TARGET, out, form)
    layer = {"speculators": "layers.0.", "sglang": "midlayer."}[form]
    assert {name for name in read_tensors(out) if "q_proj" in name} == {f"{layer}self_attn.q_proj.weight"}


def test_a_small_vocabulary_is_mapped_both_ways(tmp_path):
    own = [3, 5, 6, 700, 4000]
    head = TrainedEagle(Sizes(384, 4096, 6, 4, {"draft_vocab_size": len(own), "layers": [1, 3, 5]}))
    head.d2t.copy_(torch.tensor(own) - torch.arange(len(own)))
    head.save(tmp_path / "head")
    export_head(str(tmp_path / "head"), TARGET, tmp_path / "out", "sglang")
    weights = read_tensors(tmp_path / "out")
    assert weights["t2d"].nonzero().flatten().tolist() == own
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["draft_vocab_size"], config["vocab_size"]) == (5, 4096)
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]  # SGLang adds 1 to each


def test_what_no_other_engine_runs_is_refused(tmp_path, tiny_target):
    mixed = TrainedEagle(Sizes(384, 4096, 6, 4, {"mixed": True}))
    mixed.save(tmp_path / "mixed")
    refused(ModelError, "'mixed'", export_head, str(tmp_path / "mixed"), TARGET, tmp_path / "out", "speculators")
    with pytest.raises(ModelError, match="made for a target whose hidden_size is 384"):
        export_head("forerun:eagle", tiny_target, tmp_path / "out", "speculators")
    refused(ModelError, "not a 'eagle' head", export_head, "forerun:medusa", TARGET, tmp_path / "out", "speculators")
    with pytest.raises(ConfigError, match="speculators or sglang, not 'onnx'"):
        export_head("forerun:eagle", TARGET, tmp_path / "out", "onnx")
    four = TrainedEagle(Sizes(384, 4096, 6, 4, {"layers": [1, 2, 3, 6]}))
    four.save(tmp_path / "four")
    with pytest.raises(ModelError, match="SGLang's heads read three"):
        export_head(str(tmp_path / "four"), TARGET, tmp_path / "out", "sglang")
    last = TrainedEagle(Sizes(384, 4096, 6, 4, {"layers": [1, 3, 6]}))
    last.save(tmp_path / "last")
    refused(ModelError, "last hidden state", export_head, str(tmp_path / "last"), TARGET, tmp_path / "out", "sglang")
    assert not (tmp_path / "out").exists()
    assert pretrained.path("eagle").is_dir()

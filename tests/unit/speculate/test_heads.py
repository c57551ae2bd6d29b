"""Trained heads: what they compute, and how they are saved."""

import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from gguf import GGMLQuantizationType, quants

from drafting import first_draft
from forerun import LLM, ConfigError, ForerunError, SamplingParams
from forerun.cli.main import COMMANDS
from forerun.core.errors import ModelError
from forerun.speculate.draft.heads.head import Sizes
from forerun_lab.drafters.medusa import MedusaHead
from forerun_lab.drafters.parallel import ParallelHead
from forerun_lab.heads.eagle import TrainedEagle
from refusals import refused
from unrolled import SOME, narrowed, scramble, sizes_of, unrolled

pytestmark = pytest.mark.slow

HEADS = {"eagle": TrainedEagle, "medusa": MedusaHead, "parallel": ParallelHead}
PROMPT = [5, 9, 12, 7, 7, 3, 5, 9, 12, 11, 4]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("width", [514, 16])  # 16: in one call, where there are kernels
@torch.no_grad()
def test_eagle_drafts_what_a_recomputation_without_a_cache_says(tiny_target, tmp_path, reference, width, mixed):
    """Independent form: the whole sequence at once, its own outputs appended as features, dense causal attention."""
    sizes = sizes_of(Path(tiny_target))
    options = {"heads": 4, "kv_heads": 2, "width": width, "inner_size": 24, "mixed": mixed}
    sizes = Sizes(**{**vars(sizes), "options": options})
    head = TrainedEagle(sizes)
    scramble(head)
    head.save(tmp_path)
    config = {"method": "eagle", "model": str(tmp_path), "num_speculative_tokens": 3}
    drafted, committed = first_draft(tiny_target, config, PROMPT)
    saved = TrainedEagle.load(tmp_path)
    out = reference(torch.tensor([committed[:-1]]), output_hidden_states=True)
    features = saved.fc(torch.cat([out.hidden_states[layer][0] for layer in saved.layers], dim=-1))
    embedding = reference.get_input_embeddings()
    tokens = list(committed)
    expected = []
    for step in range(3):
        said = unrolled(saved, features, embedding(torch.tensor(tokens)), len(features), step + 1)[-1]
        expected.append(int(reference.lm_head(saved.norm(said)).argmax()))
        tokens.append(expected[-1])
    assert drafted == expected


@pytest.mark.parametrize("method", HEADS)
@pytest.mark.parametrize("rule", ["coupled", "token"])
def test_a_reduced_vocabulary_changes_no_token(tiny_target, tmp_path, reference, method, rule):
    """Drafts are of its tokens alone; answers, at temperature 0 under any rule, have the others too."""
    head = HEADS[method](sizes_of(Path(tiny_target)))
    narrowed(head, reference, SOME)
    head.save(tmp_path)
    config = {"method": method, "model": str(tmp_path), "num_speculative_tokens": 3, "quantization": "int8_rows"}
    temperatures = [0.0, 0.9] if rule == "coupled" else [0.0]
    params = [
        SamplingParams(temperature=temperature, max_tokens=40, seed=5, ignore_eos=True) for temperature in temperatures
    ]
    prompts = [PROMPT] * len(temperatures)
    plain = [out.outputs[0].token_ids for out in LLM(str(tiny_target)).generate(prompts, params)]
    llm = LLM(str(tiny_target), speculative_config={**config, "accept": rule}, trace=True)
    result = llm.generate(prompts, params)
    assert [out.outputs[0].token_ids for out in result] == plain
    assert all(out.metrics.draft_error is None for out in result)
    rejected = {token for out in result for entry in out.outputs[0].trace for token in entry.rejected}
    assert rejected
    assert rejected <= set(SOME.tolist())
    assert not {token for tokens in plain for token in tokens} <= set(SOME.tolist())


def test_a_packed_head_is_what_gguf_reads_from_its_blocks(tmp_path):
    options = {"heads": 2, "kv_heads": 1, "width": 16, "inner_size": 48, "theta": 1e4, "eps": 1e-5, "layers": [2]}
    head = TrainedEagle(Sizes(32, 40, 2, 3, {**options, "draft_vocab_size": 20, "mixed": True}))
    for part in head.parameters():
        torch.nn.init.normal_(part)
    head.d2t.copy_(torch.arange(20))
    head.save(tmp_path, {"target": "x"}, packed=True)
    found = TrainedEagle.load(tmp_path)
    for name, part in head.state_dict().items():
        if part.dim() == 2 and part.shape[1] % 32 == 0:
            blocks = quants.quantize(part.numpy(), GGMLQuantizationType.Q4_0)
            part = torch.from_numpy(quants.dequantize(blocks, GGMLQuantizationType.Q4_0))
        elif part.is_floating_point():
            part = part.bfloat16().float()
        assert torch.equal(found.state_dict()[name], part), name
    assert found.record["target"] == "x"
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "packed": "Q9_0"}))
    refused(ModelError, "'Q9_0': heads are packed in Q4_0", TrainedEagle.load, tmp_path)


def test_a_head_that_is_missing_names_a_command_that_is_installed(tiny_target, monkeypatch):
    target = str(tiny_target)
    for installed in (True, False):
        monkeypatch.setattr("forerun.speculate.draft.heads.base.has_lab", Mock(return_value=installed))
        said = str(refused(ConfigError, "needs a head", LLM, target, speculative_config={"method": "eagle"}))
        assert f"'forerun tune {target} --out FOLDER'" in said
        assert set(re.findall(r"forerun (\w+)", said)) <= set(COMMANDS)
        said = str(refused(ConfigError, "needs a head", LLM, target, speculative_config={"method": "medusa"}))
        assert ("forerun-lab: pip install" in said) is not installed


def test_clear_errors(tiny_target, tmp_path):
    target = str(tiny_target)
    refused(ConfigError, "forerun train medusa", LLM, target, speculative_config={"method": "medusa"})
    for method in ("medusa", "eagle"):
        with pytest.raises(ForerunError, match=r"no readable head|no safetensors"):
            LLM(target, speculative_config={"method": method, "model": str(_empty(tmp_path / method))})
    MedusaHead(Sizes(8, 10, 1)).save(tmp_path / "b")
    with pytest.raises(ConfigError, match="hidden size 8"):
        LLM(target, speculative_config={"method": "medusa", "model": str(tmp_path / "b")})
    with pytest.raises(ForerunError, match="not a 'eagle' head"):
        LLM(target, speculative_config={"method": "eagle", "model": str(tmp_path / "b")})
    MedusaHead(sizes_of(Path(target), depth=2)).save(tmp_path / "c")
    options = {"method": "medusa", "model": str(tmp_path / "c"), "num_speculative_tokens": 3}
    refused(ConfigError, "2 tokens ahead", LLM, target, speculative_config=options)
    refused(ConfigError, "has layers 0 to", LLM, target, speculative_config={"method": "layerskip", "exit_layer": 99})


def _empty(folder):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder

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
from forerun_lab.drafters.layerskip import ExitHead
from forerun_lab.drafters.medusa import MedusaHead
from forerun_lab.drafters.parallel import ContextCache, ParallelHead
from forerun_lab.heads.eagle import TrainedEagle
from forerun_lab.heads.training import TrainingBatch, feed_forward
from refusals import refused
from unrolled import SOME, narrowed, scramble, sizes_of, unrolled

pytestmark = pytest.mark.slow

HEADS = {"eagle": TrainedEagle, "medusa": MedusaHead, "parallel": ParallelHead}
PROMPT = [5, 9, 12, 7, 7, 3, 5, 9, 12, 11, 4]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("ids", [None, SOME], ids=["all", "some"])
@torch.no_grad()
def test_medusa_drafts_the_argmax_of_its_heads(tiny_target, tmp_path, reference, ids):
    head = MedusaHead(sizes_of(Path(tiny_target)))
    rows = narrowed(head, reference, ids)
    head.save(tmp_path)
    config = {"method": "medusa", "model": str(tmp_path), "num_speculative_tokens": 4}
    drafted, committed = first_draft(tiny_target, config, PROMPT)
    saved = MedusaHead.load(tmp_path)
    out = reference(torch.tensor([committed[:-1]]), output_hidden_states=True)
    state = out.hidden_states[-1][0, -1]
    best = [int((rows @ (state + torch.nn.functional.silu(block(state)))).argmax()) for block in saved.blocks]
    assert drafted == (best if ids is None else ids[best].tolist())


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


@pytest.mark.parametrize("ids", [None, SOME], ids=["all", "some"])
@pytest.mark.parametrize("drafted_tokens", [2, 4])
@torch.no_grad()
def test_parallel_drafts_what_a_whole_block_says_however_few_tokens_are_asked_for(
    tiny_target, tmp_path, reference, drafted_tokens, ids
):
    options = {"heads": 4, "kv_heads": 2, "width": 8, "inner_size": 24, "blocks": 2}
    head = ParallelHead(Sizes(**{**vars(sizes_of(Path(tiny_target))), "options": options}))
    rows = narrowed(head, reference, ids)
    head.save(tmp_path)
    config = {"method": "parallel", "model": str(tmp_path), "num_speculative_tokens": drafted_tokens}
    drafted, committed = first_draft(tiny_target, config, PROMPT)
    saved = ParallelHead.load(tmp_path)
    out = reference(torch.tensor([committed[:-1]]), output_hidden_states=True)
    features = saved.feature(torch.cat([out.hidden_states[layer][0] for layer in saved.layers], dim=-1))
    count = features.shape[0]
    x = saved.rows(reference.get_input_embeddings()(torch.tensor(committed[-1:])), features[-1:])[0]
    for block in saved.blocks:
        normed = block.norm(x)
        places = count + torch.arange(4)
        k, v = (torch.cat(pair) for pair in zip(block.keys(features, torch.arange(count)), block.keys(normed, places)))
        scores = torch.einsum("qhw,khw->hqk", block.queries(normed, places), k.repeat_interleave(2, 1)) / 8**0.5
        mixed = torch.einsum("hqk,khw->qhw", scores.softmax(-1), v.repeat_interleave(2, 1)).flatten(1)
        x = x + block.o_proj(mixed)
        x = x + feed_forward(block.mlp, block.norm_mlp(x))
    best = (saved.norm(x) @ rows.T).argmax(-1)[:drafted_tokens]
    assert drafted == (best if ids is None else ids[best]).tolist()


@pytest.mark.parametrize("window", [None, 5])
def test_a_block_reads_the_newest_window_or_everything(window):
    torch.manual_seed(0)
    layers, whole = 2, [torch.empty(0, 2, 3)] * 4
    memory = None
    for count in [1, 3, 2, 9, 1, 1, 4, 5, 1, 1, 1, 2, 3, 1, 7, 1]:
        rows = [torch.randn(count, 2, 3) for _ in range(2 * layers)]
        pairs = list(zip(rows[::2], rows[1::2]))
        memory = memory or ContextCache(pairs, 2, window)
        memory.add(pairs)
        whole = [torch.cat([before, new]) for before, new in zip(whole, rows)]
        own = torch.randn(2, 2, 2, 3)
        for layer in range(layers):
            memory.write(layer, own[0], own[1])
            for got, before, new in zip(memory.read(layer, 2), whole[2 * layer :], own):
                assert torch.equal(got[0].transpose(0, 1), torch.cat([before[-(window or len(before)) :], new]))


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


@torch.no_grad()
@pytest.mark.parametrize("path", ["native", "hf"])
def test_layerskip_drafts_what_the_first_layers_say(tiny_target, reference, path):
    layers = (0,)
    config = {"method": "layerskip", "layers": layers, "num_speculative_tokens": 3}
    drafted, tokens = first_draft(tiny_target, config, PROMPT, model_path=path)
    every = reference.model.layers
    reference.model.layers = torch.nn.ModuleList([every[i] for i in layers])
    expected = []
    for _ in range(3):
        expected.append(int(reference(torch.tensor([tokens + expected]), use_cache=False).logits[0, -1].argmax()))
    reference.model.layers = every
    assert drafted == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_head_computes_with_the_weights_it_has_now(dtype):
    torch.manual_seed(0)
    head = MedusaHead(Sizes(256, 300, 2, 1)).to(dtype)
    x = torch.randn(3, 256).to(dtype)
    results = []
    for _ in range(2):
        scramble(head)
        with torch.no_grad():
            head.blocks[0].weight.add_(len(results))
        head.pack()
        with torch.inference_mode():
            results.append(head.transform(x)[:, 0].float())
        block = head.blocks[0]
        expected = x.double() + torch.nn.functional.silu(x.double() @ block.weight.double().T + block.bias.double())
        assert (results[-1] - expected).abs().max() < (1e-5 if dtype == torch.float32 else 0.01) * expected.abs().max()
    assert not torch.allclose(*results)


@torch.no_grad()
def test_a_fresh_exit_head_on_the_last_layer_is_the_target_itself(tiny_target, reference):
    """It guesses what the state predicts, not the token behind that: its loss is the entropy of the target."""
    sizes = Sizes(**{**vars(sizes_of(Path(tiny_target))), "depth": 1})
    tokens = torch.randint(sizes.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    out = reference(tokens, output_hidden_states=True)
    states = dict(enumerate(out.hidden_states))
    embedding, head = reference.get_input_embeddings().weight, reference.lm_head.weight
    result = ExitHead(sizes).loss(TrainingBatch(tokens, states, out.logits, embedding, head, reference))
    entropy = torch.distributions.Categorical(logits=out.logits.double()).entropy().mean()
    assert abs(float(result) - float(entropy)) < 1e-4


def test_an_exit_head_belongs_to_its_layers(tiny_target, tmp_path):
    ExitHead(Sizes(**{**vars(sizes_of(Path(tiny_target))), "depth": 1})).save(tmp_path, {"exit_layer": 1})
    with pytest.raises(ConfigError, match="was trained after 1 layers"):
        LLM(str(tiny_target), speculative_config={"method": "layerskip", "layers": [1], "exit_head": str(tmp_path)})


@pytest.mark.parametrize("method", ["medusa", "parallel"])
def test_a_head_without_an_output_layer_has_none_to_quantize(tiny_target, tmp_path, method):
    HEADS[method](sizes_of(Path(tiny_target))).save(tmp_path)
    config = {"method": method, "model": str(tmp_path), "quantization": "int8_rows"}
    with pytest.raises(ConfigError, match=f"this {method} head has no output layer of its own to quantize"):
        LLM(str(tiny_target), speculative_config=config)

"""Medusa-2: a copy of the target and its heads learn together, and serve together."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from forerun import LLM, ConfigError, SamplingParams
from forerun.models.files.open import Checkpoint
from forerun.speculate.draft.heads.head import Sizes
from forerun_lab.drafters.medusa import MedusaHead
from forerun_lab.train.joint import Joint, JointConfig, joint_losses, train_joint

pytestmark = pytest.mark.slow

TEXT = "def f(x):\n    return x + 1\n\nfor i in range(3):\n    print(f(i))\n"
PROMPTS = ["def f(x", "for i in", "    print"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for name in "abcd":
        (folder / f"{name}.py").write_text(TEXT * 40)
    return folder


def train(target, corpus, out, tokens, **options):
    options.setdefault("depth", 3)
    small = {"batch_tokens": 512, "length": 64, "threads": 1, "progress": False, "held_out": 1}
    config = JointConfig(
        out=out, target=Path(target), corpus=corpus, tokens=tokens, lr=0.01, matrix_lr=0.03, **small, **options,
    )  # fmt: skip
    return train_joint(config)


@pytest.fixture(scope="module")
def trained(tiny_target, corpus, tmp_path_factory):
    return train(tiny_target, corpus, tmp_path_factory.mktemp("joint"), 40_000, warmup_tokens=4_000)


@pytest.fixture(scope="module")
def distilled(tiny_target, corpus, tmp_path_factory):
    return train(
        tiny_target, corpus, tmp_path_factory.mktemp("distilled"), 12_000, warmup_tokens=4_000, self_distillation=True
    )


def figures(folder):
    return json.loads((folder / "target" / "training.json").read_text())["figures"]


def test_the_copy_moved_and_the_heads_learnt(trained, tiny_target):
    """In the warm-up the heads alone, then both."""
    result = figures(trained)
    before, warm, after = (result[stage] for stage in ("untrained", "after_warmup", "trained"))
    assert (before["distance"], warm["distance"]) == (pytest.approx(0, abs=1e-3), pytest.approx(0, abs=1e-3))
    assert warm["loss"] == before["loss"]
    assert warm["head_loss"] < before["head_loss"]
    assert after["head_loss"] < 0.5 * warm["head_loss"]
    assert after["loss"] < 0.2 * before["loss"]
    original = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).state_dict()
    copy = AutoModelForCausalLM.from_pretrained(trained / "target", dtype=torch.float32).state_dict()
    moved = {name: float((copy[name] - w).norm() / w.norm()) for name, w in original.items() if w.ndim == 2}
    assert min(moved.values()) > 0.01  # rounding to bfloat16 alone moves a matrix by 0.002


def test_self_distillation_keeps_the_copy_near_the_original(trained, distilled):
    free, near = figures(trained)["trained"], figures(distilled)["trained"]
    assert near["distance"] < 0.2 * free["distance"]
    assert near["head_loss"] < 0.9 * figures(distilled)["untrained"]["head_loss"]


def test_heads_that_learnt_alone_already_are_gone_on_with(tiny_target, corpus, tmp_path):
    config = json.loads((Path(tiny_target) / "config.json").read_text())
    head = MedusaHead(Sizes(config["hidden_size"], config["vocab_size"], config["num_hidden_layers"], 3))
    for block in head.blocks:
        torch.nn.init.constant_(block.bias, 4.0)
    head.save(tmp_path / "head")
    result = train(tiny_target, corpus, tmp_path / "out", 1024, head=tmp_path / "head")
    bias = MedusaHead.load(result / "head").blocks[0].bias.detach()
    assert 0 < float((bias - 4).abs().max()) < 0.5
    record = json.loads((result / "target" / "training.json").read_text())
    assert record["tokens"] == 1024
    assert "untrained" not in record["figures"]
    with pytest.raises(ConfigError, match=r"other sizes than asked for: .*depth=3.*, not .*depth=2"):
        train(tiny_target, corpus, tmp_path / "other", 1024, head=tmp_path / "head", depth=2)
    with pytest.raises(ConfigError, match="has learnt alone already: remove warmup_tokens, or head"):
        JointConfig(out=tmp_path, head=tmp_path / "head", warmup_tokens=5)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_engine_serves_the_copy_with_its_head(trained, temperature):
    params = [SamplingParams(temperature=temperature, max_tokens=40, seed=s, ignore_eos=True) for s in range(3)]
    model, head = str(trained / "target"), str(trained / "head")
    plain = LLM(model).generate(PROMPTS, params)
    config = {"method": "medusa", "model": head, "num_speculative_tokens": 3}
    drafted = LLM(model, speculative_config=config).generate(PROMPTS, params)
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in plain]
    assert all(o.metrics.draft_error is None and o.metrics.num_accepted_draft_tokens > 0 for o in drafted)


def accepted(model, head):
    """Share of drafted tokens that are accepted, greedy."""
    config = {"method": "medusa", "model": str(head), "num_speculative_tokens": 3}
    answers = LLM(str(model), speculative_config=config).generate(PROMPTS, SamplingParams(temperature=0, max_tokens=40))
    metrics = [answer.metrics for answer in answers]
    return sum(m.num_accepted_draft_tokens for m in metrics) / sum(m.num_draft_tokens for m in metrics)


def test_trained_heads_are_followed_more_often_than_fresh_ones(trained, tmp_path):
    saved = json.loads((trained / "head" / "config.json").read_text())
    MedusaHead(Sizes(saved["hidden_size"], saved["vocab_size"], saved["num_layers"], 3)).save(tmp_path)
    fresh = accepted(trained / "target", tmp_path)
    assert accepted(trained / "target", trained / "head") > fresh + 0.2


def test_a_head_names_its_copy_and_refuses_another_target(trained, tiny_target, tmp_path):
    config = {"method": "medusa", "model": str(trained / "head"), "num_speculative_tokens": 3}
    with pytest.raises(ConfigError, match=rf"together with the weights saved in {trained / 'target'}.* load that"):
        LLM(str(tiny_target), speculative_config=config)
    moved = shutil.copytree(trained / "target", tmp_path / "elsewhere")
    assert LLM(str(moved), speculative_config=config).generate(["a"], SamplingParams(max_tokens=2))
    tokenizers = [AutoTokenizer.from_pretrained(folder).get_vocab() for folder in (trained / "target", tiny_target)]
    assert tokenizers[0] == tokenizers[1]


def test_a_fingerprint_follows_the_weights(tiny_target, trained, tmp_path):
    again = shutil.copytree(tiny_target, tmp_path / "again")
    assert len({Checkpoint.at(each).fingerprint() for each in (again, Path(tiny_target))}) == 1
    assert Checkpoint.at(again).fingerprint() != Checkpoint.at(trained / "target").fingerprint()


def test_the_losses_are_those_of_the_paper(tiny_target):
    """Next-token loss, and 0.8^k times each head's cross entropy under the copy's own distribution, by hand."""
    target = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    depth, size = 2, target.config.hidden_size
    head = MedusaHead(Sizes(size, target.config.vocab_size, target.config.num_hidden_layers, depth))
    torch.manual_seed(1)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    tokens = torch.randint(target.config.vocab_size, (1, 9), generator=torch.Generator().manual_seed(2))
    own, heads = joint_losses(Joint(target, head), tokens, None)
    zero, _ = joint_losses(Joint(target, head), tokens, target)
    heads.backward()
    own, heads, zero = own.detach(), heads.detach(), zero.detach()
    assert all(float(p.grad.norm()) > 0 for p in (*head.parameters(), target.get_input_embeddings().weight))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = target(tokens, output_hidden_states=True)
    logits, hidden = out.logits[0].double(), out.hidden_states[-1][0].float()
    expected = -sum(float(logits[i].log_softmax(0)[tokens[0, i + 1]]) for i in range(8)) / 8
    assert float(own) == pytest.approx(expected, rel=1e-4)
    assert float(zero) == pytest.approx(0, abs=1e-6)
    total = 0.0
    for k, block in enumerate(head.blocks):
        terms = []
        for i in range(9 - depth):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                q = target.lm_head(hidden[i] + torch.nn.functional.silu(block(hidden[i]))).double().log_softmax(0)
            terms.append(-float((logits[i + k + 1].softmax(0) * q).sum()))
        total += 0.8**k * sum(terms) / len(terms)
    assert float(heads) == pytest.approx(total, rel=1e-2)


@pytest.mark.parametrize(
    ("option", "value"), [("depth", 0), ("warmup_tokens", 0), ("head_weight", 0.0), ("backbone_rate", -1.0)]
)
def test_bad_options_are_named(tmp_path, option, value):
    with pytest.raises(ConfigError, match=option):
        JointConfig(out=tmp_path, **{option: value})

"""Both training commands end to end on a tiny corpus."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from forerun.core.errors import ConfigError, ModelError
from forerun_lab.train.config import ModelShape
from forerun_lab.train.corpus import TokenStream
from forerun_lab.train.distill import DistillConfig, acceptance, inherit_embeddings, train_draft_model
from forerun_lab.train.material import DataMixture, gather, mixed_batches
from forerun_lab.train.report import report
from forerun_lab.train.rollout import continue_prompts
from forerun_lab.train.target import TargetConfig, held_out_loss, train_target
from forerun_lab.tune.state import load_target

pytestmark = pytest.mark.slow

TINY = ModelShape(hidden_size=32, layers=2, heads=2, kv_heads=1, intermediate_size=48, positions=64)
SMALL = {"batch_tokens": 256, "length": 32, "threads": 1, "progress": False, "held_out": 2, "eval_tokens": 10_000}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(6):
        text = "".join(f"def name_{number}_{i}(a, b):\n    return a + b * {i}\n\n\n" for i in range(30))
        (folder / f"file{number}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def target(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("target")
    return train_target(TargetConfig(out=out, corpus=corpus, tokens=10_000, vocab_size=300, shape=TINY, **SMALL))


@pytest.fixture(scope="module")
def draft(corpus, target, tmp_path_factory):
    out = tmp_path_factory.mktemp("draft")
    config = DistillConfig(
        out=out, target=target, corpus=corpus, tokens=4_096, generated_tokens=2_000, shape=TINY,
        **{**SMALL, "eval_tokens": 512},
    )  # fmt: skip
    return train_draft_model(config)


def test_the_target_is_a_checkpoint_that_transformers_loads(target):
    model = AutoModelForCausalLM.from_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert model.dtype == torch.bfloat16
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert len(tokenizer) == model.config.vocab_size == 300
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 64
    assert tokenizer.decode(tokenizer("def f(x):\n    pass")["input_ids"]) == "def f(x):\n    pass"
    assert (target / "model.safetensors").is_file()


def test_the_record_says_what_the_saved_model_does(target, corpus):
    record = json.loads((target / "training.json").read_text())
    assert record["tokens"] >= 10_000
    assert record["recipe"]["shape"]["hidden_size"] == 32
    assert record["held_out_loss"]["32"] < 4.0 < torch.log(torch.tensor(300.0))
    assert len(record["held_out_files"]) == 2
    tokenizer = AutoTokenizer.from_pretrained(target)
    stream = [
        token
        for name in record["held_out_files"]
        for token in [*tokenizer.encode((corpus / name).read_text()), tokenizer.eos_token_id]
    ]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    measured = held_out_loss(model, torch.tensor(stream), 32)
    assert measured == pytest.approx(record["held_out_loss"]["32"], abs=0.02)


def test_the_draft_is_distilled_and_its_record_says_how_well(draft, target):
    record = json.loads((draft / "training.json").read_text())
    assert AutoModelForCausalLM.from_pretrained(draft).config.vocab_size == 300
    assert set(record["alpha"]) == {"held_out_text", "generated_at_1", "generated_at_0"}
    assert all(0 < value <= 1 for figures in record["alpha"].values() for value in figures.values())
    lines = [json.loads(line) for line in (draft / "run" / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.7 * losses[0]
    evaluations = [line["t1"] for line in lines if "t1" in line]
    assert evaluations[-1] > evaluations[0] + 0.05


def test_the_page_beside_the_weights_has_the_figures_of_the_records(draft, target, tmp_path):
    (tmp_path / "target").symlink_to(target)
    (tmp_path / "draft").symlink_to(draft)
    page = report(tmp_path)
    assert page.index("## target") < page.index("## draft")
    record = json.loads((draft / "training.json").read_text())
    assert f"alpha, held out text | {record['alpha']['held_out_text']['t1']:.3f} at T = 1" in page
    assert f"held-out loss, sequences of 32 | {record['held_out_loss']['32']:.3f}" in page
    assert "loss lk" in page


def test_a_draft_starts_from_its_target_s_embeddings(target):
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    embeddings = model.get_output_embeddings().weight
    draft = ModelShape(16, 1, 2, 1, 16, 64).build(300, 0, seed=0)
    inherit_embeddings(draft, model)
    ours = draft.get_output_embeddings().weight
    best = torch.linalg.svd(embeddings).S[:16].square().sum()
    assert ours.square().sum().item() == pytest.approx(best.item(), rel=1e-4)
    assert ours is draft.get_input_embeddings().weight


def test_a_finished_run_is_resumed_without_training_again(draft, target, corpus):
    before = (draft / "model.safetensors").read_bytes()
    config = DistillConfig(
        out=draft, target=target, corpus=corpus, tokens=4_096, generated_tokens=2_000, shape=TINY, **SMALL
    )
    train_draft_model(config)
    assert (draft / "model.safetensors").read_bytes() == before


def test_a_model_agrees_with_itself(target):
    model = AutoModelForCausalLM.from_pretrained(target)
    tokens = torch.randint(300, (3, 20), generator=torch.Generator().manual_seed(0))
    assert acceptance(model, model, tokens) == {"t1": pytest.approx(1.0, abs=1e-5), "t0": 1.0}


def test_continuations_repeat_by_seed_and_greedy_ones_are_the_argmax(target):
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    prompts = torch.randint(300, (2, 5), generator=torch.Generator().manual_seed(1))
    greedy = continue_prompts(model, prompts, 6, 0.0, seed=0)
    assert torch.equal(greedy[:, :5], prompts)
    with torch.no_grad():
        assert torch.equal(model(greedy).logits.argmax(-1)[:, 4:-1], greedy[:, 5:])
    sampled = continue_prompts(model, prompts, 6, 1.0, seed=4)
    assert torch.equal(sampled, continue_prompts(model, prompts, 6, 1.0, seed=4))
    assert not torch.equal(sampled, continue_prompts(model, prompts, 6, 1.0, seed=5))


def test_a_mixture_has_the_asked_share():
    low, high = TokenStream(torch.zeros(200).int(), 0), TokenStream(torch.ones(200).int(), 0)
    batch = DataMixture(low, high, 0.25).batch(0, 8, 10)
    assert batch[:, 0].tolist() == [0] * 6 + [1] * 2


def test_text_of_an_earlier_run_is_reused(tmp_path):
    path = tmp_path / "generated.pt"
    torch.save(torch.full((200,), 7, dtype=torch.int32), path)
    corpus = torch.zeros(200).int()
    config = DistillConfig(out=tmp_path, generated=path, generated_tokens=0, generated_share=0.5)
    batch = mixed_batches(config, None, corpus).batch(0, 4, 10)
    assert batch[:, 0].tolist() == [0, 0, 7, 7]
    path.write_bytes(b"not a tensor")
    with pytest.raises(ConfigError, match="not the generated text of a run"):
        mixed_batches(config, None, corpus)


def test_bad_options_are_named(tmp_path, corpus):
    with pytest.raises(ConfigError, match="loss must be one of kl, lk, tv_ce, not 'tv'"):
        DistillConfig(out=tmp_path, loss="tv")
    with pytest.raises(ConfigError, match="generated_share must be between 0 and 1"):
        DistillConfig(out=tmp_path, generated_share=1.5)
    with pytest.raises(ConfigError, match="vocab_size must be at least 257"):
        TargetConfig(out=tmp_path, vocab_size=100)
    with pytest.raises(ConfigError, match="heads a multiple of kv_heads"):
        ModelShape(heads=6, kv_heads=4)
    with pytest.raises(ConfigError, match="does not exist"):
        train_target(TargetConfig(out=tmp_path, corpus=tmp_path / "nowhere"))


def damaged(folder, target, damage):
    """A copy of the target with one thing wrong."""
    shutil.copytree(target, folder)
    config = json.loads((folder / "config.json").read_text())
    weights = (folder / "model.safetensors").read_bytes()
    match damage:
        case "config":
            (folder / "config.json").write_text("{")
        case "kind":
            (folder / "config.json").write_text(json.dumps({**config, "model_type": "no such model"}))
        case "shape":
            (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
        case "type":
            (folder / "config.json").write_text(json.dumps({**config, "hidden_size": "wide"}))
        case "no weights":
            (folder / "model.safetensors").unlink()
        case "cut weights":
            (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
        case "tokenizer":
            (folder / "tokenizer.json").write_text("{}")
        case "tokenizer config":
            (folder / "tokenizer_config.json").write_text("[]")
    return folder


@pytest.mark.parametrize(
    "damage", ["config", "kind", "shape", "type", "no weights", "cut weights", "tokenizer", "tokenizer config"]
)
def test_a_target_that_cannot_be_loaded_is_an_error(tmp_path, target, damage):
    folder = damaged(tmp_path / "target", target, damage)
    with pytest.raises(ModelError, match=str(folder)) as caught:
        load_target(folder)
    assert "\n" not in str(caught.value)


def test_a_mistake_of_ours_is_not_taken_for_a_bad_target(target, monkeypatch):
    def broken(*args, **options):
        raise ZeroDivisionError

    monkeypatch.setattr("forerun.models.files.open.Checkpoint.require_decoder", broken)
    with pytest.raises(ZeroDivisionError):
        load_target(target)


def test_a_bundled_target_goes_by_its_name(tmp_path):
    config = DistillConfig(out=tmp_path / "out", target=Path("forerun:target"), corpus=tmp_path / "nowhere", threads=0)
    with pytest.raises(ConfigError, match="nowhere"):
        gather(config, "draft_model")

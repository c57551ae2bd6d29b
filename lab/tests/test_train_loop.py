"""The training loop: schedule, resumption, pauses, bad input; losses against direct float64 formulas; acceptance by
position, counted by hand."""

import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from forerun.core.errors import ConfigError, ForerunError
from forerun_lab.heads.training import Guess, overlap
from forerun_lab.train.corpus import TokenStream
from forerun_lab.tune import kinds
from forerun_lab.tune.config import LoopSettings
from forerun_lab.tune.kinds import evaluate_head, lk_loss
from forerun_lab.tune.loop import make_optimizers, run, wait_while_paused
from logit_pairs import KL, PAIRS, compute
from refusals import refused

VOCABULARY = 11


class Bigram(nn.Module):
    """Next-token logits from the last token: an embedding, a hidden matrix and an output layer."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.hidden = nn.Linear(8, 8)
        self.lm_head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens):
        return self.lm_head(torch.tanh(self.hidden(self.embedding(tokens))))


def loss(model, batch):
    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def stream():
    return TokenStream((torch.arange(500) * 7 % VOCABULARY).int(), seed=3)


def settings(out, tokens=160, **others):
    options = {"batch_tokens": 40, "micro_tokens": 20, "length": 10, "long_length": 20, "warmup_share": 0.5}
    options.update(threads=1, progress=False, out=out, tokens=tokens, eval_tokens=80)
    return LoopSettings(**{**options, **others})


def parameters(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_schedule_rises_stays_and_falls_to_zero(tmp_path):
    plan = settings(tmp_path, tokens=1000, batch_tokens=10, warmup_share=0.1, decay_share=0.2)
    assert [plan.scale(at) for at in (0, 40, 90, 500, 800, 900, 990, 1000)] == pytest.approx(
        [0.1, 0.5, 1, 1, 1, 0.5, 0.05, 0]
    )


def test_a_shorter_run_starts_its_decay_earlier(tmp_path):
    assert settings(tmp_path, tokens=1000, decay_share=0.2).scale(600) == 1
    assert settings(tmp_path, tokens=700, decay_share=0.2).scale(600) == pytest.approx(100 / 140)


def test_long_sequences_come_last(tmp_path):
    plan = settings(tmp_path, tokens=1000, long_share=0.25)
    assert (plan.length_at(0), plan.length_at(749), plan.length_at(750)) == (10, 10, 20)


@pytest.mark.parametrize("matrix_lr", [0.01, 0.0])
def test_a_run_that_was_interrupted_ends_where_an_uninterrupted_one_does(tmp_path, matrix_lr):
    whole, part, rest = Bigram(), Bigram(), Bigram(seed=1)
    run(whole, stream(), loss, settings(tmp_path / "whole", matrix_lr=matrix_lr))

    class Interrupted(Exception):
        pass

    class Breaking(TokenStream):
        def batch(self, consumed, rows, length):
            if consumed >= 80:
                raise Interrupted
            return super().batch(consumed, rows, length)

    broken = settings(tmp_path / "parts", matrix_lr=matrix_lr, checkpoint_seconds=0)
    with pytest.raises(Interrupted):
        run(part, Breaking(stream().tokens, 3), loss, broken)
    state = run(rest, stream(), loss, settings(tmp_path / "parts", matrix_lr=matrix_lr))
    assert (state.tokens, state.steps) == (160, 4)
    assert torch.equal(parameters(whole), parameters(rest))
    assert not torch.equal(parameters(part), parameters(rest))


def test_the_log_has_every_step_and_the_evaluations(tmp_path):
    figures = iter((1.5, 2.5))
    ended, again = (
        run(Bigram(), stream(), loss, settings(tmp_path), evaluate=lambda model: {"figure": next(figures)})
        for _ in range(2)
    )
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    assert [line["tokens"] for line in lines if "figure" in line] == [80, 160]
    assert (ended.figures, again.figures) == ({"figure": 2.5}, {})  # nothing was left to train, or to evaluate


def test_training_learns_the_stream(tmp_path):
    model = Bigram()
    before = loss(model, stream().batch(0, 8, 10)).item()
    run(model, stream(), loss, settings(tmp_path, tokens=4000, lr=0.03, long_share=0, warmup_share=0.1))
    assert loss(model, stream().batch(0, 8, 10)).item() < 0.3 * before


def test_frozen_parameters_stay_and_only_hidden_matrices_go_to_muon(tmp_path):
    model = Bigram()
    model.embedding.requires_grad_(False)
    before = model.embedding.weight.clone()
    muon, adamw = make_optimizers(model, settings(tmp_path))
    assert [id(p) for group in muon.param_groups for p in group["params"]] == [id(model.hidden.weight)]
    assert sum(len(group["params"]) for group in adamw.param_groups) == 3
    run(model, stream(), loss, settings(tmp_path))
    assert torch.equal(before, model.embedding.weight)


def test_a_model_without_trainable_parameters_is_an_error(tmp_path):
    refused(ConfigError, "no trainable parameters", make_optimizers, Bigram().requires_grad_(False), settings(tmp_path))


def test_a_checkpoint_of_another_model_is_an_error(tmp_path):
    run(Bigram(), stream(), loss, settings(tmp_path))
    with pytest.raises(ConfigError, match=r"checkpoint\.pt does not fit this run"):
        run(nn.Sequential(Bigram()), stream(), loss, settings(tmp_path))
    run(nn.Sequential(Bigram()), stream(), lambda m, b: loss(m[0], b), settings(tmp_path, resume=False))


def test_divergence_is_reported(tmp_path):
    with pytest.raises(ForerunError, match="diverged at step 0"):
        run(Bigram(), stream(), lambda model, batch: loss(model, batch) * float("nan"), settings(tmp_path))


def test_the_loop_waits_while_the_pause_file_exists(tmp_path, monkeypatch):
    pause, naps = tmp_path / "PAUSE", []
    pause.touch()

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            pause.unlink()

    monkeypatch.setattr("forerun_lab.tune.loop.time.sleep", nap)
    wait_while_paused(pause)
    wait_while_paused(None)
    assert len(naps) == 3


@pytest.mark.parametrize(
    ("option", "value"), [("tokens", 0), ("length", 0), ("lr", -1.0), ("decay_share", 2.0), ("clip", 0.0)]
)
def test_bad_settings_are_named(tmp_path, option, value):
    refused(ConfigError, option, settings, tmp_path, **{option: value})


@pytest.mark.parametrize("damage", ["empty", "cut", "text", "list", "no state"])
def test_a_damaged_checkpoint_is_an_error(tmp_path, damage):
    run(Bigram(), stream(), loss, settings(tmp_path))
    path = tmp_path / "checkpoint.pt"
    content, result = path.read_bytes(), torch.load(path, weights_only=True)
    path.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "text": b"no checkpoint"}.get(damage, b""))
    if damage == "list":
        torch.save([1, 2], path)
    if damage == "no state":
        torch.save({"model": result["model"], "optimizers": result["optimizers"]}, path)
    with pytest.raises(ConfigError, match=r"checkpoint\.pt does not fit this run \(.+\); use another out folder"):
        run(Bigram(), stream(), loss, settings(tmp_path))


def test_a_part_of_a_model_may_learn_slower(tmp_path):
    model = Bigram()
    plan = settings(tmp_path, tokens=40, lr=0.01, matrix_lr=0.02, weight_decay=0.0, rates={"hidden": 0.25})
    rates = {id(p): g["peak_lr"] for o in make_optimizers(model, plan) for g in o.param_groups for p in g["params"]}
    assert {name: rates[id(parameter)] for name, parameter in model.named_parameters()} == {
        "embedding.weight": 0.01, "hidden.weight": 0.005, "hidden.bias": 0.0025,
        "lm_head.weight": 0.01, "lm_head.bias": 0.01,
    }  # fmt: skip
    state = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    run(model, stream(), loss, plan)
    moved = {
        name: float((parameter.detach() - state[name]).abs().max()) for name, parameter in model.named_parameters()
    }
    # AdamW's first step moves every entry that has a gradient by its learning rate, whatever the gradient's size.
    assert moved["lm_head.bias"] == pytest.approx(4 * moved["hidden.bias"], rel=1e-3)


def test_a_heads_figures_by_position_are_those_counted_by_hand():
    torch.manual_seed(0)
    logits, expected = torch.randn(2, 3, 4, 7), torch.randn(2, 3, 4, 7)  # position, row, place, vocabulary
    logits[:, :, :2] = expected[:, :, :2]
    result = evaluate_head(
        lambda row: (Guess(logits[p, row[0, :1]], expected[p, row[0, :1]]) for p in (0, 1)), torch.arange(3)[:, None]
    )
    p, q = expected.softmax(-1), logits.softmax(-1)
    hits = (p.argmax(-1) == q.argmax(-1)).float()
    fraction = torch.minimum(p, q).sum(-1)
    losses = -(p * q.log()).sum(-1)
    assert result["accepted_at_0"] == pytest.approx([float(hits[0].mean()), float((hits[0] * hits[1]).mean())])
    assert result["accepted_at_1"] == pytest.approx(
        [float(fraction[0].mean()), float((fraction[0] * fraction[1]).mean())]
    )
    assert result["loss_by_position"] == pytest.approx([float(losses[0].mean()), float(losses[1].mean())])
    assert result["held_out_loss"] == pytest.approx(float(losses[0].mean() + 0.8 * losses[1].mean()))


def test_a_part_of_the_vocabulary_is_compared_with_all_of_it():
    expected = torch.tensor([[0.1, 0.6, 0.3]]).log()
    guess = Guess(torch.tensor([[0.5, 0.5]]).log(), expected, torch.tensor([0, 2]))
    result = evaluate_head(lambda row: iter([guess]), torch.zeros(1, 1))
    assert result["accepted_at_0"] == [0.0]
    assert result["accepted_at_1"] == pytest.approx([0.1 + 0.3])
    assert result["loss_by_position"] == pytest.approx([-float(torch.tensor(0.5).log())])


ALPHA = [sum(min(a, b) for a, b in zip(p, q)) for p, q in PAIRS]


def test_overlap_is_the_acceptance_probability():
    assert compute(overlap) == pytest.approx(ALPHA, abs=1e-12)


def test_lk():
    weight = math.exp(-3 * sum(ALPHA) / len(ALPHA))
    expected = [weight * divergence - (1 - weight) * math.log(alpha) for divergence, alpha in zip(KL, ALPHA)]
    assert compute(lk_loss) == pytest.approx(expected, abs=1e-12)


def test_lk_of_no_places():
    q = torch.zeros(0, 7, requires_grad=True)
    lk_loss(torch.zeros(0, 7), q).sum().backward()
    assert q.grad.shape == (0, 7)


def test_lks_gradient_is_that_of_its_formula(monkeypatch):
    """By torch's own gradients of the formula, piece by piece of five rows."""
    monkeypatch.setattr(kinds, "CHUNK", 60)
    draw = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 4, 8, 12, generator=draw, dtype=torch.float64)
    weights = torch.randn(4, 8, generator=draw, dtype=torch.float64)
    q.requires_grad_()
    (result,) = torch.autograd.grad((weights * lk_loss(p, q)).sum(), q)
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    alpha = torch.minimum(log_p.exp(), log_q.exp()).sum(-1)
    fraction = math.exp(-3 * alpha.mean().item())
    formula = fraction * (log_p.exp() * (log_p - log_q)).sum(-1) - (1 - fraction) * alpha.log()
    (expected,) = torch.autograd.grad((weights * formula).sum(), q)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)

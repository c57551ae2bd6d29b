"""Losses of draft models against direct float64 formulas; the table of what a draft has learnt, counted by hand."""

import math

import pytest
import torch

from forerun_lab.heads.training import overlap
from forerun_lab.train.losses import LOSSES, kl, of_chains, table, tv_ce
from logit_pairs import KL, P_LOGITS, PAIRS, compute


def test_kl():
    assert compute(kl) == pytest.approx(KL, abs=1e-12)


def test_tv_ce():
    expected = [
        0.9 * sum(abs(a - b) for a, b in zip(p, q)) - 0.1 * sum(a * math.log(b) for a, b in zip(p, q)) for p, q in PAIRS
    ]
    assert compute(tv_ce) == pytest.approx(expected, abs=1e-12)


def test_a_draft_models_acceptance_by_position_is_that_of_runs():
    hits = torch.tensor([[1, 1, 0, 1, 1, 1]]).bool()
    result = of_chains(hits, torch.full((1, 6), 0.5), depth=3)
    assert result["accepted_at_0"] == pytest.approx([3 / 4, 2 / 4, 1 / 4])
    assert result["accepted_at_1"] == pytest.approx([0.5, 0.25, 0.125])


def test_the_table_has_a_line_for_each_position():
    figures = {"accepted_at_0": [0.5, 0.25], "accepted_at_1": [0.4, 0.1], "loss_by_position": [2.0, 3.5]}
    _, first, second, kept = table(figures, first=2)
    assert first.split() == ["position", "2", "50%", "40%", "loss", "2.000", "nats"]
    assert second.split() == ["position", "3", "25%", "10%", "loss", "3.500", "nats"]
    assert kept.split()[:5] == ["kept", "per", "draft", "0.75", "0.50,"]
    assert "beside the 1 before" in kept


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_loss_is_smallest_where_the_distributions_are_equal(name):
    p = torch.tensor(P_LOGITS, dtype=torch.float64)
    best = LOSSES[name](p, p).mean()
    for seed in range(20):
        noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert LOSSES[name](p, p + 0.1 * noise).mean() > best


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_distillation_raises_the_overlap_of_a_draft_that_cannot_be_exact(name):
    """A rank-2 draft of 24 random distributions over 16 tokens."""
    generator = torch.Generator().manual_seed(0)
    p = 2 * torch.randn(24, 16, generator=generator)
    left = (0.1 * torch.randn(24, 2, generator=generator)).requires_grad_()
    right = (0.1 * torch.randn(2, 16, generator=generator)).requires_grad_()
    before = overlap(p, left @ right).mean().item()
    optimizer = torch.optim.Adam([left, right], lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        LOSSES[name](p, left @ right).mean().backward()
        optimizer.step()
    assert overlap(p, left @ right).mean().item() > before + 0.1


def test_a_draft_that_misses_the_target_altogether_still_gets_a_gradient():
    p = torch.tensor([[60.0, 0.0, 0.0]])
    for name, loss in LOSSES.items():
        q = torch.tensor([[0.0, 60.0, 0.0]], requires_grad=True)
        loss(p, q).mean().backward()
        assert q.grad is not None, name
        assert q.grad.isfinite().all(), name
        assert q.grad[0, 0] < -0.01, name

"""Distillation losses against direct float64 formulas, and on a toy that they must improve."""

import math

import pytest
import torch

from forerun.tune import losses
from forerun.tune.losses import LOSSES, kl, lk, overlap, tv_ce

P_LOGITS = [[0.3, -1.2, 2.0, 0.0], [4.0, 0.0, 0.0, -3.0], [0.0, 0.0, 0.0, 0.0]]
Q_LOGITS = [[1.3, 0.2, 0.5, -1.0], [-4.0, 1.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0]]


def distribution(logits):
    weights = [math.exp(logit) for logit in logits]
    return [weight / sum(weights) for weight in weights]


PAIRS = [(distribution(p), distribution(q)) for p, q in zip(P_LOGITS, Q_LOGITS)]
ALPHA = [sum(min(a, b) for a, b in zip(p, q)) for p, q in PAIRS]
KL = [sum(a * math.log(a / b) for a, b in zip(p, q)) for p, q in PAIRS]


def compute(loss):
    return loss(torch.tensor(P_LOGITS, dtype=torch.float64), torch.tensor(Q_LOGITS, dtype=torch.float64)).tolist()


def test_overlap_is_the_acceptance_probability():
    assert compute(overlap) == pytest.approx(ALPHA, abs=1e-12)


def test_kl():
    assert compute(kl) == pytest.approx(KL, abs=1e-12)


def test_tv_ce():
    expected = [
        0.9 * sum(abs(a - b) for a, b in zip(p, q)) - 0.1 * sum(a * math.log(b) for a, b in zip(p, q)) for p, q in PAIRS
    ]
    assert compute(tv_ce) == pytest.approx(expected, abs=1e-12)


def test_lk():
    weight = math.exp(-3 * sum(ALPHA) / len(ALPHA))
    expected = [weight * divergence - (1 - weight) * math.log(alpha) for divergence, alpha in zip(KL, ALPHA)]
    assert compute(lk) == pytest.approx(expected, abs=1e-12)


def test_lk_of_no_places():
    q = torch.zeros(0, 7, requires_grad=True)
    lk(torch.zeros(0, 7), q).sum().backward()
    assert q.grad.shape == (0, 7)


def test_lks_gradient_is_that_of_its_formula(monkeypatch):
    """By torch's own gradients of the formula, piece by piece of five rows."""
    monkeypatch.setattr(losses, "CACHED", 60)
    draw = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 4, 8, 12, generator=draw, dtype=torch.float64)
    weights = torch.randn(4, 8, generator=draw, dtype=torch.float64)
    q.requires_grad_()
    (result,) = torch.autograd.grad((weights * lk(p, q)).sum(), q)
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    alpha = torch.minimum(log_p.exp(), log_q.exp()).sum(-1)
    fraction = math.exp(-3 * alpha.mean().item())
    formula = fraction * (log_p.exp() * (log_p - log_q)).sum(-1) - (1 - fraction) * alpha.log()
    (expected,) = torch.autograd.grad((weights * formula).sum(), q)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)


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

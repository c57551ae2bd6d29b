"""The laboratory's formulas: the references' printed numbers, enumeration, counted traffic, and their own laws."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.theory import acceptance_rate, best_gamma, expected_tokens, predicted_speedup, walltime_improvement
from forerun_lab import theory as lab


@pytest.mark.parametrize(("alpha", "kept"), [(0.5, 0.94), (0.7, 1.77), (0.9, 3.10)])
def test_reference_004_expectations_corrected(alpha, kept):
    by_length = sum(k * alpha**k * (1 - alpha) for k in range(4)) + 4 * alpha**4
    assert lab.expected_accepted(alpha, 4) == pytest.approx(by_length, abs=1e-12)
    assert f"{lab.expected_accepted(alpha, 4):.2f}" == f"{kept:.2f}"
    assert predicted_speedup(alpha, 4, 0.0, 1.3) == pytest.approx((kept + 1) / 1.3, abs=0.005)


def test_reference_000_worked_table():
    draft = torch.tensor([0.72, 0.54, 0.81, 0.62], dtype=torch.float64)
    target = torch.tensor([0.85, 0.60, 0.31, 0.70], dtype=torch.float64)
    accept = lab.acceptance_probability(target, draft)
    assert [f"{float(a):.2f}" for a in accept] == ["1.00", "1.00", "0.38", "1.00"]  # the fourth is never reached
    assert float(accept[:3].prod()) == pytest.approx(0.31 / 0.81)
    assert float(lab.acceptance_probability(0.31, 0.81, lenience=0.3)) == 1.0


def test_corollary_3_9():
    for alpha, c in itertools.product((0.0, 0.05, 0.3, 0.62, 0.9, 1.0), (0.0, 0.02, 0.3, 0.9, 1.5)):
        best = walltime_improvement(alpha, best_gamma(alpha, c), c)
        floor = lab.guaranteed_improvement(alpha, c)
        assert best >= floor - 1e-12
        assert (floor > 1) == (best > 1) == (best_gamma(alpha, c) > 0) == (alpha > c)
        if alpha > c:
            assert floor == pytest.approx(walltime_improvement(alpha, 1, c))


def test_oracle_gains_up_to_sixty_percent():
    alphas, costs = [a / 100 for a in range(30, 100)], (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
    gains = [
        lab.oracle_improvement(a, c) / walltime_improvement(a, best_gamma(a, c), c)
        for a, c in itertools.product(alphas, costs)
    ]
    assert min(gains) >= 1
    assert 1.5 < max(gains) < 1.6  # section 3.5: "up to ~60% higher"


def _random_pair(seed, vocabulary, batch=()):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(2, *batch, vocabulary, dtype=torch.float64, generator=generator) ** 3
    return (rows / rows.sum(-1, keepdim=True)).unbind(0)


@pytest.mark.parametrize("seed", range(3))
def test_rejection_sampling_of_appendix_a2(seed):
    p, q = _random_pair(seed, 6)
    bound = float((p / q).max())
    enumerated = sum(qx * (px / (bound * qx)) for px, qx in zip(p.tolist(), q.tolist()))
    rate = float(lab.rejection_sampling_rate(p, q))
    assert rate == pytest.approx(enumerated, abs=1e-12)
    assert rate <= float(acceptance_rate(p, q))
    generator = torch.Generator().manual_seed(seed)
    x = torch.multinomial(q, 100_000, replacement=True, generator=generator)
    uniform = torch.rand(len(x), dtype=torch.float64, generator=generator)
    for scale, expected in [(bound, rate), (1.0, float(acceptance_rate(p, q)))]:
        measured = (uniform < p[x] / (scale * q[x])).double().mean()
        assert float(measured) == pytest.approx(expected, abs=4 * math.sqrt(0.25 / len(x)))


def test_rejection_sampling_support():
    assert float(lab.rejection_sampling_rate([0.5, 0.5, 0.0], [0.9, 0.0, 0.1])) == 0.0
    assert float(lab.rejection_sampling_rate([0.5, 0.5, 0.0], [0.25, 0.5, 0.25])) == 0.5
    assert float(lab.rejection_sampling_rate([0.5, 0.5], [0.5, 0.5])) == 1.0


rates = st.floats(0, 1)
costs = st.floats(0, 2)
quick = settings(max_examples=80, deadline=None)


@quick
@given(rates, st.integers(1, 64))
def test_alpha_from_tokens_inverts(alpha, gamma):
    assert lab.alpha_from_tokens(expected_tokens(alpha, gamma), gamma) == pytest.approx(alpha, abs=1e-9)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("gamma", [1, 3, 7])
def test_memory_is_read_once_a_round(alpha, gamma):
    """Section 3.4, by counting: a round reads the weights once and emits j tokens with probability
    alpha^(j-1) (1 - alpha), all gamma + 1 with alpha^gamma."""
    emitted = sum(j * alpha ** (j - 1) * (1 - alpha) for j in range(1, gamma + 1)) + (gamma + 1) * alpha**gamma
    assert lab.memory_access_factor(alpha, gamma) == pytest.approx(emitted, rel=1e-12)


@pytest.mark.parametrize("sequences", [1, 3])
def test_a_batch_shares_the_weights_and_nothing_else(sequences):
    """Counted byte by byte: what each layer reads and writes for each sequence."""
    weights, keys, states = [40, 60], [3, 4], [0, 5]
    moved = sum(weights)
    for _ in range(sequences):
        for read, state in zip(keys, states):
            moved += read + state  # read
            moved += state  # written
    assert lab.round_traffic(sum(weights), sequences, sum(keys), sum(states)) == moved

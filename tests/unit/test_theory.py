"""The formulas against the references' printed numbers, against enumeration and counted traffic, and against their own
laws; arguments that they refuse, in one line each."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.errors import ConfigError
from forerun.theory import (
    acceptance_rate,
    best_gamma,
    d_lk,
    expected_experts,
    expected_tokens,
    lenient_acceptance_rate,
    lenient_argmax_mask,
    lenient_token_distribution,
    operations_increase,
    predicted_speedup,
    walltime_improvement,
)
from forerun_lab import theory as lab
from refusals import refused

# ---------------------------------------------------------------------------------------------- printed numbers

# Reference 002, Table 1: alpha, gamma, operations, speed (c = c_hat = 0).
TABLE_1 = [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]

# Reference 002, Table 4: gamma, alpha, c, EXP.
TABLE_4 = [
    (7, 0.75, 0.02, 3.2), (7, 0.80, 0.04, 3.3), (7, 0.82, 0.11, 2.5),
    (7, 0.62, 0.02, 2.3), (5, 0.68, 0.04, 2.4), (3, 0.71, 0.11, 2.0),
    (5, 0.65, 0.02, 2.4), (5, 0.73, 0.04, 2.6), (3, 0.74, 0.11, 2.0),
    (5, 0.53, 0.02, 1.9), (3, 0.55, 0.04, 1.8), (3, 0.56, 0.11, 1.6),
]  # fmt: skip


@pytest.mark.parametrize(("alpha", "gamma", "operations", "speed"), TABLE_1)
def test_table_1_to_the_digit(alpha, gamma, operations, speed):
    assert f"{operations_increase(alpha, gamma, 0):.2f}" == f"{operations:.2f}"
    assert f"{walltime_improvement(alpha, gamma, 0):.2f}" == f"{speed:.2f}"


@pytest.mark.parametrize(("gamma", "alpha", "c", "printed"), TABLE_4)
def test_table_4_expected_column(gamma, alpha, c, printed):
    assert abs(walltime_improvement(alpha, gamma, c) - printed) < 0.1
    # Two rows (1.93 as 2.0, 1.54 as 1.6) need the rounding of alpha and c themselves; all twelve then agree.
    low = walltime_improvement(alpha - 0.005, gamma, c + 0.005)
    high = walltime_improvement(alpha + 0.005, gamma, c - 0.005)
    assert low < printed + 0.05
    assert high > printed - 0.05


# ------------------------------------------------------------------------------------------------------- limits


def test_alpha_one_is_the_exact_limit():
    for gamma in (0, 1, 5, 1000):
        assert expected_tokens(1.0, gamma) == gamma + 1
        assert lab.expected_accepted(1, gamma) == gamma
        assert operations_increase(1.0, gamma, 0.0) == 1.0
        assert expected_tokens(1 - 1e-16, gamma) == pytest.approx(gamma + 1, rel=1e-12)
    assert lab.oracle_tokens(1.0) == math.inf
    assert lab.oracle_improvement(1.0, 0.0) == math.inf
    assert walltime_improvement(1.0, 4, 0.25) == 2.5


def test_gamma_zero_is_plain_decoding():
    for alpha in (0.0, 1e-300, 0.37, 1.0):
        assert expected_tokens(alpha, 0) == walltime_improvement(alpha, 0, 7.0) == 1.0
        assert operations_increase(alpha, 0, 7.0) == lab.memory_access_factor(alpha, 0) == 1.0
        assert lab.expected_accepted(alpha, 0) == 0.0


def test_best_gamma_and_other_ends():
    assert best_gamma(0.3, 0.3) == best_gamma(0.0, 0.0) == best_gamma(1.0, 1.0) == 0
    assert best_gamma(0.1, 0.0, max_gamma=7) == best_gamma(1.0, 0.5, max_gamma=7) == 7
    assert best_gamma(0.9, 0.02, max_gamma=12) == 12
    assert best_gamma(0.9, 0.02, max_gamma=0) == 0
    assert (lab.alpha_from_tokens(1, 5), lab.alpha_from_tokens(6, 5)) == (0.0, 1.0)
    assert lab.oracle_improvement(1.0, 0.385) == pytest.approx(1 / 0.385)


# ------------------------------------------------------------------------------------- enumeration and Monte Carlo


def _random_pair(seed, vocabulary, batch=()):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(2, *batch, vocabulary, dtype=torch.float64, generator=generator) ** 3
    return (rows / rows.sum(-1, keepdim=True)).unbind(0)


def _enumerate_round(p, q, gamma):
    """Mean tokens of Algorithm 1 by every draft and every accept pattern, for p and q without context."""
    mean = 0.0
    for draft in itertools.product(range(len(p)), repeat=gamma):
        for accepts in itertools.product((True, False), repeat=gamma):
            weight = math.prod(q[x] for x in draft)
            for x, accepted in zip(draft, accepts):
                keep = min(1.0, p[x] / q[x])
                weight *= keep if accepted else 1 - keep
            mean += weight * (1 + len(list(itertools.takewhile(bool, accepts))))
    return mean


@pytest.mark.parametrize(("seed", "gamma"), [(0, 1), (1, 2), (2, 3), (3, 4)])
def test_equation_1_against_enumeration(seed, gamma):
    p, q = _random_pair(seed, 3)
    alpha = float(acceptance_rate(p, q))
    assert expected_tokens(alpha, gamma) == pytest.approx(_enumerate_round(p.tolist(), q.tolist(), gamma), abs=1e-12)


def test_lenient_argmax_keeps_the_best_token():
    p = torch.tensor([[0.1, 0.6, 0.3], [0.4, 0.2, 0.4]])
    assert lenient_argmax_mask(p, 1.0).tolist() == [[False, True, False], [True, False, True]]
    assert lenient_argmax_mask(p, 0.4).tolist() == [[False, True, True], [True, True, True]]


# ---------------------------------------------------------------------------------------------------- properties

rates = st.floats(0, 1)
lengths = st.integers(0, 64)
costs = st.floats(0, 2)
leniences = st.floats(0.01, 1)


@st.composite
def pairs(draw):
    size = draw(st.integers(2, 6))
    weights = st.lists(st.floats(0, 1).map(lambda w: 0.0 if w < 1e-6 else w), min_size=size, max_size=size)
    rows = [draw(weights.filter(lambda w: sum(w) > 0)) for _ in range(2)]
    return [torch.tensor([w / sum(row) for w in row], dtype=torch.float64) for row in rows]


quick = settings(max_examples=80, deadline=None)


@quick
@given(rates, rates, lengths)
def test_tokens_grow_with_alpha(first, second, gamma):
    low, high = sorted((first, second))
    assert 1 <= expected_tokens(low, gamma) <= expected_tokens(high, gamma) * (1 + 1e-12)
    assert expected_tokens(high, gamma) <= gamma + 1
    assert expected_tokens(high, gamma) <= lab.oracle_tokens(high) * (1 + 1e-12)
    assert expected_tokens(low, gamma) == pytest.approx(1 + lab.expected_accepted(low, gamma), rel=1e-12)
    assert expected_tokens(low, gamma) == pytest.approx(math.fsum(low**k for k in range(gamma + 1)), rel=1e-12)


@quick
@given(rates, costs)
def test_best_gamma_beats_its_neighbours(alpha, c):
    best = walltime_improvement(alpha, best_gamma(alpha, c, max_gamma=50), c)
    for other in range(51):
        assert best >= walltime_improvement(alpha, other, c) * (1 - 1e-12)
    assert best <= lab.oracle_improvement(alpha, c) * (1 + 1e-12)


@quick
@given(rates, lengths, costs)
def test_work_and_time(alpha, gamma, c):
    assert operations_increase(alpha, gamma, c) >= 1 - 1e-12
    assert predicted_speedup(alpha, gamma, c, 1.0) == walltime_improvement(alpha, gamma, c)
    assert predicted_speedup(alpha, gamma, c, 1.4) <= walltime_improvement(alpha, gamma, c)


@quick
@given(pairs())
def test_divergence(pair):
    p, q = pair
    assert float(d_lk(p, q)) == pytest.approx(float(d_lk(q, p)), abs=1e-15)
    assert 0 <= float(d_lk(p, q)) <= 1
    assert 1 - float(d_lk(p, q)) == pytest.approx(float(acceptance_rate(p, q)), abs=1e-12)
    assert float(lab.rejection_sampling_rate(p, q)) <= float(acceptance_rate(p, q)) + 1e-12
    assert float(d_lk(p, p)) == 0
    assert float(d_lk([1.0, 0.0], [0.0, 1.0])) == 1  # disjoint


@quick
@given(pairs(), leniences)
def test_lenient_distribution(pair, lenience):
    p, q = pair
    distribution = lenient_token_distribution(p, q, lenience)
    alpha, strict = float(lenient_acceptance_rate(p, q, lenience)), float(acceptance_rate(p, q))
    assert float(distribution.sum()) == pytest.approx(1, abs=1e-12)
    assert bool((distribution <= lab.lenient_token_bound(p, lenience) + 1e-12).all())
    assert alpha >= strict - 1e-12
    assert float(d_lk(p, distribution)) == pytest.approx(alpha - strict, abs=1e-9)
    assert float(lenient_acceptance_rate(p, q, 1.0)) == strict
    assert torch.allclose(lenient_token_distribution(p, q, 1.0), p, atol=1e-12, rtol=0)
    drafted = q > 0
    kept = (q[drafted] * lab.acceptance_probability(p[drafted], q[drafted], lenience)).sum()
    assert float(kept) == pytest.approx(alpha, abs=1e-12)


# ------------------------------------------------------------------------------------------- batches and arguments


def test_batches_and_types():
    p, q = _random_pair(5, 7, (2, 3))
    rows = acceptance_rate(p, q)
    assert rows.shape == (2, 3)
    assert rows.dtype == torch.float64
    assert float(rows[1, 2]) == pytest.approx(float(acceptance_rate(p[1, 2].tolist(), q[1, 2].numpy())), abs=1e-15)
    assert lenient_token_distribution(p, q[0, 0], 0.5).shape == (2, 3, 7)
    assert lab.rejection_sampling_rate(p[0, 0], q).shape == (2, 3)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        narrow = acceptance_rate(torch.rand(50, 4096).softmax(-1).to(dtype), torch.rand(50, 4096).softmax(-1).to(dtype))
        assert bool((narrow <= 1).all())
    assert float(acceptance_rate(p[0, 0], torch.nn.functional.one_hot(torch.tensor(3), 7))) == float(p[0, 0, 3])


def test_numbers_of_other_kinds():
    alpha = acceptance_rate([0.7, 0.3], [0.5, 0.5])
    value = predicted_speedup(alpha, np.int64(4), np.float32(0.5), torch.tensor(1.0))
    assert type(value) is float
    assert value == pytest.approx(expected_tokens(0.8, 4) / 3)
    assert type(operations_increase(alpha, torch.tensor(2), 0)) is float


half = [0.5, 0.5]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: expected_tokens(1.01, 3), r"alpha must be in \[0, 1\], got 1.01"),
        (lambda: expected_tokens(half, 3), "alpha must be one number"),
        (lambda: expected_tokens(0.5, -1), "gamma must be >= 0, got -1"),
        (lambda: expected_tokens(0.5, 2.0), "gamma must be an integer, not float"),
        (lambda: expected_tokens(0.5, True), "gamma must be an integer, not bool"),
        (lambda: expected_tokens(0.5, 10**400), "gamma must be at most 2\\^53"),
        (lambda: expected_tokens(10**400, 3), r"alpha must be in \[0, 1\]"),
        (lambda: walltime_improvement(0.5, 2, 10**400), "c must be finite"),
        (lambda: acceptance_rate(half, [10**400, 0.5]), "q must be a tensor or a rectangular sequence"),
        (lambda: lab.expected_accepted(0.5, -1), "depth must be >= 0"),
        (lambda: walltime_improvement(0.5, 2, -0.1), "c must be finite and >= 0, got -0.1"),
        (lambda: predicted_speedup(0.5, 2, 0.1, 0), "verify_cost must be finite and > 0, got 0"),
        (lambda: lab.round_traffic(1e9, 2, state=-1.0), "state must be finite and >= 0, got -1"),
        (lambda: lab.round_traffic(1e9, 0), "sequences must be >= 1"),
        (lambda: expected_experts(8, 9, 2), r"chosen / count must be in \[0, 1\], got 1.125"),
        (lambda: expected_experts(8, 2, 1, sequences=2), "rows must be finite and >= 2, got 1"),
        (lambda: expected_experts(8, 2, 2, again=1.5), r"a share must be in \[0, 1\], got 1.5"),
        (lambda: operations_increase(0.5, 2, -1), "c_hat must be finite and >= 0"),
        (lambda: best_gamma(0.5, 0.1, max_gamma=-1), "max_gamma must be >= 0"),
        (lambda: lab.alpha_from_tokens(2.0, 0), "gamma must be >= 1"),
        (lambda: lab.alpha_from_tokens(4.5, 3), r"mean_tokens must be in \[1, 4\]"),
        (lambda: lenient_acceptance_rate(half, half, 0.0), r"lenience must be in \(0, 1\], got 0"),
        (lambda: acceptance_rate([0.5, 0.6], half), "p must sum to 1 over its last dimension, a row is off by 0.1"),
        (lambda: acceptance_rate(half, [1.5, -0.5]), "q must not have negative or NaN entries"),
        (lambda: acceptance_rate(half, [math.nan, 1.0]), "q must not have negative or NaN entries"),
        (lambda: acceptance_rate(half, 1.0), "q must have a vocabulary dimension"),
        (lambda: acceptance_rate(half, [[0.5], [0.2, 0.3]]), "q must be a tensor or a rectangular sequence"),
        (lambda: acceptance_rate(half, [1.0]), "share a vocabulary, got 2 and 1"),
        (lambda: acceptance_rate([half] * 2, [half] * 3), "do not broadcast"),
        (lambda: acceptance_rate(half, torch.ones(2, dtype=torch.complex64)), "q must be real"),
        (lambda: lab.acceptance_probability(0.5, 0.0), "q_x must be in"),
        (lambda: lab.acceptance_probability(1.5, 0.5), "p_x must be in"),
    ],
)
def test_bad_arguments_in_one_line(call, words):
    refused(ConfigError, words, call)


@pytest.mark.parametrize(("count", "chosen", "rows"), [(4, 2, 3), (5, 1, 4), (3, 3, 2)])
def test_experts_that_rows_read_by_mere_chance(count, chosen, rows):
    """By every choice that the rows can make."""
    choices = list(itertools.combinations(range(count), chosen))
    sizes = [len(set().union(*each)) for each in itertools.product(choices, repeat=rows)]
    mean = sum(sizes) / len(sizes)
    assert expected_experts(count, chosen, rows) == pytest.approx(mean, rel=1e-12)
    assert expected_experts(count, chosen, rows, sequences=rows) == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("again", [0.08, 0.2])
def test_experts_that_rows_of_a_text_read(again):
    """By the density of each expert's own chance, summed up; two rows share what they are said to share; texts that
    have no more than chance in common read apart."""
    count, chosen = 64, 4
    p = chosen / count
    s = (1 - again) / (again - p)
    a, b = s * p, s * (1 - p)
    steps = 20_000
    chances = [math.sin(math.pi * (i + 0.5) / (2 * steps)) ** 2 for i in range(steps)]  # crowded at both ends
    widths = [math.sqrt(x * (1 - x)) for x in chances]
    density = [w * x ** (a - 1) * (1 - x) ** (b - 1) for x, w in zip(chances, widths)]

    def read(rows, texts=1):
        out = sum(d * (1 - x) ** rows for d, x in zip(density, chances)) / sum(density)
        return count * (1 - out**texts)

    for rows in (1, 2, 5, 16):
        assert expected_experts(count, chosen, rows, again) == pytest.approx(read(rows), rel=2e-3)
        assert expected_experts(count, chosen, 3 * rows, again, 3) == pytest.approx(read(rows, 3), rel=2e-3)
    assert expected_experts(count, chosen, 2, again) == pytest.approx(chosen * (2 - again), rel=1e-12)
    assert expected_experts(count, chosen, 9, 1.0) == pytest.approx(chosen, rel=1e-12)

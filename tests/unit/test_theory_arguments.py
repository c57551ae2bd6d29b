"""Arguments that the formulas refuse, in one line each."""

import math

import pytest
import torch

from forerun.core.errors import ConfigError
from forerun.theory import (
    acceptance_probability,
    acceptance_rate,
    alpha_from_tokens,
    best_gamma,
    expected_accepted,
    expected_experts,
    expected_tokens,
    lenient_acceptance_rate,
    lenient_token_distribution,
    operations_increase,
    predicted_speedup,
    round_traffic,
    walltime_improvement,
)

half = [0.5, 0.5]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: expected_tokens(1.01, 3), r"alpha must be in \[0, 1\], got 1.01"),
        (lambda: expected_tokens(math.nan, 3), "alpha must be in"),
        (lambda: expected_tokens(half, 3), "alpha must be one number"),
        (lambda: expected_tokens(torch.tensor(half), 3), "alpha must be one number"),
        (lambda: expected_tokens(0.5, -1), "gamma must be >= 0, got -1"),
        (lambda: expected_tokens(0.5, 2.0), "gamma must be an integer, not float"),
        (lambda: expected_tokens(0.5, True), "gamma must be an integer, not bool"),
        (lambda: expected_tokens(0.5, 10**400), "gamma must be at most 2\\^53"),
        (lambda: expected_tokens(10**400, 3), r"alpha must be in \[0, 1\]"),
        (lambda: walltime_improvement(0.5, 2, 10**400), "c must be finite"),
        (lambda: acceptance_rate(half, [10**400, 0.5]), "q must be a tensor or a rectangular sequence"),
        (lambda: expected_accepted(0.5, -1), "depth must be >= 0"),
        (lambda: walltime_improvement(0.5, 2, -0.1), "c must be finite and >= 0, got -0.1"),
        (lambda: walltime_improvement(0.5, 2, math.inf), "c must be finite"),
        (lambda: predicted_speedup(0.5, 2, 0.1, 0), "verify_cost must be finite and > 0, got 0"),
        (lambda: round_traffic(1e9, 2, state=-1.0), "state must be finite and >= 0, got -1"),
        (lambda: round_traffic(1e9, 0), "sequences must be >= 1"),
        (lambda: expected_experts(8, 9, 2), r"chosen / count must be in \[0, 1\], got 1.125"),
        (lambda: expected_experts(8, 2, 1, sequences=2), "rows must be finite and >= 2, got 1"),
        (lambda: expected_experts(8, 2, 2, again=1.5), r"a share must be in \[0, 1\], got 1.5"),
        (lambda: operations_increase(0.5, 2, -1), "c_hat must be finite and >= 0"),
        (lambda: best_gamma(0.5, 0.1, max_gamma=-1), "max_gamma must be >= 0"),
        (lambda: alpha_from_tokens(2.0, 0), "gamma must be >= 1"),
        (lambda: alpha_from_tokens(4.5, 3), r"mean_tokens must be in \[1, 4\]"),
        (lambda: lenient_acceptance_rate(half, half, 0.0), r"lenience must be in \(0, 1\], got 0"),
        (lambda: lenient_token_distribution(half, half, 1.5), "lenience must be in"),
        (lambda: acceptance_rate([0.5, 0.6], half), "p must sum to 1 over its last dimension, a row is off by 0.1"),
        (lambda: acceptance_rate(half, [1.5, -0.5]), "q must not have negative or NaN entries"),
        (lambda: acceptance_rate(half, [math.nan, 1.0]), "q must not have negative or NaN entries"),
        (lambda: acceptance_rate(half, 1.0), "q must have a vocabulary dimension"),
        (lambda: acceptance_rate(half, [[0.5], [0.2, 0.3]]), "q must be a tensor or a rectangular sequence"),
        (lambda: acceptance_rate(half, [1.0]), "share a vocabulary, got 2 and 1"),
        (lambda: acceptance_rate([half] * 2, [half] * 3), "do not broadcast"),
        (lambda: acceptance_rate(half, torch.ones(2, dtype=torch.complex64)), "q must be real"),
        (lambda: acceptance_probability(0.5, 0.0), "q_x must be in"),
        (lambda: acceptance_probability(1.5, 0.5), "p_x must be in"),
    ],
)
def test_bad_arguments_in_one_line(call, words):
    with pytest.raises(ConfigError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)

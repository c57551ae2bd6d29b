"""When speculation pays: Leviathan et al. 2023 as pure functions (see :mod:`forerun.theory.formulas`), and the same
principle for any two functions (:mod:`forerun.theory.execution`)."""

from forerun.theory.execution import Execution, expected_latency, settle, speculate
from forerun.theory.formulas import (
    acceptance_probability,
    acceptance_rate,
    alpha_from_tokens,
    best_gamma,
    d_lk,
    expected_accepted,
    expected_tokens,
    guaranteed_improvement,
    lenient_acceptance_rate,
    lenient_argmax_mask,
    lenient_token_bound,
    lenient_token_distribution,
    memory_access_factor,
    operations_increase,
    oracle_improvement,
    oracle_tokens,
    predicted_speedup,
    rejection_sampling_rate,
    walltime_improvement,
)
from forerun.theory.trees import Shape, best_shape

__all__ = [
    "Execution",
    "Shape",
    "acceptance_probability",
    "acceptance_rate",
    "alpha_from_tokens",
    "best_gamma",
    "best_shape",
    "d_lk",
    "expected_accepted",
    "expected_latency",
    "expected_tokens",
    "guaranteed_improvement",
    "lenient_acceptance_rate",
    "lenient_argmax_mask",
    "lenient_token_bound",
    "lenient_token_distribution",
    "memory_access_factor",
    "operations_increase",
    "oracle_improvement",
    "oracle_tokens",
    "predicted_speedup",
    "rejection_sampling_rate",
    "settle",
    "speculate",
    "walltime_improvement",
]

"""Further quantities of speculation, as pure functions: those that people read and the engine does not compute with.

Source: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (ICML 2023,
arXiv 2211.17192), called [L] below. Symbols, units and errors are those of :mod:`forerun.theory`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from forerun.core.errors import ConfigError
from forerun.theory import Distribution, as_count, as_number, as_pair, as_rows, as_tensor, expected_tokens

__all__ = [
    "Shape",
    "acceptance_probability",
    "alpha_from_tokens",
    "best_shape",
    "expected_accepted",
    "guaranteed_improvement",
    "lenient_token_bound",
    "memory_access_factor",
    "oracle_improvement",
    "oracle_tokens",
    "rejection_sampling_rate",
    "round_traffic",
]


def acceptance_probability(p_x: torch.Tensor | float, q_x: torch.Tensor | float, lenience: float = 1.0) -> torch.Tensor:
    """Probability of keeping a drafted token x: ``min(1, p(x) / (l q(x)))``.

    Takes the two probabilities of the drafted token itself, element by element; ``q_x > 0`` because x was drawn
    from q. [L] section 2.3; lenience as in A.5. A float64 tensor of probabilities.
    """
    ratio = as_number("lenience", lenience, 0, 1, above=True)
    target, draft = as_tensor("p_x", p_x).to(torch.float64), as_tensor("q_x", q_x).to(torch.float64)
    if not bool(((target >= 0) & (target <= 1)).all()):
        raise ConfigError("p_x must be in [0, 1]")
    if not bool(((draft > 0) & (draft <= 1)).all()):
        raise ConfigError("q_x must be in (0, 1]: a token is drafted only where q is positive")
    return (target / (ratio * draft.to(target.device))).clamp(max=1.0)


def rejection_sampling_rate(p: Distribution, q: Distribution) -> torch.Tensor:
    """Acceptance of non-iterative rejection sampling: ``1 / M`` with ``M = max_x p(x) / q(x)``, in [0, 1].

    [L] appendix A.2, ``sum_x p(x) min_x' q(x') / p(x')``, the minimum over the support of p. Never above
    :func:`forerun.theory.acceptance_rate`, often far below: one token that q underrates spoils every other token.
    """
    target, draft = as_pair(p, q)
    return torch.where(target > 0, draft / target, torch.inf).amin(-1).clamp(max=1.0)


def lenient_token_bound(p: Distribution, lenience: float) -> torch.Tensor:
    """The most that lenience l may make of each token's probability: ``min(1, p(x) / l)``, of p's shape.

    [L] appendix A.5. There is no lower bound: a token that q never drafts can lose most of its probability.
    """
    ratio = as_number("lenience", lenience, 0, 1, above=True)
    return (as_rows("p", p) / ratio).clamp(max=1.0)


def expected_accepted(alpha: float, depth: int) -> float:
    """Mean drafted tokens that one round keeps: ``alpha + alpha^2 + ... + alpha^depth``, in [0, depth].

    ``sum_(k < depth) k alpha^k (1 - alpha) + depth alpha^depth``; one less than [L] equation 1.
    At depth 4 it is 0.94, 1.77 and 3.10 for alpha 0.5, 0.7 and 0.9.
    """
    rate, length = as_number("alpha", alpha, 0, 1), as_count("depth", depth)
    return rate * expected_tokens(rate, length - 1) if length else 0.0


def alpha_from_tokens(mean_tokens: float, gamma: int) -> float:
    """The alpha whose expected tokens are ``mean_tokens`` (measured tokens per round, in [1, gamma + 1]).

    The inverse of [L] equation 1, to rounding; ``gamma >= 1``, since a round without a draft says nothing of alpha.
    Where counts per position are at hand, accepted over judged tokens (the match rate) is the better estimate.
    """
    length = as_count("gamma", gamma, 1)
    tokens = as_number("mean_tokens", mean_tokens, 1, length + 1)
    low, high = 0.0, 1.0
    if tokens in (1.0, length + 1.0):
        return low if tokens == 1.0 else high
    while low < (middle := (low + high) / 2) < high:
        if expected_tokens(middle, length) < tokens:
            low = middle
        else:
            high = middle
    return high


def oracle_tokens(alpha: float) -> float:
    """Mean tokens per round if an oracle chose each round's length: ``1 / (1 - alpha)``; infinite at alpha = 1.

    [L] section 3.5: the limit of :func:`expected_tokens` for a long draft, so also the bound on the walltime
    improvement of any draft of negligible cost (section 3.6).
    """
    rate = as_number("alpha", alpha, 0, 1)
    return math.inf if rate == 1 else 1 / (1 - rate)


def guaranteed_improvement(alpha: float, c: float) -> float:
    """Speed over plain decoding that the best gamma is sure to reach: ``(1 + alpha) / (1 + c)``, at least 1.

    [L] corollary 3.9, theorem 3.8 at gamma = 1. Above 1 iff alpha > c; otherwise drafting nothing gives 1.
    """
    return max(1.0, (1 + as_number("alpha", alpha, 0, 1)) / (1 + as_number("c", c, 0)))


def oracle_improvement(alpha: float, c: float) -> float:
    """Speed over plain decoding if an oracle drafted only what will be kept: ``1 / (1 - alpha + alpha min(c, 1))``.

    Follows from [L] section 3.5: a round emits 1 / (1 - alpha) tokens for alpha / (1 - alpha) draft steps and one
    verification (still run, footnote 4); at c > 1 the oracle drafts nothing. A bound on any length policy where
    verification is free; infinite at alpha = 1 and c = 0.
    """
    rate, cost = as_number("alpha", alpha, 0, 1), min(1.0, as_number("c", c, 0))
    time_per_token = 1 - rate + rate * cost
    return math.inf if time_per_token == 0 else 1 / time_per_token


def memory_access_factor(alpha: float, gamma: int) -> float:
    """By what factor reads of the target's weights and KV shrink per token: :func:`expected_tokens`.

    [L] section 3.4: they are read once per round, whatever its length. The draft's own reads are not counted.
    """
    return expected_tokens(alpha, gamma)


def round_traffic(weights: float, sequences: int, keys: float = 0.0, state: float = 0.0) -> float:
    """Bytes that a round moves: the ``weights`` once, and of each of its ``sequences`` the ``keys`` and values of its
    text, read, and its layers' ``state``, read and written: ``weights + sequences (keys + 2 state)``.

    Drafted tokens add nothing that grows with any of these. So what a draft saves, :func:`memory_access_factor`, holds
    for states, too, while a batch shares the weights alone.
    """
    shared, own, held = as_number("weights", weights, 0), as_number("keys", keys, 0), as_number("state", state, 0)
    return shared + as_count("sequences", sequences, 1) * (own + 2 * held)


class Shape(NamedTuple):
    """A tree by rank: node i is the ``ranks[i]``-th likeliest continuation (from 0) of ``parents[i]``; -1: the root."""

    tokens: float
    """Expected tokens of a round, the one that is not drafted included."""
    parents: list[int]
    ranks: list[int]


def best_shape(acceptance: Sequence[float], nodes: int, depth: int) -> Shape:
    """The tree of at most ``nodes`` tokens and ``depth`` levels with the most expected tokens.

    ``acceptance[r]`` is the probability that the target's token is the r-th likeliest of the draft, whatever came
    before (Sequoia's positional acceptance). A node counts with the product along its path, and a rank can be drafted
    only beside all better ones. Raises ValueError for what are no probabilities of exclusive events, and for counts
    below 0.
    """
    if nodes < 0 or depth < 0:
        raise ValueError(f"nodes and depth must be at least 0, not {nodes} and {depth}")
    if any(not 0 <= fraction <= 1 for fraction in acceptance) or sum(acceptance) > 1 + 1e-9:
        raise ValueError(f"acceptance must be probabilities of exclusive events, not {list(acceptance)}")

    @cache
    def value(count: int, levels: int) -> float:
        """Of a node that heads a subtree of ``count`` nodes, itself included."""
        return 0.0 if count == 0 else 1.0 + children(count - 1, levels, 0)[0]

    @cache
    def children(count: int, levels: int, rank: int) -> tuple[float, int]:
        """Of ``count`` nodes among the children of ``rank`` and worse, and how many of them the first one takes."""
        best = (0.0, 0)
        if levels == 0 or rank == len(acceptance):
            return best
        for taken in range(1, count + 1):
            rest = children(count - taken, levels, rank + 1)[0]
            best = max(best, (acceptance[rank] * value(taken, levels - 1) + rest, taken))
        return best

    parents: list[int] = []
    ranks: list[int] = []

    def lay(parent: int, count: int, levels: int) -> None:
        for rank in range(len(acceptance)):
            taken = children(count, levels, rank)[1]
            if not taken:
                return
            parents.append(parent)
            ranks.append(rank)
            lay(len(parents) - 1, taken - 1, levels - 1)
            count -= taken

    lay(-1, nodes, depth)
    return Shape(value(nodes + 1, depth), parents, ranks)

"""How sure a ratio and a median are."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt
from statistics import median

CONFIDENCE = 0.95


def ratio_error(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Standard error of sum(a) / sum(b) over independent cases (a, b), to first order (Cochran, Sampling Techniques,
    1977, section 6.4). None for fewer than two cases with b > 0."""
    pairs = [(a, b) for a, b in pairs if b > 0]
    count, below = len(pairs), sum(b for _, b in pairs)
    if count < 2:
        return None
    ratio = sum(a for a, _ in pairs) / below
    return sqrt(sum((a - ratio * b) ** 2 for a, b in pairs) * count / (count - 1)) / below


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> list[float] | None:
    """``quantile_interval`` of the median."""
    return quantile_interval(values, 0.5, confidence)


def quantile_interval(values: Sequence[float], share: float, confidence: float = CONFIDENCE) -> list[float] | None:
    """An interval that holds the population's quantile with at least this confidence, whatever the distribution:
    between two of the sorted values, as the binomial distribution permits. None for too few values."""
    below, above = _outside(len(values), share, confidence), _outside(len(values), 1 - share, confidence)
    ordered = sorted(values)
    return [ordered[below - 1], ordered[-above]] if below and above else None


def _outside(count: int, share: float, confidence: float) -> int:
    """How many of the least values may be left out on one side."""
    outside, below = 0, 0.0
    while (below := below + comb(count, outside) * share**outside * (1 - share) ** (count - outside)) <= (
        1 - confidence
    ) / 2:
        outside += 1
    return outside


def shown(values: Sequence[float]) -> str:
    """The median, and between which values it is: its interval, or the least and the most of too few values."""
    low, high = median_interval(values) or (min(values), max(values))
    return f"{median(values):.2f} ({low:.2f} to {high:.2f})"

"""Predictions and a recommendation from measured acceptance and cost: a method and its draft length, or no drafts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, inf, lgamma, log
from operator import itemgetter
from statistics import mean, median
from types import MappingProxyType
from typing import Any

from forerun.engine.config import NONE
from forerun.engine.metrics import RequestMetrics
from forerun.measure.rounds import Measured, RoundCosts, Sample, full_rounds
from forerun.speculate.length.prices import Curve
from forerun.theory import best_gamma, expected_tokens, walltime_improvement

MARGIN = 1.02
"""Smallest predicted speed-up for which drafts are recommended."""


@dataclass(frozen=True)
class PlannedDraft:
    """Measured drafts of one length: mean accepted ``tokens`` per round and sequence, ``coverage``, the fraction of
    rounds with a draft, and mean ``nodes`` of a draft."""

    tokens: float
    coverage: float
    nodes: float


@dataclass(frozen=True)
class Estimate:
    """Measured acceptance and costs of one method. ``coverage`` is the fraction of rounds with a draft.

    Costs are in plain forwards. A round with k drafted tokens takes ``start`` + k ``step`` beside its verification and
    ``rest``, a plain round's time outside its forward. ``c`` is the mean cost of a step (Leviathan et al. 2023,
    definition 3.7), which stands for ``step`` if that is None.
    """

    method: str
    alpha: float
    match_rate: float
    coverage: float
    c: float
    start: float = 0.0
    step: float | None = None
    rest: float = 0.0
    lengths: Mapping[int, PlannedDraft] = field(default_factory=dict)
    """By the number of requested tokens."""

    def drafted(self, k: int, nodes: int) -> PlannedDraft:
        """Predicted drafts of depth ``k`` with at most ``nodes`` nodes: independent positions, as in theory, scaled by
        the ratio of measured to theoretical gain, interpolated between the measured lengths next to ``k``."""
        theory = expected_tokens(self.match_rate, k) - 1
        if not self.lengths:
            return PlannedDraft(self.coverage * theory, self.coverage, nodes)
        measured = sorted(self.lengths)
        low = max((length for length in measured if length <= k), default=measured[0])
        high = min((length for length in measured if length >= k), default=measured[-1])
        fraction = (k - low) / (high - low) if high > low else 0.0

        def interpolated(value: Callable[[int], float]) -> float:
            return value(low) + fraction * (value(high) - value(low))

        def gain(length: int) -> float:
            best = expected_tokens(self.match_rate, length) - 1
            return self.lengths[length].tokens / best if best else 0.0

        coverage = interpolated(lambda length: self.lengths[length].coverage)
        filled = interpolated(lambda length: self.lengths[length].nodes / length)
        return PlannedDraft(theory * interpolated(gain), coverage, min(filled * k, nodes))


@dataclass(frozen=True)
class Prediction:
    """A method with ``k`` drafted tokens: ``verify_cost`` of k + 1 rows, speed-up over plain decoding."""

    method: str
    k: int
    match_rate: float
    c: float
    verify_cost: float
    speedup: float


class CostCurve(Curve):
    """Cost of a verification by its rows, in plain forwards; a plain forward of ``sequences`` rows costs 1. Rows are
    padded to ``row_multiple``, so the cost rises in steps. In a mixture, ``expected`` is the cost by the experts that
    rows read: each further row reads fewer new ones."""

    def __init__(
        self,
        points: Mapping[int, float],
        sequences: int = 1,
        row_multiple: int = 1,
        expected: Callable[[Any], float] = float,
    ) -> None:
        self.row_multiple = row_multiple
        plain, grouped = self.padded(sequences), defaultdict(list)
        for rows, cost in points.items():
            grouped[self.padded(rows)].append(cost)
        super().__init__({rows: median(costs) for rows, costs in grouped.items() if rows > plain}, expected)
        self.points = {rows: 1.0 for rows in sorted({plain, *grouped}) if rows <= plain} | self.points

    def padded(self, rows: float) -> int:
        return ceil(rows / self.row_multiple) * self.row_multiple

    def __call__(self, rows: float) -> float:
        return super().__call__(self.padded(rows))

    def mean(self, rows: float) -> float:
        """Cost at a mean, fractional number of rows."""
        low = int(rows)
        return self(low) + (rows - low) * (self(low + 1) - self(low))


def estimate(method: str, by_length: Mapping[int, Measured], plain: Measured, sequences: int) -> Estimate | None:
    """A method's estimate from its runs by the number of requested tokens, ``sequences`` requests at a time, with times
    in plain forwards; None if nothing was drafted."""
    total = RequestMetrics.merged([metrics for result in by_length.values() for metrics in result.metrics])
    every = [r for result in by_length.values() for r in result.rounds]
    costs = RoundCosts.of(every, plain.rounds, sequences)
    if costs is None or total.alpha is None or total.match_rate is None:
        return None
    drafted = [r for r in full_rounds(every, sequences) if r.depth]
    rest = median(r.rest for r in full_rounds(plain.rounds, sequences))
    start, step = draft_cost(drafted, rest)
    lengths = {k: _planned_draft(full_rounds(result.rounds, sequences)) for k, result in by_length.items()}
    coverage = _planned_draft(full_rounds(every, sequences)).coverage
    return Estimate(method, total.alpha, total.match_rate, coverage, costs.c, start, step, rest, lengths)


def draft_cost(drafted: Sequence[Sample], rest: float) -> tuple[float, float]:
    """Start and step of drafting, in the unit of the samples: a draft of k tokens takes start + k step. The start
    includes a drafted round's time outside drafting and its forward, less ``rest``, a plain round's."""
    start, step = _line([(r.depth, r.draft) for r in drafted])
    return start + median(r.rest for r in drafted) - rest, step


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Intercept and slope, neither below 0, of the line through the medians of each depth, weighted by their counts."""
    by_depth: dict[int, list[float]] = {}
    for depth, value in points:
        by_depth.setdefault(depth, []).append(value)
    medians = {depth: median(values) for depth, values in by_depth.items()}
    mean_x, mean_y = (mean(column) for column in zip(*((depth, medians[depth]) for depth, _ in points)))
    spread = sum((depth - mean_x) ** 2 for depth, _ in points)
    step = sum((depth - mean_x) * (medians[depth] - mean_y) for depth, _ in points) / spread if spread else inf
    step = min(max(step, 0.0), mean_y / mean_x)
    return mean_y - step * mean_x, step


def _planned_draft(rounds: Sequence[Sample]) -> PlannedDraft:
    every = sum(len(r.depths) for r in rounds)
    drafts = sum(depth > 0 for r in rounds for depth in r.depths)
    nodes = sum(r.rows - len(r.depths) for r in rounds)
    return PlannedDraft(sum(r.tokens for r in rounds) / every - 1, drafts / every, nodes / drafts if drafts else 0.0)


def predict(
    result: Estimate, curve: CostCurve, longest: int, sequences: int = 1, nodes: Callable[[int], int] = int
) -> list[Prediction]:
    """Predictions for every draft length k from 1 to ``longest``, with at most ``nodes(k)`` tokens: by default a
    chain."""
    predictions = []
    for k in range(1, longest + 1):
        speed = speedup(result, result.drafted(k, nodes(k)), k, curve, sequences)
        cost = curve(sequences * (nodes(k) + 1))
        predictions.append(Prediction(result.method, k, result.match_rate, result.c, cost, speed))
    return predictions


def speedup(result: Estimate, drafted: PlannedDraft, depth: int, curve: CostCurve, sequences: int) -> float:
    """Speed over plain decoding: tokens per round over its mean time, if sequences have drafts independently."""
    work = result.start + depth * (result.c if result.step is None else result.step)
    time = result.rest
    for count, p in enumerate(binomial(sequences, drafted.coverage)):
        time += p * (curve.mean(sequences + count * drafted.nodes) + work if count else 1.0)
    return (1 + drafted.tokens) * (1 + result.rest) / time


def binomial(trials: int, fraction: float) -> list[float]:
    """Probability of each number of successes, from 0 to ``trials``."""
    if fraction <= 0 or fraction >= 1:
        return [float(count == (trials if fraction >= 1 else 0)) for count in range(trials + 1)]

    def probability(count: int) -> float:
        ways = lgamma(trials + 1) - lgamma(count + 1) - lgamma(trials - count + 1)
        return exp(ways + count * log(fraction) + (trials - count) * log(1 - fraction))

    return [probability(count) for count in range(trials + 1)]


def recommend(
    predictions: Sequence[Prediction],
    options: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    more: Sequence[tuple[float, dict[str, Any]]] = (),
) -> dict[str, Any]:
    """The ``speculative_config`` of the fastest prediction or of the fastest of ``more`` (speed-up, config); plain
    decoding if none reaches ``MARGIN``. ``options`` are the ones that each method was measured with."""
    candidates = [
        (p.speedup, {**options.get(p.method, {"method": p.method}), "num_speculative_tokens": p.k}) for p in predictions
    ]
    speed, config = max([*candidates, *more], key=itemgetter(0), default=(0.0, {}))
    return config if speed >= MARGIN else {"method": NONE}


def reach(result: Estimate, requested: Sequence[float] = (1.5, 2.0, 3.0)) -> dict[str, Any]:
    """The limits of a chain with free verification (Leviathan et al. 2023, theorem 3.8): ``limit``, the best speed-up
    at the measured rate and c; for each ``requested`` speed-up the ``rate`` needed at the measured c and the ``c``
    needed at the measured rate, None if no rate below 1 or no cost above 0 suffices."""

    def best(rate: float, c: float) -> float:
        return walltime_improvement(rate, best_gamma(rate, c), c)

    needs = []
    for speed in requested:
        rates = [fraction / 1000 for fraction in range(1000) if best(fraction / 1000, result.c) >= speed]
        costs = [c / 1000 for c in range(1000) if best(min(result.match_rate, 0.999), c / 1000) >= speed]
        needs.append({"speedup": speed, "rate": min(rates, default=None), "c": max(costs, default=None)})
    return {"method": result.method, "limit": best(min(result.match_rate, 0.999), result.c), "needs": needs}

"""From measured acceptance and cost to a recommendation: which method, how many drafted tokens, or none at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf, lgamma, log
from operator import itemgetter
from statistics import mean, median
from types import MappingProxyType
from typing import Any

from forerun.engine.config import NONE
from forerun.engine.metrics import RequestMetrics
from forerun.measure.rounds import Measured, RoundCosts, Sample, full
from forerun.theory import best_gamma, expected_tokens, walltime_improvement

MARGIN = 1.02
"""The least speed-up for which drafts are recommended."""


@dataclass(frozen=True)
class PlannedDraft:
    """What a sequence's drafts of one length did in measured rounds: mean ``tokens`` that it gained in a round over
    plain decoding, ``coverage``, the share of rounds in which it had a draft, and mean ``nodes`` of one."""

    tokens: float
    coverage: float
    nodes: float


@dataclass(frozen=True)
class Estimate:
    """What was measured of one method. ``coverage`` is the share of rounds in which it had something to say.

    A drafted round takes ``start`` + k ``step`` beside its verification; ``rest`` is what a plain round takes beside
    its forward, and ``start`` knows how much more a drafted one does. In plain forwards. Without ``step`` it is ``c``,
    the mean price of a step (Leviathan et al. 2023, definition 3.7).
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
    """By how many tokens were asked for."""

    def drafted(self, k: int, nodes: int) -> PlannedDraft:
        """What drafts of ``k`` tokens, or of ``nodes`` in a tree so deep, do: the theory's independent positions,
        corrected by what the measured lengths next to ``k`` did beside it."""
        theory = expected_tokens(self.match_rate, k) - 1
        if not self.lengths:
            return PlannedDraft(self.coverage * theory, self.coverage, nodes)
        known = sorted(self.lengths)
        low = max((length for length in known if length <= k), default=known[0])
        high = min((length for length in known if length >= k), default=known[-1])
        fraction = (k - low) / (high - low) if high > low else 0.0

        def between(value: Callable[[int], float]) -> float:
            return value(low) + fraction * (value(high) - value(low))

        def gained(length: int) -> float:
            best = expected_tokens(self.match_rate, length) - 1
            return self.lengths[length].tokens / best if best else 0.0

        coverage = between(lambda length: self.lengths[length].coverage)
        full = between(lambda length: self.lengths[length].nodes / length)
        return PlannedDraft(theory * between(gained), coverage, min(full * k, nodes))


@dataclass(frozen=True)
class Prediction:
    """A method with ``k`` drafted tokens: ``verify_cost`` of k + 1 rows, speed-up over plain decoding."""

    method: str
    k: int
    match_rate: float
    c: float
    verify_cost: float
    speedup: float


class CostCurve:
    """Price of a verification by its rows, in plain forwards: measured points, straight lines between them.

    Rows are padded to a multiple, so the price comes in steps. Fewer rows never cost more than more do: a dearer point
    was disturbed. Beyond the last point the price grows as it did before it. A plain forward of ``sequences`` rows
    costs 1. Lines are straight over ``expected``, the price by rows that nothing measured: of a mixture's, each further
    row reads fewer experts that no row before it has read.
    """

    def __init__(
        self,
        points: Mapping[int, float],
        sequences: int = 1,
        row_multiple: int = 1,
        expected: Callable[[int], float] = float,
    ) -> None:
        self.row_multiple, self.expected = row_multiple, expected
        grouped: dict[int, list[float]] = {}
        for rows, cost in points.items():
            grouped.setdefault(self.padded(rows), []).append(cost)
        self.points = {rows: median(costs) for rows, costs in grouped.items()}
        self.points[self.padded(sequences)] = 1.0
        least = inf
        for rows in sorted(self.points, reverse=True):
            least = self.points[rows] = min(least, self.points[rows]) if rows > self.padded(sequences) else 1.0
        self.points = dict(sorted(self.points.items()))

    def padded(self, rows: int) -> int:
        return -(-rows // self.row_multiple) * self.row_multiple

    def __call__(self, rows: int) -> float:
        rows = self.padded(rows)
        known = sorted(self.points)
        if rows in self.points:
            return self.points[rows]
        if rows < known[0] or len(known) == 1:
            return self.points[known[0]]
        right = next((i for i, value in enumerate(known) if value > rows), len(known) - 1)
        low, high = known[right - 1], known[right]
        start, end, here = map(self.expected, (low, high, rows))
        slope = (self.points[high] - self.points[low]) / (end - start)
        return max(self.points[low] + slope * (here - start), self.points[known[0]])

    def mean(self, rows: float) -> float:
        """Of a mean number of rows, between those next to it."""
        low = int(rows)
        return self(low) + (rows - low) * (self(low + 1) - self(low))


def estimate(method: str, by_length: Mapping[int, Measured], plain: Measured, sequences: int) -> Estimate | None:
    """Of runs by how many tokens were asked for, ``sequences`` at a time, times in plain forwards; None where nothing
    was drafted."""
    total = RequestMetrics.merged([metrics for result in by_length.values() for metrics in result.metrics])
    every = [r for result in by_length.values() for r in result.rounds]
    costs = RoundCosts.of(every, plain.rounds, sequences)
    if costs is None or costs.c is None or total.alpha is None or total.match_rate is None:
        return None
    drafted = [r for r in full(every, sequences) if r.depth]
    rest = median(r.rest for r in full(plain.rounds, sequences))
    start, step = draft_price(drafted, rest)
    lengths = {k: _drafted(full(result.rounds, sequences)) for k, result in by_length.items()}
    coverage = _drafted(full(every, sequences)).coverage
    return Estimate(method, total.alpha, total.match_rate, coverage, costs.c, start, step, rest, lengths)


def draft_price(drafted: Sequence[Sample], rest: float) -> tuple[float, float]:
    """Start and step, in the unit of the times: a draft of k tokens takes the start and k steps. The start includes
    what a drafted round takes beside drafting and its forward, less ``rest``, what a plain one takes."""
    start, step = _line([(r.depth, r.draft) for r in drafted])
    return start + median(r.rest for r in drafted) - rest, step


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Start and step, neither below 0, of the line through the medians at each depth, weighed by how many there are."""
    by_depth: dict[int, list[float]] = {}
    for depth, value in points:
        by_depth.setdefault(depth, []).append(value)
    medians = {depth: median(values) for depth, values in by_depth.items()}
    mean_x, mean_y = (mean(column) for column in zip(*((depth, medians[depth]) for depth, _ in points)))
    spread = sum((depth - mean_x) ** 2 for depth, _ in points)
    step = sum((depth - mean_x) * (medians[depth] - mean_y) for depth, _ in points) / spread if spread else inf
    step = min(max(step, 0.0), mean_y / mean_x)
    return mean_y - step * mean_x, step


def _drafted(rounds: Sequence[Sample]) -> PlannedDraft:
    every = sum(len(r.depths) for r in rounds)
    drafts = sum(depth > 0 for r in rounds for depth in r.depths)
    nodes = sum(r.rows - len(r.depths) for r in rounds)
    return PlannedDraft(sum(r.tokens for r in rounds) / every - 1, drafts / every, nodes / drafts if drafts else 0.0)


def predict(
    result: Estimate, curve: CostCurve, longest: int, sequences: int = 1, nodes: Callable[[int], int] = int
) -> list[Prediction]:
    """Every draft length k from 1 to ``longest``, at most ``nodes(k)`` tokens each: by default a chain. A round without
    a draft is a plain one."""
    predictions = []
    for k in range(1, longest + 1):
        speed = speedup(result, result.drafted(k, nodes(k)), k, curve, sequences)
        cost = curve(sequences * (nodes(k) + 1))
        predictions.append(Prediction(result.method, k, result.match_rate, result.c, cost, speed))
    return predictions


def speedup(result: Estimate, drafted: PlannedDraft, depth: int, curve: CostCurve, sequences: int) -> float:
    """Tokens a round over its mean time, each of ``sequences`` having a draft by itself or none."""
    work = result.start + depth * (result.c if result.step is None else result.step)
    time = result.rest
    for count, chance in enumerate(binomial(sequences, drafted.coverage)):
        time += chance * (curve.mean(sequences + count * drafted.nodes) + work if count else 1.0)
    return (1 + drafted.tokens) * (1 + result.rest) / time


def binomial(trials: int, fraction: float) -> list[float]:
    """How likely each number of successes is, of 0 to ``trials``."""
    if fraction <= 0 or fraction >= 1:
        return [float(count == (trials if fraction >= 1 else 0)) for count in range(trials + 1)]

    def chance(count: int) -> float:
        ways = lgamma(trials + 1) - lgamma(count + 1) - lgamma(trials - count + 1)
        return exp(ways + count * log(fraction) + (trials - count) * log(1 - fraction))

    return [chance(count) for count in range(trials + 1)]


def recommend(
    predictions: Sequence[Prediction],
    options: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    more: Sequence[tuple[float, dict[str, Any]]] = (),
) -> dict[str, Any]:
    """The ``speculative_config`` of the fastest prediction, or of the fastest of ``more`` (speed-up, config); plain
    decoding where nothing promises ``MARGIN``. ``options`` are those that a method was measured with: they belong to
    its figures."""
    candidates = [
        (p.speedup, {**options.get(p.method, {"method": p.method}), "num_speculative_tokens": p.k}) for p in predictions
    ]
    speed, config = max([*candidates, *more], key=itemgetter(0), default=(0.0, {}))
    return config if speed >= MARGIN else {"method": NONE}


def reach(result: Estimate, requested: Sequence[float] = (1.5, 2.0, 3.0)) -> dict[str, Any]:
    """What a chain of this drafter can come to where verification is free, and what a speed-up ``requested`` would
    take: ``limit`` at the measured rate, ``rate`` needed at the measured c, ``c`` needed at the measured rate; None: no
    rate below 1, or no cost above 0, would do (Leviathan et al. 2023, theorem 3.8)."""

    def best(rate: float, c: float) -> float:
        return walltime_improvement(rate, best_gamma(rate, c), c)

    needs = []
    for speed in requested:
        rates = [fraction / 1000 for fraction in range(1000) if best(fraction / 1000, result.c) >= speed]
        costs = [c / 1000 for c in range(1000) if best(min(result.match_rate, 0.999), c / 1000) >= speed]
        needs.append({"speedup": speed, "rate": min(rates, default=None), "c": max(costs, default=None)})
    return {"method": result.method, "limit": best(min(result.match_rate, 0.999), result.c), "needs": needs}

"""From measured acceptance and cost to a recommendation: which method, how many drafted tokens, or none at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from math import inf
from statistics import median
from types import MappingProxyType
from typing import Any

from forerun.engine.config import NONE
from forerun.plan.estimate import Costs, Sample, full
from forerun.plan.layers import Subset
from forerun.theory import best_gamma, expected_tokens, walltime_improvement

LAYERSKIP = "layerskip"


@dataclass(frozen=True)
class Estimate:
    """What was measured of one method. ``coverage`` is the share of rounds in which it had something to say."""

    method: str
    alpha: float
    match_rate: float
    coverage: float
    c: float


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
    costs 1.
    """

    def __init__(self, points: Mapping[int, float], sequences: int = 1, row_multiple: int = 1) -> None:
        self.row_multiple = row_multiple
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
        slope = (self.points[high] - self.points[low]) / (high - low)
        return max(self.points[low] + slope * (rows - low), self.points[known[0]])


def estimate(method: str, alpha: float, match_rate: float, rounds: Seq[Sample], costs: Costs) -> Estimate:
    rounds = full(rounds, costs.sequences)
    drafted = sum(depth > 0 for r in rounds for depth in r.depths)
    return Estimate(method, alpha, match_rate, drafted / sum(len(r.depths) for r in rounds), costs.c or 0.0)


def predict(
    found: Estimate, curve: CostCurve, longest: int, sequences: int = 1, nodes: Callable[[int], int] = int
) -> list[Prediction]:
    """Every draft length k from 1 to ``longest``, ``nodes(k)`` tokens each: by default a chain. A round without a draft
    is a plain one."""
    predictions = []
    for k in range(1, longest + 1):
        cost = curve(sequences * (nodes(k) + 1))
        tokens = 1 - found.coverage + found.coverage * expected_tokens(found.match_rate, k)
        time = 1 - found.coverage + found.coverage * (k * found.c + cost)
        predictions.append(Prediction(found.method, k, found.match_rate, found.c, cost, tokens / time))
    return predictions


def recommend(
    predictions: Seq[Prediction],
    subsets: Seq[Subset] = (),
    options: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    margin: float = 1.02,
) -> dict[str, Any]:
    """The fastest prediction as a ``speculative_config``; plain decoding where nothing promises ``margin``. ``options``
    are those that a method was measured with: they belong to its figures."""
    candidates: list[Prediction | Subset] = [*predictions, *subsets]
    best = max(candidates, key=lambda p: p.speedup, default=None)
    if best is None or best.speedup < margin:
        return {"method": NONE}
    if isinstance(best, Subset):
        return {**with_layers(options.get(LAYERSKIP, {}), best.layers), "num_speculative_tokens": best.k}
    return {"method": best.method, **options.get(best.method, {}), "num_speculative_tokens": best.k}


def reach(found: Estimate, wanted: Seq[float] = (1.5, 2.0, 3.0)) -> dict[str, Any]:
    """What a chain of this drafter can come to where verification is free, and what a speed-up ``wanted`` would take:
    ``limit`` at the measured rate, ``rate`` needed at the measured c, ``c`` needed at the measured rate; None: no rate
    below 1, or no cost above 0, would do (Leviathan et al. 2023, theorem 3.8)."""

    def best(rate: float, c: float) -> float:
        return walltime_improvement(rate, best_gamma(rate, c), c)

    needs = []
    for speed in wanted:
        rates = [share / 1000 for share in range(1000) if best(share / 1000, found.c) >= speed]
        costs = [c / 1000 for c in range(1000) if best(min(found.match_rate, 0.999), c / 1000) >= speed]
        needs.append({"speedup": speed, "rate": min(rates, default=None), "c": max(costs, default=None)})
    return {"method": found.method, "limit": best(min(found.match_rate, 0.999), found.c), "needs": needs}


def with_layers(options: Mapping[str, Any], layers: Seq[int]) -> dict[str, Any]:
    """``layerskip`` with ``options`` and these layers, which take the place of a layer to leave at."""
    rest = {key: value for key, value in options.items() if key != "exit_layer"}
    return {"method": LAYERSKIP, **rest, "layers": list(layers)}


def theory_row(found: Estimate, longest: int) -> dict[str, Any]:
    """What Leviathan et al. 2023 say of the estimate where verification is free (section 3.5)."""
    return {**asdict(found), "best_gamma": best_gamma(found.match_rate, found.c, longest)}

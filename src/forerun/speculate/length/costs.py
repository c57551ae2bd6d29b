"""The measured price of a round: seconds of a verification by sequences and rows, of drafting by sequences and
levels."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from math import exp

Features = Callable[[float, float], tuple[float, float, float]]


def verification(sequences: float, rows: float) -> tuple[float, float, float]:
    """A forward has a price, each of its sequences and each of its rows."""
    return 1.0, sequences, rows


def drafting(sequences: float, levels: float) -> tuple[float, float, float]:
    """Drafting has a price, each of its levels and each sequence of a level."""
    return 1.0, levels, sequences * levels


class CostCurve:
    """Seconds as a function of (sequences, units), from recent measurements.

    A point that was measured often enough is worth its lower quartile, because what disturbs a measurement only
    lengthens it. An estimate is the least-squares plane in ``features`` through such points, corrected by how far
    the points near the one asked for are off it. ``prior`` gives the plane's coefficients, as shares of the cheapest
    point, where nothing else is known; units come in multiples of ``grain``.
    """

    WINDOW = 9
    ENOUGH = 3
    REFIT = 8
    """Measurements after which estimates are made anew; these cost host time, and prices move slowly."""

    def __init__(self, features: Features, prior: Seq[float], grain: int = 1) -> None:
        self.features = features
        self.prior = prior
        self.grain = grain
        self.points: dict[tuple[int, int], deque[float]] = {}
        self._new = 0
        self._plane: list[float] | None = None
        self._near: dict[int, list[tuple[int, float, float]]] = {}
        """Sequences -> (units, weight, distance from the plane) of the points that are sure."""
        self._estimates: dict[tuple[int, int], float] = {}
        self._lowest = 0.0

    def add(self, sequences: int, units: int, seconds: float) -> None:
        recent = self.points.setdefault((sequences, units), deque(maxlen=self.WINDOW))
        recent.append(seconds)
        self._new += 1 if len(recent) != self.ENOUGH else self.REFIT

    def known(self, sequences: int, units: int) -> int:
        """How many measurements are kept of exactly this point."""
        return len(self.points.get((sequences, units), ()))

    def estimate(self, sequences: int, units: int) -> float | None:
        """Seconds; None while no point has been measured often enough."""
        if self._new >= self.REFIT:
            self._fit()
        found = self._estimates.get((sequences, units))
        if found is not None or self._plane is None:
            return found
        width_n, width_u = 0.5 + 0.05 * sequences, 0.35 * self.grain + 0.03 * units
        total, bend = 1.0, 0.0
        for n, points in self._near.items():
            off = ((n - sequences) / width_n) ** 2
            if off < 9.0:
                for u, weight, residual in points:
                    share = weight * exp(-0.5 * (off + ((u - units) / width_u) ** 2))
                    total += share
                    bend += share * residual
        plane = _dot(self._plane, self.features(sequences, units))
        found = self._estimates[sequences, units] = max(plane + bend / total, 0.25 * self._lowest)
        return found

    def _fit(self) -> None:
        self._new = 0
        sure = {point: sorted(recent) for point, recent in self.points.items() if len(recent) >= self.ENOUGH}
        if not sure:
            return
        values = [recent[(len(recent) - 1) // 4] for recent in sure.values()]
        design = [self.features(*point) for point in sure]
        self._lowest = min(values)
        scale = min(value / _dot(row, self.prior) for value, row in zip(values, design))
        prior = [scale * share for share in self.prior]
        # What the measurements leave open follows the prior's slopes, with the level that was measured; and noise
        # must not make more work look cheaper.
        squares = [[1e-4, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
        sums = [0.0, 0.0, 0.0]
        total = 0.0
        weights = [float(len(recent)) for recent in sure.values()]
        for row, value, weight in zip(design, values, weights):
            total += weight
            residual = weight * weight * (value - _dot(row, prior))
            for i in range(3):
                sums[i] += residual * row[i]
                for j in range(3):
                    squares[i][j] += weight * weight * row[i] * row[j]
        plane = [p + step for p, step in zip(prior, _solve(squares, sums))]
        plane[1:] = [max(slope, 0.1 * p) for slope, p in zip(plane[1:], prior[1:])]
        plane[0] = sum(w * (v - _dot(r[1:], plane[1:])) for r, v, w in zip(design, values, weights)) / total
        self._plane = plane
        self._near, self._estimates = {}, {}
        for (n, u), row, value, weight in zip(sure, design, values, weights):
            self._near.setdefault(n, []).append((u, weight, value - _dot(row, plane)))


def _dot(row: Seq[float], coefficients: Seq[float]) -> float:
    return sum([a * b for a, b in zip(row, coefficients)])


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """The solution of a small system with a positive definite matrix; both arguments are overwritten."""
    size = len(right)
    for i in range(size):
        for k in range(i + 1, size):
            share = matrix[k][i] / matrix[i][i]
            for j in range(i, size):
                matrix[k][j] -= share * matrix[i][j]
            right[k] -= share * right[i]
    for i in reversed(range(size)):
        right[i] = (right[i] - _dot(matrix[i][i + 1 :], right[i + 1 :])) / matrix[i][i]
    return right


class DraftCost:
    """What drafting with one method costs: a curve, and a price for each token it has to catch up on first."""

    MANY = 32
    """From so many tokens on catching up is measured; fewer drown in what disturbs a measurement."""
    SURE = 3
    """Measurements of it that are believed whatever they say."""
    DEAR = 0.03
    """Before, a token costs at most this share of the shortest draft's price."""

    def __init__(self) -> None:
        self.curve = CostCurve(drafting, (0.3, 0.6, 0.1))
        self.per_token = 0.0
        self._extras: deque[float] = deque(maxlen=9)

    def add(self, sequences: int, levels: int, behind: int, guess: float, seconds: float) -> None:
        """A measurement. ``behind``: committed tokens that were new to the drafter beyond the last round's; ``guess``:
        the price without them."""
        if not behind:
            self.curve.add(sequences, levels, seconds)
        elif behind >= self.MANY:
            self._extras.append(max(0.0, seconds - guess) / behind)
            # The first ones may have had to build things, or to wake them.
            self.per_token = sorted(self._extras)[(len(self._extras) - 1) // 4]
            if len(self._extras) < self.SURE:
                self.per_token = min(self.per_token, self.DEAR * guess)

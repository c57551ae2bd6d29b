"""The measured price of a round: seconds of a verification by sequences and rows, of drafting by sequences and
levels."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from math import exp

import numpy as np

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
    SAMPLE = 4
    """Of the measurements of a point with a full window, one in so many is kept."""
    REFIT = 8
    """Measurements after which estimates are made anew; these cost host time, and prices move slowly."""

    def __init__(self, features: Features, prior: Seq[float], grain: int = 1) -> None:
        self.features = features
        self.prior = np.array(prior)
        self.grain = grain
        self.points: dict[tuple[int, int], deque[float]] = {}
        self._new = self._skipped = 0
        self._plane: list[float] | None = None
        self._near: dict[int, list[tuple[int, float, float]]] = {}
        """Sequences -> (units, weight, distance from the plane) of the points that are sure."""
        self._estimates: dict[tuple[int, int], float] = {}
        self._lowest = 0.0

    def add(self, sequences: int, units: int, seconds: float) -> None:
        recent = self.points.setdefault((sequences, units), deque(maxlen=self.WINDOW))
        if len(recent) == self.WINDOW:
            self._skipped += 1
            if self._skipped % self.SAMPLE:
                return
        recent.append(seconds)
        self._new += 1
        if len(recent) == self.ENOUGH or self._new >= self.REFIT:
            self._fit()

    def known(self, sequences: int, units: int) -> int:
        """How many measurements are kept of exactly this point."""
        return len(self.points.get((sequences, units), ()))

    def estimate(self, sequences: int, units: int) -> float | None:
        """Seconds; None while no point has been measured often enough."""
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
        plane = sum(a * b for a, b in zip(self._plane, self.features(sequences, units)))
        found = self._estimates[sequences, units] = max(plane + bend / total, 0.25 * self._lowest)
        return found

    def _fit(self) -> None:
        self._new = 0
        sure = {point: sorted(recent) for point, recent in self.points.items() if len(recent) >= self.ENOUGH}
        if not sure:
            return
        seconds = np.array([recent[(len(recent) - 1) // 4] for recent in sure.values()])
        weights = np.array([float(len(recent)) for recent in sure.values()])
        self._lowest = float(seconds.min())
        design = np.array([self.features(*point) for point in sure])
        prior = self._lowest * self.prior
        weighed = design * weights[:, None]
        # What the measurements leave open follows the prior's slopes, with the level that was measured; and noise
        # must not make more work look cheaper.
        ridge = np.diag([1e-4, 1.0, 1.0])
        plane = prior + np.linalg.solve(weighed.T @ design + ridge, weighed.T @ (seconds - design @ prior))
        plane[1:] = np.maximum(plane[1:], 0.1 * prior[1:])
        plane[0] = (weights @ (seconds - design[:, 1:] @ plane[1:])) / weights.sum()
        self._plane = plane.tolist()
        self._near, self._estimates = {}, {}
        for (n, u), weight, residual in zip(sure, weights.tolist(), (seconds - design @ plane).tolist()):
            self._near.setdefault(n, []).append((u, weight, residual))


class DraftCost:
    """What drafting with one method costs: a curve, and a price for each token it has to catch up on first."""

    def __init__(self) -> None:
        self.curve = CostCurve(drafting, (0.3, 0.6, 0.1))
        self.per_token = 0.0
        self._measured = False

    def add(self, sequences: int, levels: int, behind: int, guess: float, seconds: float) -> None:
        """A measurement. ``behind``: committed tokens that were new to the drafter beyond the last round's; ``guess``:
        the price without them."""
        if not behind:
            self.curve.add(sequences, levels, seconds)
            return
        extra = max(0.0, seconds - guess) / behind
        if self._measured:
            extra = self.per_token + 0.3 * (min(extra, 2 * self.per_token) - self.per_token)
        self.per_token, self._measured = extra, True

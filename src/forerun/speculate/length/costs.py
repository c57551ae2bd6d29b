"""The measured price of a round: seconds of a verification by sequences and rows, and of a draft step."""

from __future__ import annotations

from collections import deque

import numpy as np


class CostCurve:
    """Seconds as a function of (sequences, units), from recent measurements.

    A point that was measured often enough answers with its lower quartile, because what disturbs a measurement only
    lengthens it; any other with a least-squares plane through such points, kept non-decreasing in ``units``
    from the nearest measured point below.
    """

    WINDOW = 25
    ENOUGH = 3

    def __init__(self) -> None:
        self.points: dict[tuple[int, int], deque[float]] = {}
        self._typical: dict[tuple[int, int], float] = {}
        self._plane: np.ndarray | None = None

    def add(self, sequences: int, units: int, seconds: float) -> None:
        point = (sequences, units)
        self.points.setdefault(point, deque(maxlen=self.WINDOW)).append(seconds)
        recent = sorted(self.points[point])
        self._typical[point] = recent[len(recent) // 4]
        self._plane = None

    def known(self, sequences: int, units: int) -> int:
        """How many measurements there are of exactly this point."""
        return len(self.points.get((sequences, units), ()))

    def estimate(self, sequences: int, units: int) -> float | None:
        """Seconds; None while nothing at all has been measured."""
        if self.known(sequences, units) >= self.ENOUGH:
            return self._typical[sequences, units]
        if not self._typical:
            return None
        if self._plane is None:
            self._plane = self._fit()
        value = float(self._plane @ (1.0, sequences, units))
        below = [
            s
            for (n, u), s in self._typical.items()
            if n == sequences and u <= units and self.known(n, u) >= self.ENOUGH
        ]
        return max(value, max(below, default=0.0), 1e-9)

    def _fit(self) -> np.ndarray:
        """Plane through the measured points. A weak prior says: without other knowledge a row adds 3 % and a sequence
        5 % of the cheapest round."""
        sure = {point: s for point, s in self._typical.items() if self.known(*point) >= self.ENOUGH}
        chosen = sure or self._typical
        points = np.array([(1.0, n, u) for n, u in chosen])
        seconds = np.array(list(chosen.values()))
        base = seconds.min()
        prior = np.array([base, 0.05 * base, 0.03 * base])
        ridge = np.diag([1e-6, 1e-2, 1e-2])
        return prior + np.linalg.solve(points.T @ points + ridge, points.T @ (seconds - points @ prior))

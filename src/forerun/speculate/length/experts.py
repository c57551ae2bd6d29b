"""How many experts of a mixture a round reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from forerun.models.run.base import MixtureInfo
from forerun.theory import expected_experts


class ExpertReads:
    """Estimates how many experts of a mixture a round reads: the union of what its rows choose.

    Rows of one text choose more alike than chance. ``theory.expected_experts`` has the formula; its two overlaps are
    learnt from the experts that rounds read.
    """

    ROW = 0.06
    """Prior cost of a further row without its experts, in plain rounds."""
    WEIGHT = 4.0
    """How many rows the prior weighs, which is chance."""
    FADE = 0.98
    """Decay of the evidence per round."""
    TOLERANCE = (0.2, 0.07)
    """Ridge weights of the two coefficients in ``fitted``, rows and experts."""
    STEPS = 12
    """Bisections of ``learn``."""

    def __init__(self, mixture: MixtureInfo) -> None:
        self.mixture = mixture
        self.same_text = self.other_text = mixture.chosen / mixture.count
        """Fraction of a row's experts that another row chooses too: a row of its own text, of another text."""
        self._seen = [self.WEIGHT, self.WEIGHT]
        """Evidence of each, in rows."""

    def learn(self, rows: int, sequences: int, experts: int) -> None:
        """Count a round of so many rows that read so many ``experts``, summed over layers."""
        if not experts or rows < 2:
            return
        each, index = experts / self.mixture.layers, int(rows == sequences)
        low, high = self.mixture.chosen / self.mixture.count, 1.0
        for _ in range(self.STEPS):  # a larger overlap, fewer experts
            overlap = (low + high) / 2
            overlaps = (self.same_text, overlap) if index else (overlap, self.other_text)
            low, high = (overlap, high) if self._read(rows, sequences, *overlaps) > each else (low, overlap)
        seen = self._seen[index] = self.FADE * self._seen[index] + rows - 1
        name = "other_text" if index else "same_text"
        before = getattr(self, name)
        setattr(self, name, before + (rows - 1) / seen * ((low + high) / 2 - before))

    def _read(self, rows: float, sequences: int, same_text: float, other_text: float) -> float:
        return expected_experts(self.mixture.count, self.mixture.chosen, rows, same_text, sequences, other_text)

    def times(self, rows: float, sequences: int) -> float:
        """Expected experts of a round over those of one row."""
        return self._read(rows, sequences, self.same_text, self.other_text) / self.mixture.chosen

    def price(self, rows: float, sequences: int, experts: int = 0) -> float:
        """Cost of a round in plain rounds, by the bytes that it reads.

        ``experts``: how many it read, summed over layers; 0: as many as expected.
        """
        mixture = self.mixture
        read = experts / mixture.layers / mixture.chosen if experts else self.times(rows, sequences)
        return 1.0 + self.ROW * (rows - 1.0) + mixture.share * (read - 1.0)

    def fitted(self, points: Mapping[int, float], sequences: int) -> Callable[[int], float]:
        """``price`` by rows, its coefficients fitted to measured ``points`` (cost in plain rounds by rows).

        Ridge regression of relative errors, towards the prior coefficients.
        """
        prior = torch.tensor([self.ROW, self.mixture.share], dtype=torch.float64)

        def more(rows: int) -> list[float]:
            return [rows - sequences, (self.times(max(rows, sequences), sequences) - self.times(sequences, sequences))]

        prices = torch.tensor(list(points.values()), dtype=torch.float64)
        weights = torch.tensor([more(rows) for rows in points], dtype=torch.float64) / prices[:, None]
        ridge = torch.diag(torch.tensor(self.TOLERANCE, dtype=torch.float64))
        result = torch.linalg.lstsq(torch.cat([weights, ridge]), torch.cat([1 - 1 / prices, ridge @ prior])).solution
        row, experts = result.clamp(min=1e-3).tolist()
        return lambda rows: 1.0 + row * more(rows)[0] + experts * more(rows)[1]

    def state(self) -> list[float]:
        return [self.same_text, self.other_text]

    def restore(self, state: Any) -> None:
        """Raises TypeError or ValueError for anything but a ``state``."""
        self.same_text, self.other_text = (min(max(float(overlap), 0.0), 1.0) for overlap in state)

    def report(self, rows: Mapping[int, float]) -> dict[str, Any]:
        """As JSON: the mixture, the overlap of rows of one text, and by ``rows`` the experts that were read.

        Experts are summed over layers, and given over those of one row.
        """
        mixture = self.mixture
        one = mixture.layers * mixture.chosen
        return {
            "count": mixture.count, "chosen": mixture.chosen, "share": mixture.share, "again": self.same_text,
            "read": {count: experts / one for count, experts in rows.items()},
        }  # fmt: skip

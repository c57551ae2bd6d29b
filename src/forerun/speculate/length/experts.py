"""Which share of a mixture's experts a round reads: its rows read the union of theirs, and rows of one text choose more
alike than by chance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from forerun.models.base import MixtureInfo
from forerun.theory import expected_experts


class ExpertReads:
    """What rounds are expected to read: the shares of ``theory.expected_experts``, learnt from what rounds read."""

    ROW = 0.06
    """What a further row costs beside the experts that it reads, in plain rounds, as long as nothing was measured."""
    WEIGHT = 4.0
    """Rows that the expectation, mere chance, counts for."""
    FADE = 0.98
    """What a round leaves of the evidence before it."""
    HELD = (0.2, 0.07)
    """What relative error is as bad as parts of rows and of experts that are 1 off."""
    STEPS = 12
    """Halvings in search of a share."""

    def __init__(self, mixture: MixtureInfo) -> None:
        self.mixture = mixture
        self.again = self.common = mixture.chosen / mixture.count
        """The shares of a row's experts that another row chooses: of its text, and of another one."""
        self._seen = [self.WEIGHT, self.WEIGHT]
        """Rows that each is known from."""

    def learn(self, rows: int, sequences: int, experts: int) -> None:
        """A round of ``rows`` rows read so many ``experts``, those of all layers."""
        if not experts or rows < 2:
            return
        each, index = experts / self.mixture.layers, int(rows == sequences)
        low, high = self.mixture.chosen / self.mixture.count, 1.0
        for _ in range(self.STEPS):  # the more rows share, the fewer experts they read
            share = (low + high) / 2
            shares = (self.again, share) if index else (share, self.common)
            low, high = (share, high) if self._read(rows, sequences, *shares) > each else (low, share)
        seen = self._seen[index] = self.FADE * self._seen[index] + rows - 1
        name = "common" if index else "again"
        before = getattr(self, name)
        setattr(self, name, before + (rows - 1) / seen * ((low + high) / 2 - before))

    def _read(self, rows: float, sequences: int, again: float, common: float) -> float:
        return expected_experts(self.mixture.count, self.mixture.chosen, rows, again, sequences, common)

    def times(self, rows: float, sequences: int) -> float:
        """The experts that a round is expected to read, in those of one row."""
        return self._read(rows, sequences, self.again, self.common) / self.mixture.chosen

    def price(self, rows: float, sequences: int, experts: int = 0) -> float:
        """Of a round in plain ones, by the bytes that it reads: of one that read so many ``experts``, or as many as
        expected."""
        mixture = self.mixture
        read = experts / mixture.layers / mixture.chosen if experts else self.times(rows, sequences)
        return 1.0 + self.ROW * (rows - 1.0) + mixture.share * (read - 1.0)

    def fitted(self, points: Mapping[int, float], sequences: int) -> Callable[[int], float]:
        """The price by rows, as ``price``, with the parts of rows and of experts that come nearest to measured
        ``points``, plain rounds by rows: least squares of relative errors, held by the parts that are expected."""
        parts = torch.tensor([self.ROW, self.mixture.share], dtype=torch.float64)

        def more(rows: int) -> list[float]:
            return [rows - sequences, (self.times(max(rows, sequences), sequences) - self.times(sequences, sequences))]

        prices = torch.tensor(list(points.values()), dtype=torch.float64)
        weights = torch.tensor([more(rows) for rows in points], dtype=torch.float64) / prices[:, None]
        held = torch.diag(torch.tensor(self.HELD, dtype=torch.float64))
        result = torch.linalg.lstsq(torch.cat([weights, held]), torch.cat([1 - 1 / prices, held @ parts])).solution
        row, experts = result.clamp(min=1e-3).tolist()
        return lambda rows: 1.0 + row * more(rows)[0] + experts * more(rows)[1]

    def state(self) -> list[float]:
        return [self.again, self.common]

    def restore(self, state: Any) -> None:
        """Raises TypeError or ValueError for anything but a ``state``."""
        self.again, self.common = (min(max(float(share), 0.0), 1.0) for share in state)

    def report(self, rows: Mapping[int, float]) -> dict[str, Any]:
        """For readers: the mixture, the share that rows of one text have in common, and by ``rows`` the experts that
        were read, those of all layers, in those of one row."""
        mixture = self.mixture
        one = mixture.layers * mixture.chosen
        return {
            "count": mixture.count, "chosen": mixture.chosen, "share": mixture.share, "again": self.again,
            "read": {count: experts / one for count, experts in rows.items()},
        }  # fmt: skip

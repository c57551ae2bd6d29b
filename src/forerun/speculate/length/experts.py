"""How many experts of a mixture a round reads."""

from __future__ import annotations

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
    STEPS = 12
    """Bisections of ``learn``."""

    def __init__(self, mixture: MixtureInfo) -> None:
        self.mixture = mixture
        self.same_text = self.other_text = mixture.chosen / mixture.count
        """Fraction of a row's experts that another row chooses too: a row of its own text, of another text."""
        self._seen = [self.WEIGHT, self.WEIGHT]
        """Evidence of each, in rows."""

    def learn(self, rows: int, sequences: int, experts: int) -> None:
        """Count a round of this many rows that read this many ``experts``, summed over layers."""
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

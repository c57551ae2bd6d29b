"""Budgets that were chosen for some rounds."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from forerun.core.sequence import Sequence


@dataclass
class Plan:
    """Who drafts how far, and for how long."""

    budgets: dict[int, int] = field(default_factory=dict)
    """By sequence; empty: nobody drafts."""
    left: int = 0
    """For how many more rounds they hold."""
    promise: float = 1.0
    """Their expected speed over plain decoding."""
    batch: tuple[int, int] = (0, 0)
    """How many sequences they were made for, and the last one."""

    @property
    def rests(self) -> bool:
        return self.left > 0 and not self.budgets

    def fits(self, sequences: Seq[Sequence]) -> bool:
        """Whether it was made for about this batch."""
        return 4 * sum(sequence.id in self.budgets for sequence in sequences) > 3 * len(sequences)

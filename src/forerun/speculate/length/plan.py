"""Budgets that were chosen for some rounds."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from forerun.core.sequence import Sequence


@dataclass
class Plan:
    """Who drafts how far, and for how long."""

    budgets: dict[int, int] = field(default_factory=dict)
    """By sequence that decodes; empty: nobody drafts."""
    left: int = 0
    """For how many more rounds they hold."""
    promise: float = 1.0
    """Their expected speed over plain decoding."""
    batch: tuple[int, int] = (0, 0)
    """How many sequences a rest was last seen with, and the last one."""
    known: frozenset[int] = frozenset()
    """Those it was planned for."""

    @classmethod
    def rest(cls, rounds: int, sequences: Seq[Sequence]) -> Plan:
        """Nobody drafts for so long."""
        return cls({}, rounds, known=frozenset([sequence.id for sequence in sequences]))

    @property
    def rests(self) -> bool:
        return not self.budgets and self.left > 0

    def still(self, sequences: Seq[Sequence]) -> bool:
        """Whether one of those is here for whom it was planned. Newcomers are thought of when all of them have left."""
        batch = len(sequences), sequences[-1].id
        if batch != self.batch:
            if self.known.isdisjoint([sequence.id for sequence in sequences]):
                return False
            self.batch = batch
        return True

    def fits(self, sequences: Seq[Sequence]) -> bool:
        """Whether it was made for most of those who decode."""
        there = [sequence.id in self.budgets for sequence in sequences if sequence.scheduled == 1]
        return 4 * sum(there) > 3 * len(there) or not there

"""Budgets that were chosen for some rounds."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from forerun.core.sequence import Sequence
from forerun.core.tree import Verdict


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
    probes: bool = False
    """Made to learn what it costs: plain rounds to compare with come right after it."""
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


def decodes(verdicts: Seq[Verdict]) -> bool:
    """Whether nobody read a prompt."""
    return all(verdict.fed == 1 for verdict in verdicts)


def nobody(sequences: Seq[Sequence]) -> dict[int, int]:
    """No drafts for those who decode; who reads a prompt will be thought of when it has been read."""
    return {sequence.id: 0 for sequence in sequences if sequence.scheduled == 1}


@dataclass
class Doubt:
    """When the deepest drafts are tried again for the sake of their price: after so many rounds with shorter ones, and
    twice as many every time. The first of their kind are dear, as code and memory are new to the processor; who
    believes that never looks again."""

    gap: int = 64
    left: int = 64

    def calm(self) -> None:
        """They are drafted anyway."""
        self.left = self.gap

    def due(self, rounds: int, may: bool) -> bool:
        """Whether now, ``rounds`` later; not unless it ``may`` be."""
        self.left -= rounds
        if self.left > 0 or not may:
            return False
        self.gap *= 2
        self.left = self.gap
        return True


@dataclass
class Coasting:
    """Rounds for which a plan goes on without being accounted for, as long as tokens come as they did before."""

    left: int = 0
    gone: int = 0
    expected: float = 0.0
    """Tokens of a round at which nobody gets suspicious."""
    patience: float = 0.0
    slack: float = 0.0
    """How many tokens may be missing."""

    SHARE = 0.85
    PATIENCE = 4.0

    @classmethod
    def over(cls, rounds: int, sequences: int, tokens: float) -> Coasting:
        """For so many rounds, after some that brought ``tokens`` each; luck evens out over sequences."""
        patience = cls.PATIENCE * sequences**0.5
        return cls(rounds, 0, cls.SHARE * tokens, patience, patience)

    def see(self, tokens: int) -> None:
        """One round was like that."""
        self.left, self.gone = self.left - 1, self.gone + 1
        self.slack = min(self.slack + tokens - self.expected, self.patience)
        if self.slack < 0.0:
            self.left = 0

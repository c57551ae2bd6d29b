"""What recent rounds say about drafts: how often one is made, and how often each of its positions is accepted."""

from __future__ import annotations

from collections.abc import Sequence as Seq


class Belief:
    """Counts by depth. A position counts as tested when everything before it was accepted."""

    def __init__(self, depth: int) -> None:
        self.tested = [0.0] * depth
        self.matched = [0.0] * depth

    def learn(self, tested: int, matched: int) -> None:
        """One draft: its first ``tested`` positions were judged, the first ``matched`` accepted."""
        for depth in range(min(tested, len(self.tested))):
            self.tested[depth] += 1.0
            self.matched[depth] += depth < matched

    def fade(self, share: float) -> None:
        """Keep only ``share`` of the evidence."""
        self.tested = [share * count for count in self.tested]
        self.matched = [share * count for count in self.matched]

    def loosen(self, most: float) -> None:
        """Let the evidence weigh no more than ``most`` tests, so that news is believed."""
        if self.tested[0] > most:
            self.fade(most / self.tested[0])

    def rates(self, prior: Seq[float], weight: float) -> list[float]:
        """Chance of acceptance by depth, where ``prior`` counts as ``weight`` tests."""
        return [(m + weight * p) / (t + weight) for m, t, p in zip(self.matched, self.tested, prior)]


class MethodBelief(Belief):
    """All sequences' drafts of one method together; at first, ``rate`` is believed as if from ``weight`` tests."""

    def __init__(self, depth: int, rate: float, weight: float) -> None:
        super().__init__(depth)
        self.weight = weight
        self.tested[0], self.matched[0] = weight, weight * rate
        self.asked = [1.0] * depth
        self.made = [1.0] * depth

    def learn_made(self, asked: int, made: int) -> None:
        """A draft of depth ``asked`` was asked for; it got ``made``."""
        for depth in range(asked):
            self.asked[depth] += 1.0
            self.made[depth] += depth < made

    def fade(self, share: float) -> None:
        super().fade(share)
        self.asked = [share * count for count in self.asked]
        self.made = [share * count for count in self.made]

    def acceptance(self) -> list[float]:
        """Chance of acceptance by depth; each depth starts from what the one before it found."""
        rates = [self.matched[0] / self.tested[0]]
        for matched, tested in zip(self.matched[1:], self.tested[1:]):
            rates.append((matched + self.weight * rates[-1]) / (tested + self.weight))
        return rates

    def existence(self) -> list[float]:
        """By depth, the share of drafts that get there."""
        return [made / asked for made, asked in zip(self.made, self.asked)]

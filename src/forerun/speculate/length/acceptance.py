"""How many tokens a draft is expected to bring, by depth: of a method, and of one sequence."""

from __future__ import annotations

from collections.abc import Sequence


class Acceptance:
    """What drafts bring by depth, from recent rounds.

    ``rates``: given that all before was kept, the chance that the draft has a token at this depth and that it is kept.
    ``existence``: given that the draft got there, kept or not, the chance that it has a token there, which costs a row.
    Expectations count for ``weight`` drafts; a draft leaves ``fade`` of the evidence before it, expectations included.
    """

    FIRST = 0.6
    """The rate of a drafter that nothing is known about."""
    HALF_LIFE = 256
    """Plain rounds in which half of the evidence is forgotten while a drafter waits."""
    LEAST = 0.5
    """What an expectation counts for at least."""

    def __init__(self, depth: int, weight: float = 3.0, fade: float = 0.95, first: float = FIRST) -> None:
        self.weight = weight
        self.fade = fade
        self.first = first
        self._first = weight
        self.reached = [0.0] * depth
        self.kept = [0.0] * depth
        self.asked = [0.0] * depth
        self.made = [0.0] * depth

    def learn(self, asked: int, made: int, kept: int) -> None:
        """One draft: ``asked`` tokens deep, ``made`` deep, of which ``kept`` were accepted."""
        fade = self.fade
        self._first = max(fade * self._first, self.LEAST)
        for depth in range(min(asked, made + 1, len(self.asked))):
            self.asked[depth] = fade * self.asked[depth] + 1.0
            self.made[depth] = fade * self.made[depth] + (depth < made)
            if depth <= kept:
                self.reached[depth] = fade * self.reached[depth] + 1.0
                self.kept[depth] = fade * self.kept[depth] + (depth < kept)

    def loosen(self, most: float) -> None:
        """Let the evidence count for at most so many drafts, so that new results change the expectation."""
        for counts, hits in ((self.reached, self.kept), (self.asked, self.made)):
            for depth, count in enumerate(counts):
                if count > most:
                    counts[depth], hits[depth] = most, hits[depth] * most / count

    def forget(self, rounds: int) -> None:
        """So many plain rounds went by without a draft."""
        left = 0.5 ** (rounds / self.HALF_LIFE)
        for counts in (self.reached, self.kept, self.asked, self.made):
            counts[:] = [left * count for count in counts]
        self._first = self.weight + left * (self._first - self.weight)

    def rates(self, expected: Sequence[float] | None = None) -> list[float]:
        """``expected``: the rates without evidence; None: at every depth that of the depth before."""
        if expected is not None:
            weight = self.weight
            return [(hit + weight * rate) / (n + weight) for hit, n, rate in zip(self.kept, self.reached, expected)]
        return self._follow(self.reached, self.kept, self.first)

    def existence(self) -> list[float]:
        return self._follow(self.asked, self.made, 1.0)

    def _follow(self, counts: Sequence[float], hits: Sequence[float], before: float) -> list[float]:
        chances = []
        for count, hit in zip(counts, hits):
            before = (hit + self._first * before) / (count + self._first)
            chances.append(before)
        return chances

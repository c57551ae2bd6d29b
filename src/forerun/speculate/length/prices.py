"""What rounds cost on a machine that is faster and slower by turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from math import ceil
from typing import NamedTuple

from forerun.speculate.length.base import Seconds, Setting
from forerun.speculate.length.costs import CostCurve, DraftCost, verification


class Drafting(NamedTuple):
    """What one method did in a round."""

    method: str
    sequences: int
    levels: int
    behind: int
    """Committed tokens that it had to catch up on first, all sequences together."""


class Prices:
    """Seconds of rounds, as if the machine were always as fast as when plain decoding was first measured.

    A round with drafts is compared with the plain rounds around it: its measurement counts once two of them have
    followed, and not if they say that the machine has changed in between. Rounds with drafts alone cannot tell
    a slow machine from a dear draft.
    """

    SURE = 3
    """Plain rounds that must have been measured for about as many sequences."""
    RECENT = 3
    """The present pace is the median of so many plain rounds."""
    BLOCK = 8
    """Of a row of rounds with drafts the last so many count. A longer one's start was too long ago to compare."""
    AGREE = (0.6, 1.7)
    """How the pace after such a row may compare with the one before."""
    SETTLED = 8
    """Plain rounds after which it no longer shows that there were drafts before."""
    WAKING = 2
    """Rounds with drafts, after a rest, that are dearer than later ones."""
    CHILL = (1.0, 1.5)
    """Limits of what is believed of the first plain rounds."""

    def __init__(self, setting: Setting) -> None:
        self.multiple = setting.row_multiple
        self.verify = CostCurve(verification, (1.0, 0.05, 0.03), setting.row_multiple)
        self.draft = {method: DraftCost() for method in setting.nodes}
        self.pace = 1.0
        """How slow the machine is at present; prices are what they would be at 1."""
        self.since = 0
        """Rounds with drafts since two plain ones in a row."""
        self.streak = 0
        """Plain rounds since the last one with drafts."""
        self.chill: float | None = None
        """How much slower the first plain rounds after drafts are than later ones: a drafter fills the processor's
        caches with its own things."""
        self._cold: float | None = None
        self._recent: deque[float] = deque(maxlen=self.RECENT)
        self._block: list[tuple[int, int, float, float, Seq[Drafting]]] = []
        self._before = 1.0
        self._waking = 0

    def rows(self, count: float) -> int:
        """What so many rows are padded to."""
        return ceil(count / self.multiple - 1e-6) * self.multiple

    def round(self, count: int, rows: float) -> float:
        """Expected seconds of a verification and its acceptance."""
        found = self.verify.estimate(count, self.rows(rows))
        return found if found is not None else 1.0

    def drafting(self, method: str, sequences: int, levels: int, behind: int = 0) -> float:
        """Expected seconds of drafting."""
        cost = self.draft[method]
        known = cost.curve.estimate(sequences, levels)
        return (known if known is not None else 0.1 * levels * self.round(1, 1)) + cost.per_token * behind

    def untried(self, method: str) -> bool:
        """Whether no draft of this method has a price."""
        return self.draft[method].curve.estimate(1, 1) is None

    def sure(self, count: int) -> bool:
        """Whether plain decoding of about so many sequences has been measured."""
        near = range(count - count // 4, count + count // 4 + 1)
        return sum(self.verify.known(n, self.rows(n)) for n in near) >= self.SURE

    @property
    def wait(self) -> bool:
        """Whether measured drafts wait for plain rounds."""
        return bool(self._block) or (self._cold is not None and self.chill is None)

    @property
    def rested(self) -> bool:
        """Whether the last rounds were plain, more of them than it takes to price drafts."""
        return not self.since and self.streak > 2

    def plain(self, count: int, seconds: float) -> None:
        """A plain round was measured; ``streak`` says which one after drafts it is."""
        rows = self.rows(count)
        if self.streak == 1:
            self._recent.clear()
        else:
            self.since = 0
        known = self.verify.known(count, rows)
        if known >= self.SURE or (not known and self.sure(count)):
            self._track(seconds / self.round(count, rows))
        # Between the chill of drafts and what follows it the present pace is not known.
        if known < self.SURE or (known < self.verify.WINDOW and self.streak > self.SETTLED):
            self.verify.add(count, rows, seconds / self.pace)

    def _track(self, ratio: float) -> None:
        settled = self.streak > self.SETTLED
        if 2 < self.streak <= self.SETTLED:
            return
        if self.streak == self.SETTLED + 1:
            self._recent.clear()
        self._recent.append(ratio)
        pace = sorted(self._recent)[(len(self._recent) - 1) // 2]
        if settled:
            self.pace = pace
            if self._cold is not None and len(self._recent) == self.RECENT:
                chill = min(max(self._cold / pace, self.CHILL[0]), self.CHILL[1])
                before = self.chill or 1.0
                self.chill = before + 0.3 * (chill - before)
                self._cold = None
        elif self.streak == 2:
            self._cold = pace
            if self.chill is not None:
                self.pace = pace / self.chill
        missed = settled and self._cold is None
        if self._block and self.streak > 1 and (missed or self.chill is not None):
            self._commit()

    def drafted(self, count: int, rows: int, seconds: Seconds, parts: Seq[Drafting]) -> None:
        """A round with drafts was measured."""
        cold = self.rested
        self.since += 1
        self.streak = 0
        if not self._block:
            self._before = self.pace
        if cold:
            self._waking = self.WAKING
        self._waking -= 1
        # Of the first rounds only what they caught up on is kept.
        late = self._waking < 0
        if late or any(part.behind for part in parts):
            self._block.append(
                (count, self.rows(rows), seconds.verify + seconds.accept if late else 0.0, seconds.draft, parts)
            )
        if len(self._block) > 2 * self.BLOCK:
            del self._block[: self.BLOCK]

    def _commit(self) -> None:
        block, self._block = self._block[-self.BLOCK :], []
        change = self.pace / self._before
        if not self.AGREE[0] <= change <= self.AGREE[1]:
            return
        pace = (self.pace * self._before) ** 0.5
        for count, rows, verified, drafted, parts in block:
            if verified:
                # More rows never cost less than none.
                self.verify.add(count, rows, max(verified / pace, self.round(count, count)))
            guesses = [self.drafting(*part[:3]) for part in parts]
            for part, guess in zip(parts, guesses):
                # Methods that drafted together share the time as their estimates say.
                self.draft[part.method].add(*part[1:], guess, drafted / pace * guess / sum(guesses))

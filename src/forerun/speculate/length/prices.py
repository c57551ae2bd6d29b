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
    AGREE = 0.15
    """How much the pace may differ before and after such a row."""

    def __init__(self, setting: Setting) -> None:
        self.multiple = setting.row_multiple
        self.verify = CostCurve(verification, (1.0, 0.05, 0.03), setting.row_multiple)
        self.draft = {method: DraftCost() for method in setting.nodes}
        self.pace = 1.0
        """How slow the machine is at present; prices are what they would be at 1."""
        self.since = 0
        """Rounds with drafts since the last plain one."""
        self._recent: deque[float] = deque(maxlen=self.RECENT)
        self._block: list[tuple[int, int, float, float, Seq[Drafting]]] = []
        self._length = 0
        self._before = 1.0

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
        return bool(self._block)

    def plain(self, count: int, seconds: float) -> None:
        """A plain round was measured."""
        rows = self.rows(count)
        if self.since:
            self._recent.clear()
            self.since = 0
        known = self.verify.known(count, rows)
        if known >= self.SURE or (not known and self.sure(count)):
            self._recent.append(seconds / self.round(count, rows))
            self.pace = sorted(self._recent)[(len(self._recent) - 1) // 2]
            if self._block and len(self._recent) > 1:
                self._commit()
        if known < self.verify.WINDOW:
            self.verify.add(count, rows, seconds / self.pace)

    def drafted(self, count: int, rows: int, seconds: Seconds, parts: Seq[Drafting]) -> None:
        """A round with drafts was measured."""
        self.since += 1
        if not self._block:
            self._before, self._length = self.pace, 0
        self._length += 1
        self._block.append((count, self.rows(rows), seconds.verify + seconds.accept, seconds.draft, parts))
        if len(self._block) > 2 * self.BLOCK:
            del self._block[: self.BLOCK]

    def _commit(self) -> None:
        block, self._block = self._block[-self.BLOCK :], []
        pace = self.pace
        if self._length <= self.BLOCK:
            if abs(pace / self._before - 1.0) > self.AGREE:
                return
            pace = (pace * self._before) ** 0.5
        for count, rows, verified, drafted, parts in block:
            # More rows never cost less than none.
            self.verify.add(count, rows, max(verified / pace, self.round(count, count)))
            guesses = [self.drafting(*part[:3]) for part in parts]
            for part, guess in zip(parts, guesses):
                # Methods that drafted together share the time as their estimates say.
                self.draft[part.method].add(*part[1:], guess, drafted / pace * guess / sum(guesses))

"""Rest: rounds in which nothing is done for speculation, because it has not paid.

Where drafts do not pay, the plan makes none. What is left is the work for them: texts are looked up, and plans are
made. So the clock decides: rounds with this work are compared with plain ones that follow at once, and the host's part
of it by itself. Hidden states are kept at rest, too: without them a head would begin anew, and be wrong more often for
16 tokens.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from math import exp, inf, log
from statistics import median


class Rest:
    """Whether batches of about one size rest now."""

    BLOCK, CHECK, COLD = 32, 8, 2
    """Rounds with speculation that are compared, and those at rest that they are compared with, after a few that find
    cold caches."""
    TRIAL, LONGER = 0.01, 4
    """What the block after a rest may cost, in rounds at rest; each rest in vain is longer, up to this many times."""
    APART, MORE = 64, 20.0
    """Rounds between comparisons where speculation pays; multiplied by this where it is twice as fast."""
    WORSE, CLEAR = 0.98, 1.05
    """Speeds over rounds at rest. Below the first they rest; above the second they are compared seldom."""
    HOST = 0.5
    """Weight of a comparison in ``host``."""
    NEW, DOUBT, MOST = 0.1, 3, 0.1
    """Least weight of a comparison in ``rounds``; how many its first value of 0 weighs; the most that one says, in
    logarithms: other programs disturb some."""
    FOUND = 32
    """Rounds by which a gained round shortens a rest."""
    FAR = 1.3
    """A round counts as at most this many times as slow as usual."""

    def __init__(self) -> None:
        self.resting = False
        self.host, self.rounds = 0.0, 0.0
        """The parts of ``extra``: by the seconds of acceptance and of the host, which are few and so disturbed little,
        and by those of whole rounds beyond these."""
        self.gain = 1.0
        """By the last comparison, the speed of rounds with speculation over those at rest."""
        self._left = self.BLOCK
        self._since = 0
        """Rounds with speculation since the last comparison or rest."""
        self._compared = 0
        self._free = False
        """Whether the work for speculation costs next to nothing."""
        self._paid = False
        """Whether that comparison was in favour of speculation."""
        self._work: deque[tuple[float, float, float, float]] = deque(maxlen=self.BLOCK)
        """What ``observe`` was given in rounds with speculation that were not compared yet."""
        self._slow: deque[tuple[float, float]] = deque(maxlen=self.CHECK)
        """Of the last plain rounds at rest, the seconds and those of the host over the price."""
        self._vain = 0
        """How many rests have followed each other."""

    def shorten(self) -> None:
        """Another kind of text may come: the rest ends soon."""
        self._left = min(self._left, self.BLOCK)

    def check(self) -> None:
        """Rounds with speculation have become slower: they are compared now."""
        if not self.resting:
            self._since, self._left = sys.maxsize, 1

    def skip(self) -> None:
        """A round that also read a prompt: it is as long as others, but not compared."""
        if not self.comparing and (self.resting or len(self._work) >= self.CHECK):
            self._left = max(1, self._left - 1)

    @property
    def comparing(self) -> bool:
        """Whether rounds at rest are compared with those before."""
        return self.resting and bool(self._work)

    @property
    def extra(self) -> float:
        """What the work for speculation adds to a round of the same rows at rest: the log of the seconds."""
        return self.host + self.rounds

    def observe(self, plain: float, price: float, seconds: float, host: float) -> None:
        """Learns that a round took ``seconds``.

        Args:
            plain: seconds in which plain rounds would have brought its tokens, by measured prices.
            price: its own seconds, by these prices.
            seconds: those that passed.
            host: those of acceptance and of the host's work.
        """
        self._left -= 1
        if not self.resting:
            self._work.append((plain, price, seconds, host))
            self._since += 1
        elif plain == price:
            self._slow.append((seconds / price, host / price))
        elif self._slow and not self._work:  # what a look-up brings by the clock
            slow = median([slow for slow, _ in self._slow])
            self._left -= int(self.FOUND * max(0.0, plain / price - seconds / price / slow))
        if self._left > 0:
            return
        if not self.resting:
            gain = self._gain()
            more = self.MORE * max(0.0, gain - 1.0, 0.5 * self._free)
            enough = self.APART * (1.0 + more) if self._paid or gain > self.CLEAR else 0.0
            self.resting = self._since >= enough
            self._left = self.CHECK + self.COLD if self.resting else self.BLOCK
            self._slow.clear()
        elif not self._work or not self._slow:  # a rest has ended, or each round at rest had a draft to verify
            self._work.clear()
            self.resting, self._left, self._since = False, self.BLOCK, 0
        else:
            self._compare()
            self._decide(self._gain())
            self._work.clear()

    def _decide(self, gain: float) -> None:
        self.gain = gain
        # Where drafts lost and the work for them costs nothing, the plan makes fewer; a rest would save nothing.
        self._free = exp(-self.extra) >= self.WORSE
        self._paid = self._free or gain >= self.WORSE
        self.resting = not self._paid
        self._since = 0
        self._vain = 0 if self._paid else self._vain + 1
        self._left = self.BLOCK
        if not self._paid:
            self._left = int(min(self._vain, self.LONGER) * self.BLOCK * (1.0 - gain) / self.TRIAL)

    def _compare(self) -> None:
        slow, at_rest = (median(each) for each in zip(*self._slow))
        if hosts := [host / price for plain, price, _, host in self._work if plain == price]:
            host = log(1.0 + max(0.0, median(hosts) - at_rest) / slow)
            self.host += (self.HOST if self._compared else 1.0) * (host - self.host)
        usual = median([seconds / price for _, price, seconds, _ in self._work])
        seconds = sum([min(seconds, self.FAR * usual * price) for _, price, seconds, _ in self._work])
        apart = log(seconds / sum([price for _, price, *_ in self._work]) / slow) - self.extra
        self._compared += 1
        weight = max(self.NEW, 1.0 / (self.DOUBT + self._compared))
        self.rounds += weight * max(-self.MOST, min(apart, self.MOST))

    def state(self) -> list[float]:
        """What comparisons have said, for ``restore``."""
        return [self.host, self.rounds, self._compared, self.gain]

    def restore(self, state: Sequence[float]) -> None:
        """Goes on as after an earlier process's last comparison. Raises TypeError or ValueError for no ``state``."""
        host, rounds, compared, gain = map(float, state)
        if not (abs(host) < 1.0 and abs(rounds) < 1.0 and compared >= 0 and 0.0 < gain < inf):
            raise ValueError("not what comparisons say")
        self.host, self._compared = max(0.0, host), int(compared)
        self.rounds = max(-self.host, rounds)  # work that saves time was noise
        if compared:
            self._decide(gain)
            self._paid = False  # it is compared again soon, unless drafts pay clearly

    def _gain(self) -> float:
        """The speed of the rounds with speculation over those at rest."""
        return exp(-self.extra) * sum([plain for plain, *_ in self._work]) / sum([price for _, price, *_ in self._work])

"""A machine of two cores on which ``Threads`` decides: its clock, its ``/proc/stat``, and other programs."""

import random
from bisect import bisect_left

from forerun.core import threads
from forerun.core.threads import CoresLeft, Threads

TICK = 0.01


class Machine:
    """``others(time)`` is how many cores others want, ``lower`` whether they have lower priority. ``start``: factors of
    the first rounds, which are slow by themselves. The kernel counts in ticks, which are drawn."""

    def __init__(self, monkeypatch, others, *, lower=False, start=(), seed=0):
        self.others, self.lower, self.start = others, lower, list(start)
        self.now, self.own, self.noise = 0.0, 0.0, random.Random(seed)
        self.ticks = {"user": 0, "nice": 0}
        self.owed = {"user": 0.0, "nice": 0.0}
        monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
        monkeypatch.setattr(threads.os, "sysconf", lambda _: round(1 / TICK))
        monkeypatch.setattr(threads.os, "getpriority", lambda *_: 0)
        monkeypatch.setattr(threads.time, "process_time", lambda: self.own)
        self.policy = Threads(2, cores_left=CoresLeft(self, lambda: self.now))
        self.history = []
        """Of every round: when it began, its seconds and its threads."""

    def read_text(self, _):
        """``/proc/stat``."""
        return f"cpu0 {self.ticks['user']} {self.ticks['nice']} 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0 0 0\n"

    def _count(self, kind, seconds):
        self.owed[kind] += seconds / TICK
        whole = int(self.owed[kind])
        drawn = max(0, whole + self.noise.choice((-1, 0, 0, 1)) * (whole > 2))
        self.ticks[kind] += drawn
        self.owed[kind] -= drawn

    def _seconds(self, count):
        """Two threads on fewer than two free cores wait for each other; lower priority still takes its turns."""
        base = 0.006 if count == 1 else 0.0036
        wanted = self.others(self.now)
        if wanted and self.noise.random() < (0.1 if count == 1 else 0.3) * min(1.0, wanted):
            base *= self.noise.uniform(2, 150) if count == 2 else 1.5
        return base * self.noise.uniform(0.95, 1.1) * (self.start.pop(0) if self.start else 1.0)

    def run(self, until, rows=1):
        while self.now < until:
            count = self.policy.count
            seconds = self._seconds(count)
            self.history.append((self.now, seconds, count))
            self._count("user", 0.9 * count * seconds)
            self._count("nice" if self.lower else "user", self.others(self.now) * seconds)
            self.own += 0.9 * count * seconds
            self.now += seconds
            self.policy.observe(rows, seconds)

    def wait(self, until):
        """No round: nothing is asked."""
        self._count("nice" if self.lower else "user", self.others(self.now) * (until - self.now))
        self.now = until

    def share(self, begin, end, count=2):
        """Of the time of rounds in between, how much ran on so many threads."""
        first, last = (bisect_left(self.history, (time,)) for time in (begin, end))
        rounds = [(seconds, threads) for _, seconds, threads in self.history[first:last]]
        total = sum(seconds for seconds, _ in rounds)
        return sum(seconds for seconds, threads in rounds if threads == count) / total if total else 0.0

    def back(self, since):
        """Seconds until it computes on two threads for half a second, nine tenths of the time."""
        return next((t / 20 for t in range(100) if self.share(since + t / 20, since + t / 20 + 0.5) >= 0.9), 99)

"""How many threads compute: the cores that this process may use, and fewer while others need them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from forerun.core.errors import ConfigError, shown

log = logging.getLogger(__name__)

AUTO = "auto"
MOST_THREADS = 4096
"""More than a machine has; OpenMP ends a process without a word where it cannot make as many."""
PROBE = 4
"""Rounds of a probe."""
FIRST = 16
"""Rounds before the first probe at a new count."""
PRICE = 50.0
"""A probe that lost a second is followed by the next one after so many seconds: probes cost 2% at most."""
GAIN = 0.93
"""Another count is taken where its rounds take at most so much of the present one's."""
SPIKE = 4.0
"""A round that takes so many times the usual is a reason to try fewer threads at once."""
RECENT, USUAL = 1 / 16, 1 / 8
"""Weight of a round in the mean cost, and in what is usual for its kind."""
WINDOW, STALE = 0.1, 1.0
"""Seconds over which processor time is counted; a longer window than the second says little about now."""
LEEWAY = 1.25
"""Threads for each core that others leave."""


def usable_cores(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Processors that the affinity mask and the quotas of control groups (version 2) leave; at least 1.

    ``groups`` is where the groups are mounted, ``own`` the file that names this process's."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    try:
        name = next(line[3:] for line in own.read_text(encoding="utf-8").splitlines() if line.startswith("0::"))
    except (OSError, UnicodeDecodeError, StopIteration):
        return cores
    folder = groups / name.strip().lstrip("/")
    for group in (folder, *folder.parents):
        if not group.is_relative_to(groups):
            break
        try:
            quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
            cores = min(cores, -(-int(quota) // int(period)))
        except (OSError, ValueError):  # no limit: there is no such file, or it says "max"
            continue
    return max(1, cores)


class CoresLeft:
    """How many of the cores that this process may use other programs leave, from ``/proc/stat`` (Linux).

    Programs of a lower priority (a positive niceness) leave theirs, unless this process has a positive one, too."""

    def __init__(self, stat: Path = Path("/proc/stat"), clock: Callable[[], float] = time.monotonic) -> None:
        self.stat, self.clock = stat, clock
        self.before: tuple[float, float, float] | None = None
        """Time, and the processor seconds of all programs and of this process until then."""
        self.next = 0.0
        self.cores: set[int] = set()

    def __call__(self) -> float | None:
        """Once in ``WINDOW`` seconds the mean of that window; else, and where the system does not tell, None."""
        now = self.clock()
        if now < self.next:
            return None
        self.next = now + WINDOW
        if (used := self._used()) is None:
            self.next = float("inf")
            return None
        own, before = time.process_time(), self.before
        self.before = now, used, own
        if before is None or now - before[0] > STALE:
            return None
        return len(self.cores) - max(0.0, (used - before[1]) - (own - before[2])) / (now - before[0])

    def _used(self) -> float | None:
        try:
            self.cores = os.sched_getaffinity(0)
            lines = [line.split() for line in self.stat.read_text("ascii").splitlines() if line.startswith("cpu")]
            counts = [[int(n) for n in line[1:]] for line in lines if line[0][3:] and int(line[0][3:]) in self.cores]
            user, nice, system, _, _, irq, softirq, steal = (sum(column) for column in list(zip(*counts))[:8])
            lower = nice if os.getpriority(os.PRIO_PROCESS, 0) > 0 else 0
            return (user + lower + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, AttributeError):  # another system
            return None


def check_threads(value: object) -> int | None:
    """``value`` if it is a number of threads; None for "auto". Raises ConfigError for anything else."""
    if value == AUTO:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_THREADS:
        return value
    raise ConfigError(f"threads must be {AUTO!r} or from 1 to {MOST_THREADS}, not {shown(value)}")


class Threads:
    """Chooses the number of threads of the next round, up to ``most``, from what rounds took.

    A round's cost is its seconds against what is usual for its number of rows at the present count (``home``). Now and
    then a few rounds run at a neighbouring count, and the cheaper one becomes home. A round that takes several times
    the usual starts a probe below at once. When ``cores_left`` says that other programs leave more or fewer cores than
    before, as many threads become home. Tokens do not depend on the choice.
    """

    def __init__(
        self, most: int, *, fixed: bool = False, cores_left: Callable[[], float | None] = lambda: None
    ) -> None:
        self.counts = [most] if fixed else sorted({most, *(1 << i for i in range(most.bit_length()) if 1 << i < most)})
        self.home = self.fitting = len(self.counts) - 1
        self.cores_left = cores_left
        self.usual: dict[int, float] = {}
        """Seconds by the bit length of the number of rows, outliers clipped."""
        self.cost = 1.0
        """Mean cost of recent rounds at home."""
        self.probing: int | None = None
        self.costs: list[float] = []
        """Of the probe's rounds."""
        self._start(FIRST)

    def _start(self, rounds: float) -> None:
        """Let so many usual rounds pass before each neighbour is probed."""
        self.waits = {-1: rounds, 1: rounds}

    @property
    def count(self) -> int:
        """Threads of the next round."""
        return self.counts[self.home if self.probing is None else self.probing]

    def observe(self, rows: int, seconds: float) -> None:
        """A round of ``rows`` rows at ``count`` threads took so many seconds."""
        if len(self.counts) == 1 or seconds <= 0.0:
            return
        if (left := self.cores_left()) is not None and self._follow(left):
            return
        kind = rows.bit_length()
        usual = self.usual.get(kind)
        if self.probing is not None:
            if usual is not None:
                self._probe(seconds / usual)
            return
        if usual is None:
            self.usual[kind] = seconds
            return
        cost = seconds / usual
        self.usual[kind] = usual + USUAL * (min(seconds, 2 * usual) - usual)
        self.cost += RECENT * (cost - self.cost)
        for side in self.waits:
            self.waits[side] -= cost
        if cost > SPIKE and self.home > 0:
            self._begin(-1)
            return
        for side, wait in self.waits.items():
            if wait <= 0 and 0 <= self.home + side < len(self.counts):
                self._begin(side)
                return

    def _follow(self, left: float) -> bool:
        """Whether another count becomes home, as the cores that are left fit another one than before."""
        before, self.fitting = self.fitting, max(0, sum(count <= LEEWAY * left for count in self.counts) - 1)
        if self.fitting in (before, self.home):
            return False
        counts = self.counts[self.fitting], self.counts[self.home]
        log.info("%d threads instead of %d: other programs leave %.1f cores", *counts, left)
        self.home, self.probing, self.usual, self.cost = self.fitting, None, {}, 1.0
        self._start(FIRST)
        return True

    def _begin(self, side: int) -> None:
        self.probing, self.costs = self.home + side, []

    def _probe(self, cost: float) -> None:
        assert self.probing is not None
        self.costs.append(cost)
        lost = sum(self.costs) - len(self.costs) * self.cost
        hopeless = cost > SPIKE * self.cost
        if len(self.costs) < PROBE and not hopeless:
            return
        mean = sum(self.costs) / len(self.costs)
        if mean < GAIN * self.cost and not hopeless:
            before, self.home = self.counts[self.home], self.probing
            log.info("%d threads instead of %d: rounds take %.2f of the time", self.count, before, mean / self.cost)
            self.usual = {kind: seconds * mean for kind, seconds in self.usual.items()}
            self.cost = 1.0
            self._start(FIRST)
        else:
            self.waits[self.probing - self.home] = max(FIRST, PRICE * lost)
        self.probing = None

"""The number of CPU threads: the cores that this process may use, and fewer while other programs need them."""

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
"""More than any machine has: OpenMP ends the process silently if it cannot make as many."""
PROBE = 4
"""Rounds of a probe."""
FIRST = 16
"""Rounds before the first probe at a new count."""
PRICE = 50.0
"""After a probe that lost a second, the next one waits this many seconds, so that probes cost 2% at most."""
GAIN = 0.93
"""Another count is taken if its rounds take at most this share of the present one's time."""
SPIKE = 4.0
"""A round of this many times the usual time makes fewer threads be tried at once."""
LONG = 4.0
"""A probe leaves out rounds of this many times the recent ones' time."""
MANY, MOST = 64, 256
"""A round of at least ``MANY`` rows takes all cores that others leave: it waits for arithmetic, less for other threads.
From ``MOST`` on it takes all cores. Beside a busy program that is as fast, and the program may end at any time."""
RECENT, USUAL = 1 / 16, 1 / 8
"""Weights of a round in the mean cost, and in the usual time of its size."""
WINDOW, STALE = 0.1, 1.0
"""Seconds over which processor time is counted, and the longest window that still says something about now, unless
this process computed for half of it: a round may take seconds."""
LEEWAY = 1.25
"""Threads for each core that others leave."""
ROOM, IDLE = 0.25, 0.3
"""Cores that others of any priority may take of a quiet machine, and the weight of a window in their mean."""


GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Where control groups are mounted, and the file that names this process's groups."""


def control_groups(controller: str, groups: Path = GROUPS, own: Path = OWN_GROUPS) -> list[Path]:
    """Folders of this process's control groups (versions 1 and 2) that may limit ``controller``, inner ones first."""
    try:
        lines = [line.split(":", 2) for line in own.read_text(encoding="utf-8").splitlines() if line.count(":") > 1]
    except (OSError, UnicodeDecodeError):
        return []
    result = []
    for _, controllers, name in lines:
        if controllers and controller not in controllers.split(","):
            continue
        root = groups / controller if controllers else groups
        folder = root / name.strip().lstrip("/")
        result += [group for group in (folder, *folder.parents) if group.is_relative_to(root)]
    return result


def group_numbers(group: Path, *files: str) -> list[int] | None:
    """The numbers in files of a control group; None if one is missing or says "max", which is no limit."""
    try:
        return [int(word) for file in files for word in (group / file).read_text(encoding="utf-8").split()]
    except (OSError, ValueError):
        return None


def usable_cores(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int:
    """Cores that the affinity mask and the quotas of control groups leave to this process; at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    for group in control_groups("cpu", groups, own):
        for files in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
            quota, period = group_numbers(group, *files) or (-1, 1)
            if quota > 0:
                cores = min(cores, -(-quota // period))
    return max(1, cores)


class CoresLeft:
    """How many of this process's cores other programs leave free, from ``/proc/stat`` (Linux).

    Programs of lower priority (a positive niceness) do not count in the first number, unless this process has a
    positive niceness, too. They count in the second one.
    """

    def __init__(self, stat: Path = Path("/proc/stat"), clock: Callable[[], float] = time.monotonic) -> None:
        self.stat, self.clock = stat, clock
        self.before: tuple[float, float, float, float] | None = None
        """The last call's time, and processor seconds until then: of all programs, of those without lower priority, and
        of this process."""
        self.next = 0.0
        self.cores: set[int] = set()

    def __call__(self) -> tuple[float, float] | None:
        """Returns means of the last window, once in ``WINDOW`` seconds; else, and where they are unknown, None."""
        now = self.clock()
        if now < self.next:
            return None
        self.next = now + WINDOW
        if (used := self._used()) is None:
            self.next = float("inf")
            return None
        own, before = time.process_time(), self.before
        self.before = now, *used, own
        if before is None or now - before[0] > max(STALE, 2 * (own - before[-1])):
            return None
        seconds, every, usual, own = (now - then for now, then in zip(self.before, before))
        left, idle = (len(self.cores) - max(0.0, others - own) / seconds for others in (usual, every))
        return left, idle

    def busy(self) -> bool:
        """Whether others used more than a little of this process's cores since the last call; False if unknown."""
        left = self()
        return left is not None and left[1] < len(self.cores) - ROOM

    def _used(self) -> tuple[float, float] | None:
        try:
            self.cores = os.sched_getaffinity(0)
            lines = [line.split() for line in self.stat.read_text("ascii").splitlines() if line.startswith("cpu")]
            counts = [[int(n) for n in line[1:]] for line in lines if line[0][3:] and int(line[0][3:]) in self.cores]
            user, nice, system, _, _, irq, softirq, steal = (sum(column) for column in list(zip(*counts))[:8])
            lower = 0 if os.getpriority(os.PRIO_PROCESS, 0) > 0 else nice
            every, second = user + nice + system + irq + softirq + steal, os.sysconf("SC_CLK_TCK")
            return every / second, (every - lower) / second
        except (OSError, ValueError, AttributeError):  # another system
            return None


def check_threads(value: object) -> int | None:
    """Returns a number of threads, or None for "auto". Raises ConfigError for anything else."""
    if value == AUTO:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_THREADS:
        return value
    raise ConfigError(f"threads must be {AUTO!r} or from 1 to {MOST_THREADS}, not {shown(value)}")


class Threads:
    """Chooses the number of threads of the next round, up to ``most``, from the times of past rounds.

    A round's cost is its time over the usual time of its size at the present count (``home``). Now and then a few
    rounds probe a neighbouring count; the cheaper one becomes home. A round of several times the usual starts a probe
    of fewer threads at once; if that wins, one of more follows at once, since a start has slow rounds, too. When
    ``cores_left`` changes, or others of any priority stop, as many threads become home. The choice changes no token.
    """

    def __init__(
        self, most: int, *, fixed: bool = False, cores_left: Callable[[], tuple[float, float] | None] = lambda: None
    ) -> None:
        self.counts = [most] if fixed else sorted({most, *(1 << i for i in range(most.bit_length()) if 1 << i < most)})
        self.home = self.fitting = len(self.counts) - 1
        self.idle, self.crowded = float(most), False
        """Mean of the cores that others of any priority leave, and whether that is too few for all threads."""
        self.hurried = False
        """Whether a slow round began the probe."""
        self.cores_left = cores_left
        self.usual: dict[int, float] = {}
        """Seconds by the bit length of the number of rows, outliers clipped."""
        self.cost = 1.0
        """Mean cost of recent rounds at home."""
        self.seconds = 0.0
        """Mean of recent rounds at home."""
        self.probing: int | None = None
        self._waits, self._rows = False, 0
        """Whether the probe leaves out the present round, and its rows."""
        self.costs: list[float] = []
        """Costs of the probe's rounds."""
        self.waits = {-1: float(FIRST), 1: float(FIRST)}
        """Rounds of usual cost before the lower and the higher neighbour are probed."""

    @property
    def count(self) -> int:
        """Threads of the next round."""
        if self._rows >= MANY:
            return self.counts[-1 if self._rows >= MOST else self.fitting]
        return self.counts[self.home if self.probing is None or self._waits else self.probing]

    def begin(self, rows: int) -> int:
        """Threads of a round of at least this many rows. A probe leaves out rounds that take much longer than recent
        ones: a whole prompt on half of the threads costs more than all probes may."""
        self._rows = rows
        usual = self.usual.get(rows.bit_length())
        self._waits = self.probing is not None and (usual is None or usual > LONG * self.seconds)
        return self.count

    def observe(self, rows: int, seconds: float) -> None:
        """Learns the time of a round of ``rows`` rows at ``count`` threads."""
        if len(self.counts) == 1 or seconds <= 0.0:
            return
        if (left := self.cores_left()) is not None and self._follow(*left):
            return
        if self._rows >= MANY:
            return
        kind = rows.bit_length()
        usual = self.usual.get(kind)
        if self.probing is not None and not self._waits:
            if usual is not None:
                self._probe(seconds / usual)
            return
        if 0.0 < self.seconds < 2 * seconds:
            self.seconds += RECENT * (min(seconds, 2 * self.seconds) - self.seconds)
        else:  # the first round, or short ones after a prompt
            self.seconds = seconds
        if usual is None:
            self.usual[kind] = seconds
            return
        cost = seconds / usual
        self.usual[kind] = usual + USUAL * (min(seconds, 2 * usual) - usual)
        self.cost += RECENT * (cost - self.cost)
        if self.probing is not None:
            return
        for side in self.waits:
            self.waits[side] -= cost
        if cost > SPIKE and self.home > 0:
            self._begin(-1, hurried=True)
            return
        for side, wait in self.waits.items():
            if wait <= 0 and 0 <= self.home + side < len(self.counts):
                self._begin(side)
                return

    def _follow(self, left: float, idle: float) -> bool:
        """Makes another count home if the number of free cores fits another one than before, or if other programs have
        stopped that made fewer threads the better choice; returns whether it did."""
        before, self.fitting = self.fitting, max(0, sum(count <= LEEWAY * left for count in self.counts) - 1)
        self.idle += IDLE * (idle - self.idle)
        was, self.crowded = self.crowded, self.counts[-1] > self.idle + ROOM
        stopped = was and not self.crowded and self.fitting > self.home
        if self.fitting == self.home or (self.fitting == before and not stopped):
            return False
        counts = self.counts[self.fitting], self.counts[self.home]
        log.info("%d threads instead of %d: other programs leave %.1f cores", *counts, left)
        self.home, self.probing, self.usual, self.cost = self.fitting, None, {}, 1.0
        self.waits = {-1: FIRST, 1: FIRST}
        return True

    def _begin(self, side: int, *, hurried: bool = False) -> None:
        self.probing, self.costs, self.hurried = self.home + side, [], hurried

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
            self.cost, self.waits = 1.0, {-1: FIRST, 1: 0 if self.hurried else FIRST}
        else:
            self.waits[self.probing - self.home] = max(FIRST, PRICE * lost)
        self.probing = None

"""Measured prices: what a verification costs by its rows, a draft by its depth, and a prompt by its tokens.

Prices are timed in rounds of made-up requests, interleaved, once for each number of threads and batch size;
``Prices.state`` keeps them for the next engine. They are compared with the rounds that serve people, and corrected
where these disagree for long.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import ceil, exp, inf, log, nan
from statistics import fmean, median
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from forerun.models.run.base import MixtureInfo
from forerun.speculate.length.experts import ExpertReads


class Timed(NamedTuple):
    """One round of made-up requests: its ``rows``, the ``depth`` that its drafter reached, and its seconds."""

    rows: int
    depth: int
    draft: float
    verify: float
    experts: int = 0
    context: int = 0
    """Tokens that each request has in the cache beyond those of a short one."""


class TimeRound(Protocol):
    def __call__(self, method: str | None, depth: int, rows: int, long: bool = False) -> Timed:
        """Runs one round. ``method`` drafts to ``depth`` for each request, and drafts are filled up with random tokens
        until each request verifies ``rows`` rows. ``long``: the requests have long contexts, if there is room."""


Trials = Callable[[int], AbstractContextManager[tuple[TimeRound, Mapping[str, float]] | None]]
"""``trials(sequences)``: makes this many requests, which sample, and reads their prompts. Gives ``time_round``, and by
method the seconds in which its drafter read a prompt token; None if there is no room for such requests now."""


SHORT = 64
"""Tokens of context of the made-up requests that are not long."""


class Curve:
    """A cost by a count: linear between measured ``points``, extrapolated from their upper half. It never falls as the
    count grows: a higher point before was disturbed. Counts are padded to a ``multiple``."""

    def __init__(self, points: Mapping[int, float], multiple: int = 1) -> None:
        least, kept = inf, {}
        for count in sorted(points, reverse=True):
            least = kept[count] = min(least, points[count])
        self.points, self.multiple = dict(sorted(kept.items())), multiple

    def __call__(self, count: float) -> float:
        if self.multiple > 1:
            count = ceil(count / self.multiple) * self.multiple
        points = self.points
        if count in points:
            return points[int(count)]
        counts = list(points)
        if count < counts[0] or len(counts) == 1:
            return points[counts[0]]
        right = min(bisect_left(counts, count), len(counts) - 1)
        low, high = counts[right - 1], counts[right]
        if count > high:  # the last two alone are close together, and may be equal where one was disturbed
            low = counts[max(0, bisect_right(counts, high / 2) - 1)]
        slope = (points[high] - points[low]) / (high - low)
        return max(points[low] + slope * (count - low), points[counts[0]])


@dataclass
class PriceTable:
    """Seconds, for one number of threads and of requests in a batch."""

    verify: Curve
    """By rows, or by ``Prices.units`` of a mixture of experts."""
    draft: dict[str, Curve] = field(default_factory=dict)
    """By depth, for each method. Depth 0: the look-up or the call that found nothing."""
    read: dict[str, float] = field(default_factory=dict)
    """Of a token that a drafter has to read first."""
    attention: tuple[float, float] = (0.0, 0.0)
    """Of a token of context: of its sequence, which is memory, and of each row, which is arithmetic."""
    context: float = 0.0
    """Tokens of context of a sequence now, beyond those that ``verify`` was measured with."""
    disturbed: bool = False
    """Whether other programs ran while it was measured, or it was guessed: the next engine measures anew."""
    unchecked: int = 0
    """How many of its first comparisons with plain rounds are to come, if it was guessed or is of another day."""
    level: float | None = None
    """Present seconds of a round over those of the table; None: none was seen yet."""
    bias: dict[int | str, float] = field(default_factory=dict)
    """By number of rows, the log of: seconds of verifications over those of the table, relative to plain rounds. By
    method, the same of its drafts."""

    def rows_bias(self, count: int) -> float:
        """That of the nearest number of rows that was compared."""
        if count not in self.bias:
            rows = [known for known in self.bias if isinstance(known, int)]
            count = min(rows, key=lambda known: abs(known - count), default=count)
        return self.bias.get(count, 0.0)

    def state(self) -> dict[str, Any]:
        points = self.verify.points  # of plain rounds first; the others are kept as comparisons have corrected them
        verify = {n: cost * exp(self.rows_bias(n) * (n > min(points))) for n, cost in points.items()}
        draft = {m: {d: s * exp(self.bias.get(m, 0)) for d, s in each.points.items()} for m, each in self.draft.items()}
        return {"verify": verify, "draft": draft, "read": self.read, "attention": self.attention}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> PriceTable:
        """Raises TypeError, KeyError or ValueError for anything but a ``state``."""

        def curve(points: Mapping[Any, Any]) -> Curve:
            result = {int(count): float(seconds) for count, seconds in points.items()}
            if not result or not all(0.0 < seconds < inf for seconds in result.values()):
                raise ValueError("prices are positive")
            return Curve(result)

        read = {str(name): float(seconds) for name, seconds in state["read"].items()}
        draft = {n: curve(points) for n, points in state["draft"].items()}
        memory, row = map(float, state["attention"])
        return cls(curve(state["verify"]), draft, read, (memory, row), unchecked=Prices.UNCHECKED)


class Prices:
    """Price tables of one engine.

    Args:
        nodes: by method and depth, the rows that a draft adds to a verification.
        trials: runs rounds of made-up requests; None: prices are guessed, and learnt from rounds that serve people.
        threads: the present number of threads.
        busy: whether other programs have used the processor since the last call.
    """

    SECONDS, ROUNDS = (2.0, 0.5), 100
    """Time limits of measuring prices for one request, and for a batch; in plain rounds, but not below the latter."""
    SWEEPS = (2, 16)
    """How often each price is measured, at least and at most."""
    SHORT_ROUND, STREAK = 0.01, 4
    """Plain rounds below this many seconds are measured this often in a row: the first finds cold caches."""
    DEEPEST, WIDEST = 4, 24
    """Deepest draft that is timed; deeper ones are extrapolated. Depth up to which their rows are verified."""
    BATCH = 8
    """From this many requests on, a batch has prices of its own; below, rows cost what they cost for one request."""
    GUESS = 0.08
    """Assumed price of a row, and of a draft step, in plain rounds, where nothing can be measured."""
    UNCHECKED = 4
    """Comparisons with plain rounds of which each counts for half, where prices are guessed or kept."""
    VAIN, LONG, FEW = 3, 32, 0.1
    """Kept prices by which hardly anybody drafts are hardly corrected. So they are measured anew until this many
    processes, of at least this many rounds each, have drafted in less than this part of them."""
    LONG_ROWS = 5
    """Rows of a request with which ``PriceTable.attention`` is measured, beside 1."""
    NEAR = 24
    """Rounds between a verification of drafts and a plain one, at most, so that they are compared."""
    APART = 0.02
    """Weight of a verification of drafts, compared with the last ones of other numbers of rows."""
    SLOWER = 0.2
    """Log of the seconds by which rounds with drafts must have become slower than the table says to be checked."""
    JUMPED = 0.25
    """The part for which a comparison counts if plain rounds before it and after it differ by more than ``SLOWER``."""
    STALE = 0.15
    """Tables with a mean bias beyond this are not kept: the next engine measures anew."""

    def __init__(
        self,
        nodes: Mapping[str, Sequence[int]],
        row_multiple: int = 1,
        mixture: MixtureInfo | None = None,
        trials: Trials | None = None,
        threads: Callable[[], int] = lambda: 0,
        busy: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.nodes, self.multiple, self.trials, self.threads = nodes, row_multiple, trials, threads
        self.busy, self.clock = busy, clock
        self.reads = None if mixture is None else ExpertReads(mixture)
        self.tables: dict[tuple[int, int], PriceTable] = {}
        """By threads and requests: 1, or a power of two from ``BATCH`` on."""
        self._plain: deque[float] = deque(maxlen=5)
        self._drafted: deque[tuple[int, int | str, float]] = deque(maxlen=32)
        """Of the last verifications of drafts: number, rows, and log of their seconds over the table's. Of the drafts:
        the same by method."""
        self._common = 0.0
        self.slower = 0
        """This many rounds with drafts in a row were much slower than the machine was before."""
        self._before = inf
        """Log of the level that plain rounds have shown, or of the least since then."""
        self._level = nan
        """Log of the level that the last plain rounds have shown."""
        self._rounds = self._sequences = self._tried = self._vain = 0

    def units(self, rows: float, sequences: int, experts: int = 0) -> int:
        """What verification is priced by: padded rows, or of a mixture eighths of the price by ``ExpertReads``."""
        padded = int(-(-rows // self.multiple) * self.multiple)
        if self.reads is None:
            return padded
        return max(1, round(8 * self.reads.price(max(padded, sequences), sequences, experts)))

    def at(self, sequences: int, context: float = SHORT) -> PriceTable:
        """The table for this many requests, with ``context`` tokens each in the mean. It is measured now if there is
        none, or copied from another number of threads, and corrected by the rounds that use it."""
        size = 1 if sequences < self.BATCH else 1 << (sequences - 1).bit_length()
        key = self.threads(), size
        table = self.tables.get(key)
        if table is None:
            others = [known for known in self.tables if known[1] == size]
            # There may be no room for ``size`` requests beside those that are there.
            counts = dict.fromkeys((size, sequences, max(1, sequences // 2)))
            measured = None if others else next(filter(None, map(self._measure, counts)), None)
            if measured is None and size > 1:
                self.at(1)
            table = self.tables[key] = measured or self._guess(*key)
        table.context = max(0.0, context - SHORT)
        return table

    def _guess(self, threads: int, size: int) -> PriceTable:
        """The nearest measured table, or an assumption in units of a plain round."""
        known = sorted((abs(key[1] - size), abs(key[0] - threads), key) for key in self.tables)
        if known:
            near, other = self.tables[known[0][-1]], known[0][-1][1] != size
            unchecked = self.UNCHECKED if other else 0
            draft, read, disturbed = dict(near.draft), dict(near.read), near.disturbed or other
            return PriceTable(near.verify, draft, read, near.attention, 0.0, disturbed, unchecked)
        draft = {name: Curve({0: 0.01, 1: self.GUESS, 9: 9 * self.GUESS}) for name in self.nodes}
        verify = Curve({self.units(n, 1): 1.0 + self.GUESS * (n - 1) for n in (1, 17)})
        read = dict.fromkeys(self.nodes, 0.5 * self.GUESS)
        return PriceTable(verify, draft, read, disturbed=True, unchecked=self.UNCHECKED)

    def _measure(self, sequences: int) -> PriceTable | None:
        if self.trials is None:
            return None
        with self.trials(sequences) as found:
            return None if found is None else self._timed(*found, sequences)

    def _timed(self, time_round: TimeRound, read: Mapping[str, float], sequences: int) -> PriceTable:
        """Times every kind of round in turns, until the time is over. Of each, the lower quartile counts: disturbances
        add to times."""
        began, limit = self.clock(), self.SECONDS[sequences > 1]
        self.busy()
        disturbed = False
        verify: dict[int, list[float]] = {}
        draft: dict[str, dict[int, list[float]]] = {method: {} for method in self.nodes}
        every, some = (list(self._kinds(sequences, each)) for each in (True, False))  # all may take seconds
        for sweep in range(self.SWEEPS[1]):
            kinds = some if sweep < self.SWEEPS[0] else every
            if sweep >= self.SWEEPS[0]:
                limit = min(limit, max(self.SECONDS[1], self.ROUNDS * min(min(verify.values()))))
                if (self.clock() - began) * (1 + len(kinds) / (sweep * len(some))) > limit:
                    break
            for method, depth, rows in kinds if sweep % 2 else reversed(kinds):
                for _ in range(self.STREAK):
                    timed = time_round(method, depth, rows)
                    units = self.units(timed.rows, sequences, timed.experts)
                    verify.setdefault(units, []).append(timed.verify)
                    if method is not None:
                        draft[method].setdefault(timed.depth, []).append(timed.draft)
                    if timed.verify > self.SHORT_ROUND or method is not None:
                        break
            disturbed |= self.busy()
        attention = self._timed_attention(time_round, sequences, limit / 2)
        disturbed |= self.busy()
        curves = {method: Curve(_quartiles(times)) for method, times in draft.items() if times}
        return PriceTable(Curve(_quartiles(verify)), curves, dict(read), attention, disturbed=disturbed)

    def _timed_attention(self, time_round: TimeRound, sequences: int, limit: float) -> tuple[float, float]:
        """Times long contexts beside short ones: the medians of the differences."""
        added: dict[int, list[float]] = {1: [], self.LONG_ROWS: []}
        began = self.clock()
        for sweep in range(2 * self.SWEEPS[1]):
            if sweep >= self.SWEEPS[0] and self.clock() - began > limit:
                break
            for rows, each in added.items():
                long = time_round(None, 0, rows, long=True)
                if not long.context:  # no room
                    return next((table.attention for table in self.tables.values()), (0.0, 0.0))
                seconds = long.verify - time_round(None, 0, rows).verify
                each.append(seconds / (long.context * sequences))
        one, more = (max(0.0, median(each)) for each in added.values())
        row = max(0.0, more - one) / (self.LONG_ROWS - 1)
        return max(0.0, one - row), row

    def _kinds(self, sequences: int, every: bool) -> Iterator[tuple[str | None, int, int]]:
        """The rounds to time: ``time_round``'s arguments. A verification follows a draft, as it does later."""
        yield None, 0, 1
        for method, nodes in self.nodes.items():
            deepest = min(len(nodes) - 1, self.WIDEST)
            depths = sorted({1, 2, 4, 8, deepest} & {*range(1, deepest + 1)})
            drafted = {nodes[depth] + 1: depth if depth <= self.DEEPEST else 1 for depth in depths}
            rows = {*drafted, *(range(2, 14) if every else ())}  # several requests' drafts have more than one can have
            yield method, 0, 2
            if sequences > 1:
                rows = {n for n in (2, 3, 5, 9) if n <= nodes[deepest] + 1}
            for n in sorted(rows):
                yield method, drafted.get(n, 1), n

    def verify(self, table: PriceTable, rows: float, sequences: int, experts: int = 0) -> float:
        """Seconds of a target forward over this many rows, acceptance included."""
        count = self.units(rows, sequences, experts)
        seconds = self._listed(table, count, rows, sequences)
        if count > (plain := self.units(sequences, sequences)):
            seconds = max(seconds * exp(table.rows_bias(count)), self._listed(table, plain, sequences, sequences))
        return seconds

    def _listed(self, table: PriceTable, units: int, rows: float, sequences: int) -> float:
        """As measured."""
        memory, row = table.attention
        return table.verify(units) + table.context * (sequences * memory + rows * row)

    def draft(self, table: PriceTable, method: str, depth: float) -> float:
        """Seconds of drafting to this depth."""
        curve = table.draft.get(method)
        listed = self.GUESS * depth * table.verify(1) if curve is None else curve(depth)
        return listed * exp(table.bias.get(method, 0.0))

    def observe_draft(self, table: PriceTable, method: str, depth: float, behind: int, seconds: float) -> None:
        """Keeps the seconds of a round's drafts of one method, which read ``behind`` tokens first, for a comparison."""
        listed = self.draft(table, method, depth) / exp(table.bias.get(method, 0.0))
        self._drafted.append((self._rounds, method, log(seconds / (listed + behind * table.read.get(method, 0.0)))))

    def observe(self, table: PriceTable, sequences: int, rows: int, seconds: float, experts: int, warm: bool) -> None:
        """Compares a forward with the table. ``warm``: not right after forwards of the other kind, in whose caches it
        runs."""
        if self.reads is not None:
            self.reads.learn(rows, sequences, experts)
        units = self.units(rows, sequences, experts)
        residual = log(seconds / self._listed(table, units, rows, sequences))
        level = exp(residual - (table.rows_bias(units) if rows > sequences else 0.0))
        table.level = level if table.level is None else table.level + 0.2 * (level - table.level)
        self._rounds += 1
        if sequences != self._sequences:
            self._sequences = sequences
            self._plain.clear()
            self._drafted.clear()
            self.slower, self._before = 0, inf
        if rows > sequences:
            self._tried += 1
            self._before = min(self._before, log(table.level))
            self.slower = self.slower + 1 if log(level) > self._before + self.SLOWER else 0
            if self._drafted:  # by how much these rows are dearer than others of the last rounds
                apart = residual - table.rows_bias(units) - self._common
                self._common += 0.1 * apart
                table.bias[units] = table.rows_bias(units) + self.APART * max(-0.3, min(apart, 0.3))
            else:
                self._common = residual - table.rows_bias(units)
            self._drafted.append((self._rounds, units, residual))
            self._plain.clear()
        elif warm:
            self._plain.append(residual)
            if len(self._plain) == 2:
                level = sum(self._plain) / 2
                part = self.JUMPED if abs(level - self._level) > self.SLOWER else 1.0
                self.slower, self._before, self._level = 0, level, level
                self._compare(table, level, part)

    @property
    def compared(self) -> bool:
        """Whether plain rounds have followed the last verification of drafts, and were compared with it."""
        return len(self._plain) >= 2

    def _compare(self, table: PriceTable, plain: float, part: float) -> None:
        """Corrects the prices of the numbers of rows and of the drafts that were used shortly before."""
        recent: dict[int | str, list[float]] = {}
        for number, key, residual in self._drafted:
            if self._rounds - number < self.NEAR and (table.unchecked or isinstance(key, int)):
                recent.setdefault(key, []).append(residual)
        for key, residuals in recent.items():
            apart = max(-0.7, min(median(residuals) - plain, 0.7))
            before = table.bias.get(key, 0.0) if isinstance(key, str) else table.rows_bias(key)
            share = 0.5 if abs(apart - before) > self.SLOWER else 0.2
            weight = 0.5 if table.unchecked else min(share, 0.05 * len(residuals))
            table.bias[key] = before + part * weight * (apart - before)
        table.unchecked = max(0, table.unchecked - bool(recent))

    @property
    def vain(self) -> int:
        """How many processes in a row, this one included, had hardly any drafts; as a negative number, if this one was
        too short to tell: then the next goes on with its prices."""
        return -self._vain if self._rounds < self.LONG else (self._vain + 1) * (self._tried < self.FEW * self._rounds)

    def state(self) -> list[Any]:
        """The tables that were measured well, as JSON."""
        return [
            [*key, table.state()]
            for key, table in self.tables.items()
            if not table.disturbed and abs(fmean(table.bias.values() or [0.0])) < self.STALE
        ]

    def restore(self, state: Any, vain: int = 0) -> None:
        """Raises TypeError, KeyError or ValueError for anything but a ``state``, and a ``vain`` of then."""
        tables = {(int(threads), int(size)): PriceTable.of(table) for threads, size, table in state}
        self._vain, self.tables = abs(int(vain)), {} if 0 < vain < self.VAIN else tables


def _quartiles(times: Mapping[int, list[float]]) -> dict[int, float]:
    """The lower quartile of each."""
    return {count: sorted(each)[(len(each) - 1) // 4] for count, each in times.items()}

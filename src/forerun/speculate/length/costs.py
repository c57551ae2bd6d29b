"""What rounds cost: what was measured, on a machine that is faster and slower at different times."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from forerun.models.base import MixtureInfo
from forerun.theory import expected_experts


def quartile(times: Collection[float]) -> float:
    """The lower quartile."""
    return sorted(times)[(len(times) - 1) // 4]


class Curve:
    """Seconds by a count (of rows, of drafted tokens). At a count that was measured: the lower quartile of the last
    times there, as what disturbs a measurement makes it longer, drawn to a straight line through all counts until it
    was measured often. Between: a straight line. It never falls.

    ``slope`` is how much of the seconds at count 1 a further unit is expected to cost before two counts are known.
    Counts that were measured side by side are compared with each other (``learn``): a minute in which all of them cost
    more changes ``level``, not what one costs over another.
    """

    WINDOW, KNOWN = 9, 3
    SAME = 1.1
    """A smaller change of pace is taken for noise."""
    LINE = 2.0
    """Measurements that the line through all counts is worth."""

    def __init__(self, slope: float) -> None:
        self.slope = slope
        self.points: dict[int, deque[float]] = {}
        self._line: tuple[list[int], list[float]] | None = None
        self.level = 1.0
        """What rounds with drafts take at present over what the curve says."""
        self._levels: deque[float] = deque([self.level], maxlen=self.WINDOW)

    def learn(self, measured: Sequence[tuple[int, float]], taken: int) -> None:
        """Rounds that followed each other, by count; of each count the ``taken`` shortest are kept."""
        paces = [seconds / (self.at(count) or 1.0) for count, seconds in measured if self.known(count) >= self.KNOWN]
        pace = median(paces) if paces else self.level
        if paces:
            self._levels.append(pace)
            self.level = quartile(self._levels)
        if 1.0 / self.SAME < pace / self.level < self.SAME:
            pace = self.level
        counts: dict[int, list[float]] = {}
        for count, seconds in measured:
            counts.setdefault(count, []).append(seconds / pace)
        for count, times in counts.items():
            for seconds in sorted(times)[:taken]:
                self.add(count, seconds)

    def add(self, count: int, seconds: float) -> None:
        self.points.setdefault(count, deque(maxlen=self.WINDOW)).append(seconds)
        self._line = None

    def known(self, count: int) -> int:
        """How often this count was measured, up to ``WINDOW``."""
        return len(self.points.get(count, ()))

    def at(self, count: float) -> float | None:
        """Expected seconds; None before anything was measured."""
        if not self.points:
            return None
        counts, seconds = self._line or self._fit()
        index = bisect_left(counts, count)
        if index < len(counts) and counts[index] == count:
            return seconds[index]
        if 0 < index < len(counts):
            left, right = counts[index - 1], counts[index]
            fraction = (count - left) / (right - left)
            return seconds[index - 1] + fraction * (seconds[index] - seconds[index - 1])
        end = min(index, len(counts) - 1)  # beyond what is known: the expected slope
        unit = seconds[end] * self.slope / max(1.0 + self.slope * (counts[end] - 1), self.slope)
        return max(seconds[end] + unit * (count - counts[end]), 0.05 * seconds[end])

    def _fit(self) -> tuple[list[int], list[float]]:
        """Quartiles, where a lower one behind a higher one shares their weighted mean."""
        blocks: list[list[float]] = []  # seconds, weight, counts in the block
        counts = sorted(self.points)
        times, known = [quartile(self.points[count]) for count in counts], [len(self.points[n]) for n in counts]
        for seconds, often in zip(self._straightened(counts, times, known), known):
            blocks.append([seconds, float(often), 1.0])
            while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
                (high, many, some), (low, few, more) = blocks[-2], blocks[-1]
                blocks[-2:] = [[(high * many + low * few) / (many + few), many + few, some + more]]
        result = [value for value, _, size in blocks for _ in range(int(size))]
        self._line = counts, result
        return self._line

    def _straightened(self, counts: list[int], times: list[float], known: list[int]) -> list[float]:
        """``times`` drawn to the line of least squared relative errors; three counts and more have one."""
        if len(counts) < 3:
            return times
        weights = [n / seconds**2 for n, seconds in zip(known, times)]
        total = sum(weights)
        centre, level = (sum(w * x for w, x in zip(weights, each)) / total for each in (counts, times))
        spread = sum(w * (x - centre) ** 2 for w, x in zip(weights, counts))
        slope = sum(w * (x - centre) * y for w, x, y in zip(weights, counts, times)) / spread
        line = [level + slope * (x - centre) for x in counts]
        return [(n * n * y + self.LINE * at) / (n * n + self.LINE) for n, y, at in zip(known, times, line)]


class ExpertReads:
    """Which share of a mixture's experts a round reads: its rows read the union of theirs, and rows of one text choose
    more alike than by chance. The shares of ``theory.expected_experts``, learnt from what rounds read."""

    ROW = 0.06
    """What a further row costs beside the experts that it reads, in plain rounds, as long as nothing was measured."""
    WEIGHT = 4.0
    """Rows that the expectation, mere chance, counts for."""
    FADE = 0.98
    """What a round leaves of the evidence before it."""
    HELD = (0.2, 0.07)
    """What relative error is as bad as parts of rows and of experts that are 1 off."""
    STEPS = 12
    """Halvings in search of a share."""

    def __init__(self, mixture: MixtureInfo) -> None:
        self.mixture = mixture
        self.again = self.common = mixture.chosen / mixture.count
        """The shares of a row's experts that another row chooses: of its text, and of another one."""
        self._seen = [self.WEIGHT, self.WEIGHT]
        """Rows that each is known from."""

    def learn(self, rows: int, sequences: int, experts: int) -> None:
        """A round of ``rows`` rows read so many ``experts``, those of all layers."""
        if not experts or rows < 2:
            return
        each, index = experts / self.mixture.layers, int(rows == sequences)
        low, high = self.mixture.chosen / self.mixture.count, 1.0
        for _ in range(self.STEPS):  # the more rows share, the fewer experts they read
            share = (low + high) / 2
            shares = (self.again, share) if index else (share, self.common)
            low, high = (share, high) if self._read(rows, sequences, *shares) > each else (low, share)
        seen = self._seen[index] = self.FADE * self._seen[index] + rows - 1
        name = "common" if index else "again"
        before = getattr(self, name)
        setattr(self, name, before + (rows - 1) / seen * ((low + high) / 2 - before))

    def _read(self, rows: float, sequences: int, again: float, common: float) -> float:
        return expected_experts(self.mixture.count, self.mixture.chosen, rows, again, sequences, common)

    def times(self, rows: float, sequences: int) -> float:
        """The experts that a round is expected to read, in those of one row."""
        return self._read(rows, sequences, self.again, self.common) / self.mixture.chosen

    def price(self, rows: float, sequences: int, experts: int = 0) -> float:
        """Of a round in plain ones, by the bytes that it reads: of one that read so many ``experts``, or as many as
        expected."""
        mixture = self.mixture
        read = experts / mixture.layers / mixture.chosen if experts else self.times(rows, sequences)
        return 1.0 + self.ROW * (rows - 1.0) + mixture.share * (read - 1.0)

    def fitted(self, points: Mapping[int, float], sequences: int) -> Callable[[int], float]:
        """The price by rows, as ``price``, with the parts of rows and of experts that come nearest to measured
        ``points``, plain rounds by rows: least squares of relative errors, held by the parts that are expected."""
        parts = torch.tensor([self.ROW, self.mixture.share], dtype=torch.float64)

        def more(rows: int) -> list[float]:
            return [rows - sequences, (self.times(max(rows, sequences), sequences) - self.times(sequences, sequences))]

        prices = torch.tensor(list(points.values()), dtype=torch.float64)
        weights = torch.tensor([more(rows) for rows in points], dtype=torch.float64) / prices[:, None]
        held = torch.diag(torch.tensor(self.HELD, dtype=torch.float64))
        result = torch.linalg.lstsq(torch.cat([weights, held]), torch.cat([1 - 1 / prices, held @ parts])).solution
        row, experts = result.clamp(min=1e-3).tolist()
        return lambda rows: 1.0 + row * more(rows)[0] + experts * more(rows)[1]

    def state(self) -> list[float]:
        return [self.again, self.common]

    def restore(self, state: Any) -> None:
        """Raises TypeError or ValueError for anything but a ``state``."""
        self.again, self.common = (min(max(float(share), 0.0), 1.0) for share in state)

    def report(self, rows: Mapping[int, float]) -> dict[str, Any]:
        """For readers: the mixture, the share that rows of one text have in common, and by ``rows`` the experts that
        were read, those of all layers, in those of one row."""
        mixture = self.mixture
        one = mixture.layers * mixture.chosen
        return {
            "count": mixture.count, "chosen": mixture.chosen, "share": mixture.share, "again": self.again,
            "read": {count: experts / one for count, experts in rows.items()},
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Drafted:
    """What one method did in a round."""

    method: str
    sequences: int
    depth: int
    """Tokens of the longest draft."""
    behind: int
    """Committed tokens that it had to read first, all sequences together."""


class Costs:
    """Seconds of a round's parts, as if the machine were always as fast as when plain decoding was first measured.

    A round with drafts is compared with the plain rounds around it: its times count once a plain one has followed, and
    not if the machine has changed in between. Rounds with drafts alone cannot tell a slow machine from a dear draft.
    """

    SURE = 3
    """Plain rounds to be measured before the first draft."""
    TAKEN = 3
    """So many times of each count are taken from them."""
    BLOCK = 8
    """So many of the rounds with drafts between two plain ones count: the last ones."""
    AGREE = (0.6, 1.7)
    """How the machine's pace after them may compare with the pace before."""
    SETTLED = 9
    """The plain round after drafts that is as fast as any: a drafter leaves its own data in the processor's caches."""
    MOST_COLD = 1.5

    STEPS = 8
    """Of a mixture's price: counts in one plain round."""

    def __init__(
        self, nodes: Mapping[str, Sequence[int]], row_multiple: int = 1, mixture: MixtureInfo | None = None
    ) -> None:
        self.multiple = row_multiple
        self.reads = None if mixture is None else ExpertReads(mixture)
        self.rows = Curve(0.06 if mixture is None else 1.0)
        """By rows of the target's forward, acceptance included; of a mixture by ``ExpertReads.price``, in ``STEPS``."""
        self.drafts: dict[tuple[str, int], Curve] = {}
        """By method and sequences that draft (rounded to a power of two): by depth."""
        self.reading: dict[str, deque[float]] = {method: deque(maxlen=5) for method in nodes}
        """By method: seconds for each token that a drafter has to read first."""
        self.slowdown = 1.0
        """How slow the machine is at present."""
        self.cold = 1.1
        """How much slower the plain rounds right after drafts are than settled ones."""
        self._colds: deque[float] = deque([self.cold], maxlen=7)
        self._recent: deque[float] = deque(maxlen=3)
        self._after_drafts = 0.0
        self._restored = False
        """Prices are another engine's, and the pace is not known yet."""
        self._before = 1.0
        self._block: list[tuple[int, float, float, Sequence[Drafted]]] = []

    @property
    def cold_known(self) -> bool:
        return len(self._colds) > 2

    def aftermath(self) -> float:
        """Plain rounds that the caches cost after drafts end."""
        return (self.cold - 1.0) * self.SETTLED / 2

    def _count_of(self, rows: float, sequences: int, experts: int = 0) -> int:
        """What ``rows`` counts of a forward over so many rows of so many sequences, which read ``experts``, or as many
        as expected."""
        padded = int(-(-rows // self.multiple) * self.multiple)
        if self.reads is None:
            return padded
        return max(1, round(self.STEPS * self.reads.price(max(padded, sequences), sequences, experts)))

    def verify(self, rows: float, sequences: int = 1, experts: int = 0) -> float:
        """Expected seconds of a target forward over so many rows of so many sequences and of their acceptance; of one
        that read so many ``experts``, if that is known."""
        count, plain = self._count_of(rows, sequences, experts), self._count_of(sequences, sequences)
        seconds = self.rows.at(count) or 1.0
        return seconds if count <= plain else max(seconds * self.rows.level, self.rows.at(plain) or 1.0)

    def draft(self, method: str, sequences: int, depth: float) -> float:
        """Expected seconds of drafting so deep."""
        if depth <= 0 or not sequences:
            return 0.0
        size = sequences.bit_length()
        near = sorted((abs(size - known), known) for name, known in self.drafts if name == method)
        for _, known in near:
            curve = self.drafts[method, known]
            seconds = curve.at(depth)
            if seconds is not None:
                seconds *= curve.level
                return seconds * (1.0 + 0.2 * (size - known)) if size > known else seconds
        return 0.1 * depth * self.verify(1)

    def priced(self, method: str) -> bool:
        """Whether a draft of this method was measured."""
        return any(name == method for name, _ in self.drafts)

    def read(self, method: str, tokens: int) -> float:
        """Expected seconds of a drafter that reads so many tokens before it drafts."""
        known = self.reading[method]
        return tokens * (median(known) if known else 0.05 * self.verify(1))

    def sure(self, sequences: int) -> bool:
        """Whether plain decoding of about so many sequences was measured."""
        low, high = (self._count_of(n, n) for n in (sequences - sequences // 4, sequences + sequences // 4))
        return sum(self.rows.known(n) for n in range(low, high + 1)) >= self.SURE

    def plain(self, sequences: int, seconds: float, since: int, experts: int = 0) -> None:
        """A plain round was measured; it is the ``since``-th after one with drafts."""
        if self.reads is not None:
            self.reads.learn(sequences, sequences, experts)
        rows, expected = self._count_of(sequences, sequences, experts), self.verify(sequences, sequences, experts)
        known = self.rows.known(rows)
        if self._restored and known:
            self.slowdown, self._restored = seconds / expected, False
        elif known and since > 1:
            if since in (2, self.SETTLED):
                self._recent.clear()
            self._recent.append(seconds / expected)
            if since == 3:
                low, high = sorted(self._recent)[-2:] if len(self._recent) > 1 else [*self._recent] * 2
                self._after_drafts = (low * high) ** 0.5 if high < 1.3 * low else low
                self.slowdown = self._after_drafts / self.cold
                self._count()
            elif since >= self.SETTLED:
                self.slowdown = median(self._recent)
                if since == self.SETTLED + 2 and self._after_drafts:
                    cold = min(max(self._after_drafts / self.slowdown, 1.0), self.MOST_COLD)
                    self._colds.append(cold)
                    self.cold, self._after_drafts = median(self._colds), 0.0
        if known < self.SURE or (known < Curve.WINDOW and since > self.SETTLED):
            self.rows.add(rows, seconds / self.slowdown)

    def drafted(
        self,
        rows: int,
        draft: float,
        verify: float,
        parts: Sequence[Drafted],
        sequences: int = 1,
        experts: int = 0,
    ) -> None:
        """A round with drafts was measured."""
        if not self._block:
            self._before = self.slowdown
        if self.reads is not None:
            self.reads.learn(rows, sequences, experts)
        self._block.append((self._count_of(rows, sequences, experts), draft, verify, parts))
        if len(self._block) > 2 * self.BLOCK:
            del self._block[: self.BLOCK]

    def _count(self) -> None:
        block, self._block = self._block[-self.BLOCK :], []
        if not self.AGREE[0] <= self.slowdown / self._before <= self.AGREE[1]:
            return
        slowdown = (self.slowdown * self._before) ** 0.5
        # What disturbs one round of a block disturbs its neighbours: of each count, only a few are taken.
        self.rows.learn([(n, max(verify / slowdown, self.verify(1))) for n, _, verify, _ in block], self.TAKEN)
        alone = [(draft / slowdown, parts[0]) for _, draft, _, parts in block if len(parts) == 1]
        drafts: dict[tuple[str, int], list[tuple[int, float]]] = {}
        for seconds, part in alone:
            if not part.behind:
                key = part.method, part.sequences.bit_length()
                drafts.setdefault(key, []).append((max(part.depth, 1), seconds))
        for key, measured in drafts.items():
            self.drafts.setdefault(key, Curve(0.8)).learn(measured, self.TAKEN)
        for seconds, part in alone:
            if part.behind and part.depth and self.priced(part.method):  # without a depth it has read a part of that
                excess = seconds - self.draft(part.method, part.sequences, part.depth)
                self.reading[part.method].append(max(excess, 0.0) / part.behind)

    def state(self) -> dict[str, Any]:
        """What was learnt, over the seconds of a plain round of one sequence: for the next engine of the same kind."""
        unit = self.verify(1)
        return {
            "rows": {str(rows): quartile(times) / unit for rows, times in self.rows.points.items()},
            "level": self.rows.level,
            "drafts": [
                [method, size, {str(n): curve.level * quartile(times) / unit for n, times in curve.points.items()}]
                for (method, size), curve in self.drafts.items()
            ],
            "reading": {method: median(times) / unit for method, times in self.reading.items() if times},
            "cold": self.cold if self.cold_known else None,
            **({} if self.reads is None else {"experts": self.reads.state()}),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over ``state``: prices in plain rounds; the first plain round that is measured says what that is."""
        self._restored = True
        if self.reads is not None:
            self.reads.restore(state["experts"])
        for rows, seconds in state["rows"].items():
            for _ in range(Curve.KNOWN):
                self.rows.add(int(rows), float(seconds))
        self.rows.level = float(state["level"])
        for method, size, points in state["drafts"]:
            curve = self.drafts.setdefault((method, int(size)), Curve(0.8))
            for depth, seconds in points.items():
                for _ in range(Curve.KNOWN):
                    curve.add(int(depth), float(seconds))
        for method, seconds in state["reading"].items():
            self.reading[method].append(float(seconds))
        if state["cold"] is not None:
            self.cold = float(state["cold"])
            self._colds.extend([self.cold] * self.SURE)

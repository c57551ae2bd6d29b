"""Measured costs of rounds, on a machine whose speed changes."""

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
    """Seconds as a function of a count: rows of a forward, or depth of a draft.

    At a measured count it is the lower quartile of the last times, since disturbances only make times longer. Few
    measurements are shrunk towards a straight line through all counts. Between counts it interpolates; beyond them it
    adds ``slope`` of the seconds at count 1 for each unit. It never falls.

    Measurements that were made side by side are compared with each other (``learn``): a slow minute changes ``level``,
    not the ratio of two counts.
    """

    WINDOW, KNOWN = 9, 3
    SAME = 1.1
    """A smaller change of speed counts as noise."""
    LINE_WEIGHT = 2.0
    """How many measurements the line through all counts weighs."""

    def __init__(self, slope: float) -> None:
        self.slope = slope
        self.points: dict[int, deque[float]] = {}
        self._line: tuple[list[int], list[float]] | None = None
        self.level = 1.0
        """Present seconds of rounds with drafts over those of the curve."""
        self._levels: deque[float] = deque([self.level], maxlen=self.WINDOW)

    def learn(self, measured: Sequence[tuple[int, float]], shortest: int) -> None:
        """Add ``(count, seconds)`` of consecutive rounds; of each count only so many of the ``shortest``."""
        ratios = [seconds / (self.at(count) or 1.0) for count, seconds in measured if self.samples(count) >= self.KNOWN]
        pace = median(ratios) if ratios else self.level
        if ratios:
            self._levels.append(pace)
            self.level = quartile(self._levels)
        if 1.0 / self.SAME < pace / self.level < self.SAME:
            pace = self.level
        counts: dict[int, list[float]] = {}
        for count, seconds in measured:
            counts.setdefault(count, []).append(seconds / pace)
        for count, times in counts.items():
            for seconds in sorted(times)[:shortest]:
                self.add(count, seconds)

    def add(self, count: int, seconds: float) -> None:
        self.points.setdefault(count, deque(maxlen=self.WINDOW)).append(seconds)
        self._line = None

    def samples(self, count: int) -> int:
        """Number of measurements at this count, at most ``WINDOW``."""
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
        end = min(index, len(counts) - 1)  # beyond the measured counts
        unit = seconds[end] * self.slope / max(1.0 + self.slope * (counts[end] - 1), self.slope)
        return max(seconds[end] + unit * (count - counts[end]), 0.05 * seconds[end])

    def _fit(self) -> tuple[list[int], list[float]]:
        """The quartiles made monotone: neighbours that fall share their weighted mean (pool adjacent violators)."""
        blocks: list[list[float]] = []  # seconds, weight, counts in the block
        counts = sorted(self.points)
        times, known = [quartile(self.points[count]) for count in counts], [len(self.points[n]) for n in counts]
        for seconds, often in zip(self._shrunk_to_line(counts, times, known), known):
            blocks.append([seconds, float(often), 1.0])
            while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
                (high, many, some), (low, few, more) = blocks[-2], blocks[-1]
                blocks[-2:] = [[(high * many + low * few) / (many + few), many + few, some + more]]
        result = [value for value, _, size in blocks for _ in range(int(size))]
        self._line = counts, result
        return self._line

    def _shrunk_to_line(self, counts: list[int], times: list[float], known: list[int]) -> list[float]:
        """``times`` shrunk towards the line of least squared relative errors, from three counts on."""
        if len(counts) < 3:
            return times
        weights = [n / seconds**2 for n, seconds in zip(known, times)]
        total = sum(weights)
        centre, level = (sum(w * x for w, x in zip(weights, each)) / total for each in (counts, times))
        spread = sum(w * (x - centre) ** 2 for w, x in zip(weights, counts))
        slope = sum(w * (x - centre) * y for w, x, y in zip(weights, counts, times)) / spread
        line = [level + slope * (x - centre) for x in counts]
        return [
            (n * n * y + self.LINE_WEIGHT * at) / (n * n + self.LINE_WEIGHT) for n, y, at in zip(known, times, line)
        ]


class ExpertReads:
    """Estimates how many experts of a mixture a round reads: the union of what its rows choose.

    Rows of one text choose more alike than chance. ``theory.expected_experts`` has the formula; its two overlaps are
    learnt from the experts that rounds read.
    """

    ROW = 0.06
    """Prior cost of a further row without its experts, in plain rounds."""
    WEIGHT = 4.0
    """How many rows the prior weighs, which is chance."""
    FADE = 0.98
    """Decay of the evidence per round."""
    TOLERANCE = (0.2, 0.07)
    """Ridge weights of the two coefficients in ``fitted``, rows and experts."""
    STEPS = 12
    """Bisections of ``learn``."""

    def __init__(self, mixture: MixtureInfo) -> None:
        self.mixture = mixture
        self.same_text = self.other_text = mixture.chosen / mixture.count
        """Fraction of a row's experts that another row chooses too: a row of its own text, of another text."""
        self._seen = [self.WEIGHT, self.WEIGHT]
        """Evidence of each, in rows."""

    def learn(self, rows: int, sequences: int, experts: int) -> None:
        """Count a round of so many rows that read so many ``experts``, summed over layers."""
        if not experts or rows < 2:
            return
        each, index = experts / self.mixture.layers, int(rows == sequences)
        low, high = self.mixture.chosen / self.mixture.count, 1.0
        for _ in range(self.STEPS):  # a larger overlap, fewer experts
            overlap = (low + high) / 2
            overlaps = (self.same_text, overlap) if index else (overlap, self.other_text)
            low, high = (overlap, high) if self._read(rows, sequences, *overlaps) > each else (low, overlap)
        seen = self._seen[index] = self.FADE * self._seen[index] + rows - 1
        name = "other_text" if index else "same_text"
        before = getattr(self, name)
        setattr(self, name, before + (rows - 1) / seen * ((low + high) / 2 - before))

    def _read(self, rows: float, sequences: int, same_text: float, other_text: float) -> float:
        return expected_experts(self.mixture.count, self.mixture.chosen, rows, same_text, sequences, other_text)

    def times(self, rows: float, sequences: int) -> float:
        """Expected experts of a round over those of one row."""
        return self._read(rows, sequences, self.same_text, self.other_text) / self.mixture.chosen

    def price(self, rows: float, sequences: int, experts: int = 0) -> float:
        """Cost of a round in plain rounds, by the bytes that it reads.

        ``experts``: how many it read, summed over layers; 0: as many as expected.
        """
        mixture = self.mixture
        read = experts / mixture.layers / mixture.chosen if experts else self.times(rows, sequences)
        return 1.0 + self.ROW * (rows - 1.0) + mixture.share * (read - 1.0)

    def fitted(self, points: Mapping[int, float], sequences: int) -> Callable[[int], float]:
        """``price`` by rows, its coefficients fitted to measured ``points`` (cost in plain rounds by rows).

        Ridge regression of relative errors, towards the prior coefficients.
        """
        prior = torch.tensor([self.ROW, self.mixture.share], dtype=torch.float64)

        def more(rows: int) -> list[float]:
            return [rows - sequences, (self.times(max(rows, sequences), sequences) - self.times(sequences, sequences))]

        prices = torch.tensor(list(points.values()), dtype=torch.float64)
        weights = torch.tensor([more(rows) for rows in points], dtype=torch.float64) / prices[:, None]
        ridge = torch.diag(torch.tensor(self.TOLERANCE, dtype=torch.float64))
        result = torch.linalg.lstsq(torch.cat([weights, ridge]), torch.cat([1 - 1 / prices, ridge @ prior])).solution
        row, experts = result.clamp(min=1e-3).tolist()
        return lambda rows: 1.0 + row * more(rows)[0] + experts * more(rows)[1]

    def state(self) -> list[float]:
        return [self.same_text, self.other_text]

    def restore(self, state: Any) -> None:
        """Raises TypeError or ValueError for anything but a ``state``."""
        self.same_text, self.other_text = (min(max(float(overlap), 0.0), 1.0) for overlap in state)

    def report(self, rows: Mapping[int, float]) -> dict[str, Any]:
        """As JSON: the mixture, the overlap of rows of one text, and by ``rows`` the experts that were read.

        Experts are summed over layers, and given over those of one row.
        """
        mixture = self.mixture
        one = mixture.layers * mixture.chosen
        return {
            "count": mixture.count, "chosen": mixture.chosen, "share": mixture.share, "again": self.same_text,
            "read": {count: experts / one for count, experts in rows.items()},
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Drafted:
    """The drafts of one method in one round."""

    method: str
    sequences: int
    depth: int
    """Tokens of the longest draft."""
    backlog: int
    """Committed tokens that the drafter had to read first, all sequences together."""


class Costs:
    """Seconds of drafting, verifying and reading, on a machine as fast as when plain decoding was first measured.

    Rounds with drafts alone cannot tell a slow machine from an expensive draft. So their times count only once a plain
    round has followed, and not if the machine's speed has changed in between.
    """

    PLAIN_ROUNDS = 3
    """Plain rounds that are measured before the first draft."""
    SHORTEST = 3
    """Of each count, so many of the shortest times count."""
    BLOCK = 8
    """Of the rounds with drafts between two plain ones, the last so many count."""
    SPEED_CHANGE = (0.6, 1.7)
    """Least and greatest change of the machine's speed during these rounds."""
    SETTLED = 9
    """From this plain round after drafts on, caches are warm again. A drafter leaves its own data in them."""
    MOST_COLD = 1.5
    """Greatest cold-cache penalty."""
    STEPS = 8
    """Resolution of a mixture's costs: counts per plain round."""

    def __init__(
        self, nodes: Mapping[str, Sequence[int]], row_multiple: int = 1, mixture: MixtureInfo | None = None
    ) -> None:
        self.multiple = row_multiple
        self.reads = None if mixture is None else ExpertReads(mixture)
        self.rows = Curve(0.06 if mixture is None else 1.0)
        """Verification by rows; of a mixture by ``ExpertReads.price`` times ``STEPS``."""
        self.drafts: dict[tuple[str, int], Curve] = {}
        """Drafting by depth, for each method and bit length of the number of sequences that draft."""
        self.reading: dict[str, deque[float]] = {method: deque(maxlen=5) for method in nodes}
        """By method, seconds per token that a drafter has to read first."""
        self.slowdown = 1.0
        """Present seconds of a plain round over those of the curve."""
        self.cold_penalty = 1.1
        """Cold-cache penalty: seconds of the plain rounds right after drafts over those of later ones."""
        self._cold_penalties: deque[float] = deque([self.cold_penalty], maxlen=7)
        self._recent: deque[float] = deque(maxlen=3)
        self._after_drafts = 0.0
        self._unit_unknown = False
        """Costs come from another engine, and no plain round was measured yet."""
        self._slowdown_before = 1.0
        self._block: list[tuple[int, float, float, Sequence[Drafted]]] = []

    @property
    def cold_penalty_known(self) -> bool:
        return len(self._cold_penalties) > 2

    def cold_cost(self) -> float:
        """What cold caches cost after drafts end, in plain rounds."""
        return (self.cold_penalty - 1.0) * self.SETTLED / 2

    def _row_units(self, rows: float, sequences: int, experts: int = 0) -> int:
        """The count that ``rows`` is indexed by. ``experts``: as in ``ExpertReads.price``."""
        padded = int(-(-rows // self.multiple) * self.multiple)
        if self.reads is None:
            return padded
        return max(1, round(self.STEPS * self.reads.price(max(padded, sequences), sequences, experts)))

    def verify(self, rows: float, sequences: int = 1, experts: int = 0) -> float:
        """Expected seconds of a target forward over so many rows, acceptance included.

        ``experts``: how many it read, summed over layers, if that is known.
        """
        count, plain = self._row_units(rows, sequences, experts), self._row_units(sequences, sequences)
        seconds = self.rows.at(count) or 1.0
        return seconds if count <= plain else max(seconds * self.rows.level, self.rows.at(plain) or 1.0)

    def draft(self, method: str, sequences: int, depth: float) -> float:
        """Expected seconds of drafting to this depth."""
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

    def has_price(self, method: str) -> bool:
        """Whether drafts of this method were measured."""
        return any(name == method for name, _ in self.drafts)

    def read(self, method: str, tokens: int) -> float:
        """Expected seconds in which a drafter reads so many tokens."""
        known = self.reading[method]
        return tokens * (median(known) if known else 0.05 * self.verify(1))

    def plain_known(self, sequences: int) -> bool:
        """Whether plain decoding of about so many sequences was measured often enough."""
        low, high = (self._row_units(n, n) for n in (sequences - sequences // 4, sequences + sequences // 4))
        return sum(self.rows.samples(n) for n in range(low, high + 1)) >= self.PLAIN_ROUNDS

    def observe_plain(self, sequences: int, seconds: float, since: int, experts: int = 0) -> None:
        """Learn from a plain round, the ``since``-th after one with drafts."""
        if self.reads is not None:
            self.reads.learn(sequences, sequences, experts)
        rows, expected = self._row_units(sequences, sequences, experts), self.verify(sequences, sequences, experts)
        known = self.rows.samples(rows)
        if self._unit_unknown and known:
            self.slowdown, self._unit_unknown = seconds / expected, False
        elif known and since > 1:
            if since in (2, self.SETTLED):
                self._recent.clear()
            self._recent.append(seconds / expected)
            if since == 3:
                low, high = sorted(self._recent)[-2:] if len(self._recent) > 1 else [*self._recent] * 2
                self._after_drafts = (low * high) ** 0.5 if high < 1.3 * low else low
                self.slowdown = self._after_drafts / self.cold_penalty
                self._learn_block()
            elif since >= self.SETTLED:
                self.slowdown = median(self._recent)
                if since == self.SETTLED + 2 and self._after_drafts:
                    cold = min(max(self._after_drafts / self.slowdown, 1.0), self.MOST_COLD)
                    self._cold_penalties.append(cold)
                    self.cold_penalty, self._after_drafts = median(self._cold_penalties), 0.0
        if known < self.PLAIN_ROUNDS or (known < Curve.WINDOW and since > self.SETTLED):
            self.rows.add(rows, seconds / self.slowdown)

    def observe_drafted(
        self,
        rows: int,
        draft: float,
        verify: float,
        parts: Sequence[Drafted],
        sequences: int = 1,
        experts: int = 0,
    ) -> None:
        """Learn from a round with drafts, once a plain one has followed."""
        if not self._block:
            self._slowdown_before = self.slowdown
        if self.reads is not None:
            self.reads.learn(rows, sequences, experts)
        self._block.append((self._row_units(rows, sequences, experts), draft, verify, parts))
        if len(self._block) > 2 * self.BLOCK:
            del self._block[: self.BLOCK]

    def _learn_block(self) -> None:
        block, self._block = self._block[-self.BLOCK :], []
        if not self.SPEED_CHANGE[0] <= self.slowdown / self._slowdown_before <= self.SPEED_CHANGE[1]:
            return
        slowdown = (self.slowdown * self._slowdown_before) ** 0.5
        # A disturbance hits neighbouring rounds, so only a few times of each count are taken.
        self.rows.learn([(n, max(verify / slowdown, self.verify(1))) for n, _, verify, _ in block], self.SHORTEST)
        alone = [(draft / slowdown, parts[0]) for _, draft, _, parts in block if len(parts) == 1]
        drafts: dict[tuple[str, int], list[tuple[int, float]]] = {}
        for seconds, part in alone:
            if not part.backlog:
                key = part.method, part.sequences.bit_length()
                drafts.setdefault(key, []).append((max(part.depth, 1), seconds))
        for key, measured in drafts.items():
            self.drafts.setdefault(key, Curve(0.8)).learn(measured, self.SHORTEST)
        for seconds, part in alone:
            if part.backlog and part.depth and self.has_price(part.method):  # an empty draft read less than its backlog
                excess = seconds - self.draft(part.method, part.sequences, part.depth)
                self.reading[part.method].append(max(excess, 0.0) / part.backlog)

    def state(self) -> dict[str, Any]:
        """What was learnt, as JSON, in units of a plain round of one sequence, for the next engine of the same kind."""
        unit = self.verify(1)
        return {
            "rows": {str(rows): quartile(times) / unit for rows, times in self.rows.points.items()},
            "level": self.rows.level,
            "drafts": [
                [method, size, {str(n): curve.level * quartile(times) / unit for n, times in curve.points.items()}]
                for (method, size), curve in self.drafts.items()
            ],
            "reading": {method: median(times) / unit for method, times in self.reading.items() if times},
            "cold": self.cold_penalty if self.cold_penalty_known else None,
            **({} if self.reads is None else {"experts": self.reads.state()}),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. The first plain round that is measured gives the unit in seconds."""
        self._unit_unknown = True
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
            self.cold_penalty = float(state["cold"])
            self._cold_penalties.extend([self.cold_penalty] * self.PLAIN_ROUNDS)

"""``adaptive``: each sequence drafts as far as recent acceptance and measured cost say it pays, 0 included.

The budgets maximise expected tokens per second of the coming round: positions are admitted in the order of their
chance of being reached and accepted (the prefix scheduler of DSpark, deepseek-ai/DeepSpec, algorithm 1, with the
best of all prefixes instead of the first drop, because rows are padded and cost comes in steps). They depend on
earlier rounds alone, so rules that compare p with q stay exact.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from forerun.core.sequence import Sequence
from forerun.core.tree import Draft, Verdict
from forerun.speculate.length.base import LengthPolicy, Seconds, Setting, policies
from forerun.speculate.length.costs import CostCurve


@dataclass(slots=True)
class _Belief:
    """Recent chance that a drafted position is accepted, as decayed counts; and when to try again after giving up."""

    matched: float
    tested: float
    silent: int = 0
    """Rounds since the last draft."""
    wait: int = 8
    """Silent rounds before the next probe; doubles while probes fail."""

    @property
    def rate(self) -> float:
        return self.matched / self.tested

    @property
    def rests(self) -> bool:
        """It has given up for now; its next probe is not due."""
        return 0 < self.silent < self.wait

    @property
    def due(self) -> bool:
        return self.silent >= self.wait


@policies.register("adaptive")
class Adaptive(LengthPolicy):
    """Recovers from 0: after ``wait`` plain rounds a sequence is probed with a short draft, at intervals that double
    up to ``LONGEST_WAIT`` while nothing is accepted."""

    reproducible = False
    DECAY = 0.9
    PRIOR_WEIGHT = 3.0
    PRIOR_RATE = 0.6
    LONGEST_WAIT = 256
    MARGIN = 1.01
    """A draft must promise this much more than plain decoding."""
    CALIBRATION = 3
    REPLAN = 4
    """Rounds that a plan is kept for the same batch: planning costs host time, and beliefs move slowly."""
    SAMPLE = 8
    """Of the plain rounds of a known price, one in so many is measured again."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.verify = CostCurve()
        self.draft = CostCurve()
        self.beliefs: dict[int, _Belief] = {}
        self.methods: dict[str, _Belief] = {}
        self._calibrating = False
        self._kept: tuple[list[int], list[int]] = ([], [])
        self._kept_left = 0
        self._plain_seen = 0

    def belief(self, sequence: Sequence) -> _Belief:
        found = self.beliefs.get(sequence.id)
        if found is None:
            assert sequence.drafter is not None
            method = self.methods.setdefault(sequence.drafter, self._prior(self.PRIOR_RATE))
            found = self.beliefs[sequence.id] = self._prior(method.rate)
            found.wait, found.silent = method.wait, method.silent
        return found

    def _prior(self, rate: float) -> _Belief:
        return _Belief(rate * self.PRIOR_WEIGHT, self.PRIOR_WEIGHT)

    def _rows(self, count: int) -> int:
        multiple = self.setting.row_multiple
        return -(-count // multiple) * multiple

    def budgets(self, sequences: Seq[Sequence]) -> list[int]:
        longest = [self.longest(sequence) for sequence in sequences]
        if not any(longest):
            return longest
        rows = sum(sequence.scheduled for sequence in sequences)
        self._calibrating = self._unknown(sequences, rows)
        if self._calibrating:
            return [0] * len(sequences)
        resting = [not cap or self.belief(s).rests for cap, s in zip(longest, sequences)]
        if all(resting):
            return [0] * len(sequences)
        who = [sequence.id for sequence in sequences]
        if self._kept_left and self._kept[0] == who:
            self._kept_left -= 1
            return [min(cap, 0 if rest else depth) for cap, rest, depth in zip(longest, resting, self._kept[1])]
        budgets = self._best(sequences, [0 if rest else cap for rest, cap in zip(resting, longest)], rows)
        self._kept, self._kept_left = (who, list(budgets)), self.REPLAN - 1
        for index, sequence in enumerate(sequences):
            if longest[index] and not budgets[index] and self.belief(sequence).due:
                budgets[index] = min(longest[index], max(1, self.setting.row_multiple - 1))
        return budgets

    def _unknown(self, sequences: Seq[Sequence], rows: int) -> bool:
        """Whether the price of plain decoding has yet to be measured for this batch."""
        known = self.verify.known(len(sequences), self._rows(rows))
        return known < self.CALIBRATION and not self._prefills(sequences)

    @staticmethod
    def _prefills(sequences: Seq[Sequence]) -> bool:
        return any(sequence.scheduled > 1 for sequence in sequences)

    def _best(self, sequences: Seq[Sequence], longest: Seq[int], rows: int) -> list[int]:
        """The admission prefix with the most expected tokens per second."""
        offers: list[tuple[float, int, int]] = []
        for index, sequence in enumerate(sequences):
            if longest[index]:
                rate = self.belief(sequence).rate
                offers.extend((rate**depth, index, depth) for depth in range(1, longest[index] + 1))
        offers.sort(key=lambda offer: (-offer[0], offer[2]))
        count = len(sequences)
        tokens = float(count)
        depths = [0] * count
        best, chosen = tokens / self._seconds(count, rows, [], depths) * self.MARGIN, list(depths)
        nodes = [self.setting.nodes[s.drafter] if s.drafter is not None else (0,) for s in sequences]
        for gain, index, depth in offers:
            tokens += gain
            rows += nodes[index][depth] - nodes[index][depth - 1]
            depths[index] = depth
            speed = tokens / self._seconds(count, rows, sequences, depths)
            if speed > best:
                best, chosen = speed, list(depths)
        return chosen

    def _seconds(self, count: int, rows: int, sequences: Seq[Sequence], depths: Seq[int]) -> float:
        """Expected seconds of a round: its verification, and one draft step per level of the deepest draft."""
        verify = self.verify.estimate(count, self._rows(rows))
        if verify is None:
            return 1.0
        drafting = sum(1 for depth in depths if depth)
        if not drafting:
            return verify
        levels = max(depths)
        draft = self.draft.estimate(drafting, levels)
        return verify + (draft if draft is not None else 0.1 * verify * levels)

    def observe(self, sequences: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict], seconds: Seconds) -> None:
        nodes = sum(len(draft) for draft in drafts)
        if all(verdict.fed == 1 for verdict in verdicts):
            point = (len(sequences), self._rows(len(sequences) + nodes))
            self._plain_seen += not nodes
            if nodes or self.verify.known(*point) < self.CALIBRATION or self._plain_seen % self.SAMPLE == 0:
                self.verify.add(*point, seconds.verify + seconds.accept)
        if nodes:
            levels = max(draft.depth for draft in drafts)
            self.draft.add(sum(1 for draft in drafts if len(draft)), levels, seconds.draft)
        if self._calibrating:
            return
        for sequence, draft, verdict in zip(sequences, drafts, verdicts):
            if sequence.drafter is not None and verdict.token is not None and verdict.fed == 1:
                self._learn(self.belief(sequence), draft, verdict)
                self._learn(self.methods[sequence.drafter], draft, verdict)

    def _learn(self, belief: _Belief, draft: Draft, verdict: Verdict) -> None:
        if not len(draft):
            belief.silent += 1
            return
        probe = belief.due
        belief.silent = 0
        belief.matched = belief.matched * self.DECAY + verdict.matched
        belief.tested = belief.tested * self.DECAY + verdict.tested
        if verdict.matched:
            belief.wait = 8
        elif probe:
            belief.wait = min(2 * belief.wait, self.LONGEST_WAIT)

    def release(self, sequence: Sequence) -> None:
        self.beliefs.pop(sequence.id, None)

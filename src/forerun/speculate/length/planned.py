"""``planned``: measure acceptance and cost over the first rounds, then keep the draft length that equation promises.

Leviathan et al. 2023, section 3.5: the gamma that maximises (1 - alpha^(gamma+1)) / ((1 - alpha)(gamma c + 1)), here
with the measured price of a verification by its rows instead of assuming it free.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from forerun.core.sequence import Sequence
from forerun.core.tree import Draft, Verdict
from forerun.speculate.length.adaptive import Adaptive
from forerun.speculate.length.base import Seconds, Setting, policies


@policies.register("planned")
class Planned(Adaptive):
    """Rates are per method; the plan is made once per method after ``ROUNDS`` drafted rounds."""

    ROUNDS = 24

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.plans: dict[str, int] = {}
        self.counts: dict[str, list[float]] = {}

    def _choose(self, sequences: Seq[Sequence]) -> list[int]:
        longest = [self.longest(sequence) for sequence in sequences]
        if any(cap and sequence.drafter not in self.plans for cap, sequence in zip(longest, sequences)):
            return [0] * len(sequences) if self._calibrates(sequences) else longest
        return [
            min(cap, self.plans[sequence.drafter]) if cap and sequence.drafter else 0
            for cap, sequence in zip(longest, sequences)
        ]

    def observe(self, sequences: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict], seconds: Seconds) -> None:
        super().observe(sequences, drafts, verdicts, seconds)
        for sequence, draft, verdict in zip(sequences, drafts, verdicts):
            if sequence.drafter is None or sequence.drafter in self.plans or not len(draft):
                continue
            counts = self.counts.setdefault(sequence.drafter, [0.0, 0.0, 0.0])
            for slot, value in enumerate((verdict.matched, verdict.tested, 1)):
                counts[slot] += value
            if counts[2] >= self.ROUNDS:
                self.plans[sequence.drafter] = self._length(sequence.drafter, counts[0] / counts[1], len(sequences))

    def _length(self, method: str, rate: float, count: int) -> int:
        """The depth with the most expected tokens per second when ``count`` sequences draft alike."""
        nodes = self.setting.nodes[method]

        def speed(depth: int) -> float:
            drafting = self.prices.drafting(method, count, depth) if depth else 0.0
            tokens = sum(rate**level for level in range(depth + 1))
            return tokens / (self.prices.round(count, count * (1 + nodes[depth])) + drafting)

        return max(range(len(nodes)), key=speed)

"""``planned``: measure acceptance and cost over the first rounds, then keep the best draft length for them.

Leviathan et al. 2023, section 3.5: the gamma that maximises (1 - alpha^(gamma+1)) / ((1 - alpha)(gamma c + 1)), here
with the measured price of a verification by its rows instead of assuming it free.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.core.request import RequestState
from forerun.speculate.length.adaptive import Adaptive, Plan
from forerun.speculate.length.base import Setting, policies


@policies.register("planned")
class Planned(Adaptive):
    """The plan is made once per method, after ``MEASURED`` drafts as long as the method allows."""

    MEASURED = 24

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.plans: dict[str, int] = {}
        self._rounds = dict.fromkeys(setting.nodes, 0)
        self._sums = {method: [0, 0] for method in setting.nodes}

    def _decide(self, sequences: Sequence[RequestState], longest: list[int]) -> Plan:
        for entry in self._entries:
            for _, method, _, made, kept in entry.drafts:
                self._rounds[method] += 1
                self._sums[method][0] += kept
                self._sums[method][1] += min(kept + 1, made)
        self._learn(sequences)
        known = frozenset([sequence.id for sequence in sequences])
        methods = {s.drafter for s, cap in zip(sequences, longest) if cap and s.drafter is not None}
        undecided = methods - set(self.plans)
        due = undecided and (not self.costs.sure(len(sequences)) or self._since >= self.CHECKS[0])
        if due and all(sequence.scheduled <= 1 for sequence in sequences):
            return Plan({}, 2, known=known)
        for method in undecided:
            if self._rounds[method] >= self.MEASURED:
                self.plans[method] = self._length(method, len(sequences))
        caps = {s.id: self.plans.get(s.drafter or "", cap) for s, cap in zip(sequences, longest)}
        return Plan(caps, self.TRIAL, 2.0, known)

    def _length(self, method: str, count: int) -> int:
        """The depth with the most expected tokens per second when ``count`` sequences draft alike."""
        nodes, (kept, tested) = self.setting.nodes[method], self._sums[method]
        rate = kept / max(1, tested)

        def speed(depth: int) -> float:
            drafting = self.costs.draft(method, count, depth)
            tokens = sum(rate**level for level in range(depth + 1))
            return tokens / (self.costs.verify(count * (1 + nodes[depth])) + drafting)

        return max(range(len(nodes)), key=speed)

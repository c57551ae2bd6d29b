"""``fixed``: every sequence drafts as far as its method allows."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from forerun.core.sequence import Sequence
from forerun.core.tree import Draft, Verdict
from forerun.speculate.length.base import LengthPolicy, Seconds, policies


@policies.register("fixed")
class Fixed(LengthPolicy):
    def budgets(self, sequences: Seq[Sequence]) -> list[int]:
        return [self.longest(sequence) for sequence in sequences]

    def observe(self, sequences: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict], seconds: Seconds) -> None:
        pass

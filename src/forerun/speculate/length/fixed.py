"""``fixed``: every sequence drafts the same number of tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from forerun.core.sequence import Sequence
from forerun.core.tree import Draft, Verdict
from forerun.speculate.length.base import LengthPolicy, policies


@policies.register("fixed")
class Fixed(LengthPolicy):
    def budgets(self, sequences: Seq[Sequence]) -> list[int]:
        return [self.num_speculative_tokens] * len(sequences)

    def observe(self, drafts: Seq[Draft], verdicts: Seq[Verdict], seconds: float) -> None:
        pass

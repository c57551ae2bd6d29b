"""``fixed``: every sequence drafts as far as its method allows."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.core.request import RequestState
from forerun.core.tree import Draft, Verdict
from forerun.speculate.length.base import LengthPolicy, Seconds, policies


@policies.register("fixed")
class Fixed(LengthPolicy):
    def budgets(self, sequences: Sequence[RequestState]) -> list[int]:
        return [self.longest(sequence) for sequence in sequences]

    def observe(
        self, sequences: Sequence[RequestState], drafts: Sequence[Draft], verdicts: Sequence[Verdict], seconds: Seconds
    ) -> None:
        pass

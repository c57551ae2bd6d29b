"""Length policies that no user would want."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.core.request import RequestState
from forerun.core.tree import Draft, Verdict
from forerun.speculate.length.base import LengthPolicy, Seconds


class Off(LengthPolicy):
    """Never drafts."""

    name = "off"

    def budgets(self, sequences: Sequence[RequestState]) -> list[int]:
        return [0] * len(sequences)

    def observe(
        self, sequences: Sequence[RequestState], drafts: Sequence[Draft], verdicts: Sequence[Verdict], seconds: Seconds
    ) -> None:
        pass


class Restless(Off):
    """Every budget there is, in an order that differs between sequences: none, the full one, something between."""

    name = "restless"

    def budgets(self, sequences: Sequence[RequestState]) -> list[int]:
        return [self._budget(sequence, self.longest(sequence)) for sequence in sequences]

    @staticmethod
    def _budget(sequence: RequestState, most: int) -> int:
        count = len(sequence.tokens)
        return (7 * count + 3 * sequence.id + count // 5) % (most + 1)

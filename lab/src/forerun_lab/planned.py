"""``planned``: measures drafts of full length, then keeps the best length for good."""

from __future__ import annotations

from forerun.core.request import Requests
from forerun.core.tree import Drafts, Verdicts
from forerun.speculate.length.base import LengthPolicy, Seconds, Setting
from forerun.speculate.length.prices import Prices
from forerun.theory import expected_tokens


class Planned(LengthPolicy):
    """Measures ``MEASURED`` drafts of full length per method. Then the depth is the one with the most expected tokens
    per second at the measured acceptance rate (Leviathan et al. 2023, equation 1) and price."""

    reproducible = False
    MEASURED = 24

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.prices = Prices(setting.nodes, setting.row_multiple, setting.mixture, setting.trials, setting.threads)
        self.plans: dict[str, int] = {}
        self._counts = {method: [0, 0, 0] for method in setting.nodes}
        """Drafts, accepted tokens, and tokens that were tested."""

    def budgets(self, sequences: Requests) -> list[int]:
        return [min(self.longest(s), self.plans.get(s.drafter or "", self.longest(s))) for s in sequences]

    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, seconds: Seconds) -> None:
        for sequence, draft, verdict in zip(sequences, drafts, verdicts):
            method = sequence.drafter or ""
            if not len(draft) or method in self.plans:
                continue
            tested = min(verdict.matched + 1, draft.depth)
            counts = zip(self._counts[method], (1, verdict.matched, tested))
            self._counts[method] = [before + more for before, more in counts]
            if self._counts[method][0] >= self.MEASURED:
                self.plans[method] = self._length(method, len(sequences))

    def _length(self, method: str, count: int) -> int:
        """The depth with the most expected tokens per second when ``count`` sequences draft alike."""
        table, nodes = self.prices.at(count), self.setting.nodes[method]
        rate = self._counts[method][1] / self._counts[method][2]

        def speed(depth: int) -> float:
            drafting = self.prices.draft(table, method, depth) if depth else 0.0
            return expected_tokens(rate, depth) / (
                self.prices.verify(table, count * (1 + nodes[depth]), count) + drafting
            )

        return max(range(len(nodes)), key=speed)

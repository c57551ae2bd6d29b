"""What rounds brought and cost, accounted for some together, where the processor's caches know the way."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from forerun.core.tree import Draft, Verdict
from forerun.speculate.length.account import Account
from forerun.speculate.length.base import Seconds
from forerun.speculate.length.plan import decodes
from forerun.speculate.length.prices import Drafting, Prices


class Entry(NamedTuple):
    """A round with drafts."""

    groups: Seq[Drafting]
    drafts: Seq[Draft]
    verdicts: Seq[Verdict]
    seconds: Seconds


class Ledger:
    """Rounds since the last settlement, and the account that they are booked on."""

    AFTERMATH = 2.5
    """Plain rounds that are slow as if the first one's chill lasted so long."""
    FRESH = 4
    """Rounds after a plain one in which a round's own time tells what it cost."""
    SURPRISE = 0.75
    """Most plain rounds that such a round may seem dearer than expected; it may have been disturbed."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.account = Account()
        self.host = 0.0
        """Seconds that the policy itself takes for a round with drafts."""
        self.entries: list[Entry] = []
        self.idle = 0
        """Rounds without drafts, all of them before ``entries``."""

    def rest(self) -> int:
        """Settle the rounds without drafts; returns how many there were."""
        idle, self.idle = self.idle, 0
        self.account.earn(idle)
        return idle

    def settle(self) -> int:
        """Settle the rounds with drafts; returns how many tokens they brought."""
        total = 0
        priced: dict[tuple[int, int], tuple[float, float, float]] = {}
        for groups, drafts, verdicts, seconds in self.entries:
            self.account.pay(1)
            if not decodes(verdicts):
                continue
            count = len(verdicts)
            rows = count + sum([len(draft) for draft in drafts])
            self.account.book(-self.aftermath())
            self.prices.drafted(count, rows, seconds, groups)
            key = rows, id(groups)
            if key not in priced:
                priced[key] = self._price(count, rows, groups)
            tokens = sum([len(verdict.tokens) for verdict in verdicts])
            self._book(count, tokens, seconds, priced[key])
            total += tokens
        self.entries.clear()
        return total

    def aftermath(self) -> float:
        """What plain rounds after drafts are going to lose that begin now."""
        return self.AFTERMATH * ((self.prices.chill or 1.0) - 1.0) if self.prices.rested else 0.0

    def _price(self, count: int, rows: int, groups: Seq[Drafting]) -> tuple[float, float, float]:
        """Seconds of a plain round, of one with these drafts, and of what their drafters catch up on in it."""
        prices = self.prices
        cost = prices.round(count, rows) + sum([prices.drafting(*part) for part in groups])
        behind = sum([prices.draft[part.method].per_token * part.behind for part in groups])
        return prices.round(count, count), cost, behind

    def _book(self, count: int, tokens: int, seconds: Seconds, price: tuple[float, float, float]) -> None:
        """Book what a round with drafts brought and cost."""
        (plain, cost, behind), prices = price, self.prices
        if prices.since <= self.FRESH:
            spent = (seconds.draft + seconds.verify + seconds.accept) / prices.pace
            cost = min(max(spent, cost), cost + self.SURPRISE * plain)
        self.account.owed += behind / plain
        self.account.book(tokens / count - (cost - behind + self.host / prices.pace) / plain)

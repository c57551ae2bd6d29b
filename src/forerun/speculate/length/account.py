"""What drafting won and lost against plain decoding."""

from __future__ import annotations


class Account:
    """In plain rounds. Every round without drafts pays ``SPEND`` in; a draft takes out what it costs and pays in the
    tokens that it brought."""

    SPEND = 0.005
    START = 2.0
    """The first balance for one sequence. Luck evens out over n, who get less."""
    SAVED = 12.0
    """Most that is kept, or owed."""
    HORIZON = 32
    """Rounds over which the price of a drafter's catching up is spread."""

    def __init__(self) -> None:
        self.balance = 0.0
        self.owed = 0.0
        """Price of what drafters caught up on that has yet to be paid, as it serves later rounds too."""
        self._opened = False

    def open(self, share: float) -> None:
        """Before the first draft: begin with this share of ``START``."""
        if not self._opened:
            self._opened, self.balance = True, share * self.START

    def book(self, amount: float) -> None:
        if self._opened:
            self.balance = max(min(self.balance + amount, self.SAVED), -self.SAVED)

    def pay(self, rounds: int) -> None:
        """Pay what so many rounds owe for catching up."""
        if not self.owed:
            return
        left = self.owed * (1.0 - 1.0 / self.HORIZON) ** rounds
        self.book(left - self.owed)
        self.owed = left

    def earn(self, rounds: int) -> None:
        """So many rounds had no drafts."""
        self.pay(rounds)
        if self._opened:
            self.balance = max(self.balance, min(self.balance + rounds * self.SPEND, self.START))

"""What a draft model will say next, guessed from its text, so that one call of it drafts several tokens.

The end of the text is looked up in what is before it (prompt lookup, Saxena 2023); the draft model reads what followed
there together with its last token, and keeps what it would have said itself. This is staged speculative decoding
(Spector and Re, arXiv 2308.04623) with n-grams inside, in one compiled call: drafts are the same, but sooner.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun import kernels
from forerun.kernels.structs import PassStruct

RATES = (0.0, 0.4, 0.6, 0.8)
"""By tokens of the match, so many at most: how often a guess is expected to be right, until some have been seen."""
REACH = len(RATES) - 1
RECENT = 8192
"""How many of a text's last tokens are searched."""
WEIGHT, FADE = 4.0, 0.98
"""Guesses that an expectation counts for, and what a match leaves of the evidence before it."""
PRICE = 0.06
"""What another row is expected to add to a call of one row, until calls have been timed."""
VARIED = 0.1
"""Variance of the row counts above which their price can be fitted."""


@dataclass(slots=True)
class ChainGuess:
    """What is guessed for some chains, and what became of the first one's."""

    counts: array[int]
    longest: int
    texts: array[int] = field(default_factory=lambda: array("q"))
    """End to end, each with its first guess behind it."""
    lengths: array[int] = field(default_factory=lambda: array("q"))
    guessed: array[int] = field(default_factory=lambda: array("q"))
    first: list[list[int]] = field(default_factory=list)
    """What the first call reads behind each text."""
    match: int = 0
    """Tokens of the first text's end that were found before the first call."""
    passes: array[int] = field(init=False)

    def __post_init__(self) -> None:
        self.passes = array("q", bytes(8 * len(PassStruct._fields) * self.longest))

    @property
    def rows(self) -> int:
        """The most that a call reads."""
        return len(self.first) * (1 + max(self.counts))

    def add(self, text: array[int], depth: int) -> None:
        """Look up what the first call reads behind ``text`` for a chain of at most ``depth`` tokens."""
        library = kernels.library()
        assert library is not None
        out, found = array("q", bytes(8 * max(1, *self.counts))), array("q", (0, 0))
        at = [numbers.buffer_info()[0] for numbers in (text, self.counts, out, found)]
        library.look_up(at[0], len(text), at[1], REACH, depth - 1, at[2], at[3])
        if not self.first:
            self.match = found[0]
        guess = out[: found[1]]
        self.texts += text + guess
        self.lengths.append(len(text))
        self.guessed.append(len(guess))
        self.first.append(guess.tolist())

    @property
    def fields(self) -> dict[str, int]:
        """Of ``structs.Chains``."""
        parts = {
            "texts": self.texts, "lengths": self.lengths, "guessed": self.guessed, "most": self.counts,
            "passes": self.passes,
        }  # fmt: skip
        return {"reach": REACH} | {name: part.buffer_info()[0] for name, part in parts.items()}


class ChainLookup:
    """Guesses at most ``most`` tokens, as many as pay: the n-th saves a call if all n are right, and costs a row."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.right = [WEIGHT * rate for rate in RATES]
        self.tried = [WEIGHT] * len(RATES)
        self.price = PRICE
        self._sums = [0.0] * 5

    def counts(self, chains: int = 1) -> array[int]:
        """int64 [REACH + 1]: how many tokens to guess, by how many tokens of the end were found. A call is saved
        only once every one of the ``chains`` has got that far, so each chain's row counts."""
        result, price = array("q", [0]), chains * self.price / (1.0 + (chains - 1) * self.price)
        for right, tried in zip(self.right[1:], self.tried[1:]):
            rate, count = right / tried, 0
            while count < self.most and rate ** (count + 1) > price:
                count += 1
            result.append(count)
        return result

    def begin(self, texts: Sequence[Sequence[int]], depths: Sequence[int], known: int) -> ChainGuess | None:
        """For chains of at most so many tokens behind each text, by a model that knows the first ``known`` ids. None:
        no guess pays; what says so is forgotten, little by little."""
        guess = ChainGuess(self.counts(len(texts)), max(depths))
        if not any(guess.counts):
            self.price += (1.0 - FADE) * (PRICE - self.price)
            for match in range(len(RATES)):
                self._see(match, 0, 0)
            return None
        for text, depth in zip(texts, depths):
            recent = array("q", text[-RECENT:])
            guess.add(recent if max(recent) < known else array("q", (min(token, known - 1) for token in recent)), depth)
        return guess

    def _see(self, match: int, right: int, tried: int) -> None:
        self.right[match] = FADE * self.right[match] + (1.0 - FADE) * WEIGHT * RATES[match] + right
        self.tried[match] = FADE * self.tried[match] + (1.0 - FADE) * WEIGHT + tried

    def learn(self, guess: ChainGuess) -> None:
        """From the calls of a chain. The first one reads more than what was guessed."""
        size = len(PassStruct._fields)
        for at in range(0, len(guess.passes), size):
            each = PassStruct(*guess.passes[at : at + size])
            if not each.rows:
                break
            match = each.match if at else guess.match
            self.right[match] = FADE * self.right[match] + (1.0 - FADE) * WEIGHT * RATES[match] + each.right
            self.tried[match] = (
                FADE * self.tried[match] + (1.0 - FADE) * WEIGHT + each.right + (each.right < each.guessed)
            )
            if at:
                self._time(each.rows, each.nanoseconds / 1e9)

    def _time(self, rows: int, seconds: float) -> None:
        """Fit a line through what calls took by rows, recent ones first."""
        weight, x, y, xx, xy = self._sums
        if weight:
            seconds = min(seconds, 3.0 * y / weight)
        sample = (1.0, rows, seconds, rows * rows, rows * seconds)
        self._sums = weight, x, y, xx, xy = [FADE * before + now for before, now in zip(self._sums, sample)]
        variance = xx / weight - (x / weight) ** 2
        if weight > 8.0 and variance > VARIED:
            slope = (xy / weight - x * y / weight**2) / variance
            one = y / weight - slope * (x / weight - 1.0)
            self.price = max(slope / one, 0.01) if one > 0.0 else PRICE
        elif variance < VARIED / 4:
            self.price = PRICE

"""A suffix automaton of one or several token lists, grown token by token, with counted occurrences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import log

ROOT = 0
MAX_RECOUNT = 32


class Automaton:
    """Blumer et al.'s automaton: one state per set of substrings that end at the same places.

    Amortised O(1) per token, at most two states per token. ``counts[state]`` is how often its substrings occur;
    after each token only the ``MAX_RECOUNT`` longest suffixes that occur elsewhere are recounted, so that a run of
    one token costs no more than other text (its short substrings are then undercounted).
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.counts = [0]
        self.last = ROOT

    def __len__(self) -> int:
        """States."""
        return len(self.next)

    def begin(self) -> None:
        """Start another token list: no substring reaches across."""
        self.last = ROOT

    def extend(self, token: int) -> None:
        """Append one token to the current list."""
        known = self.next[self.last].get(token)
        if known is None:
            self.last = self._append(token)
        elif self.length[known] == self.length[self.last] + 1:
            self.last = known
        else:
            self.last = self._split(self.last, token, known)
        state, counts, link = self.last, self.counts, self.link
        for _ in range(MAX_RECOUNT):
            if state == ROOT:
                break
            counts[state] += 1
            state = link[state]

    def _new(self, length: int, following: dict[int, int], link: int, count: int) -> int:
        self.next.append(following)
        self.link.append(link)
        self.length.append(length)
        self.counts.append(count)
        return len(self.next) - 1

    def _append(self, token: int) -> int:
        """A state for the whole list so far, which has not occurred before."""
        state = self.last
        fresh = self._new(self.length[state] + 1, {}, ROOT, 0)
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = fresh
            state = self.link[state]
        if state >= 0:
            known = self.next[state][token]
            if self.length[known] != self.length[state] + 1:
                known = self._split(state, token, known)
            self.link[fresh] = known
        return fresh

    def _split(self, state: int, token: int, known: int) -> int:
        """Part the shorter substrings of ``known``, those that ``state`` reaches by ``token``, from the longer."""
        clone = self._new(self.length[state] + 1, dict(self.next[known]), self.link[known], self.counts[known])
        self.link[known] = clone
        while state >= 0 and self.next[state].get(token) == known:
            self.next[state][token] = clone
            state = self.link[state]
        return clone

    def advance(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """The longest substring that ends a text, after one more token: its state and length. ``state`` and
        ``matched`` are those before it."""
        while state != ROOT and token not in self.next[state]:
            state = self.link[state]
            matched = self.length[state]
        after = self.next[state].get(token)
        return (ROOT, 0) if after is None else (after, matched + 1)

    def suffix(self) -> tuple[int, int]:
        """The longest suffix of the current list that also occurs elsewhere: its state and length."""
        state = self.link[self.last]
        return (ROOT, 0) if state < 0 else (state, self.length[state])

    def continuations(self, state: int) -> Iterator[tuple[int, float, int]]:
        """What followed ``state``'s substrings: token, log of its share, next state; the most frequent first, and
        of equally frequent ones the latest."""
        following = self.next[state]
        if len(following) == 1:
            for token, after in following.items():
                yield token, min(0.0, log(self.counts[after] / self.counts[state])), after
            return
        counts = self.counts
        total = max(counts[state], 1)
        ranked = sorted(((counts[after], after, token) for token, after in following.items()), reverse=True)
        for number, after, token in ranked:
            yield token, min(0.0, log(max(number, 1) / total)), after

    @classmethod
    def of(cls, lists: Iterable[Sequence[int]]) -> Automaton:
        built = cls()
        for tokens in lists:
            built.begin()
            for token in tokens:
                built.extend(token)
        return built

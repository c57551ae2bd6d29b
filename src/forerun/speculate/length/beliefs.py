"""What recent rounds say about drafts: how often one is made, and how often each of its positions is accepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

from forerun.core.sequence import Sequence
from forerun.core.tree import Draft, Verdict

Offer = tuple[float, int, int, float]
"""A position that may be drafted: expected tokens it adds, its depth, whose it is, expected rows it adds."""


class News(NamedTuple):
    """What became of one sequence's draft, for which a depth of ``asked`` was asked."""

    sequence: Sequence
    asked: int
    draft: Draft
    verdict: Verdict

    @property
    def fate(self) -> tuple[int, str, int, int, int, int]:
        """Whose it was and which method's; how deep it was meant to be, and was; what was tested, and matched. Where a
        draft ends though all of it was right, its next position counts as one that was missed."""
        sequence, asked, draft, verdict = self
        assert sequence.drafter is not None
        tested = max(verdict.tested, min(asked, verdict.matched + 1))
        return sequence.id, sequence.drafter, asked, draft.depth, tested, verdict.matched


def _average(fade: float, count: int) -> float:
    """What is left on average of ``count`` pieces of evidence of which each fades those before it."""
    return (1.0 - fade**count) / (count * (1.0 - fade))


class Belief:
    """Counts by depth. A position counts as tested when everything before it was accepted."""

    def __init__(self, depth: int) -> None:
        self.tested = [0.0] * depth
        self.matched = [0.0] * depth

    def learn(self, tested: int, matched: int, weight: float = 1.0) -> None:
        """One draft: its first ``tested`` positions were judged, the first ``matched`` accepted."""
        for depth in range(min(tested, len(self.tested))):
            self.tested[depth] += weight
            if depth < matched:
                self.matched[depth] += weight

    def fade(self, share: float) -> None:
        """Keep only ``share`` of the evidence."""
        self.tested = [share * count for count in self.tested]
        self.matched = [share * count for count in self.matched]

    def loosen(self, most: float) -> None:
        """Let the evidence weigh no more than ``most`` tests, so that news is believed."""
        if self.tested[0] > most:
            self.fade(most / self.tested[0])

    def rates(self, prior: Seq[float], weight: float) -> list[float]:
        """Chance of acceptance by depth, where ``prior`` counts as ``weight`` tests."""
        return [(m + weight * p) / (t + weight) for m, t, p in zip(self.matched, self.tested, prior)]


class MethodBelief(Belief):
    """All sequences' drafts of one method together; at first, ``rate`` is believed as if from ``weight`` tests."""

    def __init__(self, depth: int, rate: float, weight: float) -> None:
        super().__init__(depth)
        self.weight = weight
        self.tested[0], self.matched[0] = weight, weight * rate
        self.asked = [1.0] * depth
        self.made = [1.0] * depth

    def learn_made(self, asked: int, made: int, weight: float = 1.0) -> None:
        """A draft of depth ``asked`` was asked for; it got ``made``."""
        for depth in range(asked):
            self.asked[depth] += weight
            if depth < made:
                self.made[depth] += weight

    def fade(self, share: float) -> None:
        super().fade(share)
        self.asked = [share * count for count in self.asked]
        self.made = [share * count for count in self.made]

    def acceptance(self) -> list[float]:
        """Chance of acceptance by depth; each depth starts from what the one before it found."""
        rates = [self.matched[0] / self.tested[0]]
        for matched, tested in zip(self.matched[1:], self.tested[1:]):
            rates.append((matched + self.weight * rates[-1]) / (tested + self.weight))
        return rates

    def existence(self) -> list[float]:
        """By depth, the share of drafts that get there."""
        return [made / asked for made, asked in zip(self.made, self.asked)]


class Beliefs:
    """Of methods and of the sequences that draft with them. A round with drafts of a method leaves ``method_fade`` of
    the evidence about it that came before, and a draft of a sequence ``own_fade`` of what was known of that one."""

    def __init__(self, methods: dict[str, MethodBelief], method_fade: float, own_fade: float) -> None:
        self.methods = methods
        self.method_fade, self.own_fade = method_fade, own_fade
        self.own: dict[int, Belief] = {}

    def learn(self, rounds: Seq[tuple[Seq[str], Seq[News]]], known: Container[int]) -> None:
        """Take rounds to heart: the methods that drafted in each, and what became of the drafts. Rounds that are learnt
        together fade alike, by as much as one after the other on average. Only sequences that are ``known`` have
        beliefs of their own."""
        shares = {}
        for method, count in Counter(method for methods, _ in rounds for method in methods).items():
            self.methods[method].fade(self.method_fade**count)
            shares[method] = _average(self.method_fade, count)
        fates = Counter(news.fate for _, each in rounds for news in each)
        drafts: dict[int, int] = {}
        for (key, method, asked, made, tested, matched), count in fates.items():
            belief, weight = self.methods[method], count * shares[method]
            belief.learn_made(asked, made, weight)
            if made:
                belief.learn(tested, matched, weight)
                drafts[key] = drafts.get(key, 0) + count
        for key, count in drafts.items():
            if key in self.own:
                self.own[key].fade(self.own_fade**count)
        for (key, method, _, made, tested, matched), count in fates.items():
            if made and key in known:
                mine = self.own.setdefault(key, Belief(len(self.methods[method].tested)))
                mine.learn(tested, matched, count * _average(self.own_fade, drafts[key]))

    def loosen(self, method: float, own: float) -> None:
        """Let what is known of a method weigh no more than so many tests, and of a sequence."""
        for shared in self.methods.values():
            shared.loosen(method)
        for belief in self.own.values():
            belief.loosen(own)

    def forget(self, budgets: Mapping[int, int], active: set[str | None], share: float, most: float) -> None:
        """Hold less against those whom a plan leaves out: of sequences keep ``share``, of methods ``most`` tests."""
        for key, budget in budgets.items():
            if not budget and key in self.own:
                self.own[key].fade(share)
        for method, belief in self.methods.items():
            if method not in active:
                belief.loosen(most)

    def offers(
        self, sequences: Seq[Sequence], longest: Seq[int], nodes: Mapping[str, Seq[int]], weight: float
    ) -> list[Offer]:
        """Every position that may be drafted, the most promising first. A method's rate counts as ``weight`` tests of a
        sequence; ``nodes`` as in ``Setting``."""
        exists = {method: belief.existence() for method, belief in self.methods.items()}
        shared = {method: belief.acceptance() for method, belief in self.methods.items()}
        offers: list[Offer] = []
        for index, (sequence, cap) in enumerate(zip(sequences, longest)):
            if not cap or sequence.drafter is None:
                continue
            rates, there, rows = shared[sequence.drafter], exists[sequence.drafter], nodes[sequence.drafter]
            own = self.own.get(sequence.id)
            if own is not None:
                rates = own.rates(rates, weight)
            chance = 1.0
            for depth in range(1, cap + 1):
                chance *= rates[depth - 1]
                added = there[depth - 1] * (rows[depth] - rows[depth - 1])
                offers.append((chance * there[0], depth, index, added))
        offers.sort(key=lambda offer: (-offer[0], offer[1]))
        return offers

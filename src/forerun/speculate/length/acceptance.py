"""What a length policy learns: lengths of answers, acceptance by depth, and by what a look-up has found."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import log

from forerun.core.request import RequestState


class AnswerLengths:
    """The lengths of recent answers, from which it predicts how long a running one goes on.

    The prior is a Lomax distribution of shape 1: half of the answers are longer than ``HALF`` tokens. It counts as much
    as ``WEIGHT`` answers.
    """

    HALF = 32
    WEIGHT = 4.0

    def __init__(self) -> None:
        self.seen: deque[int] = deque(maxlen=24)

    def beyond(self, sequence: RequestState, wait: int) -> tuple[float, float]:
        """The chance that this answer gets more than ``wait`` further tokens, and the expected number of those."""
        so_far, most = sequence.num_output, sequence.remaining
        if most <= wait:
            return 0.0, 0.0
        start, end = self.HALF + so_far, self.HALF + so_far + wait
        longer = [min(length - so_far, most) for length in self.seen if length > so_far]
        after = [length - wait for length in longer if length > wait]
        weight = self.WEIGHT + len(longer)
        chance = self.WEIGHT * start / end + len(after)
        return chance / weight, (self.WEIGHT * start * log((start + most) / end) + sum(after)) / weight


class Acceptance:
    """What recent drafts yielded by depth, as counts that decay by ``fade`` with each draft.

    ``rates`` and ``existence`` are estimates: the prior weighs as much as ``weight`` drafts and decays as well.
    """

    FIRST = 0.6
    """The prior rate at the first depth; deeper, the prior is the estimate of the depth before."""
    LEAST_WEIGHT = 0.5
    """The least weight of the prior."""

    def __init__(self, depth: int, weight: float = 3.0, fade: float = 0.95, first: float = FIRST) -> None:
        self.weight = weight
        self.fade = fade
        self.first = first
        self._prior_weight = weight
        self.reached = [0.0] * depth
        """Drafts whose tokens before this depth were all accepted."""
        self.accepted = [0.0] * depth
        self.requested = [0.0] * depth
        """Drafts that were budgeted to this depth and had a token one depth before it."""
        self.drafted = [0.0] * depth
        self.extra_nodes = 0.0
        """Mean number of nodes beyond those of a draft's depth: a second token beside the last one."""

    @property
    def counts(self) -> tuple[list[float], list[float], list[float], list[float]]:
        return self.reached, self.accepted, self.requested, self.drafted

    def count(self, extra_nodes: int) -> None:
        self.extra_nodes += (1.0 - self.fade) * (extra_nodes - self.extra_nodes)

    def learn(self, requested: int, drafted: int, accepted: int) -> None:
        """Count one draft, by its lengths."""
        fade = self.fade
        self._prior_weight = max(fade * self._prior_weight, self.LEAST_WEIGHT)
        for depth in range(min(requested, drafted + 1, len(self.requested))):
            self.requested[depth] = fade * self.requested[depth] + 1.0
            self.drafted[depth] = fade * self.drafted[depth] + (depth < drafted)
            if depth <= accepted:
                self.reached[depth] = fade * self.reached[depth] + 1.0
                self.accepted[depth] = fade * self.accepted[depth] + (depth < accepted)

    def take(self, counts: Sequence[Sequence[float]], most: float) -> None:
        """Takes ``counts`` from elsewhere, of at most so many drafts. Raises ValueError for another depth."""
        depth = len(self.reached)
        if len(counts) != 4 or any(len(values) != depth for values in counts):
            raise ValueError(f"not counts of {depth} depths")
        self.reached, self.accepted, self.requested, self.drafted = ([float(x) for x in values] for values in counts)
        self.cap_weight(most)

    def cap_weight(self, most: float) -> None:
        """Reduce the evidence to at most so many drafts, so that new ones change the estimates."""
        for counts, hits in ((self.reached, self.accepted), (self.requested, self.drafted)):
            for depth, count in enumerate(counts):
                if count > most:
                    counts[depth], hits[depth] = most, hits[depth] * most / count

    def rates(self, prior: Sequence[float] | None = None) -> list[float]:
        """By depth, the chance that a draft has a token there and that it is accepted, if all before it are.

        ``prior``: rates by depth without evidence; evidence at one depth multiplies the odds at deeper ones, too. None:
        ``first``, then the estimate of the depth before.
        """
        if prior is None:
            return self._chances(self.reached, self.accepted, self.first)
        rates, lift = [], 1.0
        for hit, n, rate in zip(self.accepted, self.reached, prior):
            lifted = lift * rate / (1.0 - rate + lift * rate)
            rates.append((hit + self.weight * lifted) / (n + self.weight))
            lift = _odds(rates[-1]) / _odds(rate)
        return rates

    def existence(self) -> list[float]:
        """By depth, the chance that a draft has a token there, accepted or not, if it has one at the depth before."""
        return self._chances(self.requested, self.drafted, 1.0)

    def _chances(self, counts: Sequence[float], hits: Sequence[float], before: float) -> list[float]:
        chances = []
        for count, hit in zip(counts, hits):
            before = (hit + self._prior_weight * before) / (count + self._prior_weight)
            chances.append(before)
        return chances


def _odds(rate: float) -> float:
    rate = max(0.01, min(rate, 0.99))
    return rate / (1.0 - rate)


class LookupAcceptance:
    """Acceptance of looked-up tokens by their ``evidence`` (see ``Draft.evidence``).

    A request's own factor, of kept over expected tokens, starts at 1.
    """

    PRIOR = tuple(
        frequency * length / (length + 1.2) for length in (1, 2, 3.5, 6, 12, 24) for frequency in (0.2, 0.55, 0.95)
    )
    """Rates by evidence before anything was tried."""
    WEIGHT, FADE = 4.0, 0.995
    """How many tokens the prior weighs, and the decay of earlier tokens."""
    OWN_WEIGHT, OWN_FADE = 1.0, 0.95

    def __init__(self) -> None:
        self.tried = [self.WEIGHT] * len(self.PRIOR)
        self.kept = [self.WEIGHT * rate for rate in self.PRIOR]
        self.own: dict[int, tuple[float, float]] = {}
        """By sequence: tokens kept, and tokens that were expected to be."""

    def rate(self, sequence: int, evidence: int) -> float:
        """The chance that a token with this evidence is accepted, if all before it are."""
        kept, expected = self.own.get(sequence, (0.0, 0.0))
        factor = (kept + self.OWN_WEIGHT) / (expected + self.OWN_WEIGHT)
        return min(factor * self.kept[evidence] / self.tried[evidence], 0.98)

    def learn(self, sequence: int, evidence: int, kept: bool) -> None:
        """Counts one token."""
        had, expected = self.own.get(sequence, (0.0, 0.0))
        expects = self.kept[evidence] / self.tried[evidence]
        self.own[sequence] = self.OWN_FADE * had + kept, self.OWN_FADE * expected + expects
        prior = (1.0 - self.FADE) * self.WEIGHT
        self.tried[evidence] = self.FADE * self.tried[evidence] + prior + 1.0
        self.kept[evidence] = self.FADE * self.kept[evidence] + prior * self.PRIOR[evidence] + kept

    def take(self, tried: Sequence[float], kept: Sequence[float]) -> None:
        """Takes counts from elsewhere. Raises ValueError for another number of kinds."""
        if not len(tried) == len(kept) == len(self.PRIOR):
            raise ValueError(f"not counts of {len(self.PRIOR)} kinds")
        self.tried, self.kept = [float(x) for x in tried], [float(x) for x in kept]

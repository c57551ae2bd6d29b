"""What a length policy learns of answers and drafts: how long answers are, and which tokens are accepted."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from math import exp, log
from operator import mul
from typing import Any

from forerun.core.request import RequestState
from forerun.core.tree import Draft


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


class Drafting:
    """Whether a method's drafted tokens are accepted if all before them are: an online logistic regression.

    A token's log odds are the sum of its depth's, its request's, and, if its drafter began with the last tokens of the
    text, its window's. Each is a mean and a variance, which a step of an extended Kalman filter updates. An update
    at one depth also moves deeper ones, the less known the more, but never shallower ones.
    """

    DEEPER, DRIFT = 1.0, 0.002
    """Variance between a depth and the one before, and what the variance of a depth grows by with each draft."""
    OWN, FADE = 0.3, 0.005
    """Variance of a request's log odds, and how much of its own estimate is forgotten with each token."""
    AGE = 0.2
    """How much is forgotten with each request for which nothing was drafted."""
    LENGTHS = 0.05
    """Weight of a draft in ``exists`` and ``beside``."""

    WINDOWS = (64, 128, 256)
    """A drafter may begin with this many last tokens, if its backlog is at least twice as long."""

    def __init__(self, depth: int, rate: float, weight: float, loss: float, variance: float) -> None:
        """
        Args:
            depth: the greatest.
            rate: the acceptance rate before anything was tried, which weighs as much as ``weight`` tokens.
            loss: one that began with the last n tokens keeps n / (n + loss) of its first rate.
            variance: of a window's log odds.
        """
        self.depth, first = depth, _log_odds(rate)
        self.prior = [(first, 1.0 / (weight * rate * (1.0 - rate))), *[(first, self.DEEPER)] * (self.depth - 1)]
        self.depths = [[*each] for each in self.prior]
        self.begun = {n: [_log_odds(rate * n / (n + loss)) - first, variance] for n in self.WINDOWS}
        self.own: dict[int, list[float]] = {}
        """By request."""

        self.exists = [1.0] * self.depth
        """By depth, the chance that a draft that may be so long is."""
        self.beside = [0.0, 0.0]
        """Of drafts that end early: tokens that are verified beside the last one, and how many of them are accepted."""

    def early(self, depth: int) -> float:
        """The chance that a draft of at most ``depth`` tokens ends early."""
        return self.exists[0] - self.exists[depth - 1]

    def expected(self, sequence: RequestState) -> list[float]:
        """By depth, the chance that all tokens of the sequence's next draft up to there are accepted."""
        offset = self.own[sequence.id][0] if sequence.id in self.own else 0.0
        if sequence.reads is not None:
            offset += self.begun[sequence.reads][0]
        return list(accumulate([1.0 / (1.0 + exp(-odds - offset)) for odds, _ in self.depths], mul))

    def count(self, sequence: RequestState, budget: int, draft: Draft, path: Sequence[int]) -> None:
        """Learns from a draft of at most ``budget`` tokens, of which the nodes of ``path`` were accepted."""
        matched = len(path)
        if 0 < draft.depth < budget:
            beside = len(draft) - draft.depth
            kept = beside > 0 and path[-1:] == [len(draft) - 1]
            matched -= kept  # a draft of at most one token has none beside it
            self.beside = [mean + self.LENGTHS * (x - mean) for mean, x in zip(self.beside, (beside, kept))]
        others = [self.own.setdefault(sequence.id, [0.0, self.OWN])]
        if sequence.reads is not None:
            others.append(self.begun[sequence.reads])
        moved, asked = 0.0, min(budget, draft.depth + 1)
        for index, (depth, (_, most)) in enumerate(zip(self.depths, self.prior)):
            depth[1] = min(depth[1] + self.DRIFT, most)
            moved *= depth[1] / most
            depth[0] += moved
            if index < budget:
                self.exists[index] += self.LENGTHS * ((index < draft.depth) - self.exists[index])
            if index < asked and index <= matched:
                moved += _update([depth, *others], index < matched)

    def forget(self, request: int) -> None:
        """A round of this request had no draft."""
        if (own := self.own.get(request)) is not None:
            own[:] = own[0] - self.FADE * own[0], own[1] + self.FADE * (self.OWN - own[1])

    def release(self, request: int) -> None:
        """This request has ended. If nothing was drafted for it, what earlier ones taught holds less."""
        if self.own.pop(request, None) is None:
            for depth, (mean, most) in zip(self.depths, self.prior):
                depth[:] = depth[0] + self.AGE * (mean - depth[0]), depth[1] + self.AGE * (most - depth[1])

    def state(self) -> Any:
        return self.depths, self.exists, self.beside

    def restore(self, state: Any) -> None:
        """Raises TypeError or ValueError for the state of other depths. What was learnt counts half: it may come from
        the first tokens of short answers alone, which are harder to draft, and would end drafts for good."""
        depths, exists, (rows, accepted) = state
        kept = zip(depths, self.prior, strict=True)
        self.depths = [[0.5 * (float(mean) + prior), max(0.2, float(v))] for (mean, v), (prior, _) in kept]
        if not all(abs(mean) < 100.0 and variance < 100.0 for mean, variance in self.depths):
            raise ValueError("no log odds")
        self.exists = [float(rate) for rate, _ in zip(exists, self.exists, strict=True)]
        self.beside = [float(rows), float(accepted)]


def _update(parts: Sequence[list[float]], kept: bool) -> float:
    """One token, whose log odds are the sum of ``parts``: means and variances. By how much it moved the first mean."""
    before = parts[0][0]
    chance = 1.0 / (1.0 + exp(-sum([mean for mean, _ in parts])))
    spread = chance * (1.0 - chance)
    scale = 1.0 + spread * sum([variance for _, variance in parts])
    for part in parts:
        part[0] = max(-6.0, min(part[0] + part[1] * (kept - chance) / scale, 6.0))
        part[1] *= 1.0 - spread * part[1] / scale
    return parts[0][0] - before


def _log_odds(rate: float) -> float:
    return log(rate / (1.0 - rate))


class Lookups:
    """Acceptance of looked-up tokens by their ``evidence`` (see ``Draft.evidence``).

    A request's own factor, of kept over expected tokens, starts at 1.
    """

    WEIGHT, FADE, OWN_FADE = 4.0, 0.995, 0.95
    """How many tokens the prior weighs, and the decay of earlier tokens: of all, and of a request."""

    def __init__(self) -> None:
        self.prior = [n * long / (long + 1.2) for long in (1, 2, 3.5, 6, 12, 24) for n in (0.2, 0.55, 0.95)]
        self.tried, self.kept = [self.WEIGHT] * len(self.prior), [self.WEIGHT * rate for rate in self.prior]
        self.own: dict[int, tuple[float, float]] = {}
        """By sequence: tokens kept, and tokens that were expected to be."""

    def rate(self, sequence: int, evidence: int) -> float:
        """The chance that a token with this evidence is accepted, if all before it are."""
        kept, expected = self.own.get(sequence, (0.0, 0.0))
        return min((kept + 1.0) / (expected + 1.0) * self.kept[evidence] / self.tried[evidence], 0.98)

    def learn(self, sequence: int, evidence: int, kept: bool) -> None:
        """Counts one token."""
        (had, expected), expects = self.own.get(sequence, (0.0, 0.0)), self.kept[evidence] / self.tried[evidence]
        self.own[sequence] = self.OWN_FADE * had + kept, self.OWN_FADE * expected + expects
        prior = (1.0 - self.FADE) * self.WEIGHT
        self.tried[evidence] = self.FADE * self.tried[evidence] + prior + 1.0
        self.kept[evidence] = self.FADE * self.kept[evidence] + prior * self.prior[evidence] + kept

    def state(self) -> Any:
        return self.tried, self.kept

    def restore(self, state: Any) -> None:
        """Raises TypeError or ValueError for the state of other kinds."""
        tried, kept = state
        pairs = [(float(n), float(hit)) for n, hit, _ in zip(tried, kept, self.prior, strict=True)]
        if not all(0.0 <= hit <= n and 0.0 < n < 1e9 for n, hit in pairs):
            raise ValueError("no counts")
        self.tried, self.kept = map(list, zip(*pairs))

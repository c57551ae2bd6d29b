"""Acceptance rates from p and q, row by row (reference 002, corollary 3.6, A.2 and A.5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

LENIENCE = (1.0, 0.5, 0.3, 0.1)


class Rates(NamedTuple):
    """Means over rows."""

    greedy: float
    """At T = 0: how often both like the same token best."""
    sampled: float
    """At T = 1: sum of min(p, q)."""
    rejection: float
    """What rejection sampling would accept: the least q / p (A.2)."""
    lenient: tuple[float, ...]
    """Sum of min(p / l, q) for each of LENIENCE (A.5, standardised form)."""
    lenient_greedy: tuple[float, ...]
    """How often p of q's best token is at least l times p's best (A.5, T = 0)."""


class Sums:
    """Rates, row after row. ``p`` and ``q`` are [rows, vocabulary] probabilities in float64."""

    def __init__(self) -> None:
        self.rows = 0
        self.totals = torch.zeros(3 + 2 * len(LENIENCE), dtype=torch.float64)

    def add(self, p: Tensor, q: Tensor) -> None:
        best = q.argmax(-1, keepdim=True)
        fraction = p.gather(-1, best)[:, 0] / p.max(-1).values
        result = [
            (best[:, 0] == p.argmax(-1)).double(),
            torch.minimum(p, q).sum(-1),
            torch.where(p > 0, q / p, torch.inf).min(-1).values.clamp(max=1.0),
            *(torch.minimum(p / keep, q).sum(-1) for keep in LENIENCE),
            *((fraction >= keep).double() for keep in LENIENCE),
        ]
        self.totals += torch.stack([row.sum() for row in result])
        self.rows += len(p)

    def means(self) -> Rates:
        result = (self.totals / self.rows).tolist()
        count = len(LENIENCE)
        return Rates(result[0], result[1], result[2], tuple(result[3 : 3 + count]), tuple(result[3 + count :]))


class NgramCounts:
    """Unigram and bigram drafts: counted followers, a word of the vocabulary never lost (one more for each)."""

    def __init__(self, texts: Sequence[Sequence[int]], vocabulary: int) -> None:
        self.unigram = torch.ones(vocabulary, dtype=torch.float64)
        followers: dict[int, Counter[int]] = {}
        for text in texts:
            ids = torch.tensor(text)
            self.unigram += torch.bincount(ids, minlength=vocabulary)
            for before, after in pairwise(text):
                followers.setdefault(before, Counter())[after] += 1
        self.unigram /= self.unigram.sum()
        self.followers: Mapping[int, Counter[int]] = followers

    def q(self, before: Sequence[int], order: int) -> Tensor:
        """[len(before), vocabulary]: what follows each of ``before``; order 1 does not look at it."""
        if order == 1:
            return self.unigram.expand(len(before), -1)
        rows = []
        for token in before:
            counted = self.followers.get(token)
            row = self.unigram.clone()
            if counted:
                for after, count in counted.items():
                    row[after] += count
                row /= row.sum()
            rows.append(row)
        return torch.stack(rows)

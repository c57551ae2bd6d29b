"""Predictions and a recommendation from measured acceptance and cost: a method and its draft length, or no drafts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from operator import itemgetter
from statistics import median
from types import MappingProxyType
from typing import Any

import numpy as np

from forerun.engine.config import NONE
from forerun.measure.rounds import Measured, RoundCosts, full_rounds
from forerun.speculate.length.prices import Curve
from forerun.theory import best_gamma, expected_tokens, walltime_improvement

MARGIN = 1.02
"""Smallest predicted speed-up for which drafts are recommended."""


@dataclass(frozen=True)
class PlannedDraft:
    """Measured drafts of one length, costs in plain forwards."""

    tokens: float
    """Accepted, mean per round and sequence."""
    coverage: float
    """Fraction of rounds with a draft."""
    nodes: float
    """Mean number of a draft's nodes."""
    work: float
    """Of a round with drafts, beside its verification and what a plain round takes outside its forward."""

    @classmethod
    def of(cls, result: Measured, rest: float, sequences: int) -> PlannedDraft:
        rounds = full_rounds(result.rounds, sequences)
        every = sum(len(r.depths) for r in rounds)
        drafts = sum(depth > 0 for r in rounds for depth in r.depths)
        nodes = sum(r.rows - len(r.depths) for r in rounds)
        work = median([r.draft + r.rest for r in rounds if r.depth] or [rest]) - rest
        return cls(sum(r.tokens for r in rounds) / every - 1, drafts / every, nodes / max(1, drafts), max(0.0, work))


@dataclass(frozen=True)
class Estimate:
    """Measured acceptance and costs of one method. ``coverage`` is the fraction of rounds with a draft.

    Costs are in plain forwards: ``c`` is the mean cost of a step (Leviathan et al. 2023, definition 3.7), ``rest`` a
    plain round's time outside its forward.
    """

    method: str
    alpha: float
    match_rate: float
    coverage: float
    c: float
    rest: float = 0.0
    lengths: Mapping[int, PlannedDraft] = field(default_factory=dict)
    """By the number of requested tokens."""

    def drafted(self, k: int, nodes: int) -> PlannedDraft:
        """Drafts of depth ``k`` with at most ``nodes`` nodes, interpolated between the measured lengths next to ``k``.
        Tokens are those of independent positions, as in theory, times the ratio of the measured gain to theory's."""
        theory = expected_tokens(self.match_rate, k) - 1
        if not self.lengths:
            return PlannedDraft(self.coverage * theory, self.coverage, nodes, self.c * k)
        measured = sorted(self.lengths)

        def at(value: Callable[[int, PlannedDraft], float]) -> float:
            return float(np.interp(k, measured, [value(length, self.lengths[length]) for length in measured]))

        gain = at(lambda length, draft: draft.tokens / (expected_tokens(self.match_rate, length) - 1 or 1.0))
        work = at(lambda _, draft: draft.work) * k / min(max(k, measured[0]), measured[-1])
        filled = at(lambda length, draft: draft.nodes / length)
        return PlannedDraft(theory * gain, at(lambda _, draft: draft.coverage), min(filled * k, nodes), work)


@dataclass(frozen=True)
class Prediction:
    """A method with ``k`` drafted tokens: ``verify_cost`` of k + 1 rows, speed-up over plain decoding."""

    method: str
    k: int
    match_rate: float
    c: float
    verify_cost: float
    speedup: float


def cost_curve(points: Mapping[int, float], sequences: int = 1, multiple: int = 1) -> Curve:
    """Cost of a verification by its rows, in plain forwards: a forward of ``sequences`` rows costs 1. Rows are padded
    to a multiple, so the cost rises in steps."""
    plain, padded = ceil(sequences / multiple) * multiple, defaultdict(list)
    for rows, cost in points.items():
        padded[ceil(rows / multiple) * multiple].append(cost)
    costs = {rows: 1.0 if rows <= plain else max(1.0, median(each)) for rows, each in padded.items()}
    return Curve({plain: 1.0, **costs}, multiple)


def estimate(method: str, by_length: Mapping[int, Measured], plain: Measured, sequences: int) -> Estimate | None:
    """A method's estimate from its runs by the number of requested tokens, ``sequences`` requests at a time, with times
    in plain forwards; None if nothing was drafted."""
    every = Measured.joined(by_length.values())
    total, costs = every.total, RoundCosts.of(every.rounds, plain.rounds, sequences)
    if costs is None or total.alpha is None or total.match_rate is None:
        return None
    rest = median(r.rest for r in full_rounds(plain.rounds, sequences))
    lengths = {k: PlannedDraft.of(result, rest, sequences) for k, result in by_length.items()}
    coverage = PlannedDraft.of(every, rest, sequences).coverage
    return Estimate(method, total.alpha, total.match_rate, coverage, costs.c, rest, lengths)


def predict(
    result: Estimate, curve: Curve, longest: int, sequences: int = 1, nodes: Callable[[int], int] = int
) -> list[Prediction]:
    """Predictions for draft lengths k from 1 to ``longest``, of at most ``nodes(k)`` tokens: by default a chain."""
    return [
        Prediction(
            result.method, k, result.match_rate, result.c, curve(sequences * (nodes(k) + 1)),
            speedup(result, result.drafted(k, nodes(k)), curve, sequences),
        )
        for k in range(1, longest + 1)
    ]  # fmt: skip


def speedup(result: Estimate, drafted: PlannedDraft, curve: Curve, sequences: int) -> float:
    """Speed over plain decoding: tokens per round over its mean time, if sequences have drafts independently."""
    nobody = (1.0 - drafted.coverage) ** sequences
    time = result.rest + nobody
    if nobody < 1.0:
        rows = sequences + sequences * drafted.coverage / (1.0 - nobody) * drafted.nodes
        low = int(rows)
        verify = curve(low) + (rows - low) * (curve(low + 1) - curve(low))
        time += (1.0 - nobody) * (verify + drafted.work)
    return (1 + drafted.tokens) * (1 + result.rest) / time


def recommend(
    predictions: Sequence[Prediction],
    options: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    more: Sequence[tuple[float, dict[str, Any]]] = (),
) -> dict[str, Any]:
    """The ``speculative_config`` of the fastest prediction or of the fastest of ``more`` (speed-up, config); plain
    decoding if none reaches ``MARGIN``. ``options`` are the ones that each method was measured with."""
    candidates = [
        (p.speedup, {**options.get(p.method, {"method": p.method}), "num_speculative_tokens": p.k}) for p in predictions
    ]
    speed, config = max([*candidates, *more], key=itemgetter(0), default=(0.0, {}))
    return config if speed >= MARGIN else {"method": NONE}


def reach(result: Estimate, requested: Sequence[float] = (1.5, 2.0, 3.0)) -> dict[str, Any]:
    """The limits of a chain with free verification (Leviathan et al. 2023, theorem 3.8): ``limit``, the best speed-up
    at the measured rate and c; for each ``requested`` speed-up the ``rate`` needed at the measured c and the ``c``
    needed at the measured rate, None if no rate below 1 or no cost above 0 suffices."""

    def best(rate: float, c: float) -> float:
        return walltime_improvement(rate, best_gamma(rate, c), c)

    needs = []
    for speed in requested:
        rates = [fraction / 1000 for fraction in range(1000) if best(fraction / 1000, result.c) >= speed]
        costs = [c / 1000 for c in range(1000) if best(min(result.match_rate, 0.999), c / 1000) >= speed]
        needs.append({"speedup": speed, "rate": min(rates, default=None), "c": max(costs, default=None)})
    return {"method": result.method, "limit": best(min(result.match_rate, 0.999), result.c), "needs": needs}

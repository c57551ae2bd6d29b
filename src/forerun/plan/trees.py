"""Trees on paper beside trees in rounds: the best shapes for a measured rank acceptance, and best-first growth."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, Protocol

from forerun.core.errors import ConfigError
from forerun.engine.config import SpeculativeConfig
from forerun.plan.estimate import Measured
from forerun.plan.planner import CostCurve, Estimate
from forerun.theory import best_shape

RANKS = 8
"""How many continuations of the last token are tried to measure rank acceptance."""


class Trial(Protocol):
    """What measures configurations on the same prompts."""

    concurrency: int
    plain: Measured

    def run(self, config: Mapping[str, Any]) -> Measured: ...


def rank_acceptance(found: Measured) -> list[float]:
    """Entry r: the share of drafts whose r-th likeliest first token was the target's."""
    ranks = [rank for sample in found.rounds for rank, depth in zip(sample.ranks, sample.depths) if depth]
    return [ranks.count(rank) / len(ranks) for rank in range(RANKS)] if ranks else []


def plan_trees(
    options: Seq[Mapping[str, Any]],
    nodes: int,
    longest: int,
    trial: Trial,
    estimates: Mapping[str, Estimate],
    curve: CostCurve,
) -> list[dict[str, Any]]:
    """For each drafter that branches: ``acceptance`` by rank, ``shapes`` (tokens a round and speed-up predicted for the
    best tree of 1, 2, 4, ... tokens, by children of each depth), and ``best_first``, measured with as many tokens.

    ``estimates`` has every method of ``options``.
    """
    found = []
    for item in options if nodes else ():
        wide = {**item, "num_speculative_tokens": 1, "tree": [RANKS]}
        grown = {**item, "num_speculative_tokens": longest, "tree_nodes": nodes}
        try:
            SpeculativeConfig.parse(wide)
            SpeculativeConfig.parse(grown)
        except ConfigError:
            continue
        acceptance = rank_acceptance(trial.run(wide))
        if not acceptance:
            continue
        measured, step = trial.run(grown), estimates[item["method"]].c
        found.append(
            {
                "method": item["method"],
                "acceptance": acceptance,
                "shapes": _shapes(acceptance, nodes, longest, trial.concurrency, step, curve),
                "best_first": {
                    "nodes": nodes,
                    "tokens": measured.total.tokens_per_round,
                    "speedup": measured.tokens_per_second / trial.plain.tokens_per_second,
                },
            }
        )
    return found


def _shapes(
    acceptance: Seq[float], nodes: int, longest: int, concurrency: int, step: float, curve: CostCurve
) -> list[dict[str, Any]]:
    rows = []
    for count in sorted({min(1 << power, nodes) for power in range(nodes.bit_length() + 1)}):
        fitting = []
        for depth in range(1, longest + 1):
            shape = best_shape(acceptance, count, depth)
            time = depth * step + curve(concurrency * (len(shape.parents) + 1))
            fitting.append((shape.tokens / time, shape, depth))
        speed, shape, _ = max(fitting, key=lambda item: item[0])
        rows.append({"nodes": count, "by_depth": by_depth(shape.parents), "tokens": shape.tokens, "speedup": speed})
    return rows


def by_depth(parents: Seq[int]) -> list[int]:
    """How many nodes a tree has at depth 1, 2, ..."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return [depths.count(depth) for depth in range(1, max(depths, default=0) + 1)]

"""Trees on paper beside trees in rounds: shapes priced by a measured rank acceptance, the best of them, and best-first
growth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any, Protocol

from forerun.core.errors import ConfigError
from forerun.engine.config import SpeculativeConfig
from forerun.plan.estimate import Measured
from forerun.plan.planner import CostCurve, Drafted, Estimate, Shaped, speedup
from forerun.theory import best_shape

RANKS = 8
"""How many continuations of the last token are tried to measure rank acceptance."""
DEPTH = 3
"""How deep at most the tree is whose rounds say what trees cost."""


class Trial(Protocol):
    """What measures configurations on the same prompts."""

    concurrency: int

    def run(self, configs: Seq[Mapping[str, Any]]) -> list[Measured]: ...

    def estimate(self, method: str, by_length: Mapping[int, Measured]) -> Estimate | None: ...


def rank_acceptance(found: Measured) -> list[float]:
    """Entry r: the share of drafts whose r-th likeliest first token was the target's."""
    ranks = [rank for sample in found.rounds for rank, depth in zip(sample.ranks, sample.depths) if depth]
    return [ranks.count(rank) / len(ranks) for rank in range(RANKS)] if ranks else []


def plan_trees(
    options: Mapping[str, Mapping[str, Any]], nodes: int, longest: int, trial: Trial, curve: CostCurve
) -> list[dict[str, Any]]:
    """For each drafter that branches: ``acceptance`` by rank, ``fixed`` (``Shaped``, of every ``tree`` of at most
    ``nodes`` tokens, ``longest`` deep, whose nodes of one depth have as many children, no more than those above),
    ``shapes`` (the best tree of 1, 2, 4, ... tokens, by its nodes of each depth), both predicted, and ``best_first``,
    measured with as many tokens.

    What drafting and judging a tree cost, and how far ranks are independent of what came before, is measured on the
    bushiest of the ``fixed`` ones that are ``DEPTH`` deep, or nearly.
    """
    found = []
    every = [tree for tree in fixed(nodes, longest) if tree[0] > 1]
    probe = max((tree for tree in every if len(tree) <= DEPTH), key=lambda tree: (len(tree), size(tree)), default=())
    for name, item in options.items() if probe else ():
        wide = {**item, "tree": [RANKS]}
        shaped = {**item, "tree": list(probe)}
        grown = {**item, "num_speculative_tokens": longest, "tree_nodes": nodes}
        try:
            for config in (wide, shaped, grown):
                SpeculativeConfig.parse(config)
        except ConfigError:
            continue
        plain, *measured = trial.run([wide, shaped, grown])
        acceptance = rank_acceptance(measured[0])
        prices = trial.estimate(name, {len(probe): measured[1]})
        if not acceptance or prices is None:
            continue
        paper = _Paper(acceptance, prices, probe, curve, trial.concurrency)
        found.append(
            {
                "method": name,
                "acceptance": acceptance,
                "fixed": [paper.shaped(tree) for tree in every],
                "shapes": _shapes(paper, nodes, longest),
                "best_first": {
                    "nodes": nodes,
                    "tokens": measured[2].total.tokens_per_round,
                    "speedup": measured[2].tokens_per_second / plain.tokens_per_second,
                },
            }
        )
    return found


def fixed(nodes: int, longest: int, above: int = RANKS) -> Iterator[tuple[int, ...]]:
    """Children by depth of every tree of 1 to ``nodes`` tokens, chains among them."""
    for width in range(1, min(above, nodes) + 1):
        yield (width,)
        if longest > 1:
            yield from ((width, *below) for below in fixed(nodes // width - 1, longest - 1, width))


def size(tree: Seq[int]) -> int:
    """Nodes of a tree with so many children at each depth."""
    return sum(accumulate(tree, mul))


@dataclass(frozen=True)
class _Paper:
    """Prices trees: ``estimate`` is that of rounds with the tree ``probe``."""

    acceptance: Seq[float]
    estimate: Estimate
    probe: tuple[int, ...]
    curve: CostCurve
    concurrency: int

    def gained(self, tree: Seq[int]) -> float:
        """Tokens a round beyond the first, whatever rank came before."""
        return sum(accumulate((sum(self.acceptance[:width]) for width in tree), mul))

    def speedup(self, gained: float, nodes: int, depth: int) -> tuple[float, float]:
        """Mean tokens of a round, and its speed: as the probe's tokens were to those on paper."""
        real = self.estimate.lengths[len(self.probe)]
        on_paper = self.gained(self.probe)
        tokens = gained * real.tokens / on_paper if on_paper else 0.0
        drafted = Drafted(tokens, real.coverage, nodes * real.nodes / size(self.probe))
        return 1 + tokens, speedup(self.estimate, drafted, depth, self.curve, self.concurrency)

    def shaped(self, tree: tuple[int, ...]) -> Shaped:
        return Shaped(self.estimate.method, tree, size(tree), *self.speedup(self.gained(tree), size(tree), len(tree)))


def _shapes(paper: _Paper, nodes: int, longest: int) -> list[dict[str, Any]]:
    rows = []
    for count in sorted({min(1 << power, nodes) for power in range(nodes.bit_length() + 1)}):
        fitting = []
        for depth in range(1, longest + 1):
            shape = best_shape(paper.acceptance, count, depth)
            tokens, speed = paper.speedup(shape.tokens - 1, len(shape.parents), depth)
            fitting.append((speed, tokens, shape))
        speed, tokens, shape = max(fitting, key=lambda item: item[0])
        rows.append({"nodes": count, "by_depth": by_depth(shape.parents), "tokens": tokens, "speedup": speed})
    return rows


def by_depth(parents: Seq[int]) -> list[int]:
    """How many nodes a tree has at depth 1, 2, ..."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return [depths.count(depth) for depth in range(1, max(depths, default=0) + 1)]

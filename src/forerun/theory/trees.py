"""The best shape of a draft tree: Sequoia (Chen et al. 2024, arXiv 2402.12374, section 3.1 and its dynamic program)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple


class Shape(NamedTuple):
    """A tree by rank: node i is the ``ranks[i]``-th likeliest continuation (from 0) of ``parents[i]``; -1: the root."""

    tokens: float
    """Expected tokens of a round, the one that is not drafted included."""
    parents: list[int]
    ranks: list[int]


def best_shape(acceptance: Sequence[float], nodes: int, depth: int) -> Shape:
    """The tree of at most ``nodes`` tokens and ``depth`` levels with the most expected tokens.

    ``acceptance[r]`` is the probability that the target's token is the r-th likeliest of the draft, whatever came
    before (Sequoia's positional acceptance). A node counts with the product along its path, and a rank can be drafted
    only beside all better ones. Raises ValueError for what are no probabilities of exclusive events, and for counts
    below 0.
    """
    if nodes < 0 or depth < 0:
        raise ValueError(f"nodes and depth must be at least 0, not {nodes} and {depth}")
    if any(not 0 <= fraction <= 1 for fraction in acceptance) or sum(acceptance) > 1 + 1e-9:
        raise ValueError(f"acceptance must be probabilities of exclusive events, not {list(acceptance)}")

    @cache
    def value(count: int, levels: int) -> float:
        """Of a node that heads a subtree of ``count`` nodes, itself included."""
        return 0.0 if count == 0 else 1.0 + children(count - 1, levels, 0)[0]

    @cache
    def children(count: int, levels: int, rank: int) -> tuple[float, int]:
        """Of ``count`` nodes among the children of ``rank`` and worse, and how many of them the first one takes."""
        best = (0.0, 0)
        if levels == 0 or rank == len(acceptance):
            return best
        for taken in range(1, count + 1):
            rest = children(count - taken, levels, rank + 1)[0]
            best = max(best, (acceptance[rank] * value(taken, levels - 1) + rest, taken))
        return best

    parents: list[int] = []
    ranks: list[int] = []

    def lay(parent: int, count: int, levels: int) -> None:
        for rank in range(len(acceptance)):
            taken = children(count, levels, rank)[1]
            if not taken:
                return
            parents.append(parent)
            ranks.append(rank)
            lay(len(parents) - 1, taken - 1, levels - 1)
            count -= taken

    lay(-1, nodes, depth)
    return Shape(value(nodes + 1, depth), parents, ranks)

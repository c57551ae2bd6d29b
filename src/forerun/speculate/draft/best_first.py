"""Trees from any source of ranked continuations: a chain, a fixed shape, or the best nodes under a budget.

A source is a function from a state to its continuations ``(token, log q, next state)``, likeliest first: a suffix
automaton, an adjacency table, a head's distribution per depth, or levels that a model has already scored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, islice
from math import exp, inf
from typing import ClassVar, TypeVar

from forerun.core.config import COUNT
from forerun.core.errors import ConfigError
from forerun.core.tree import Draft
from forerun.speculate.draft.base import DrafterConfig

S = TypeVar("S")
Continuations = Callable[[S], Iterable[tuple[int, float, S]]]


@dataclass(frozen=True)
class TreeConfig(DrafterConfig):
    """Options of drafters that can rank continuations."""

    tree_nodes: int | None = None
    """Tokens of a tree whose shape follows the likeliest paths, at most ``num_speculative_tokens`` deep."""
    limits: ClassVar = {"tree_nodes": COUNT}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree_nodes is not None and self.tree is not None:
            raise ConfigError("'tree' fixes a shape and 'tree_nodes' asks for one that adapts: remove one of them")

    @property
    def branches(self) -> bool:
        return self.tree is not None or self.tree_nodes is not None

    def nodes_by_depth(self) -> list[int]:
        if self.tree_nodes is None:
            return super().nodes_by_depth()
        return [0] + [self.tree_nodes] * self.num_speculative_tokens

    def rows_by_depth(self) -> list[int]:
        """Entry d: how many nodes of a draft of depth d are read at most by a drafter that reads its own nodes. A tree
        of the likeliest nodes reads some that better ones push out later."""
        if self.tree_nodes is None:
            return self.nodes_by_depth()
        return [depth * self.tree_nodes for depth in range(self.num_speculative_tokens + 1)]

    def grow(self, source: Continuations[S], root: S, depth: int, floor: float = -inf) -> tuple[Draft, float]:
        """The draft this configuration asks for, at most ``depth`` deep, without paths whose log q is below
        ``floor``; and the sum of its nodes' path probabilities, the expected number of accepted tokens."""
        if not self.branches:
            return follow(source, root, depth, floor)
        if self.tree_nodes is not None:
            nodes = best_first(source, root, self.tree_nodes, depth, floor)
        else:
            nodes = shaped(source, root, [self.width(level) for level in range(depth)], floor)
        return depth_first(nodes), sum(exp(node.score) for node in nodes)


@dataclass(slots=True)
class Node:
    """One node of a growing tree: its token, its parent's place in the list (-1: root), the log of its path's q."""

    token: int
    parent: int
    score: float


def follow(source: Continuations[S], root: S, depth: int, floor: float = -inf) -> tuple[Draft, float]:
    """The chain of likeliest continuations, and the sum of its nodes' path probabilities."""
    tokens: list[int] = []
    score = expected = 0.0
    state = root
    while len(tokens) < depth:
        likeliest = next(iter(source(state)), None)
        if likeliest is None or score + likeliest[1] < floor:
            break
        score += likeliest[1]
        state = likeliest[2]
        tokens.append(likeliest[0])
        expected += exp(score)
    return Draft.chain(tokens), expected


def best_first(source: Continuations[S], root: S, nodes: int, depth: int, floor: float = -inf) -> list[Node]:
    """The connected tree of at most ``nodes`` nodes, ``depth`` deep, with the greatest sum of path probabilities.

    A heap holds, for every popped node, its first child and its next sibling: as q never exceeds 1, the best node
    outside the tree is always on it (the rule of EAGLE-2, arXiv 2406.16858, OPT-Tree, 2406.17276, and DDTree,
    2604.12989). Paths whose log q falls below ``floor`` are left out. Parents come before children, siblings in
    their source's order.
    """
    order = count()
    heap: list[tuple] = []

    def offer(above: float, parent: int, level: int, siblings) -> None:
        for token, log_q, state in siblings:
            if above + log_q >= floor:
                heappush(heap, (-(above + log_q), next(order), above, parent, level, siblings, token, state))
            return

    tree: list[Node] = []
    offer(0.0, -1, 1, iter(source(root)))
    while heap and len(tree) < nodes:
        lost, _, above, parent, level, siblings, token, state = heappop(heap)
        tree.append(Node(token, parent, -lost))
        offer(above, parent, level, siblings)
        if level < depth:
            offer(-lost, len(tree) - 1, level + 1, iter(source(state)))
    return tree


def shaped(source: Continuations[S], root: S, widths: Sequence[int], floor: float = -inf) -> list[Node]:
    """A tree of fixed shape: every node at depth d gets its ``widths[d]`` best children, as far as ``floor`` lets."""
    tree: list[Node] = []
    level = [(-1, 0.0, root)]
    for width in widths:
        below = []
        for parent, above, state in level:
            for token, log_q, after in islice(source(state), width):
                if above + log_q < floor:
                    break
                tree.append(Node(token, parent, above + log_q))
                below.append((len(tree) - 1, above + log_q, after))
        if not below:
            break
        level = below
    return tree


def preorder(nodes: Sequence[Node]) -> list[int]:
    """Places in ``nodes`` such that every branch lies in one piece, parents before children."""
    children: list[list[int]] = [[] for _ in range(len(nodes) + 1)]
    for index, node in enumerate(nodes):
        children[node.parent + 1].append(index)
    order = []
    stack = children[0][::-1]
    while stack:
        index = stack.pop()
        order.append(index)
        stack.extend(reversed(children[index + 1]))
    return order


def depth_first(nodes: Sequence[Node]) -> Draft:
    """A draft of point masses with every branch laid out in one piece."""
    draft = Draft()
    slot = {-1: -1}
    for index in preorder(nodes):
        slot[index] = draft.add(nodes[index].token, slot[nodes[index].parent])
    return draft


class GrowingTree:
    """The best tree of at most ``size`` nodes, found level by level where continuations are dear to score.

    Only nodes among the ``size`` best found so far are worth expanding: nothing below another one can get there, as q
    never exceeds 1 (OPT-Tree, arXiv 2406.17276; EAGLE-2, 2406.16858, expands a fixed number per level instead).
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.nodes: list[Node] = []
        self.seen = 0
        """How many of ``nodes`` an earlier ``frontier`` has looked at."""

    def offer(self, parent: int, tokens: Sequence[int], logs: Sequence[float]) -> None:
        """Continuations of a node (-1: the root) and the logs of their q."""
        above = self.nodes[parent].score if parent >= 0 else 0.0
        self.nodes += [Node(token, parent, above + log_q) for token, log_q in zip(tokens, logs) if log_q > -inf]

    def best(self) -> list[int]:
        """Places of the best nodes, parents first."""
        ranked = sorted(range(len(self.nodes)), key=lambda index: -self.nodes[index].score)
        return sorted(ranked[: self.size])

    def frontier(self) -> list[int]:
        """Places of the newest level's nodes that are worth expanding."""
        newest = [index for index in self.best() if index >= self.seen]
        self.seen = len(self.nodes)
        return newest

    def finish(self) -> tuple[Draft, list[int]]:
        """The tree, depth first, and each of its nodes' place in ``nodes``."""
        best = self.best()
        slot = {-1: -1} | {index: number for number, index in enumerate(best)}
        kept = [Node(self.nodes[i].token, slot[self.nodes[i].parent], self.nodes[i].score) for i in best]
        return depth_first(kept), [best[number] for number in preorder(kept)]

"""Builds chains and trees from ranked continuations: of a fixed shape, or of the best nodes under a budget.

A source maps a state to its continuations ``(token, log q, next state)``, likeliest first. Sources are a suffix
automaton, an adjacency table, or a head's distribution per depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, islice
from math import exp, inf
from typing import ClassVar, TypeVar

from forerun.core.config import COUNT
from forerun.core.errors import ConfigError
from forerun.core.tree import Draft, evidence
from forerun.speculate.draft.base import DrafterConfig

S = TypeVar("S")
Continuations = Callable[[S], Iterable[tuple[int, float, S]]]


@dataclass(frozen=True)
class TreeConfig(DrafterConfig):
    """Options of drafters that rank continuations."""

    tree_nodes: int | None = None
    """Tokens of a tree whose shape follows the likeliest paths, at most ``num_speculative_tokens`` deep."""
    limits: ClassVar = {"tree_nodes": COUNT}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree_nodes is not None and self.tree is not None:
            raise ConfigError("'tree' conflicts with 'tree_nodes': remove one")

    @property
    def branches(self) -> bool:
        return self.tree is not None or self.tree_nodes is not None

    def nodes_by_depth(self) -> list[int]:
        if self.tree_nodes is None:
            return super().nodes_by_depth()
        return [0] + [self.tree_nodes] * self.num_speculative_tokens

    def rows_by_depth(self) -> list[int]:
        """Entry d is the most nodes that a drafter reads itself for a draft of depth d. While the tree of the likeliest
        nodes grows, it reads some nodes that better ones replace later."""
        if self.tree_nodes is None:
            return self.nodes_by_depth()
        return [depth * self.tree_nodes for depth in range(self.num_speculative_tokens + 1)]

    def grow(
        self, source: Continuations[S], root: S, depth: int, floor: float = -inf, matched: int = 0
    ) -> tuple[Draft, float]:
        """Returns a draft of the configured shape, at most ``depth`` deep, without paths whose log q is below
        ``floor``; and the sum of its nodes' path probabilities, which is the expected accepted length. A chain after a
        match of ``matched`` tokens gets its evidence."""
        if not self.branches:
            return likeliest_chain(source, root, depth, floor, matched)
        if self.tree_nodes is not None:
            nodes = best_first(source, root, self.tree_nodes, depth, floor)
        else:
            nodes = shaped(source, root, [self.width(level) for level in range(depth)], floor)
        return depth_first(nodes), sum(exp(node.score) for node in nodes)


@dataclass(slots=True)
class Node:
    """A node of a growing tree."""

    token: int
    parent: int
    """Index in the list of nodes; -1: the root."""
    score: float
    """Log of q of the path to it."""
    read_index: int = -1
    """Its index among the nodes that a model has read; -1: it was not read."""


def likeliest_chain(
    source: Continuations[S], root: S, depth: int, floor: float = -inf, matched: int = 0
) -> tuple[Draft, float]:
    """The chain of likeliest continuations, and the sum of its nodes' path probabilities."""
    tokens: list[int] = []
    kinds: list[int] = []
    score = expected = 0.0
    state = root
    while len(tokens) < depth:
        likeliest = next(iter(source(state)), None)
        if likeliest is None or score + likeliest[1] < floor:
            break
        if matched:
            kinds.append(evidence(matched + len(tokens), exp(likeliest[1])))
        score += likeliest[1]
        state = likeliest[2]
        tokens.append(likeliest[0])
        expected += exp(score)
    draft = Draft.chain(tokens)
    draft.evidence = kinds
    return draft, expected


def best_first(source: Continuations[S], root: S, nodes: int, depth: int, floor: float = -inf) -> list[Node]:
    """The connected tree of at most ``nodes`` nodes, ``depth`` deep, with the greatest sum of path probabilities.

    The heap holds the first child and the next sibling of every popped node. As q never exceeds 1, the best node
    outside the tree is always among them (EAGLE-2, arXiv 2406.16858; OPT-Tree, 2406.17276; DDTree, 2604.12989).
    Paths whose log q falls below ``floor`` are left out. Parents come before children, siblings in their source's
    order.
    """
    order = count()
    heap: list[tuple[float, int, float, int, int, Iterator[tuple[int, float, S]], int, S]] = []

    def push_next(parent_score: float, parent: int, level: int, siblings: Iterator[tuple[int, float, S]]) -> None:
        for token, log_q, state in siblings:
            score = parent_score + log_q
            if score >= floor:
                heappush(heap, (-score, next(order), parent_score, parent, level, siblings, token, state))
            return

    tree: list[Node] = []
    push_next(0.0, -1, 1, iter(source(root)))
    while heap and len(tree) < nodes:
        cost, _, parent_score, parent, level, siblings, token, state = heappop(heap)
        tree.append(Node(token, parent, -cost))
        push_next(parent_score, parent, level, siblings)
        if level < depth:
            push_next(-cost, len(tree) - 1, level + 1, iter(source(state)))
    return tree


def shaped(source: Continuations[S], root: S, widths: Sequence[int], floor: float = -inf) -> list[Node]:
    """A tree of fixed shape: a node at depth d gets its ``widths[d]`` best children, without paths below ``floor``."""
    tree: list[Node] = []
    level = [(-1, 0.0, root)]
    for width in widths:
        children = []
        for parent, parent_score, state in level:
            for token, log_q, next_state in islice(source(state), width):
                score = parent_score + log_q
                if score < floor:
                    break
                tree.append(Node(token, parent, score))
                children.append((len(tree) - 1, score, next_state))
        level = children
    return tree


def preorder(nodes: Sequence[Node]) -> list[int]:
    """Indices of ``nodes`` in depth-first order: parents before children, every branch contiguous."""
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
    """A draft of point masses with its nodes in depth-first order."""
    draft = Draft()
    slot = {-1: -1}
    for index in preorder(nodes):
        slot[index] = draft.add(nodes[index].token, slot[nodes[index].parent])
    return draft


class GrowingTree:
    """The best tree of at most ``size`` nodes, found level by level, because a model scores a level in one forward.

    Only nodes among the ``size`` best so far are expanded. As q never exceeds 1, no descendant of another node can get
    into the tree (OPT-Tree, arXiv 2406.17276; EAGLE-2, 2406.16858, expands a fixed number per level instead).
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.nodes: list[Node] = []
        self.seen = 0
        """How many of ``nodes`` existed at the last call of ``frontier``."""

    def offer(self, parent: int, tokens: Sequence[int], logs: Sequence[float]) -> None:
        """Adds continuations of a node (-1: the root) with the logs of their q."""
        parent_score = self.nodes[parent].score if parent >= 0 else 0.0
        self.nodes += [Node(token, parent, parent_score + log_q) for token, log_q in zip(tokens, logs) if log_q > -inf]

    def best(self) -> list[int]:
        """Indices of the best nodes, parents first."""
        ranked = sorted(range(len(self.nodes)), key=lambda index: -self.nodes[index].score)
        return sorted(ranked[: self.size])

    def frontier(self) -> list[int]:
        """Indices of the newest level's nodes that are worth expanding."""
        newest = [index for index in self.best() if index >= self.seen]
        self.seen = len(self.nodes)
        return newest

    def finish(self) -> tuple[Draft, list[int]]:
        """The tree, depth first, and the index in ``nodes`` of each of its nodes."""
        best = self.best()
        slot = {-1: -1} | {index: number for number, index in enumerate(best)}
        kept = [Node(self.nodes[i].token, slot[self.nodes[i].parent], self.nodes[i].score) for i in best]
        return depth_first(kept), [best[number] for number in preorder(kept)]

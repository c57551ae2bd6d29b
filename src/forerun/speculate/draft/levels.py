"""Grows drafts level by level from a model's logits. A chain is a tree of width one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, log
from typing import ClassVar

import torch

from forerun.core.batch import Span
from forerun.core.config import Within
from forerun.core.errors import ConfigError
from forerun.core.request import Beams, Requests, RequestState
from forerun.core.tree import POINT_MASS, Draft, Drafts
from forerun.sampling.warp import Row
from forerun.speculate.draft.base import Chooser
from forerun.speculate.draft.best_first import GrowingTree, TreeConfig

Frontier = list[tuple[int, int]]
"""The nodes that may get children, as (index of the sequence, node); -1 is a root."""
Score = Callable[[int, Frontier, Drafts], torch.Tensor]
"""``score(depth, frontier, drafts)``: logits [len(frontier), vocabulary] of the token after each frontier node."""
Confidence = Callable[[int, Frontier, Drafts], list[float]]
"""``confidence(depth, frontier, drafts)``: log of the estimated acceptance rate of each node's next token."""


@dataclass(frozen=True)
class StepsConfig(TreeConfig):
    """Options of drafters that pay for every token of a draft."""

    confidence_threshold: float | None = None
    """A chain ends at the token that brings its estimated probability of full acceptance below this. The estimate is
    the product of the drafter's highest probabilities at temperature 1. None: no early end; a beam search has none
    either. Where our kernels draft a chain and the rule does not need q, the second-best token is verified beside the
    last one. (transformers' ``assistant_confidence_threshold`` looks at each token alone.)"""
    limits: ClassVar = {"confidence_threshold": Within(above=0, below=1)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.confidence_threshold is not None and self.branches:
            raise ConfigError("confidence_threshold supports chains only: remove it, or 'tree' and 'tree_nodes'")

    @property
    def floor(self) -> float:
        """Logarithm of the threshold; -inf without one."""
        return -inf if self.confidence_threshold is None else log(self.confidence_threshold)


def floor_of(sequence: RequestState, floor: float) -> float:
    """``floor``, or one that no draft falls below. Unlike -inf, it asks for confidences, whose time counts, too."""
    return min(floor, -1e300) if sequence.whole_drafts else floor


def grow(
    sequences: Requests, ready: Sequence[int], depths: Sequence[int], config: TreeConfig, chooser: Chooser,
    score: Score, confidence: Confidence | None = None,
) -> tuple[list[Draft], list[list[int]] | None]:  # fmt: skip
    """Grows one draft per sequence, of the shape that ``config`` asks for.

    Args:
        sequences: all sequences of the round.
        ready: indices of those that draft; the others get empty drafts.
        depths: the greatest depth of each sequence's draft.
        config: the shape, and the threshold at which chains end.
        chooser: draws the children.
        score: the drafter's forward.
        confidence: estimates acceptance for the threshold; None: the highest probability does.

    Returns:
        The drafts; and, for trees of the likeliest nodes, the read order of each draft's nodes (see ``grow_best``).
    """
    if config.tree_nodes is not None:
        return grow_best(sequences, ready, depths, config.tree_nodes, chooser, score)
    drafts = [Draft() for _ in sequences]
    frontier: Frontier = [(index, -1) for index in ready]
    groups = dict.fromkeys(group for i in ready if (group := sequences[i].group) is not None)
    beam_drafts = [BeamDrafts(group, sequences, ready) for group in groups if len(group.members) > 1]
    nodes = config.nodes_by_depth()
    floor = config.floor if isinstance(config, StepsConfig) else -inf
    chances = dict.fromkeys(ready, 0.0)
    qs: list[torch.Tensor] = []
    num_q_rows = depth = 0
    while frontier:
        logits = score(depth, frontier, drafts)
        rows = [chooser.row(sequences[i], drafts[i].path_tokens(node) if node >= 0 else ()) for i, node in frontier]
        sizes = {index: len(drafts[index]) for index, _ in frontier}
        if floor > -inf:
            if confidence is not None:
                logs = confidence(depth, frontier, drafts)
            else:
                ranked = chooser.sampler.rank(chooser.align(logits), 1)[1]
                logs = [likeliest[0] if likeliest else -inf for likeliest in ranked]
            for (index, _), log_p in zip(frontier, logs):
                if sequences[index].group is None:
                    chances[index] += log_p
        ids, q, q_rows = chooser.choose(logits, rows, [node for _, node in frontier], config.width(depth))
        for beams in beam_drafts:
            beams.choose(ids, frontier, drafts, logits, rows, nodes[depth + 1] - nodes[depth], chooser)
        for (index, node), tokens, row in zip(frontier, ids, q_rows):
            for token in tokens:
                drafts[index].add(token, node, POINT_MASS if row == POINT_MASS else num_q_rows + row)
        if q is not None:
            qs.append(q)
            num_q_rows += q.shape[0]
        depth += 1
        frontier = [
            (index, node)
            for index, size in sizes.items()
            if depth < depths[index] and chances[index] >= floor_of(sequences[index], floor)
            for node in range(size, len(drafts[index]))
        ]
    if qs:
        q = qs[0] if len(qs) == 1 else torch.cat(qs)
        for index in ready:
            drafts[index].q = q
    return drafts, None


def newest_level(
    sequences: Requests, frontier: Frontier, drafts: Drafts, start: Callable[[RequestState], int],
    to_own_ids: Callable[[list[int]], list[int]] = list,
) -> list[Span]:  # fmt: skip
    """Spans that read the newest level of every growing draft, with logits of every node. ``start`` returns the cache
    position of a sequence's first draft node, ``to_own_ids`` the drafter's ids of drafted tokens."""
    spans = []
    for index in dict.fromkeys(index for index, _ in frontier):
        sequence, draft = sequences[index], drafts[index]
        stored = next(node for i, node in frontier if i == index)
        tokens, parents = to_own_ids(draft.tokens[stored:]), None if draft.is_chain else draft.parents
        rows = list(range(len(tokens)))
        spans.append(Span(sequence.id, start(sequence), tokens, parents, stored, rows, sequence.source))
    return spans


class BeamDrafts:
    """Drafts of one beam search, themselves grown as a beam search (Leviathan et al. 2023, A.4).

    Each level keeps the likeliest continuations of all beams together, as many as the beams would draft separately.
    Tokens that end a beam are not drafted, since no beam continues after them.
    """

    def __init__(self, beams: Beams, sequences: Requests, ready: Sequence[int]) -> None:
        self.beams = beams
        self.sequences = sequences
        logs = {member.id: log for member, log in zip(beams.members, beams.logprobs)}
        self.logs = {(index, -1): logs[sequences[index].id] for index in ready if sequences[index].group is beams}
        """Log-probability of each node's path, for nodes that may get children."""
        self.count = len(self.logs)

    def choose(
        self, ids: list[list[int]], frontier: Frontier, drafts: Drafts, logits: torch.Tensor, rows: Sequence[Row],
        width: int, chooser: Chooser,
    ) -> None:  # fmt: skip
        """Replaces the entries of ``ids`` that belong to this group, by ``width`` children per beam on average."""
        slots = [slot for slot, entry in enumerate(frontier) if entry in self.logs]
        if not slots:
            return
        remaining, ends = width * self.count, self.beams.ends
        ranked = chooser.rank(logits[slots], [rows[slot] for slot in slots], remaining + len(ends))
        candidates = [
            (self.logs[frontier[slot]] + log_q, slot, token)
            for slot, tokens, logs in zip(slots, *ranked)
            for token, log_q in zip(tokens, logs)
            if token not in ends
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        next_nodes = {index: len(drafts[index]) for index, _ in frontier}
        sizes = dict(next_nodes)
        chosen: dict[int, list[tuple[int, float]]] = {slot: [] for slot in slots}
        for score, slot, token in candidates:
            index = frontier[slot][0]
            draft_budget = self.sequences[index].draft_budget
            if remaining and (draft_budget is None or sizes[index] < draft_budget):
                remaining -= 1
                sizes[index] += 1
                chosen[slot].append((token, score))
        for slot, children in chosen.items():  # nodes are numbered as ``grow`` is about to add them
            index = frontier[slot][0]
            ids[slot] = [token for token, _ in children]
            for _, score in children:
                self.logs[index, next_nodes[index]] = score
                next_nodes[index] += 1


MAX_CHILDREN = 10
"""Most children of a node that a best-first tree considers (EAGLE-3's figure)."""


def grow_best(
    sequences: Requests, ready: Sequence[int], depths: Sequence[int], size: int, chooser: Chooser, score: Score
) -> tuple[list[Draft], list[list[int]]]:
    """Grows trees of the ``size`` likeliest nodes, as point masses; arguments as for ``grow``.

    The drafts that ``score`` sees are the nodes that it has read, in read order. The second result gives, for each node
    of each final draft, its index in that order, or -1 if it was not read.
    """
    trees = {index: GrowingTree(size) for index in ready}
    read = [Draft() for _ in sequences]
    frontier: Frontier = [(index, -1) for index in ready]
    candidates = [-1] * len(frontier)
    """The frontier's nodes as indices into their tree's candidates."""
    depth = 0
    while frontier:
        logits = score(depth, frontier, read)
        rows = [chooser.row(sequences[i], read[i].path_tokens(node)) for i, node in frontier]
        ranked = chooser.rank(logits, rows, min(size, MAX_CHILDREN))
        for (index, _), candidate, tokens, logs in zip(frontier, candidates, *ranked):
            trees[index].offer(candidate, tokens, logs)
        depth += 1
        frontier, candidates = [], []
        for index, tree in trees.items():
            for candidate in tree.frontier() if depth < depths[index] else ():
                node = tree.nodes[candidate]
                node.read_index = read[index].add(node.token, tree.nodes[node.parent].read_index if depth > 1 else -1)
                frontier.append((index, node.read_index))
                candidates.append(candidate)
    drafts = [Draft() for _ in sequences]
    orders: list[list[int]] = [[] for _ in sequences]
    for index, tree in trees.items():
        drafts[index], kept = tree.finish()
        orders[index] = [tree.nodes[candidate].read_index for candidate in kept]
    return drafts, orders

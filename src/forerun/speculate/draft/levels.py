"""Drafting level by level from logits: a chain is a tree of width one."""

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
"""Nodes that may get children, as (which sequence, node); -1 is a root."""
Score = Callable[[int, Frontier, Drafts], torch.Tensor]
"""``score(depth, frontier, drafts)``: logits [len(frontier), vocabulary] of what follows each frontier node."""

Sure = Callable[[int, Frontier, Drafts], list[float]]
"""``sure_of(depth, frontier, drafts)``: log of the chance that what is drafted behind each frontier node is kept."""


@dataclass(frozen=True)
class StepsConfig(TreeConfig):
    """Options of drafters that pay for every token of a draft."""

    confidence_threshold: float | None = None
    """A chain ends at the token that brings the estimated chance of keeping all of it below this: the product of the
    likeliest tokens' probabilities at temperature 1, in the drafter's own eyes. None: chains are as long as asked for,
    as a beam search's always are. Where our kernels draft a chain and the rule does not need q, the next best token is
    verified as an alternative to the last. (transformers' ``assistant_confidence_threshold`` looks at each token
    alone.)"""
    limits: ClassVar = {"confidence_threshold": Within(above=0, below=1)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.confidence_threshold is not None and self.branches:
            raise ConfigError("confidence_threshold ends chains, not trees: remove it, or 'tree' and 'tree_nodes'")

    @property
    def floor(self) -> float:
        """The threshold's logarithm; -inf for none."""
        return -inf if self.confidence_threshold is None else log(self.confidence_threshold)


def grow(
    sequences: Requests,
    ready: Sequence[int],
    depths: Sequence[int],
    config: TreeConfig,
    chooser: Chooser,
    score: Score,
    sure_of: Sure | None = None,
) -> tuple[list[Draft], list[list[int]] | None]:
    """One draft per sequence, of the shape that ``config`` asks for; those in ``ready`` grow to their entry of
    ``depths``, the others stay empty. Where chains end early, ``sure_of`` says how sure a drafter is, if its likeliest
    token's probability does not. The second result, for trees of the likeliest nodes, is where each node of each draft
    is among those that ``score`` was asked about (see ``grow_best``)."""
    if config.tree_nodes is not None:
        return grow_best(sequences, ready, depths, config.tree_nodes, chooser, score)
    drafts = [Draft() for _ in sequences]
    frontier: Frontier = [(index, -1) for index in ready]
    together = [DraftBeams(beams, sequences, ready) for beams in groups(sequences, ready)]
    nodes = config.nodes_by_depth()
    floor = config.floor if isinstance(config, StepsConfig) else -inf
    sure = dict.fromkeys(ready, 0.0)
    qs: list[torch.Tensor] = []
    base = depth = 0
    while frontier:
        logits = score(depth, frontier, drafts)
        rows = [chooser.row(sequences[i], drafts[i].path_tokens(node) if node >= 0 else ()) for i, node in frontier]
        before = {index: len(drafts[index]) for index, _ in frontier}
        if floor > -inf:
            if sure_of is not None:
                logs = sure_of(depth, frontier, drafts)
            else:
                ranked = chooser.sampler.rank(chooser.align(logits), 1)[1]
                logs = [likeliest[0] if likeliest else -inf for likeliest in ranked]
            for (index, _), log_p in zip(frontier, logs):
                if sequences[index].group is None:
                    sure[index] += log_p
        ids, q, q_rows = chooser.choose(logits, rows, [node for _, node in frontier], config.width(depth))
        for beams in together:
            beams.choose(ids, frontier, drafts, logits, rows, nodes[depth + 1] - nodes[depth], chooser)
        for (index, node), tokens, row in zip(frontier, ids, q_rows):
            for token in tokens:
                drafts[index].add(token, node, POINT_MASS if row == POINT_MASS else base + row)
        if q is not None:
            qs.append(q)
            base += q.shape[0]
        depth += 1
        frontier = [
            (index, node)
            for index, first in before.items()
            if depth < depths[index] and sure[index] >= floor
            for node in range(first, len(drafts[index]))
        ]
    if qs:
        q = qs[0] if len(qs) == 1 else torch.cat(qs)
        for index in ready:
            drafts[index].q = q
    return drafts, None


def newest_level(
    sequences: Requests,
    frontier: Frontier,
    drafts: Drafts,
    start: Callable[[RequestState], int],
    spell: Callable[[list[int]], list[int]] = list,
) -> list[Span]:
    """The newest level of every growing draft, to feed behind ``start`` of a sequence's entries, with logits of every
    node. ``spell`` gives drafted tokens in the drafter's own ids."""
    spans = []
    for index in dict.fromkeys(index for index, _ in frontier):
        sequence, draft = sequences[index], drafts[index]
        stored = next(node for i, node in frontier if i == index)
        tokens, parents = spell(draft.tokens[stored:]), None if draft.is_chain else draft.parents
        rows = list(range(len(tokens)))
        spans.append(Span(sequence.id, start(sequence), tokens, parents, stored, rows, sequence.source))
    return spans


def groups(sequences: Requests, ready: Sequence[int]) -> list[Beams]:
    """The beam searches whose members are among those in ``ready``."""
    result = (sequences[index].group for index in ready)
    return list(dict.fromkeys(group for group in result if group is not None and len(group.members) > 1))


class DraftBeams:
    """One beam search's drafts, grown as a beam search (Leviathan et al. 2023, A.4): level by level the likeliest
    continuations of all its beams together, as many as the beams would draft one by one. What ends a beam is not
    drafted: no live one goes on behind it."""

    def __init__(self, beams: Beams, sequences: Requests, ready: Sequence[int]) -> None:
        self.beams = beams
        self.sequences = sequences
        logs = {member.id: log for member, log in zip(beams.members, beams.logprobs)}
        self.logs = {(index, -1): logs[sequences[index].id] for index in ready if sequences[index].group is beams}
        """Of every node that may get children: the log-probability of its path, as far as it is known."""
        self.count = len(self.logs)

    def choose(
        self,
        ids: list[list[int]],
        frontier: Frontier,
        drafts: Drafts,
        logits: torch.Tensor,
        rows: Sequence[Row],
        width: int,
        chooser: Chooser,
    ) -> None:
        """Put children, ``width`` for each beam on average, into the entries of ``ids`` that are this group's."""
        slots = [slot for slot, entry in enumerate(frontier) if entry in self.logs]
        if not slots:
            return
        left, ends = width * self.count, self.beams.ends
        ranked = chooser.rank(logits[slots], [rows[slot] for slot in slots], left + len(ends))
        every = [
            (self.logs[frontier[slot]] + log, slot, token)
            for slot, tokens, logs in zip(slots, *ranked)
            for token, log in zip(tokens, logs)
            if token not in ends
        ]
        every.sort(key=lambda result: -result[0])
        numbers = {index: len(drafts[index]) for index, _ in frontier}
        sizes = dict(numbers)
        chosen: dict[int, list[tuple[int, float]]] = {slot: [] for slot in slots}
        for value, slot, token in every:
            index = frontier[slot][0]
            draft_budget = self.sequences[index].draft_budget
            if left and (draft_budget is None or sizes[index] < draft_budget):
                left -= 1
                sizes[index] += 1
                chosen[slot].append((token, value))
        for slot, children in chosen.items():  # nodes are numbered as ``grow`` is about to add them
            index = frontier[slot][0]
            ids[slot] = [token for token, _ in children]
            for _, value in children:
                self.logs[index, numbers[index]] = value
                numbers[index] += 1


WIDEST = 10
"""Most children of a node that a best-first tree considers (EAGLE-3's figure)."""


def grow_best(
    sequences: Requests, ready: Sequence[int], depths: Sequence[int], size: int, chooser: Chooser, score: Score
) -> tuple[list[Draft], list[list[int]]]:
    """Trees of the ``size`` likeliest nodes, point masses; as ``grow`` otherwise.

    The drafts that ``score`` sees hold the nodes it was asked about, in the order asked. The second result is, for
    every node of each final draft, its place among those, or -1 if nothing behind it was scored.
    """
    trees = {index: GrowingTree(size) for index in ready}
    asked = [Draft() for _ in sequences]
    origin: dict[int, dict[int, int]] = {index: {-1: -1} for index in ready}
    frontier: Frontier = [(index, -1) for index in ready]
    depth = 0
    while frontier:
        logits = score(depth, frontier, asked)
        rows = [chooser.row(sequences[i], asked[i].path_tokens(node)) for i, node in frontier]
        for (index, node), tokens, logs in zip(frontier, *chooser.rank(logits, rows, min(size, WIDEST))):
            trees[index].offer(origin[index][node], tokens, logs)
        depth += 1
        frontier = []
        for index, tree in trees.items():
            if depth < depths[index]:
                known = {slot: node for node, slot in origin[index].items()}
                for slot in tree.frontier():
                    node = asked[index].add(tree.nodes[slot].token, known[tree.nodes[slot].parent])
                    origin[index][node] = slot
                    frontier.append((index, node))
    drafts = [Draft() for _ in sequences]
    indices: list[list[int]] = [[] for _ in sequences]
    for index, tree in trees.items():
        drafts[index], kept = tree.finish()
        known = {slot: node for node, slot in origin[index].items()}
        indices[index] = [known.get(slot, -1) for slot in kept]
    return drafts, indices

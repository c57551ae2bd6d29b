"""Drafting level by level from logits: a chain is a tree of width one."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from forerun.core.sequence import Sequence
from forerun.core.tree import POINT_MASS, Draft
from forerun.speculate.draft.base import Chooser, DrafterConfig

Frontier = list[tuple[int, int]]
"""Nodes that may get children, as (which sequence, node); -1 is a root."""


def grow_levels(
    sequences: Seq[Sequence],
    ready: Seq[int],
    depths: Seq[int],
    config: DrafterConfig,
    chooser: Chooser,
    score: Callable[[int, Frontier, Seq[Draft]], torch.Tensor],
) -> list[Draft]:
    """One draft per sequence; those in ``ready`` grow to their entry of ``depths``, the others stay empty.

    ``score(depth, frontier, drafts)`` gives logits [len(frontier), vocabulary] of what follows each frontier node.
    """
    drafts = [Draft() for _ in sequences]
    frontier: Frontier = [(index, -1) for index in ready]
    qs: list[torch.Tensor] = []
    base = depth = 0
    while frontier:
        logits = score(depth, frontier, drafts)
        rows = [chooser.row(sequences[i], drafts[i].path_tokens(node) if node >= 0 else ()) for i, node in frontier]
        before = {index: len(drafts[index]) for index, _ in frontier}
        ids, q, q_rows = chooser.choose(logits, rows, [node for _, node in frontier], config.width(depth))
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
            if depth < depths[index]
            for node in range(first, len(drafts[index]))
        ]
    if qs:
        q = qs[0] if len(qs) == 1 else torch.cat(qs)
        for index in ready:
            drafts[index].q = q
    return drafts

"""Commit what a round emits; in the cache and of hidden states, keep what belongs to it and drop the rest."""

from __future__ import annotations

from forerun.cache.pool import Pages
from forerun.speculate.beams import Branched
from forerun.speculate.verify import Target, Verification


def roll_back(target: Target, result: Verification, batch: Branched) -> None:
    """After a forward: the emitted tokens are committed, and each cache holds all but the newly sampled one.

    A chain is truncated; a tree's accepted entries are moved together first. Beams that share pages where none is free
    for moving them keep less than was accepted. Drafters that feed on the target's features get those of every token
    that stays.
    """
    pool = target.attention.pool
    for sequence, draft, verdict, source in zip(*batch.all, batch.sources, strict=True):
        start = sequence.num_computed_tokens + sequence.scheduled
        path = verdict.path[: verdict.accepted]
        count = 0
        if sequence.id in pool.block_tables and draft.is_chain:
            count = len(path)
            Pages.truncate(pool, sequence.id, start + count)
        elif sequence.id in pool.block_tables:
            count = pool.keep(sequence.id, start, path)
        sequence.num_computed_tokens = start + count
        if target.hidden:
            rows = _rows(result.batch.offsets[source], sequence.scheduled, path[:count])
            verdict.hidden = {layer: result.output.hidden[layer][rows] for layer in target.hidden}
        sequence.tokens.extend(verdict.tokens)
        verdict.fed, sequence.scheduled = sequence.scheduled, 0


def _rows(offset: int, scheduled: int, path: list[int]) -> slice | list[int]:
    """The batch's rows of the ``scheduled`` tokens from ``offset`` on and of the nodes of ``path`` behind them."""
    first = offset + scheduled
    if path == list(range(len(path))):
        return slice(offset, first + len(path))
    return [*range(offset, first), *(first + node for node in path)]

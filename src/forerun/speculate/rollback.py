"""Rollback: the KV cache keeps the accepted path and forgets the rejected nodes."""

from __future__ import annotations

from forerun.core.batch import HiddenStates
from forerun.speculate.beams import Outcome
from forerun.speculate.verify import Target, Verification


def roll_back(target: Target, result: Verification, outcome: Outcome) -> None:
    """Commits the emitted tokens after a forward. The cache then holds all of them but the newly sampled one.

    A chain is truncated; the entries of a tree's accepted path are moved together first. Beams that share pages keep
    fewer entries than were accepted where no page is free for the move. Drafters that feed on hidden states get those
    of every token that stays in the cache.
    """
    pool = target.attention.pool
    for sequence, draft, verdict, source in zip(*outcome.all, outcome.sources, strict=True):
        start = sequence.num_computed_tokens + sequence.scheduled
        path = verdict.path[: verdict.accepted]
        kept = pool.keep(sequence.id, start, path) if sequence.id in pool.block_tables else 0
        sequence.num_computed_tokens = start + kept
        if target.hidden:
            first = result.batch.offsets[source]
            end = first + sequence.scheduled
            chain = range(first, end + kept)
            rows = chain if draft.is_chain else [*range(first, end), *(end + i for i in path[:kept])]
            verdict.hidden = HiddenStates(result.output.hidden, rows)
        sequence.tokens.extend(verdict.tokens)
        verdict.fed, sequence.scheduled = sequence.scheduled, 0

"""Keep the accepted path in the cache, drop the rest."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.cache.pool import Pages, Pool
from forerun.core.request import RequestState
from forerun.core.tree import Draft, Verdict


def roll_back(
    pool: Pool, sequences: Sequence[RequestState], drafts: Sequence[Draft], verdicts: Sequence[Verdict]
) -> list[int]:
    """After a forward: each cache holds the committed tokens up to, not including, the newly sampled one.

    A chain is truncated; a tree's accepted entries are moved together first. Returns how many drafted entries of each
    stay: all that were accepted, but for beams that share pages where none is free for moving them.
    """
    counts = []
    for sequence, draft, verdict in zip(sequences, drafts, verdicts, strict=True):
        start = sequence.cached + sequence.scheduled
        path = verdict.path[: verdict.accepted]
        count = len(path)
        if sequence.id not in pool.tables:
            count = 0
        elif draft.is_chain:
            Pages.truncate(pool, sequence.id, start + count)
        else:
            count = pool.keep(sequence.id, start, path)
        sequence.cached = start + count
        counts.append(count)
    return counts

"""Keep what belongs to the accepted path, in the cache and of hidden states; drop the rest."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.cache.pool import Pages, Pool
from forerun.core.request import Requests
from forerun.core.tree import Drafts, Verdicts
from forerun.speculate.verify import Target, Verification


def roll_back(pool: Pool, sequences: Requests, drafts: Drafts, verdicts: Verdicts) -> list[int]:
    """After a forward: each cache holds the committed tokens up to, not including, the newly sampled one.

    A chain is truncated; a tree's accepted entries are moved together first. Returns how many drafted entries of each
    stay: all that were accepted, but for beams that share pages where none is free for moving them.
    """
    counts = []
    for sequence, draft, verdict in zip(sequences, drafts, verdicts, strict=True):
        start = sequence.num_computed_tokens + sequence.scheduled
        path = verdict.path[: verdict.accepted]
        count = len(path)
        if sequence.id not in pool.block_tables:
            count = 0
        elif draft.is_chain:
            Pages.truncate(pool, sequence.id, start + count)
        else:
            count = pool.keep(sequence.id, start, path)
        sequence.num_computed_tokens = start + count
        counts.append(count)
    return counts


def keep_hidden(
    target: Target,
    result: Verification,
    sequences: Requests,
    verdicts: Verdicts,
    sources: Sequence[int],
    kept: Sequence[int],
) -> None:
    """Hand drafters that feed on the target's features the rows of every token that stays. ``sources``: whose rows in
    the batch are each sequence's; ``kept``: how much of each path is in the cache."""
    if not target.hidden:
        return
    for sequence, verdict, source, count in zip(sequences, verdicts, sources, kept):
        offset, path = result.batch.offsets[source], verdict.path[:count]
        first = offset + sequence.scheduled
        rows: slice | list[int] = slice(offset, first + len(path))
        if path != list(range(len(path))):
            rows = [*range(offset, first), *(first + node for node in path)]
        verdict.hidden = {layer: result.output.hidden[layer][rows] for layer in target.hidden}

"""The round: speculative decoding on one screen.

Leviathan et al. 2023, algorithm 1, for a batch of sequences that may each draft a tree, nothing at all, or still be
reading their prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter

from forerun.core.request import Beams, RequestState
from forerun.core.tree import Draft, Verdict
from forerun.sampling.draw import Sampler
from forerun.speculate.accept.base import Rule
from forerun.speculate.beams import Fork, observed, search, split
from forerun.speculate.draft.router import Router
from forerun.speculate.length.base import LengthPolicy, Seconds
from forerun.speculate.rollback import roll_back
from forerun.speculate.verify import Target, Verification, verify


@dataclass(slots=True)
class Round:
    """What happened: one draft and one verdict per sequence, and where the time went."""

    drafts: list[Draft]
    verdicts: list[Verdict]
    verification: Verification
    seconds: Seconds
    groups: list[Beams]
    """Those whose beams took steps."""


Clip = Callable[[RequestState, Draft, Verdict], list[int]]


def speculate(
    sequences: Sequence[RequestState],
    target: Target,
    drafter: Router,
    rule: Rule,
    policy: LengthPolicy,
    sampler: Sampler,
    clip: Clip,
) -> Round:
    """One round. Every sequence has ``scheduled`` uncached tokens to feed; those that reach their last token
    decode. ``clip`` turns a verdict's path and token into the tokens to emit, up to a stop inside."""
    began = perf_counter()
    budgets = policy.budgets(sequences)  # 0 rows = plain decoding
    drafts = drafter.propose(sequences, budgets)  # 1 draft
    drafted = perf_counter()
    result = verify(target, sequences, drafts)  # 2 one target forward
    verified = perf_counter()
    verdicts = [Verdict() for _ in sequences]
    alone, groups = split(result.scores)
    decided = rule.accept(result.scores.of(alone), sampler) if alone else []  # 3 accept, lossless
    for member, verdict in zip(alone, decided):
        verdicts[result.deciding[member]] = verdict
    forks = search(result, groups, sampler, verdicts)  # beams: plain steps as far as drafts reach
    everyone = _join(groups, forks, target, drafter, policy, sequences, drafts, verdicts)
    for sequence, draft, verdict in zip(*everyone):
        if verdict.token is not None:
            verdict.tokens = clip(sequence, draft, verdict)
    kept = roll_back(target.attention.pool, *everyone)  # 4 keep the path, drop the rest
    _keep_hidden(target, result, everyone, [*range(len(sequences)), *(fork.source for fork in forks)], kept)
    for sequence, _, verdict in zip(*everyone):
        sequence.tokens.extend(verdict.tokens)
        verdict.fed, sequence.scheduled = sequence.scheduled, 0
    drafter.observe(*everyone, result)
    ended = perf_counter()
    seconds = Seconds(drafted - began, verified - drafted, ended - verified)
    seen = [observed(*each) for each in zip(sequences, drafts, verdicts)] if groups else verdicts
    policy.observe(sequences, drafts, seen, seconds)
    return Round(drafts, verdicts, result, seconds, list(groups))


Everyone = tuple[list[RequestState], list[Draft], list[Verdict]]


def _join(
    groups: Iterable[Beams],
    forks: Sequence[Fork],
    target: Target,
    drafter: Router,
    policy: LengthPolicy,
    sequences: Sequence[RequestState],
    drafts: Sequence[Draft],
    verdicts: Sequence[Verdict],
) -> Everyone:
    """The round's sequences with their drafts and verdicts, twins behind them: these share their source's pages and
    whatever is known of it. Beams that are dropped have no pages any more."""
    for fork in forks:
        source = sequences[fork.source]
        target.attention.pool.fork(source.id, fork.sequence.id, target.attention.pool.length(source.id))
        drafter.fork(source, fork.sequence)
        policy.fork(source, fork.sequence)
    for sequence in [sequence for group in groups for sequence in group.dropped]:
        target.attention.pool.free(sequence.id)  # the others need room to move
    return (
        [*sequences, *(fork.sequence for fork in forks)],
        [*drafts, *(drafts[fork.source] for fork in forks)],
        [*verdicts, *(fork.verdict for fork in forks)],
    )


def _keep_hidden(
    target: Target, result: Verification, everyone: Everyone, members_at: Sequence[int], kept: Sequence[int]
) -> None:
    """Hand drafters that feed on the target's features the rows of every token that stays. ``members_at``: whose rows
    in the batch are each sequence's; ``kept``: how much of each path is in the cache."""
    if not target.hidden:
        return
    for sequence, _, verdict, member, count in zip(*everyone, members_at, kept):
        offset, path = result.batch.offsets[member], verdict.path[:count]
        first = offset + sequence.scheduled
        rows: slice | list[int] = slice(offset, first + len(path))
        if path != list(range(len(path))):
            rows = [*range(offset, first), *(first + node for node in path)]
        verdict.hidden = {layer: result.output.hidden[layer][rows] for layer in target.hidden}

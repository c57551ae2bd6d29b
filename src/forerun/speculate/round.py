"""The round: speculative decoding on one screen.

Leviathan et al. 2023, algorithm 1, for a batch of sequences that may each draft a tree, nothing at all, or still be
reading their prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from time import perf_counter

from forerun.core.sequence import Sequence
from forerun.core.tree import Draft, Verdict
from forerun.sampling.draw import Sampler
from forerun.speculate.accept.base import Rule
from forerun.speculate.draft.router import Router
from forerun.speculate.length.base import LengthPolicy, Seconds
from forerun.speculate.rollback.caches import roll_back
from forerun.speculate.verify.score import Target, Verification, verify


@dataclass(slots=True)
class Round:
    """What happened: one draft and one verdict per sequence, and where the time went."""

    drafts: list[Draft]
    verdicts: list[Verdict]
    verification: Verification
    seconds: Seconds


Clip = Callable[[Sequence, Draft, Verdict], None]


def speculate(
    sequences: Seq[Sequence],
    target: Target,
    drafter: Router,
    rule: Rule,
    policy: LengthPolicy,
    sampler: Sampler,
    clip: Clip,
) -> Round:
    """One round. Every sequence has ``scheduled`` uncached tokens to feed; those that reach their last token
    decode. ``clip`` turns a verdict's path and token into the tokens to emit, ending at a stop inside."""
    began = perf_counter()
    budgets = policy.budgets(sequences)  # 0 rows = plain decoding
    drafts = drafter.propose(sequences, budgets)  # 1 draft
    drafted = perf_counter()
    result = verify(target, sequences, drafts)  # 2 one target forward
    verified = perf_counter()
    decided = rule.accept(result.scores, sampler)  # 3 accept, lossless
    verdicts = [Verdict() for _ in sequences]
    for index, verdict in zip(result.deciding, decided):
        verdicts[index] = verdict
        clip(sequences[index], drafts[index], verdict)
    _keep_hidden(target, result, sequences, verdicts)
    roll_back(target.cache.pool, sequences, drafts, verdicts)  # 4 keep the path, drop the rest
    for sequence, verdict in zip(sequences, verdicts):
        sequence.tokens.extend(verdict.tokens)
        verdict.fed, sequence.scheduled = sequence.scheduled, 0
    drafter.observe(sequences, drafts, verdicts, result)
    ended = perf_counter()
    seconds = Seconds(drafted - began, verified - drafted, ended - verified)
    policy.observe(sequences, drafts, verdicts, seconds)
    return Round(drafts, verdicts, result, seconds)


def _keep_hidden(target: Target, result: Verification, sequences: Seq[Sequence], verdicts: Seq[Verdict]) -> None:
    """Hand drafters that feed on the target's features the rows of every token that stays."""
    if not target.hidden:
        return
    for sequence, verdict, offset in zip(sequences, verdicts, result.batch.offsets):
        first, path = offset + sequence.scheduled, verdict.path[: verdict.accepted]
        rows: slice | list[int] = slice(offset, first + len(path))
        if path != list(range(len(path))):
            rows = [*range(offset, first), *(first + node for node in path)]
        verdict.hidden = {layer: result.output.hidden[layer][rows] for layer in target.hidden}

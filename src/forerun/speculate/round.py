"""The round: speculative decoding on one screen.

Leviathan et al. 2023, algorithm 1, for a batch of sequences that may each draft a tree, nothing at all, or still be
reading their prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from forerun.core.request import Beams, Requests, RequestState
from forerun.core.tree import Draft, Verdict
from forerun.sampling.draw import Sampler
from forerun.speculate.accept.base import Rule
from forerun.speculate.beams import branch
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
    """Beam searches that took steps."""


Clip = Callable[[RequestState, Draft, Verdict], list[int]]


def speculate(
    sequences: Requests, target: Target, drafter: Router, rule: Rule, policy: LengthPolicy, sampler: Sampler, clip: Clip
) -> Round:
    """One round. Every sequence has ``scheduled`` uncached tokens to feed; those that reach their last token
    decode. ``clip`` turns a verdict's path and token into the tokens to emit, up to a stop inside."""
    began = perf_counter()
    budgets = policy.budgets(sequences)  # 0 rows = plain decoding
    drafts = drafter.propose(sequences, budgets)  # 1 draft
    drafted = perf_counter()
    result = verify(target, sequences, drafts)  # 2 one target forward
    verified = perf_counter()
    verdicts = _accept(rule, result, sampler, len(sequences))  # 3 accept, lossless
    batch = branch(sequences, drafts, verdicts, result, sampler, target, (drafter, policy))  # beams decide alone
    for sequence, draft, verdict in zip(*batch.all):
        if verdict.token is not None:
            verdict.tokens = clip(sequence, draft, verdict)
    roll_back(target, result, batch)  # 4 commit what was emitted, drop the rest
    drafter.observe(*batch.all, result)
    seconds = Seconds(drafted - began, verified - drafted, perf_counter() - verified, result.output.experts)
    policy.observe(sequences, drafts, batch.seen(), seconds)
    return Round(drafts, verdicts, result, seconds, batch.groups)


def _accept(rule: Rule, result: Verification, sampler: Sampler, count: int) -> list[Verdict]:
    """One verdict for each of the round's ``count`` sequences; empty where nothing decides, or a beam search does."""
    verdicts = [Verdict() for _ in range(count)]
    alone = [index for index, sequence in enumerate(result.scores.sequences) if sequence.group is None]
    for index, verdict in zip(alone, rule.accept(result.scores.select(alone), sampler) if alone else []):
        verdicts[result.deciding[index]] = verdict
    return verdicts

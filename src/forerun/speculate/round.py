"""One round of speculative decoding: Algorithm 1 of Leviathan et al. 2023 (arXiv 2211.17192), for a batch.

Each sequence may draft a chain, a tree or nothing, or may still be reading its prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forerun.core.request import Beams, Requests, RequestState
from forerun.core.tree import Draft, Verdict
from forerun.kernels.gpu import Laps
from forerun.sampling.draw import Sampler
from forerun.speculate.accept.base import Rule
from forerun.speculate.beams import beam_progress, branch
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
"""Returns the tokens to emit: a verdict's accepted path and next token, up to a stop inside."""


def speculate(
    sequences: Requests, target: Target, drafter: Router, rule: Rule, policy: LengthPolicy, sampler: Sampler, clip: Clip
) -> Round:
    """Runs one round. It feeds each sequence's ``scheduled`` tokens; a sequence whose last committed token is fed gets
    new tokens."""
    budgets = policy.budgets(sequences)  # draft lengths; 0: plain decoding
    laps = Laps(target.model.info.device)
    drafts = drafter.propose(sequences, budgets)  # 1. sample guesses from q
    laps.mark()
    result = verify(target, sequences, drafts)  # 2. compute p at every guess, in one forward
    laps.mark()
    verdicts = _accept(rule, result, sampler, len(sequences))  # 3. accept a path of guesses, and draw the next token
    outcome = branch(sequences, drafts, verdicts, result, sampler, target, (drafter, policy))
    for sequence, draft, verdict in zip(*outcome.all):
        if verdict.token is not None:
            verdict.tokens = clip(sequence, draft, verdict)
    roll_back(target, result, outcome)  # 4. commit the emitted tokens, and drop the rest from the cache
    drafter.observe(*outcome.all, result)
    drafting, verifying, accepting = laps.seconds()
    seconds = Seconds(drafting, verifying, accepting, result.output.experts)
    verdicts = outcome.verdicts[: len(sequences)]
    policy.observe(sequences, drafts, list(map(beam_progress, sequences, drafts, verdicts)), seconds)
    return Round(drafts, verdicts, result, seconds, outcome.groups)


def _accept(rule: Rule, result: Verification, sampler: Sampler, count: int) -> list[Verdict]:
    """One verdict for each of the round's ``count`` sequences; empty for those that read a prompt or are beams."""
    verdicts = [Verdict() for _ in range(count)]
    chosen = [index for index, sequence in enumerate(result.scores.sequences) if sequence.group is None]
    accepted = rule.accept(result.scores.select(chosen), sampler) if chosen else []
    if len(accepted) != len(chosen):
        raise ValueError(f"rule {rule.name!r} returned {len(accepted)} verdicts for {len(chosen)} sequences")
    for index, verdict in zip(chosen, accepted):
        verdicts[result.deciding[index]] = verdict
    return verdicts

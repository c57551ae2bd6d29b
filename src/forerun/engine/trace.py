"""What a round looked like, token by token: the material of figure 1 of Leviathan et al. 2023."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.core.tree import Draft, Verdict

ACCEPTED, CORRECTED, BONUS, PLAIN = "accepted", "corrected", "bonus", "plain"


@dataclass(frozen=True, slots=True)
class TraceRound:
    """One round of one sequence.

    ``tokens`` were emitted, each of the kind beside it in ``origins``: accepted from the draft, corrected by the
    target (a draft was rejected there), bonus (the whole draft was accepted), plain (nothing was drafted).
    ``rejected`` holds the drafted tokens that were not kept, in drafting order.
    """

    tokens: tuple[int, ...]
    origins: tuple[str, ...]
    rejected: tuple[int, ...]
    drafted: int
    method: str | None

    @classmethod
    def of(cls, draft: Draft, verdict: Verdict) -> TraceRound:
        origins = [ACCEPTED] * verdict.accepted
        if len(verdict.tokens) > verdict.accepted:
            last = verdict.path[-1] if verdict.path else -1
            ended = not draft.children(last)
            origins.append(PLAIN if not len(draft) else BONUS if ended else CORRECTED)
        kept = set(verdict.path[: verdict.accepted])
        rejected = [token for node, token in enumerate(draft.tokens) if node not in kept]
        return cls(tuple(verdict.tokens), tuple(origins), tuple(rejected), len(draft), draft.method)

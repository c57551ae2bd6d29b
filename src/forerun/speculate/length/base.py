"""How far to draft: a budget of depth per sequence and round; 0 is plain decoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from forerun.core.request import Requests, RequestState
from forerun.core.tree import Drafts, Verdicts
from forerun.models.base import MixtureInfo
from forerun.speculate.names import policies as policies


@dataclass(frozen=True)
class Setting:
    """What a policy may know of the engine.

    ``nodes[method][depth]`` is how many rows a draft of that depth adds to a verification; rows of one forward are
    padded to a multiple of ``row_multiple``. ``behind`` says how many committed tokens of a sequence its drafter must
    read before it can draft, at most so many of the last ones. ``models`` are the methods that draft with a model of
    their own. ``mixture``: the target's experts.
    """

    nodes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    row_multiple: int = 1
    behind: Callable[[RequestState], int] = lambda sequence: 0
    models: frozenset[str] = frozenset()
    mixture: MixtureInfo | None = None


@dataclass(frozen=True, slots=True)
class Seconds:
    """Where a round's time went, and how many ``experts`` its forward read, those of all layers."""

    draft: float
    verify: float
    accept: float
    experts: int = 0


class LengthPolicy(ABC):
    """Chooses budgets before a round and learns from it afterwards.

    A policy decides before any token of the round is drawn: dropping a drafted token because of its own value would
    bias rules that compare p with q.
    """

    reproducible = True
    """Budgets are a function of the tokens alone, not of measured time."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def longest(self, sequence: RequestState) -> int:
        """The deepest draft this sequence may get this round; 0 while it reads its prompt or has no drafter.

        It leaves room for the token that follows the draft, and stays within the request's own bound and what the
        scheduler has found rows and pages for.
        """
        if sequence.drafter is None or not sequence.decodes or sequence.scheduled > 1:
            return 0
        nodes = self.setting.nodes[sequence.drafter]
        depth = max(0, min(len(nodes) - 1, sequence.remaining - 1))
        if sequence.max_draft is not None:
            depth = min(depth, sequence.max_draft)
        while sequence.draft_budget is not None and nodes[depth] > sequence.draft_budget:
            depth -= 1
        return depth

    def longest_nodes(self, sequence: RequestState) -> int:
        """Most rows that this sequence's draft may add this round."""
        return self.setting.nodes[sequence.drafter][self.longest(sequence)] if sequence.drafter is not None else 0

    @abstractmethod
    def budgets(self, sequences: Requests) -> list[int]:
        """One budget per sequence, at most its ``longest``."""

    @abstractmethod
    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, seconds: Seconds) -> None:
        """See what became of a round."""

    def fork(self, source: RequestState, sequence: RequestState) -> None:
        """``sequence``, new here, goes on from what ``source`` was before this round."""

    def release(self, sequence: RequestState) -> None:
        """Forget a sequence that ended."""


@policies.register("fixed")
class Fixed(LengthPolicy):
    def budgets(self, sequences: Requests) -> list[int]:
        return [self.longest(sequence) for sequence in sequences]

    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, seconds: Seconds) -> None:
        pass

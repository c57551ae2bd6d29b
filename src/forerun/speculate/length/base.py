"""Draft length: a depth per sequence and round, 0 for plain decoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from forerun.core.request import Requests, RequestState
from forerun.core.tree import Drafts, Verdicts
from forerun.models.run.base import MixtureInfo
from forerun.speculate.length.prices import Trials
from forerun.speculate.names import policies as policies


class Parts(NamedTuple):
    """What a drafter is made of: methods that look up, which are asked first and cost next to nothing, and the method
    that pays for each token, with its greatest depth (None: the drafter's)."""

    lookups: tuple[str, ...]
    steps: str | None
    deepest: int | None = None


@dataclass(frozen=True)
class Setting:
    """What a policy knows about the engine.

    Args:
        nodes: By method and depth, the rows that a draft of that depth adds to a verification.
        row_multiple: Rows of one forward are padded to a multiple of it.
        backlog: How many committed tokens the drafter of a sequence must read before it can draft.
        models: Methods that draft with a model of their own.
        skips: Methods that may begin with the last tokens of a text; the others read all of it, or wait.
        mixture: The target's experts, if it has any.
        parts: By method; without an entry, a method pays for each token.
        trials: Runs rounds that measure prices; None: there is nothing to run them.
        threads: The present number of threads.
        busy: Whether other programs have used the processor since the last call.
    """

    nodes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    row_multiple: int = 1
    backlog: Callable[[RequestState], int] = lambda sequence: 0
    models: frozenset[str] = frozenset()
    skips: frozenset[str] = frozenset()
    mixture: MixtureInfo | None = None
    parts: Mapping[str, Parts] = field(default_factory=dict)
    trials: Trials | None = None
    threads: Callable[[], int] = lambda: 0
    busy: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of a round, and how many ``experts`` its forward read, summed over layers."""

    draft: float
    verify: float
    accept: float
    experts: int = 0


class LengthPolicy(ABC):
    """Chooses the depth of each draft before a round and learns from the round afterwards.

    It decides before any token of the round is drawn. To drop a drafted token because of its value would bias rules
    that compare p with q.
    """

    reproducible = True
    """Whether budgets depend on tokens alone, not on measured time."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def move(self, setting: Setting) -> None:
        """Goes on in another engine, which has this setting."""
        self.setting = setting

    def expect(self, count: int) -> None:
        """Before the first batch of this size is admitted, while there is room for others: measures prices."""

    def longest(self, sequence: RequestState) -> int:
        """The greatest depth that this sequence may draft in this round; 0 in prefill or without a drafter.

        One token of ``max_tokens`` stays for what follows the draft. The request's own limit holds, and the rows and
        pages that the scheduler reserved.
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
        """The most rows that this sequence's draft may add in this round."""
        return self.setting.nodes[sequence.drafter][self.longest(sequence)] if sequence.drafter is not None else 0

    def add(self, method: str, nodes: Sequence[int], parts: Parts) -> None:
        """A drafter was loaded later; ``nodes`` and ``parts`` are as in ``Setting``."""
        setting = self.setting
        nodes_of, parts_of = {**setting.nodes, method: nodes}, {**setting.parts, method: parts}
        self.setting = replace(setting, nodes=nodes_of, parts=parts_of)

    @abstractmethod
    def budgets(self, sequences: Requests) -> list[int]:
        """One budget per sequence, at most its ``longest``."""

    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, seconds: Seconds) -> None:
        """Learn from a round."""

    def observe_host(self, seconds: float) -> None:
        """Learns what a round took outside drafting, verification and acceptance."""

    def fork(self, source: RequestState, sequence: RequestState) -> None:
        """Start the new ``sequence`` from the state of ``source`` before this round."""

    def release(self, sequence: RequestState) -> None:
        """Forget a sequence that ended."""


@policies.register("fixed")
class Fixed(LengthPolicy):
    def budgets(self, sequences: Requests) -> list[int]:
        return [self.longest(sequence) for sequence in sequences]

"""Drafters that learn from tokens alone: one index per sequence, grown as tokens are committed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from forerun.core.request import RequestState
from forerun.core.tree import Draft
from forerun.speculate.draft.base import C, DraftContext, Drafter


class Index(Protocol):
    """What one sequence has taught; ``seen`` are the tokens it was built from."""

    seen: list[int]

    def update(self, tokens: Sequence[int]) -> None: ...


I = TypeVar("I", bound=Index)


class HistoryDrafter(Drafter[C], Generic[C, I]):
    """Keeps an index per sequence, of its source, where it has one, and what follows. Tentative tokens are context, but
    nothing is learnt from them."""

    def __init__(self, config: C, context: DraftContext) -> None:
        super().__init__(config, context)
        self.indices: dict[int, I] = {}

    @abstractmethod
    def new_index(self) -> I:
        """An empty index."""

    @abstractmethod
    def draft(self, sequence: RequestState, index: I, tail: list[int], budget: int) -> Draft:
        """A draft behind ``index.seen`` and the tentative tokens ``tail``, at most ``budget`` deep."""

    def propose(self, sequences: Sequence[RequestState], budgets: Sequence[int]) -> list[Draft]:
        drafts = []
        for sequence, budget in zip(sequences, budgets):
            index = self.indices.get(sequence.id)
            if index is None:
                index = self.indices[sequence.id] = self.new_index()
                index.update(sequence.source or ())
            firm = len(sequence.tokens) - sequence.tentative
            index.update(sequence.tokens[len(index.seen) - len(sequence.source or ()) : firm])
            drafts.append(self.draft(sequence, index, sequence.tokens[firm:], budget))
        return drafts

    def release(self, sequence: RequestState) -> None:
        self.indices.pop(sequence.id, None)

    def rewind(self, sequence: RequestState) -> None:
        """Tentative tokens were never learnt from."""

    def cached_tokens(self, sequence: RequestState) -> list[int]:
        index = self.indices.get(sequence.id)
        return index.seen[len(sequence.source or ()) :] if index is not None else []

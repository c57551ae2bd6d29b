"""``ngram``: frequency tables over the request's own tokens (reference: akunu's NGramPredictor).

One table per order maps a context of order - 1 tokens to counted continuations. A draft takes the most frequent
continuation of the longest known context, appends it to the context and goes on; the first position without any
known context ends it. Tables grow with every committed token, prompt included, and live as long as the request.
With ``counts_as_q`` a continuation is drawn from the counts instead, and they are the draft's q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.core.errors import ConfigError
from forerun.core.request import RequestState
from forerun.core.tree import POINT_MASS, Draft
from forerun.speculate.draft.base import Chooser, DraftContext, DrafterConfig, drafters
from forerun.speculate.draft.counts import CountChooser, Counts
from forerun.speculate.draft.history import HistoryDrafter


@dataclass(frozen=True)
class NgramConfig(DrafterConfig):
    num_speculative_tokens: int = 4
    max_order: int = 4
    """Longest n-gram; its context is one token shorter."""
    max_history: int = 512
    """How many of the latest tokens may serve as context."""
    counts_as_q: bool = False
    """Draw each token from the counted continuations, with the counts as its q, where the request samples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree is not None:
            raise ConfigError("method 'ngram' drafts chains; remove 'tree'")
        if self.max_order < 2:
            raise ConfigError(f"max_order must be at least 2, not {self.max_order}")
        if self.max_history < self.max_order - 1:
            raise ConfigError(f"max_history must be at least max_order - 1, not {self.max_history}")
        if self.draft_temperature is not None and not self.counts_as_q:
            raise ConfigError("draft_temperature does nothing to method 'ngram' unless counts_as_q is true")


class Tables:
    """Counted continuations of one request. Of equally frequent ones the latest wins."""

    def __init__(self, max_order: int, max_history: int) -> None:
        self.max_order = max_order
        self.window = min(max_history, max_order - 1)
        self.seen: list[int] = []
        self.counts: dict[tuple[int, ...], dict[int, int]] = {}
        self.best: dict[tuple[int, ...], int] = {}

    def update(self, tokens: Sequence[int]) -> None:
        """Count every order's n-gram that ends at each new token."""
        for token in tokens:
            for length in range(1, min(self.max_order, len(self.seen) + 1)):
                context = tuple(self.seen[-length:])
                counts = self.counts.setdefault(context, {})
                counts[token] = counts.get(token, 0) + 1
                if counts[token] >= counts[self.best.setdefault(context, token)]:
                    self.best[context] = token
            self.seen.append(token)

    def context(self, tail: Sequence[int]) -> list[int]:
        """The latest tokens that may serve as context, ``tail`` behind those seen."""
        return [*self.seen[-self.window :], *tail][-self.window :]

    def known(self, context: Sequence[int]) -> tuple[int, ...] | None:
        """The longest suffix of ``context`` that has been continued before."""
        for length in range(min(self.max_order - 1, len(context)), 0, -1):
            suffix = tuple(context[-length:])
            if suffix in self.best:
                return suffix
        return None

    def predict(self, context: list[int], count: int) -> list[int]:
        """Up to ``count`` chained predictions behind ``context``, which grows by them."""
        drafted: list[int] = []
        while len(drafted) < count and (suffix := self.known(context)) is not None:
            drafted.append(self.best[suffix])
            context.append(self.best[suffix])
        return drafted

    def confidence(self, context: Sequence[int]) -> float | None:
        """Share of the likeliest continuation in the counts behind the longest known context, and one more."""
        suffix = self.known(context)
        if suffix is None:
            return None
        counts = self.counts[suffix]
        return counts[self.best[suffix]] / (sum(counts.values()) + 1)


@drafters.register("ngram")
class Ngram(HistoryDrafter[NgramConfig, Tables]):
    name = "ngram"
    config_class = NgramConfig

    def __init__(self, config: NgramConfig, context: DraftContext) -> None:
        super().__init__(config, context)
        temperature = config.draft_temperature or 1.0
        self.counted = CountChooser(Chooser(context.sampler, context.rule, temperature, context.stream))

    def new_index(self) -> Tables:
        return Tables(self.config.max_order, self.config.max_history)

    def propose(self, sequences: Sequence[RequestState], budgets: Sequence[int]) -> list[Draft]:
        return self.counted.finish(super().propose(sequences, budgets))

    def draft(self, sequence: RequestState, index: Tables, tail: list[int], budget: int) -> Draft:
        context = index.context(tail)
        confidence = index.confidence(context)
        if self.config.counts_as_q and not sequence.params.greedy:
            draft = self._drawn(sequence, index, context, budget)
        else:
            draft = Draft.chain(index.predict(context, budget))
        draft.confidence = confidence
        return draft

    def _drawn(self, sequence: RequestState, index: Tables, context: list[int], budget: int) -> Draft:
        draft = Draft()
        while len(draft) < budget and (suffix := index.known(context)) is not None:
            token, q_row = index.best[suffix], POINT_MASS
            if len(index.counts[suffix]) > 1:
                counts = Counts.of(index.counts[suffix], self.context.sampler.device)
                row = self.counted.chooser.row(sequence, draft.tokens)
                token, q_row = self.counted.draw(counts, row, len(draft) - 1, budget - len(draft) - 1)
            draft.add(token, len(draft) - 1, q_row)
            context.append(token)
        return draft

"""``ngram``: frequency tables over the request's own tokens (reference: akunu's NGramPredictor).

One table per order maps a context of order - 1 tokens to counted continuations. A draft takes the most frequent
continuation of the longest known context, appends it to the context and goes on; the first position without any
known context ends it. Tables grow with every committed token, prompt included, and live as long as the request.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from forerun.core.errors import ConfigError
from forerun.core.sequence import Sequence
from forerun.core.tree import Draft
from forerun.speculate.draft.base import Drafter, DrafterConfig, drafters


@dataclass(frozen=True)
class NgramConfig(DrafterConfig):
    num_speculative_tokens: int = 4
    max_order: int = 4
    """Longest n-gram; its context is one token shorter."""
    max_history: int = 512
    """How many of the latest tokens may serve as context."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree is not None:
            raise ConfigError("method 'ngram' drafts chains; remove 'tree'")
        if self.max_order < 2:
            raise ConfigError(f"max_order must be at least 2, not {self.max_order}")
        if self.max_history < self.max_order - 1:
            raise ConfigError(f"max_history must be at least max_order - 1, not {self.max_history}")


class Tables:
    """Counted continuations of one request. Of equally frequent ones the latest wins."""

    def __init__(self, max_order: int, max_history: int) -> None:
        self.max_order = max_order
        self.max_history = max_history
        self.seen: list[int] = []
        self.counts: dict[tuple[int, ...], dict[int, int]] = {}
        self.best: dict[tuple[int, ...], int] = {}

    def update(self, tokens: Seq[int]) -> None:
        """Count every order's n-gram that ends at each new token."""
        for token in tokens:
            for length in range(1, min(self.max_order, len(self.seen) + 1)):
                context = tuple(self.seen[-length:])
                counts = self.counts.setdefault(context, {})
                counts[token] = counts.get(token, 0) + 1
                if counts[token] >= counts[self.best.setdefault(context, token)]:
                    self.best[context] = token
            self.seen.append(token)

    def predict(self, count: int) -> list[int]:
        """Up to ``count`` chained predictions."""
        context = self.seen[-min(self.max_history, self.max_order - 1) :]
        drafted: list[int] = []
        while len(drafted) < count:
            for length in range(min(self.max_order - 1, len(context)), 0, -1):
                token = self.best.get(tuple(context[-length:]))
                if token is not None:
                    break
            else:
                break
            drafted.append(token)
            context.append(token)
        return drafted


@drafters.register("ngram")
class Ngram(Drafter[NgramConfig]):
    name = "ngram"
    config_class = NgramConfig

    def __init__(self, config: NgramConfig, context) -> None:
        super().__init__(config, context)
        self.tables: dict[int, Tables] = {}

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        drafts = []
        for sequence, budget in zip(sequences, budgets):
            tables = self.tables.get(sequence.id)
            if tables is None:
                tables = self.tables[sequence.id] = Tables(self.config.max_order, self.config.max_history)
            tables.update(sequence.tokens[len(tables.seen) :])
            drafts.append(Draft.chain(tables.predict(budget)))
        return drafts

    def release(self, sequence: Sequence) -> None:
        self.tables.pop(sequence.id, None)

    def cached_tokens(self, sequence: Sequence) -> list[int]:
        tables = self.tables.get(sequence.id)
        return tables.seen if tables is not None else []

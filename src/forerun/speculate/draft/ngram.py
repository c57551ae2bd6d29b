"""Drafters that learn from the text so far: ``ngram`` counts n-grams, ``prompt_lookup`` copies an earlier match."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

from forerun.core.config import Within
from forerun.core.errors import ConfigError
from forerun.core.registry import from_lab
from forerun.core.request import Requests, RequestState
from forerun.core.tree import Draft, evidence
from forerun.speculate.draft.base import C, DraftContext, Drafter, DrafterConfig, drafters


class Index(Protocol):
    """An index of one sequence, built from the tokens ``seen``."""

    seen: list[int]

    def update(self, tokens: Sequence[int]) -> None: ...


I = TypeVar("I", bound=Index)


class HistoryDrafter(Drafter[C], Generic[C, I]):
    """Keeps an index per sequence, of its encoder source, its ``lookup`` and its tokens. Tentative tokens are used as
    context only."""

    looks_up = True

    def __init__(self, config: C, context: DraftContext) -> None:
        super().__init__(config, context)
        self.indices: dict[int, I] = {}

    @abstractmethod
    def new_index(self) -> I:
        """An empty index."""

    @abstractmethod
    def draft(self, sequence: RequestState, index: I, tail: list[int], budget: int) -> Draft:
        """Drafts what follows ``index.seen`` and the tentative tokens ``tail``, at most ``budget`` deep."""

    def propose(self, sequences: Requests, budgets: Sequence[int]) -> list[Draft]:
        drafts = []
        for sequence, budget in zip(sequences, budgets):
            index = self.indices.get(sequence.id)
            if index is None:
                index = self.indices[sequence.id] = self.new_index()
                index.update([*(sequence.source or ()), *sequence.lookup])
            end = len(sequence.tokens) - sequence.tentative
            index.update(sequence.tokens[len(index.seen) - _before(sequence) : end])
            drafts.append(self.draft(sequence, index, sequence.tokens[end:], budget))
        return drafts

    def release(self, sequence: RequestState) -> None:
        self.indices.pop(sequence.id, None)

    def rewind(self, sequence: RequestState) -> None:
        """Nothing to do: tentative tokens are not in the index."""

    def cached_tokens(self, sequence: RequestState) -> list[int]:
        index = self.indices.get(sequence.id)
        return index.seen[_before(sequence) :] if index is not None else []


def _before(sequence: RequestState) -> int:
    """How many tokens of an index are not the sequence's own."""
    return len(sequence.source or ()) + len(sequence.lookup)


@dataclass(frozen=True)
class NgramConfig(DrafterConfig):
    num_speculative_tokens: int = 4
    max_order: int = 4
    """Longest n-gram; its context is one token shorter."""
    max_history: int = 512
    """How many of the latest tokens may serve as context."""
    counts_as_q: bool = False
    """Draw each token from the counted continuations, with the counts as its q, where the request samples. Part of
    forerun-lab."""
    unsupported: ClassVar = {"tree": "method 'ngram' drafts chains"}
    limits: ClassVar = {"max_order": Within(least=2, whole=True)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_history < self.max_order - 1:
            raise ConfigError(f"max_history must be at least max_order - 1, not {self.max_history}")
        if self.draft_temperature is not None and not self.counts_as_q:
            raise ConfigError("draft_temperature does nothing to method 'ngram' unless counts_as_q is true")


class NgramTables:
    """Counted continuations of one request. Among equally frequent ones the latest wins."""

    def __init__(self, max_order: int, max_history: int) -> None:
        self.max_order = max_order
        self.window = min(max_history, max_order - 1)
        self.seen: list[int] = []
        self.counts: dict[tuple[int, ...], dict[int, int]] = {}
        self.best: dict[tuple[int, ...], int] = {}

    def update(self, tokens: Sequence[int]) -> None:
        """Counts the n-grams of every order that end at each new token."""
        for token in tokens:
            for length in range(1, min(self.max_order, len(self.seen) + 1)):
                context = tuple(self.seen[-length:])
                counts = self.counts.setdefault(context, {})
                counts[token] = counts.get(token, 0) + 1
                if counts[token] >= counts[self.best.setdefault(context, token)]:
                    self.best[context] = token
            self.seen.append(token)

    def context(self, tail: Sequence[int]) -> list[int]:
        """The last tokens of ``seen`` and ``tail`` that serve as context."""
        return [*self.seen[-self.window :], *tail][-self.window :]

    def longest_suffix(self, context: Sequence[int]) -> tuple[int, ...] | None:
        """The longest suffix of ``context`` that has a counted continuation."""
        for length in range(min(self.max_order - 1, len(context)), 0, -1):
            suffix = tuple(context[-length:])
            if suffix in self.best:
                return suffix
        return None

    def predict(self, context: list[int], count: int) -> tuple[list[int], list[int]]:
        """Predicts up to ``count`` tokens, each appended to ``context``. Returns them and their evidence."""
        drafted: list[int] = []
        kinds: list[int] = []
        while len(drafted) < count and (suffix := self.longest_suffix(context)) is not None:
            token, counts = self.best[suffix], self.counts[suffix]
            drafted.append(token)
            kinds.append(evidence(len(suffix), counts[token] / sum(counts.values())))
            context.append(token)
        return drafted, kinds

    def confidence(self, context: Sequence[int]) -> float | None:
        """Count of the likeliest continuation over one more than all counts of the same context."""
        suffix = self.longest_suffix(context)
        if suffix is None:
            return None
        counts = self.counts[suffix]
        return counts[self.best[suffix]] / (sum(counts.values()) + 1)


@drafters.register("ngram")
class Ngram(HistoryDrafter[NgramConfig, NgramTables]):
    """Drafts the most frequent continuations of the longest n-gram contexts seen before."""

    name = "ngram"
    config_class = NgramConfig
    has_evidence = True

    @classmethod
    def build(cls, config: NgramConfig, context: DraftContext) -> Drafter[NgramConfig]:
        counted = config.counts_as_q and cls is Ngram
        kind: type[Ngram] = from_lab("counts", "counts_as_q").CountedNgram if counted else cls
        return kind(config, context)

    def new_index(self) -> NgramTables:
        return NgramTables(self.config.max_order, self.config.max_history)

    def draft(self, sequence: RequestState, index: NgramTables, tail: list[int], budget: int) -> Draft:
        context = index.context(tail)
        confidence = index.confidence(context)
        tokens, kinds = index.predict(context, budget)
        draft = Draft.chain(tokens)
        draft.confidence, draft.evidence = confidence, kinds
        return draft


@dataclass(frozen=True)
class PromptLookupConfig(DrafterConfig):
    num_speculative_tokens: int = 7
    prompt_lookup_max: int = 5
    """Longest suffix that is looked up, in tokens."""
    prompt_lookup_min: int = 2
    """Shortest suffix whose match is copied."""
    unsupported: ClassVar = {
        "tree": "method 'prompt_lookup' drafts chains",
        "draft_temperature": "method 'prompt_lookup' draws nothing from a distribution",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if not 1 <= low <= high:
            raise ConfigError(f"prompt_lookup_min must be from 1 to prompt_lookup_max ({high}), not {low}")


class NgramIndex:
    """Maps each suffix of ``low`` to ``high`` tokens to the position of its last continuation. O(high) per token."""

    def __init__(self, low: int, high: int) -> None:
        self.low = low
        self.high = high
        self.seen: list[int] = []
        self.after: dict[tuple[int, ...], int] = {}

    def update(self, tokens: Sequence[int]) -> None:
        """Records suffixes before each new token, so that no lookup finds the end of the text itself."""
        seen, after = self.seen, self.after
        for token in tokens:
            end = len(seen)
            tail = tuple(seen[max(0, end - self.high) :])
            for start in range(len(tail) - self.low + 1):
                after[tail[start:]] = end
            seen.append(token)

    def lookup(self, tail: Sequence[int]) -> tuple[int, int]:
        """The position after the last match of the longest indexed suffix of ``seen + tail``, and that suffix's length;
        0 if there is no match."""
        context = [*self.seen[max(0, len(self.seen) - self.high) :], *tail][-self.high :]
        for length in range(len(context), self.low - 1, -1):
            index = self.after.get(tuple(context[-length:]))
            if index is not None:
                return index, length
        return len(self.seen), 0

    def copy(self, index: int, tail: Sequence[int], count: int) -> list[int]:
        """``count`` tokens from ``index`` on. After the end of ``seen`` and ``tail``, the copy repeats itself."""
        copied = [*self.seen[index : index + count], *tail]
        period = len(copied)
        while len(copied) < count:
            copied.append(copied[len(copied) - period])
        return copied[:count]


@drafters.register("prompt_lookup")
class PromptLookup(HistoryDrafter[PromptLookupConfig, NgramIndex]):
    """Copies what followed the last occurrence of the text's end (Saxena 2023)."""

    name = "prompt_lookup"
    config_class = PromptLookupConfig
    has_evidence = True

    def new_index(self) -> NgramIndex:
        return NgramIndex(self.config.prompt_lookup_min, self.config.prompt_lookup_max)

    def draft(self, sequence: RequestState, index: NgramIndex, tail: list[int], budget: int) -> Draft:
        start, length = index.lookup(tail)
        if not length:
            return Draft()
        draft = Draft.chain(index.copy(start, tail, budget))
        draft.confidence = length / (length + 1)
        draft.evidence = [evidence(length + depth, 0.5) for depth in range(len(draft))]
        return draft

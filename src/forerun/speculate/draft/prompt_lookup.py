"""``prompt_lookup``: copy what followed the latest occurrence of the context's longest known suffix.

Source: apoorvumang's prompt lookup decoding; option names are vLLM's. A copy that reaches the end of the context
goes on through its own first tokens, so that a loop is continued for as long as asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.core.errors import ConfigError
from forerun.core.request import RequestState
from forerun.core.tree import Draft
from forerun.speculate.draft.base import DrafterConfig, drafters
from forerun.speculate.draft.history import HistoryDrafter


@dataclass(frozen=True)
class PromptLookupConfig(DrafterConfig):
    num_speculative_tokens: int = 7
    prompt_lookup_max: int = 5
    """Longest suffix that is looked up, in tokens."""
    prompt_lookup_min: int = 2
    """Shortest suffix whose match is copied."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree is not None:
            raise ConfigError("method 'prompt_lookup' drafts chains; remove 'tree'")
        if self.draft_temperature is not None:
            raise ConfigError("method 'prompt_lookup' draws nothing from a distribution; remove 'draft_temperature'")
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if not 1 <= low <= high:
            raise ConfigError(f"prompt_lookup_min must be from 1 to prompt_lookup_max ({high}), not {low}")


class NgramIndex:
    """Where each suffix of ``low`` to ``high`` tokens was last continued. Adding a token costs O(high)."""

    def __init__(self, low: int, high: int) -> None:
        self.low = low
        self.high = high
        self.seen: list[int] = []
        self.after: dict[tuple[int, ...], int] = {}

    def update(self, tokens: Sequence[int]) -> None:
        """A suffix is recorded once its continuation is known, so that no lookup finds the context's own end."""
        seen, after = self.seen, self.after
        for token in tokens:
            end = len(seen)
            tail = tuple(seen[max(0, end - self.high) :])
            for start in range(len(tail) - self.low + 1):
                after[tail[start:]] = end
            seen.append(token)

    def lookup(self, tail: Sequence[int]) -> tuple[int, int]:
        """Where the continuation of the longest known suffix of ``seen + tail`` starts, and that suffix's length
        (0: none is known)."""
        context = [*self.seen[max(0, len(self.seen) - self.high) :], *tail][-self.high :]
        for length in range(len(context), self.low - 1, -1):
            index = self.after.get(tuple(context[-length:]))
            if index is not None:
                return index, length
        return len(self.seen), 0

    def copy(self, index: int, tail: Sequence[int], count: int) -> list[int]:
        """``count`` tokens from ``index`` on; what lies past ``seen`` is ``tail``, then the copy itself."""
        known = self.seen[index : index + count]
        if len(known) == count:
            return known
        known = [*known, *tail]
        offset = len(known)
        while len(known) < count:
            known.append(known[len(known) - offset])
        return known[:count]


@drafters.register("prompt_lookup")
class PromptLookup(HistoryDrafter[PromptLookupConfig, NgramIndex]):
    name = "prompt_lookup"
    config_class = PromptLookupConfig

    def new_index(self) -> NgramIndex:
        return NgramIndex(self.config.prompt_lookup_min, self.config.prompt_lookup_max)

    def draft(self, sequence: RequestState, index: NgramIndex, tail: list[int], budget: int) -> Draft:
        slot, length = index.lookup(tail)
        if not length:
            return Draft()
        draft = Draft.chain(index.copy(slot, tail, budget))
        draft.confidence = length / (length + 1)
        return draft

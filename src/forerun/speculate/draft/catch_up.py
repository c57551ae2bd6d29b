"""Drafters with a cache of their own: it lags behind the target's, and is filled as drafts are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.core.errors import ConfigError
from forerun.speculate.draft.base import DrafterConfig


@dataclass(frozen=True)
class CatchUpConfig(DrafterConfig):
    """Options of drafters that read the text themselves."""

    prefill_chunk: int = 192
    """Most tokens per round that sequences catch up on before they draft, all of them together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.prefill_chunk, int) or isinstance(self.prefill_chunk, bool) or self.prefill_chunk < 1:
            raise ConfigError(f"prefill_chunk must be an integer of at least 1, not {self.prefill_chunk!r}")

    def shares(self, missing: Sequence[int]) -> list[int]:
        """How many of the tokens that each sequence lacks it reads this round.

        What a round leaves behind is read whole, and besides, so that nobody who drafts waits for a long prompt and no
        prompt for many who draft. Of the others, those who lack least come first.
        """
        small, left = self.num_speculative_tokens + 1, self.prefill_chunk
        counts = list(missing)
        for index in sorted((i for i, lacks in enumerate(missing) if lacks > small), key=missing.__getitem__):
            counts[index] = min(missing[index], left)
            left -= counts[index]
        return counts

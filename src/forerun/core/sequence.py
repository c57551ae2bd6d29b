"""One request's tokens, as every layer of the engine sees them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Sequence:
    """A growing list of committed tokens and what this round does with it.

    ``tokens`` holds the prompt and every token emitted so far. The last one is sampled but not yet fed to the
    target, so between rounds ``cached == len(tokens) - 1``; a fresh or preempted sequence has ``cached == 0``.
    """

    id: int
    tokens: list[int]
    num_prompt: int
    params: Any
    seed: int
    eos_ids: frozenset[int] = frozenset()
    max_tokens: int = 1 << 30
    """Longest permitted ``len(tokens)``: the prompt plus its allowed output, within the context."""
    scheduled: int = 0
    """How many uncached committed tokens the next target forward feeds."""
    cached: int = 0
    """How many committed tokens have their KV in the target's cache."""
    drafter: str | None = None
    """Which of the engine's drafters proposes for this request; None: it decodes plainly."""
    max_draft: int | None = None
    """The request's own bound on drafted tokens per round (None: the engine's)."""
    hidden: Any = field(default=None, repr=False)

    @property
    def decodes(self) -> bool:
        """Whether the next forward reaches the last committed token, so that a new one can be sampled."""
        return self.scheduled > 0 and self.cached + self.scheduled == len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_tokens - len(self.tokens)

"""How far to draft: a budget of tokens (of depth, in a tree) per sequence and round; 0 is plain decoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq

from forerun.core.registry import Registry
from forerun.core.sequence import Sequence
from forerun.core.tree import Draft, Verdict

policies: Registry[LengthPolicy] = Registry("length policy", "forerun.policies")


class LengthPolicy(ABC):
    """Chooses budgets before a round and learns from it afterwards.

    A policy must not look at a drafted token's value before deciding to keep it: with a q-ratio rule that biases
    the output.
    """

    reproducible = True
    """Budgets are a function of the tokens alone, not of measured time."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens

    @abstractmethod
    def budgets(self, sequences: Seq[Sequence]) -> list[int]:
        """One budget per sequence, from 0 to ``num_speculative_tokens``."""

    @abstractmethod
    def observe(self, drafts: Seq[Draft], verdicts: Seq[Verdict], seconds: float) -> None:
        """See a round's drafts, verdicts and duration (seconds)."""

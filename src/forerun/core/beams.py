"""One request's beams: sequences that are scored, kept and dropped together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from forerun.core.request import RequestState


class Hypothesis(NamedTuple):
    """A finished beam: its output tokens, the sum of their log-probabilities, and that sum over
    (tokens ** length penalty), by which finished beams are ranked."""

    tokens: list[int]
    logprob: float
    score: float
    ended: bool
    """Its last token ends the text; otherwise there was no room for more."""


@dataclass(slots=True, eq=False)
class Beams:
    """A sequence group outside the acceptance rules.

    ``root`` is the request as the scheduler knows it: it reads the prompt, and gives its place to ``members``, the live
    beams, best first, with their log-probabilities ``logs``.
    """

    root: RequestState
    width: int
    length_penalty: float
    early_stopping: bool | str
    """As in transformers: True, False or ``never``."""
    ends: frozenset[int]
    """Tokens that finish a beam."""
    new_id: Callable[[], int]
    members: list[RequestState] = field(default_factory=list)
    logs: list[float] = field(default_factory=list)
    finished: list[Hypothesis] = field(default_factory=list)
    """The best ``width`` that have ended, best first."""
    done: bool = False
    error: str | None = None
    steps: int = 0
    """Plain beam steps that the last round took."""
    dropped: list[RequestState] = field(default_factory=list)
    """Members that the last round ended, whose pages and states are still to be given up."""

    @property
    def candidates(self) -> int:
        """Continuations that a step looks at, enough for ``width`` that go on: transformers' number."""
        return self.width * max(2, 1 + len(self.ends))

    @property
    def longest(self) -> int:
        """Most output tokens of a beam."""
        return self.root.max_tokens - self.root.num_prompt

    def restart(self) -> None:
        """Forget all but the prompt: nothing is random, so that the same beams come again."""
        self.members, self.logs, self.finished, self.dropped, self.steps = [], [], [], [], 0

"""One request's tokens, as every layer of the engine sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from forerun.core.tree import Draft


class Constraint(Protocol):
    """A grammar's view of one sequence. It looks at the sequence's committed tokens by itself."""

    def allowed(self, sequence: RequestState, path: Sequence[int]) -> torch.Tensor | None:
        """The tokens that may follow the drafted ``path``, as bits [ceil(vocabulary / 32)] int32, the lowest bit being
        the lowest id. None: the path itself is not permitted, and nothing follows it."""

    def fault(self, sequence: RequestState, path: Sequence[int]) -> str | None:
        """Why the grammar permits no token after ``path``; None: it permits some."""

    def forced(self, sequence: RequestState, count: int) -> list[int]:
        """Up to ``count`` next tokens to which the grammar permits no alternative."""


@dataclass(slots=True, eq=False)
class RequestState:
    """A growing list of committed tokens, and what this round does with it.

    ``tokens`` holds the prompt and every emitted token. The last one is sampled but not yet fed to the target. So
    between rounds ``num_computed_tokens == len(tokens) - 1``, and 0 for a fresh or preempted sequence.
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
    num_computed_tokens: int = 0
    """How many committed tokens have their KV in the target's cache."""
    drafter: str | None = None
    """Which of the engine's drafters proposes for this request; None: plain decoding."""
    max_draft: int | None = None
    """The request's own limit on drafted tokens per round (None: the engine's)."""
    reads: int | None = None
    """How many of its last tokens a drafter reads before it drafts (None: all)."""
    depths: Mapping[str, int] | None = None
    """How far each part of its drafter may draft in this round, by method (None: as far as the round's budget)."""
    worth: Callable[[Draft], int] | None = None
    """How many tokens of a looked-up chain are worth their rows (None: all)."""
    whole_drafts: bool = False
    """Whether a drafter drafts as far as it may, however unsure it is: so deep drafts are timed."""
    tentative: int = 0
    """How many of the last tokens may still be taken back: inside a staged draft, a draft model's own output."""
    draft_budget: int | None = None
    """Most draft nodes for which this round has rows and pages (None: not limited)."""
    priority: int = 0
    """Lower values are served first."""
    rank: tuple[float, int] = (0.0, 0)
    """The scheduler's order: the round of arrival, moved by the priority, then the id."""
    source: tuple[int, ...] | None = None
    """What an encoder-decoder's encoder reads; ``tokens`` are then the decoder's. Answers to one prompt share it."""
    lookup: tuple[int, ...] = ()
    """Another text of which the answer may have parts, for drafters that look up in the request's text."""
    constraint: Constraint | None = field(default=None, repr=False)
    """Which tokens its grammar permits; None: all."""
    group: Beams | None = field(default=None, repr=False)
    """The beam search that it is the root or a member of."""

    @property
    def decodes(self) -> bool:
        """Whether the next forward reaches the last committed token, so that a new one can be sampled."""
        return self.scheduled > 0 and self.num_computed_tokens + self.scheduled == len(self.tokens)

    @property
    def prompt(self) -> list[int]:
        """The tokens that the request gave: those of the encoder, if there is one."""
        return self.tokens[: self.num_prompt] if self.source is None else list(self.source)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_tokens - len(self.tokens)

    @property
    def sequences(self) -> list[RequestState]:
        """The sequences that decode for this request: itself, or its beams once there are any."""
        return [self] if self.group is None else self.group.members or [self]

    @property
    def max_sequences(self) -> int:
        """How many sequences it may become."""
        return 1 if self.group is None else self.group.width


class Hypothesis(NamedTuple):
    """A finished beam."""

    tokens: list[int]
    """Its output."""
    logprob: float
    """The sum of its tokens' log-probabilities."""
    score: float
    """``logprob`` / tokens ** length penalty, by which finished beams are ranked."""
    ended: bool
    """Its last token ends the text; otherwise the length limit ended it."""


@dataclass(slots=True, eq=False)
class Beams:
    """The sequences of one beam search.

    ``root`` is the request as the scheduler knows it. It reads the prompt, and is then replaced by ``members``, the
    live beams, best first, whose log-probabilities are ``logprobs``.
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
    logprobs: list[float] = field(default_factory=list)
    finished: list[Hypothesis] = field(default_factory=list)
    """The best ``width`` that have ended, best first."""
    done: bool = False
    error: str | None = None
    steps: int = 0
    """Plain beam steps that the last round took."""
    dropped: list[RequestState] = field(default_factory=list)
    """Members that ended in the last round, to be freed."""

    @property
    def candidates(self) -> int:
        """Continuations that a step looks at, enough for ``width`` that go on: transformers' number."""
        return self.width * max(2, 1 + len(self.ends))

    @property
    def longest(self) -> int:
        """Most output tokens of a beam."""
        return self.root.max_tokens - self.root.num_prompt

    def restart(self) -> None:
        """Forgets all but the prompt, from which the same beams come again: nothing is random."""
        self.members, self.logprobs, self.finished, self.dropped, self.steps = [], [], [], [], 0


Requests = Sequence[RequestState]
"""The sequences of a round."""

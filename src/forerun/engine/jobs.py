"""What the engine keeps of each answer in flight, and what a step adds to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.core.beams import Hypothesis
from forerun.core.request import RequestState
from forerun.engine.logprobs import TokenLogprobs
from forerun.engine.metrics import RequestMetrics
from forerun.engine.stop import Finish, Stopper
from forerun.engine.trace import TraceRound
from forerun.models.tokenizer import Detokenizer


@dataclass(eq=False)
class Job:
    """One sequence in flight, and everything about it that is not tokens."""

    sequence: RequestState
    stopper: Stopper
    detokenizer: Detokenizer | None
    metrics: RequestMetrics
    index: int = 0
    finish: Finish | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    traced: bool = False
    trace: list[TraceRound] = field(default_factory=list)
    beam: Hypothesis | None = None
    """Of a beam search: what it found for this answer."""
    peers: list[Job] = field(default_factory=list)
    """Of a beam search: its answers, which end together; the first one's sequence is the group's root."""

    @property
    def output_ids(self) -> list[int]:
        return self.sequence.tokens[self.sequence.num_prompt :]

    @property
    def text(self) -> str:
        """The answer so far; a stop string is cut off."""
        if self.detokenizer is None:
            return ""
        if self.finish is None:
            return self.detokenizer.text
        self.detokenizer.finish()
        return self.detokenizer.text[: self.finish.cut]


@dataclass(slots=True)
class Update:
    """What a step gave one sequence."""

    job: Job
    tokens: list[int]
    accepted: int
    finish: Finish | None

"""What goes between the server in front and the replicas: token ids, never text."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.engine.answering import EngineFacts
from forerun.engine.jobs import TokenLogprobs
from forerun.engine.metrics import RequestMetrics
from forerun.engine.stream import Delta
from forerun.sampling.params import Params


@dataclass(frozen=True, kw_only=True)
class Facts(EngineFacts):
    """What a replica is. Replicas with the same ``weights`` give the same tokens."""

    checkpoint: str
    """The version of Forerun and a fingerprint of the checkpoint: what ``weights`` begin with."""
    weights: str
    """The same, and a fingerprint of what else decides about tokens."""
    tokenizer: str


@dataclass(frozen=True)
class Request:
    """One answer to one prompt, from behind ``committed`` on, or a beam search, whose answers end together."""

    prompt: Sequence[int]
    params: Params
    choices: Mapping[str, Any] = field(default_factory=dict)
    committed: tuple[int, ...] = ()
    session: str | None = None
    weights: str = ""
    """What the answering replica's name of its weights begins with: the checkpoint's, and all of it once there is
    something to go on with."""
    misfits: int = 0
    """Replicas that have refused it for their weights."""


@dataclass(frozen=True)
class Begun:
    """The replica has taken the request."""

    weights: str


@dataclass(frozen=True)
class News:
    """Deltas, without text. The last ones come with metrics, the first ones with the prompt's probabilities if those
    were asked for."""

    deltas: list[Delta]
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(frozen=True)
class Refused:
    """The request cannot be run, or has failed for a reason of its own."""

    error: Exception


Message = Begun | News | Refused


LINGER = 1.0
"""Seconds without any answer after which a front need not listen any more: it asks again when there is one."""

KEPT = 60.0
"""Seconds after which what no front takes any more is let go of."""

Entry = tuple[int, Message | None]
"""Which answer, by the front's number, and what it says; None: nothing more."""


@dataclass(frozen=True)
class Line:
    """A front listens to a replica, both by their names."""

    replica: str
    front: str


class Outbox:
    """What a replica's answers to one front have said, and it has not been given yet."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._answers = 0
        self.listeners = 0
        self._changed = asyncio.Event()

    @property
    def used(self) -> bool:
        """Whether there are answers, or a front that listens."""
        return bool(self._answers or self.listeners)

    def begin(self) -> None:
        """There is an answer more."""
        self._answers += 1
        self._changed.set()

    def put(self, number: int, message: Message | None) -> None:
        self._entries.append((number, message))
        self._changed.set()

    def end(self) -> None:
        """There is an answer less."""
        self._answers -= 1
        self._changed.set()

    async def taken(self) -> list[Entry]:
        """All that was said since the last time; nothing once there has been no answer for ``LINGER`` seconds."""
        while not self._entries:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), None if self._answers else LINGER)
            except TimeoutError:
                if not self._answers:
                    break
        entries, self._entries = self._entries, []
        return entries

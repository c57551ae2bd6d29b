"""What all answers of a replica say to one front, together: a message of Ray's costs as much as a round of a small
model, so there is one for what has gathered, not one for each answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from forerun.scale.messages import Message

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

"""What a request's reader holds: its stream of deltas, and the text they make."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forerun.engine.jobs import Job, TokenLogprobs
from forerun.engine.metrics import RoundTrace
from forerun.engine.stop import Finish, held_back
from forerun.models.tokenizer import Detokenizer

if TYPE_CHECKING:
    from forerun.engine.answering import Answering


@dataclass(slots=True)
class Delta:
    """What one round added to one of a request's n answers.

    ``text`` leaves out the end of the answer while it could still become a stop string. ``seconds`` is when the
    round ended, on the engine's clock.
    """

    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    round: RoundTrace | None
    finish: Finish | None
    seconds: float
    text: str = ""
    texts: list[str] = field(default_factory=list)
    """Of each token, where there are log-probabilities or a ``round``; the last may be none of the answer's."""


class ShownText:
    """One answer's text as its reader gets to see it."""

    def __init__(self, job: Job, tokenizer: Any) -> None:
        self.params = job.sequence.params
        self.detokenizer = Detokenizer.of(tokenizer, job.sequence)
        self.shown = 0

    def after(self, tokens: Sequence[int], finish: Finish | None) -> str:
        """What can be shown once ``tokens`` have come."""
        self.detokenizer.add(tokens if finish is None else finish.spoken(tokens))
        if finish is not None:
            self.detokenizer.finish()
        text = self.detokenizer.text
        end = len(text)
        if finish is None:
            end -= held_back(text, self.params)
        elif finish.cut is not None:
            end = finish.cut
        start, self.shown = self.shown, max(self.shown, end)
        return text[start:end]

    def read(self, delta: Delta) -> None:
        """Give ``delta`` its text, and those of its tokens where it says more of them."""
        tokens, finish = delta.token_ids, delta.finish
        if not delta.logprobs and delta.round is None:
            delta.text = self.after(tokens, finish)
            return
        spoken = tokens if finish is None else finish.spoken(tokens)
        delta.texts = self.detokenizer.spell(spoken, last=finish is not None)
        rest = self.detokenizer.finish() if finish is not None else ""  # of a character begun before
        delta.text = self.after((), finish)
        delta.texts += [rest + text for text in self.detokenizer.spell(tokens[len(spoken) :], last=True)]


class Stream:
    """One request: iterate over its deltas, in the event loop that submitted it. ``abort`` ends it at once."""

    def __init__(self, owner: Answering, loop: asyncio.AbstractEventLoop, unfinished: int) -> None:
        self.jobs: list[Job] = []
        self.arrival = owner.clock()
        self.error: Exception | None = None
        self.loop = loop
        self.begun: asyncio.Future[None] = loop.create_future()
        """Done once the engine has taken the request, or it has ended before that."""
        self._owner = owner
        self._deltas: deque[Delta] = deque()
        self._reader: asyncio.Future[None] | None = None
        """What the reader waits for, if it waits."""
        self.unfinished = unfinished
        """Answers whose end the reader has not been given."""
        self.texts: list[ShownText] = []
        # One writer each, so that two threads can read the difference without a lock.
        self.produced = 0
        self._consumed = 0
        self.paused = False
        """The reader should ask for the request to go on, once it has caught up."""
        self.aside = False
        """The request is off the engine; the engine thread's own flag."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def backlog(self) -> int:
        """Deltas made but not read yet."""
        return self.produced - self._consumed

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.jobs[0].sequence.prompt)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if not await self._some():
            raise StopAsyncIteration
        return self._taken([self._deltas.popleft()])[0]

    async def read(self) -> list[Delta]:
        """All that came since the last time, at least one delta; none at the end. One reader at a time. Rounds that
        have nothing but tokens to tell are joined: text is cheaper in one piece."""
        await self._some()
        deltas = list(self._deltas)
        self._deltas.clear()
        return self._taken(deltas)

    async def _some(self) -> bool:
        """Wait for a delta; False: there will be none. Raises what ended the request."""
        while not self._deltas:
            if self.error is not None:
                raise self.error
            if not self.unfinished:
                return False
            self._reader = self.loop.create_future()
            await self._reader
        return True

    def _taken(self, deltas: Sequence[Delta]) -> list[Delta]:
        """The deltas with their text, joined where they can be."""
        joined: list[Delta] = []
        latest: dict[int, Delta] = {}
        """By answer: what its next tokens may join."""
        for delta in deltas:
            plain = delta.finish is None and delta.round is None and not delta.logprobs
            before = latest.pop(delta.index, None)
            if plain and before is not None:
                before.token_ids += delta.token_ids
                before.seconds = delta.seconds
                latest[delta.index] = before
                continue
            joined.append(delta)
            if plain:
                delta.token_ids = list(delta.token_ids)  # the engine's own list must not grow
                latest[delta.index] = delta
        for delta in joined if self.texts else ():
            self.texts[delta.index].read(delta)
        self._consumed += len(deltas)
        if self.paused and self.backlog <= self._owner.max_backlog // 2:
            self.paused = False
            self._owner.post(lambda: self._owner.resume(self))
        return joined

    def abort(self) -> None:
        """End the request, if it has not ended; everything it holds is free before the next round."""
        if self._timer is not None:
            self._timer.cancel()
        self._owner.forget(self)

    def deliver(self, deltas: Sequence[Delta]) -> None:
        """Take what is new for the reader."""
        self._deltas.extend(deltas)
        self.unfinished -= sum(delta.finish is not None for delta in deltas)
        if not self.unfinished:
            self.abort()
        self.notify()

    def fail_after(self, seconds: float, error: Exception) -> None:
        """``fail``, unless it has ended by then."""
        self._timer = self.loop.call_later(seconds, self.fail, error)

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        self.error = error
        self.abort()
        self.notify()

    def refuse(self, error: Exception) -> None:
        """The engine does not take it: there are no answers, so that none of them ends."""
        self.unfinished = 0
        self.fail(error)

    def notify(self) -> None:
        """Wake whoever waits."""
        for waiting in (self.begun, self._reader):
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

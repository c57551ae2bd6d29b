"""``AsyncEngine``: one engine thread, any number of asyncio readers in front of it.

The thread owns the engine; everything else talks to it through an inbox that it empties between rounds. What a round
emits goes to each request's own stream, as tokens: readers make text of them. A reader that falls behind has its
request taken off the engine until it has caught up, so neither memory nor other requests pay for it.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from forerun.core.errors import RankError
from forerun.engine.answering import Answering, ClosedError, EngineFacts
from forerun.engine.engine import Engine
from forerun.engine.jobs import Update
from forerun.engine.metrics import Snapshot
from forerun.engine.stream import Delta, ShownText, Stream
from forerun.sampling.params import Params, StructuredOutputsParams

log = logging.getLogger("forerun")


@dataclass(slots=True)
class _Held:
    """What the engine thread has not handed over yet. Times are on the engine's clock."""

    news: dict[Stream, list[Delta]] = field(default_factory=dict)
    rounds: int = 0
    since: float = 0.0
    """When something was handed over last."""
    latest: float = 0.0
    """When the latest round ended."""
    due: bool = False
    """It is to be handed over as the next forward begins."""


class AsyncEngine(Answering):
    """Asyncio in front of an ``Engine``.

    A request whose reader leaves ``max_backlog`` rounds unread is set aside until half of them are read. Where rounds
    are short, those of up to ``max_delay`` seconds are handed over together, because waking a reader may cost a tenth
    of one; first and last tokens never wait.

    Args:
        engine: what to run; nobody else may use it meanwhile.
        max_queue: sequences that may wait beyond those that can run.
        max_backlog: unread rounds at which a request is set aside.
        max_delay: seconds that a round's tokens may wait for those of the next ones.
    """

    def __init__(
        self, engine: Engine, *, max_queue: int = 1024, max_backlog: int = 64, max_delay: float = 0.01
    ) -> None:
        tokenizer = copy.deepcopy(engine.tokenizer)  # a fast tokenizer must not be used from two threads at once
        super().__init__(EngineFacts.of(engine), tokenizer, max_queue, lambda: engine.config.max_num_seqs)
        self.engine = engine
        self.max_backlog = max_backlog
        self.max_delay = max_delay
        self._lost = False
        """One of the model's processes has ended."""
        self._by_job: dict[int, Stream] = {}
        self._held = _Held()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._ending = False
        # Readers that wake up between two forwards would take the interpreter from the engine thread.
        engine.target.before = self._hand_over_if_due
        self._thread = threading.Thread(target=self._run, name="forerun-engine", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        return not self.draining and not self._lost

    def clock(self) -> float:
        return self.engine.clock()

    def compile(self, requested: StructuredOutputsParams) -> None:
        self.engine.grammars.compile(requested)

    def snapshot(self) -> Snapshot:
        """How the engine stands. Sequences that are set aside for their readers to catch up wait."""
        engine, pool = self.engine, self.engine.target.attention.pool
        paused = sum(len(stream.jobs) for stream in list(self.streams) if stream.paused)
        return Snapshot(
            running=len(engine.scheduler.running),
            waiting=len(engine.scheduler.waiting) + paused,
            pages=pool.num_pages,
            free_pages=pool.num_free + pool.num_idle,
            page_size=pool.page_size,
            caches_prefixes=engine.config.caches_prefixes,
            stats=engine.stats,
            kept_states=0 if pool.states is None else len(pool.states.kept),
        )

    async def _begin(
        self, stream: Stream, prompt: Sequence[int], params: Params, session: str | None, choices: Mapping[str, Any]
    ) -> None:
        """``session`` makes no difference to a single engine."""
        self.post(lambda: self._add(stream, prompt, params, choices))
        await stream.begun

    def close(self) -> None:
        """Abort everything, end the thread, and let drafters write down what they have learnt. Whoever still waits
        for a request gets ClosedError."""
        self.draining = True
        for stream in list(self.streams):
            self.forget(stream)
            _post_to(stream.loop, partial(stream.fail, ClosedError("the engine was closed")))

        def end() -> None:
            self._ending = True

        self.post(end)
        self._thread.join()
        self.engine.target.before = None
        self.engine.close()

    def post(self, command: Callable[[], None]) -> None:
        """Run ``command`` in the engine thread, before its next round."""
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def _drop(self, stream: Stream) -> None:
        self.post(lambda: self._abort(stream))

    # Below: the engine thread.

    @torch.inference_mode()
    def _run(self) -> None:
        while not self._ending:
            if not self.engine.busy:
                self._hand_over()
            with self._wake:
                while not self._inbox and not self.engine.busy:
                    self._wake.wait()
                commands = list(self._inbox)
                self._inbox.clear()
            for command in commands:
                command()
            if self.engine.busy:
                updates = self._step()
                self._hand_over_if_due()  # there may have been no forward
                self._publish(updates)

    def _step(self) -> list[Update]:
        try:
            return self.engine.step()
        except RankError as error:
            self._lost = True
            log.error("%s", error)
            return self.engine.fail(str(error))
        except Exception as error:  # whatever broke a round must not end the server
            log.error("a round failed; its requests end with an error", exc_info=error)
            return self.engine.fail(f"the engine failed in this request's round: {type(error).__name__}: {error}")

    def _add(self, stream: Stream, prompt: Sequence[int], params: Params, choices: Mapping[str, Any]) -> None:
        if stream not in self.streams:  # it ended before its turn, and whoever submitted it knows
            return
        try:
            stream.jobs = self.engine.add(prompt, params, **choices)
        except Exception as error:  # noqa: BLE001 - it belongs to whoever submitted the request
            _post_to(stream.loop, partial(stream.refuse, error))
            return
        for job in stream.jobs:
            self._by_job[job.sequence.id] = stream
            if self.tokenizer is not None:
                stream.texts.append(ShownText(job, self.tokenizer))
        _post_to(stream.loop, stream.notify)

    def _abort(self, stream: Stream) -> None:
        for job in stream.jobs:
            self._by_job.pop(job.sequence.id, None)
            self.engine.abort(job)

    def _publish(self, updates: Sequence[Update]) -> None:
        """Note what a round gave every reader, and whether it should not wait for the next round's."""
        held, now = self._held, self.engine.clock()
        urgent = False
        for update in updates:
            job, tokens = update.job, update.tokens
            stream = self._by_job.get(job.sequence.id)
            if stream is None:
                continue
            logprobs = job.logprobs[-len(tokens) :] if job.logprobs and tokens else []
            trace = job.trace[-1] if job.trace and tokens else None
            delta = Delta(job.index, tokens, logprobs, trace, update.finish, now)
            held.news.setdefault(stream, []).append(delta)
            stream.produced += 1
            urgent = urgent or update.finish is not None or job.sequence.num_output == len(tokens)
            if update.finish is not None:
                del self._by_job[job.sequence.id]
        held.rounds += 1
        ends_next = 2 * now - held.latest
        held.latest = now
        if urgent or ends_next - held.since > self.max_delay or held.rounds >= self.max_backlog // 4:
            held.due, held.since = True, now
            for stream in held.news:
                if stream.backlog >= self.max_backlog and not stream.paused:
                    self._pause(stream)

    def _hand_over_if_due(self) -> None:
        if self._held.due:
            self._hand_over()

    def _hand_over(self) -> None:
        """What is held, to its readers: one wake-up per event loop."""
        news, self._held.news = self._held.news, {}
        self._held.rounds, self._held.due = 0, False
        for loop in {stream.loop for stream in news}:
            batch = [(stream, deltas) for stream, deltas in news.items() if stream.loop is loop]
            _post_to(loop, partial(self._deliver, batch))

    def _deliver(self, batch: list[tuple[Stream, list[Delta]]]) -> None:
        for stream, deltas in batch:
            self.deliver(stream, deltas)

    def _pause(self, stream: Stream) -> None:
        for job in stream.jobs:
            if job.finish is None:
                self.engine.pause(job)
        stream.aside = stream.paused = True
        if stream.backlog <= self.max_backlog // 2:  # the reader caught up before it could see the flag
            stream.paused = False
            self.resume(stream)

    def resume(self, stream: Stream) -> None:
        """Put a request that was set aside back in the queue. Both threads may ask for it at once; it happens once."""
        if not stream.aside:
            return
        stream.aside = False
        for job in stream.jobs:
            if job.finish is None:
                self.engine.resume(job)


def _post_to(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        if not loop.is_closed():
            raise
        log.debug("the event loop of a request has ended; its news are dropped")

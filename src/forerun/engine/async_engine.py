"""``AsyncEngine``: one engine thread, any number of asyncio readers in front of it.

The thread owns the engine. Everything else posts commands to an inbox that the thread empties between rounds. A round's
tokens go to each request's own stream, and readers detokenize them. If a reader falls behind, its request is suspended
until it has caught up, so that neither memory nor other requests pay for it.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from forerun.core.errors import RankError
from forerun.engine.client import ClosedError, Delta, EngineClient, EngineFacts, Stream, StreamedText
from forerun.engine.engine import Engine
from forerun.engine.jobs import Update
from forerun.engine.metrics import Snapshot
from forerun.sampling.params import Params, StructuredOutputsParams

log = logging.getLogger("forerun")


@dataclass(slots=True)
class _Outbox:
    """Deltas that the engine thread has not delivered yet. Times are on the engine's clock."""

    deltas: dict[Stream, list[Delta]] = field(default_factory=dict)
    rounds: int = 0
    sent: float = 0.0
    """When deltas were last due."""
    round_end: float = 0.0
    """When the latest round ended."""
    due: bool = False
    """The deltas are to be delivered as the next forward begins."""


class Turns:
    """A lock whose waiters get it in the order in which they came."""

    def __init__(self) -> None:
        self._next = self._present = 0
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            mine, self._next = self._next, self._next + 1
            self._changed.wait_for(lambda: self._present == mine)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._present += 1
            self._changed.notify_all()


class AsyncEngine(EngineClient):
    """Asyncio in front of an ``Engine``.

    A request whose reader leaves ``max_backlog`` rounds unread is suspended until half of them are read. Short rounds
    are delivered together, up to ``max_delay`` seconds of them, because waking a reader may cost a tenth of a round.
    First and last tokens never wait.

    Args:
        engine: what to run; nobody else may use it while requests of this one run.
        max_queue: sequences that may wait beyond those that can run.
        max_backlog: unread rounds at which a request is suspended.
        max_delay: seconds that a round's tokens may wait for those of the next rounds.
        turns: held during a round, for engines in one process that take turns at its cores.
    """

    def __init__(
        self, engine: Engine, *, max_queue: int = 1024, max_backlog: int = 64, max_delay: float = 0.01,
        turns: AbstractContextManager[Any] | None = None,
    ) -> None:  # fmt: skip
        tokenizer = copy.deepcopy(engine.tokenizer)  # a fast tokenizer must not be used from two threads at once
        super().__init__(EngineFacts.of(engine), tokenizer, max_queue, lambda: engine.config.max_num_seqs)
        self.engine = engine
        self.max_backlog = max_backlog
        self.max_delay = max_delay
        self.turns = turns or nullcontext()
        self._rank_lost = False
        """One of the model's processes has ended."""
        self._by_job: dict[int, Stream] = {}
        self._outbox = _Outbox()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._ending = False
        # Readers that wake up between two forwards would take the GIL from the engine thread.
        engine.target.before = self._deliver_if_due
        engine.scheduler.prefill_budget.bounded = engine.model.invariant  # others may come while a prompt is read
        self._thread = threading.Thread(target=self._run, name="forerun-engine", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        return not self.draining and not self._rank_lost

    def clock(self) -> float:
        return self.engine.clock()

    def compile(self, requested: StructuredOutputsParams) -> None:
        self.engine.grammars.compile(requested)

    def snapshot(self) -> Snapshot:
        """The engine's present state. Paused sequences count as waiting."""
        engine, pool = self.engine, self.engine.target.attention.pool
        paused = sum(len(stream.jobs) for stream in list(self.streams) if stream.paused)
        return Snapshot(
            running=len(engine.scheduler.running),
            waiting=len(engine.scheduler.waiting) + paused,
            pages=pool.num_pages,
            free_pages=pool.num_free + pool.num_evictable,
            page_size=pool.page_size,
            caches_prefixes=engine.config.caches_prefixes,
            stats=engine.stats,
            kept_states=0 if pool.states is None else len(pool.states.kept),
        )

    async def _start(
        self, stream: Stream, prompt: Sequence[int], params: Params, session: str | None, choices: Mapping[str, Any]
    ) -> None:
        """``session`` makes no difference to a single engine."""
        if not self._thread.is_alive():
            raise ClosedError("the engine's thread is not in this process: make the AsyncEngine after the fork")
        self.post(lambda: self._add(stream, prompt, params, choices))
        await stream.admitted

    def close(self) -> None:
        """Aborts everything, ends the thread, and lets drafters save what they have learnt. Whoever still waits for a
        request gets ClosedError."""
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
        """Runs ``command`` in the engine thread, before its next round."""
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def _drop(self, stream: Stream) -> None:
        self.post(lambda: self._abort(stream))

    def caught_up(self, stream: Stream) -> None:
        self.post(lambda: self._resume(stream))

    # Below: what runs in the engine thread.

    @torch.inference_mode()
    def _run(self) -> None:
        while not self._ending:
            if not self._busy:
                self._deliver()
            with self._wake:
                while not self._inbox and not self._busy:
                    self._wake.wait()
                commands = list(self._inbox)
                self._inbox.clear()
            for command in commands:
                command()
            if self._busy:
                updates = self._step()
                self._deliver_if_due()  # there may have been no forward
                self._publish(updates)

    @property
    def _busy(self) -> bool:
        return bool(self._by_job) and self.engine.busy  # another's requests are not this thread's to run

    def _step(self) -> list[Update]:
        try:
            with self.turns:
                return self.engine.step()
        except RankError as error:
            self._rank_lost = True
            log.error("%s", error)
            return self.engine.fail(str(error))
        except Exception as error:  # whatever broke a round must not end the server
            log.error("a round failed; its requests end with an error", exc_info=error)
            return self.engine.fail(f"the engine failed in this request's round: {type(error).__name__}: {error}")

    def _add(self, stream: Stream, prompt: Sequence[int], params: Params, choices: Mapping[str, Any]) -> None:
        if stream not in self.streams:  # it ended meanwhile, and whoever submitted it knows
            return
        try:
            stream.jobs = self.engine.add(prompt, params, **choices)
        except Exception as error:  # noqa: BLE001 - it belongs to whoever submitted the request
            _post_to(stream.loop, partial(stream.refuse, error))
            return
        for job in stream.jobs:
            self._by_job[job.sequence.id] = stream
            if self.tokenizer is not None:
                stream.texts.append(StreamedText(job, self.tokenizer))
        _post_to(stream.loop, stream.wake)

    def _abort(self, stream: Stream) -> None:
        for job in stream.jobs:
            self._by_job.pop(job.sequence.id, None)
            self.engine.abort(job)

    def _publish(self, updates: Sequence[Update]) -> None:
        """Puts a round's tokens into the outbox, and decides whether they may wait for the next round's."""
        outbox, now = self._outbox, self.engine.clock()
        urgent = False
        for update in updates:
            job, tokens = update.job, update.tokens
            stream = self._by_job.get(job.sequence.id)
            if stream is None:
                continue
            logprobs = job.logprobs[-len(tokens) :] if job.logprobs and tokens else []
            trace = job.trace[-1] if job.trace and tokens else None
            delta = Delta(job.index, tokens, logprobs, trace, update.finish, now)
            outbox.deltas.setdefault(stream, []).append(delta)
            stream.produced += 1
            urgent = urgent or update.finish is not None or job.sequence.num_output == len(tokens)
            if update.finish is not None:
                del self._by_job[job.sequence.id]
        outbox.rounds += 1
        next_round_end = 2 * now - outbox.round_end
        outbox.round_end = now
        if urgent or next_round_end - outbox.sent > self.max_delay or outbox.rounds >= self.max_backlog // 4:
            outbox.due, outbox.sent = True, now
            for stream in outbox.deltas:
                if stream.backlog >= self.max_backlog and not stream.paused:
                    self._suspend(stream)

    def _deliver_if_due(self) -> None:
        if self._outbox.due:
            self._deliver()

    def _deliver(self) -> None:
        """Empties the outbox into the readers' event loops, with one wake-up for each loop."""
        deltas, self._outbox.deltas = self._outbox.deltas, {}
        self._outbox.rounds, self._outbox.due = 0, False
        for loop in {stream.loop for stream in deltas}:
            _post_to(loop, partial(self._deliver_batch, [item for item in deltas.items() if item[0].loop is loop]))

    def _deliver_batch(self, batch: Sequence[tuple[Stream, list[Delta]]]) -> None:
        for stream, deltas in batch:
            self.deliver(stream, deltas)

    def _suspend(self, stream: Stream) -> None:
        for job in stream.jobs:
            if job.finish is None:
                self.engine.pause(job)
        stream.suspended = stream.paused = True
        if stream.backlog <= self.max_backlog // 2:  # the reader caught up before it could see the flag
            stream.paused = False
            self._resume(stream)

    def _resume(self, stream: Stream) -> None:
        """Queues a suspended request again. Both threads may ask for it at once; it happens once."""
        if not stream.suspended:
            return
        stream.suspended = False
        for job in stream.jobs:
            if job.finish is None:
                self.engine.resume(job)


def _post_to(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        if not loop.is_closed():
            raise
        log.debug("the event loop of a request has ended; its deltas are dropped")

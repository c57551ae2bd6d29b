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
from collections.abc import AsyncIterator, Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch

from forerun.core.errors import RankError, RequestError
from forerun.engine.engine import Engine
from forerun.engine.jobs import Update
from forerun.engine.metrics import Snapshot
from forerun.engine.stream import Delta, ShownText, Stream
from forerun.sampling.params import BeamSearchParams, SamplingParams, StructuredOutputsParams

log = logging.getLogger("forerun")


class QueueFullError(RequestError):
    """More sequences would wait than the queue holds; try again later."""


class TimeLimitError(RequestError):
    """The request took longer than it was given."""


class ClosedError(RequestError):
    """The engine is draining or has ended: it takes no new requests."""


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


class AsyncEngine:
    """Asyncio in front of an ``Engine``.

    ``max_queue`` bounds the sequences that wait beyond those that can run (QueueFullError above it; a request for n
    answers is n of them). An idle engine takes any one request. A request whose reader leaves ``max_backlog`` rounds
    unread is set aside until half of them are read. Where rounds are short, those of up to ``max_delay`` seconds are
    handed over together, because waking a reader may cost a tenth of one; first and last tokens never wait.
    ``on_deltas`` and ``on_forget`` may be set to see every request's deltas and its end, in its reader's event loop.
    """

    def __init__(
        self, engine: Engine, *, max_queue: int = 1024, max_backlog: int = 64, max_delay: float = 0.01
    ) -> None:
        self.engine = engine
        self.tokenizer = copy.deepcopy(engine.tokenizer)
        """For readers: a fast tokenizer must not be used from two threads at once."""
        self.max_queue = max_queue
        self.max_backlog = max_backlog
        self.max_delay = max_delay
        self.on_deltas: Callable[[Stream, Sequence[Delta]], None] | None = None
        self.on_forget: Callable[[Stream], None] | None = None
        self.streams: set[Stream] = set()
        self.draining = False
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
        """Whether requests are taken."""
        return not self.draining and not self._lost

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    @property
    def drafters(self) -> dict[str, int]:
        """The loaded drafters' names, the first being the default, and how many tokens each drafts at most."""
        return {name: drafter.config.num_speculative_tokens for name, drafter in self.engine.router.drafters.items()}

    @property
    def identity(self) -> bool:
        """Whether the same seed gives the same tokens as plain decoding."""
        return self.engine.identity

    @property
    def reasoning_parser(self) -> str | None:
        return self.engine.config.reasoning_parser

    def clock(self) -> float:
        return self.engine.clock()

    def check_length(self, prompt: Sequence[int]) -> None:
        """Raise ContextLengthError if ``prompt`` leaves no room for an answer."""
        self.engine.check_length(prompt)

    def prompt_tokens_computed(self, prompt: Sequence[int]) -> int:
        """How many of the ``max_model_len`` tokens a prompt takes: a source takes none."""
        return len(self.engine.model.info.begin(prompt)[0])

    def compile(self, requested: StructuredOutputsParams) -> None:
        """Make what ``submit`` needs for structured output, which may take a second; in any thread."""
        self.engine.grammars.compile(requested)

    def snapshot(self) -> Snapshot:
        """How the engine stands. Sequences that are set aside for their readers to catch up wait."""
        engine, pool = self.engine, self.engine.target.attention.pool
        paused = sum(len(stream.jobs) for stream in list(self.streams) if stream._paused)
        return Snapshot(
            running=len(engine.scheduler.running),
            waiting=len(engine.scheduler.waiting) + paused,
            pages=pool.num_pages,
            free_pages=pool.num_free + pool.num_idle,
            page_size=pool.page_size,
            caches_prefixes=engine.config.caches_prefixes,
            stats=engine.stats,
        )

    async def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams | BeamSearchParams,
        *,
        timeout: float | None = None,
        session: str | None = None,
        **choices: Any,
    ) -> Stream:
        """Queue a request; ``choices`` are ``Engine.add``'s keywords. After ``timeout`` seconds it fails with
        TimeLimitError. ``session`` makes no difference to a single engine. Raises RequestError if it cannot be run,
        QueueFullError if too many wait and ClosedError while draining."""
        if self.draining:
            raise ClosedError("the server is shutting down and takes no new requests")
        ahead = sum(stream._unfinished for stream in list(self.streams))
        slots = self.engine.config.max_num_seqs
        if ahead and ahead + params.n > slots + self.max_queue:
            raise QueueFullError(
                f"{max(0, ahead - slots)} sequences wait already; at most {self.max_queue} may: try again later"
            )
        loop = asyncio.get_running_loop()
        stream = Stream(self, loop)
        stream._unfinished = params.n
        if timeout is not None:
            late = TimeLimitError(f"the request was not answered within {timeout:g} seconds")
            stream._timer = loop.call_later(timeout, stream._fail, late)
        self.streams.add(stream)
        self.post(lambda: self._add(stream, prompt, params, choices))
        try:
            await stream._begun
        except BaseException:
            self.forget(stream)
            raise
        if stream.error is not None:
            raise stream.error
        return stream

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams | BeamSearchParams, **choices: Any
    ) -> AsyncIterator[Delta]:
        """``submit`` and read; leaving the loop early, by ``aclose`` or cancellation, aborts the request."""
        stream = await self.submit(prompt, params, **choices)
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.abort()

    async def drain(self, seconds: float) -> None:
        """Take no new requests and wait for the present ones; those unfinished after ``seconds`` fail with
        ClosedError."""
        self.draining = True
        await drained(self.streams, seconds)

    def close(self) -> None:
        """Abort everything, end the thread, and let drafters write down what they have learnt. Whoever still waits
        for a request gets ClosedError."""
        self.draining = True
        for stream in list(self.streams):
            self.forget(stream)
            _post_to(stream._loop, partial(stream._fail, ClosedError("the engine was closed")))

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

    def forget(self, stream: Stream) -> None:
        """Stop counting a request; its unfinished jobs are aborted."""
        if stream in self.streams:
            self.streams.discard(stream)
            if stream._timer is not None:
                stream._timer.cancel()
            if self.on_forget is not None:
                self.on_forget(stream)
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

    def _add(
        self, stream: Stream, prompt: Sequence[int], params: SamplingParams | BeamSearchParams, choices: dict[str, Any]
    ) -> None:
        if stream not in self.streams:  # it ended before its turn, and whoever submitted it knows
            return
        try:
            stream.jobs = self.engine.add(prompt, params, **choices)
        except Exception as error:  # noqa: BLE001 - it belongs to whoever submitted the request
            _post_to(stream._loop, partial(stream._refuse, error))
            return
        for job in stream.jobs:
            self._by_job[job.sequence.id] = stream
            if self.tokenizer is not None:
                stream._texts.append(ShownText(job, self.tokenizer))
        _post_to(stream._loop, stream._notify)

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
            stream._produced += 1
            urgent = urgent or update.finish is not None or job.sequence.num_output == len(tokens)
            if update.finish is not None:
                del self._by_job[job.sequence.id]
        held.rounds += 1
        ends_next = 2 * now - held.latest
        held.latest = now
        if urgent or ends_next - held.since > self.max_delay or held.rounds >= self.max_backlog // 4:
            held.due, held.since = True, now
            for stream in held.news:
                if stream.backlog >= self.max_backlog and not stream._paused:
                    self._pause(stream)

    def _hand_over_if_due(self) -> None:
        if self._held.due:
            self._hand_over()

    def _hand_over(self) -> None:
        """What is held, to its readers: one wake-up per event loop."""
        news, self._held.news = self._held.news, {}
        self._held.rounds, self._held.due = 0, False
        for loop in {stream._loop for stream in news}:
            batch = [(stream, deltas) for stream, deltas in news.items() if stream._loop is loop]
            _post_to(loop, partial(self._deliver, batch))

    def _deliver(self, batch: list[tuple[Stream, list[Delta]]]) -> None:
        for stream, deltas in batch:
            if stream not in self.streams:
                continue
            if self.on_deltas is not None:
                self.on_deltas(stream, deltas)
            stream._deliver(deltas)

    def _pause(self, stream: Stream) -> None:
        for job in stream.jobs:
            if job.finish is None:
                self.engine.pause(job)
        stream._aside = stream._paused = True
        if stream.backlog <= self.max_backlog // 2:  # the reader caught up before it could see the flag
            stream._paused = False
            self.resume(stream)

    def resume(self, stream: Stream) -> None:
        """Put a request that was set aside back in the queue. Both threads may ask for it at once; it happens once."""
        if not stream._aside:
            return
        stream._aside = False
        for job in stream.jobs:
            if job.finish is None:
                self.engine.resume(job)


async def drained(streams: Set[Stream], seconds: float) -> None:
    """Wait until ``streams`` have ended; those left after ``seconds`` fail with ClosedError."""
    ends = perf_counter() + seconds
    while streams and perf_counter() < ends:
        await asyncio.sleep(0.02)
    for stream in list(streams):
        stream._fail(ClosedError(f"the server shut down before this request ended (it had {seconds:g} s)"))


def _post_to(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        if not loop.is_closed():
            raise
        log.debug("the event loop of a request has ended; its news are dropped")

"""Asyncio in front of engines: requests in, a stream of deltas out for each.

``EngineClient`` is what the server talks to. Its subclasses are ``AsyncEngine`` (an engine in this process) and
``scale.pool.ReplicaPool`` (replicas elsewhere).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from forerun.core.errors import RequestError
from forerun.engine.admission import check_length
from forerun.engine.engine import Engine
from forerun.engine.jobs import Job, TokenLogprobs
from forerun.engine.memory import megabytes
from forerun.engine.metrics import RoundTrace, Snapshot
from forerun.engine.stop import Finish, held_back
from forerun.models.text.tokenizer import Detokenizer
from forerun.sampling.params import Params, StructuredOutputsParams

SHUTTING_DOWN = "the server is shutting down and accepts no new requests"


class QueueFullError(RequestError):
    """More sequences would wait than the queue holds; try again later."""


class TimeLimitError(RequestError):
    """The request took longer than it was given."""


class ClosedError(RequestError):
    """The engine is draining or has ended: it takes no new requests."""


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What a client needs to know of the engine that answers."""

    model: str
    described: str
    """Memory and drafters, for whoever starts it."""
    max_model_len: int
    longest_source: int | None
    """Tokens that an encoder reads; None for a decoder."""
    start: tuple[int, ...]
    """The tokens that an encoder-decoder's decoder begins with."""
    max_num_seqs: int
    vocab_size: int
    eos_ids: frozenset[int]
    drafters: Mapping[str, int]
    """Names of the loaded drafters, the default first, and the most tokens that each drafts in a round."""
    identity: bool
    """Whether the same seed gives the same tokens as plain decoding."""
    max_grammar_bytes: int
    grammar_bytes: int
    reasoning_parser: str | None
    architecture: str
    weight_bytes: int
    memory_bytes: int
    """Of all weights and caches."""
    quantization: str
    """The form of the weights in memory."""
    device: str
    sampling: Mapping[str, Any]
    """The model's own settings, for requests that leave them open."""

    @classmethod
    def of(cls, engine: Engine) -> EngineFacts:
        config, info = engine.config, engine.model.info
        tokens = engine.pools[0].num_tokens
        weights = sum(model.info.weight_bytes for model in (engine.model, *engine.router.models()))
        methods = ", ".join(engine.router.drafters) or "none"
        form = info.path.partition(", ")[2].removeprefix("streamed ") or str(info.dtype).removeprefix("torch.")
        if info.sampling:
            methods += f"; the model's own sampling settings: {info.sampling_line}"
        return cls(
            model=info.name,
            described=f"{megabytes(weights)} of weights, {tokens} tokens of KV cache, drafters: {methods}",
            max_model_len=engine.max_model_len,
            longest_source=engine.validator.longest_source,
            start=tuple(info.begin(())[0]),
            max_num_seqs=config.max_num_seqs,
            vocab_size=info.vocab_size,
            eos_ids=frozenset(info.eos_ids),
            drafters={name: each.config.num_speculative_tokens for name, each in engine.router.drafters.items()},
            identity=engine.identity,
            max_grammar_bytes=config.max_grammar_bytes,
            grammar_bytes=config.grammar_bytes,
            reasoning_parser=config.reasoning_parser,
            architecture=info.architecture,
            weight_bytes=info.weight_bytes,
            memory_bytes=weights + sum(pool.nbytes for pool in engine.pools),
            quantization=info.quantization or form,
            device=info.device.type,
            sampling=dict(info.sampling),
        )


@dataclass(slots=True)
class Delta:
    """What one round added to one of a request's n answers.

    ``text`` leaves out an end that could become a stop string. ``seconds`` is the round's end on the engine's clock.
    """

    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    round: RoundTrace | None
    finish: Finish | None
    seconds: float
    text: str = ""
    texts: list[str] = field(default_factory=list)
    """Each token's text, where there are log-probabilities or a ``round``. The last may not be part of the answer."""


class StreamedText:
    """Turns one answer's tokens into the text that its reader may see.

    Its detokenizer is the reader's thread's. The engine's thread has another, which decodes only for stop strings.
    """

    def __init__(self, job: Job, tokenizer: Any) -> None:
        self.params = job.sequence.params
        self.detokenizer = Detokenizer.of(tokenizer, job.sequence)
        self.shown = 0
        """Characters that the reader has."""

    def push(self, tokens: Sequence[int], finish: Finish | None) -> str:
        """Appends ``tokens`` and returns the text that can be shown now."""
        self.detokenizer.add(tokens if finish is None else finish.text_tokens(tokens))
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

    def fill(self, delta: Delta) -> None:
        """Sets the text of ``delta``, and the texts of its tokens where it has log-probabilities or a round."""
        tokens, finish = delta.token_ids, delta.finish
        if not delta.logprobs and delta.round is None:
            delta.text = self.push(tokens, finish)
            return
        visible = tokens if finish is None else finish.text_tokens(tokens)
        delta.texts = self.detokenizer.spell(visible, last=finish is not None)
        tail = self.detokenizer.finish() if finish is not None else ""  # an incomplete character of earlier tokens
        delta.text = self.push((), finish)
        delta.texts += [tail + text for text in self.detokenizer.spell(tokens[len(visible) :], last=True)]


class Stream:
    """One request's deltas: an async iterator, for the event loop that submitted it. ``abort`` ends it at once."""

    def __init__(self, client: EngineClient, loop: asyncio.AbstractEventLoop, unfinished: int) -> None:
        self.jobs: list[Job] = []
        self.arrival = client.clock()
        self.error: Exception | None = None
        self.loop = loop
        self.admitted: asyncio.Future[None] = loop.create_future()
        """Done once the engine has taken the request, or the request has ended before that."""
        self._client = client
        self._deltas: deque[Delta] = deque()
        self._waiter: asyncio.Future[None] | None = None
        """What the reader waits for."""
        self.unfinished = unfinished
        """Answers whose end has not been delivered."""
        self.texts: list[StreamedText] = []
        # Each has one writer, so that two threads can read the difference without a lock.
        self.produced = 0
        self._consumed = 0
        self.paused = False
        """The request waits for its reader, who must resume it once it has caught up."""
        self.suspended = False
        """The request is off the engine. Only the engine thread uses this flag."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def backlog(self) -> int:
        """Deltas produced but not read yet."""
        return self.produced - self._consumed

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if not await self._wait():
            raise StopAsyncIteration
        return self._consume([self._deltas.popleft()])[0]

    async def read(self) -> list[Delta]:
        """All deltas since the last call, at least one; none at the end. Only one reader may wait at a time.

        Deltas that have nothing but tokens are joined, because text is cheaper in one piece.
        """
        await self._wait()
        deltas = list(self._deltas)
        self._deltas.clear()
        return self._consume(deltas)

    async def _wait(self) -> bool:
        """Waits for a delta; False if there will be none. Raises the error that ended the request."""
        while not self._deltas:
            if self.error is not None:
                raise self.error
            if not self.unfinished:
                return False
            self._waiter = self.loop.create_future()
            await self._waiter
        return True

    def _consume(self, deltas: Sequence[Delta]) -> list[Delta]:
        """The deltas with their text, joined where possible."""
        joined: list[Delta] = []
        open_deltas: dict[int, Delta] = {}
        """By answer: the delta that its next tokens may join."""
        for delta in deltas:
            previous = open_deltas.pop(delta.index, None)
            if delta.finish is not None or delta.round is not None or delta.logprobs:  # it has more than tokens
                joined.append(delta)
            elif previous is None:
                delta.token_ids = list(delta.token_ids)  # the engine's own list must not grow
                joined.append(delta)
                open_deltas[delta.index] = delta
            else:
                previous.token_ids += delta.token_ids
                previous.seconds = delta.seconds
                open_deltas[delta.index] = previous
        for delta in joined if self.texts else ():
            self.texts[delta.index].fill(delta)
        self._consumed += len(deltas)
        if self.paused and self.backlog <= self._client.max_backlog // 2:
            self.paused = False
            self._client.caught_up(self)
        return joined

    def abort(self) -> None:
        """Ends the request if it has not ended. Everything that it holds is free before the next round."""
        if self._timer is not None:
            self._timer.cancel()
        self._client.forget(self)

    def deliver(self, deltas: Sequence[Delta]) -> None:
        """Hands new deltas to the reader."""
        self._deltas.extend(deltas)
        self.unfinished -= sum(delta.finish is not None for delta in deltas)
        if not self.unfinished:
            self.abort()
        self.wake()

    def fail_after(self, seconds: float, error: Exception) -> None:
        """Calls ``fail`` unless the request has ended by then."""
        self._timer = self.loop.call_later(seconds, self.fail, error)

    def fail(self, error: Exception) -> None:
        """Ends the request with an error."""
        self.error = error
        self.abort()
        self.wake()

    def refuse(self, error: Exception) -> None:
        """Ends a request that the engine does not take: it has no answers that could end."""
        self.unfinished = 0
        self.fail(error)

    def wake(self) -> None:
        """Wakes whoever waits for admission or for deltas."""
        for future in (self.admitted, self._waiter):
            if future is not None and not future.done():
                future.set_result(None)


class EngineClient(ABC):
    """Takes requests for asyncio readers; what the server answers from.

    ``max_queue`` bounds the sequences that wait beyond those that can run (QueueFullError above it; a request for n
    answers is n of them). Where nothing runs, any one request is taken. ``on_deltas`` and ``on_forget`` may be set to
    see every request's deltas and its end, in its reader's event loop.
    """

    max_backlog = 64

    def __init__(self, facts: EngineFacts, tokenizer: Any, max_queue: int, capacity: Callable[[], int]) -> None:
        self.facts = facts
        self.tokenizer = tokenizer
        self.max_queue = max_queue
        self.capacity = capacity
        """How many sequences run at a time."""
        self.on_deltas: Callable[[Stream, Sequence[Delta]], None] | None = None
        self.on_forget: Callable[[Stream], None] | None = None
        self.streams: set[Stream] = set()
        self.draining = False

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether requests are taken."""

    @abstractmethod
    def compile(self, requested: StructuredOutputsParams) -> None:
        """Compiles a structured output's grammar ahead of ``submit``. May take a second; callable in any thread."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """The engine's present state. Raises ClosedError where it is not known."""

    @abstractmethod
    def close(self) -> None:
        """Ends everything; whoever still waits for a request gets ClosedError."""

    @abstractmethod
    async def _start(
        self, stream: Stream, prompt: Sequence[int], params: Params, session: str | None, choices: Mapping[str, Any]
    ) -> None:
        """Starts a request; returns when it is admitted, or has ended before that."""

    @abstractmethod
    def _drop(self, stream: Stream) -> None:
        """Aborts what is unfinished of a stream that nobody reads any more."""

    def caught_up(self, stream: Stream) -> None:
        """Called when the reader of a paused stream has caught up."""

    def check_length(self, prompt: Sequence[int]) -> None:
        """Raises ContextLengthError if ``prompt`` leaves no room for an answer, or is more than an encoder reads."""
        check_length(prompt, self.facts.max_model_len, self.facts.longest_source)

    def clock(self) -> float:
        """Seconds, on the clock of ``Delta.seconds``."""
        return perf_counter()

    async def submit(
        self,
        prompt: Sequence[int],
        params: Params,
        *,
        timeout: float | None = None,
        session: str | None = None,
        **choices: Any,
    ) -> Stream:
        """Queues a request.

        Args:
            prompt: token ids.
            params: how to sample, or how to search.
            timeout: seconds, after which it fails with TimeLimitError; None: no limit.
            session: requests of one session go to the same replica where they can.
            choices: ``Engine.add``'s keywords.

        Returns:
            The stream of its deltas, once the engine has taken it.

        Raises:
            RequestError: it cannot be run.
            QueueFullError: too many wait.
            ClosedError: the engine is draining or has ended.
        """
        if self.draining:
            raise ClosedError(SHUTTING_DOWN)
        ahead, slots = sum(stream.unfinished for stream in list(self.streams)), self.capacity()
        if ahead and ahead + params.n > slots + self.max_queue:
            waiting = max(0, ahead - slots)
            raise QueueFullError(f"the queue is full ({waiting} waiting, limit {self.max_queue}): try again later")
        stream = Stream(self, asyncio.get_running_loop(), params.n)
        if timeout is not None:
            stream.fail_after(timeout, TimeLimitError(f"the request was not answered within {timeout:g} seconds"))
        self.streams.add(stream)
        try:
            await self._start(stream, prompt, params, session, choices)
            if stream.error is not None:
                raise stream.error
        except BaseException:
            stream.abort()
            raise
        return stream

    async def drain(self, seconds: float) -> None:
        """Takes no new requests and waits for the present ones; after ``seconds``, the rest fail with ClosedError."""
        self.draining = True
        ends = perf_counter() + seconds
        while self.streams and perf_counter() < ends:
            await asyncio.sleep(0.02)
        for stream in list(self.streams):
            stream.fail(ClosedError(f"the server shut down before this request ended (it had {seconds:g} s)"))

    def forget(self, stream: Stream) -> None:
        """Stops counting a request and aborts what is unfinished of it."""
        if stream in self.streams:
            self.streams.discard(stream)
            if self.on_forget is not None:
                self.on_forget(stream)
            self._drop(stream)

    def deliver(self, stream: Stream, deltas: Sequence[Delta]) -> None:
        """Hands a reader new deltas, in its event loop; none once it has left."""
        if stream in self.streams:
            if self.on_deltas is not None:
                self.on_deltas(stream, deltas)
            stream.deliver(deltas)

"""What takes requests for asyncio readers: the engine in this process, or replicas of it elsewhere."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from forerun.core.errors import RequestError
from forerun.engine.admission import check_length
from forerun.engine.memory import megabytes
from forerun.engine.metrics import Snapshot
from forerun.engine.stream import Delta, Stream
from forerun.sampling.params import Params, StructuredOutputsParams

if TYPE_CHECKING:
    from forerun.engine.engine import Engine


class QueueFullError(RequestError):
    """More sequences would wait than the queue holds; try again later."""


class TimeLimitError(RequestError):
    """The request took longer than it was given."""


class ClosedError(RequestError):
    """The engine is draining or has ended: it takes no new requests."""


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What an engine takes and gives."""

    model: str
    described: str
    """For whoever starts it."""
    max_model_len: int
    longest_source: int | None
    """Tokens that an encoder reads; None: it is a decoder."""
    start: tuple[int, ...]
    """What an encoder-decoder's decoder goes on behind."""
    max_num_seqs: int
    vocab_size: int
    eos_ids: frozenset[int]
    drafters: Mapping[str, int]
    """The loaded drafters' names, the first being the default, and how many tokens each drafts at most."""
    identity: bool
    """Whether the same seed gives the same tokens as plain decoding."""
    max_grammar_bytes: int
    grammar_bytes: int
    reasoning_parser: str | None

    @classmethod
    def of(cls, engine: Engine) -> EngineFacts:
        config, info = engine.config, engine.model.info
        held = megabytes(sum(model.info.weight_bytes for model in (engine.model, *engine.router.models())))
        methods = ", ".join(engine.router.drafters) or "none"
        return cls(
            model=info.name,
            described=f"{held} of weights, {engine.kv_cache_tokens} tokens of KV cache, drafters: {methods}",
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
        )


class Answering(ABC):
    """Requests in, a stream of deltas out for each; what the server answers from.

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
        """Make what ``submit`` needs for structured output, which may take a second; in any thread."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """How the engine stands. Raises ClosedError where nobody says so."""

    @abstractmethod
    def close(self) -> None:
        """End everything; whoever still waits for a request gets ClosedError."""

    @abstractmethod
    async def _begin(
        self, stream: Stream, prompt: Sequence[int], params: Params, session: str | None, choices: Mapping[str, Any]
    ) -> None:
        """Have a request run; returns when it is taken, or has ended before that."""

    @abstractmethod
    def _drop(self, stream: Stream) -> None:
        """Nobody reads the stream any more: what is unfinished of it is aborted."""

    def post(self, command: Callable[[], None]) -> None:
        """Run ``command`` where streams are filled."""
        command()

    def resume(self, stream: Stream) -> None:
        """Go on with a stream that was set aside until its reader caught up."""

    def check_length(self, prompt: Sequence[int]) -> None:
        """Raise ContextLengthError if ``prompt`` leaves no room for an answer, or is more than an encoder reads."""
        check_length(prompt, self.facts.max_model_len, self.facts.longest_source)

    def prompt_tokens_computed(self, prompt: Sequence[int]) -> int:
        """How many of the ``max_model_len`` tokens a prompt takes: a source takes none."""
        return len(prompt if self.facts.longest_source is None else self.facts.start)

    def clock(self) -> float:
        """Seconds, as deltas have them."""
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
        """Queue a request.

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
            raise ClosedError("the server is shutting down and takes no new requests")
        ahead, slots = sum(stream.unfinished for stream in list(self.streams)), self.capacity()
        if ahead and ahead + params.n > slots + self.max_queue:
            waiting = max(0, ahead - slots)
            raise QueueFullError(f"{waiting} sequences wait already; at most {self.max_queue} may: try again later")
        loop = asyncio.get_running_loop()
        stream = Stream(self, loop, params.n)
        if timeout is not None:
            stream.fail_after(timeout, TimeLimitError(f"the request was not answered within {timeout:g} seconds"))
        self.streams.add(stream)
        try:
            await self._begin(stream, prompt, params, session, choices)
            if stream.error is not None:
                raise stream.error
        except BaseException:
            stream.abort()
            raise
        return stream

    async def generate(self, prompt: Sequence[int], params: Params, **choices: Any) -> AsyncIterator[Delta]:
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
        ends = perf_counter() + seconds
        while self.streams and perf_counter() < ends:
            await asyncio.sleep(0.02)
        for stream in list(self.streams):
            stream.fail(ClosedError(f"the server shut down before this request ended (it had {seconds:g} s)"))

    def forget(self, stream: Stream) -> None:
        """Stop counting a request; what is unfinished of it is aborted."""
        if stream in self.streams:
            self.streams.discard(stream)
            if self.on_forget is not None:
                self.on_forget(stream)
            self._drop(stream)

    def deliver(self, stream: Stream, deltas: Sequence[Delta]) -> None:
        """Give a reader what came, in its event loop; nothing once it has left."""
        if stream in self.streams:
            if self.on_deltas is not None:
                self.on_deltas(stream, deltas)
            stream.deliver(deltas)

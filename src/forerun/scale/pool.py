"""Replicas as one engine. A request whose replica is lost continues on another."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from forerun.core.config import drawn
from forerun.core.errors import ForerunError
from forerun.core.request import RequestState
from forerun.engine.client import ClosedError, EngineClient, Stream, StreamedText
from forerun.engine.grammar import GrammarCompiler
from forerun.engine.jobs import Job
from forerun.engine.metrics import RequestMetrics, Snapshot
from forerun.engine.stop import Stopper
from forerun.models.text.tokenizer import load_tokenizer
from forerun.sampling.noise import fold
from forerun.sampling.params import BeamSearchParams, Params, SamplingParams, StructuredOutputsParams
from forerun.scale.replica import Facts, Message, OtherModelError, Progress, Rejected, Request, Started

log = logging.getLogger("forerun")

MAX_MOVES = 8
"""Replicas that a request may lose before it fails: it may be what ends them."""
MAX_REJECTIONS = 40
"""Replicas with other weights that may reject a request, ``WAIT`` seconds apart, before it fails."""
WAIT = 0.25


class LostError(Exception):
    """The replica that had a request is gone, or ends."""


class LostTooOftenError(ForerunError):
    """A request lost every replica that took it."""


Send = Callable[[Request], AsyncGenerator[Message]]
"""Gives a request to a replica, and yields its messages. Raises LostError if they end before the request does."""


@dataclass
class _Answer:
    """One of a request's answers, or all of a beam search, and what is asked of a replica for it."""

    stream: Stream
    jobs: list[Job]
    request: Request
    started: asyncio.Event = field(default_factory=asyncio.Event)
    weights: str = ""
    """Of the replica that answers: another one can continue only with the same."""
    moves: int = 0


class ReplicaPool(EngineClient):
    """Replicas as one engine. ``send`` chooses among them; ``capacity`` is how many sequences they decode at a time.

    The tokens of a replica are kept here. If it is lost, another one continues after them. Every request has a seed, or
    gets one, so that the tokens are those that the first replica would have given.
    """

    def __init__(self, facts: Facts, send: Send, *, max_queue: int = 1024, capacity: Callable[[], int]) -> None:
        super().__init__(facts, load_tokenizer(facts.tokenizer), max_queue, capacity)
        self.facts: Facts = facts
        self.send = send
        self.moved = 0
        """Answers that continued on another replica."""
        self.latest: Snapshot | None = None
        """Of all replicas together; None while none answers."""
        self._tasks: dict[Stream, list[asyncio.Task[None]]] = {}
        self._ids = itertools.count()

    @property
    def ready(self) -> bool:
        """Whether requests are taken and replicas answer."""
        return not self.draining and self.latest is not None

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        facts = self.facts
        return GrammarCompiler(
            self.tokenizer, facts.vocab_size, facts.eos_ids, longest=facts.max_grammar_bytes,
            memory=facts.grammar_bytes, reasoning_parser=facts.reasoning_parser,
        )  # fmt: skip

    def compile(self, requested: StructuredOutputsParams) -> None:
        """Refuses here what every replica would refuse."""
        self._grammars.compile(requested)

    def snapshot(self) -> Snapshot:
        if self.latest is None:
            raise ClosedError("no replica has answered yet")
        return self.latest

    async def _start(
        self, stream: Stream, prompt: Sequence[int], params: Params, session: str | None, choices: Mapping[str, Any]
    ) -> None:
        """Each of n answers is a request of its own. A beam search is one, because its beams belong to one engine."""
        answers = self._answers(stream, Request(tuple(prompt), params, choices, (), session, self.facts.checkpoint))
        self._tasks[stream] = [stream.loop.create_task(self._run(answer)) for answer in answers]
        for answer in answers:
            await answer.started.wait()
            if stream.error is not None:
                return

    def _answers(self, stream: Stream, request: Request) -> list[_Answer]:
        """Returns what is asked of replicas: every sampled answer with the noise that it would have among n."""
        params = request.params
        if isinstance(params, BeamSearchParams):
            jobs = [self._job(stream, request, params.each, 0, index) for index in range(params.n)]
            return [_Answer(stream, jobs, request)]
        seed = drawn(params.seed)
        answers = []
        for index in range(params.n):
            alone = params.clone(n=1, seed=seed if index == 0 else fold(seed, index))
            job = self._job(stream, request, params, seed, index)
            answers.append(_Answer(stream, [job], replace(request, params=alone)))
        return answers

    def _job(self, stream: Stream, request: Request, params: SamplingParams, seed: int, index: int) -> Job:
        """Returns what the reader of the stream sees of its ``index``-th answer."""
        choices, encodes = request.choices, self.facts.longest_source is not None
        tokens = list(self.facts.start if encodes else request.prompt)
        drafter = choices.get("method") or next(iter(self.facts.drafters), None)
        sequence = RequestState(
            id=next(self._ids),
            tokens=tokens,
            num_prompt=len(tokens),
            params=params,
            seed=seed,
            drafter=drafter if choices.get("speculate", True) else None,
            max_draft=choices.get("max_draft"),
            source=tuple(request.prompt) if encodes else None,
        )
        job = Job(sequence, Stopper(sequence, None), RequestMetrics(start=self.clock()), index)
        stream.jobs.append(job)
        stream.texts.append(StreamedText(job, self.tokenizer))
        return job

    def close(self) -> None:
        """Ends all requests with ClosedError."""
        self.draining = True
        for stream in list(self.streams):
            stream.fail(ClosedError("the engine was closed"))

    def _drop(self, stream: Stream) -> None:
        for task in self._tasks.pop(stream, ()):
            if task is not asyncio.current_task():
                task.cancel()

    async def _run(self, answer: _Answer) -> None:
        """Asks replicas until one has ended the answer."""
        try:
            while not await self._ask(answer):
                pass
        except Exception as error:  # noqa: BLE001 - its reader gets it
            answer.stream.refuse(error)
        finally:
            answer.started.set()

    async def _ask(self, answer: _Answer) -> bool:
        """Asks one replica; returns whether it ended the answer. Raises ForerunError if no other should be asked."""
        messages = self.send(answer.request)
        try:
            async for message in messages:
                if isinstance(message, Started):
                    answer.weights = message.weights
                    answer.started.set()
                elif isinstance(message, Rejected):
                    await self._rejected(answer, message.error)
                    return False
                elif self._forward(answer, message):
                    return True
            raise LostError("its messages ended before the answer did")
        except LostError as error:
            answer.moves += 1
            self.moved += 1
            committed = len(answer.request.committed)
            log.warning("a replica was lost (%s); another one continues after %d tokens", error, committed)
            if answer.moves > MAX_MOVES and self.latest is None:
                raise ClosedError("no replica answers") from None
            if answer.moves > MAX_MOVES:
                raise LostTooOftenError(f"{answer.moves} replicas ended while they had this request") from None
            await asyncio.sleep(WAIT * (answer.moves - 1))
            return False
        finally:
            await messages.aclose()

    @staticmethod
    async def _rejected(answer: _Answer, error: Exception) -> None:
        """Waits if another replica may run the request, else raises its error."""
        if not isinstance(error, OtherModelError) or answer.request.rejections >= MAX_REJECTIONS:
            raise error
        answer.request = replace(answer.request, rejections=answer.request.rejections + 1)
        await asyncio.sleep(WAIT)

    def _forward(self, answer: _Answer, progress: Progress) -> bool:
        """Gives deltas to the reader, and returns whether the answer has ended."""
        stream, beams = answer.stream, isinstance(answer.request.params, BeamSearchParams)
        tokens: list[int] = []
        for delta in progress.deltas:
            job = answer.jobs[delta.index if beams else 0]
            delta.index, delta.seconds = job.index, self.clock()
            job.finish = delta.finish
            job.metrics = progress.metrics or job.metrics
            tokens += delta.token_ids
        if tokens and not beams:  # beams come at once, at their end
            committed = (*answer.request.committed, *tokens)
            answer.request = replace(answer.request, committed=committed, weights=answer.weights)
        if progress.prompt_logprobs is not None:
            answer.jobs[0].prompt_logprobs = progress.prompt_logprobs
        stream.produced += len(progress.deltas)
        self.deliver(stream, progress.deltas)
        return all(job.finish is not None for job in answer.jobs)

"""Replicas as one engine: what the server answers from. A request whose replica is lost goes on elsewhere."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from forerun.core.errors import ForerunError
from forerun.core.request import RequestState
from forerun.engine.client import ClosedError, EngineClient, Stream, StreamedText
from forerun.engine.grammar import GrammarCompiler
from forerun.engine.jobs import Job
from forerun.engine.metrics import RequestMetrics, Snapshot
from forerun.engine.stop import Stopper
from forerun.models.tokenizer import load_tokenizer
from forerun.sampling.noise import fold
from forerun.sampling.params import BeamSearchParams, Params, SamplingParams, StructuredOutputsParams
from forerun.scale.replica import Begun, Facts, Message, News, OtherModelError, Refused, Request

log = logging.getLogger("forerun")

MOVES = 8
"""Replicas that a request may lose before it fails: it may be what ends them."""
MISFITS = 40
"""Replicas with other weights than it needs that a request may meet, ``WAIT`` seconds apart, before it fails."""
WAIT = 0.25


class LostError(Exception):
    """The replica that had a request is gone, or ends."""


class LostTooOftenError(ForerunError):
    """A request lost every replica that took it."""


Send = Callable[[Request], AsyncGenerator[Message]]
"""Gives a request to a replica: its messages. Raises LostError where they end before the request does."""


@dataclass
class _Answer:
    """One of a request's answers, or all of a beam search's, which end together, wherever they are made."""

    stream: Stream
    jobs: list[Job]
    request: Request
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    weights: str = ""
    """Of the replica that answers: what goes on behind its tokens needs them."""
    moves: int = 0


class ReplicaPool(EngineClient):
    """Replicas as one engine; ``send`` chooses among them, and ``capacity`` says how many sequences they decode at a
    time.

    Whatever a replica has given is kept in front; if it is lost, another one goes on behind that, and the seed, which
    every request has or gets, gives the tokens that the first one would have given.
    """

    def __init__(self, facts: Facts, send: Send, *, max_queue: int = 1024, capacity: Callable[[], int]) -> None:
        super().__init__(facts, load_tokenizer(facts.tokenizer), max_queue, capacity)
        self.facts: Facts = facts
        self.send = send
        self.moved = 0
        """Answers that have gone on at another replica."""
        self.latest: Snapshot | None = None
        """How the replicas stood when they were last asked, together."""
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
        """Refuse here what every replica would refuse."""
        self._grammars.compile(requested)

    def snapshot(self) -> Snapshot:
        if self.latest is None:
            raise ClosedError("no replica has told yet how it stands")
        return self.latest

    async def _start(
        self, stream: Stream, prompt: Sequence[int], params: Params, session: str | None, choices: Mapping[str, Any]
    ) -> None:
        """Each of n answers is a request of its own, in parallel; a beam search is one, because its beams belong to one
        engine."""
        answers = self._answers(stream, prompt, params, session, choices)
        self._tasks[stream] = [stream.loop.create_task(self._work(answer)) for answer in answers]
        for answer in answers:
            await answer.begun.wait()
            if stream.error is not None:
                return

    def _answers(
        self, stream: Stream, prompt: Sequence[int], params: Params, session: str | None,
        choices: Mapping[str, Any],
    ) -> list[_Answer]:  # fmt: skip
        """What is asked of replicas: every sampled answer with the noise that it would have among the others."""
        if isinstance(params, BeamSearchParams):
            jobs = [self._job(stream, prompt, params.each, 0, index, choices) for index in range(params.n)]
            return [_Answer(stream, jobs, Request(tuple(prompt), params, choices, (), session, self.facts.checkpoint))]
        seed = secrets.randbits(63) if params.seed is None else params.seed
        answers = []
        for index in range(params.n):
            alone = params.clone(n=1, seed=seed if index == 0 else fold(seed, index))
            job = self._job(stream, prompt, params, seed, index, choices)
            request = Request(tuple(prompt), alone, choices, (), session, self.facts.checkpoint)
            answers.append(_Answer(stream, [job], request))
        return answers

    def _job(
        self, stream: Stream, prompt: Sequence[int], params: SamplingParams, seed: int, index: int,
        choices: Mapping[str, Any],
    ) -> Job:  # fmt: skip
        """What the stream's reader sees of its ``index``-th answer."""
        reads = self.facts.longest_source is not None
        begun = list(self.facts.start if reads else prompt)
        drafter = choices.get("method") or next(iter(self.facts.drafters), None)
        sequence = RequestState(
            id=next(self._ids),
            tokens=begun,
            num_prompt=len(begun),
            params=params,
            seed=seed,
            drafter=drafter if choices.get("speculate", True) else None,
            max_draft=choices.get("max_draft"),
            source=tuple(prompt) if reads else None,
        )
        job = Job(sequence, Stopper(sequence, None), None, RequestMetrics(start=self.clock()), index)
        stream.jobs.append(job)
        stream.texts.append(StreamedText(job, self.tokenizer))
        return job

    def close(self) -> None:
        """End everything that is under way with ClosedError."""
        self.draining = True
        for stream in list(self.streams):
            stream.fail(ClosedError("the engine was closed"))

    def _drop(self, stream: Stream) -> None:
        for task in self._tasks.pop(stream, ()):
            if task is not asyncio.current_task():
                task.cancel()

    async def _work(self, answer: _Answer) -> None:
        """Have an answer made, by as many replicas as it takes."""
        try:
            while not await self._ask(answer):
                pass
        except Exception as error:  # noqa: BLE001 - it belongs to whoever submitted the request
            answer.stream.refuse(error)
        finally:
            answer.begun.set()

    async def _ask(self, answer: _Answer) -> bool:
        """Ask one replica; whether it has ended the answer. Raises ForerunError where that is hopeless."""
        messages = self.send(answer.request)
        try:
            async for message in messages:
                if isinstance(message, Begun):
                    answer.weights = message.weights
                    answer.begun.set()
                elif isinstance(message, Refused):
                    await self._refused(answer, message.error)
                    return False
                elif self._tell(answer, message):
                    return True
            raise LostError("its messages ended before the answer did")
        except LostError as error:
            answer.moves += 1
            self.moved += 1
            given = len(answer.request.committed)
            log.warning("a replica was lost (%s); another one continues after %d tokens", error, given)
            if answer.moves > MOVES and self.latest is None:
                raise ClosedError("no replica answers") from None
            if answer.moves > MOVES:
                raise LostTooOftenError(f"{answer.moves} replicas ended while they had this request") from None
            await asyncio.sleep(WAIT * (answer.moves - 1))
            return False
        finally:
            await messages.aclose()

    @staticmethod
    async def _refused(answer: _Answer, error: Exception) -> None:
        """Raise the error of a request that no replica would run; wait, if another may."""
        if not isinstance(error, OtherModelError) or answer.request.misfits >= MISFITS:
            raise error
        answer.request = replace(answer.request, misfits=answer.request.misfits + 1)
        await asyncio.sleep(WAIT)

    def _tell(self, answer: _Answer, news: News) -> bool:
        """Give the reader what came; whether it was the last of it."""
        stream, searched = answer.stream, isinstance(answer.request.params, BeamSearchParams)
        fresh: list[int] = []
        for delta in news.deltas:
            job = answer.jobs[delta.index if searched else 0]
            delta.index, delta.seconds = job.index, self.clock()
            job.finish = delta.finish
            job.metrics = news.metrics or job.metrics
            fresh += delta.token_ids
        if fresh and not searched:  # beams come at once, at their end
            committed = (*answer.request.committed, *fresh)
            answer.request = replace(answer.request, committed=committed, weights=answer.weights)
        if news.prompt_logprobs is not None:
            answer.jobs[0].prompt_logprobs = news.prompt_logprobs
        stream.produced += len(news.deltas)
        self.deliver(stream, news.deltas)
        return all(job.finish is not None for job in answer.jobs)

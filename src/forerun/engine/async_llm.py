"""``AsyncLLM``: the calls of ``LLM`` for asyncio, where requests come and go."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from forerun.engine import beams
from forerun.engine.async_engine import AsyncEngine
from forerun.engine.client import Stream
from forerun.engine.jobs import Job
from forerun.engine.llm import LLM, Prompt, priorities, prompt_list
from forerun.engine.outputs import Outputs, Pieces, RequestOutput, StreamPiece, one_answer
from forerun.models.text.chat import Message, conversations
from forerun.sampling.params import BeamSearchParams, Params, SamplingParams


class AsyncLLM:
    """The calls of ``LLM`` as coroutines and asynchronous iterators, with its arguments. Requests are decoded together.

    A request ends early when its task is cancelled or its iterator is closed. ``async with AsyncLLM(...) as llm:``
    closes it at the end.
    """

    def __init__(self, model: str = "forerun:target", **options: Any) -> None:
        self._llm = LLM(model, **options)
        self._engine = AsyncEngine(self._llm.engine, max_queue=sys.maxsize)
        self._llm.tokenizer = self._engine.tokenizer  # the engine's own is for its thread

    def __repr__(self) -> str:
        return f"Async{self._llm!r}"

    def get_tokenizer(self) -> Any:
        """As ``LLM.get_tokenizer``."""
        return self._llm.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """As ``LLM.get_default_sampling_params``."""
        return self._llm.get_default_sampling_params()

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, speculate: bool = True
    ) -> AsyncIterator[StreamPiece]:
        """Yields one answer token by token, as ``LLM.stream`` does."""
        params = one_answer(sampling_params or self._llm.default_params())
        async with self._submitted(prompt, params, speculate=speculate) as (text, stream):
            (job,) = stream.jobs
            made = Pieces(job, self._engine.tokenizer, lambda: self._llm.output(text, [job]))
            async for delta in stream:
                for piece in made.of(delta.token_ids, delta.finish):
                    yield piece

    async def chat_stream(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        speculate: bool = True,
        **template: Any,
    ) -> AsyncIterator[StreamPiece]:
        """Yields the answer to a conversation. ``template``: arguments of ``LLM.chat`` that make the prompt."""
        prompt = self._llm.chat_prompt(messages, **template)
        async with aclosing(self.stream(prompt, sampling_params, speculate=speculate)) as answer:  # type: ignore[type-var]
            async for piece in answer:
                yield piece

    async def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params | Iterable[Params] | None = None,
        *,
        priority: Sequence[int] | None = None,
        speculate: bool = True,
    ) -> list[RequestOutput]:
        """Answers every prompt; returns one output for each, in order. ``priority``: one number per prompt; lower ones
        go first, those of other calls included."""
        requests = await self._run(prompts, sampling_params, priority, speculate)
        return Outputs(self._llm.output(text, jobs) for text, jobs in requests)

    async def beam_search(
        self, prompts: Prompt | Iterable[Prompt], params: BeamSearchParams, *, speculate: bool = True
    ) -> list[beams.BeamSearchOutput]:
        """As ``LLM.beam_search``."""
        requests = await self._run(prompts, beams.only(params), None, speculate)
        return [beams.output(self._llm.tokenizer, jobs) for _, jobs in requests]

    async def _run(
        self, prompts: Any, given: Any, priority: Sequence[int] | None, speculate: bool
    ) -> list[tuple[str | None, list[Job]]]:
        """Each prompt's text and finished jobs."""
        batch = prompt_list(prompts)
        each = zip(batch, self._llm.params_of(given, len(batch)), priorities(priority, len(batch)))
        started = [self._whole(one, own, priority=rank, speculate=speculate) for one, own, rank in each]
        tasks = list(map(asyncio.create_task, started))
        try:
            return [await task for task in tasks]
        finally:
            for task in tasks:
                task.cancel()

    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        speculate: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers a conversation, or each of several. ``template`` as for ``chat_stream``."""
        prompts = [self._llm.chat_prompt(each, **template) for each in conversations(messages)]
        return await self.generate(prompts, sampling_params, speculate=speculate)

    async def _whole(self, prompt: Prompt, params: Params, **choices: Any) -> tuple[str | None, list[Job]]:
        async with self._submitted(prompt, params, **choices) as (text, stream):
            while await stream.read():
                pass
            return text, stream.jobs

    @asynccontextmanager
    async def _submitted(
        self, prompt: Prompt, params: Params, **choices: Any
    ) -> AsyncIterator[tuple[str | None, Stream]]:
        """A request's text and its stream; it ends with the block."""
        text, ids = self._llm.encode(prompt)
        params = self._llm.with_ending(prompt, params)
        stream = await self._engine.submit(ids, params, **choices, **self._llm.choices(prompt))
        try:
            yield text, stream
        finally:
            stream.abort()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends all requests, and frees the model and its caches."""
        self._engine.close()
        self._llm.close()

"""What makes replies of requests to one loaded model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from forerun.core.errors import ConfigError, ContextLengthError, RequestError
from forerun.engine.client import EngineClient, Stream
from forerun.engine.config import NONE
from forerun.models.text.infill import Hole, ending
from forerun.sampling.params import BeamSearchParams, Params, SamplingParams
from forerun.serve import answers
from forerun.serve.errors import ApiError
from forerun.serve.metrics import ThroughputLog
from forerun.serve.options import ServerOptions
from forerun.serve.responses import ResponseReply, ResponseRequest, ResponseStore
from forerun.serve.schema import MAX_CHOICES, ChatRequest, CompletionRequest, Generation, plain_text
from forerun.serve.stream import ChatReply, CompletionReply, Echo, Reply
from forerun.serve.text import TextService
from forerun.serve.tools import tool_grammar


class Server:
    """A loaded model behind the routes, and what makes a ``Reply`` of a request to it."""

    def __init__(self, engine: EngineClient, options: ServerOptions, stored: ResponseStore) -> None:
        self.engine = engine
        self.name = options.served_model_name
        self.request_timeout = options.request_timeout
        self.max_model_len = engine.facts.max_model_len
        self.text = TextService(
            engine.tokenizer, self.max_model_len, options.chat_template, engine.facts.reasoning_parser
        )
        self.stored = stored
        self.throughput = ThroughputLog(engine)
        self.started = int(time.time())
        self.defaults = engine.facts.sampling
        self.ignored: set[str] = set()
        """Names of request fields that were ignored, which the log has named."""

    def engine_options(self, body: Generation) -> dict[str, Any]:
        """Returns the keywords of ``EngineClient.submit`` beside prompt and sampling."""
        options = {"timeout": self.request_timeout, "session": body.session, "priority": body.priority}
        chosen = body.speculative
        if chosen is None:
            return options
        options["trace"] = chosen.trace
        if not chosen.enabled or chosen.method == NONE:
            if chosen.method not in (None, NONE) or chosen.num_speculative_tokens:
                why = "method is 'none'" if chosen.enabled else "enabled is false"
                raise ApiError(400, f"speculative.{why}: remove the other options", param="speculative")
            return {**options, "speculate": False}
        if not self.engine.facts.drafters:
            message = "no drafter is loaded: start the server with --speculative-config, or remove 'speculative'"
            raise ApiError(400, message, param="speculative")
        return {**options, "method": chosen.method, "max_draft": chosen.num_speculative_tokens}

    async def submit(
        self, prompts: Sequence[Sequence[int]], params: Params, body: Generation, limit: int | None
    ) -> list[Stream]:
        """Queues every prompt, or none. ``limit`` is the client's own bound on new tokens."""
        options = self.engine_options(body)
        if body.prediction is not None:
            options["prediction"] = await self.text.predicted(plain_text(body.prediction.content))
        facts = self.engine.facts
        for prompt in prompts:
            computed = len(prompt if facts.longest_source is None else facts.start)  # an encoder's source takes no room
            if limit is not None and body.limit_field is not None and computed + limit > self.max_model_len:
                message = f"the prompt has {computed} tokens and {body.limit_field} is {limit}: together more than"
                raise ContextLengthError(f"{message} this model's {self.max_model_len}", param=body.limit_field)
        requested = params.grammar if isinstance(params, SamplingParams) else None
        if requested is not None:
            # A schema may take a second to compile: not in the engine's thread.
            try:
                await asyncio.to_thread(self.engine.compile, requested)
            except RequestError as error:
                error.param = "tools" if requested.schemas is not None else body.shape_field
                raise
        with ExitStack() as on_failure:
            streams = []
            for prompt in prompts:
                streams.append(await self.engine.submit(prompt, params, **options))
                on_failure.callback(streams[-1].abort)
            on_failure.pop_all()
        return streams

    async def completion(
        self, body: CompletionRequest, request_id: str, reply: type[CompletionReply] = CompletionReply
    ) -> Reply:
        body.settle(self.defaults)
        if body.echo and body.stream and body.logprobs is not None:
            raise ApiError(400, "streaming does not support echo with logprobs: remove one", param="echo")
        if body.prompt_only and not body.echo:
            message = "max_tokens is 0: ask for a token, or for the prompt alone with echo: true"
            raise ApiError(400, message, param="max_tokens")
        if body.prompt_only and body.min_tokens:
            raise ApiError(400, f"min_tokens ({body.min_tokens}) exceeds max_tokens (0)", param="min_tokens")
        given: Any = body.prompt
        if isinstance(given, str) or isinstance(given[0], int):
            given = [given]
        prompts = [await self._prompt(body, item) for item in given]
        if len(prompts) * body.n > MAX_CHOICES:
            message = f"{len(prompts)} prompts times n {body.n} are more than {MAX_CHOICES} answers"
            raise ApiError(400, message, param="n")
        counts = (body.prompt_logprobs, body.logprobs if body.echo else None)
        params = body.sampling(
            logprobs=body.logprobs,
            max_tokens=body.max_tokens,
            prompt_logprobs=max((count for count in counts if count is not None), default=None),
        )
        if isinstance(params, SamplingParams) and isinstance(body.prompt, str):
            params = ending(params, body.stop_at, body.prompt, self.text.fill_ends if body.fills else ())
        echo = await self._echo(body, prompts, given) if body.echo else None
        limit = body.max_tokens if "max_tokens" in body.model_fields_set else None
        streams = await self.submit(prompts, params, body, limit)
        return reply(self, streams, body, request_id, echo=echo)

    async def _prompt(self, body: CompletionRequest, given: Any) -> list[int]:
        if not isinstance(given, str):
            return list(given)
        if not body.fills:
            return await self.text.encode(given)
        if body.use_beam_search:
            raise ApiError(400, "beam search does not fill in the middle: remove suffix", param="suffix")
        files = [(each.filename, each.text) for each in body.input_extra or ()]
        return await self.text.fill(Hole(given, body.suffix or "", files=files))

    async def _echo(self, body: CompletionRequest, prompts: list[list[int]], given: Sequence[Any]) -> list[Echo]:
        for prompt in prompts:  # before every token of it is turned into text
            self.engine.check_length(prompt)
        texts = [item if isinstance(item, str) else await self.text.decode(item, param="prompt") for item in given]
        if body.logprobs is None:
            return [Echo(text) for text in texts]
        return [
            Echo(text, await self.text.offsets(prompt, text), body.logprobs) for prompt, text in zip(prompts, texts)
        ]

    async def chat(
        self, body: ChatRequest, request_id: str, reply: type[ChatReply] = ChatReply, **options: Any
    ) -> Reply:
        """``options`` are those of the class ``reply``."""
        body.settle(self.defaults)
        tools = body.offered()
        ids = await self.text.encode_chat(body.conversation(self.text.has_variable))
        limit = body.max_completion_tokens or body.max_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = body.sampling(logprobs=logprobs, max_tokens=limit, prompt_logprobs=body.prompt_logprobs)
        if tools and isinstance(params, BeamSearchParams):
            raise ConfigError("beam search cannot call tools: remove tools or use_beam_search")
        special = self.text.special_markers(tools=bool(tools))
        if isinstance(params, SamplingParams):
            grammar = tool_grammar(body, self.text.tool_format, special) if tools else None
            params = params.clone(
                structured_outputs=grammar or params.structured_outputs,
                skip_special_tokens=params.skip_special_tokens and not special,
            )
        streams = await self.submit([ids], params, body, limit)
        return reply(self, streams, body, request_id, **options)

    async def response(self, body: ResponseRequest, request_id: str) -> Reply:
        """A chat completion in another form."""
        body.settle(self.defaults)
        before = self.stored.items_up_to(body.previous_response_id)

        def keep(answer: answers.Response) -> None:
            if body.store:
                self.stored.put(answer, [*before, *body.items])

        return await self.chat(body.chat(before), request_id, ResponseReply, request=body, keep=keep)

"""The routes: OpenAI's API, and what an operator needs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Send

from forerun import __version__
from forerun.core.errors import ConfigError, RequestError
from forerun.engine.client import EngineClient, Stream
from forerun.engine.config import NONE
from forerun.models.text.infill import Hole, ending
from forerun.sampling.params import BeamSearchParams, Params, SamplingParams
from forerun.serve import answers, anthropic, errors, infill, ollama, tokens
from forerun.serve.errors import ApiError
from forerun.serve.guard import Guard
from forerun.serve.metrics import Recorder, RequestLog
from forerun.serve.openapi import BODY, GENERATION, describe, responses
from forerun.serve.options import ServerOptions, checked_origin
from forerun.serve.responses import ResponseReply, ResponseRequest, ResponseStore
from forerun.serve.schema import (
    MAX_CHOICES,
    Asked,
    ChatRequest,
    CompletionRequest,
    Generation,
    plain_text,
)
from forerun.serve.stream import ChatReply, CompletionReply, Echo, Reply
from forerun.serve.text import TextService
from forerun.serve.tools import tool_grammar

log = logging.getLogger("forerun")

LATEST = ":latest"
"""Ollama's clients add it to a name without a tag."""
MOST_IGNORED = 1000
"""Names of ignored fields that the log tells apart."""


class Server:
    """The state behind the routes, and what makes a ``Reply`` of a request."""

    def __init__(self, engine: EngineClient, options: ServerOptions) -> None:
        self.engine = engine
        self.name, self.aliases = options.served_model_name, options.aliases
        self.request_timeout = options.request_timeout
        self.strict, self.any_model_name = options.strict, options.any_model_name
        self.max_model_len = engine.facts.max_model_len
        self.text = TextService(
            engine.tokenizer, self.max_model_len, options.chat_template, engine.facts.reasoning_parser
        )
        self.recorder = Recorder(engine, self.name, options.metrics_names)
        self.stored = ResponseStore(options.response_memory)
        self.started = int(time.time())
        self.defaults = engine.facts.sampling
        self.ignored: set[str] = set()
        """Names of request fields that were ignored, which the log has named."""

    def check_model(self, name: str | None) -> None:
        names = (self.name, *self.aliases)
        if name is None or self.any_model_name or name in names or name.removesuffix(LATEST) in names:
            return
        message = f"there is no model {name!r} here; there is {self.name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def check(self, body: Asked) -> None:
        """Refuses another model's name and, if the server is strict, unknown fields."""
        self.check_model(body.model)
        name = next(body.unknown(), None) if self.strict else None
        if name is not None:
            raise ApiError(400, f"unknown field {name!r}: remove it", param=name, code="unknown_field")

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
        for prompt in prompts:
            computed = self.engine.prompt_tokens_computed(prompt)
            if limit is not None and body.must_fit and computed + limit > self.max_model_len:
                raise ApiError(
                    400,
                    f"the prompt has {computed} tokens and {body.limit_field} is {limit}: together more than this "
                    f"model's {self.max_model_len}",
                    param=body.limit_field,
                    code="context_length_exceeded",
                )
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
        prompt_only = body.max_tokens == 0
        if body.echo and body.stream and body.logprobs is not None:
            raise ApiError(400, "streaming does not support echo with logprobs: remove one", param="echo")
        if prompt_only and not body.echo:
            message = "max_tokens is 0: ask for a token, or for the prompt alone with echo: true"
            raise ApiError(400, message, param="max_tokens")
        if prompt_only and body.min_tokens:
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
            max_tokens=1 if prompt_only else body.max_tokens,
            prompt_logprobs=max((count for count in counts if count is not None), default=None),
        )
        if isinstance(params, SamplingParams) and isinstance(body.prompt, str):
            params = ending(params, body.stop_at, body.prompt, self.text.fill_ends if body.fills else ())
        echo = await self._echo(body, prompts, given) if body.echo else None
        limit = body.max_tokens if "max_tokens" in body.model_fields_set else None
        streams = await self.submit(prompts, params, body, limit)
        logprobs = body.logprobs is not None
        return reply(self, streams, body, request_id, logprobs, echo=echo, prompt_only=prompt_only)

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
        messages = [message.plain() for message in body.messages]
        options_of_template = body.template_options(self.text.has_variable)
        ids = await self.text.encode_chat(messages, [tool.plain() for tool in tools], **options_of_template)
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
        return reply(self, streams, body, request_id, body.logprobs, prompt=ids, **options)

    async def response(self, body: ResponseRequest, request_id: str) -> Reply:
        """A chat completion in another form."""
        body.settle(self.defaults)
        before = self.stored.items_up_to(body.previous_response_id)

        def keep(answer: answers.Response) -> None:
            if body.store:
                self.stored.put(answer, [*before, *body.items])

        return await self.chat(body.chat(before), request_id, ResponseReply, request=body, keep=keep)

    async def answer(self, request: Request, body: Asked, make: Callable[[Any, str], Awaitable[Reply]]) -> Response:
        """Answers a request for text with the reply that ``make`` returns for it."""
        self.check(body)
        try:
            reply = request.state.reply = await make(body, request.state.request_id)
        except RequestError as error:
            error.param = body.field_of(error.param)
            raise
        ignored = body.ignored(self.text.has_variable)
        for name in ignored:
            if name not in self.ignored and len(self.ignored) < MOST_IGNORED:
                log.warning("%s of %s is ignored: it makes no difference here", name, request.url.path)
        self.ignored.update(ignored[: MOST_IGNORED - len(self.ignored)])
        headers = {"Forerun-Ignored": ", ".join(ignored)} if ignored else {}
        if body.stream:
            return EventStream(
                reply.events(), headers={"Cache-Control": "no-cache", **headers}, media_type=reply.media_type
            )
        answer = await unless_gone(request, reply.collect())
        answer.headers.update(headers)
        return answer


class EventStream(StreamingResponse):
    """Sends the end of the response along with its last event, so that the client is woken once."""

    def __init__(self, events: AsyncIterator[tuple[str, bool]], **options: Any) -> None:
        super().__init__((), **options)
        self.events = events

    async def stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event, last in self.events:
            await send({"type": "http.response.body", "body": event.encode(), "more_body": not last})


async def unless_gone(request: Request, work: Coroutine[Any, Any, answers.Answer]) -> Response:
    """Returns the answer of ``work``, which is cancelled if the client hangs up."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, waiting = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait([working, waiting], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return Response(working.result().model_dump_json(exclude_unset=True), media_type="application/json")
        return Response(status_code=499)  # which is not read
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


def create_app(engine: EngineClient, options: ServerOptions | None = None) -> FastAPI:
    """Returns the ASGI application. It closes ``engine`` when it shuts down."""
    options = options or ServerOptions()
    server = Server(engine, options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        engine.close()
        server.text.close()

    app = FastAPI(title="Forerun", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_middleware(Guard, options=options)
    if options.allowed_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[checked_origin(origin) for origin in options.allowed_origin],
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Forerun-Ignored", "Retry-After"],
        )
    app.add_middleware(RequestLog)
    errors.install(app)
    _playground(app)
    _generation_routes(app, server)
    _operator_routes(app, server)
    for api in (ollama, anthropic, tokens):
        api.install(app, server)
    chunks = (answers.CompletionChunk, answers.ChatChunk, answers.ResponseEvent, answers.InfillChunk)
    unseen = (answers.Error, *chunks, *ollama.MODELS, *anthropic.MODELS)
    describe(app, options, engine.facts.drafters, unseen)
    return app


def _generation_routes(app: FastAPI, server: Server) -> None:
    completion = responses(*GENERATION, answer=answers.Completion, chunk=answers.CompletionChunk)
    conversation = responses(*GENERATION, answer=answers.Chat, chunk=answers.ChatChunk)
    response = responses(*GENERATION, answer=answers.Response, chunk=answers.ResponseEvent)

    @app.post("/v1/completions", response_model=None, responses=completion)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await server.answer(request, body, server.completion)

    @app.post("/v1/chat/completions", response_model=None, responses=conversation)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await server.answer(request, body, server.chat)

    filled = responses(*GENERATION, answer=answers.Infill, chunk=answers.InfillChunk)

    @app.post("/infill", response_model=None, responses=filled)
    async def fill_in(body: infill.InfillRequest, request: Request) -> Response:
        return await server.answer(request, body, partial(infill.reply, server))

    @app.post("/v1/responses", response_model=None, responses=response)
    async def respond(body: ResponseRequest, request: Request) -> Response:
        return await server.answer(request, body, server.response)

    @app.get(
        "/v1/responses/{id}", responses=responses(*BODY, answer=answers.Response), response_model_exclude_unset=True
    )
    async def stored(id: str, request: Request) -> answers.Response:
        if request.query_params.get("stream", "false") != "false":
            raise ApiError(400, "a stored response does not stream: remove stream", param="stream")
        return server.stored.get(id)

    @app.delete("/v1/responses/{id}", responses=responses(404, answer=answers.DeletedResponse))
    async def deleted(id: str) -> answers.DeletedResponse:
        server.stored.delete(id)
        return answers.DeletedResponse(id=id, object="response", deleted=True)

    @app.post("/v1/embeddings", responses=responses(404))
    async def embeddings() -> None:
        raise ApiError(404, "embeddings are not supported: the model generates text", code="no_embeddings")


def _operator_routes(app: FastAPI, server: Server) -> None:
    engine = server.engine

    def model() -> dict[str, Any]:
        return {
            "id": server.name,
            "object": "model",
            "type": "model",
            "display_name": server.name,
            "created": server.started,
            "created_at": datetime.fromtimestamp(server.started, UTC).isoformat(),
            "owned_by": "forerun",
            "max_model_len": server.max_model_len,
            "chat_template": server.text.chat_template is not None,
            "speculative": {name: {"num_speculative_tokens": most} for name, most in engine.facts.drafters.items()},
        }

    @app.get("/v1/models", responses=responses(answer=answers.Models))
    async def models() -> dict[str, Any]:
        ends = {"has_more": False, "first_id": server.name, "last_id": server.name}
        return {"object": "list", "data": [model()], **ends}

    @app.get("/v1/models/{name:path}", responses=responses(404, answer=answers.ModelCard))
    async def one_model(name: str) -> dict[str, Any]:
        server.check_model(name)
        return model()

    @app.get("/health", responses=responses(503, answer=answers.Health))
    async def health() -> dict[str, str]:
        if engine.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if not engine.ready:
            raise ApiError(503, "no replica answers", code="no_replica")
        return {"status": "ok"}

    @app.get("/live", responses=responses(answer=answers.Health))
    async def live() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/version", responses=responses(answer=answers.Version))
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics", response_class=PlainTextResponse, responses=responses())
    async def metrics() -> Response:
        return Response(server.recorder.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
POLICY = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src data:"


def _playground(app: FastAPI) -> None:
    """Serves the page at ``/`` and its files under ``/page/``, which are those of this package."""
    files = {path.name: path for path in (Path(__file__).parent / "page").iterdir() if path.suffix in MEDIA_TYPES}
    headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)  # HEAD: ollama's own client looks for it
    async def index() -> Response:
        return await file("index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in files:
            raise ApiError(404, f"there is nothing at /page/{name}")
        return Response(files[name].read_bytes(), headers=headers, media_type=MEDIA_TYPES[files[name].suffix])

"""The routes: OpenAI's API, and what an operator needs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import PlainTextResponse, StreamingResponse
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Send

from forerun import __version__
from forerun.core.errors import ConfigError, RequestError
from forerun.engine.client import EngineClient, Stream
from forerun.engine.config import NONE
from forerun.sampling.params import BeamSearchParams, Params, SamplingParams
from forerun.serve import answers, errors
from forerun.serve.errors import STATUSES, ApiError
from forerun.serve.guard import Guard, needs_key
from forerun.serve.metrics import Recorder, RequestLog
from forerun.serve.options import ServerOptions, checked_origin
from forerun.serve.responses import ResponseReply, ResponseRequest, ResponseStore
from forerun.serve.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
    Sampled,
    Speculative,
    TokenizeRequest,
)
from forerun.serve.stream import ChatReply, CompletionReply, Echo, Reply
from forerun.serve.text import TextService
from forerun.serve.tool_formats import tool_grammar


class Server:
    """The state behind the routes."""

    def __init__(self, engine: EngineClient, options: ServerOptions) -> None:
        self.engine = engine
        self.options = options
        self.text = TextService(engine.tokenizer, self.limit, options.chat_template, engine.facts.reasoning_parser)
        self.recorder = Recorder(engine, options.served_model_name, options.metrics_names)
        self.stored = ResponseStore(options.response_memory)
        self.started = int(time.time())

    @property
    def limit(self) -> int:
        return self.engine.facts.max_model_len

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in (self.options.served_model_name, *self.options.aliases):
            raise ApiError(
                404, f"there is no model {name!r} here; there is {self.options.served_model_name!r}", param="model",
                code="model_not_found",
            )  # fmt: skip

    def choices(self, wish: Speculative | None, priority: int) -> dict[str, Any]:
        """``Engine.add``'s keywords for a request's ``speculative`` object."""
        loaded = self.engine.facts.drafters
        if wish is None:
            return {"priority": priority}
        if not wish.enabled or wish.method == NONE:
            if wish.method not in (None, NONE) or wish.num_speculative_tokens:
                why = "method is 'none'" if wish.enabled else "enabled is false"
                raise ApiError(400, f"speculative.{why}: remove the other options", param="speculative")
            return {"speculate": False, "trace": wish.trace, "priority": priority}
        if not loaded:
            raise ApiError(
                400, "no drafter is loaded: start the server with --speculative-config, or remove 'speculative'",
                param="speculative",
            )  # fmt: skip
        return {
            "method": wish.method,
            "max_draft": wish.num_speculative_tokens,
            "trace": wish.trace,
            "priority": priority,
        }

    async def submit(
        self, prompts: Sequence[Sequence[int]], params: Params, body: Generation, limit: int | None
    ) -> list[Stream]:
        """Queue every prompt, or none. ``limit`` is the client's own bound on new tokens."""
        choices = self.choices(body.speculative, body.priority)
        limited, session = self.options.request_timeout, body.session
        for prompt in prompts:
            before = self.engine.prompt_tokens_computed(prompt)
            if limit is not None and before + limit > self.limit:
                raise ApiError(
                    400,
                    f"the prompt has {before} tokens and {body.limit_field} is {limit}: together more than this "
                    f"model's {self.limit}",
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
        streams: list[Stream] = []
        try:
            for prompt in prompts:
                streams.append(await self.engine.submit(prompt, params, timeout=limited, session=session, **choices))
        except BaseException as error:
            for stream in streams:
                stream.abort()
            if isinstance(error, RequestError):
                error.param = body.field_of(error.param)
            raise
        return streams

    def _about(self, body: Generation, request_id: str, *, logprobs: bool) -> dict[str, Any]:
        """Every reply's options."""
        model = self.options.served_model_name
        return {"body": body, "engine": self.engine, "model": model, "logprobs": logprobs, "request_id": request_id}

    async def completion(self, body: CompletionRequest, request_id: str) -> Reply:
        self.check_model(body.model)
        if body.echo and body.stream and body.logprobs is not None:
            raise ApiError(400, "echo with logprobs does not stream: remove stream, echo or logprobs", param="echo")
        if body.max_tokens == 0 and not body.echo:
            raise ApiError(
                400, "max_tokens is 0: ask for a token, or for the prompt alone with echo: true", param="max_tokens"
            )
        if body.max_tokens == 0 and body.min_tokens:
            raise ApiError(400, f"min_tokens ({body.min_tokens}) exceeds max_tokens (0)", param="min_tokens")
        prompts = await self._prompts(body)
        if len(prompts) * body.n > 128:
            raise ApiError(400, f"{len(prompts)} prompts times n {body.n} are more than 128 answers", param="n")
        explicit = body.max_tokens if "max_tokens" in body.model_fields_set else None
        echoes = body.echo and body.logprobs is not None
        params = body.sampling(
            logprobs=body.logprobs,
            max_tokens=1 if body.max_tokens == 0 else body.max_tokens,
            prompt_logprobs=body.logprobs if echoes else None,
        )
        echo = await self._echo(body, prompts) if body.echo else None
        streams = await self.submit(prompts, params, body, explicit)
        options = self._about(body, request_id, logprobs=body.logprobs is not None)
        return CompletionReply(streams, self.text, echo=echo, prompt_only=body.max_tokens == 0, **options)

    async def _prompts(self, body: CompletionRequest) -> list[list[int]]:
        prompt: Any = body.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            prompt = [prompt]
        return [await self.text.encode(item) if isinstance(item, str) else list(item) for item in prompt]

    async def _echo(self, body: CompletionRequest, prompts: Sequence[Sequence[int]]) -> list[Echo]:
        for prompt in prompts:  # before anything is written for each of its tokens
            self.engine.check_length(prompt)
        given: Any = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        texts = given if isinstance(given[0], str) else [await self.text.decode(p, param="prompt") for p in prompts]
        if body.logprobs is None:
            return [Echo(text) for text in texts]
        return [Echo(text, await self.text.offsets(prompt, text)) for prompt, text in zip(prompts, texts)]

    async def chat(self, body: ChatRequest, request_id: str) -> Reply:
        self.check_model(body.model)
        return await self._converse(body, request_id, ChatReply)

    async def response(self, body: ResponseRequest, request_id: str) -> Reply:
        """A chat completion in another form."""
        self.check_model(body.model)
        before = self.stored.items_up_to(body.previous_response_id)

        def keep(answer: answers.Response) -> None:
            if body.store:
                self.stored.put(answer, [*before, *body.items])

        return await self._converse(body.chat(before), request_id, ResponseReply, request=body, keep=keep)

    async def _converse(self, body: ChatRequest, request_id: str, kind: type[ChatReply], **more: Any) -> Reply:
        """The reply to a conversation, of a ``kind`` that takes ``more``."""
        tools = body.offered()
        messages = [message.plain() for message in body.messages]
        try:
            ids = await self.text.encode_chat(messages, [tool.plain() for tool in tools])
        except RequestError as error:
            error.param = body.field_of(error.param)
            raise
        limit = body.max_completion_tokens or body.max_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = body.sampling(logprobs=logprobs, max_tokens=limit, prompt_logprobs=None)
        if tools and isinstance(params, BeamSearchParams):
            raise ConfigError("beams call no tools: leave tools out, or use_beam_search")
        special = self.text.special_markers(tools=bool(tools))
        if isinstance(params, SamplingParams):
            shape = tool_grammar(body, self.text.tool_format, special) if tools else None
            params = params.clone(
                structured_outputs=shape or params.structured_outputs,
                skip_special_tokens=params.skip_special_tokens and not special,
            )
        streams = await self.submit([ids], params, body, limit)
        about = self._about(body, request_id, logprobs=body.logprobs)
        return kind(streams, self.text, prompt=ids, **about, **more)

    async def answer(self, request: Request, body: Sampled, make: Coroutine[Any, Any, Reply]) -> Response:
        reply = request.state.reply = await make
        ignored = ", ".join(body.ignored())
        headers = {"Forerun-Ignored": ignored} if ignored else {}
        if body.stream:
            return EventStream(reply.events(), headers={"Cache-Control": "no-cache", **headers})
        answer = await unless_gone(request, reply.collect())
        answer.headers.update(headers)
        return answer


class EventStream(StreamingResponse):
    """Sends the response's end along with its last piece: whoever reads is woken once."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[tuple[str, bool]], **options: Any) -> None:
        super().__init__((), **options)
        self.events = events

    async def stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece, last in self.events:
            await send({"type": "http.response.body", "body": piece.encode(), "more_body": not last})


async def unless_gone(request: Request, work: Coroutine[Any, Any, answers.Answer]) -> Response:
    """The result of ``work``, which is cancelled if the client hangs up."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, waiting = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait([working, waiting], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return Response(working.result().model_dump_json(exclude_unset=True), media_type="application/json")
        return Response(status_code=499)  # nobody reads it
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


def create_app(engine: EngineClient, options: ServerOptions | None = None) -> FastAPI:
    """The ASGI application. It closes ``engine`` when it shuts down."""
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
    _describe(app, options, engine.facts.drafters)
    _answers(app, server)
    _operations(app, server)
    return app


EVERYWHERE = (403, 408, 413, 500)
BODY = (400, 404)
GENERATION = (*BODY, 429, 503, 504)

Responses = dict[int | str, dict[str, Any]]
ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}


def responses(*statuses: int, good: type[BaseModel] | None = None, chunk: type[BaseModel] | None = None) -> Responses:
    """A route's answers: errors by status, the ``good`` one, and the kind of event that it streams."""
    result: Responses = {
        status: {"description": STATUSES[status][1], "content": ERROR} for status in (*EVERYWHERE, *statuses)
    }
    if good is not None:
        result[200] = {"description": "The answer", "model": good}
    if chunk is not None:
        ends = "or an Error that ends the answer; the last is [DONE]"
        if chunk is answers.ResponseEvent:
            ends = "the last of which ends the answer"
        events = f"Server-sent events if stream is true: each data is a {chunk.__name__}, {ends}"
        fields = {"event": {"type": "string"}, "data": {"type": "string"}}
        event = {"type": "object", "properties": fields, "required": ["data"], "description": events}
        result[200]["content"] = {"text/event-stream": {"schema": event}}  # of each event, as before OpenAPI 3.2
    return result


def _answers(app: FastAPI, server: Server) -> None:
    completion = responses(*GENERATION, good=answers.Completion, chunk=answers.CompletionChunk)
    conversation = responses(*GENERATION, good=answers.Chat, chunk=answers.ChatChunk)

    @app.post("/v1/completions", response_model=None, responses=completion)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await server.answer(request, body, server.completion(body, request.state.request_id))

    @app.post("/v1/chat/completions", response_model=None, responses=conversation)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await server.answer(request, body, server.chat(body, request.state.request_id))

    described = responses(*GENERATION, good=answers.Response, chunk=answers.ResponseEvent)

    @app.post("/v1/responses", response_model=None, responses=described)
    async def respond(body: ResponseRequest, request: Request) -> Response:
        return await server.answer(request, body, server.response(body, request.state.request_id))

    @app.get("/v1/responses/{id}", responses=responses(*BODY, good=answers.Response), response_model_exclude_unset=True)
    async def stored(id: str, request: Request) -> answers.Response:
        if request.query_params.get("stream", "false") != "false":
            raise ApiError(400, "a stored response does not stream: remove stream", param="stream")
        return server.stored.get(id)

    @app.delete("/v1/responses/{id}", responses=responses(404, good=answers.DeletedResponse))
    async def deleted(id: str) -> answers.DeletedResponse:
        server.stored.delete(id)
        return answers.DeletedResponse(id=id, object="response", deleted=True)

    @app.post("/v1/embeddings", responses=responses(404))
    async def embeddings() -> None:
        raise ApiError(404, "there are no embeddings here: this server's model generates text", code="no_embeddings")

    @app.post("/tokenize", responses=responses(*BODY, good=answers.Tokens))
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        server.check_model(body.model)
        if body.messages is not None:
            messages, tools = [[item.plain() for item in items or ()] for items in (body.messages, body.tools)]
            tokens = await server.text.encode_chat(messages, tools, counted=True)
        else:
            tokens = await server.text.encode(body.prompt or "", special=body.add_special_tokens, counted=True)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": server.limit}

    @app.post("/detokenize", responses=responses(*BODY, good=answers.Prompt))
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        server.check_model(body.model)
        return {"prompt": await server.text.decode(body.tokens)}


def _operations(app: FastAPI, server: Server) -> None:
    engine = server.engine

    def model() -> dict[str, Any]:
        return {
            "id": server.options.served_model_name,
            "object": "model",
            "created": server.started,
            "owned_by": "forerun",
            "max_model_len": server.limit,
            "chat_template": server.text.chat_template is not None,
            "speculative": {name: {"num_speculative_tokens": most} for name, most in engine.facts.drafters.items()},
        }

    @app.get("/v1/models", responses=responses(good=answers.Models))
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name:path}", responses=responses(404, good=answers.ModelCard))
    async def one_model(name: str) -> dict[str, Any]:
        server.check_model(name)
        return model()

    @app.get("/health", responses=responses(503, good=answers.Health))
    async def health() -> dict[str, str]:
        if engine.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if not engine.ready:
            raise ApiError(503, "no replica answers", code="no_replica")
        return {"status": "ok"}

    @app.get("/live", responses=responses(good=answers.Health))
    async def live() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/version", responses=responses(good=answers.Version))
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics", response_class=PlainTextResponse, responses=responses())
    async def metrics() -> Response:
        return Response(server.recorder.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
POLICY = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src data:"


def _playground(app: FastAPI) -> None:
    """Static files without a build step: the page at ``/``, its files under ``/page/``. Only files of this package are
    known by name."""
    known = {path.name: path for path in (Path(__file__).parent / "page").iterdir() if path.suffix in KINDS}

    def answer(name: str) -> Response:
        if name not in known:
            raise ApiError(404, f"there is nothing at /page/{name}")
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
        return Response(known[name].read_bytes(), headers=headers, media_type=KINDS[known[name].suffix])

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return answer("index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        return answer(name)


def _describe(app: FastAPI, options: ServerOptions, methods: Mapping[str, int]) -> None:
    """``/openapi.json``: what ``app`` takes, with its model's names and ``methods``, which draft so many tokens, and
    every status and shape it answers with."""
    names, has_key = (options.served_model_name, *options.aliases), options.api_key is not None

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            described = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for path, item in described["paths"].items():
                for operation in item.values():
                    operation["responses"].pop("422", None)  # bodies are judged by errors.py
                    if has_key and needs_key(path):
                        _lock(operation)
            schemas = described["components"]["schemas"]
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            schemas |= _more_schemas(answers.Error, answers.CompletionChunk, answers.ChatChunk, answers.ResponseEvent)
            _narrow(schemas, names, methods)
            if has_key:
                described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            app.openapi_schema = described
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _more_schemas(*models: type[BaseModel]) -> dict[str, Any]:
    """Of what FastAPI does not see: it knows one answer per status, and takes errors for the route's own type."""
    kinds: list[tuple[type[BaseModel], JsonSchemaMode]] = [(model, "serialization") for model in models]
    return models_json_schema(kinds, ref_template="#/components/schemas/{model}")[1]["$defs"]


def _lock(operation: dict[str, Any]) -> None:
    operation["security"] = [{"key": []}]
    operation["responses"]["401"] = {"description": STATUSES[401][1], "content": ERROR}


def _narrow(schemas: dict[str, Any], names: Sequence[str], methods: Mapping[str, int]) -> None:
    """Say which values this very server takes."""
    for schema in schemas.values():
        named = schema.get("properties", {}).get("model")
        if named is not None:
            optional = "model" not in schema.get("required", ())
            schema["properties"]["model"] = {"title": "Model", "enum": [*names, None] if optional else [names[0]]}
    wish = schemas["Speculative"]["properties"]
    wish["method"] = {**_about(wish["method"]), "enum": [*methods, "none", None]}
    bounds = {"type": "integer", "minimum": 0, "maximum": max(methods.values(), default=0)}
    wish["num_speculative_tokens"] = {**_about(wish["num_speculative_tokens"]), "anyOf": [bounds, {"type": "null"}]}


def _about(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in ("title", "description", "default") if key in schema}

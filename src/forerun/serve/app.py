"""The routes: OpenAI's API, and what an operator needs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.middleware.cors import CORSMiddleware

from forerun import __version__
from forerun.engine.client import EngineClient
from forerun.serve import answers, anthropic, errors, infill, ollama, tokens
from forerun.serve.answering import answer
from forerun.serve.errors import EMBED, ApiError
from forerun.serve.guard import Guard
from forerun.serve.metrics import RequestLog
from forerun.serve.models import Models, OneModel
from forerun.serve.openapi import BODY, GENERATION, describe, responses
from forerun.serve.options import ServerOptions, checked_origin
from forerun.serve.responses import ResponseRequest
from forerun.serve.schema import ChatRequest, CompletionRequest
from forerun.serve.server import Server


def create_app(engine: EngineClient | Models, options: ServerOptions | None = None) -> FastAPI:
    """The ASGI application of an engine, or of ``Models`` with their own options; it closes them when it shuts down."""
    models = engine if isinstance(engine, Models) else OneModel(engine, options or ServerOptions())
    options = models.options

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        models.close()

    app = FastAPI(
        title="Forerun", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan,
        dependencies=[Depends(errors.check_json)],
    )  # fmt: skip
    app.add_middleware(Guard, models=models)
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
    _generation_routes(app, models)
    _operator_routes(app, models)
    for api in (ollama, anthropic, tokens):
        api.install(app, models)
    chunks = (answers.CompletionChunk, answers.ChatChunk, answers.ResponseEvent, answers.InfillChunk)
    describe(app, options, models.drafters, (answers.Error, *chunks, *ollama.MODELS, *anthropic.MODELS))
    return app


def _generation_routes(app: FastAPI, models: Models) -> None:
    completion = responses(*GENERATION, answer=answers.Completion, chunk=answers.CompletionChunk)
    conversation = responses(*GENERATION, answer=answers.Chat, chunk=answers.ChatChunk)
    response = responses(*GENERATION, answer=answers.Response, chunk=answers.ResponseEvent)

    @app.post("/v1/completions", response_model=None, responses=completion)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await answer(models, request, body, Server.completion)

    @app.post("/v1/chat/completions", response_model=None, responses=conversation)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await answer(models, request, body, Server.chat)

    filled = responses(*GENERATION, answer=answers.Infill, chunk=answers.InfillChunk)

    @app.post("/infill", response_model=None, responses=filled)
    async def fill_in(body: infill.InfillRequest, request: Request) -> Response:
        return await answer(models, request, body, infill.reply)

    @app.post("/v1/responses", response_model=None, responses=response)
    async def respond(body: ResponseRequest, request: Request) -> Response:
        return await answer(models, request, body, Server.response)

    @app.get("/v1/responses/{id}", response_model=None, responses=responses(*BODY, answer=answers.Response))
    async def stored(id: str, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise ApiError(400, "a stored response does not stream: remove stream", param="stream")
        return Response(models.stored.get(id), media_type="application/json")

    @app.delete("/v1/responses/{id}", responses=responses(404, answer=answers.DeletedResponse))
    async def deleted(id: str) -> answers.DeletedResponse:
        models.stored.delete(id)
        return answers.DeletedResponse(id=id, object="response", deleted=True)

    @app.post("/v1/embeddings", responses=responses(404))
    async def embeddings() -> None:
        raise ApiError(404, EMBED, code="no_embeddings")


def _operator_routes(app: FastAPI, models: Models) -> None:
    def card(name: str, since: float) -> answers.ModelCard:
        here = models.loaded().get(name)
        loaded: dict[str, Any] = {}
        if here is not None:
            drafters = here.server.engine.facts.drafters
            loaded = {
                "max_model_len": here.server.max_model_len,
                "chat_template": here.server.text.chat_template is not None,
                "speculative": {name: {"num_speculative_tokens": most} for name, most in drafters.items()},
            }
        return answers.ModelCard(
            id=name, object="model", type="model", display_name=name, created=int(since),
            created_at=datetime.fromtimestamp(since, UTC).isoformat(), owned_by="forerun", **loaded,
        )  # fmt: skip

    @app.get("/v1/models", responses=responses(answer=answers.Models), response_model_exclude_unset=True)
    async def listed() -> answers.Models:
        cards = [card(each.name, each.modified) for each in await models.listed()]
        first, last = (cards[0].id, cards[-1].id) if cards else (None, None)
        return answers.Models(object="list", data=cards, has_more=False, first_id=first, last_id=last)

    @app.get(
        "/v1/models/{name:path}", responses=responses(404, answer=answers.ModelCard), response_model_exclude_unset=True
    )
    async def one_model(name: str) -> answers.ModelCard:
        known = await models.find(name)
        return card(known, {each.name: each.modified for each in await models.listed()}.get(known, 0.0))

    @app.get("/health", responses=responses(503, answer=answers.Health))
    async def health() -> dict[str, str]:
        if models.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if not models.ready:
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
        return Response(models.recorder.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


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

"""The server's description of itself, ``/openapi.json``: what it takes, and every status and shape it answers with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from forerun.serve import answers
from forerun.serve.guard import needs_key

if TYPE_CHECKING:
    from forerun.serve.app import ServerOptions

STATUSES = {
    400: "The request cannot be run as it is",
    401: "The API key is missing or wrong",
    403: "The server does not answer to the name in the Host header",
    404: "There is no such model",
    408: "The body did not arrive in time",
    413: "The body is too large",
    429: "Too many sequences are waiting: try again after the seconds in Retry-After",
    500: "The server is at fault",
    503: "The server is shutting down",
    504: "The answer took longer than the server allows",
}
EVERYWHERE = (403, 408, 413, 500)
BODY = (400, 404)
GENERATION = (*BODY, 429, 503, 504)

Responses = dict[int | str, dict[str, Any]]
ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}


def responses(*statuses: int, good: type[BaseModel] | None = None, chunk: type[BaseModel] | None = None) -> Responses:
    """A route's answers: errors by status, the ``good`` one, and the kind of event that it streams."""
    result: Responses = {
        status: {"description": STATUSES[status], "content": ERROR} for status in (*EVERYWHERE, *statuses)
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


def install(app: FastAPI, options: ServerOptions, methods: Mapping[str, int]) -> None:
    """Describe ``app`` with its model's names and ``methods``, which draft so many tokens."""
    names, has_key = (options.model_name, *options.aliases), options.api_key is not None

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
    operation["responses"]["401"] = {"description": STATUSES[401], "content": ERROR}


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

"""What ``/openapi.json`` says of the routes: their errors, their answers, and the values that this server takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from forerun.engine.config import NONE
from forerun.serve import answers
from forerun.serve.errors import STATUSES
from forerun.serve.guard import needs_key
from forerun.serve.options import ServerOptions

EVERYWHERE = (403, 408, 413, 500)
"""The statuses of errors of all routes; below, of those that take a body, and of those that generate."""
BODY = (400, 404)
GENERATION = (*BODY, 429, 503, 504)

Responses = dict[int | str, dict[str, Any]]


def responses(
    *errors: int, answer: type[BaseModel] | None = None, chunk: type[BaseModel] | None = None,
    error: type[BaseModel] = answers.Error, lines: bool = False,
) -> Responses:  # fmt: skip
    """FastAPI's description of a route: statuses and form of its errors, its answer, a stream's events or ``lines``."""
    form = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error.__name__}"}}}
    result: Responses = {
        status: {"description": STATUSES[status][1], "content": form} for status in (*EVERYWHERE, *errors)
    }
    if answer is not None:
        result[200] = {"description": "The answer", "model": answer}
    if chunk is not None and lines:
        text = f"If stream is not false: each line is a {chunk.__name__}, or an {error.__name__} that ends the answer"
        result[200]["content"] = {"application/x-ndjson": {"schema": {"type": "string", "description": text}}}
    elif chunk is not None:
        ends = "or an Error that ends the answer; the last is [DONE]"
        if chunk not in (answers.CompletionChunk, answers.ChatChunk):
            ends = "the last of which ends the answer"
        events = f"Server-sent events if stream is true: each data is a {chunk.__name__}, {ends}"
        fields = {"event": {"type": "string"}, "data": {"type": "string"}}
        event = {"type": "object", "properties": fields, "required": ["data"], "description": events}
        result[200]["content"] = {"text/event-stream": {"schema": event}}  # of each event, as before OpenAPI 3.2
    return result


def describe(
    app: FastAPI, options: ServerOptions, drafters: Mapping[str, int] | None, unseen: Sequence[type[BaseModel]]
) -> None:
    """Makes ``/openapi.json``, with the model's names, and the ``drafters`` and how many tokens each drafts at most.

    Args:
        drafters: None if there are several models.
        unseen: the models of errors and events. FastAPI sees one model per status of a route, and would describe errors
            in the route's own media type.
    """
    names, has_key = (options.served_model_name, *options.aliases), options.api_key is not None

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = described = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for path, item in described["paths"].items():
                for operation in item.values():
                    operation["responses"].pop("422", None)  # errors.py answers those with 400
                    if has_key and needs_key(path):
                        operation["security"] = [{"key": []}]
                        content = operation["responses"]["403"]["content"]
                        operation["responses"]["401"] = {"description": STATUSES[401][1], "content": content}
            if has_key:
                described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            schemas = described["components"]["schemas"]
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            models: list[tuple[type[BaseModel], JsonSchemaMode]] = [(model, "serialization") for model in unseen]
            schemas |= models_json_schema(models, ref_template="#/components/schemas/{model}")[1]["$defs"]
            if drafters is not None:
                _set_values(schemas, names, drafters)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _set_values(schemas: dict[str, Any], names: Sequence[str], drafters: Mapping[str, int]) -> None:
    """Narrows the description of fields to the values that this server takes."""
    for schema in schemas.values():
        if "model" in (properties := schema.get("properties", {})):
            optional = "model" not in schema.get("required", ())
            properties["model"] = {"title": "Model", "enum": [*names, None] if optional else [names[0]]}
    tokens = {"type": "integer", "minimum": 0, "maximum": max(drafters.values(), default=0)}
    narrowed: dict[str, dict[str, Any]] = {
        "method": {"enum": [*drafters, NONE, None]},
        "num_speculative_tokens": {"anyOf": [tokens, {"type": "null"}]},
    }
    properties = schemas["Speculative"]["properties"]
    for name, values in narrowed.items():
        about = {key: properties[name][key] for key in ("title", "description", "default") if key in properties[name]}
        properties[name] = {**about, **values}

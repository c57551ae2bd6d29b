"""Errors as clients expect them: a status and OpenAI's ``{"error": {"message", "type", "param", "code"}}``, or the form
of another API under that one's paths."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException

from forerun.core.errors import ContextLengthError, ForerunError
from forerun.engine.client import ClosedError, QueueFullError, TimeLimitError
from forerun.serve.schema import MAX_FIELDS, SYNONYMS

log = logging.getLogger("forerun")
M = TypeVar("M", bound=BaseModel)

STATUSES = {
    400: ("invalid_request_error", "The request cannot be run as it is"),
    401: ("authentication_error", "The API key is missing or wrong"),
    403: ("permission_error", "The server does not answer to the name in the Host header"),
    404: ("not_found_error", "There is no such model"),
    408: ("timeout_error", "The body did not arrive in time"),
    413: ("invalid_request_error", "The body is too large"),
    429: ("rate_limit_error", "Too many sequences are waiting: try again after the seconds in Retry-After"),
    431: ("invalid_request_error", "The headers are too large"),
    500: ("internal_error", "The server is at fault"),
    503: ("unavailable_error", "The server is shutting down, or the memory for the model is in use"),
    504: ("timeout_error", "The answer took longer than the server allows"),
}
"""The type and the description of errors by status. Any other status has the type of 400."""
NOT_AN_OBJECT = ("model_attributes_type", "model_type", "dict_type")
"""Pydantic's errors whose messages would name our classes."""
ANTHROPIC = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "invalid_request_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
    504: "timeout_error",
}  # fmt: skip
"""Anthropic's types of errors by status."""

CODES: dict[type[ForerunError], tuple[int, str | None]] = {
    QueueFullError: (429, "queue_full"),
    ClosedError: (503, "shutting_down"),
    TimeLimitError: (504, "timeout"),
    ContextLengthError: (400, "context_length_exceeded"),
    ForerunError: (400, None),
}
"""Status and code of our exceptions; the first class that fits counts."""


class ApiError(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        kind, _ = STATUSES.get(self.status, STATUSES[400])
        param = _printable(self.param) if self.param is not None else None
        return {"error": {"message": _printable(self.message), "type": kind, "param": param, "code": self.code}}

    def response(self, path: str = "") -> JSONResponse:
        """Returns the answer to a request to ``path``."""
        headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}}
        return JSONResponse(self.body_for(path), self.status, headers.get(self.status))

    def body_for(self, path: str) -> dict[str, Any]:
        """Returns the body as clients of ``path`` expect it."""
        message = self.body["error"]["message"]
        if path.startswith("/api/"):
            return {"error": message}
        if path.startswith("/v1/messages"):
            return {"type": "error", "error": {"type": ANTHROPIC.get(self.status, "api_error"), "message": message}}
        return self.body


def _printable(text: str) -> str:
    """Returns a text that may quote the client cut to 1,000 characters, and without what UTF-8 cannot encode."""
    return text[:1000].encode(errors="replace").decode()


def as_api_error(error: Exception) -> ApiError:
    """Returns one of our exceptions with its status, and any other as a 500 that hides its cause."""
    if isinstance(error, ApiError):
        return error
    for kind, (status, code) in CODES.items():
        if isinstance(error, kind):
            return ApiError(status, str(error), param=getattr(error, "param", None), code=code)
    log.error("unexpected error", exc_info=error)
    return ApiError(500, "internal error; the server's log has the cause")


def _path(body: Any, loc: Sequence[str | int], missing: bool) -> str | None:
    """Returns the path of a wrong or missing field in the body. ``loc`` names validators and members of unions, too."""
    path: list[str] = []
    for part in loc:
        keys = body if isinstance(body, dict) else range(len(body)) if isinstance(body, list) else ()
        names = [name for name, ours in SYNONYMS.items() if ours == part and name in keys and body[name] is not None]
        for name in [*names, part][:1]:
            if name in keys:
                path.append(str(name))
                body = body[name]
    if missing:
        path.append(str(loc[-1]))
    return ".".join(path) or None


def _invalid(error: RequestValidationError, content_type: str | None) -> ApiError:
    """Returns the first error of a body."""
    first = error.errors()[0]
    kind, loc = first["type"], first["loc"][1:]
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(400, f"the body is not valid JSON: {reason}", code="json_invalid")
    if not loc and not _is_json(content_type):
        came = f"as {content_type}" if content_type else "without a Content-Type"
        message = f"send the body as JSON, with the header 'Content-Type: application/json': it came {came}"
        return ApiError(400, message, code="unsupported_content_type")
    if not loc and kind in ("missing", *NOT_AN_OBJECT):
        return ApiError(400, "the body must be a JSON object", code="not_an_object")
    name = _path(error.body, loc, kind == "missing")
    if kind == "extra_forbidden":
        return ApiError(400, f"unknown field {name!r}: remove it", param=name, code="unknown_field")
    message = "must be an object" if kind in NOT_AN_OBJECT else first["msg"]
    return _about(name, message, kind)


FAULTS = {"hex escape": "half a surrogate pair is no text", "recursion": "it is nested too deeply"}
"""What is wrong by words in pydantic's errors; otherwise it is NaN or infinity."""


def _fault(value: Any, text: bytes | None = None) -> str | None:
    """Returns why answers could not repeat a value, or its ``text``, that is JSON for Python."""
    try:
        from_json(json.dumps(value) if text is None else text, allow_inf_nan=False)
    except (ValueError, RecursionError) as error:
        return next((fault for words, fault in FAULTS.items() if words in str(error)), "numbers must be finite")
    return None


def _find_fault(part: Any, path: tuple[str, ...] = ()) -> tuple[str, str] | None:
    """Returns the path of the first part with a fault, up to three names, and the fault."""
    parts = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    for name, value in islice(parts, MAX_FIELDS) if len(path) < 3 else ():
        if fault := _fault({name: value}):
            here = (*path, str(name))
            return _find_fault(value, here) or (".".join(here), fault)
    return None


async def check_json(request: Request) -> None:
    """Raises ApiError, which names the field, for a body with half a surrogate pair, NaN or 200 lists in each other."""
    body = vars(request).get("_json")
    if body is not None and _fault(None, await request.body()) and (found := _find_fault(body)):
        raise _about(*found, "json_invalid")


def converted(model: type[M], given: Mapping[str, Any], field_of: Callable[[str], str | None]) -> M:
    """Returns a request of another API as one for ``model``. Raises ApiError, which names a field by ``field_of``."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        param = field_of(".".join(str(part) for part in first["loc"][:1]))
        raise _about(param, first["msg"], first["type"]) from None


def _about(param: str | None, message: str, code: str) -> ApiError:
    """The error of a field, from pydantic's message."""
    message = message.removeprefix("Value error, ").replace(" after validation", "")
    named = not param or message.startswith(f"{param} ")
    return ApiError(400, message if named else f"{param}: {message}", param=param, code=code)


def _is_json(content_type: str | None) -> bool:
    kind = (content_type or "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


EMBED = "embeddings are not supported: the model generates text"
INSTEAD = {
    "/api/pull": "the command forerun fetch brings models", "/api/delete": "the command forerun rm removes models",
    "/api/embed": EMBED, "/api/embeddings": EMBED,
}  # fmt: skip
"""What to say to who asks for what only Ollama has."""


def install(app: FastAPI) -> None:
    """Makes ``app`` answer every error in this form; no traceback reaches a client."""

    async def ours(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response(request.url.path)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return _invalid(error, request.headers.get("content-type")).response(request.url.path)

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        path, message = request.url.path, error.detail
        status = 404 if error.status_code == 405 and path.startswith("/v1/responses/") else error.status_code
        if status == 404:
            message = INSTEAD.get(path, f"there is nothing at {path}")
        elif status == 405:
            message = f"{path} does not take {request.method}"
        elif status == 400:  # FastAPI's, of a body that is not even text
            message = f"the body is not valid JSON: {str(error.__cause__).partition(':')[0]}"
        response = ApiError(status, message, code="json_invalid" if status == 400 else None).response(path)
        response.headers.update(error.headers or {})
        return response

    for kind in (ApiError, ForerunError, Exception):
        app.add_exception_handler(kind, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)

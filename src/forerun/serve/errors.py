"""Errors as OpenAI's clients expect them: a status and ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from forerun.core.errors import ContextLengthError, ForerunError
from forerun.engine.client import ClosedError, QueueFullError, TimeLimitError

log = logging.getLogger("forerun")

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
    503: ("unavailable_error", "The server is shutting down"),
    504: ("timeout_error", "The answer took longer than the server allows"),
}
"""What an error is called by its status, and what it means; others are called as 400."""
NO_OBJECT = ("model_attributes_type", "model_type", "dict_type")
"""Pydantic's errors whose words would name our classes."""


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

    def response(self) -> JSONResponse:
        headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}}
        return JSONResponse(self.body, self.status, headers.get(self.status))


def _printable(text: str) -> str:
    """Short enough, and without what UTF-8 cannot carry: it may quote the client."""
    return text[:1000].encode(errors="replace").decode()


def as_api_error(error: Exception) -> ApiError:
    """The status of an exception of ours; anything else is a 500 that says nothing of its cause."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, ClosedError):
        return ApiError(503, str(error), code="shutting_down")
    if isinstance(error, TimeLimitError):
        return ApiError(504, str(error), code="timeout")
    if isinstance(error, ForerunError):
        code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
        return ApiError(400, str(error), param=getattr(error, "param", None), code=code)
    log.error("unexpected error", exc_info=error)
    return ApiError(500, "internal error; the server's log has the cause")


def _place(given: Any, loc: Sequence[str | int], missing: bool) -> str | None:
    """Where in the body something is wrong, as the client wrote it; ``loc`` names validators and union members too."""
    result: list[str] = []
    for part in loc:
        known = given if isinstance(given, dict) else range(len(given)) if isinstance(given, list) else ()
        if part in known:
            result.append(str(part))
            given = given[part]
    if missing:
        result.append(str(loc[-1]))
    return ".".join(result) or None


def _invalid(error: RequestValidationError, content_type: str | None) -> ApiError:
    """The first thing that is wrong with a body, in words."""
    first = error.errors()[0]
    kind, loc = first["type"], first["loc"][1:]
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(400, f"the body is not valid JSON: {reason}", code="json_invalid")
    if not loc and not _is_json(content_type):
        came = f"it came as {content_type}" if content_type else "it came without a Content-Type"
        message = f"send the body as JSON, with the header 'Content-Type: application/json': {came}"
        return ApiError(400, message, code="unsupported_content_type")
    if not loc and kind in ("missing", *NO_OBJECT):
        return ApiError(400, "the body must be a JSON object", code="not_an_object")
    name = _place(error.body, loc, kind == "missing")
    if kind == "extra_forbidden":
        return ApiError(400, f"unknown field {name!r}: remove it", param=name, code="unknown_field")
    message = "must be an object" if kind in NO_OBJECT else first["msg"].removeprefix("Value error, ")
    message = message.replace(" after validation", "")
    return ApiError(400, f"{name}: {message}" if name else message, param=name, code=kind)


def _is_json(content_type: str | None) -> bool:
    kind = (content_type or "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def install(app: FastAPI) -> None:
    """Answer every error of ``app`` in this shape; no traceback reaches a client."""

    async def ours(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return _invalid(error, request.headers.get("content-type")).response()

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = error.detail
        if error.status_code == 404:
            message = f"there is nothing at {request.url.path}"
        elif error.status_code == 405:
            message = f"{request.url.path} does not take {request.method}"
        response = ApiError(error.status_code, message).response()
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(ApiError, ours)
    app.add_exception_handler(ForerunError, ours)
    app.add_exception_handler(Exception, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)

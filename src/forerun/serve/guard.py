"""Middleware that refuses requests with a wrong key or Host header, or with a body that is too large or too slow."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.engine.client import ClosedError
from forerun.serve.errors import ApiError, as_api_error
from forerun.serve.models import Models
from forerun.serve.options import checked_host, host_name, is_loopback

OPEN = ("/", "/health", "/live", "/metrics")
"""Paths that need no key, like the playground's files under /page/."""
SAYS_NOTHING = (b"", b"application/octet-stream", b"application/x-www-form-urlencoded")
"""Types of bodies that are JSON all the same: litellm sends the first two to Ollama, and ``curl -d`` the last."""


def needs_key(path: str) -> bool:
    return path not in OPEN and not path.startswith("/page/")


def _as_json(scope: Scope) -> Scope:
    """Returns the scope with a JSON body where the request does not say what it has, unless a browser sent it.

    A page of another site can send such a body without asking. A browser then says where it came from.
    """
    headers = dict(scope["headers"])
    if b"origin" in headers or b"sec-fetch-site" in headers or headers.get(b"content-type", b"") not in SAYS_NOTHING:
        return scope
    headers[b"content-type"] = b"application/json"
    return {**scope, "headers": list(headers.items())}


class Guard:
    """ASGI middleware. It reads bodies whole, within the limits of the options.

    The Host header must have a loopback name or an ``allowed_host`` (None: any name). A browser sends the name of the
    page's URL: so a page whose name was made to resolve to this machine (DNS rebinding) is refused.
    """

    def __init__(self, app: ASGIApp, models: Models) -> None:
        self.app, self.models, options = app, models, models.options
        hosts = options.allowed_host
        self.hosts = None if hosts is None else frozenset(map(checked_host, hosts))
        self.key = options.api_key.encode() if options.api_key is not None else None
        self.max_body_bytes = options.max_body_bytes
        self.body_timeout = options.body_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self._check_host(scope)
            self._check_key(scope)
            async with self.models.limited(self.body_timeout):
                body = await self._read(scope, receive)
        except TimeoutError:
            error = ApiError(408, f"the body did not arrive within {self.body_timeout:g} seconds")
            await error.response(scope["path"])(scope, receive, send)
            return
        except (ApiError, ClosedError) as error:
            await as_api_error(error).response(scope["path"])(scope, receive, send)
            return
        scope = _as_json(scope)
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self.app(scope, replay, send)

    def _check_host(self, scope: Scope) -> None:
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(given) > 1 or (not given and scope["http_version"] == "1.1"):
            raise ApiError(400, f"a request has one Host header, not {len(given)}", code="invalid_host")
        if self.hosts is None:
            return
        name = host_name(given[0]) if given else None
        if name is None or (name not in self.hosts and not is_loopback(name)):
            message = f"this server does not answer to the name {name or ''.join(given)!r}"
            raise ApiError(403, f"{message}: use localhost, or start it with --allowed-host", code="host_not_allowed")

    def _check_key(self, scope: Scope) -> None:
        if self.key is None or not needs_key(scope["path"]):
            return
        headers = dict(scope["headers"])
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        given = key if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")  # Anthropic's header
        if not hmac.compare_digest(given.strip(), self.key):
            message = "this server needs its API key: send 'Authorization: Bearer KEY'"
            raise ApiError(401, message, code="invalid_api_key")

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.max_body_bytes:
            self._refuse()
        body, more = bytearray(), True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self.max_body_bytes:
                self._refuse()
        return bytes(body)

    def _refuse(self) -> None:
        raise ApiError(413, f"the body is larger than {self.max_body_bytes} bytes", code="body_too_large")

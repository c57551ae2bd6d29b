"""One line in the log for each request that generates, and an id by which client and log mean the same one."""

from __future__ import annotations

import logging
import uuid
from time import perf_counter
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.serve.stream import Reply

log = logging.getLogger("forerun.requests")
LOGGED = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


class RequestLog:
    """ASGI middleware. ``state.request_id`` is a request's id, which goes out as ``X-Request-Id``; routes leave their
    reply in ``state.reply``. The line comes when the answer has been sent, or nobody reads it any more."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = perf_counter()
        state = scope.setdefault("state", {})
        name = state["request_id"] = uuid.uuid4().hex
        status = 500  # unless something else is sent

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        try:
            await self.app(scope, receive, named)
        finally:
            if scope["path"] in LOGGED and log.isEnabledFor(logging.INFO):
                facts = {"status": status, **_facts(state.get("reply")), "seconds": perf_counter() - began}
                written = " ".join(f"{key}={_shown(value)}" for key, value in facts.items())
                log.info("%s %s %s id=%s", scope["method"], scope["path"], written, name)


def _facts(reply: Reply | None) -> dict[str, Any]:
    if reply is None:
        return {}
    usage, metrics = reply.usage(), reply.metrics()
    drafts = metrics["speculative_decoding"]
    return {
        "finish": reply.outcome,
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "tokens_per_second": metrics["tokens_per_second"],
        "mean_acceptance_length": drafts["mean_acceptance_length"],
        "draft_acceptance_rate": drafts["draft_acceptance_rate"],
    }


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)

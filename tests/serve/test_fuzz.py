"""``schemathesis`` reads the server's own description and looks for a request that it cannot answer decently."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from running import Running
from schemathesis.checks import not_a_server_error
from schemathesis.generation.modes import GenerationMode

MODES = {"valid": GenerationMode.POSITIVE, "invalid": GenerationMode.NEGATIVE}
PATHS = {
    "/v1/completions": 15,
    "/v1/chat/completions": 15,
    "/tokenize": 8,
    "/detokenize": 8,
    "/v1/models/{name}": 10,
    "/v1/models": 1,
    "/health": 1,
    "/version": 1,
    "/metrics": 1,
}
"""Examples per path and mode."""
BODIES = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
"""Where something invalid can be sent."""


@pytest.fixture(scope="module")
def description(server: Running) -> Any:
    schema = schemathesis.openapi.from_dict(server.http.get("/openapi.json").json())
    schema.config.update(base_url=server.url)
    return schema


def test_every_path_is_covered(description: Any) -> None:
    assert {operation.ok().path for operation in description.get_all_operations()} == set(PATHS)


def short(body: Any) -> Any:
    """The same body, asking for few tokens: what is looked for are crashes, not long answers."""
    if not isinstance(body, dict) or not ({"prompt", "messages"} & set(body)):
        return body
    changed = {key: 2 for key in ("max_tokens", "max_completion_tokens") if isinstance(body.get(key), int)}
    return {**body, **changed} if changed or "tools" in body else {**body, "max_tokens": 2, "min_tokens": 0}


@pytest.mark.parametrize(
    ("path", "mode"), [(path, mode) for path in PATHS for mode in MODES if mode == "valid" or path in BODIES]
)
def test_no_request_ends_in_a_500(description: Any, path: str, mode: str) -> None:
    (operation,) = [o.ok() for o in description.get_all_operations() if o.ok().path == path]
    seen: list[int] = []

    @given(case=operation.as_strategy(generation_mode=MODES[mode]))
    @settings(
        max_examples=PATHS[path], deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def attack(case: schemathesis.Case) -> None:
        if path in ("/v1/completions", "/v1/chat/completions"):
            case.body = short(case.body)
        response = case.call(timeout=30)
        case.validate_response(response, checks=[not_a_server_error])
        seen.append(response.status_code)
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    attack()
    assert seen
    if path in ("/v1/completions", "/tokenize") and mode == "valid":
        assert 200 in seen

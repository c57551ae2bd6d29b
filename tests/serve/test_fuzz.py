"""``schemathesis`` reads the server's own description, looks for a request that it cannot answer decently, and holds
every answer against what was described."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation.modes import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
MODES = {"valid": GenerationMode.POSITIVE, "invalid": GenerationMode.NEGATIVE}
PATHS = {
    "/v1/completions": 30, "/v1/chat/completions": 80, "/v1/responses": 30, "/v1/responses/{id}": 10,
    "/infill": 20,
    "/v1/embeddings": 1, "/tokenize": 40, "/detokenize": 12, "/v1/models/{name}": 10, "/v1/models": 1, "/health": 1,
    "/live": 1, "/version": 1, "/metrics": 1, "/api/chat": 30, "/api/generate": 20, "/api/show": 10, "/api/tags": 1,
    "/v1/messages": 40, "/v1/messages/count_tokens": 8, "/api/ps": 1, "/api/version": 1,
    "/apply-template": 30, "/tokenizer_info": 1, "/props": 1,
}  # fmt: skip
"""Examples per path and mode."""
GENERATING = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/infill", "/api/chat", "/api/generate",
)  # fmt: skip
BODIES = (*GENERATING, "/v1/messages/count_tokens", "/tokenize", "/detokenize", "/apply-template", "/api/show")
"""Where something invalid can be sent."""
ANSWERED = (*[path for path in BODIES if path != "/infill"], "/v1/models", "/health", "/live", "/version", "/metrics")
"""Where some valid request must be answered; this model has no tokens for ``/infill``."""


@pytest.fixture(scope="module")
def description(server):
    schema = schemathesis.openapi.from_dict(server.http.get("/openapi.json").json())
    schema.config.update(base_url=server.url)
    return schema


def test_every_path_is_covered(description):
    assert {operation.ok().path for operation in description.get_all_operations()} == set(PATHS)


def short(path, body):
    """The same body, asking for few tokens: what is looked for are crashes, not long answers."""
    if not isinstance(body, dict) or not ({"prompt", "messages", "input", "suffix", "input_prefix"} & set(body)):
        return body
    options = body.get("options") or {}
    if path.startswith("/api/"):
        return {**body, "options": {**options, "num_predict": 2}} if isinstance(options, dict) else body
    if path == "/v1/messages":
        return {**body, "max_tokens": 2} if isinstance(body.get("max_tokens"), int) else body
    if "input" in body:
        return {**body, "max_output_tokens": 2, "min_tokens": 0}
    changed = {key: 2 for key in ("max_tokens", "max_completion_tokens") if isinstance(body.get(key), int)}
    return {**body, **changed} if changed else {**body, "max_tokens": 2, "min_tokens": 0}


def some(body, data):
    """A few of the optional fields: of all at once, some two always exclude each other."""
    needed = {"prompt", "messages", "input", "tokens", "input_prefix", "input_suffix", "max_tokens"}
    optional = sorted(set(body) - needed)
    kept = data.draw(st.sets(st.sampled_from(optional), max_size=3)) if optional else set()
    return {key: value for key, value in body.items() if key not in optional or key in kept}


@pytest.mark.parametrize(
    ("path", "mode"), [(path, mode) for path in PATHS for mode in MODES if mode == "valid" or path in BODIES]
)
def test_every_answer_is_as_described(description, path, mode):
    operations = [o.ok() for o in description.get_all_operations() if o.ok().path == path]
    cases = st.one_of([operation.as_strategy(generation_mode=MODES[mode]) for operation in operations])
    seen = []

    @given(case=cases, data=st.data())
    @settings(
        max_examples=PATHS[path], deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def attack(case, data):
        if path in BODIES and mode == "valid":
            case.body = some(case.body, data)
        if path in GENERATING:
            case.body = short(path, case.body)
        response = case.call(timeout=30)
        case.validate_response(response, checks=CHECKS)
        seen.append(response.status_code)

    attack()
    assert seen
    if mode == "valid" and path in ANSWERED:
        assert 200 in seen
    if mode == "invalid":
        assert 400 in seen

"""``/openapi.json`` tells what the server does: streams, errors and the key, held against real answers."""

import json
import re

import jsonschema_rs
import pytest
from pydantic import ValidationError
from running import run_server

from forerun.serve.app import ServerOptions
from forerun.serve.schema import Body

COMPLETION = {"prompt": "def parse(", "max_tokens": 12, "logprobs": 2, "stream_options": {"include_usage": True}}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
FUNCTION = {"name": "add", "parameters": {"properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}}}}
LINES = {"messages": [{"role": "user", "content": "hi"}], "options": {"num_predict": 12}, "logprobs": True}
MESSAGES = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12}
ANSWER, LOGPROBS = {"input": "hi", "max_output_tokens": 12}, ["message.output_text.logprobs"]
CALLED = {**CHAT, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required", "max_tokens": 64}
TRACED = {"temperature": 0.8, "seed": 7, "speculative": {"method": "draft_model", "trace": True}}


@pytest.fixture(scope="module")
def description(server):
    return server.http.get("/openapi.json").json()


def validate(description, name, body):
    schema = {"$ref": f"#/components/schemas/{name}", "components": description["components"]}
    jsonschema_rs.validator_for(schema).validate(body)


def operations(description):
    return [(path, method, op) for path, item in description["paths"].items() for method, op in item.items()]


@pytest.mark.parametrize(("path", "body", "whole", "chunk"), [
    ("/v1/completions", COMPLETION, "Completion", "CompletionChunk"),
    ("/v1/completions", {**COMPLETION, **TRACED}, "Completion", "CompletionChunk"),
    ("/v1/completions", {"prompt": "a", "n": 2, "stop": "e"}, "Completion", "CompletionChunk"),
    ("/v1/chat/completions", CHAT, "Chat", "ChatChunk"),
    ("/v1/chat/completions", {**CHAT, **TRACED}, "Chat", "ChatChunk"),
    ("/v1/chat/completions", CALLED, "Chat", "ChatChunk"),
    ("/v1/chat/completions", {**CALLED, **TRACED, "max_tokens": 20}, "Chat", "ChatChunk"),
    ("/v1/chat/completions", {**CHAT, "stream_options": {"continuous_usage_stats": True}}, "Chat", "ChatChunk"),
    ("/v1/responses", ANSWER, "Response", "ResponseEvent"),
    ("/v1/responses", {**ANSWER, **TRACED, "include": LOGPROBS}, "Response", "ResponseEvent"),
    ("/v1/responses",
     {**ANSWER, "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required", "max_output_tokens": 64},
     "Response", "ResponseEvent"),
    ("/api/chat", LINES, "OllamaChatAnswer", "OllamaChatAnswer"),
    ("/v1/messages", MESSAGES, "AnthropicAnswer", "AnthropicEvent"),
    ("/v1/messages", {**MESSAGES, "tools": [{"name": "add", "input_schema": FUNCTION["parameters"]}],
                      "tool_choice": {"type": "any"}, "max_tokens": 60}, "AnthropicAnswer", "AnthropicEvent"),
    ("/api/generate", {**LINES, "messages": None, "prompt": "a"}, "OllamaGenerateAnswer", "OllamaGenerateAnswer"),
])  # fmt: skip
def test_whole_and_streamed_answers(server, description, path, body, whole, chunk):
    good = description["paths"][path]["post"]["responses"]["200"]["content"]
    kind = "application/x-ndjson" if path.startswith("/api/") else "text/event-stream"
    assert good["application/json"]["schema"] == {"$ref": f"#/components/schemas/{whole}"}
    assert chunk in good[kind]["schema"]["description"]
    alone = {key: value for key, value in {**body, "stream": False}.items() if key != "stream_options"}
    answer = server.post(path, alone)
    validate(description, whole, answer.json())
    stream = server.post(path, {**body, "stream": True})
    assert stream.headers["content-type"].startswith(kind)
    events = stream.text.splitlines() if "ndjson" in kind else re.findall("^data: (.*)$", stream.text, re.M)
    if chunk in ("CompletionChunk", "ChatChunk"):
        assert events.pop() == "[DONE]"
    for event in events:
        validate(description, chunk, json.loads(event))
    with pytest.raises(jsonschema_rs.ValidationError):
        validate(description, whole, {**answer.json(), "unheard_of": 1})


def bodies(kind=Body):
    """All that request bodies are made of."""
    return [result for each in kind.__subclasses__() for result in (each, *bodies(each))]


def integers(kind):
    """Its fields that are described as integers."""
    described = kind.model_json_schema()["properties"].items()
    return [
        name for name, field in described if {"integer"} & {each.get("type") for each in field.get("anyOf", [field])}
    ]


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(kind, name, id=f"{kind.__name__}.{name}") for kind in bodies() for name in integers(kind)],
)
def test_integers_are_those_of_json(kind, name):
    """2.0 is one, as the description has it; 2.5 and true are none."""
    schema = {"properties": {name: kind.model_json_schema()["properties"][name]}}
    for value in (2, 2.0, 2.5, True, False, "2"):
        try:
            kind.model_validate({name: value})
            wrong = False
        except ValidationError as error:
            wrong = any(each["loc"][:1] == (name,) for each in error.errors())
        assert wrong != jsonschema_rs.is_valid(schema, {name: value}), value


@pytest.mark.parametrize("ids", [[5.0, 6.0], [[5.0, 6.0]], [5, 6.0]])
def test_token_ids_may_have_a_point(server, ids):
    body = {"max_tokens": 3.0, "seed": 7.0, "stop_token_ids": [9.0]}
    (expected,) = server.post("/v1/completions", {**body, "prompt": [5, 6]}).json()["choices"]
    assert server.post("/v1/completions", {**body, "prompt": ids}).json()["choices"] == [expected]
    assert server.post("/v1/completions", {**body, "prompt": [5.0, 6.5]}).json()["error"]["param"] == "prompt.1"


def test_errors_are_described(description):
    for path, method, operation in operations(description):
        assert "422" not in operation["responses"]
        for status, response in operation["responses"].items():
            if status != "200":
                schema = response["content"]["application/json"]["schema"]
                forms = {"/api/": "OllamaError", "/v1/messages": "AnthropicError"}
                form = next((form for prefix, form in forms.items() if path.startswith(prefix)), "Error")
                assert schema == {"$ref": f"#/components/schemas/{form}"}, (path, method, status)
    statuses = set(description["paths"]["/v1/chat/completions"]["post"]["responses"])
    assert statuses == {"200", "400", "403", "404", "408", "413", "429", "500", "503", "504"}
    assert "HTTPValidationError" not in description["components"]["schemas"]
    assert set(description["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}


def test_the_key_is_described_where_it_is_needed(served, description):
    assert all("security" not in op and "401" not in op["responses"] for _, _, op in operations(description))
    assert "securitySchemes" not in description["components"]
    with run_server(served, ServerOptions(served_model_name="tiny", api_key="s3cret")) as locked:
        described = locked.http.get("/openapi.json", headers={"Authorization": "Bearer s3cret"}).json()
        (name,) = described["components"]["securitySchemes"]
        assert described["components"]["securitySchemes"][name] == {"type": "http", "scheme": "bearer"}
        for path, method, operation in operations(described):
            refused = locked.http.request(method.upper(), path.replace("{name}", "tiny")).status_code == 401
            assert operation.get("security", []) == ([{name: []}] if refused else []), path
            assert ("401" in operation["responses"]) == refused


def test_the_values_that_this_server_takes(description):
    schemas = description["components"]["schemas"]
    assert schemas["ChatRequest"]["properties"]["model"]["enum"] == ["tiny", None]
    assert schemas["Chat"]["properties"]["model"]["enum"] == ["tiny"]
    wish = schemas["Speculative"]["properties"]
    assert wish["method"]["enum"] == ["draft_model", "ngram", "pattern", "none", None]

"""Fields that clients send beside OpenAI's: taken, or ignored and named, or refused by a strict server."""

import pytest
from running import run_server

from forerun.models.text.chat import render_chat
from forerun.serve.app import ServerOptions

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, OLLAMA = "/v1/messages", "/api/chat"
BODIES = {
    COMPLETIONS: {"prompt": "a = ", "max_tokens": 3, "seed": 1},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "seed": 1},
    RESPONSES: {"input": "hi", "max_output_tokens": 3, "seed": 1},
}
THOUGHT = {
    RESPONSES: {"input": "hi", "max_output_tokens": 12, "temperature": 0},
    MESSAGES: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0},
    OLLAMA: {"messages": [{"role": "user", "content": "hi"}], "stream": False,
             "options": {"num_predict": 12, "temperature": 0}},
}  # fmt: skip
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{{ '<think></think>' if enable_thinking is defined and not enable_thinking }}{{ reasoning_effort }}{{ who }}"
    "{% endif %}"
)


@pytest.fixture(scope="module")
def thinking(served):
    with run_server(served, ServerOptions(served_model_name="tiny", chat_template=THINKING)) as running:
        yield running


@pytest.fixture(scope="module")
def strict(served):
    options = ServerOptions(served_model_name="tiny", chat_template=THINKING, strict=True, any_model_name=True)
    with run_server(served, options) as running:
        yield running


def said(answer):
    assert answer.status_code == 200, answer.text
    body = answer.json()
    if "output" in body:
        return body["output"][0]["content"][0]["text"]
    if "content" in body:
        return body["content"][0]["text"]
    choice = body["choices"][0] if "choices" in body else body
    return choice["message"]["content"] if "message" in choice else choice["text"]


@pytest.mark.parametrize("path", BODIES)
def test_unknown_fields_are_ignored_and_named(server, strict, caplog, path):
    odd = {"keep_alive": "5m", "t_max_predict_ms": True, "options": {"a": 1}, "a\r\nb: \u00e9" + "c" * 90: 0}
    for stream in (False, True):
        answer = server.post(path, {**BODIES[path], **odd, "stream": stream})
        assert answer.status_code == 200, answer.text
        names = answer.headers["forerun-ignored"].split(", ")
        assert names == ["keep_alive", "t_max_predict_ms", "options", ("a??b???" + "c" * 90)[:64]]
        if not stream:
            assert said(answer) == said(server.post(path, BODIES[path]))
    lines = [record.getMessage() for record in caplog.records if f"of {path} is ignored" in record.getMessage()]
    assert len(lines) == len(set(lines))
    many = server.post(path, {**BODIES[path], **{f"f{index}": 1 for index in range(2000)}})
    assert len(many.headers["forerun-ignored"].split(", ")) == 32
    for name, value in odd.items():
        answer = strict.post(path, {**BODIES[path], name: value})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "unknown_field", name)
        assert "\n" not in error["message"]
    assert strict.post(path, BODIES[path]).status_code == 200


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
WITHIN = [
    (CHAT, {"messages": [{"role": "user", "content": "hi", "x": 1}]}, "messages.x"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]}, "messages.content.x"),
    (CHAT, {"messages": [
        {"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [{**CALL, "x": 1}]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
    ]}, "messages.tool_calls.x"),
    (CHAT, {"tools": [{**TOOL, "x": 1}]}, "tools.x"),
    (CHAT, {"tools": [{**TOOL, "function": {**TOOL["function"], "x": 1}}]}, "tools.function.x"),
    (CHAT, {"response_format": {"type": "text", "x": 1}}, "response_format.x"),
    (COMPLETIONS, {"structured_outputs": {"choice": ["a", "b"], "x": True}}, "structured_outputs.x"),
    (COMPLETIONS, {"prediction": {"type": "content", "content": "a", "x": 1}}, "prediction.x"),
    (RESPONSES, {"input": [{"role": "user", "content": "hi", "x": 1}]}, "input.x"),
    (RESPONSES, {"text": {"format": {"type": "text"}, "x": 1}}, "text.x"),
    (RESPONSES, {"tools": [{"type": "function", "name": "f", "x": 1}]}, "tools.x"),
    (OLLAMA, {**THOUGHT[OLLAMA], "tools": [{**TOOL, "x": 1}]}, "tools.x"),
    ("/tokenize", {"prompt": "a", "x": 1}, "x"),
    ("/tokenize", {"messages": [{"role": "user", "content": "hi", "x": 1}]}, "messages.x"),
    ("/detokenize", {"tokens": [5], "x": 1}, "x"),
    ("/apply-template", {"messages": [{"role": "user", "content": "hi"}], "x": 1}, "x"),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi", "x": 1}]}, "messages.x"),
]  # fmt: skip


def without_x(value):
    if isinstance(value, list):
        return [without_x(each) for each in value]
    return {k: without_x(each) for k, each in value.items() if k != "x"} if isinstance(value, dict) else value


@pytest.mark.parametrize(("path", "fields", "name"), WITHIN)
def test_unknown_fields_within_objects_are_ignored_and_named(server, strict, path, fields, name):
    body = {**BODIES.get(path, {}), **fields}
    odd, plain = (server.post(path, each) for each in (body, without_x(body)))
    assert odd.status_code == 200, odd.text
    assert odd.headers["forerun-ignored"] == name
    assert "forerun-ignored" not in plain.headers
    if path in (COMPLETIONS, CHAT, RESPONSES):
        usage = [answer.json()["usage"] for answer in (odd, plain)]
        assert said(odd) == said(plain)
        assert usage[0].get("prompt_tokens") == usage[1].get("prompt_tokens")
        assert usage[0].get("input_tokens") == usage[1].get("input_tokens")
    elif path != OLLAMA:
        assert odd.json() == plain.json()
    refused = strict.post(path, body)
    assert refused.status_code == 400, refused.text
    assert f"unknown field '{name}'" in refused.text


@pytest.mark.parametrize(("field", "value"), [
    ("n_predict", "x"), ("n_predict", -2), ("repeat_penalty", 0), ("repeat_penalty", "x"), ("repeat_penalty", [1]),
])  # fmt: skip
def test_errors_name_the_field_that_was_sent(server, field, value):
    for path, given in ((CHAT, {}), (COMPLETIONS, {"max_tokens": None, "repetition_penalty": None})):
        body = {**BODIES[path], field: value}
        body = {name: each for name, each in body.items() if name != "max_tokens"} | given
        error = server.post(path, body).json()["error"]
        assert error["param"] == field
        assert error["message"].startswith(f"{field}: ")


def test_any_name_of_a_model_is_served_where_that_is_wanted(server, strict):
    for path, body in BODIES.items():
        assert server.post(path, {**body, "model": "gpt-4o"}).status_code == 404
        answer = strict.post(path, {**body, "model": "gpt-4o"})
        assert (answer.status_code, answer.json()["model"]) == (200, "tiny")
    assert strict.http.get("/v1/models/gpt-4o").json()["id"] == "tiny"


OFF, EFFORT = {"enable_thinking": False}, {"reasoning_effort": "low"}


@pytest.mark.parametrize(("options", "variables"), [
    (OFF, OFF),
    ({"chat_template_kwargs": {**OFF, "who": "me"}}, {**OFF, "who": "me"}),
    ({**EFFORT, "enable_thinking": True}, EFFORT),
    ({**EFFORT, "chat_template_kwargs": {"reasoning_effort": "high"}}, {"reasoning_effort": "high"}),
])  # fmt: skip
def test_variables_reach_the_template(served, thinking, options, variables):
    messages = BODIES[CHAT]["messages"]
    text = render_chat(served.tokenizer, messages, chat_template=THINKING, chat_template_kwargs=variables)
    assert text != render_chat(served.tokenizer, messages, chat_template=THINKING)
    answer = thinking.post(CHAT, {**BODIES[CHAT], **options})
    assert "forerun-ignored" not in answer.headers
    assert said(answer) == said(thinking.post(COMPLETIONS, {**BODIES[COMPLETIONS], "prompt": text}))


HIGH = {"enable_thinking": True, "reasoning_effort": "high"}
ON = {"type": "enabled", "budget_tokens": 1024}


@pytest.mark.parametrize(("path", "fields", "variables", "ignored"), [
    (RESPONSES, {"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}, None),
    (RESPONSES, {"reasoning": {"effort": "high", "summary": "auto"}}, {"reasoning_effort": "high"}, "reasoning"),
    (MESSAGES, {}, OFF, None),
    (MESSAGES, {"thinking": ON}, {"enable_thinking": True}, "thinking.budget_tokens"),
    (MESSAGES, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, HIGH, None),
    (OLLAMA, {"think": False}, OFF, None),
    (OLLAMA, {"think": True}, {"enable_thinking": True}, None),
    (OLLAMA, {"think": "high"}, HIGH, None),
])  # fmt: skip
def test_thinking_by_other_names_reaches_the_template(thinking, path, fields, variables, ignored):
    answer = thinking.post(path, {**THOUGHT[path], **fields})
    chat = {**BODIES[CHAT], "max_tokens": 12, "temperature": 0, "chat_template_kwargs": variables}
    assert said(answer) == said(thinking.post(CHAT, chat))
    assert answer.headers.get("forerun-ignored") == ignored


def test_variables_that_a_template_does_not_have_are_named(server):
    answer = server.post(CHAT, {**BODIES[CHAT], **OFF, **EFFORT})
    assert answer.headers["forerun-ignored"] == "reasoning_effort, enable_thinking"
    answer = server.post(CHAT, {**BODIES[CHAT], "chat_template_kwargs": {**OFF, "a(\n": 1}})
    assert answer.headers["forerun-ignored"] == "chat_template_kwargs.enable_thinking, chat_template_kwargs.a??"
    answer = server.post(CHAT, {**BODIES[CHAT], "chat_template_kwargs": {"messages": []}})
    assert answer.json()["error"]["message"] == "chat_template_kwargs: messages is no variable of a template"


@pytest.mark.parametrize(("path", "field", "given"), [
    (CHAT, "chat_template_kwargs", {"日" * 999: 1, **dict.fromkeys(map(str, range(2000)), 1)}),
    (OLLAMA, "options", {"日" * 999: 1, **dict.fromkeys(map(str, range(2000)), 1), "num_predict": 3}),
    (RESPONSES, "include", ["a" * 64, *map(str, range(2000))]),
])  # fmt: skip
def test_names_of_any_kind_and_number_fit_into_the_header(server, caplog, path, field, given):
    for stream in (False, True):
        answer = server.post(path, {**BODIES.get(path, THOUGHT.get(path)), field: given, "stream": stream})
        assert answer.status_code == 200, answer.text
        names = answer.headers["forerun-ignored"].split(", ")
        assert len(names[0]) == 64
        assert names[1:] == [f"{field}.{index}" for index in range(31)]
    assert sum("is ignored" in record.getMessage() for record in caplog.records) == 32


def test_the_last_message_goes_on(thinking):
    begun = [*BODIES[CHAT]["messages"], {"role": "assistant", "content": "def parse("}]
    plain = thinking.post(COMPLETIONS, {**BODIES[COMPLETIONS], "prompt": "<user>hi\n<assistant>def parse("})
    for options in ({}, {"add_generation_prompt": False}):
        answer = thinking.post(CHAT, {**BODIES[CHAT], "messages": begun, "continue_final_message": True, **options})
        assert said(answer) == said(plain)
    counts = [
        thinking.post(CHAT, {**BODIES[CHAT], "add_generation_prompt": begins}).json()["usage"]["prompt_tokens"]
        for begins in (False, True, None)
    ]
    assert counts[0] < counts[1] == counts[2]


def test_llama_cpps_names_of_fields(server):
    about = {"prompt": "a = ", "seed": 1}
    ours = server.post(COMPLETIONS, {**about, "max_tokens": 5, "repetition_penalty": 1.3})
    theirs = server.post(COMPLETIONS, {**about, "n_predict": 5, "repeat_penalty": 1.3})
    assert said(ours) == said(theirs)
    assert "forerun-ignored" not in theirs.headers
    endless = server.post(COMPLETIONS, {**about, "n_predict": -1, "ignore_eos": True}).json()
    assert endless["usage"]["total_tokens"] == 512

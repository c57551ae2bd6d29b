"""Tools over HTTP, with a model that knows nothing of them: what it must call it calls rightly. Calls read out of texts
do not depend on where the pieces were cut."""

import copy
import json
import re

import jsonschema_rs
import pytest
from running import ASK, HERMES, client_of, closed
from transformers import AddedToken

from forerun.models.text.chat import render_chat
from forerun.models.text.tokenizer import load_tokenizer
from forerun.serve.text import TextService
from forerun.serve.tools.base import ToolParser
from forerun.serve.tools.grammar import MAX_FORCED_CALLS

CHAT = "/v1/chat/completions"
DATE = {
    "type": "object",
    "properties": {"day": {"type": "integer", "minimum": 1, "maximum": 31}, "month": {"$ref": "#/$defs/month"}},
    "required": ["day", "month"],
    "$defs": {"month": {"enum": ["may", "june"]}},
}
COLOUR = {"properties": {"names": {"type": "array", "items": {"enum": ["red", 'a "b"']}, "maxItems": 2}}}


def tool(name, parameters=None):
    function = {"name": name, "description": f"{name} it", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [tool("set_date", DATE), tool("paint", COLOUR), tool("stop")]
SCHEMAS = {"set_date": DATE, "paint": COLOUR, "stop": {"properties": {}, "additionalProperties": False}}
BODY = {"messages": ASK, "tools": TOOLS, "tool_choice": "required", "max_tokens": 300}
CHOSEN = {"type": "function", "function": {"name": "set_date"}}


@pytest.fixture
def client(hermes):
    with client_of(hermes) as client:
        yield client


def calls_of(choice):
    calls = choice["message"].get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", call["id"]) for call in calls)  # as Mistral's templates demand
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def check_calls(calls):
    assert calls
    for name, arguments in calls:
        jsonschema_rs.validator_for(SCHEMAS[name]).validate(json.loads(arguments))


def together(events):
    """A stream as the whole answer's choice."""
    message = {"content": "", "tool_calls": []}
    finish = None
    for line in events.split("\n\n"):
        if not line or line.endswith("[DONE]"):
            continue
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        message["content"] += choice["delta"].get("content", "")
        for new in choice["delta"].get("tool_calls", []):
            if "id" in new:
                assert (new["index"], new["type"]) == (len(message["tool_calls"]), "function")
                message["tool_calls"].append(new)
            else:
                assert set(new["function"]) == {"arguments"}
                message["tool_calls"][new["index"]]["function"]["arguments"] += new["function"]["arguments"]
        assert finish is None
        finish = choice["finish_reason"]
    return {"message": message, "finish_reason": finish}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("wish", ["required", CHOSEN], ids=["required", "named"])
def test_a_call_that_is_asked_for_is_valid(hermes, seed, wish):
    body = {**BODY, "tool_choice": wish, "seed": seed}
    (choice,) = hermes.post(CHAT, body).json()["choices"]
    calls = calls_of(choice)
    check_calls(calls)
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    if wish == CHOSEN:
        assert [name for name, _ in calls] == ["set_date"]
    tiled = together(hermes.post(CHAT, {**body, "stream": True}).text)
    assert calls_of(tiled) == calls
    assert (tiled["message"]["content"], tiled["finish_reason"]) == ("", "tool_calls")


def test_several_calls_come_unless_one_alone_is_wanted(hermes):
    seen = []
    for seed in range(8):
        several = calls_of(hermes.post(CHAT, {**BODY, "seed": seed}).json()["choices"][0])
        one = calls_of(hermes.post(CHAT, {**BODY, "seed": seed, "parallel_tool_calls": False}).json()["choices"][0])
        check_calls(several)
        assert one == several[:1]
        seen.append(len(several))
    assert max(seen) > 1
    assert max(seen) <= MAX_FORCED_CALLS


def test_a_call_that_is_cut_off_says_so(hermes):
    body = {**BODY, "tool_choice": CHOSEN, "max_tokens": 30, "seed": 1}
    full = calls_of(hermes.post(CHAT, {**body, "max_tokens": 300}).json()["choices"][0])
    (choice,) = hermes.post(CHAT, body).json()["choices"]
    assert choice["finish_reason"] == "length"
    ((name, arguments),) = calls_of(choice)
    assert name == "set_date"
    assert full[0][1].startswith(arguments)
    assert arguments != full[0][1]
    assert calls_of(together(hermes.post(CHAT, {**body, "stream": True}).text)) == [(name, arguments)]


def test_a_call_that_is_cut_off_before_its_name_is_none(hermes):
    body = {**BODY, "max_tokens": 3}
    (choice,) = hermes.post(CHAT, body).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None}
    assert choice["finish_reason"] == "length"
    tiled = together(hermes.post(CHAT, {**body, "stream": True}).text)
    assert tiled == {"message": {"content": "", "tool_calls": []}, "finish_reason": "length"}


def test_the_openai_package(client):
    """Its own types, and an answer's message back in the next request; streams are in ``test_serving_page``."""
    options = {"model": "tiny", "tools": TOOLS, "seed": 3, "tool_choice": CHOSEN}
    answer = client.chat.completions.create(messages=ASK, **options)
    (call,) = answer.choices[0].message.tool_calls or []
    check_calls([(call.function.name, call.function.arguments)])
    counts = []
    for content in ("done", [{"type": "text", "text": "done"}]):
        turns = [*ASK, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": content}]
        again = client.chat.completions.create(messages=turns, **options)
        assert again.choices[0].finish_reason == "tool_calls"
        counts.append(again.usage.prompt_tokens)
    assert answer.usage.prompt_tokens < counts[0] == counts[1]


def text_of(server, **body):
    tokens = server.post("/tokenize", body).json()["tokens"]
    return server.post("/detokenize", {"tokens": tokens}).json()["prompt"]


CALL = {"id": "call_1", "type": "function", "function": {"name": "set_date", "arguments": '{"day":3}'}}
HISTORY = [
    {"role": "system", "content": "Be brief."},
    *ASK,
    {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "call_2"}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "no"}]},
]


def test_markers_that_are_special_tokens_are_not_left_out(served):
    tokenizer = copy.deepcopy(served.tokenizer)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    assert not TextService(tokenizer, 512, HERMES).special_markers(tools=True)
    tokenizer = copy.deepcopy(served.tokenizer)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=True)], special_tokens=True)
    assert tokenizer.decode(tokenizer.encode("<tool_call>"), skip_special_tokens=True) == ""
    assert set(TextService(tokenizer, 512, HERMES).special_markers(tools=True)) == {"<tool_call>"}
    assert not TextService(tokenizer, 512, HERMES).special_markers(tools=False)


def test_tools_that_may_not_be_called_are_not_there(server):
    plain = server.post(CHAT, {"messages": ASK, "max_tokens": 8, "seed": 1}).json()
    none = server.post(CHAT, {**BODY, "tool_choice": "none", "max_tokens": 8, "seed": 1}).json()
    assert none["choices"] == plain["choices"]
    assert none["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


def test_tools_that_may_be_called_leave_the_text_alone(server):
    """A model that calls nothing answers as it would anyway, after the same prompt."""
    body = {**BODY, "tool_choice": "auto", "max_tokens": 24, "seed": 4}
    (choice,) = server.post(CHAT, body).json()["choices"]
    prompt = server.post("/tokenize", {"messages": ASK, "tools": TOOLS}).json()["tokens"]
    plain = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 24, "seed": 4}).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": plain["text"], "refusal": None}
    assert together(server.post(CHAT, {**body, "stream": True}).text)["message"]["content"] == plain["text"]


@pytest.mark.parametrize(("unwanted", "called"), [("{", True), ("<", False)])
def test_a_response_format_binds_what_is_no_call(hermes, served, unwanted, called):
    first = {str(i): -100 for token, i in served.tokenizer.get_vocab().items() if token.startswith(unwanted)}
    schema = closed({"ok": {"type": "boolean"}}, "ok")
    wish = {"type": "json_schema", "json_schema": {"name": "ok", "schema": schema}}
    body = {**BODY, "tool_choice": "auto", "response_format": wish, "logit_bias": first, "seed": 2}
    (choice,) = hermes.post(CHAT, body).json()["choices"]
    if called:
        check_calls(calls_of(choice))
    else:
        assert set(json.loads(choice["message"]["content"])) == {"ok"}
        assert choice["finish_reason"] == "stop"


def nested(depth):
    schema = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def history(**changes):
    return {"messages": [*ASK, {**HISTORY[2], **changes}]}


def called(arguments):
    return history(tool_calls=[{**CALL, "function": {"name": "set_date", "arguments": arguments}}])


WRONG = [
    ({"tools": []}, "tools", "at least 1 item"),
    ({"tools": [tool(f"f{i}") for i in range(200)]}, "tools", "at most 128 items, not 200"),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "Field required"),
    ({"tools": [{**tool("a"), "type": "web_search"}]}, "tools.0.type", "'function'"),
    ({"tools": [tool("a b")]}, "tools.0.function.name", "match pattern"),
    ({"tools": [tool("a"), tool("a")]}, "tools", "two tools are called 'a'"),
    ({"tools": [tool("a", "x")]}, "tools.0.function.parameters", "must be an object"),
    ({"tools": [tool("a", {"type": "string"})]}, "tools.0.function.parameters", "must be the schema of an object"),
    ({"tools": [tool("a", nested(40))]}, "tools.0.function.parameters", "more than 64 objects and lists within"),
    ({"tools": [tool("a", {"properties": {"b": {"type": "nonsense"}}})], "tool_choice": "required"}, "tools",
     "nonsense"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice",
     "there is no tool 'other' among tools"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "'none', 'auto' or 'required'"),
    ({"tools": TOOLS, "tool_choice": 3}, "tool_choice", "must be 'none', 'auto', 'required' or an object"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function", "Field required"),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
    ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, None, "structured_outputs excludes tools"),
    ({"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"choice": ["a"]}}, None, "excludes tools"),
    ({"tools": TOOLS, "response_format": {"type": "json_schema", "json_schema": {"schema": False}}}, None,
     "the schema of response_format is false, which no answer can meet"),
    ({"functions": [{"name": "a"}]}, "functions", "functions are called tools now"),
    (history(tool_calls=None, function_call={"name": "a"}), "messages.1.function_call", "called tools now"),
    ({"messages": [{"role": "function", "name": "a", "content": "x"}]}, "messages.0.role", "'assistant' or 'tool'"),
    (history(role="user"), "messages.1.tool_calls", "goes with the role assistant"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "a text or a list of text parts"),
    (history(tool_calls=[{"id": "a"}]), "messages.1.tool_calls.0.function", "Field required"),
    (history(tool_calls=[{**CALL, "id": ""}]), "messages.1.tool_calls.0.id", "at least 1 character"),
    (called({"day": 3}), "messages.1.tool_calls.0.function.arguments", "valid string"),
    ({"messages": [*ASK, {"role": "tool", "content": "x"}]}, "messages.1", "tool_call_id goes with the role tool"),
    ({"messages": [*ASK, HISTORY[3]]}, "messages", "message 1 answers the call 'call_1', which no message before made"),
]  # fmt: skip


BROKEN = ['{"', '{"a": "b', '{"a": 1}{"b": 2}', "[]", '{"a": NaN}', '{"a": "\\ud800"}', '{"a":' * 70 + "1" + "}" * 70]
LISTING = (  # as Qwen3-Coder's lists parameters
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% for key, value in c.function.arguments | items %}({{ key }}: {{ value }}){% endfor %}{% endfor %}/{% endfor %}"
)
FILLING = LISTING.replace("key, value in c.function.arguments | items", "key in c.function.arguments").replace(
    "{{ value }}", "{{ c.function.arguments[key] }}"
)
WRITING = "{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}/{% endfor %}"


@pytest.mark.parametrize("arguments", BROKEN, ids=range(len(BROKEN)))
def test_calls_with_broken_arguments_are_shown_as_they_are(server, arguments):
    """max_tokens cuts a call off, and the conversation goes on: whatever an answer had may be sent back."""
    body, tokenizer = called(arguments), load_tokenizer("forerun:target")
    assert server.post(CHAT, {**body, "max_tokens": 2}).status_code == 200
    written = f'<tool_call>\n{{"name": "set_date", "arguments": {arguments}}}\n</tool_call>'
    assert written in text_of(server, **body)
    listed = f"(arguments: {arguments})"
    for template, written in ((LISTING, listed), (FILLING, listed), (WRITING, json.dumps(arguments))):
        assert written in render_chat(tokenizer, body["messages"], chat_template=template)
    items = [{"type": "function_call", "call_id": "a", "name": "f", "arguments": arguments}]
    assert server.post("/v1/responses", {"input": items, "max_output_tokens": 2}).status_code == 200


def test_raw_line_ends_and_large_numbers_in_arguments_are_read(server):
    said = text_of(server, **called('{"a": "b\nc", "d": 1e999}'))
    assert '"arguments": {"a": "b\\nc", "d": 1.7976931348623157e+308}' in said


@pytest.mark.parametrize("more", [{}, {"reasoning_content": "Hm."}, {"tool_calls": []}, {"refusal": None}])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_an_assistant_may_have_said_nothing(server, content, more):
    messages = [*ASK, {"role": "assistant", **content, **more}, {"role": "user", "content": "Go on."}]
    assert server.post(CHAT, {"messages": messages, "max_tokens": 2}).status_code == 200
    assert text_of(server, messages=messages) == "<user>hi\n<assistant>\n<user>Go on.\n<assistant>"


def test_schemas_that_are_too_large_for_a_grammar_are_refused(hermes):
    large = [tool("a", {"properties": {"b": {"const": "x" * 70000}}})]
    answer = hermes.post(CHAT, {**BODY, "tools": large})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    assert "exceed max_grammar_bytes 65536" in answer.json()["error"]["message"]
    assert hermes.post(CHAT, {**BODY, "tools": large, "tool_choice": "auto", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(("body", "param", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_bodies(server, body, param, message):
    answer = server.post(CHAT, {"messages": ASK, "max_tokens": 4, **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert message in error["message"]
    assert error["param"] == param
    assert "\n" not in error["message"]
    assert "Traceback" not in answer.text


NAMES = {"get_weather": {}, "add": {}, "add_more": {}}
A = '{"city": "Pa}{\\"ris"}'
CASES = [
    ("", "", []),
    ("hello", "hello", []),
    (" \n hello \n", " \n hello \n", []),
    ("a < b <tool_cal", "a < b <tool_cal", []),
    (f'<tool_call>\n{{"name": "get_weather", "arguments": {A}}}\n</tool_call>', "", [("get_weather", A)]),
    (f'<tool_call>{{"name":"get_weather","arguments":{A}}}</tool_call>', "", [("get_weather", A)]),
    (f'Let me see.\n\n<tool_call>{{"name": "unheard_of", "arguments": {A}}}', "Let me see.", [("unheard_of", A)]),
    (
        f'<tool_call>{{"name": "add", "arguments": {{}}}}</tool_call>\n<tool_call>\n{{"name": "get_weather", '
        f'"arguments": {A}}}\n</tool_call>\n',
        "",
        [("add", "{}"), ("get_weather", A)],
    ),
    (f'<tool_call>{{"arguments": {A}, "name": "add"}}</tool_call> x', " x", [("add", json.dumps(json.loads(A)))]),
    ('<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
    (
        '<tool_call>[{"name": "add", "arguments": {"a": 1}}, {"name": "add_more"}]</tool_call>',
        "",
        [("add", '{"a": 1}'), ("add_more", "{}")],
    ),
    ('<tool_call>{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1')]),
    ('<tool_call>{"name": "add", "arguments": {"a": 1}, "id": [3, "}"]} done', "done", [("add", '{"a": 1}')]),
    ("<tool_call>nothing</tool_call>", "<tool_call>nothing</tool_call>", []),
    ('<tool_call>{"no": 1}</tool_call> x', '<tool_call>{"no": 1}</tool_call> x', []),
    ('<tool_call>{"no": ', '<tool_call>{"no": ', []),
    ('<tool_call>{bad}<tool_call>{"name": "add"}', "<tool_call>{bad}", [("add", "{}")]),
    ('{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    (' <|python_tag|>{"name": "x", "parameters": {"a": 1}}', "", [("x", '{"a": 1}')]),
    ('{"type": "function", "name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    ('{"name": "add", "parameters": {}}; {"name": "add_more", "parameters": {}}', "",
     [("add", "{}"), ("add_more", "{}")]),
    ('{"name": "Ada", "parameters": {"a": 1}}', '{"name": "Ada", "parameters": {"a": 1}}', []),
    ('{"name": "add", "age": 3}', '{"name": "add", "age": 3}', []),
    ('{"name": "ad', '{"name": "ad', []),
    ('{"n\\u0061me": "add", "parameters": {}}', '{"n\\u0061me": "add", "parameters": {}}', []),
    ('{"name": "\\u0061dd", "parameters": {}}', '{"name": "\\u0061dd", "parameters": {}}', []),
    ('so: {"name": "add", "parameters": {}}', 'so: {"name": "add", "parameters": {}}', []),
    ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
]  # fmt: skip


def read(parser, pieces):
    """Thoughts, text and calls of a text in ``pieces``, put together as a client does; the parser has seen the same."""
    thoughts, content, calls, ids = "", "", [], []
    for index, piece in enumerate(pieces):
        for new in parser.push(piece, last=index == len(pieces) - 1):
            if new.call is None:
                thoughts += new.text if new.reasoning else ""
                content += "" if new.reasoning else new.text
                continue
            if new.begins:
                calls.append([new.call.name, ""])
                ids.append(new.call.id)
            assert new.call.index == len(calls) - 1
            calls[-1][1] += new.text
    result = [(name, arguments) for name, arguments in calls]
    assert result == [(call.name, call.arguments) for call in parser.calls]
    assert len(set(ids)) == len(ids)
    return thoughts, content, result


def told(parser, pieces):
    return read(parser, pieces)[1:]


@pytest.mark.parametrize(("text", "content", "calls"), CASES, ids=range(len(CASES)))
def test_texts(text, content, calls):
    assert told(ToolParser(NAMES), [text]) == (content, calls)
    assert told(ToolParser(NAMES), [*text, ""]) == (content, calls)


PARSER_CALL = '{\n  "name": "add",\n  "arguments": {\n    "a": 1\n  }\n}'
ADD = [("add", '{"a": 1}')]
FENCED = [
    (f"```json\n{PARSER_CALL}\n```", ADD),
    (f" \n```\n{PARSER_CALL}\n```\n", ADD),
    ('```json{"name": "add", "parameters": {"a": 1}}```', ADD),
    (f"Here it is:\n```json\n{PARSER_CALL}\n```", []),
    (f"```json\n{PARSER_CALL}\n```\nThat is it.", []),
    (f"```json\n{PARSER_CALL}\n", []),
    (f"```json\n{PARSER_CALL}\n{PARSER_CALL}\n```", []),
    (f"```python\n{PARSER_CALL}\n```", []),
    ('```json\n{"name": "Ada", "arguments": {"a": 1}}\n```', []),
    ('```json\n{"name": "add", "age": 3}\n```', []),
    ('```json\n{"name": "add", "arguments": {"a": 1', []),
    ('```json\n{"name": "add", "arguments": {"a": 1 2}}\n```', []),
    ("```json", []),
    ("``", []),
    ("```json\n[1]\n```", []),
]


@pytest.mark.parametrize(("text", "calls"), FENCED, ids=range(len(FENCED)))
@pytest.mark.parametrize("fenced", [True, False])
def test_a_block_of_markdown_is_a_call_where_the_answer_is_nothing_else(text, calls, fenced):
    expected = ("", calls) if calls and fenced else (text, [])
    assert told(ToolParser(NAMES, fenced=fenced), [text]) == expected
    assert told(ToolParser(NAMES, fenced=fenced), [*text, ""]) == expected


def test_a_block_that_is_no_call_is_reported_as_soon_as_that_is_clear():
    parser = ToolParser(NAMES, fenced=True)
    assert not parser.push("```json\n{")
    assert [new.text for new in parser.push('"n')] == []
    assert [new.text for new in parser.push("o")] == ['```json\n{"no']
    parser = ToolParser(NAMES, fenced=True)
    assert not parser.push(f"```json\n{PARSER_CALL}\n```\n")
    assert [new.text for new in parser.push("So")] == [f"```json\n{PARSER_CALL}\n```\nSo"]


def test_nothing_is_held_back_but_what_may_begin_a_call():
    parser = ToolParser(NAMES)
    shown = [sum(len(new.text) for new in parser.push(letter)) for letter in "is 1 <2 <to"]
    assert shown == [1, 1, 0, 2, 0, 0, 3, 0, 0, 0, 0]
    assert [new.text for new in parser.push("ld")] == [" <told"]
    parser = ToolParser(NAMES)
    assert not parser.push('{"name": "ad')
    assert parser.push("x")[0].text == '{"name": "adx'


def test_arguments_come_as_they_are_written():
    parser = ToolParser(NAMES)
    assert not parser.push('<tool_call>{"name": "add", "arguments": ')
    (first,) = parser.push('{"a"')
    assert (first.begins, first.call.name if first.call else None, first.text) == (True, "add", '{"a"')
    (second,) = parser.push(": 1")
    assert (second.begins, second.text) == (False, ": 1")
    (third,) = parser.push("}}")
    assert third.text == "}"
    assert not parser.push("</tool_call>", last=True)


@pytest.mark.parametrize(
    "text", ["<tool_call>{" * 3000, "<tool_call>" * 3000, "\n" * 30000, '{"name": "' + "a" * 30000]
)
def test_long_texts_take_no_time(text):
    content, calls = told(ToolParser({"a" * 40000: {}}), [text])
    assert (content, calls) == (text, [])

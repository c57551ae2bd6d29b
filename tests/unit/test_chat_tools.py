"""Tools in ``LLM.chat``: told through the template where it knows them, in words where it does not."""

import json

import pytest

from forerun import SamplingParams
from forerun.core.errors import RequestError
from forerun.models.chat import CallForm, call_form, conversations, render_chat

PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}/{% endfor %}"
KNOWING = (
    "{% for t in tools or [] %}({{ t.function.name }}){% endfor %}{% for m in messages %}[{{ m.role }}"
    "{{ ' ' + m.name if m.name }}] {{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}={{ c.function.arguments | tojson }}{% endfor %}/{% endfor %}"
)
ONE = SamplingParams(temperature=0, max_tokens=1)
ASK = {"role": "user", "content": "sum?"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": [1, "\u00e9"]}'}}
CALLED = [ASK, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c", "content": "1"}]


def prompt(llm, messages, template, **options):
    return render_chat(llm().tokenizer, messages, chat_template=template, add_generation_prompt=False, **options)


def test_a_template_that_knows_tools_writes_them(llm):
    (answer,) = llm().chat([ASK], ONE, chat_template=KNOWING, tools=[ADD])
    assert answer.prompt == prompt(llm, [ASK], KNOWING, tools=[ADD]) == "(add)[user] sum?/"
    assert prompt(llm, CALLED, KNOWING) == '[user] sum?/[assistant] add={"a": [1, "\u00e9"]}/[tool add] 1/'


def test_any_other_template_has_them_in_words(llm):
    told = prompt(llm, [{"role": "system", "content": "Hi."}, ASK], PLAIN, tools=[ADD, ADD])
    assert told.startswith("[system] Hi.\n\n")
    assert told.endswith("/[user] sum?/")
    assert told.count(json.dumps(ADD["function"])) == 2
    assert prompt(llm, [ASK], PLAIN, tools=[]) == "[user] sum?/"
    call = '<tool_call>\n{"name": "add", "arguments": {"a": [1, "\u00e9"]}}\n</tool_call>'
    answer = "<tool_response>\n1\n</tool_response>"
    assert prompt(llm, CALLED, PLAIN) == f"[user] sum?/[assistant] {call}/[user] {answer}/"
    spoken = [ASK, {**CALLED[1], "content": "Let me see."}, CALLED[2], ASK]
    assert prompt(llm, spoken, PLAIN) == f"[user] sum?/[assistant] Let me see.\n{call}/[user] {answer}/[user] sum?/"


def test_a_model_of_several_templates_uses_the_one_for_tools(llm, monkeypatch):
    monkeypatch.setattr(llm().tokenizer, "chat_template", {"default": PLAIN, "tool_use": KNOWING})
    assert prompt(llm, [ASK], None, tools=[ADD]) == "(add)[user] sum?/"
    assert prompt(llm, [ASK], None) == "[user] sum?/"


@pytest.mark.parametrize(("template", "form"), [
    (PLAIN, CallForm.HERMES),
    (KNOWING, CallForm.HERMES),
    ("{{ tools }} write <tool_call>{\"name\": n, \"parameters\": p}", CallForm.HERMES),
    ("{{ tools }} {{- 'Respond with {\"name\": function name, \"parameters\": dictionary}.' }}", CallForm.LLAMA),
    ('{{ tools }} {{- "{\\"name\\": function name, \\"parameters\\": dictionary}." }}', CallForm.LLAMA),
    ("{{ tools }} {{ '<|python_tag|>' }}", CallForm.LLAMA),
    ("{\"name\": n, \"parameters\": p}", CallForm.HERMES),
])  # fmt: skip
def test_the_form_that_a_template_asks_for(llm, template, form):
    assert call_form(llm().tokenizer, template) is form


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": "add"}, "tools are a list of mappings, not str"),
        ({"tools": [3]}, "a tool is a mapping with a function, which has a name"),
        ({"tools": [{"function": {"name": 3}}]}, "a tool is a mapping with a function, which has a name"),
        ({"messages": [{"role": "assistant", "tool_calls": [3]}]}, "a tool call is a mapping with a function"),
        ({"messages": [{"role": "assistant", "tool_calls": 3}]}, "a tool call is a mapping with a function"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": 3}}]}]},
         "arguments: must be a JSON object, as text"),
        ({"messages": [{"role": "tool", "content": [1]}]}, "the content of a message of the role tool must be text"),
    ],
)  # fmt: skip
def test_what_is_no_tool_is_refused_in_one_line(llm, options, message):
    given = {"messages": [ASK], "tools": None, **options}
    with pytest.raises(RequestError, match=message) as caught:
        prompt(llm, given["messages"], PLAIN, tools=given["tools"])
    assert "\n" not in str(caught.value)


def test_a_message_without_content_has_calls():
    assert conversations([ASK, CALLED[1]]) == [[ASK, CALLED[1]]]
    with pytest.raises(RequestError, match="a message is a mapping with role and content"):
        conversations([ASK, {"role": "assistant", "tool_calls": []}])

"""Calls read out of texts, whole and in pieces: what comes out does not depend on where the pieces were cut."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.serve.tools import ToolParser

NAMES = ("get_weather", "add", "add_more")
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


def told(parser, pieces):
    """What the stream of a text in ``pieces`` says, put together as a client does; the parser has seen the same."""
    content, calls, ids = "", [], []
    for index, piece in enumerate(pieces):
        for new in parser.push(piece, last=index == len(pieces) - 1):
            if new.call is None:
                content += new.text
                continue
            if new.begins:
                calls.append([new.call.name, ""])
                ids.append(new.call.id)
            assert new.call.index == len(calls) - 1
            calls[-1][1] += new.text
    result = [(name, arguments) for name, arguments in calls]
    assert content == parser.content
    assert result == [(call.name, call.arguments) for call in parser.calls]
    assert len(set(ids)) == len(ids)
    return content, result


@pytest.mark.parametrize(("text", "content", "calls"), CASES, ids=range(len(CASES)))
def test_texts(text, content, calls):
    assert told(ToolParser(NAMES), [text]) == (content, calls)
    assert told(ToolParser(NAMES), [*text, ""]) == (content, calls)


CALL = '{\n  "name": "add",\n  "arguments": {\n    "a": 1\n  }\n}'
ADD = [("add", '{"a": 1}')]
FENCED = [
    (f"```json\n{CALL}\n```", ADD),
    (f" \n```\n{CALL}\n```\n", ADD),
    ('```json{"name": "add", "parameters": {"a": 1}}```', ADD),
    (f"Here it is:\n```json\n{CALL}\n```", []),
    (f"```json\n{CALL}\n```\nThat is it.", []),
    (f"```json\n{CALL}\n", []),
    (f"```json\n{CALL}\n{CALL}\n```", []),
    (f"```python\n{CALL}\n```", []),
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
    assert not parser.push(f"```json\n{CALL}\n```\n")
    assert [new.text for new in parser.push("So")] == [f"```json\n{CALL}\n```\nSo"]


WORDS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<|python_tag|>", "\n", " ", "{", "}", "[", '"', "\\", ";", ",", ": ", "x", "<",
     "Ada", '{"name": "add", "arguments": ', '{"name": "add', '"parameters": {"a": [1]}', '{"type": "function", ',
     '"name": "add"', "```", "```json\n"]
)  # fmt: skip


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(
    st.one_of(st.lists(WORDS, max_size=12).map("".join), st.sampled_from([case[0] for case in (*CASES, *FENCED)])),
    st.data(),
)
def test_cuts_change_nothing(text, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    for fenced in (False, True):
        whole = told(ToolParser(NAMES, fenced=fenced), [text])
        assert told(ToolParser(NAMES, fenced=fenced), pieces) == whole
        assert told(ToolParser(NAMES, 1, fenced=fenced), pieces)[1] == whole[1][:1]


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
    content, calls = told(ToolParser(("a" * 40000,)), [text])
    assert (content, calls) == (text, [])

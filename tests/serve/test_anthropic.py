"""Anthropic's API, spoken by the ``anthropic`` package and by hand."""

import json
from functools import partial
from typing import Literal

import anthropic
import pytest
from pydantic import BaseModel
from running import ASK, TEMPLATE, closed, run_server
from running import chatted as openai_chatted
from test_reasoning import thinking  # noqa: F401 - a fixture

from forerun.serve.app import ServerOptions

GREEDY = {"max_tokens": 24, "temperature": 0}
"""Anthropic's API has no seed."""
chatted = partial(openai_chatted, **GREEDY)
COLD = {"extra_body": {"temperature": 0}}
"""The package has no temperature any more."""
SAME = {"max_tokens": 24, **COLD}
MESSAGES = "/v1/messages"
DIGIT = {"type": "integer", "minimum": 0, "maximum": 99}
ADD = {"name": "add", "description": "add it", "input_schema": closed({"a": DIGIT, "b": DIGIT}, "a", "b")}
ADDED = {"type": "function", "function": {**{key: ADD[key] for key in ("name", "description")},
                                          "parameters": ADD["input_schema"]}}  # fmt: skip


def client_of(running, **options):
    about = {"api_key": "unused", "max_retries": 0, "timeout": 60, **options}
    return anthropic.Anthropic(base_url=running.url, **about)


@pytest.fixture
def client(server):
    with client_of(server) as client:
        yield client


def test_an_answer_is_the_chats(server, client):
    expected = chatted(server)
    answer = client.messages.create(model="tiny", messages=ASK, **SAME)
    (block,) = answer.content
    assert (block.type, block.text) == ("text", expected["choices"][0]["message"]["content"])
    assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("max_tokens", None, "assistant")
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == expected["usage"]["prompt_tokens"]
    assert usage.output_tokens == 24
    assert answer._request_id == answer.id.removeprefix("msg_")
    system = client.messages.create(model="tiny", messages=ASK, system="be brief", **SAME).content[0].text
    blocks = [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "brief"}]
    told = [{"role": "system", "content": "be brief"}, *ASK]
    assert system == chatted(server, told)["choices"][0]["message"]["content"]
    told[0] = {"role": "system", "content": "be\nbrief"}
    answer = client.messages.create(model="tiny", messages=ASK, system=blocks, **SAME)
    assert answer.content[0].text == chatted(server, told)["choices"][0]["message"]["content"]


def test_a_stream_is_the_whole_answer_in_events(server, client):
    whole = client.messages.create(model="tiny", messages=ASK, **SAME)
    events = list(client.messages.create(model="tiny", messages=ASK, stream=True, **SAME))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    with client.messages.stream(model="tiny", messages=ASK, **SAME) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        last = stream.get_final_message()
    assert last.content[0].text == whole.content[0].text
    assert (last.stop_reason, last.usage.output_tokens) == ("max_tokens", 24)
    assert last.usage.input_tokens + last.usage.cache_read_input_tokens == sum(
        (whole.usage.input_tokens, whole.usage.cache_read_input_tokens)
    )


def test_why_it_stopped(server, client):
    text = client.messages.create(model="tiny", messages=ASK, **SAME).content[0].text
    stop = text[5:8]
    answer = client.messages.create(model="tiny", messages=ASK, stop_sequences=["zzzz", stop], **SAME)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == text[: text.index(stop)]
    long = client.messages.create(model="tiny", messages=ASK, max_tokens=32_000, **COLD)
    assert long.stop_reason in ("model_context_window_exceeded", "end_turn")
    prompt = long.usage.input_tokens + long.usage.cache_read_input_tokens
    if long.stop_reason == "model_context_window_exceeded":
        assert prompt + long.usage.output_tokens == 512


def test_texts_of_one_role_are_one_message(server, client):
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": "c"},
                {"role": "assistant", "content": "d"}, *ASK]  # fmt: skip
    joined = [{"role": "user", "content": "a\nb\nc"}, *messages[2:]]
    expected = chatted(server, joined)["choices"][0]["message"]["content"]
    assert client.messages.create(model="tiny", messages=messages, **SAME).content[0].text == expected


def test_the_assistants_last_message_goes_on(server, client):
    begun = [*ASK, {"role": "assistant", "content": "def parse("}]
    expected = chatted(server, begun, continue_final_message=True)["choices"][0]["message"]["content"]
    assert client.messages.create(model="tiny", messages=begun, **SAME).content[0].text == expected


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_tools_are_called_and_answered(hermes, choice):
    with client_of(hermes) as client:
        about = {"model": "tiny", "tools": [ADD], "max_tokens": 200, **COLD}
        wish = {**choice, "disable_parallel_tool_use": True}
        answer = client.messages.create(messages=ASK, tool_choice=wish, **about)
        (call,) = answer.content
        assert (call.type, call.name, answer.stop_reason) == ("tool_use", "add", "tool_use")
        assert set(call.input) == {"a", "b"}
        with client.messages.stream(messages=ASK, tool_choice=wish, **about) as stream:
            parts = [event for event in stream if event.type == "input_json"]
            (streamed,) = stream.get_final_message().content
        assert (streamed.name, streamed.input) == (call.name, call.input)
        assert json.loads("".join(part.partial_json for part in parts)) == call.input
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "3"}]}
        history = [*ASK, {"role": "assistant", "content": answer.content},
                   {"role": "user", "content": [result, {"type": "text", "text": "go on"}]}]  # fmt: skip
        last = client.messages.create(messages=history, **{**about, "max_tokens": 24})
        function = {"name": "add", "arguments": json.dumps(call.input)}
        theirs = [
            *ASK, {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": call.id, "content": "3"}, {"role": "user", "content": "go on"},
        ]  # fmt: skip
        expected = chatted(hermes, theirs, tools=[ADDED])
        assert last.content[0].text == expected["choices"][0]["message"]["content"]
        counted = client.messages.count_tokens(model="tiny", messages=history, tools=[ADD])
        assert counted.input_tokens == expected["usage"]["prompt_tokens"]


def test_a_call_that_is_cut_off_has_what_there_is(hermes):
    with client_of(hermes) as client:
        about = {"model": "tiny", "tools": [ADD], "tool_choice": {"type": "any"}, "messages": ASK, **COLD}
        full = client.messages.create(max_tokens=200, **about).content[0].input
        for most in (12, 16, 20, 24):
            answer = client.messages.create(max_tokens=most, **about)
            with client.messages.stream(max_tokens=most, **about) as stream:
                last = stream.get_final_message()
            assert [block.input for block in last.content if block.type == "tool_use"] == [
                block.input for block in answer.content if block.type == "tool_use"
            ]
            for block in answer.content:
                assert block.type != "tool_use" or set(block.input) <= set(full)


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    capital: bool


def test_an_answer_by_schema(client):
    answer = client.messages.parse(model="tiny", messages=ASK, max_tokens=300, output_format=City)
    assert isinstance(answer.parsed_output, City)


@pytest.mark.parametrize("begun", ["", "def"], ids=["the answer opens it", "the prompt opens it"])
def test_thoughts_are_blocks(thinking, begun):  # noqa: F811
    with (
        run_server(thinking, ServerOptions(served_model_name="tiny", chat_template=TEMPLATE + begun)) as running,
        client_of(running) as client,
    ):
        expected = chatted(running)["choices"][0]["message"]
        answer = client.messages.create(model="tiny", messages=ASK, **SAME)
        told = {block.type: getattr(block, block.type) for block in answer.content}
        assert (told.get("thinking"), told.get("text")) == (expected["reasoning_content"], expected["content"])
        assert all(block.signature for block in answer.content if block.type == "thinking")
        with client.messages.stream(model="tiny", messages=ASK, **SAME) as stream:
            blocks = stream.get_final_message().content
        assert {block.type: getattr(block, block.type) for block in blocks} == told
        back = [*ASK, {"role": "assistant", "content": answer.content}, *ASK]
        assert client.messages.create(model="tiny", messages=back, **SAME).content


CLAUDE_CODE = {
    "max_tokens": 32_000, "stream": True, "temperature": 1, "metadata": {"user_id": "user_1_account__session_2"},
    "system": [{"type": "text", "text": "You are brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>none</system-reminder>"},
            {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "well", "signature": "x"}, {"type": "text", "text": "I run it."},
            {"type": "tool_use", "id": "toolu_01", "name": "Bash", "input": {"command": "ls"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_01", "content": "no", "is_error": True,
             "cache_control": {"type": "ephemeral"}}]},
    ],
    "thinking": {"type": "enabled", "budget_tokens": 31_999}, "context_management": {"edits": []},
    "tools": [
        {"name": "Bash", "description": "run", "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object",
            "properties": {"command": {"type": "string"}}, "required": ["command"], "additionalProperties": False}},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
}  # fmt: skip
"""As Claude Code sends it."""


def test_what_a_coding_agent_sends_is_taken(hermes, served):
    answer = hermes.post(f"{MESSAGES}?beta=true", CLAUDE_CODE, headers={"anthropic-beta": "claude-code-20250219"})
    assert answer.status_code == 200, answer.text
    assert answer.text.rstrip().endswith('data: {"type":"message_stop"}')
    named = "context_management, thinking, messages.is_error, tools.web_search_20250305, thinking.budget_tokens"
    assert answer.headers["forerun-ignored"] == named
    counted = {key: CLAUDE_CODE[key] for key in ("system", "messages", "tools", "thinking")}
    count = hermes.post(f"{MESSAGES}/count_tokens?beta=true", counted)
    assert count.json()["input_tokens"] > 40
    strict = ServerOptions(served_model_name="tiny", chat_template=TEMPLATE, strict=True)
    with run_server(served, strict) as running:
        refused = running.post(MESSAGES, CLAUDE_CODE)
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
        assert "unknown field 'tools.web_search_20250305'" in refused.json()["error"]["message"]
        assert running.post(MESSAGES, {"messages": ASK, **GREEDY}).status_code == 200


def test_a_coding_agents_session(hermes):
    """A word to see that there is an answer, a call, its result: as Claude Code does it, by Anthropic's package."""
    betas = ["claude-code-20250219", "interleaved-thinking-2025-05-14", "context-management-2025-06-27"]
    about = {key: CLAUDE_CODE[key] for key in ("system", "tools", "metadata", "thinking", "context_management")}
    with client_of(hermes) as client:
        api = client.beta.messages
        word = api.create(model="tiny", max_tokens=1, messages=[{"role": "user", "content": "quota"}], betas=betas)
        assert word.usage.output_tokens == 1
        asked = {"role": "user", "content": CLAUDE_CODE["messages"][0]["content"]}
        about |= {"model": "tiny", "max_tokens": 120, "betas": betas, **COLD}
        wish = {"type": "tool", "name": "Bash", "disable_parallel_tool_use": True}
        with api.stream(messages=[asked], **about, tool_choice=wish) as stream:
            answer = stream.get_final_message()
        (call,) = answer.content
        assert (call.type, call.name) == ("tool_use", "Bash")
        assert answer.stop_reason in ("tool_use", "max_tokens")  # a random model's command may have no end
        result = {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": "a.py",
            "cache_control": {"type": "ephemeral"},
        }
        history = [asked, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        with api.stream(messages=history, **about | {"max_tokens": 24}) as stream:
            last = stream.get_final_message()
        function = {"name": "Bash", "arguments": json.dumps(call.input)}
        text = "\n".join(part["text"] for part in asked["content"])
        theirs = [
            {"role": "system", "content": "You are brief."}, {"role": "user", "content": text},
            {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": call.id, "content": "a.py"},
        ]  # fmt: skip
        bash = CLAUDE_CODE["tools"][0]
        tool = {"name": "Bash", "description": "run", "parameters": bash["input_schema"]}
        expected = chatted(hermes, theirs, tools=[{"type": "function", "function": tool}], enable_thinking=True)
        assert "".join(block.text for block in last.content) == expected["choices"][0]["message"]["content"]
        assert last.usage.cache_read_input_tokens > 0
        counted = api.count_tokens(
            model="tiny", messages=history, betas=betas, **{key: about[key] for key in ("system", "tools", "thinking")}
        )
        assert counted.input_tokens == last.usage.input_tokens + last.usage.cache_read_input_tokens


@pytest.mark.parametrize(("wrong", "kind", "text"), [
    ({"model": "claude"}, anthropic.NotFoundError, "there is no model 'claude' here"),
    ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
    ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "tool_choice needs tools"),
    ({"tools": [{**ADD, "input_schema": {"type": "array"}}]}, anthropic.BadRequestError, "the schema of an object"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
     anthropic.BadRequestError, "reads text"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
     anthropic.BadRequestError, "which no message before made"),
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_anthropics(client, wrong, kind, text, stream):
    with pytest.raises(kind, match=text) as raised:
        client.messages.create(**{"model": "tiny", "messages": ASK, "stream": stream, **SAME, **wrong})
    assert raised.value.body["type"] == "error"
    assert raised.value.request_id


def test_a_key_is_x_api_key_or_a_bearer(served):
    with run_server(served, ServerOptions(served_model_name="tiny", api_key="s3cret")) as running:
        for right in ({"api_key": "s3cret"}, {"api_key": None, "auth_token": "s3cret"}):
            with client_of(running, **right) as client:
                (card,) = client.models.list().data
                assert (card.id, card.type, card.display_name) == ("tiny", "model", "tiny")
        with client_of(running, api_key="wrong") as client, pytest.raises(anthropic.AuthenticationError) as raised:
            client.messages.create(model="tiny", messages=ASK, **SAME)
        assert raised.value.body["error"]["type"] == "authentication_error"


def test_an_error_in_a_stream_is_an_event(served, slow_rounds):
    options = ServerOptions(served_model_name="tiny", chat_template=TEMPLATE, request_timeout=0.3)
    with run_server(served, options) as running, client_of(running) as client:
        about = {"model": "tiny", "messages": ASK, "max_tokens": 480, **COLD}
        with pytest.raises(anthropic.APIStatusError, match="was not answered within"):
            list(client.messages.create(stream=True, **about))
        with pytest.raises(anthropic.APIStatusError) as raised:
            client.messages.create(**about)
        assert (raised.value.status_code, raised.value.body["error"]["type"]) == (504, "timeout_error")

"""/v1/responses, by OpenAI's own client and types: a chat in another form, with the same tokens."""

import asyncio
import json
from typing import get_args

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from running import HERMES, TEMPLATE, client_of, closed, run_server, wait_idle
from test_tools import TOOLS, check_calls

from forerun.scale.pool import ReplicaPool
from forerun.scale.replica import Replica
from forerun.serve import answers
from forerun.serve.app import ServerOptions, create_app
from forerun.serve.batch import in_process
from forerun.serve.responses import InputMessage, ResponseReply, ResponseStore

PATH, CHAT = "/v1/responses", "/v1/chat/completions"
KINDS = {kind.model_fields["type"].annotation.__args__[0]: kind for kind in get_args(get_args(ResponseStreamEvent)[0])}
ASK = {"input": "hi", "max_output_tokens": 12, "temperature": 0.8, "seed": 7}
ASK_CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0.8, "seed": 7}
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


@pytest.fixture
def caller(hermes):
    with client_of(hermes) as client:
        yield client


def chat(running, messages, **more):
    answer = running.post(CHAT, {**ASK_CHAT, "messages": messages, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(answer):
    return answer["choices"][0]["message"]["content"]


def events_of(text):
    """A stream's events; each is named by its type, and OpenAI's own type takes it."""
    events = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        KINDS[event["type"]].model_validate(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def steady(answer):
    """What two answers to the same request have in common."""
    left = {key: value for key, value in answer.items() if key not in ("id", "created_at", "completed_at", "metrics")}
    left["usage"] = {**left["usage"], "input_tokens_details": None}
    return {**left, "output": [{**item, "id": "", "call_id": ""} for item in answer["output"]]}


def test_it_is_the_chats_answer(server, client):
    answer = client.responses.create(
        model="tiny", input="hi", instructions="be brief", max_output_tokens=12, temperature=0.8, metadata={"a": "b"},
        extra_body={"seed": 7},
    )  # fmt: skip
    expected = chat(server, [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}])
    assert answer.output_text == text_of(expected)
    assert answer.id.startswith("resp_")
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.instructions, answer.metadata, answer.error) == ("be brief", {"a": "b"}, None)
    usage = expected["usage"]
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (usage["prompt_tokens"], 12)
    assert answer.usage.total_tokens == usage["total_tokens"]
    speculation = answer.metrics["speculative_decoding"]
    assert speculation["method"] == "draft_model"
    assert speculation["identical_to_plain_decoding"] is True
    assert speculation["per_step_accepted"] == expected["metrics"]["speculative_decoding"]["per_step_accepted"]


def test_an_answer_that_ends_is_completed(server):
    whole = text_of(chat(server, ASK_CHAT["messages"]))
    answer = server.post(PATH, {**ASK, "stop": whole[-3:]}).json()
    Response.model_validate(answer)
    assert (answer["status"], answer["incomplete_details"]) == ("completed", None)
    assert answer["output"][0]["status"] == "completed"
    assert answer["completed_at"] >= answer["created_at"]
    assert answer["output"][0]["content"][0]["text"] == whole[: whole.index(whole[-3:])]


@pytest.mark.parametrize(
    "speculative", [{"enabled": False}, {"method": "draft_model"}, {"method": "ngram", "trace": True}]
)
@pytest.mark.parametrize("more", [{}, LOGPROBS, {"stop": ["e"]}])
def test_events_are_those_of_openai(server, more, speculative):
    body = {**ASK, "speculative": speculative, **more}
    whole = server.post(PATH, body).json()
    events = events_of(server.post(PATH, {**body, "stream": True}).text)
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", whole["status"]]
    assert set(names[4:-4]) <= {"output_text.delta"}
    text = whole["output"][0]["content"][0]["text"]
    deltas = [event for event in events if event["type"].endswith("text.delta")]
    assert "".join(event["delta"] for event in deltas) == text
    assert [token for event in deltas for token in event["logprobs"]] == whole["output"][0]["content"][0]["logprobs"]
    assert steady(events[-1]["response"]) == steady(whole)
    assert {event["item_id"] for event in events if "item_id" in event} == {events[-1]["response"]["output"][0]["id"]}
    assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    assert ("trace" in whole) == speculative.get("trace", False)


def test_logprobs_are_the_chats(server):
    answer = server.post(PATH, {**ASK, **LOGPROBS}).json()
    expected = chat(server, ASK_CHAT["messages"], logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert answer["output"][0]["content"][0]["logprobs"] == expected
    assert "".join(token["token"] for token in expected) == answer["output"][0]["content"][0]["text"]


def test_the_clients_stream(client):
    ask = {"model": "tiny", "input": "hi", "max_output_tokens": 12}
    whole = client.responses.create(**ask, extra_body={"seed": 7}).output_text
    body = {"seed": 7, "stop": whole[-3:]}
    with client.responses.stream(**ask, extra_body=body) as stream:
        seen = [event.type for event in stream]
        answer = stream.get_final_response()
    assert seen[-1] == "response.completed"
    events = list(client.responses.create(**ask, stream=True, extra_body=body))
    assert [event.type for event in events if "delta" not in event.type] == [
        name for name in seen if "delta" not in name
    ]
    assert events[-1].response.output_text == answer.output_text == whole[: whole.index(whole[-3:])] != ""


def test_conversations_go_on(server, client):
    """As the same messages would in a chat, and as all items sent again; instructions are not carried over."""
    ask = {"model": "tiny", "max_output_tokens": 12, "temperature": 0.8, "extra_body": {"seed": 7}}
    first = client.responses.create(input="hi", instructions="be brief", **ask)
    second = client.responses.create(input="go on", previous_response_id=first.id, **ask)
    turns = [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "go on"},
    ]  # fmt: skip
    assert second.output_text == text_of(chat(server, turns))
    assert second.previous_response_id == first.id
    sent = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}, *first.output,
            {"type": "message", "role": "user", "content": "go on"}]  # fmt: skip
    again = client.responses.create(input=sent, store=False, **ask)
    assert again.output_text == second.output_text
    assert again.usage.input_tokens == second.usage.input_tokens
    turns += [{"role": "assistant", "content": second.output_text}, {"role": "user", "content": "and"}]
    events = list(client.responses.create(input="and", previous_response_id=second.id, stream=True, **ask))
    assert events[-1].response.output_text == text_of(chat(server, turns))
    turns += [{"role": "assistant", "content": events[-1].response.output_text}, {"role": "user", "content": "end"}]
    last = client.responses.create(input="end", previous_response_id=events[-1].response.id, **ask)
    assert last.output_text == text_of(chat(server, turns))


def test_stored_ones_can_be_had_and_deleted(server, client):
    made = server.post(PATH, {**ASK, "speculative": {"trace": True}}).json()
    assert server.http.get(f"{PATH}/{made['id']}").json() == made
    assert client.responses.retrieve(made["id"]).output_text == made["output"][0]["content"][0]["text"]
    refused = server.http.get(f"{PATH}/{made['id']}", params={"stream": "true"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")
    deleted = server.http.delete(f"{PATH}/{made['id']}")
    assert deleted.json() == {"id": made["id"], "object": "response", "deleted": True}
    with pytest.raises(openai.NotFoundError, match="there is no response") as caught:
        client.responses.retrieve(made["id"])
    assert caught.value.code == "response_not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(made["id"])
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="tiny", input="hi", previous_response_id=made["id"])
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    hidden = client.responses.create(model="tiny", input="hi", store=False, max_output_tokens=2)
    assert hidden.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(hidden.id)


def test_as_many_are_kept_as_there_is_room_for(server):
    made = answers.Response.model_validate(server.post(PATH, ASK).json())
    items = []
    probe = ResponseStore(1 << 20)
    probe.put(made, items)
    store = ResponseStore(3 * probe.size + 8)
    for number in range(5):
        store.put(made.model_copy(update={"id": f"resp_{number:032}"}), items)
    assert [key[-1] for key in store._stored] == ["2", "3", "4"]
    assert store.size == 3 * probe.size
    store.delete(f"resp_{4:032}")
    assert store.size == 2 * probe.size
    odd = InputMessage.model_validate({"role": "user", "content": "hi", "unknown": ["x" * 10_000]})
    store.put(made, [odd])
    (kept,) = [each for each in store.items_up_to(made.id) if each.role == "user"]
    assert (kept.content, kept.model_extra) == ("hi", {})
    nothing = ResponseStore(0)
    nothing.put(made, items)
    assert (nothing.size, len(nothing._stored)) == (0, 0)


def test_a_client_that_leaves_has_nothing_stored(server):
    with server.http.stream("POST", PATH, json={**ASK, "max_output_tokens": 400, "ignore_eos": True,
                                                "stream": True}) as stream:  # fmt: skip
        lines = stream.iter_lines()
        first, data = next(lines), next(lines)
    assert first == "event: response.created"
    wait_idle(server)
    assert server.http.get(f"{PATH}/{json.loads(data[6:])['response']['id']}").status_code == 404


# --------------------------------------------------------------------------------------------------------------- tools


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("wish", ["required", {"type": "function", "name": "set_date"}], ids=["required", "named"])
@pytest.mark.parametrize("speculative", [{"enabled": False}, {"method": "draft_model"}])
def test_calls_are_the_chats(hermes, seed, wish, speculative):
    body = {"input": "hi", "tools": FLAT, "tool_choice": wish, "max_output_tokens": 300, "seed": seed,
            "speculative": speculative}  # fmt: skip
    answer = hermes.post(PATH, body).json()
    Response.model_validate(answer)
    calls = [(item["name"], item["arguments"]) for item in answer["output"]]
    assert {item["type"] for item in answer["output"]} == {"function_call"}
    check_calls(calls)
    choice = wish if wish == "required" else {"type": "function", "function": {"name": "set_date"}}
    expected = hermes.post(CHAT, {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS,
                              "tool_choice": choice, "max_tokens": 300, "seed": seed}).json()["choices"][0]  # fmt: skip
    assert calls == [
        (call["function"]["name"], call["function"]["arguments"]) for call in expected["message"]["tool_calls"]
    ]
    assert answer["status"] == "completed"
    events = events_of(hermes.post(PATH, {**body, "stream": True}).text)
    assert steady(events[-1]["response"]) == steady(answer)
    for index, item in enumerate(events[-1]["response"]["output"]):
        own = [event for event in events if event.get("output_index") == index]
        names = [event["type"].removeprefix("response.") for event in own]
        assert (names[0], names[-2:]) == ("output_item.added", ["function_call_arguments.done", "output_item.done"])
        assert set(names[1:-2]) == {"function_call_arguments.delta"}
        assert "".join(event["delta"] for event in own[1:-2]) == own[-2]["arguments"] == item["arguments"]
        assert (own[0]["item"]["arguments"], own[0]["item"]["status"]) == ("", "in_progress")
        assert (own[-2]["name"], own[-1]["item"]) == (item["name"], item)


@pytest.mark.parametrize("stream", [False, True])
def test_functions_of_a_namespace_are_called_by_both_names(hermes, caller, stream):
    """As Codex offers those of MCP servers. The model sees one name, and the client two, in what it gets and sends."""
    long = "m" * 60
    spaces = [{"type": "namespace", "name": name, "description": "", "tools": tools}
              for name, tools in ((long, FLAT[:1]), ("mcp__b", FLAT[1:]))]  # fmt: skip
    ask = {"model": "tiny", "tools": [*spaces, FLAT[0]], "max_output_tokens": 300, "extra_body": {"seed": 7}}
    asked = caller.responses.create(input="hi", tool_choice="required", stream=stream, **ask)
    if stream:
        *events, last = asked
        asked = last.response
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert done == asked.output
    named = [(long, FLAT[0]), *(("mcp__b", tool) for tool in FLAT[1:]), (None, FLAT[0])]
    full = [tool["name"] if space is None else f"{space}__{tool['name']}" for space, tool in named]
    functions = [{**TOOLS[FLAT.index(tool)]["function"], "name": name} for (_, tool), name in zip(named, full)]
    tools = [{"type": "function", "function": function} for function in functions]
    chatted = {"tools": tools, "max_tokens": 300, "seed": 7}
    turns = [{"role": "user", "content": "hi"}]
    expected = chat(hermes, turns, tool_choice="required", **chatted, temperature=1)["choices"][0]["message"][
        "tool_calls"
    ]
    parts = {name: (space, tool["name"]) for (space, tool), name in zip(named, full)}
    assert [(*parts[call["function"]["name"]], call["function"]["arguments"]) for call in expected] == [
        (item.namespace, item.name, item.arguments) for item in asked.output
    ]
    assert any(item.namespace for item in asked.output)
    assert [(tool.type, [each.name for each in getattr(tool, "tools", [tool])]) for tool in asked.tools] == [
        ("namespace", [FLAT[0]["name"]]), ("namespace", [tool["name"] for tool in FLAT[1:]]),
        ("function", [FLAT[0]["name"]]),
    ]  # fmt: skip
    results = [{"type": "function_call_output", "call_id": item.call_id, "output": "done"} for item in asked.output]
    for earlier in ({"input": results, "previous_response_id": asked.id},
                    {"input": [*turns, *asked.output, *results]}):  # fmt: skip
        again = caller.responses.create(tool_choice="none", **earlier, **ask)
        calls = [{"id": item.call_id, "type": "function", "function": call["function"]}
                 for item, call in zip(asked.output, expected)]  # fmt: skip
        before = [*turns, {"role": "assistant", "content": None, "tool_calls": calls}]
        before += [{"role": "tool", "tool_call_id": item.call_id, "content": "done"} for item in asked.output]
        assert again.output_text == text_of(chat(hermes, before, tool_choice="none", **chatted, temperature=1))


def test_a_call_is_answered_and_the_conversation_goes_on(hermes, caller):
    ask = {"model": "tiny", "tools": FLAT, "max_output_tokens": 300, "extra_body": {"seed": 7}}
    asked = caller.responses.create(input="hi", tool_choice="required", **ask)
    results = [{"type": "function_call_output", "call_id": item.call_id, "output": "done"} for item in asked.output]
    kept = caller.responses.create(input=results, previous_response_id=asked.id, tool_choice="none", **ask)
    again = caller.responses.create(
        input=[{"role": "user", "content": "hi"}, *asked.output, *results], store=False, tool_choice="none", **ask
    )
    calls = [{"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
             for item in asked.output]  # fmt: skip
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": calls},
             *({"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in calls)]  # fmt: skip
    expected = hermes.post(
        CHAT, {"messages": turns, "tools": TOOLS, "tool_choice": "none", "max_tokens": 300, "seed": 7}
    )
    assert kept.output_text == again.output_text == text_of(expected.json())
    assert kept.usage.input_tokens == again.usage.input_tokens == expected.json()["usage"]["prompt_tokens"]


def test_a_call_that_is_cut_off_is_incomplete(hermes):
    body = {"input": "hi", "tools": FLAT, "tool_choice": {"type": "function", "name": "set_date"}, "seed": 3}
    for limit in (2, 14, 18, 22):
        answer = hermes.post(PATH, {**body, "max_output_tokens": limit}).json()
        assert answer["status"] == "incomplete"
        events = events_of(hermes.post(PATH, {**body, "max_output_tokens": limit, "stream": True}).text)
        assert events[-1]["type"] == "response.incomplete"
        assert steady(events[-1]["response"]) == steady(answer)
        assert {item["status"] for item in answer["output"]} <= {"incomplete"}


def test_text_before_a_call_is_a_message_before_it(served, monkeypatch):
    """The same order whole and streamed, whatever the model mixes."""
    call = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    told = ResponseReply._choice_events

    def mixed(self, choice):
        choice.text = f"Well. {call} And {call}" if choice.finish is not None else ""
        return told(self, choice)

    monkeypatch.setattr(ResponseReply, "_choice_events", mixed)
    body = {"input": "hi", "tools": FLAT, "max_output_tokens": 3, "stop_token_ids": [], "seed": 1}
    with run_server(served, ServerOptions(served_model_name="tiny", chat_template=HERMES)) as running:
        answer = running.post(PATH, body).json()
        events = events_of(running.post(PATH, {**body, "stream": True}).text)
    assert [item["type"] for item in answer["output"]] == ["message", "function_call", "message", "function_call"]
    assert [item["status"] for item in answer["output"]] == ["completed"] * 4
    assert [item["content"][0]["text"] for item in answer["output"][::2]] == ["Well.", " And"]
    assert steady(events[-1]["response"]) == steady(answer)
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1, 2, 3]


def test_text_follows_a_schema(server, client):
    schema = closed({"age": {"enum": [3, 4]}}, "age")
    form = {"type": "json_schema", "name": "person", "schema": schema, "strict": True}
    answer = client.responses.create(model="tiny", input="hi", text={"format": form}, max_output_tokens=60)
    assert json.loads(answer.output_text)["age"] in (3, 4)
    assert answer.text.format.name == "person"


# -------------------------------------------------------------------------------------------------------------- errors

WRONG = [
    ({}, "input", "Field required"),
    ({**ASK, "input": []}, "input", "at least 1 item"),
    ({**ASK, "input": [{"role": "tool", "content": "x"}]}, "input.0.role", "Input should be"),
    ({**ASK, "input": [{"type": "web_search_call"}]}, "input.0", "must be a message, a function_call, a"),
    ({**ASK, "input": ["x"]}, "input.0", "must be a message"),
    ({**ASK, "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
     "input.0.content.0.type", "Input should be 'input_text' or 'output_text'"),
    ({**ASK, "input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input",
     "answers the call 'x', which no message before made"),
    ({**ASK, "background": True}, "background", "Input should be False"),
    ({**ASK, "conversation": "conv_1"}, "conversation", "does not support it"),
    ({**ASK, "tools": [{"type": "function"}]}, "tools.0.name", "Field required"),
    ({**ASK, "tools": [{"name": "f"}]}, "tools.0", "must be a tool with a type"),
    ({**ASK, "tools": [{"type": "a\r\nb: c"}]}, "tools.0.type", "match pattern"),
    ({**ASK, "include": ["a\nb"]}, "include.0", "match pattern"),
    ({**ASK, "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({**ASK, "tools": [FLAT[0], FLAT[0]]}, "tools", "two tools are called"),
    ({**ASK, "tools": FLAT, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "there is no tool 'x'"),
    ({**ASK, "tools": FLAT, **LOGPROBS}, None, "tools do not support log-probabilities"),
    ({**ASK, "top_logprobs": 2}, None, "top_logprobs goes with include"),
    ({**ASK, "max_output_tokens": 900}, "max_output_tokens", "max_output_tokens is 900: together"),
    ({"input": "x " * 600}, "input", "leaves no room"),
    ({**ASK, "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "schema goes with type"),
    ({**ASK, "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}},
     "text.format", "nothing"),
    ({**ASK, "truncation": "auto"}, "truncation", "Input should be 'disabled'"),
    ({**ASK, "speculative": {"method": "eagle"}}, "speculative.method", "is not loaded"),
    ({**ASK, "max_output_tokens": 2.5}, "max_output_tokens", "valid integer"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "message"), WRONG)
def test_errors_are_openais_and_name_its_own_fields(server, body, param, message):
    for stream in (False, True):
        answer = server.post(PATH, {**body, "stream": stream})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] == param
        assert message in error["message"]
        assert "\n" not in error["message"]


def test_what_makes_no_difference_is_said(server):
    answer = server.post(PATH, {**ASK, "reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"]})
    assert answer.headers["forerun-ignored"] == "reasoning, include.reasoning.encrypted_content"
    assert "forerun-ignored" not in server.post(PATH, {**ASK, "reasoning": {"effort": None}}).headers


def test_requests_of_coding_agents_are_answered(hermes, caplog):
    """As Codex sends them: what has no counterpart here is named in a header, and once in the log."""
    inner = {"type": "function", "name": "search", "parameters": {"type": "object", "properties": {}}}
    body = {
        **ASK, "store": False, "parallel_tool_calls": False, "tool_choice": "auto", "prompt_cache_key": "a",
        "instructions": "You are a coding agent.", "client_metadata": {"x-codex-installation-id": "1"},
        "tools": [FLAT[0], {"type": "web_search", "external_web_access": False},
                  {"type": "namespace", "name": "mcp__a", "description": "MCP", "tools": [inner]},
                  {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}}],
        "text": {"verbosity": "low"}, "reasoning": {"effort": "medium", "summary": "auto"},
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
    }  # fmt: skip
    named = [
        "reasoning", "client_metadata", "text.verbosity", "tools.web_search", "tools.custom",
        "tools.namespace.description", "include.reasoning.encrypted_content", "include.web_search_call.action.sources",
    ]  # fmt: skip
    for stream in (True, False):
        answer = hermes.post(PATH, {**body, "stream": stream})
        assert answer.status_code == 200, answer.text
        assert answer.headers["forerun-ignored"].split(", ") == named
    assert [tool["name"] for tool in answer.json()["tools"]] == [FLAT[0]["name"], "mcp__a"]
    search = {"type": "function", "function": {"name": "mcp__a__search", "parameters": inner["parameters"]}}
    assert text_of(chat(hermes, [{"role": "system", "content": body["instructions"]}, *ASK_CHAT["messages"]],
                        tools=[TOOLS[0], search])) == answer.json()["output"][0]["content"][0]["text"]  # fmt: skip
    lines = [record.getMessage() for record in caplog.records if "is ignored" in record.getMessage()]
    assert sorted(line.partition(" of ")[0] for line in lines) == sorted(named)


def test_reasoning_is_part_of_the_message_after_it(server):
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}
    answered = {"type": "message", "role": "assistant", "content": "Yes."}
    before, after = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    for items, content in (([thought], ""), ([thought, answered], "Yes.")):
        answer = server.post(PATH, {**ASK, "input": [before, *items, after]})
        messages = [before, {"role": "assistant", "content": content, "reasoning_content": "Hm"}, after]
        assert answer.json()["output"][0]["content"][0]["text"] == text_of(chat(server, messages))


@pytest.mark.parametrize("path", [PATH, CHAT, "/v1/completions"])
def test_top_p_0_is_greedy(server, path):
    about = {PATH: ASK, CHAT: ASK_CHAT}.get(path, {"prompt": "hi", "max_tokens": 12, "seed": 7})

    def said(**options):
        answer = server.post(path, {**about, **options})
        assert answer.status_code == 200, answer.text
        body = answer.json()
        return body["output"][0]["content"] if path == PATH else body["choices"][0]

    assert said(top_p=0, temperature=5) == said(temperature=0)
    assert said(temperature=5) != said(temperature=0)


def test_a_failure_within_a_stream_is_its_last_event(served, slow_rounds, monkeypatch):
    options = ServerOptions(served_model_name="tiny", chat_template=TEMPLATE, request_timeout=0.3)
    body = {**ASK, "max_output_tokens": 450, "ignore_eos": True, "speculative": {"enabled": False}}
    with run_server(served, options) as running:
        events = events_of(running.post(PATH, {**body, "stream": True}).text)
        whole = running.post(PATH, body)
        lost = running.http.get(f"{PATH}/{events[0]['response']['id']}")
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert "was not answered within 0.3 seconds" in events[-1]["response"]["error"]["message"]
    assert (whole.status_code, lost.status_code) == (504, 404)


# ------------------------------------------------------------------------------------------------------------ replicas


def test_replicas_serve_them_too(server, model_folder):
    replica = Replica({"model": str(model_folder), "max_num_seqs": 4, "page_size": 16}, [{"method": "ngram"}])
    pool = ReplicaPool(replica.facts, replica.answer, capacity=lambda: 8)
    ask = in_process(create_app(pool, ServerOptions(served_model_name="tiny", chat_template=TEMPLATE)))

    async def talk():
        first = await ask(PATH, ASK)
        second = await ask(PATH, {**ASK, "input": "go on", "previous_response_id": first[1]["id"]})
        assert first[0] == second[0] == 200
        return [first[1], second[1]]

    try:
        first, second = asyncio.run(talk())
    finally:
        replica.engine.close()
    here = server.post(PATH, ASK).json()
    again = server.post(PATH, {**ASK, "input": "go on", "previous_response_id": here["id"]}).json()
    assert [item["content"] for item in first["output"]] == [item["content"] for item in here["output"]]
    assert [item["content"] for item in second["output"]] == [item["content"] for item in again["output"]]
    assert second["usage"]["input_tokens"] == again["usage"]["input_tokens"]

"""Ollama's API, spoken by the ``ollama`` package and by hand."""

import json
from functools import partial

import jsonschema_rs
import ollama
import pytest
from ollama._utils import convert_function_to_tool
from running import ASK, TEMPLATE, closed, run_server
from running import chatted as openai_chatted
from test_reasoning import thinking  # noqa: F401 - a fixture

from forerun.serve.app import ServerOptions
from forerun.serve.ollama import OllamaChat
from forerun.serve.tools.base import arguments_of

OPTIONS = {"num_predict": 24, "temperature": 0.8, "seed": 7}
SAME = {"max_tokens": 24, "temperature": 0.8, "seed": 7}
chatted = partial(openai_chatted, **SAME)
CHAT, GENERATE = "/api/chat", "/api/generate"


@pytest.fixture
def client(server):
    with ollama.Client(host=server.url, timeout=60) as client:
        yield client


def test_chat_is_openais(server, client):
    expected = chatted(server)
    answer = client.chat(model="tiny", messages=ASK, options=OPTIONS)
    assert answer.message.content == expected["choices"][0]["message"]["content"]
    assert (answer.done, answer.done_reason, answer.model) == (True, "length", "tiny")
    assert (answer.prompt_eval_count, answer.eval_count) == (expected["usage"]["prompt_tokens"], 24)
    assert 0 < answer.prompt_eval_duration < answer.total_duration
    assert answer.eval_duration <= answer.total_duration < 60e9


def test_a_stream_is_the_whole_answer_in_lines(server, client):
    whole = client.chat(model="tiny:latest", messages=ASK, options=OPTIONS)
    parts = list(client.chat(model="tiny", messages=ASK, options=OPTIONS, stream=True))
    assert len(parts) > 2
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == whole.eval_count
    assert all(part.done_reason is None and part.eval_count is None for part in parts[:-1])
    streamed = server.post(CHAT, {"messages": ASK, "options": OPTIONS})  # a stream unless told otherwise
    assert streamed.headers["content-type"] == "application/x-ndjson"


def test_generate_uses_the_template_unless_it_is_raw(server, client):
    about = {"model": "tiny", "prompt": "hi", "options": OPTIONS}
    system = [{"role": "system", "content": "be brief"}, *ASK]
    expected = chatted(server)["choices"][0]["message"]["content"]
    assert client.generate(**about).response == expected
    assert "".join(part.response for part in client.generate(**about, stream=True)) == expected
    assert (
        client.generate(**about, system="be brief").response
        == chatted(server, system)["choices"][0]["message"]["content"]
    )
    plain = server.post("/v1/completions", {"prompt": "hi", **SAME}).json()["choices"][0]["text"]
    assert client.generate(**about, raw=True).response == plain
    assert "".join(part.response for part in client.generate(**about, raw=True, stream=True)) == plain


def test_generate_without_a_template_continues_the_prompt(served):
    with run_server(served, ServerOptions(served_model_name="tiny")) as bare, ollama.Client(host=bare.url) as client:
        plain = bare.post("/v1/completions", {"prompt": "def f(", **SAME}).json()["choices"][0]["text"]
        assert client.generate(model="tiny", prompt="def f(", options=OPTIONS).response == plain
        long = client.generate(model="tiny", prompt="def f(", options={"seed": 1, "num_predict": -1, "temperature": 0})
        assert long.eval_count > 24
        with pytest.raises(ollama.ResponseError, match="no chat template"):
            client.chat(model="tiny", messages=ASK)
        assert "tools" not in client.show("tiny").capabilities


@pytest.mark.parametrize(("options", "fields"), [
    ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"top_k": 3, "top_p": 0.9, "min_p": 0.01}, {"top_k": 3, "top_p": 0.9, "min_p": 0.01}),
    ({"presence_penalty": 1, "frequency_penalty": 0.5}, {"presence_penalty": 1, "frequency_penalty": 0.5}),
    ({"stop": ["e", "zz"]}, {"stop": ["e", "zz"]}),
    ({"num_predict": 3}, {"max_tokens": 3}),
    ({"num_predict": 100_000, "seed": 3}, {"max_tokens": None, "seed": 3}),
])  # fmt: skip
def test_options(server, client, options, fields):
    (expected,) = chatted(server, **fields)["choices"]
    answer = client.chat(model="tiny", messages=ASK, options={**OPTIONS, **options})
    assert (answer.message.content, answer.done_reason) == (expected["message"]["content"], expected["finish_reason"])


def test_what_is_not_served_is_named(server, served):
    body = {"model": "tiny", "messages": [{**ASK[0], "odd": 1}], "stream": False, "think": True, "keep_alive": "5m",
            "options": {**OPTIONS, "num_ctx": 4096, "mirostat": 0, "num_gpu": None}, "extra": 1}  # fmt: skip
    answer = server.post(CHAT, body)
    names = ["options.num_ctx", "options.mirostat", "keep_alive", "think", "extra", "messages.odd"]
    assert answer.headers["forerun-ignored"].split(", ") == names
    assert answer.json()["message"]["content"] == chatted(server)["choices"][0]["message"]["content"]
    answer = server.post(
        GENERATE, {"prompt": "hi", "template": "x", "context": [1], "stream": False, "options": OPTIONS}
    )
    assert answer.headers["forerun-ignored"] == "context, template"
    strict = ServerOptions(served_model_name="tiny", chat_template=TEMPLATE, strict=True)
    with run_server(served, strict) as running:
        for odd, name in (({"extra": 1}, "extra"), ({"messages": body["messages"]}, "messages.odd")):
            refused = running.post(CHAT, {"messages": ASK, **odd})
            assert (refused.status_code, refused.json()) == (400, {"error": f"unknown field '{name}': remove it"})
        assert running.post(CHAT, {"messages": ASK, "stream": False, "options": OPTIONS}).status_code == 200


def test_a_format_is_a_schema(server, client):
    schema = closed({"name": {"enum": ["ada", "bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}}, "name")
    options = {**OPTIONS, "num_predict": 60}
    answer = client.chat(model="tiny", messages=ASK, format=schema, options=options)
    jsonschema_rs.validator_for(schema).validate(json.loads(answer.message.content))
    free = client.generate(model="tiny", prompt="hi", format="json", options={**options, "temperature": 0})
    assert free.response.startswith("{")
    assert client.generate(model="tiny", prompt="hi", format="", options=OPTIONS).response


@pytest.mark.parametrize("begun", ["", "def"], ids=["the answer opens it", "the prompt opens it"])
def test_thinking(thinking, begun):  # noqa: F811
    options = ServerOptions(served_model_name="tiny", chat_template=TEMPLATE + begun)
    with run_server(thinking, options) as running, ollama.Client(host=running.url) as client:
        assert "thinking" in client.show("tiny").capabilities
        for seed in range(4):
            expected = chatted(running, max_tokens=60, seed=seed, temperature=1.0)["choices"][0]["message"]
            about = {"model": "tiny", "messages": ASK, "options": {"num_predict": 60, "seed": seed}}
            answer = client.chat(**about).message
            assert (answer.thinking, answer.content) == (expected["reasoning_content"], expected["content"] or "")
            assert answer.thinking or not begun
            parts = list(client.chat(**about, stream=True))
            assert "".join(part.message.thinking or "" for part in parts) == (answer.thinking or "")
            assert "".join(part.message.content for part in parts) == answer.content


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


DIGIT = {"type": "integer", "minimum": 0, "maximum": 99}
CALL = closed(
    {"name": {"enum": ["add"]}, "parameters": closed({"a": DIGIT, "b": DIGIT}, "a", "b")}, "name", "parameters"
)
"""A call of Llama 3's form, which a format makes the model write: Ollama's API has no other way to ask for one."""


def test_tools_are_called_and_answered(hermes):
    with ollama.Client(host=hermes.url) as client:
        about = {"model": "tiny", "tools": [add], "options": {"num_predict": 300, "seed": 2}}
        answer = client.chat(messages=ASK, format=CALL, **about)
        calls = answer.message.tool_calls
        assert calls
        assert {call.function.name for call in calls} == {"add"}
        assert answer.message.content == ""
        parts = list(client.chat(messages=ASK, format=CALL, stream=True, **about))
        streamed = [each for part in parts for each in part.message.tool_calls or ()]
        assert [each.function for each in streamed] == [each.function for each in calls]
        assert "".join(part.message.content for part in parts) == ""
        results = [str(add(**call.function.arguments)) for call in calls]
        told = [{"role": "tool", "tool_name": "add", "content": result} for result in results]
        last = client.chat(messages=[*ASK, answer.message, *told], **{**about, "options": {"seed": 2}})
        ids = [f"id{index:07}" for index in range(len(calls))]
        given = [
            {"id": id, "type": "function",
             "function": {"name": "add", "arguments": json.dumps(call.function.arguments)}}
            for id, call in zip(ids, calls)
        ]  # fmt: skip
        told = [{"role": "tool", "tool_call_id": id, "content": result} for id, result in zip(ids, results)]
        tools = [convert_function_to_tool(add).model_dump(exclude_none=True)]
        history = [*ASK, {"role": "assistant", "tool_calls": given}, *told]
        expected = chatted(hermes, history, tools=tools, max_tokens=None, seed=2, temperature=1.0)
        assert last.message.content == expected["choices"][0]["message"]["content"]
        assert last.prompt_eval_count == expected["usage"]["prompt_tokens"]


def test_results_find_their_calls():
    def call(name, **more):
        return {"function": {"name": name, "arguments": {}}, **more}

    messages = [
        {"role": "assistant", "tool_calls": [call("a"), call("b"), call("b"), call("c", id="mine")]},
        {"role": "tool", "content": "1", "tool_name": "b"}, {"role": "tool", "content": "2", "tool_call_id": "mine"},
        {"role": "tool", "content": "3"}, {"role": "tool", "content": "4", "tool_name": "b"},
    ]  # fmt: skip
    given = OllamaChat.model_validate({"messages": messages}).as_chat().messages
    ids = [call.id for call in given[0].tool_calls]
    assert len(set(ids)) == 4
    assert [message.tool_call_id for message in given[1:]] == [ids[1], "mine", ids[0], ids[2]]


def test_a_call_that_is_cut_off_has_what_there_is(hermes):
    whole = {"a": 12, "b": 7}
    text = json.dumps(whole)
    for cut in range(len(text) + 1):
        assert set(arguments_of(text[:cut])) <= {"a", "b"}, text[:cut]
    assert arguments_of(text) == whole
    assert arguments_of("[1]") == {"arguments": "[1]"}
    assert arguments_of("nothing") == {"arguments": "nothing"}


def test_errors_are_ollamas(server, client):
    for wrong, status, text in [
        ({"model": "nothing"}, 404, "there is no model 'nothing' here"),
        ({"options": {"temperature": -1}}, 400, "options.temperature"),
        ({"options": {"num_predict": 0}}, 400, "options.num_predict"),
        ({"messages": [{"role": "tool", "content": "1", "tool_name": "f"}]}, 400, "which no message before called"),
    ]:
        with pytest.raises(ollama.ResponseError, match=text) as raised:
            client.chat(**{"model": "tiny", "messages": ASK, **wrong})
        assert raised.value.status_code == status
        with pytest.raises(ollama.ResponseError, match=text):
            list(client.chat(**{"model": "tiny", "messages": ASK, "stream": True, **wrong}))
    assert server.http.get("/api/nothing").json() == {"error": "there is nothing at /api/nothing"}
    assert "forerun fetch" in server.http.post("/api/pull").json()["error"]
    refused = server.post(CHAT, {"messages": ASK, "format": "yaml"})
    assert (refused.status_code, set(refused.json())) == (400, {"error"})
    with pytest.raises(ollama.ResponseError, match="does not support it"):
        client.generate(model="tiny", prompt="a", images=["aGk="])


def test_about_the_model(server, client):
    (listed,), (loaded,) = client.list().models, client.ps().models
    assert listed.model == loaded.model == "tiny"
    assert listed.size == loaded.size == server.engine.facts.weight_bytes > 0
    assert (loaded.context_length, loaded.size_vram, len(listed.digest)) == (512, 0, 64)
    shown = client.show("tiny:latest")
    assert shown.capabilities == ["completion", "tools"]
    told = {"general.basename": "tiny", "general.architecture": "llama", "llama.context_length": 512}
    assert shown.modelinfo == told  # what VS Code reads
    assert shown.template == TEMPLATE
    with pytest.raises(ollama.ResponseError, match="no model"):
        client.show("other")
    assert server.http.head("/").status_code == 200
    version = server.http.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)  # VS Code asks for it


def test_an_empty_request_says_that_the_model_is_ready(client):
    assert client.generate(model="tiny").done_reason == "load"
    assert client.chat(model="tiny", messages=[]).done_reason == "load"


def test_logprobs(server, client):
    expected = chatted(server, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    about = {"model": "tiny", "messages": ASK, "options": OPTIONS, "logprobs": True, "top_logprobs": 2}
    whole = client.chat(**about).logprobs
    streamed = [each for part in client.chat(**about, stream=True) for each in part.logprobs or ()]
    for listed in (whole, streamed):
        assert [(each.token, each.logprob) for each in listed] == [
            (each["token"], each["logprob"]) for each in expected
        ]
        assert [len(each.top_logprobs) for each in listed] == [2] * len(expected)


def test_an_error_in_a_stream_is_a_line(served, slow_rounds):
    options = ServerOptions(served_model_name="tiny", chat_template=TEMPLATE, request_timeout=0.3)
    with run_server(served, options) as running, ollama.Client(host=running.url) as client:
        with pytest.raises(ollama.ResponseError, match="was not answered within"):
            list(client.chat(model="tiny", messages=ASK, options={"temperature": 0}, stream=True))
        with pytest.raises(ollama.ResponseError) as raised:
            client.chat(model="tiny", messages=ASK, options={"temperature": 0})
        assert raised.value.status_code == 504

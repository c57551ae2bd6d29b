"""What clients get wrong, what they must not be able to do, and what it costs the others: nothing."""

import json
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import httpx2
import pytest
from pydantic import ValidationError
from running import TEMPLATE, run_server

from forerun import SamplingParams
from forerun.core.errors import ConfigError
from forerun.serve.app import ServerOptions
from forerun.serve.responses import ResponseRequest
from forerun.serve.run import open_socket
from forerun.serve.schema import GUIDED, ChatRequest, CompletionRequest
from forerun.serve.tokens import DetokenizeRequest
from refusals import refused

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
GOOD = {"prompt": "def parse(", "max_tokens": 4}
HI = {"messages": [{"role": "user", "content": "hi"}]}
MANY, VAGUE = 5000, 'start: a a a\na: b b b b\nb: c c c c | \nc: d* d* | b?\nd: "x"* | "y"?'


def shaped(**outputs):
    return {**GOOD, "structured_outputs": outputs}


WRONG = [
    (COMPLETIONS, {"max_tokens": 4}, "prompt", "Field required"),
    (COMPLETIONS, {**GOOD, "n_predict": 3, "max_tokens": 3}, None, "n_predict and max_tokens are the same"),
    (COMPLETIONS, {**GOOD, "speculative": {"k": 1}}, "speculative.k", "unknown field 'speculative.k'"),
    (COMPLETIONS, {**GOOD, "suffix": "x"}, "suffix", "no tokens to fill in the middle"),
    (COMPLETIONS, {"prompt": None}, "prompt", "must be a text, a list of texts, a list of token ids"),
    (COMPLETIONS, {"prompt": {}}, "prompt", "must be a text, a list of texts, a list of token ids"),
    (COMPLETIONS, {"prompt": []}, "prompt", "at least 1 item"),
    (COMPLETIONS, {"prompt": ["a"] * 129}, "prompt", "at most 128 items, not 129"),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt.1", "valid string"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt.1", "valid integer"),
    (COMPLETIONS, {"prompt": [[1], []]}, "prompt.1", "at least 1 item"),
    (COMPLETIONS, {**GOOD, "stop": ""}, "stop", "at least 1 character"),
    (COMPLETIONS, {**GOOD, "stop": ["a", ""]}, "stop.1", "at least 1 character"),
    (COMPLETIONS, {**GOOD, "stop": [1]}, "stop", "a text or a list of texts"),
    (COMPLETIONS, {**GOOD, "bad_words": ["a", ""]}, "bad_words.1", "at least 1 character"),
    *((path, {**body, name: {}}, None, f"{name} is not supported: send structured_outputs")
      for path, body in ((COMPLETIONS, GOOD), (CHAT, HI)) for name in GUIDED),
    (COMPLETIONS, {**GOOD, "structured_outputs": {"json": 3}}, "structured_outputs.json", "an object or a text"),
    (COMPLETIONS, {**GOOD, "speculative": 3}, "speculative", "must be an object"),
    (
        COMPLETIONS,
        {**GOOD, "response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
        "response_format.json_schema.schema",
        "an object, true or false",
    ),
    (
        COMPLETIONS,
        {**GOOD, "response_format": {"type": "json_schema", "json_schema": {"schema": False}}},
        "response_format",
        "no answer can match the schema false",
    ),
    (COMPLETIONS, {**GOOD, "stream": True, "stream_options": {"include_obfuscation": True}},
     "stream_options.include_obfuscation", "False"),
    (COMPLETIONS, {**GOOD, "temperature": "hot"}, "temperature", "valid number"),
    (COMPLETIONS, {**GOOD, "temperature": -1}, "temperature", "greater than or equal to 0"),
    (COMPLETIONS, {**GOOD, "top_p": -0.1}, "top_p", "greater than or equal to 0"),
    (COMPLETIONS, {**GOOD, "max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    (COMPLETIONS, {**GOOD, "max_tokens": 0}, "max_tokens", "the prompt alone with echo: true"),
    (COMPLETIONS, {**GOOD, "max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens", "exceeds max_tokens (0)"),
    (CHAT, {**HI, "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    (COMPLETIONS, {**GOOD, "max_tokens": 4.5}, "max_tokens", "valid integer"),
    (COMPLETIONS, {**GOOD, "n": 1000}, "n", "less than or equal to 128"),
    (COMPLETIONS, {**GOOD, "best_of": 3}, None, "best_of is not supported"),
    (COMPLETIONS, {**GOOD, "max_tokens": 600}, "max_tokens", "more than this model's 512"),
    (COMPLETIONS, {"prompt": [5] * 513}, "prompt", "513 tokens"),
    (COMPLETIONS, {"prompt": ""}, "prompt", "the prompt is empty"),
    (COMPLETIONS, {"prompt": [99999]}, "prompt", "outside the vocabulary of 4096"),
    (COMPLETIONS, {"prompt": [99999], "echo": True}, "prompt", "outside the tokenizer's 4096"),
    (CHAT, {"messages": [{"role": "user", "content": "x " * 600}]}, "messages", "tokens; max_model_len 512"),
    (COMPLETIONS, {"prompt": ["a"] * 100, "n": 2}, "n", "more than 128 answers"),
    (COMPLETIONS, {**GOOD, "logit_bias": {"x": 1}}, None, "not a token id"),
    (COMPLETIONS, {**GOOD, "logit_bias": {"01": 5, "1": -5}}, None, "names token id 1 twice"),
    (COMPLETIONS, {**GOOD, "logit_bias": {"5000": 1}}, "logit_bias", "outside the vocabulary"),
    (COMPLETIONS, {**GOOD, "logit_bias": {"5": 1e9}}, "logit_bias.5", "less than or equal to 100"),
    (COMPLETIONS, {**GOOD, "stop_token_ids": [5000]}, "stop_token_ids", "outside the vocabulary"),
    (COMPLETIONS, {**GOOD, "stream_options": {"include_usage": True}}, None, "goes with stream"),
    (COMPLETIONS, {**GOOD, "min_tokens": 9}, None, "min_tokens (9) exceeds max_tokens (4)"),
    (COMPLETIONS, {**GOOD, "echo": True, "stream": True, "logprobs": 1}, "echo", "does not support echo"),
    (COMPLETIONS, {**GOOD, "speculative": {"method": "medusa"}}, None, "loaded: draft_model, ngram, pattern"),
    (COMPLETIONS, {**GOOD, "speculative": {"num_speculative_tokens": 4}}, "speculative.num_speculative_tokens",
     "from 0 to 3 here, not 4"),
    (COMPLETIONS, {**GOOD, "speculative": {"enabled": False, "method": "ngram"}}, "speculative", "enabled is false"),
    (
        COMPLETIONS,
        {**GOOD, "speculative": {"method": "none", "num_speculative_tokens": 2}},
        "speculative",
        "method is 'none'",
    ),
    (COMPLETIONS, {**GOOD, "structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
    (COMPLETIONS, {**GOOD, "structured_outputs": {}}, None, "exactly one of"),
    (COMPLETIONS, {**GOOD, "structured_outputs": {"regex": "a", "choice": ["b"]}}, None, "exactly one of"),
    (COMPLETIONS, {**shaped(regex="a"), "response_format": {"type": "json_object"}}, None, "remove one"),
    (COMPLETIONS, shaped(json={"type": "nonsense"}), "structured_outputs", "Invalid type: nonsense"),
    (COMPLETIONS, shaped(json={"type": "object", "not": {}}), None, 'Unimplemented keys: ["not"]'),
    (COMPLETIONS, shaped(json={"$ref": "file:///etc/passwd"}), None, "not present in a registry"),
    (COMPLETIONS, shaped(json={"enum": []}), None, "Unsatisfiable"),
    (COMPLETIONS, {**shaped(choice=["yes"]), "bad_words": ["yes", "y", "ye"]}, None, "no token"),
    (COMPLETIONS, shaped(choice=["y" * 65536]), None, "exceed max_grammar_bytes 65536"),
    (COMPLETIONS, shaped(json={"const": "y" * 65536}), None, "exceed max_grammar_bytes 65536"),
    (COMPLETIONS, shaped(grammar="start: r\n" + "r: x\n" * 1000), None, "more than 1000 rules"),
    (COMPLETIONS, {**shaped(grammar=VAGUE), "max_tokens": 300, "min_tokens": 300}, None, "max is 1000"),
    (CHAT, {"messages": []}, "messages", "at least 1 item"),
    (CHAT, {"messages": [{"role": "robot", "content": "hi"}]}, "messages.0.role", "Input should be"),
    (CHAT, {"messages": ["hi"]}, "messages.0", "must be an object"),
    (CHAT, {"messages": None}, "messages", "valid list"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages.0.content", "a text or a list of text parts"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type", "'text'"),
    (CHAT, {"messages": [{"role": "assistant", "content": "", "refusal": "no"}]}, "messages.0.refusal", "not support"),
    (CHAT, {**HI, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "tokenize is no variable"),
    (CHAT, {**HI, "continue_final_message": True, "add_generation_prompt": True}, None,
     "set add_generation_prompt=False"),
    (CHAT, {**HI, "top_logprobs": 2}, None, "goes with logprobs"),
    (CHAT, {**HI, "response_format": {"type": "json_schema"}}, "response_format", "goes with type"),
    ("/detokenize", {"tokens": [70000]}, "tokens", "outside the tokenizer's 4096"),
    ("/tokenize", {}, None, "only one of them"),
]  # fmt: skip


LONE, DEEP = b'"\\ud800"', b"[" * 300 + b"]" * 300
UNREPEATABLE = [
    (RESPONSES, b'"input":"a","metadata":{"a":%s}', "metadata.a"),
    (RESPONSES, b'"input":"a","user":%s', "user"),
    (RESPONSES, b'"input":"a","tool_choice":"none","tools":[{"type":"function","name":"f","parameters":{"x":%s}}]',
     "tools.0.parameters"),
    (RESPONSES, b'"input":[{"role":"user","content":"a"},{"type":"reasoning","summary":[%s]}]', "input.1.summary"),
    (RESPONSES, b'"input":[{"role":"user","content":"a","odd":%s}]', "input.0.odd"),
    ("/apply-template", b'"tools":[{"type":"function","function":{"description":%s}}]', "tools.0.function"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "message"), [
    (LONE, "half a surrogate pair"), (DEEP, "nested too deeply"), (b"NaN", "finite"), (b"-Infinity", "finite"),
], ids=["half", "deep", "nan", "infinity"])  # fmt: skip
@pytest.mark.parametrize(("path", "body", "param"), UNREPEATABLE, ids=[str(i) for i in range(len(UNREPEATABLE))])
def test_json_that_no_answer_could_repeat(server, path, body, param, value, message):
    content = b"{%s}" % (body % value)
    answer = server.http.post(path, content=content, headers={"Content-Type": "application/json"})
    check(answer, 400, message)
    assert f"{answer.json()['error']['param']}.".startswith(f"{param}.")


def test_json_in_other_encodings_is_read(server):
    for encoding in ("utf-8-sig", "utf-16"):
        content = json.dumps({**GOOD, "user": "\U0001f642"}, ensure_ascii=False).encode(encoding)
        answer = server.http.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 200, answer.text


def check(response, status, message, param=None):
    """OpenAI's shape, the status, and no trace of our code."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"]
    if param is not None:
        assert error["param"] == param
    secrets = ("Traceback", ".py", "File ", "function-", "functools", " at 0x", "ydantic", "instance of", "after val")
    for secret in secrets:
        assert secret not in response.text


@pytest.mark.parametrize(("path", "body", "param", "message"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_wrong_bodies(server, path, body, param, message):
    check(server.post(path, body), 400, message, param)


@pytest.mark.parametrize(("content", "message"), [
    (b'{"prompt": "def', "not valid JSON"),
    (b"", ""),
    *((content, "the body must be a JSON object") for content in (b"[1, 2]", b'"a"', b"3", b"null")),
    (b'{"prompt": "a", "temperature": NaN}', "finite"),
    (b'{"prompt": "\\ud800"}', "half a surrogate pair"),
    (b'{"prompt": "a", "bad_words": ["\xed\xa0\x80"]}', "half a surrogate pair"),
    (b'{"prompt": "a", "\\udfff": 1}', ""),
    (b'{"prompt": "a", "structured_outputs": {"json": {"const": "\\ud800"}}}', ""),
    (b'{"prompt": ' + b"[" * 100000 + b"]" * 100000 + b"}", ""),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", ""),
    (b'{"prompt": "\xff\xfe"}', "the body is not valid JSON: 'utf-8' codec can't decode byte 0xff"),
], ids=range(14))  # fmt: skip
def test_broken_json(server, content, message):
    response = server.http.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
    check(response, 400, message)


@pytest.mark.parametrize(("kind", "given"), [
    (CompletionRequest, {"prompt": [1, *[""] * MANY]}),
    (CompletionRequest, {**GOOD, "logit_bias": dict.fromkeys(map(str, range(MANY)), "")}),
    (CompletionRequest, {**GOOD, "speculative": dict.fromkeys(map(str, range(MANY)), 1)}),
    (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}] * MANY}]}),
    (DetokenizeRequest, {"tokens": [""] * MANY}),
    (ResponseRequest, {"input": "a", "include": [1] * MANY}),
], ids=range(6))  # fmt: skip
def test_only_the_first_of_many_errors_is_looked_for(kind, given):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(given)
    assert caught.value.error_count() == 1


def test_unknown_things(server):
    check(server.post(COMPLETIONS, {**GOOD, "model": "gpt-4"}), 404, "there is no model 'gpt-4'", "model")
    check(server.http.get("/v1/models/../../etc/passwd"), 404, "")
    check(server.http.get("/v1/nothing"), 404, "nothing at /v1/nothing")
    check(server.http.get("/page/..%2f..%2fapp"), 404, "nothing at")
    check(server.post("/v1/responses/compact", {}), 404, "nothing at /v1/responses/compact")
    check(server.http.get(COMPLETIONS), 405, "does not take GET")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", None])
@pytest.mark.parametrize("where", [{"Origin": "https://elsewhere.org"}, {"Sec-Fetch-Site": "cross-site"}])
def test_a_body_that_does_not_say_it_is_json(server, kind, where):
    """Pages of other sites can send these without asking: they must not be taken for JSON."""
    headers = where if kind is None else {"Content-Type": kind, **where}
    answer = server.http.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)
    check(answer, 400, "'Content-Type: application/json': it came " + (f"as {kind}" if kind else "without"))
    assert answer.json()["error"]["param"] is None


def test_curl_needs_no_header(server):
    body = json.dumps({"prompt": "a", "max_tokens": 4, "temperature": 0})
    expected = server.post(COMPLETIONS, json.loads(body)).json()["choices"]
    ran = subprocess.run(["curl", "-s", f"{server.url}{COMPLETIONS}", "-d", body], capture_output=True, check=True)
    assert json.loads(ran.stdout)["choices"] == expected
    answer = server.http.post(COMPLETIONS, content=body.encode(), headers={"Content-Type": "text/plain"})
    check(answer, 400, "it came as text/plain")


def test_a_context_that_is_too_short_has_its_code(server):
    """What OpenAI's clients look at to shorten the prompt and try again."""
    long = "x " * 600
    bodies = [
        (COMPLETIONS, {"prompt": long}),
        (COMPLETIONS, {"prompt": ["x", long]}),
        (COMPLETIONS, {**GOOD, "max_tokens": 600}),
        (CHAT, {"messages": [{"role": "user", "content": long}]}),
    ]
    codes = [server.post(path, body).json()["error"]["code"] for path, body in bodies]
    assert codes == ["context_length_exceeded"] * 4
    assert server.post(COMPLETIONS, {"prompt": ""}).json()["error"]["code"] is None


def test_others_lose_nothing(server, plain, good_text):
    """Good requests and wrong ones at the same time."""
    good = {"prompt": "def parse(", "temperature": 0.9, "seed": 11, "max_tokens": 40}
    with ThreadPoolExecutor(6) as threads:
        answers = threads.map(lambda _: httpx2.post(server.url + COMPLETIONS, json=good, timeout=60), range(6))
        for path, body, _, _ in WRONG:
            assert server.post(path, body).status_code == 400
        assert [answer.json()["choices"][0]["text"] for answer in answers] == [good_text] * 6


@pytest.fixture(scope="module", autouse=True)
def good_text(plain):
    """Answered before a server has the engine, which would run the same rounds beside."""
    return plain("def parse(", SamplingParams(temperature=0.9, seed=11, max_tokens=40)).text


@pytest.fixture
def strict(served):
    options = ServerOptions(served_model_name="tiny", api_key="s3cret", max_body_bytes=2000, body_timeout=0.5)
    with run_server(served, options) as running:
        yield running


def test_the_key_guards_all_but_three_paths(strict):
    for path in ("/", "/health", "/live", "/metrics"):
        assert strict.http.get(path).status_code == 200
    for path in ("/v1/models", "/version", "/openapi.json"):
        check(strict.http.get(path), 401, "API key")
    for header in (b"Bearer wrong", b"s3cret", b"Basic s3cret", b"Bearer", b"Bearer \xc3\xa9"):
        answer = strict.http.post(COMPLETIONS, json=GOOD, headers={"Authorization": header})
        check(answer, 401, "API key")
    good = strict.http.post(COMPLETIONS, json=GOOD, headers={"Authorization": "Bearer s3cret"})
    assert good.status_code == 200
    check(strict.http.post(CHAT, json=HI, headers={"Authorization": "Bearer s3cret"}), 400, "--chat-template")


def test_a_page_of_another_name_is_refused(served):
    """DNS rebinding: a page at evil.example, whose name now leads here, sends its own name."""
    with run_server(served) as local:
        port = local.url.rpartition(":")[2]
        names = (f"127.0.0.1:{port}", "localhost", f"LOCALHOST.:{port}", "forerun.localhost", f"[::1]:{port}", "::1")
        for host in names:
            assert local.http.get("/v1/models", headers={"Host": host}).status_code == 200
        for host in (f"evil.example:{port}", "localhost.evil.example", "10.0.0.1", "[::2]", "[", "0x7f.1", "\xe9vil"):
            for path in ("/", "/health", "/metrics", "/v1/models", "/nothing"):
                answer = local.http.get(path, headers={"Host": host.encode("latin-1")})
                check(answer, 403, "does not answer to the name")
                assert answer.json()["error"]["code"] == "host_not_allowed"
                assert answer.json()["error"]["type"] == "permission_error"
        check(local.http.post(COMPLETIONS, json=GOOD, headers={"Host": "evil.example"}), 403, "'evil.example'")
    options = ServerOptions(served_model_name="tiny", allowed_host=["Models.example", "10.0.0.1"])
    with run_server(served, options) as named:
        for host in ("models.example:8000", "10.0.0.1", "localhost"):
            assert named.http.get("/health", headers={"Host": host}).status_code == 200
        check(named.http.get("/health", headers={"Host": "other.example"}), 403, "'other.example'")
    with run_server(served, ServerOptions(served_model_name="tiny", allowed_host=None)) as public:
        assert public.http.get("/health", headers={"Host": "any.example"}).status_code == 200


def test_bodies_are_bounded_in_size_and_time(strict):
    key = {"Authorization": "Bearer s3cret"}
    check(strict.http.post(COMPLETIONS, json={"prompt": "a" * 3000}, headers=key), 413, "larger than 2000 bytes")

    def parts():
        for _ in range(30):  # few: all must come within the body's time on any machine
            yield b"a" * 100

    check(strict.http.post(COMPLETIONS, content=parts(), headers=key), 413, "larger than 2000 bytes")
    host = strict.url.removeprefix("http://")
    with httpx2.Client(timeout=10) as client:
        stuck = threading.Event()

        def slow():
            yield b'{"prompt'
            stuck.wait(1.5)

        answer = client.post(f"http://{host}{COMPLETIONS}", content=slow(), headers=key)
        stuck.set()
    check(answer, 408, "did not arrive within 0.5 seconds")


@pytest.mark.usefixtures("slow_rounds")
def test_a_full_queue_and_a_late_answer(served):
    options = ServerOptions(served_model_name="tiny", chat_template=TEMPLATE, request_timeout=0.8)
    body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "speculative": {"enabled": False}}
    with run_server(served, options, max_queue=1) as running:
        check(running.post(COMPLETIONS, body), 504, "not answered within 0.8 seconds")
        full = running.post(COMPLETIONS, {**body, "prompt": ["a"] * 6})
        check(full, 429, "1 waiting, limit 1")
        assert full.headers["Retry-After"] == "1"
        stream = running.post(COMPLETIONS, {**body, "stream": True})
        assert '"error":{"message":"the request was not answered within 0.8 seconds"' in stream.text
        assert stream.text.endswith("data: [DONE]\n\n")


def test_a_broken_engine_is_a_clear_500(served, monkeypatch):
    broken = Mock(side_effect=RuntimeError("the device is lost"))
    with run_server(served) as running:
        monkeypatch.setattr(served.engine.model, "forward", broken)
        answer = running.post(COMPLETIONS, GOOD)
        check(answer, 500, "the engine failed in this request's round: RuntimeError: the device is lost")
        monkeypatch.undo()
        assert running.post(COMPLETIONS, GOOD).status_code == 200


def test_a_draining_server_refuses(served):
    with run_server(served) as running:
        running.engine.draining = True
        check(running.post(COMPLETIONS, GOOD), 503, "shutting down")
        check(running.http.get("/health"), 503, "shutting down")
        assert running.http.get("/live").status_code == 200


def test_two_servers_on_a_port():
    with open_socket("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use: choose another with --port"):
            open_socket("127.0.0.1", port)
    refused(ConfigError, "cannot listen", open_socket, "no.such.host.invalid", 0)

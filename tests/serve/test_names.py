"""What clients may call the model, and whose pages may ask for it."""

import openai
import pytest
from running import TEMPLATE, client_of, run_server

from forerun.core.errors import ConfigError
from forerun.serve.options import ServerOptions, model_names
from refusals import refused

ASKED = {"prompt": "a = ", "max_tokens": 2}
PAGE = "https://app.example.com"


@pytest.mark.parametrize(("given", "usual", "others"), [
    ("/models/here/qwen15.gguf", "qwen15", ["/models/here/qwen15.gguf", "/models/here/qwen15", "qwen15.gguf"]),
    ("qwen15.gguf", "qwen15", ["qwen15.gguf"]),
    ("./a.b-Q4_0.gguf", "a.b-Q4_0", ["./a.b-Q4_0.gguf", "a.b-Q4_0.gguf"]),
    ("~/models/llama", "llama", ["~/models/llama"]),
    ("/models/llama/", "llama", ["/models/llama/"]),
    ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B", ["Qwen2.5-0.5B"]),
    ("forerun:target", "forerun:target", []),
    ("smollm2", "smollm2", []),
])  # fmt: skip
def test_names(given, usual, others):
    result = model_names(given)
    assert result[0] == usual
    assert set(others) <= set(result)
    assert not {"", ".gguf"} & set(result)


def test_a_folder_here_goes_by_its_own_name(tmp_path, monkeypatch):
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert model_names("org/model")[0] == "model"
    assert model_names("other/model")[0] == "other/model"
    monkeypatch.chdir(tmp_path / "org")
    assert model_names(".")[0] == "org"


@pytest.fixture(scope="module")
def named(served):
    options = ServerOptions(
        served_model_name="", chat_template=TEMPLATE, api_key="s3cret", allowed_origin=[PAGE, "http://localhost:3000/"]
    )
    with run_server(served, options.named_after("/models/here/qwen15.gguf")) as running:
        running.http.headers["Authorization"] = "Bearer s3cret"
        yield running


@pytest.mark.parametrize("name", ["qwen15", "qwen15.gguf", "/models/here/qwen15.gguf", "/models/here/qwen15"])
def test_all_names_are_served_and_one_is_said(named, name):
    with openai.OpenAI(base_url=f"{named.url}/v1", api_key="s3cret", max_retries=0) as client:
        assert client.completions.create(model=name, **ASKED).model == "qwen15"
        assert client.models.retrieve(name).id == "qwen15"
        assert [model.id for model in client.models.list()] == ["qwen15"]
    described = named.http.get("/openapi.json").json()["components"]["schemas"]
    assert name in described["CompletionRequest"]["properties"]["model"]["enum"]
    assert described["Completion"]["properties"]["model"]["enum"] == ["qwen15"]


@pytest.mark.parametrize("name", ["qwen", "here/qwen15", "", "QWEN15"])
def test_other_names_are_not(named, name):
    answer = named.post("/v1/completions", {**ASKED, "model": name})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert "there is 'qwen15'" in answer.json()["error"]["message"]


def test_a_given_name_is_the_only_one(served):
    options = ServerOptions(served_model_name="mine").named_after("/models/here/qwen15.gguf")
    assert (options.served_model_name, list(options.aliases)) == ("mine", [])


def preflight(running, origin):
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST",
               "Access-Control-Request-Headers": "authorization, content-type"}  # fmt: skip
    del running.http.headers["Authorization"]  # browsers ask without it
    try:
        answer = running.http.request("OPTIONS", "/v1/chat/completions", headers=headers)
    finally:
        running.http.headers["Authorization"] = "Bearer s3cret"
    return {"status": str(answer.status_code), **answer.headers}


@pytest.mark.parametrize("origin", [PAGE, "http://localhost:3000"])
def test_allowed_pages_may_ask(named, origin):
    told = preflight(named, origin)
    assert told["status"] == "200"
    assert told["access-control-allow-origin"] == origin
    assert {"GET", "POST", "DELETE"} <= set(told["access-control-allow-methods"].split(", "))
    assert {"authorization", "content-type"} <= set(told["access-control-allow-headers"].split(", "))
    for body, status in (({**ASKED}, 200), ({**ASKED, "model": "other"}, 404)):  # errors can be read too
        answer = named.post("/v1/completions", body, headers={"Origin": origin})
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == origin
    answer = named.post("/v1/completions", ASKED, headers={"Origin": origin, "Authorization": "Bearer wrong"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, origin)


def test_other_pages_may_not(named, server):
    assert "access-control-allow-origin" not in preflight(named, "https://evil.example")
    answer = named.post("/v1/completions", ASKED, headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in answer.headers
    answer = server.http.request("OPTIONS", "/v1/completions", headers={"Origin": PAGE})
    assert (answer.status_code, answer.json()["error"]["type"]) == (405, "invalid_request_error")


@pytest.mark.parametrize("origin", ["app.example.com", "https://app.example.com/path", "", "null"])
def test_what_is_no_origin_is_refused(origin):
    refused(ConfigError, "is not an origin: use one like", ServerOptions, allowed_origin=[origin])


def test_there_are_no_embeddings(server):
    with client_of(server) as client, pytest.raises(openai.NotFoundError, match="embeddings are not") as caught:
        client.embeddings.create(model="tiny", input="a text")
    assert caught.value.code == "no_embeddings"
    assert "\n" not in caught.value.message

"""A model's own sampling settings are the defaults of every API and of ``LLM``."""

import json
import shutil

import pytest
from running import TEMPLATE, run_server

from forerun import LLM, SamplingParams
from forerun.serve.app import ServerOptions

OWN = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2}
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
PROMPT, ASK = {"prompt": "def parse(", "max_tokens": 16, "seed": 3}, [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(model_folder, tmp_path_factory):
    """The tiny model with settings of its own."""
    result = tmp_path_factory.mktemp("own") / "model"
    shutil.copytree(model_folder, result)
    path = result / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **OWN}))
    return result


@pytest.fixture(scope="module", params=["auto", "vllm"])
def llm(request, folder):
    options = {"generation_config": request.param, "page_size": 16, "max_num_seqs": 4}
    with LLM(str(folder), speculative_config={"method": "ngram"}, **options) as llm:
        yield llm, OWN if request.param == "auto" else NEUTRAL


def text(answer):
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def test_llm(llm, caplog):
    llm, settings = llm
    assert llm.get_default_sampling_params() == SamplingParams(**settings)
    kinds = {}
    for params in (None, SamplingParams(**settings)):
        seen = []
        llm.generate("def parse(", params, on_update=lambda update, seen=seen: seen.append(update))
        kinds[params is None] = {update.job.sequence.params.clone(seed=None) for update in seen}
    assert kinds[True] == kinds[False]
    llm.generate("a")
    told = [record.getMessage() for record in caplog.records if "own settings" in record.getMessage()]
    assert len(told) == (settings is OWN)
    assert all("temperature 0.7, top_k 20" in line for line in told)


def test_served(llm):
    llm, settings = llm
    with run_server(llm, ServerOptions(served_model_name="tiny", chat_template=TEMPLATE)) as server:
        chat = {**PROMPT, "messages": ASK}
        del chat["prompt"]
        for path, body in (("/v1/completions", PROMPT), ("/v1/chat/completions", chat)):
            assert text(server.post(path, body)) == text(server.post(path, {**body, **settings}))
            changed = {**settings, "temperature": 5.0, "top_k": 0, "top_p": 1.0}
            given = {name: changed[name] for name in ("temperature", "top_k", "top_p")}
            assert text(server.post(path, {**body, **given})) == text(server.post(path, {**body, **changed}))
            assert text(server.post(path, {**body, **given})) != text(server.post(path, body))
            beams = {**body, "use_beam_search": True, "n": 2}
            del beams["seed"]
            assert server.post(path, beams).status_code == 200
        answer = server.post("/v1/responses", {"input": "hi", "max_output_tokens": 16, "seed": 3}).json()
        assert (answer["temperature"], answer["top_p"]) == (settings["temperature"], settings["top_p"])
        assert answer["output"][0]["content"][0]["text"] == text(server.post("/v1/chat/completions", chat))
        ollama = {"messages": ASK, "options": {"seed": 3, "num_predict": 16}, "stream": False}
        assert server.post("/api/chat", ollama).json()["message"]["content"] == text(
            server.post("/v1/chat/completions", chat)
        )
        names = ["temperature", "repeat_penalty"] if settings is OWN else []
        shown = server.post("/api/show", {}).json()["parameters"]
        assert [name for name in names if name in shown] == names
        assert bool(shown) == bool(names)

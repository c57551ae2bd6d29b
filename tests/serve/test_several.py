"""Several models in one server: loaded when they are named, put away when they are idle or memory is short."""

import asyncio
import gc
import itertools
import json
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import anthropic
import httpx2
import ollama
import pytest
from huggingface_hub import constants
from prometheus_client.parser import text_string_to_metric_families
from running import TEMPLATE, run_app, until
from test_process import FAST_LOG, serving

from forerun import LLM, ConfigError, SamplingParams
from forerun.cli.main import run
from forerun.engine.async_engine import Turns
from forerun.engine.engine import Engine
from forerun.serve import models
from forerun.serve.app import create_app
from forerun.serve.models import Library
from forerun.serve.options import ServerOptions, seconds_of
from held import held, new_block
from refusals import refused
from tiny import save_checkpoint, tiny_llama

CACHES = 512 << 10
TWO = "1.6MB"
"""Holds two of the models with their caches, and not three."""
ENGINE = {"page_size": 16, "kv_cache_memory": CACHES, "threads": 1}
ASK = {"prompt": "abc", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
LONG = {**ASK, "max_tokens": 80, "stream": True}
A, B, C, BROKEN = (f"hf:own/{name}" for name in ("a", "b", "c", "broken"))


@pytest.fixture(scope="session")
def hub_cache(tmp_path_factory):
    """Three models that answer otherwise, and one that cannot be loaded."""
    cache = tmp_path_factory.mktemp("hub")
    for index, name in enumerate(("a", "b", "c", "broken")):
        folder = cache / f"models--own--{name}" / "snapshots" / "1234"
        save_checkpoint(tiny_llama(initializer_range=0.3 + index / 20), folder)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        (cache / f"models--own--{name}" / "refs").mkdir()
        (cache / f"models--own--{name}" / "refs" / "main").write_text("1234")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    return cache


@pytest.fixture
def here(hub_cache, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub_cache))
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    return hub_cache


@pytest.fixture
def loads(monkeypatch):
    """The names of models in the order in which they were loaded."""
    names = []

    def load(**options):
        names.append(options["model"])
        return LLM(**options)

    monkeypatch.setattr(models, "LLM", load)
    return names


@contextmanager
def library(memory=TWO, engine=(), **options):
    given = ServerOptions(models=True, model_memory=memory, **options)
    several = Library({**ENGINE, **dict(engine)}, given)
    with run_app(create_app(several)) as (url, _, http):
        yield several, url, http
    assert not several.entries


def ask(http, model, **more):
    answer = http.post("/v1/completions", json={**ASK, "model": model, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def in_memory(http):
    return [each["name"] for each in http.get("/api/ps").json()["models"]]


@pytest.fixture
def alone(here):
    """What each model answers in an ``LLM`` of its own."""

    def answer(name, **options):
        params = SamplingParams(**{key: ASK[key] for key in ("max_tokens", "temperature", "ignore_eos")} | options)
        llm = LLM(str(here / f"models--own--{name[-1]}" / "snapshots" / "1234"), speculative_config=None)
        return llm.generate(["abc"], params, use_tqdm=False)[0].outputs[0].text

    return answer


@pytest.fixture
def slow(monkeypatch):
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: time.sleep(0.01) or step(engine))


def test_each_answers_as_it_would_alone(here, loads, alone):
    with library() as (_, _, http):
        answers = {name: ask(http, name) for name in (A, B, A)}
        assert loads == [A, B]
        for name, answer in answers.items():
            assert (answer["model"], answer["choices"][0]["text"]) == (name, alone(name))
        assert len({answer["choices"][0]["text"] for answer in answers.values()}) == 2
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "model": "a"}  # its last part
        assert http.post("/v1/chat/completions", json=chat).json()["model"] == A
        assert http.post("/tokenize", json={"model": B, "prompt": "ab"}).json()["count"] == 2
        assert http.get("/props", params={"model": A}).json()["model_alias"] == A
        assert loads == [A, B]


def test_lists_name_all_and_load_none(here, loads):
    with library() as (_, url, http), ollama.Client(host=url) as client:
        names = [A, B, BROKEN, C]
        listed = http.get("/v1/models").json()
        assert [each["id"] for each in listed["data"]] == names
        assert (listed["first_id"], listed["last_id"]) == (names[0], names[-1])
        assert "max_model_len" not in listed["data"][0]
        assert [each.model for each in client.list().models] == names
        assert client.ps().models == []
        shown = client.show(A)
        assert shown.capabilities == ["completion", "tools"]
        assert (shown.template, shown.modelinfo["llama.context_length"]) == (TEMPLATE, 256)
        assert loads == []
        ask(http, B)
        (card,) = [each for each in http.get("/v1/models").json()["data"] if each["id"] == B]
        assert (card["max_model_len"], list(card["speculative"])) == (256, ["suffix"])
        assert http.get(f"/v1/models/{B}").json() == card
        assert [each.model for each in client.ps().models] == [B]
        assert http.get("/health").status_code == 200
        described = http.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]
        assert "enum" not in described["properties"]["model"]


def test_an_unknown_or_missing_name(here, loads):
    with library() as (_, url, http):
        for body, status, code in (({"model": "d"}, 404, "model_not_found"), ({}, 400, "model_missing")):
            answer = http.post("/v1/completions", json={**ASK, **body})
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert http.get("/v1/models/d").status_code == 404
        assert http.get("/props").status_code == 400
        with ollama.Client(host=url) as client:
            with pytest.raises(ollama.ResponseError, match="no model 'd'") as error:
                client.generate("d", "x")
            assert error.value.status_code == 404
        asked = [{"role": "user", "content": "x"}]
        missing = pytest.raises(anthropic.NotFoundError, match="no model 'd'")
        with anthropic.Anthropic(base_url=url, api_key="x") as client, missing:
            client.messages.create(model="d", max_tokens=1, messages=asked)
    with library(strict=True) as (_, _, http):
        assert http.post("/v1/completions", json={**ASK, "model": A, "odd": 1}).status_code == 400
    assert loads == []


def test_many_requests_for_one_load_it_once(here, loads):
    with library() as (_, _, http), ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda name: ask(http, name), [A, B] * 4))
    assert sorted(loads) == [A, B]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 2


def test_the_least_recently_used_makes_room(here, loads):
    with library() as (several, _, http):
        for name in (A, B, A, C):
            ask(http, name)
        assert in_memory(http) == [A, C]
        ask(http, B)
        assert in_memory(http) == [C, B]
        assert loads == [A, B, C, B]
        assert several._used() <= several.memory
        assert sum(each["size"] for each in http.get("/api/ps").json()["models"]) == several._used()


def streamed(http, model):
    with http.stream("POST", "/v1/completions", json={**LONG, "model": model}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])


def test_a_stream_is_never_cut(here, loads, alone, slow):
    """Both models that fit are in use, so that the third waits; a later request for one of them waits behind it."""
    with library() as (several, _, http):
        for name in (A, B):
            ask(http, name)
        with ThreadPoolExecutor(2) as threads:
            streams = [threads.submit(streamed, http, name) for name in (A, B)]
            until(lambda: all(entry.users for entry in several.entries.values()))
            assert ask(http, C)["choices"][0]["text"] == alone(C)
            assert any(stream.done() for stream in streams), "it was loaded while both were in use"
            texts = [stream.result(60) for stream in streams]
        assert texts == [alone(name, max_tokens=LONG["max_tokens"]) for name in (A, B)]
        assert loads == [A, B, C]


def test_who_waits_for_memory_too_long_is_told(here, slow):
    with library("0.8MB") as (several, _, http):
        ask(http, A, max_tokens=1)
        usual, several.options = several.options, replace(several.options, request_timeout=0.3)
        body = {**LONG, "max_tokens": 200, "model": A}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            refused = http.post("/v1/completions", json={**ASK, "model": B})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_memory")
            assert list(several.entries) == [A]
        several.options = usual
        until(lambda: not several.entries[A].users)  # its reader has left
        assert ask(http, B, max_tokens=1)["model"] == B


def test_keep_alive(here, loads):
    with library(keep_alive="1h") as (several, url, http), ollama.Client(host=url) as client:

        def expires():
            (each,) = client.ps().models
            return each.expires_at.timestamp() - time.time()

        for given, least, most in ((None, 3500, 3600), ("10m", 590, 600), (90, 80, 90), (-1, 1e9, 1e12)):
            said = client.generate(A, "abc", options={"num_predict": 2}, keep_alive=given)
            assert said.done_reason == "length"
            assert least < expires() <= most, given
        ask(http, A)  # another API's request leaves it as it was
        assert expires() > 1e9
        assert client.generate(A, keep_alive=0).done_reason == "unload"
        assert client.ps().models == []
        assert client.chat(A, keep_alive="5m").done_reason == "load"
        assert loads == [A, A]
        assert client.generate(B, keep_alive=0).done_reason == "unload"  # it was not there
        assert client.generate(A, "abc", options={"num_predict": 2}, keep_alive=0.2).response
        until(lambda: client.ps().models == [])
        assert loads == [A, A]
        for odd in ("soon", True, [], "5 m"):
            answer = http.post("/api/generate", json={"model": A, "keep_alive": odd})
            assert answer.status_code == 400
            assert "seconds or a text such as 5m" in answer.json()["error"]
        assert not several.leaving


def test_durations():
    given = {"5m": 300, "1h30m": 5400, "1.5s": 1.5, "250ms": 0.25, "0": 0, 0: 0, "90": 90, 2.5: 2.5}
    assert {each: seconds_of(each) for each in given} == given
    assert {seconds_of(each) for each in (-1, "-1", "-5m", -0.5, 1e300)} == {float("inf")}
    for odd in ("", "m", "5x", "5m6", None, float("nan")):
        refused(ConfigError, "seconds or a text such as 5m", seconds_of, odd)


def test_memory_is_given_back(here, monkeypatch):
    """By objects and bytes of each model that came and went; one that stays has 200 kB and its caches."""
    new_block(monkeypatch)
    sizes = []
    with library() as (_, _, http):
        for count in (3, 9):
            for _ in range(count):
                ask(http, A)
                http.post("/api/generate", json={"model": A, "keep_alive": 0})
                until(lambda: not in_memory(http))
            time.sleep(0.2)
            sizes.append(held())
    grown = sizes[1].growth(sizes[0], 9)
    assert grown.objects < 100
    assert grown.allocated < 50_000


def test_an_idle_connection_does_not_keep_a_model(here):
    with library() as (several, url, http), httpx2.Client(base_url=url) as other:
        ask(http, A)
        engine = weakref.ref(several.entries[A].server.engine.engine)
        assert other.post("/api/generate", json={"model": A, "keep_alive": 0}).json()["done_reason"] == "unload"
        until(lambda: not several.leaving)
        gc.collect()
        assert engine() is None


def test_one_that_cannot_be_loaded_leaves_the_others_alone(here, loads):
    with library() as (several, _, http):
        ask(http, A)
        for _ in range(2):
            answer = http.post("/v1/completions", json={**ASK, "model": BROKEN})
            assert answer.status_code == 500
            error = answer.json()["error"]
            assert error["code"] == "model_not_loaded"
            assert error["message"].startswith(f"{BROKEN} cannot be loaded: ")
            assert list(several.entries) == [A]
        said = http.post("/api/chat", json={"model": BROKEN, "messages": []})
        assert (said.status_code, list(said.json())) == (500, ["error"])
        ask(http, A)
        ask(http, B)
    assert loads == [A, BROKEN, BROKEN, BROKEN, B]


def test_one_that_is_too_large(here, loads):
    with library("0.5MB") as (_, url, http), ollama.Client(host=url) as client:
        answer = http.post("/v1/completions", json={**ASK, "model": A})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "model_too_large")
        assert "raise --model-memory" in answer.json()["error"]["message"]
        refused(ollama.ResponseError, "raise --model-memory", client.chat, A)
    assert loads == []


def test_caches_take_a_part_of_the_memory_by_default(here):
    with library("4MB", {"kv_cache_memory": None}) as (several, _, http):
        several.engine.pop("kv_cache_memory")
        ask(http, A)
        ask(http, B)
        for entry in several.entries.values():
            assert entry.server.engine.engine.pools[0].nbytes <= 500_000
        assert several._used() <= several.memory


def test_rounds_of_two_models_take_turns(here, monkeypatch):
    step, inside, order = Engine.step, [], []

    def counted(engine):
        inside.append(engine)
        assert len(inside) == 1
        order.append(id(engine))
        time.sleep(0.002)
        try:
            return step(engine)
        finally:
            inside.remove(engine)

    with library() as (_, _, http):
        for name in (A, B):
            ask(http, name)
        monkeypatch.setattr(Engine, "step", counted)
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda name: ask(http, name, max_tokens=80, speculative={"enabled": False}), [A, B]))
    changes = sum(one != other for one, other in itertools.pairwise(order))
    assert changes > 60, "one engine had the cores for long"


def test_turns_are_in_order():
    turns, order = Turns(), []

    def take(index):
        with turns:
            order.append(index)

    with turns:
        threads = []
        for index in range(6):
            threads.append(threading.Thread(target=take, args=[index]))
            threads[-1].start()
            until(lambda index=index: turns._next == index + 2)
    for thread in threads:
        thread.join(10)
    assert order == [*range(6)]


def test_metrics_have_each_loaded_model(here):
    def counted(http, name="forerun:generation_tokens_total"):
        families = text_string_to_metric_families(http.get("/metrics").text)
        samples = [each for family in families for each in family.samples if each.name == name]
        return {each.labels["model_name"]: each.value for each in samples}

    with library() as (_, _, http):
        assert counted(http) == {}
        ask(http, A)
        ask(http, B, max_tokens=5)
        assert counted(http) == {A: 12, B: 5}
        http.post("/api/generate", json={"model": A, "keep_alive": 0})
        assert counted(http) == {B: 5}
        assert counted(http, "forerun:request_success_total")[A] in (0, 1)


def test_the_command(warm, hub_cache):
    code = f"import importlib, huggingface_hub; importlib.reload(huggingface_hub.constants); {FAST_LOG}"
    options = ["--models", "--model-memory", "1GB", "--keep-alive", "-1"]
    with serving(warm, *options, code=code, HF_HUB_CACHE=str(hub_cache)) as (server, url):
        with httpx2.Client(base_url=url, timeout=60, headers={"Authorization": "Bearer s3cret"}) as http:
            assert A in [each["id"] for each in http.get("/v1/models").json()["data"]]
            assert ask(http, A)["model"] == A
            assert [each["name"] for each in http.get("/api/ps").json()["models"]] == [A]
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) in (0, -signal.SIGTERM)
        assert f"{A}: " in server.stdout.read()


@pytest.mark.parametrize(("options", "message"), [
    (["--models", "--model", "smollm2"], "--model is about one"),
    (["--models", "--spec-method", "ngram"], "--spec-method is about one"),
    (["--models", "--served-model-name", "x"], "--served-model-name is about one"),
    (["--models", "--any-model-name"], "--any-model-name is about one"),
    (["--models", "--replicas", "2"], "--replicas is about one"),
    (["--models", "--keep-alive", "soon"], "seconds or a text such as 5m"),
    (["--models", "--model-memory", "much"], "model_memory must be bytes or a size"),
    (["--keep-alive", "5m"], "go with --models"),
    (["--model-memory", "1GB"], "--model-memory and --keep-alive go with --models"),
])  # fmt: skip
def test_options_that_do_not_go_together(options, message, capsys):
    assert run(["serve", "--port", "0", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_drain_waits_for_answers_of_all_models(here, slow):
    with library() as (several, _, http), ThreadPoolExecutor(1) as threads:
        ask(http, B, max_tokens=1)
        text = threads.submit(streamed, http, A)
        until(lambda: A in several.loaded() and several.loaded()[A].server.engine.streams)
        (stream,) = several.loaded()[A].server.engine.streams
        asyncio.run_coroutine_threadsafe(several.drain(60), stream.loop).result(90)
        assert http.get("/health").json()["error"]["code"] == "shutting_down"
        late = http.post("/v1/completions", json={**ASK, "model": B})
        assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")
        assert len(text.result(30)) == LONG["max_tokens"]


def test_a_drain_refuses_who_waits_for_a_model(here, monkeypatch):
    """One waits for the model that is being loaded, and one for its memory."""
    loaded = threading.Event()
    monkeypatch.setattr(models, "LLM", lambda **options: loaded.wait(30) and LLM(**options))
    with library("0.8MB") as (several, _, http), ThreadPoolExecutor(2) as threads:

        def asked(name):
            return threads.submit(http.post, "/v1/completions", json={**LONG, "model": name})

        try:
            waiting = [asked(A)]
            until(lambda: several._tasks)
            waiting.append(asked(B))
            until(several._door.locked)
            (loading,) = several._tasks
            asyncio.run_coroutine_threadsafe(several.drain(60), loading.get_loop()).result(20)
            for each in waiting:
                answer = each.result(10)
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        finally:
            loaded.set()

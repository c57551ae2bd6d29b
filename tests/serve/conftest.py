"""A tiny random model with the bundled tokenizer, and a server in front of it."""

import time

import pytest
from running import HERMES, client_of, run_server

from forerun import LLM, pretrained
from forerun.engine.async_engine import AsyncEngine
from forerun.models.text.tokenizer import load_tokenizer
from forerun.serve.app import ServerOptions
from tiny import tiny_llama

ROUND = 0.01


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """Random weights, float32, 4,096 tokens, a context of 512."""
    folder = tmp_path_factory.mktemp("served")
    tokenizer = load_tokenizer(pretrained.path("target"))
    model = tiny_llama(vocab_size=4096, max_position_embeddings=512, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def served(model_folder):
    """The engine that the tests share, in pages as served ones are; three drafters, chosen per request."""
    drafters = [
        {"method": "draft_model", "model": str(model_folder), "num_speculative_tokens": 3},
        {"method": "ngram"},
        {"method": "pattern"},
    ]
    return LLM(str(model_folder), speculative_config=drafters, max_num_seqs=4, page_size=16)


@pytest.fixture
def slow_rounds(served, monkeypatch):
    """Every round takes ``ROUND`` seconds and more, so that a long answer outlasts a short limit on any machine."""
    step = served.engine.step

    def slow():
        time.sleep(ROUND)
        return step()

    monkeypatch.setattr(served.engine, "step", slow)


@pytest.fixture
def slower_rounds(served, slow_rounds, monkeypatch):
    """Rounds so slow that a long answer still runs when its first words have been read on a busy machine."""
    step = served.engine.step
    monkeypatch.setattr(served.engine, "step", lambda: time.sleep(10 * ROUND) or step())


@pytest.fixture
def engine(served):
    """It has its own thread, which has ended on leaving, and no page is held."""
    asynchronous = AsyncEngine(served.engine, max_queue=4, max_backlog=8)
    yield asynchronous
    asynchronous.close()
    assert not served.engine.jobs
    served.engine.check()


@pytest.fixture(scope="module")
def server(served):
    with run_server(served) as running:
        yield running


@pytest.fixture(scope="module")
def hermes(served):
    """A server of a model that calls tools."""
    with run_server(served, ServerOptions(served_model_name="tiny", chat_template=HERMES)) as running:
        yield running


@pytest.fixture
def client(server):
    with client_of(server) as client:
        yield client


@pytest.fixture(scope="session")
def plain(served):
    """``plain(prompt, params)``: a lone plain decode by the same engine, before any server runs on it."""

    def answer(prompt, params):
        return served.generate([prompt], params, speculate=False)[0].outputs[0]

    return answer

"""A real Chromium. Nothing is installed here: without it these tests fail and say what to install."""

import json
import shutil
import sys
import threading
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))

from pages import DESKTOP, settle, visit
from running import run_server

from chat_model import save_chat_model
from forerun import LLM
from forerun.serve.app import ServerOptions

expect.set_options(timeout=30_000)  # milliseconds, for busy machines
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-features=SpareRendererForSitePerProcess,IsolateOrigins",
    "--disable-site-isolation-trials",
]  # fmt: skip


@pytest.fixture(scope="module")  # Playwright keeps an event loop running in this thread until it is closed
def browser():
    path = shutil.which("chromium")
    assert path is not None, "the playground's tests need a browser: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, headless=True, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def bundled():
    """The bundled pair, as ``forerun serve`` runs it, with a chat template."""
    llm = LLM(speculative_config=[{"method": "draft_model"}, {"method": "ngram"}], max_num_seqs=2, max_model_len=512)
    with run_server(llm) as running:
        yield running


@pytest.fixture(scope="session")
def talking(tmp_path_factory):
    """A tiny chat model with its own template, which drafts for itself and writes on until it is stopped."""
    folder = save_chat_model(tmp_path_factory.mktemp("chat"))
    for name in ("config.json", "generation_config.json"):
        about = json.loads(Path(folder, name).read_text(encoding="utf-8"))
        Path(folder, name).write_text(json.dumps({**about, "eos_token_id": None}), encoding="utf-8")
    settings = Path(folder, "tokenizer_config.json")
    about = json.loads(settings.read_text(encoding="utf-8"))
    settings.write_text(json.dumps({**about, "eos_token": None}), encoding="utf-8")
    drafts = {"method": "draft_model", "model": folder, "num_speculative_tokens": 3}
    llm = LLM(folder, speculative_config=drafts, page_size=64)
    with run_server(llm, ServerOptions(served_model_name="tiny")) as running:
        yield running


@pytest.fixture(scope="session")
def no_template():
    """The bundled target alone, which has no chat template; it asks for a key."""
    options = ServerOptions(served_model_name="tiny", api_key="secret")
    with run_server(LLM(speculative_config=None, max_num_seqs=2, max_model_len=512), options) as running:
        yield running


@pytest.fixture
def hold(monkeypatch):
    """``hold(server)``: its rounds run only as far as what that gives is released, on a machine of any speed."""

    def holding(running):
        engine, rounds = running.engine.engine, threading.Semaphore(0)
        step = engine.step
        # What was made is published between steps, so that a step which may not run must end, too.
        monkeypatch.setattr(engine, "step", lambda: step() if rounds.acquire(timeout=0.02) else [])
        return rounds

    return holding


@pytest.fixture
def talk(browser, talking, request):
    """A conversation, on a desktop's size unless the test says otherwise."""
    with visit(browser, talking.url, getattr(request, "param", DESKTOP)) as page:
        expect(page.locator("#message")).to_be_visible()
        settle(page, max_tokens=24)
        yield page


@pytest.fixture
def page(browser, bundled, request):
    """A text to continue, likewise."""
    with visit(browser, bundled.url, getattr(request, "param", DESKTOP)) as page:
        expect(page.locator("#message")).to_be_visible()
        page.click("#tab_complete")
        page.fill("#prompt", "def read_lines(path):\n")
        settle(page, max_tokens=60)
        yield page

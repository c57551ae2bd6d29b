"""A real Chromium. Nothing is installed here: without it these tests fail and say what to install."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))

from running import Running, run_server

from forerun import LLM
from forerun.serve.app import ServerOptions

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    assert path is not None, "the playground's tests need a browser: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, headless=True, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def bundled() -> Iterator[Running]:
    """The bundled pair, as ``forerun serve`` runs it."""
    llm = LLM(speculative_config=[{"method": "draft_model"}, {"method": "ngram"}], max_num_seqs=2, max_model_len=512)
    with run_server(llm) as running:
        yield running


@pytest.fixture(scope="module")
def no_template() -> Iterator[Running]:
    """The bundled target alone, which has no chat template."""
    with run_server(LLM(max_num_seqs=2, max_model_len=512), ServerOptions(model_name="tiny")) as running:
        yield running

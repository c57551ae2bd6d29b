"""The playground of a server with several models."""

import json
import re

import pytest
from huggingface_hub import constants
from pages import DESKTOP, PHONE, ask, run, screenshot, settle, visit
from playwright.sync_api import expect
from running import TEMPLATE, run_app

from forerun.serve.app import create_app
from forerun.serve.models import Library
from forerun.serve.options import ServerOptions
from tiny import save_checkpoint, tiny_llama

NAMES = [f"hf:own/{name}" for name in ("a", "b", "plain")]


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Three models: two with a chat template, one without."""
    cache = tmp_path_factory.mktemp("hub")
    for index, name in enumerate(("a", "b", "plain")):
        folder = cache / f"models--own--{name}" / "snapshots" / "1234"
        save_checkpoint(tiny_llama(initializer_range=0.3 + index / 20), folder)
        if name != "plain":
            (folder / "chat_template.jinja").write_text(TEMPLATE)
        (cache / f"models--own--{name}" / "refs").mkdir()
        (cache / f"models--own--{name}" / "refs" / "main").write_text("1234")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setenv("FORERUN_CACHE", str(tmp_path_factory.mktemp("own")))
        library = Library({"page_size": 16, "kv_cache_memory": 512 << 10, "threads": 1}, ServerOptions(models=True))
        with run_app(create_app(library)) as (url, _, http):
            yield url, http


def use(page, name):
    page.select_option("#models", name)
    expect(page.locator("#status")).to_have_text("Ready.")


def answer_of(http, model):
    """What the model answers to what :func:`ask` sends."""
    about = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0, "seed": 7}
    answer = http.post("/v1/chat/completions", json={**about, "model": model})
    return answer.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_chosen_model_answers_and_is_remembered(browser, several, size):
    url, http = several
    with visit(browser, url, size) as page:
        expect(page.locator("#models option")).to_have_text(["Choose a model", *NAMES])
        conversations = []
        for name in NAMES[:2]:
            use(page, name)
            settle(page, max_tokens=12)
            assert ask(page, "hi")["model"] == name
            told = page.evaluate("JSON.parse(localStorage[`forerun.conversation.${localStorage['forerun.open']}`])")
            assert (told["model"], told["turns"][0]["answer"]["message"]["content"]) == (name, answer_of(http, name))
            conversations.append(told["id"])
            screenshot(page, f"models-{size['viewport']['width']}-{name[-1]}")
            page.click("#fresh")
        assert page.locator("#models").input_value() == NAMES[1]  # a new conversation keeps it
        page.click("#list")
        page.locator("#kept li").nth(1).locator("button").first.click()
        expect(page.locator("#models")).to_have_value(NAMES[0])
        expect(page.locator("#status")).to_have_text("Ready.")
        page.reload()
        expect(page.locator("#models")).to_have_value(NAMES[0])
        expect(page.locator("#status")).to_have_text("Ready.")
        settle(page, max_tokens=12)
        assert ask(page, "again")["model"] == NAMES[0]


def test_modes_and_drafters_are_the_chosen_models(browser, several):
    url, _ = several
    with visit(browser, url, DESKTOP) as page:
        use(page, NAMES[2])
        expect(page.locator("#tab_chat")).to_be_disabled()
        expect(page.locator("#complete")).to_be_visible()
        settle(page, max_tokens=8)
        with page.expect_request("**/v1/completions") as sent:
            run(page)  # to its end: what it says then would stand over "Ready." of the next model
        assert sent.value.post_data_json["model"] == NAMES[2]
        use(page, NAMES[0])
        expect(page.locator("#chat")).to_be_visible()
        cards = {each["id"]: each for each in several[1].get("/v1/models").json()["data"]}
        drafters = page.locator("#method option").all_text_contents()
        assert drafters == [*cards[NAMES[0]]["speculative"], "none"]


def test_a_model_that_cannot_be_loaded_is_said(browser, several):
    url, _ = several
    with visit(browser, url, DESKTOP) as page:
        expect(page.locator("#models option")).to_have_count(4)
        page.evaluate("document.getElementById('models').append(new Option('gone', 'gone'))")
        page.select_option("#models", "gone")
        expect(page.locator("#models ~ .wrong")).to_contain_text("no model 'gone'")
        use(page, NAMES[0])
        expect(page.locator(".wrong")).to_have_count(0)
        assert json.loads(page.evaluate("JSON.stringify(localStorage['forerun.model'])")) == NAMES[0]


def test_a_choice_while_another_model_loads_comes_after_it(browser, several):
    url, _ = several
    with visit(browser, url, DESKTOP) as page:
        expect(page.locator("#models option")).to_have_count(4)
        use(page, NAMES[0])
        asked, held = re.compile(r"/props\?"), []
        page.route(asked, lambda route: route.continue_() if held else held.append(route))
        sent = []
        page.on("request", lambda request: sent.append(request) if asked.search(request.url) else None)
        with page.expect_request(asked):
            page.reload()
        expect(page.locator("#status")).to_contain_text(f"Loading {NAMES[0]}")
        page.evaluate("document.getElementById('models').append(new Option('gone', 'gone'))")
        page.select_option("#models", "gone")
        page.evaluate("fetch('/health').then(() => 0)")  # what was asked before this has been seen
        assert len(sent) == 1
        held[0].continue_()
        expect(page.locator("#models ~ .wrong")).to_contain_text("no model 'gone'")
        expect(page.locator("#models")).to_have_value(NAMES[0])

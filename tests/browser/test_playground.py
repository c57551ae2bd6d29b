"""The playground in headless Chromium: it streams, colours, draws, compares, stops, and fits a phone."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from running import Running

SECONDS = 1000
REFUSED = "status of 400"
"""The browser itself reports a refused request as an error; the page's own answer to it is tested."""


@pytest.fixture
def page(browser: Browser, bundled: Running, request: pytest.FixtureRequest) -> Iterator[Page]:
    """The loaded page; a test fails on any error of the page, and on a request to another machine."""
    options: dict[str, Any] = getattr(request, "param", {"viewport": {"width": 1280, "height": 900}})
    context = browser.new_context(**options)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console",
        lambda said: problems.append(said.text) if said.type == "error" and REFUSED not in said.text else None,
    )
    page.on("request", lambda sent: None if sent.url.startswith((bundled.url, "data:")) else problems.append(sent.url))
    page.goto(bundled.url)
    expect(page.locator("#model")).to_contain_text("tiny", timeout=20 * SECONDS)
    yield page
    context.close()
    assert problems == []


def screenshot(page: Page, name: str) -> None:
    """Kept where FORERUN_SCREENSHOTS names a folder."""
    if folder := os.environ.get("FORERUN_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def contrast(page: Page, selector: str) -> float:
    """WCAG's contrast ratio of an element's text with what is behind it."""
    colours = page.evaluate(
        """selector => {
          const element = document.querySelector(selector);
          let back = element;
          const transparent = c => c === 'rgba(0, 0, 0, 0)' || c === 'transparent';
          while (transparent(getComputedStyle(back).backgroundColor) && back.parentElement) back = back.parentElement;
          return [getComputedStyle(element).color, getComputedStyle(back).backgroundColor];
        }""",
        selector,
    )

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))

    light, dark = sorted(map(luminance, colours), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_a_run_streams_colours_and_compares(page: Page, bundled: Running) -> None:
    prompt = "def read_lines(path):\n"
    page.fill("#prompt", prompt)
    page.fill("#max_tokens", "60")
    page.click("#run")
    # It streams: some tokens are there while the run goes on.
    expect(page.locator("#answer span").nth(3)).to_be_attached(timeout=20 * SECONDS)
    expect(page.locator("#verdict")).to_contain_text("the same text", timeout=60 * SECONDS)
    expect(page.locator("#verdict")).to_contain_text("times plain decoding's speed")
    body = {"prompt": prompt, "temperature": 0, "seed": 7, "max_tokens": 60, "speculative": {"trace": True}}
    answer = bundled.post("/v1/completions", body).json()
    shown = page.eval_on_selector_all(
        "#answer span:not(.prompt)", "items => items.map(item => [item.textContent, item.className])"
    )
    rounds = answer["choices"][0]["trace"]
    assert shown == [list(token) for made in rounds for token in made["tokens"]]
    rejected = page.eval_on_selector_all("#answer s.rejected", "items => items.map(item => item.textContent)")
    # A new line inside a rejected draft must not break the answer's own lines.
    assert rejected == [text.replace("\n", "⏎") for made in rounds for text in made["rejected"]]
    assert rejected
    assert page.eval_on_selector("#answer s.rejected", "s => getComputedStyle(s).textDecorationLine") == "line-through"
    speculation = answer["metrics"]["speculative_decoding"]
    first = sum(accepted >= 1 for accepted in speculation["per_step_accepted"]) / speculation["num_spec_steps"]
    expect(page.locator("#positions")).to_have_attribute("aria-label", re.compile(f"^token 1: {round(100 * first)} %"))
    expect(page.locator("#rounds")).to_have_attribute("aria-label", re.compile(f"^{len(rounds)} rounds"))
    expect(page.locator("#speeds .bar")).to_have_count(2)
    page.uncheck("#rejects")
    expect(page.locator("#answer s.rejected").first).to_be_hidden()
    page.check("#rejects")
    screenshot(page, "light")


def test_charts_grow_while_the_answer_streams(page: Page, bundled: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    step = bundled.engine.engine.step
    monkeypatch.setattr(bundled.engine.engine, "step", lambda: (time.sleep(0.03), step())[1])
    page.fill("#max_tokens", "400")
    page.uncheck("#compare")
    page.click("#run")

    def rounds() -> int:
        return int((page.get_attribute("#rounds", "aria-label") or "").split()[0])

    expect(page.locator("#rounds rect").nth(4)).to_be_attached(timeout=20 * SECONDS)
    earlier = rounds()
    expect(page.locator("#rounds rect").nth(earlier + 4)).to_be_attached(timeout=20 * SECONDS)
    assert rounds() >= earlier + 5
    expect(page.locator("#positions .bar")).to_have_count(3)
    expect(page.locator("#speeds .bar")).to_have_count(1)
    expect(page.locator("#mean")).to_have_text(re.compile(r"mean \d\.\d\d"))
    # All of that while the answer was not at its end.
    expect(page.locator("#status")).to_have_text("Speculating …")
    expect(page.locator("#run")).to_be_disabled()
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_have_text("Stopped.", timeout=20 * SECONDS)


def test_the_answer_ends_where_a_stop_text_cuts_it(page: Page, bundled: Running) -> None:
    prompt = "def read_lines(path):\n"
    body = {"prompt": prompt, "temperature": 0, "seed": 7, "max_tokens": 60}
    (whole,) = bundled.post("/v1/completions", {**body, "speculative": {"trace": True}}).json()["choices"]
    text = whole["text"]
    # Inside a token that is not its round's last: the next ones come with it and are behind the stop.
    places, at = [], 0
    for made in whole["trace"]:
        for i, (token, _) in enumerate(made["tokens"]):
            if len(token) > 2 and i < len(made["tokens"]) - 1:
                places.append(at + 2)
            at += len(token)
    stop = next(text[place : place + 4] for place in places if text.find(text[place : place + 4]) == place)
    (cut,) = bundled.post("/v1/completions", {**body, "stop": [stop]}).json()["choices"]
    page.fill("#prompt", prompt)
    page.fill("#max_tokens", "60")
    page.fill("#stop_text", stop)
    page.click("#run")
    expect(page.locator("#verdict")).to_contain_text("the same text", timeout=60 * SECONDS)
    assert "".join(page.locator("#answer span:not(.prompt)").all_text_contents()) == cut["text"]
    dropped = page.locator("#answer s.dropped")
    assert "".join(dropped.all_text_contents()).replace("⏎", "\n").startswith(stop)
    assert dropped.first.evaluate("s => getComputedStyle(s).textDecorationLine") == "line-through"
    page.uncheck("#rejects")
    expect(dropped.first).to_be_hidden()


def test_chat_is_offered_where_there_is_a_template(page: Page) -> None:
    expect(page.locator("#chat_note")).to_be_hidden()
    page.check("#chat")
    page.fill("#max_tokens", "8")
    page.uncheck("#compare")
    with page.expect_response(lambda response: response.url.endswith("/v1/chat/completions")) as waiting:
        page.click("#run")
    assert waiting.value.status == 200
    expect(page.locator("#status")).to_contain_text("rounds.", timeout=30 * SECONDS)


def test_chat_is_closed_where_there_is_no_template(browser: Browser, no_template: Running) -> None:
    page = browser.new_page()
    page.goto(no_template.url)
    expect(page.locator("#model")).to_contain_text("tiny", timeout=20 * SECONDS)
    expect(page.locator("#chat")).to_be_disabled()
    expect(page.locator("#chat_note")).to_contain_text("no chat template")
    assert page.get_attribute("#chat", "aria-describedby") == "chat_note"
    # Nothing drafts here either: there is nothing to compare, and no length to choose.
    expect(page.locator("#tokens")).to_be_disabled()
    expect(page.locator("#compare")).to_be_disabled()
    page.fill("#max_tokens", "8")
    page.click("#run")
    expect(page.locator("#status")).to_contain_text("8 tokens in 8 rounds.", timeout=30 * SECONDS)
    page.close()


def test_by_keyboard_alone(page: Page) -> None:
    page.focus("#prompt")
    page.keyboard.press("Control+A")
    page.keyboard.type("x = ")
    page.fill("#max_tokens", "400")
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#answer span").nth(3)).to_be_attached(timeout=20 * SECONDS)
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_have_text("Stopped.", timeout=20 * SECONDS)
    expect(page.locator("#run")).to_be_enabled()
    reached = set()
    page.focus("#prompt")
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"run", "method", "tokens", "compare", "temperature", "seed", "regex", "chat", "answer"} <= reached


def test_a_structured_answer_by_another_drafter(page: Page) -> None:
    page.select_option("#method", "ngram")
    page.fill("#regex", "(red|green), (red|green)")
    page.uncheck("#compare")
    page.click("#run")
    expect(page.locator("#status")).to_contain_text("rounds.", timeout=30 * SECONDS)
    text = "".join(page.locator("#answer span:not(.prompt)").all_text_contents())
    assert re.fullmatch("(red|green), (red|green)", text)


def test_what_is_wrong_is_said(page: Page, bundled: Running) -> None:
    page.fill("#regex", "(")
    with page.expect_response(lambda response: response.url.endswith("/v1/completions")) as waiting:
        page.click("#run")
    assert waiting.value.status == 400
    expect(page.locator("#status")).to_contain_text("unclosed group")
    expect(page.locator("#status")).to_have_class("error")
    expect(page.locator("#run")).to_be_enabled()


PHONE = {"viewport": {"width": 360, "height": 740}, "color_scheme": "dark", "is_mobile": True, "has_touch": True}


@pytest.mark.parametrize("page", [PHONE], indirect=True, ids=["phone"])
def test_a_phone_in_the_dark(page: Page) -> None:
    page.fill("#max_tokens", "24")
    page.tap("#run")
    expect(page.locator("#verdict")).to_contain_text("the same text", timeout=60 * SECONDS)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", back))) < 120
    for kind in (".legend .accepted", ".legend .corrected", ".legend .bonus", "label", "#status", "h1"):
        assert contrast(page, kind) >= 4.5, kind
    screenshot(page, "phone-dark")


CALM = {**PHONE, "reduced_motion": "reduce"}


@pytest.mark.parametrize("page", [PHONE, CALM], indirect=True, ids=["smooth", "calm"])
def test_a_phone_shows_the_answer_after_run(page: Page, request: pytest.FixtureRequest) -> None:
    calm = "calm" in request.node.name
    page.fill("#max_tokens", "400")
    page.focus("#prompt")
    assert page.evaluate("document.querySelector('#answer').getBoundingClientRect().top > innerHeight")
    assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == ("auto" if calm else "smooth")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#status")).to_be_in_viewport(timeout=10 * SECONDS)
    expect(page.locator("#answer")).to_be_in_viewport(ratio=0.5)
    assert page.evaluate("document.activeElement.id") == "prompt"
    # The run can be stopped from there.
    expect(page.locator("#stop")).to_be_in_viewport(ratio=1)
    page.tap("#stop")
    expect(page.locator("#run")).to_be_enabled(timeout=20 * SECONDS)


def test_a_wide_page_does_not_move(page: Page) -> None:
    page.fill("#max_tokens", "8")
    page.click("#run")
    expect(page.locator("#verdict")).to_contain_text("the same text", timeout=60 * SECONDS)
    assert page.evaluate("scrollY") == 0


def test_light_colours_can_be_read(page: Page) -> None:
    for kind in (".legend .accepted", ".legend .corrected", ".legend .bonus", "label", "#status", "h1"):
        assert contrast(page, kind) >= 4.5, kind

"""Pages of the playground, and what tests do with them."""

import os
import re
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from threading import Semaphore

from playwright.sync_api import expect
from running import Running

Hold = Callable[[Running], Semaphore]
DESKTOP = {"viewport": {"width": 1280, "height": 800}}
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
REFUSED = re.compile("status of 4..")
"""The browser itself reports a refused request as an error; the page's own answer to it is tested."""


@contextmanager
def visit(browser, url, options):
    """A page that may not err, may ask no other machine, and may not be wider than its window."""
    context = browser.new_context(**options, permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console",
        lambda said: problems.append(said.text) if said.type == "error" and not REFUSED.search(said.text) else None,
    )
    page.on(
        "request",
        lambda sent: None if sent.url.startswith((url, "data:", f"blob:{url}")) else problems.append(sent.url),
    )
    page.goto(url)
    yield page
    width = page.evaluate("document.documentElement.scrollWidth")
    context.close()
    assert problems == []
    assert width <= options["viewport"]["width"]


def settle(page, **options):
    """The same answer every time, and the colours of its tokens."""
    expect(page.locator("#temperature")).not_to_have_value("")
    for name, value in {"temperature": 0, "min_p": "", "seed": 7, **options}.items():
        page.fill(f"#{name}", str(value))
    page.check("#coloured")


def begin_long_answer(talk, rounds):
    """Asks for an answer that stops after eight rounds until more are released. Some of it is there then."""
    rounds.release(8)
    talk.fill("#max_tokens", "2000")
    talk.fill("#message", "Go on and on")
    talk.keyboard.press("Enter")
    expect(talk.locator(".tokens span").nth(3)).to_be_attached()


def ended(page):
    """Nothing is in progress any more."""
    expect(page.locator(".run:visible")).to_be_visible()


def run(page):
    """The text is continued, to its end."""
    page.locator("#continuing .run").click()
    ended(page)


def ask(page, text):
    """A message and its answer; gives the request."""
    page.fill("#message", text)
    with page.expect_request(lambda sent: sent.url.endswith("/v1/chat/completions")) as sent:
        page.locator("#composer .run").click()
    ended(page)
    return sent.value.post_data_json


def shown(page, answer=-1):
    """Text and kind of an answer's tokens."""
    selector = ".tokens span:not(.prompt)"
    return (
        page.locator(".answer")
        .nth(answer)
        .evaluate(f"e => [...e.querySelectorAll('{selector}')].map(item => [item.textContent, item.className])")
    )


def places(page, *selectors):
    """Left and top of the last of each, at one moment: a page may still scroll."""
    corner = "s => { const { left, top } = [...document.querySelectorAll(s)].at(-1).getBoundingClientRect();"
    return page.evaluate(f"all => all.map({corner} return [left, top]; }})", selectors)


def contrast(page, selector):
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

    def luminance(colour):
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))

    light, dark = sorted(map(luminance, colours), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def screenshot(page, name):
    """Kept where FORERUN_SCREENSHOTS names a folder."""
    if folder := os.environ.get("FORERUN_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)

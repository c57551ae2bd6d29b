"""The playground continuing texts, in headless Chromium: it streams, colours, draws, stops, and fits a phone."""

import re

import pytest
from pages import DESKTOP, PHONE, contrast, ended, places, run, screenshot, shown
from playwright.sync_api import expect

DARK_PHONE = {**PHONE, "color_scheme": "dark"}
CALM_PHONE = {**PHONE, "reduced_motion": "reduce"}


def body(prompt="def read_lines(path):\n", **options):
    """What the page asks for, in one piece."""
    return {"prompt": prompt, "temperature": 0, "seed": 7, "max_tokens": 60, "speculative": {"trace": True}, **options}


def test_a_run_streams_and_colours(page, bundled):
    page.locator("#continuing .run").click()
    # It streams: some tokens are there while the run goes on.
    expect(page.locator(".tokens span").nth(3)).to_be_attached()
    ended(page)
    answer = bundled.post("/v1/completions", body()).json()
    rounds = answer["choices"][0]["trace"]
    assert shown(page) == [list(token) for made in rounds for token in made["tokens"]]
    metrics = answer["metrics"]["speculative_decoding"]
    accepted, drafted = metrics["num_accepted_draft_tokens"], metrics["num_draft_tokens"]
    expect(page.locator(".verdict")).to_contain_text(f"{accepted} of {drafted} drafted tokens accepted")
    expect(page.locator(".verdict")).to_contain_text(f"{60 / len(rounds):.2f} tokens per round · ended by max tokens")
    first = sum(accepted >= 1 for accepted in metrics["per_step_accepted"]) / metrics["num_spec_steps"]
    expect(page.locator("#positions")).to_have_attribute("aria-label", re.compile(f"^token 1: {round(100 * first)} %"))
    expect(page.locator("#rounds")).to_have_attribute("aria-label", re.compile(f"^{len(rounds)} rounds"))
    assert page.evaluate("scrollY") == 0


def test_rejected_text_is_shown_on_request(page, bundled):
    run(page)
    rounds = bundled.post("/v1/completions", body()).json()["choices"][0]["trace"]
    rejected = page.locator(".tokens s.rejected")
    # A new line inside a rejected draft must not break the answer's own lines.
    assert rejected.all_text_contents() == [text.replace("\n", "⏎") for made in rounds for text in made["rejected"]]
    expect(page.locator("#rejects")).not_to_be_checked()
    expect(rejected.first).to_be_hidden()
    page.check("#rejects")
    expect(rejected.first).to_be_visible()
    assert rejected.first.evaluate("s => getComputedStyle(s).textDecorationLine") == "line-through"
    screenshot(page, "light")
    page.uncheck("#rejects")
    expect(rejected.first).to_be_hidden()


def test_axes_have_numbers(page, bundled):
    run(page)
    rounds = bundled.post("/v1/completions", body()).json()["choices"][0]["trace"]

    def numbers(chart):
        return page.locator(f"{chart} text").all_text_contents()

    assert set(numbers("#positions")) == {"0%", "50%", "100%", "1", "2", "3"}
    longest = max(len(made["tokens"]) for made in rounds)
    told = [int(number) for number in numbers("#rounds")]
    assert 0 in told
    assert max(told) >= max(longest, len(rounds) // 5 * 5)
    # A colour is a kind of token there, too.
    drawn = page.eval_on_selector_all("#rounds rect", "all => all.map(each => each.getAttribute('class').slice(3))")
    assert set(drawn) == {kind for _, kind in shown(page)} | {"accepted"}
    fill = page.eval_on_selector("#rounds .of-corrected", "e => getComputedStyle(e).fill")
    line = page.eval_on_selector(".legend .corrected", "e => getComputedStyle(e).boxShadow")
    assert line.startswith(fill)


def test_charts_grow_while_the_answer_streams(page, bundled, hold):
    rounds = hold(bundled)
    page.fill("#max_tokens", "400")
    page.locator("#continuing .run").click()

    def drawn():
        return int((page.get_attribute("#rounds", "aria-label") or "0").split()[0])

    rounds.release(8)
    expect(page.locator("#rounds rect").nth(8)).to_be_attached()
    assert 2 <= drawn() <= 8
    rounds.release(8)
    # Asked by attribute: the page forbids `eval`, which `wait_for_function` needs from its second try on.
    expect(page.locator("#rounds")).to_have_attribute("aria-label", re.compile(r"^(9|1[0-6])\b"))
    expect(page.locator(".verdict")).to_contain_text("tokens/s")
    # All of that while the answer was not at its end.
    expect(page.locator("#status")).to_have_text("Speculating …")
    expect(page.locator("#continuing .run")).to_be_hidden()
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_have_text("Stopped.")
    expect(page.locator(".verdict")).to_contain_text("· stopped")


def test_the_answer_ends_where_a_stop_text_cuts_it(page, bundled):
    (whole,) = bundled.post("/v1/completions", body()).json()["choices"]
    text = whole["text"]
    # Inside a token that is not its round's last: the next ones come with it and are behind the stop.
    places, at = [], 0
    for made in whole["trace"]:
        for i, (token, _) in enumerate(made["tokens"]):
            if len(token) > 2 and i < len(made["tokens"]) - 1:
                places.append(at + 2)
            at += len(token)
    stop = next(text[index : index + 4] for index in places if text.find(text[index : index + 4]) == index)
    (cut,) = bundled.post("/v1/completions", body(stop=[stop])).json()["choices"]
    page.fill("#stop_text", stop)
    run(page)
    assert "".join(text for text, _ in shown(page)) == cut["text"]
    dropped = page.locator(".tokens s.dropped")
    assert "".join(dropped.all_text_contents()).replace("⏎", "\n").startswith(stop)
    expect(dropped.first).to_be_hidden()
    page.check("#rejects")
    expect(dropped.first).to_be_visible()
    assert dropped.first.evaluate("s => getComputedStyle(s).textDecorationLine") == "line-through"


def test_by_keyboard_alone(page):
    page.focus("#prompt")
    page.keyboard.press("Control+A")
    page.keyboard.type("x = ")
    page.fill("#max_tokens", "400")
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".tokens span").nth(3)).to_be_attached()
    page.keyboard.press("Escape")
    ended(page)
    reached = set()
    page.focus("#prompt")
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {"run", "method", "tokens", "rejects", "temperature", "seed", "regex"} <= reached


def test_a_structured_answer_by_another_drafter(page):
    page.select_option("#method", "ngram")
    page.fill("#regex", "(red|green), (red|green)")
    run(page)
    assert re.fullmatch("(red|green), (red|green)", "".join(text for text, _ in shown(page)))


WRONG = [
    ("regex", "(", "unclosed group"),
    ("tokens", "9", "must be from 0 to 3 here, not 9"),
    ("stop_text", "x" * 1025, "at most 1024 characters"),
    ("max_tokens", "600", "together more than this model's 512"),
    ("top_k", "1.5", "valid integer"),
    ("prompt", "", "the prompt is empty"),
]


@pytest.mark.parametrize("page", [DESKTOP, CALM_PHONE], indirect=True, ids=["desktop", "phone"])
def test_what_is_wrong_is_said_beside_its_field(page):
    for field, value, message in WRONG:
        before = page.input_value(f"#{field}")
        page.fill(f"#{field}", value)
        page.locator("#continuing .run").click()
        wrong = page.locator(f".field:has(#{field}) .wrong")
        expect(wrong).to_contain_text(message)
        expect(wrong).to_be_in_viewport(ratio=1)
        expect(page.locator(".wrong")).to_have_count(1)
        expect(page.locator(f"#{field}")).to_be_focused()
        ended(page)
        page.fill(f"#{field}", before)
    # What the browser cannot read is no number for the server to judge.
    page.fill("#seed", "")
    page.locator("#seed").press_sequentially("1e")
    page.locator("#continuing .run").click()
    expect(page.locator(".field:has(#seed) .wrong")).to_have_text("must be a number")
    expect(page.locator(".answer")).to_have_count(0)


@pytest.mark.parametrize("page", [DESKTOP, {**DESKTOP, "color_scheme": "dark"}], indirect=True, ids=["light", "dark"])
def test_colours_can_be_read(page):
    page.fill("#max_tokens", "8")
    run(page)
    page.check("#rejects")
    page.locator(".tokens span").last.hover()
    kinds = [".legend .accepted", ".legend .corrected", ".legend .bonus", ".check .rejected", ".prompt", "#tip"]
    for kind in (*kinds, "label", "h1", ".verdict", ".quiet", "#continuing .run"):
        assert contrast(page, kind) >= 4.5, kind
    # Run is the one button that is filled.
    filled = page.evaluate(
        "[...document.querySelectorAll('button')].filter(b => b.offsetParent && b.closest('main'))"
        ".map(b => [b.className, getComputedStyle(b).backgroundColor])"
    )
    (run_,) = [colour for name, colour in filled if name == "run"]
    assert run_ not in [colour for name, colour in filled if name != "run"]
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    dark = sum(map(int, re.findall(r"\d+", back))) < 120
    assert dark == page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")


@pytest.mark.parametrize("page", [DARK_PHONE, CALM_PHONE], indirect=True, ids=["smooth", "calm"])
def test_a_phone_shows_the_answer_after_run(page, request):
    calm = "calm" in request.node.name
    assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == ("auto" if calm else "smooth")
    page.fill("#max_tokens", "40")
    page.evaluate("scrollTo(0, 0)")
    page.tap("#continuing .run")
    ended(page)
    expect(page.locator(".tokens")).to_be_in_viewport(ratio=0.5)
    expect(page.locator(".verdict")).to_be_in_viewport(ratio=1)
    expect(page.get_by_role("button", name="Copy")).to_be_in_viewport(ratio=1)
    (_, line), (_, below) = places(page, ".verdict", "#options")
    assert line < below
    screenshot(page, "phone")

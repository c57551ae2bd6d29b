"""What the playground tells of tokens, and how it compares with plain decoding: by pairs, with their spread."""

import json
import math
from statistics import median

import pytest
from pages import DESKTOP, PHONE, ask, ended, run, screenshot, shown
from playwright.sync_api import expect

COMPLETIONS = "**/v1/completions"


def compared(page):
    page.get_by_role("button", name="Compare with plain decoding").click()
    expect(page.locator(".comparison strong")).not_to_be_empty()
    return page.locator(".comparison").inner_text()


def feign(page, answers):
    """Requests that do not stream get ``answers(speculating)``, a speed and a text; gives their bodies as they come."""
    bodies = []

    def handle(route):
        body = route.request.post_data_json
        if body.get("stream"):
            route.continue_()
            return
        bodies.append(body)
        speed, text = answers(body["speculative"].get("enabled", True))
        told = {"choices": [{"text": text}], "metrics": {"tokens_per_second": speed}}
        route.fulfill(status=200, content_type="application/json", body=json.dumps(told))

    page.route(COMPLETIONS, handle)
    return bodies


def speeds(on, off, text):
    given = {True: iter(on), False: iter(off)}
    return lambda speculating: (next(given[speculating]), text)


def text_of(page):
    return "".join(text for text, _ in shown(page))


def test_the_comparison_is_repeated_and_has_its_spread(page):
    run(page)
    on, off = [200.0, 90.0, 150.0, 210.0, 120.0], [100.0, 50.0, 100.0, 70.0, 80.0]
    bodies = feign(page, speeds(on, off, text_of(page)))
    said = compared(page)
    ratios = [a / b for a, b in zip(on, off)]
    assert said.startswith(f"{median(ratios):.2f}× the speed of plain decoding")
    assert f"(median of 5 interleaved pairs; {min(ratios):.2f} to {max(ratios):.2f})" in said
    assert said.endswith("All 11 answers are identical.")
    # In turns, none twice in a row but where a pair ends; and timed without what would slow them down.
    plain = [body["speculative"] == {"enabled": False} for body in bodies]
    assert plain == [False, True, True, False, False, True, True, False, False, True]
    assert all("trace" not in body["speculative"] and "logprobs" not in body for body in bodies)
    assert {body["seed"] for body in bodies} == {7}
    # Drawn: every run, its range, its median, on an axis with numbers from 0.
    expect(page.locator("#speeds circle")).to_have_count(10)
    expect(page.locator("#speeds .median")).to_have_count(2)
    assert {"0", "50", "100", "150", "200"} <= set(page.locator("#speeds text").all_text_contents())
    label = page.get_attribute("#speeds", "aria-label") or ""
    assert f"median {median(on):.0f}, {min(on):.1f} to {max(on):.0f} tokens per second" in label
    index = page.eval_on_selector_all("#speeds circle.on", "all => all.map(each => Number(each.getAttribute('cx')))")
    zero = page.locator("#speeds line").first.evaluate("e => Number(e.getAttribute('x1'))")
    assert [round((x - zero) / (index[0] - zero), 3) for x in index] == [round(speed / on[0], 3) for speed in on]
    screenshot(page, "compared")


def test_noise_is_called_noise_and_another_text_another(page):
    run(page)
    feign(page, speeds([101, 99, 100, 102, 98], [100] * 5, text_of(page) + "!"))
    said = compared(page)
    assert said.startswith(
        "No clear difference in speed (1.00× plain decoding's, median of 5 interleaved pairs; 0.98 to"
    )
    assert "10 of 11 answers differ!" in said


def test_what_is_too_short_is_not_timed(page):
    run(page)
    feign(page, lambda _: (None, ""))
    assert compared(page).startswith("Too short to time.")
    expect(page.locator("#speeds_figure")).to_be_hidden()


@pytest.mark.parametrize("page", [DESKTOP, PHONE], indirect=True, ids=["desktop", "phone"])
def test_a_real_comparison_and_one_that_is_stopped(page, bundled, hold):
    page.fill("#max_tokens", "12")
    page.fill("#temperature", "0.8")
    page.fill("#seed", "")
    run(page)
    # No seed was given: the one that was drawn is asked for again, so that the texts are the same.
    assert compared(page).endswith("All 11 answers are identical.")
    expect(page.locator(".comparison")).to_be_in_viewport(ratio=1)
    hold(bundled)
    page.get_by_role("button", name="Compare with plain decoding").click()
    page.locator("#continuing .stop").click()
    expect(page.locator("#status")).to_have_text("Stopped.")
    expect(page.locator(".comparison")).to_be_hidden()
    ended(page)


def test_a_conversation_goes_on_from_a_comparison(talk, talking, hold):
    ask(talk, "compare this")
    rounds = hold(talking)
    talk.get_by_role("button", name="Compare with plain decoding").click()
    expect(talk.locator(".comparison")).to_contain_text("pair 1 of 5")
    talk.fill("#message", "interrupted")
    talk.keyboard.press("Enter")
    expect(talk.locator(".answer")).to_have_count(2)
    talk.keyboard.press("Escape")
    ended(talk)
    rounds.release(1000)
    ask(talk, "and now this")
    expect(talk.locator(".comparison").first).to_be_hidden()
    talk.get_by_role("button", name="Compare with plain decoding").last.click()
    expect(talk.locator(".comparison").last).to_contain_text("All 11 answers are identical.")
    expect(talk.get_by_role("button", name="Copy").last).to_be_in_viewport(ratio=1)


def probabilities(running):
    """Rounds and log-probabilities of the text that the page shows."""
    body = {"prompt": "def read_lines(path):\n", "temperature": 0, "seed": 7, "max_tokens": 60, "logprobs": 3}
    (choice,) = running.post("/v1/completions", {**body, "speculative": {"trace": True}}).json()["choices"]
    return choice["trace"], choice["logprobs"]


@pytest.mark.parametrize("page", [DESKTOP, PHONE], indirect=True, ids=["hover", "tap"])
def test_tokens_tell_about_themselves(page, bundled):
    run(page)
    page.check("#rejects")
    rounds, logprobs = probabilities(bundled)
    phone = page.evaluate("innerWidth") == 390
    flat = [(made, i) for made in rounds for i in range(len(made["tokens"]))]
    seen = set()
    for slot, (made, i) in enumerate(flat):
        text, kind = made["tokens"][i]
        if kind in seen or not text.strip():
            continue
        seen.add(kind)
        token = page.locator(".tokens span:not(.prompt)").nth(slot)
        token.tap() if phone else token.hover()
        tip = page.locator("#tip")
        expect(tip).to_be_in_viewport(ratio=1)
        expect(tip).to_contain_text(f"token {made['token_ids'][i]}")
        expect(tip).to_contain_text(kind.capitalize())
        expect(tip).to_contain_text(f"Round {rounds.index(made) + 1}")
        fraction = 100 * math.exp(logprobs["token_logprobs"][slot])
        expect(tip).to_contain_text(f"probability {round(fraction)} %" if fraction >= 10 else "probability ")
        for rejected in made["rejected"] if kind == "corrected" else ():
            expect(tip).to_contain_text(rejected.strip())
    assert {"accepted", "corrected", "bonus"} <= seen
    made = next(made for made in rounds if made["rejected"] and made["rejected"][0].strip())
    token = page.locator(".tokens s.rejected", has_text=made["rejected"][0]).first
    token.tap() if phone else token.hover()
    expect(page.locator("#tip")).to_contain_text("Rejected: drafted by draft_model")
    page.locator("h1").tap() if phone else page.mouse.move(2, 2)
    expect(page.locator("#tip")).to_be_hidden()


def test_tokens_are_reached_by_keyboard(page, bundled):
    run(page)
    rounds, _ = probabilities(bundled)
    ids = [token for made in rounds for token in made["token_ids"]]
    tip = page.locator("#tip")
    page.focus(".tokens")
    expect(tip).to_be_hidden()
    for token in ids[:3]:
        page.keyboard.press("ArrowRight")
        expect(tip).to_contain_text(f"token {token}")
        assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "tip"
    page.keyboard.press("ArrowLeft")
    expect(tip).to_contain_text(f"token {ids[1]}")
    page.keyboard.press("End")
    expect(tip).to_contain_text(f"token {ids[-1]}")
    expect(tip).to_be_in_viewport(ratio=1)
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    page.keyboard.press("Home")
    expect(tip).to_contain_text(f"token {ids[0]}")
    page.keyboard.press("Tab")
    expect(tip).to_be_hidden()


def test_without_probabilities_tokens_tell_the_rest(talk):
    talk.uncheck("#probabilities")
    assert "logprobs" not in ask(talk, "Hello")
    talk.locator(".tokens span").first.hover()
    expect(talk.locator("#tip")).to_contain_text("Plain")
    expect(talk.locator("#tip")).not_to_contain_text("probability")

"""The playground as a conversation, in headless Chromium, on a desktop's and a phone's size."""

import pytest
from pages import DESKTOP, PHONE, ask, begin_long_answer, ended, places, screenshot, shown, visit
from playwright.sync_api import expect

both = pytest.mark.parametrize("talk", [DESKTOP, PHONE], indirect=True, ids=["desktop", "phone"])


def told(running, body):
    """The server's own answer to a request of the page's, in one piece."""
    body = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
    return running.post("/v1/chat/completions", body).json()["choices"][0]


@both
def test_turns_are_kept_and_sent(talk, talking):
    expect(talk.locator("#tab_chat")).to_have_attribute("aria-selected", "true")
    talk.fill("#system", "Be brief.")
    first = ask(talk, "Hello")
    system, hello = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}
    assert first["messages"] == [system, hello]
    answer = told(talking, first)
    assert shown(talk) == [list(token) for made in answer["trace"] for token in made["tokens"]]
    assert {"accepted", "bonus"} <= {kind for _, kind in shown(talk)}
    expect(talk.locator("#message")).to_have_value("")
    second = ask(talk, "Again?")
    text = {"role": "assistant", "content": answer["message"]["content"]}
    assert second["messages"] == [system, hello, text, {"role": "user", "content": "Again?"}]
    assert talk.locator(".question").all_text_contents() == ["Hello", "Again?"]
    expect(talk.locator(".answer")).to_have_count(2)
    screenshot(talk, f"conversation-{talk.evaluate('innerWidth')}")
    talk.click("#fresh")
    expect(talk.locator(".answer")).to_have_count(0)
    expect(talk.locator("#welcome")).to_be_visible()
    talk.fill("#system", "")
    assert ask(talk, "Anew")["messages"] == [{"role": "user", "content": "Anew"}]


@both
def test_the_answer_comes_before_the_options(talk):
    """And is in sight, with its line, when it has come: the newest one, too."""
    for text in ("one\n" * 30, "two\n" * 30):
        ask(talk, text)
        verdict = talk.locator(".verdict").last
        expect(verdict).to_contain_text("24 tokens · ")
        expect(verdict).to_be_in_viewport(ratio=1)
        expect(talk.get_by_role("button", name="Copy").last).to_be_in_viewport(ratio=1)
        # Nothing lies over it.
        assert verdict.evaluate(
            "e => { const { left, bottom } = e.getBoundingClientRect();"
            " return document.elementFromPoint(left + 5, bottom - 5) === e; }"
        )
    expect(talk.locator("#message")).to_be_in_viewport(ratio=1)
    assert talk.evaluate(
        "!!(document.querySelector('.verdict').compareDocumentPosition(document.querySelector('#options'))"
        " & Node.DOCUMENT_POSITION_FOLLOWING)"
    )
    (_, line), (text, _), (side, below) = places(talk, ".verdict", "main", "#options")
    phone = talk.evaluate("innerWidth") == 390
    assert line < below if phone else line < below or text < side
    if phone:
        talk.tap(".jump")
        expect(talk.locator("#temperature")).to_be_in_viewport()


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_a_stopped_answer_stays_as_far_as_it_came(talk, talking, hold, how):
    rounds = hold(talking)
    begin_long_answer(talk, rounds)
    expect(talk.locator("#composer .run")).to_be_hidden()
    talk.keyboard.press("Escape") if how == "Escape" else talk.locator("#composer .stop").click()
    expect(talk.locator(".verdict")).to_contain_text("· stopped")
    rounds.release(1000)
    talk.fill("#max_tokens", "4")
    text = "".join(token for token, _ in shown(talk))
    assert ask(talk, "More")["messages"][1] == {"role": "assistant", "content": text}


def test_an_answer_is_copied_and_asked_for_again(talk):
    ask(talk, "first")
    before = ask(talk, "second")
    talk.evaluate("window.setTimeout = () => 0")  # "Copied" stays
    talk.get_by_role("button", name="Copy").last.click()
    expect(talk.get_by_role("button", name="Copied")).to_be_visible()
    text = "".join(token for token, _ in shown(talk))
    assert text.strip()
    assert talk.evaluate("navigator.clipboard.readText()") == text
    talk.fill("#seed", "8")
    talk.fill("#message", "a draft of mine")
    with talk.expect_request(lambda sent: sent.url.endswith("/v1/chat/completions")) as sent:
        talk.get_by_role("button", name="Again").last.click()
    ended(talk)
    assert sent.value.post_data_json == {**before, "seed": 8}
    expect(talk.locator(".answer")).to_have_count(2)
    expect(talk.locator("#message")).to_have_value("a draft of mine")


@both
def test_a_message_that_is_refused_comes_back(talk):
    ask(talk, "fine")
    talk.fill("#temperature", "200")
    talk.fill("#message", "too hot")
    talk.locator("#composer .run").click()
    wrong = talk.locator(".field:has(#temperature) .wrong")
    expect(wrong).to_have_text("Input should be less than or equal to 100")
    expect(wrong).to_be_in_viewport(ratio=1)
    expect(talk.locator("#temperature")).to_be_focused()
    expect(talk.locator("#temperature")).to_have_attribute("aria-invalid", "true")
    assert talk.get_attribute("#temperature", "aria-describedby") == wrong.get_attribute("id")
    expect(talk.locator("#message")).to_have_value("too hot")
    expect(talk.locator(".answer")).to_have_count(1)
    screenshot(talk, f"refused-{talk.evaluate('innerWidth')}")
    talk.fill("#temperature", "0")
    assert len(ask(talk, "cooler")["messages"]) == 3
    expect(talk.locator(".wrong")).to_have_count(0)


def test_a_welcome_that_can_be_asked(talk):
    question = talk.locator("#welcome button").first.inner_text()
    talk.locator("#welcome button").first.click()
    expect(talk.locator(".question")).to_have_text(question)
    ended(talk)
    expect(talk.locator("#welcome")).to_be_hidden()


def test_a_model_without_a_template_continues_texts(browser, no_template):
    """The server's key is asked for beside its field, too."""
    with visit(browser, no_template.url, DESKTOP) as page:
        expect(page.locator(".field:has(#key) .wrong")).to_be_visible()
        page.fill("#key", "secret")
        page.keyboard.press("Tab")
        expect(page.locator("#complete")).to_be_visible()
        expect(page.locator("#tab_chat")).to_be_disabled()
        expect(page.locator("#chat_note")).to_contain_text("no chat template")
        expect(page.locator("#system")).to_be_hidden()
        # Nothing drafts here either: there is nothing to compare, and no length to choose.
        expect(page.locator("#tokens")).to_be_disabled()
        page.fill("#max_tokens", "8")
        page.locator("#continuing .run").click()
        ended(page)
        expect(page.locator(".verdict")).to_contain_text("nothing drafted")
        expect(page.get_by_role("button", name="Compare")).to_have_count(0)


def test_tabs_by_keyboard(talk):
    talk.focus("#tab_chat")
    talk.keyboard.press("ArrowRight")
    expect(talk.locator("#tab_complete")).to_be_focused()
    expect(talk.locator("#prompt")).to_be_visible()
    expect(talk.locator("#message")).to_be_hidden()
    talk.keyboard.press("ArrowLeft")
    expect(talk.locator("#message")).to_be_visible()

"""Conversations that are read, kept, listed, renamed, saved and gone on with; thoughts and calls of tools."""

import json
import re
from pathlib import Path

import pytest
from pages import DESKTOP, PHONE, ask, begin_long_answer, contrast, ended, screenshot, settle, visit
from playwright.sync_api import expect

LOOKS = [{**DESKTOP, "color_scheme": "light"}, {**PHONE, "color_scheme": "dark"}]
looks = pytest.mark.parametrize("talk", LOOKS, indirect=True, ids=["desktop-light", "phone-dark"])
CHAT = "**/v1/chat/completions"
ANSWER = """## Reading a file

Use **`with`**, which *closes* the file:

```python
def read_lines(path):
    with open(path, encoding="utf-8") as file:  # a comment that is long enough to be wider than a telephone's screen
        return file.read().splitlines()
```

| mode | opens for |
|------|-----------|
| `r`  | reading |
| `w`  | writing, which empties the file |

1. Open it.
2. Read it; see [the tutorial](https://docs.python.org/3/tutorial/).

> Close what you open."""
TOOLS = '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'


def feign(page, *answers):
    """The next answers are these deltas, each with the tokens that it is made of; gives the requests as they come."""
    bodies, left = [], list(answers)

    def handle(route):
        bodies.append(route.request.post_data_json)
        events = []
        for number, delta in enumerate(left.pop(0)):
            text = delta.get("content") or delta.get("reasoning_content") or "call"
            tokens = [[text[:2], "accepted"], [text[2:], "bonus"]]
            trace = {"tokens": tokens, "token_ids": [5, 6], "rejected": [], "rejected_ids": [], "drafted": 1}
            choice = {"index": 0, "delta": delta, "trace": [{**trace, "method": "ngram"}], "finish_reason": None}
            events.append({"choices": [{**choice, "number": number}]})
        told = {"tokens_per_second": 99.0, "speculative_decoding": {"identical_to_plain_decoding": True}}
        events.append({"choices": [], "usage": {}, "metrics": told})
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        route.fulfill(status=200, content_type="text/event-stream", body=text)

    page.route(CHAT, handle)
    return bodies


def pieces(text, size=7):
    return [{"content": text[at : at + size]} for at in range(0, len(text), size)]


def open_list(page):
    page.click("#list")
    expect(page.locator("#kept")).to_be_visible()


@looks
def test_an_answer_is_read_as_markdown(talk):
    talk.uncheck("#coloured")
    feign(talk, pieces(ANSWER))
    ask(talk, "How do I read a file?")
    markdown = talk.locator(".answer > .markdown")
    for part in ("h4", "strong code", ".code pre code", "table td", "ol li", "blockquote p", "a"):
        expect(markdown.locator(part).first).to_be_visible()
        assert contrast(talk, f".answer > .markdown {part}") >= 4.5, part
    expect(talk.locator(".tokens").last).to_be_hidden()
    font = markdown.locator(".code pre").evaluate("e => getComputedStyle(e).fontFamily")
    assert "monospace" in font
    talk.evaluate("window.setTimeout = () => 0")  # "Copied" stays
    markdown.get_by_role("button", name="Copy").click()
    expect(markdown.get_by_role("button", name="Copied")).to_be_visible()
    copied = talk.evaluate("navigator.clipboard.readText()")
    assert copied == ANSWER.split("```python\n")[1].split("\n```")[0]
    screenshot(talk, f"markdown-{talk.evaluate('innerWidth')}-{dark(talk)}")


def dark(page):
    return "dark" if page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") else "light"


def test_colours_are_off_until_asked_for_and_remembered(browser, talking):
    with visit(browser, talking.url, DESKTOP) as page:
        settle(page, max_tokens=8)
        page.uncheck("#coloured")
        page.reload()
        expect(page.locator("#coloured")).not_to_be_checked()
        settle(page, max_tokens=8)
        page.uncheck("#coloured")
        ask(page, "Hello")
        expect(page.locator(".markdown").last).to_be_visible()
        expect(page.locator(".tokens").last).to_be_hidden()
        expect(page.locator(".legend")).to_be_hidden()
        page.check("#coloured")
        expect(page.locator(".tokens").last).to_be_visible()
        expect(page.locator(".answer > .markdown")).to_be_hidden()
        page.reload()
        expect(page.locator("#coloured")).to_be_checked()
        expect(page.locator(".tokens span").first).to_be_visible()
        page.click("#tab_complete")
        page.uncheck("#coloured")
        page.fill("#max_tokens", "8")
        page.locator("#continuing .run").click()
        ended(page)
        span = page.locator("#completion .tokens span:not(.prompt)").first
        expect(span).to_be_attached()
        assert span.evaluate("e => getComputedStyle(e).backgroundColor") == "rgba(0, 0, 0, 0)"
        span.hover()
        expect(page.locator("#tip")).to_be_hidden()


def state(page):
    return page.evaluate(
        "[...document.querySelectorAll('.question, .tokens, .verdict, .answer > .markdown')].map(e => e.innerHTML)"
    )


def test_a_reload_keeps_the_conversation_to_the_last_token(talk):
    talk.fill("#system", "Be brief.")
    first = ask(talk, "Hello")
    ask(talk, "And?")
    before = state(talk)
    talk.reload()
    expect(talk.locator(".answer")).to_have_count(2)
    assert state(talk) == before
    expect(talk.locator(".verdict").last).to_be_in_viewport()
    expect(talk.locator("#measured")).to_be_visible()
    settle(talk, max_tokens=4)
    third = ask(talk, "More")
    assert third["messages"][:2] == first["messages"]
    assert [message["role"] for message in third["messages"]] == ["system", *["user", "assistant"] * 2, "user"]
    talk.get_by_role("button", name="Compare with plain decoding").first.click()
    expect(talk.locator(".comparison").first).to_contain_text("All 11 answers are identical.")


def test_a_reload_keeps_what_has_come_of_an_answer(talk, talking, hold):
    rounds = hold(talking)
    begin_long_answer(talk, rounds)
    talk.reload()
    rounds.release(1000)
    expect(talk.locator(".question")).to_have_text("Go on and on")
    expect(talk.locator(".tokens span").nth(3)).to_be_attached()
    expect(talk.locator(".verdict")).to_contain_text(re.compile("· (stopped|broken off)"))


@looks
def test_conversations_are_listed_renamed_saved_and_deleted(talk, tmp_path):
    talk.fill("#system", "Be brief.")
    feign(talk, pieces("**One.**"), pieces("Two."))
    ask(talk, "The first\nquestion")
    talk.click("#fresh")
    expect(talk.locator("#welcome")).to_be_visible()
    ask(talk, "The second question")
    open_list(talk)
    names = talk.locator("#kept .name")
    assert names.all_text_contents() == ["The second question", "The first\nquestion"]
    expect(names.first).to_have_attribute("aria-current", "true")
    talk.get_by_role("button", name="Rename").last.click()
    talk.keyboard.type("A new <b>name</b>")
    talk.keyboard.press("Enter")
    expect(names.last).to_have_text("A new <b>name</b>")
    screenshot(talk, f"list-{talk.evaluate('innerWidth')}-{dark(talk)}")
    for kind in ("Markdown", "JSON"):
        with talk.expect_download() as saved:
            talk.get_by_role("button", name=kind).last.click()
        saved.value.save_as(tmp_path / kind)
        assert saved.value.suggested_filename.startswith("A-new-b-name")
    text = Path(tmp_path / "Markdown").read_text(encoding="utf-8")
    assert text == (
        "# A new <b>name</b>\n\n## System\n\nBe brief.\n\n## You\n\nThe first\nquestion\n\n## Answer\n\n**One.**\n"
    )
    messages = json.loads(Path(tmp_path / "JSON").read_text(encoding="utf-8"))["messages"]
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "The first\nquestion"},
        {"role": "assistant", "content": "**One.**"},
    ]
    names.last.click()
    expect(talk.locator("#kept")).to_be_hidden()
    assert talk.locator(".question").all_text_contents() == ["The first\nquestion"]
    talk.reload()
    expect(talk.locator(".question")).to_have_text("The first\nquestion")
    open_list(talk)
    expect(names.last).to_have_text("A new <b>name</b>")
    talk.get_by_role("button", name="Delete").last.click()
    talk.get_by_role("button", name="Really delete?").click()
    expect(names).to_have_count(1)
    talk.keyboard.press("Escape")
    expect(talk.locator("#welcome")).to_be_visible()
    talk.reload()
    open_list(talk)
    expect(names).to_have_text(["The second question"])


def test_an_edited_message_is_gone_on_from(talk):
    feign(talk, pieces("One."), pieces("Two."), pieces("Three."), [])
    for text in ("first", "second"):
        ask(talk, text)
    talk.get_by_role("button", name="Edit").first.click()
    field = talk.locator(".edit textarea")
    expect(field).to_have_value("first")
    talk.get_by_role("button", name="Cancel").click()
    assert talk.locator(".question").all_text_contents() == ["first", "second"]

    def edited(text):
        talk.get_by_role("button", name="Edit").first.click()
        field.fill(text)
        with talk.expect_request(CHAT) as sent:
            talk.locator(".edit [type=submit]").click()
        ended(talk)
        return sent.value.post_data_json["messages"]

    assert edited("other") == [{"role": "user", "content": "other"}]
    assert talk.locator(".question").all_text_contents() == ["other"]
    expect(talk.locator(".answer > .markdown")).to_have_text("Three.")
    # An answer that never comes: what was there before is there again.
    edited("lost")
    assert talk.locator(".question").all_text_contents() == ["other"]
    expect(talk.locator("#message")).to_have_value("lost")


@looks
def test_thoughts_are_folded_and_calls_are_answered(talk):
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":'}}
    rest = {"index": 0, "function": {"arguments": ' "Kyoto"}'}}
    thinks = {"reasoning_content": "The user asks for the **weather**."}
    bodies = feign(talk, [thinks, {"tool_calls": [call]}, {"tool_calls": [rest]}], pieces("It rains."))
    talk.uncheck("#coloured")
    talk.fill("#tools", "[")
    talk.fill("#message", "Weather in Kyoto?")
    talk.locator("#composer .run").click()
    expect(talk.locator(".field:has(#tools) .wrong")).to_contain_text("must be JSON")
    talk.fill("#tools", TOOLS)
    assert ask(talk, "Weather in Kyoto?")["tools"] == json.loads(TOOLS)
    thoughts = talk.locator(".reasoning .markdown").first
    expect(talk.locator(".reasoning summary").first).to_have_text("Reasoning")
    expect(thoughts).to_be_hidden()
    talk.click(".reasoning summary")
    expect(thoughts.locator("strong")).to_have_text("weather")
    expect(talk.locator(".call strong")).to_have_text("weather")
    assert json.loads(talk.locator(".call pre").inner_text()) == {"city": "Kyoto"}
    talk.fill(".call textarea", "rain, 12 degrees")
    screenshot(talk, f"call-{talk.evaluate('innerWidth')}-{dark(talk)}")
    talk.get_by_role("button", name="Send results").click()
    expect(talk.locator(".answer > .markdown").last).to_have_text("It rains.")
    ended(talk)
    said, called, result = bodies[1]["messages"]
    assert said == {"role": "user", "content": "Weather in Kyoto?"}
    function = {"name": "weather", "arguments": '{"city": "Kyoto"}'}
    assert called == {
        "role": "assistant", "content": "", "tool_calls": [{"id": "call_1", "type": "function", "function": function}]
    }  # fmt: skip
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": "rain, 12 degrees"}
    talk.reload()
    expect(talk.locator(".result")).to_have_text("rain, 12 degrees")
    expect(talk.locator(".call strong")).to_have_text("weather")
    expect(thoughts).to_be_hidden()


def fill_up(page):
    page.evaluate(
        """() => {
          let size = 1 << 22;
          for (let i = 0; size > 16; i++)
            try { localStorage.setItem(`x${i}.${Math.random()}`, "x".repeat(size)); } catch { size >>= 1; }
        }"""
    )


def test_a_full_storage_gives_up_colours_first(talk):
    first = "First. " * 100
    feign(talk, pieces(first), pieces("Second."))
    ask(talk, "one")
    fill_up(talk)
    ask(talk, "two")
    talk.reload()
    expect(talk.locator(".question")).to_have_count(2)
    assert talk.locator(".answer > .markdown").all_text_contents() == [first.strip(), "Second."]
    expect(talk.locator(".verdict").last).to_contain_text("tokens/s")
    fill_up(talk)
    settle(talk, max_tokens=4)
    feign(talk, pieces("Third. " * 100))
    ask(talk, "three")
    expect(talk.locator(".field:has(#message) .wrong")).to_contain_text("storage is full")

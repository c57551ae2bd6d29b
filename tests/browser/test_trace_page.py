"""The page that ``forerun generate --trace-html`` writes, beside the playground: a colour means the same in both."""

import pytest
from pages import DESKTOP, PHONE, visit

from forerun.cli.trace import KINDS
from forerun.engine.metrics import ACCEPTED, BONUS, CORRECTED, PLAIN, RoundTrace
from forerun_lab.traces import page

LOOK = """element => {
  const { color, backgroundColor, boxShadow, textDecorationLine } = getComputedStyle(element);
  return [color, backgroundColor, boxShadow, textDecorationLine];
}"""


@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["desktop", "phone"])
def test_a_colour_means_the_same_as_in_the_playground(browser, talking, size, scheme):
    rounds = [
        RoundTrace((5, 6), (ACCEPTED, CORRECTED), (7,), 2, "ngram"),
        RoundTrace((8, 9), (ACCEPTED, BONUS), (), 1, "ngram"),
        RoundTrace((10,), (PLAIN,), (), 0, None),
    ]
    written = page(rounds, talking.engine.tokenizer, "x" * 500, {"model": "tiny " * 30})
    options = {**size, "color_scheme": scheme}
    with visit(browser, talking.url, options) as playground:
        looks = {kind: playground.locator(f"aside .{kind}").first.evaluate(LOOK) for kind in KINDS if kind != PLAIN}
        background = playground.evaluate("getComputedStyle(document.body).backgroundColor")
    assert len({tuple(look) for look in looks.values()}) == 4
    context = browser.new_context(**options)
    trace = context.new_page()
    trace.set_content(written)
    assert trace.evaluate("getComputedStyle(document.body).backgroundColor") == background
    for kind, look in looks.items():
        result = trace.locator(f".{kind}")
        assert {tuple(result.nth(index).evaluate(LOOK)) for index in range(result.count())} == {tuple(look)}
    assert trace.locator("dt span").all_text_contents() == list(KINDS)
    assert trace.locator("pre .rejected").count() == 0
    titles = [trace.locator("tbody span").nth(index).get_attribute("title") for index in range(6)]
    assert titles == [
        "accepted in round 1, token 5",
        "rejected in round 1, token 7",
        "corrected in round 1, token 6",
        "accepted in round 2, token 8",
        "bonus in round 2, token 9",
        "plain in round 3, token 10",
    ]
    assert trace.evaluate("document.documentElement.scrollWidth") <= trace.evaluate("innerWidth")
    context.close()

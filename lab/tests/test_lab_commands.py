"""Commands and flags of the laboratory in the engine's command line."""

import json
import re
from html.parser import HTMLParser

import pytest

PROMPT = "the cat sat on the mat; the cat"


@pytest.fixture
def pair(tiny_target, tiny_draft):
    return ["--model", tiny_target, "--spec-model", tiny_draft, "--spec-tokens", "3", "--max-tokens", "24"]


class Page(HTMLParser):
    """Collects the text of every class within the page's <pre>, and whatever points outside the page."""

    def __init__(self):
        super().__init__()
        self.inside, self.kind = False, ""
        self.spans = []
        self.links = []

    def handle_starttag(self, tag, attrs):
        result = dict(attrs)
        self.inside = self.inside or tag == "pre"
        self.kind = result.get("class", "")
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "pre"

    def handle_data(self, data):
        if self.inside:
            self.spans.append((self.kind, data))


def test_trace_html_is_one_page_with_the_text(forerun, pair, tmp_path):
    prompt = PROMPT + " <b> & "
    file = tmp_path / "trace.html"
    _, out, _ = forerun("generate", prompt, *pair, "--trace-html", str(file), "--json")
    page = Page()
    page.feed(file.read_text(encoding="utf-8"))
    assert "".join(text for _, text in page.spans) == prompt + json.loads(out)["text"]
    assert {kind for kind, _ in page.spans} >= {"prompt", "accepted", "corrected"}
    assert page.links == []
    assert "prefers-color-scheme: dark" in file.read_text(encoding="utf-8")


@pytest.mark.parametrize(("index", "why"), [("nowhere/page.html", "no folder"), (".", "a folder")])
def test_a_page_that_cannot_be_written_is_refused_before_the_model_runs(
    forerun, pair, tmp_path, index, why, monkeypatch
):
    monkeypatch.setattr("forerun.engine.llm.LLM", None)
    code, out, err = forerun("generate", PROMPT, *pair, "--trace-html", str(tmp_path / index))
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"error: cannot write {tmp_path}.*: .*{why}.*\n", err)


def test_train_target_makes_a_model_that_generates(forerun, tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name in "abc":
        (corpus / f"{name}.py").write_text(f"def {name}(x):\n    return x + 1\n" * 200, encoding="utf-8")
    sizes = "--hidden-size 32 --layers 1 --heads 2 --kv-heads 1 --intermediate-size 32 --positions 128"
    run_length = "--tokens 2048 --batch-tokens 1024 --length 64 --vocab-size 300 --held-out 1 --threads 1 --no-progress"
    out = tmp_path / "model"
    code, printed, _ = forerun(
        "train", "target", "--out", str(out), "--corpus", str(corpus), *sizes.split(), *run_length.split()
    )
    assert (code, printed.strip()) == (0, str(out))
    code, answer, _ = forerun("generate", "def a", "--model", str(out), "--max-tokens", "4", "--json")
    assert (code, json.loads(answer)["completion_tokens"]) == (0, 4)

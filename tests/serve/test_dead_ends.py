"""Where nothing may follow: an answer's tokens up to there, or its end before there, are what plain decoding gives."""

import pytest
import torch

from forerun import RequestError, SamplingParams
from forerun.core.batch import Scores
from forerun.core.request import RequestState
from forerun.core.tree import Draft
from forerun.sampling.draw import Sampler
from forerun.speculate.accept import rules
from forerun.speculate.accept.base import NO_TOKEN
from forerun.speculate.accept.synthetic import Synthetic

LONG = "def parse(value): return value + xyzzy"


def answer(llm, prompt, params, method):
    job = llm.engine.add(llm.tokenizer.encode(prompt), params, speculate=method is not None, method=method)[0]
    while llm.engine.busy:
        llm.engine.step()
    assert job.finish is not None
    assert job.metrics.draft_error is None
    assert job.metrics.alpha is None or 0.0 <= job.metrics.alpha <= 1.0001
    return job.output_ids, job.text, job.finish.reason, job.finish.stopped_by, job.logprobs


@pytest.mark.parametrize("method", ["draft_model", "pattern", "ngram"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stop_before_a_dead_end(served, method, temperature):
    """What follows "def parse" is banned, but the answer has ended there."""
    params = SamplingParams(
        temperature=temperature, seed=3, max_tokens=40, structured_outputs={"choice": [LONG]}, stop=["def parse"],
        bad_words=["("],
    )  # fmt: skip
    for prompt in ("import os\n", 3 * f"{LONG}\n"):  # drafts that go on behind the dead end, too
        plain = answer(served, prompt, params, None)
        assert plain[2:4] == ("stop", "def parse")
        assert answer(served, prompt, params, method) == plain


@pytest.mark.parametrize("method", ["draft_model", "pattern", "ngram"])
def test_tokens_before_a_dead_end_stay(served, method):
    """The grammar asks for the sum, which is banned."""
    params = SamplingParams(
        temperature=0.0, max_tokens=60, logprobs=2, structured_outputs={"choice": [LONG]}, bad_words=["+"]
    )
    plain = answer(served, "import os\n", params, None)
    assert plain[1] == LONG.partition(" +")[0]
    assert plain[2:4] == ("error", NO_TOKEN)
    assert answer(served, "import os\n", params, method) == plain


def test_a_draft_that_breaks_the_grammar_is_only_a_draft(served, monkeypatch):
    """Behind "x" the parser grows beyond its limits: fatal for a text that says so, nothing for one that was offered
    it and went on with "y"."""
    names, letters = range(719), "abcdefghijk"
    ends = "".join(f'{letter.upper()}: "{letter}"\n' for letter in letters)
    rules_ = "\n".join(
        f"s{i}: {'| '.join(f'{letter} {letters[i % 11].upper()}' for letter in letters.upper())}" for i in names
    )
    choice = "|".join(f"s{i}" for i in names)
    grammar = f'start: "def" " parse" ("y" /[a-z]{{8}}/ | "x" s)\ns: {choice}\n{rules_}\n{ends}'
    letter = served.tokenizer.encode("x")[-1]
    ngram = served.engine.router.drafters["ngram"]
    monkeypatch.setattr(ngram, "propose", lambda sequences, budgets: [Draft.chain([letter]) for _ in budgets])
    seen = set()
    for seed in range(8):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=14, structured_outputs={"grammar": grammar})
        plain = answer(served, "import os\n", params, None)
        assert answer(served, "import os\n", params, "ngram") == plain
        seen.add(plain[2])
        if plain[2] == "error":
            assert "Too many items" in plain[3]
    assert seen == {"stop", "error"}, "both kinds of answers were to be seen"


@pytest.mark.parametrize("method", ["draft_model", "pattern", "ngram"])
def test_an_ambiguous_grammar_holds_nobody_up(served, method):
    """The parser looks at more with every letter: it ends where one step would take long."""
    params = SamplingParams(
        temperature=1.0,
        seed=1,
        max_tokens=80,
        structured_outputs={"grammar": 'start: e\ne: e e | "a" | "b" | "c" | " "'},
        logit_bias={served.tokenizer.eos_token_id: -100.0},
    )
    plain = answer(served, "x = ", params, None)
    assert plain[2] == "error"
    assert "Too many items" in plain[3]
    assert 5 < len(plain[0]) < 40
    assert answer(served, "x = ", params, method) == plain


@pytest.mark.parametrize("regex", ["(a{1000}){500}", "a{1000000}"])
def test_a_regex_beyond_all_limits_is_refused(served, regex):
    with pytest.raises(RequestError, match="too many expressions"):
        served.generate(["def f("], SamplingParams(max_tokens=40, structured_outputs={"regex": regex}))


def chosen(name):
    return Synthetic(rules["coupled"](), [1.0, 1.0, 1.0]) if name == "synthetic" else rules[name]()


@pytest.mark.parametrize("dead", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["coupled", "token", "block", "recursive", "traversal", "synthetic"])
@pytest.mark.parametrize("kernels", [True, False])
def test_a_path_ends_where_nothing_is_permitted(name, dead, kernels):
    """A chain of which every token is certain; behind its first ``dead`` tokens there is a row without any."""
    tokens, size = [3, 1, 2], 8
    warped = torch.full((4, size), float("-inf"))
    for row, token in enumerate([*tokens, 5]):
        warped[row, token] = 0.0
    q = warped[:3].exp()
    warped[dead] = float("-inf")
    rule = chosen(name)
    draft = Draft()
    for depth, token in enumerate(tokens):
        draft.add(token, depth - 1, depth)
    draft.q = q
    sampler = Sampler(size)
    if not kernels:
        sampler.compiled = None
    sequence = RequestState(0, [1], 1, SamplingParams(temperature=1.0), 7)
    verdict = rule.accept(Scores([sequence], [draft], [0], warped), sampler)[0]
    assert verdict.path == [0, 1, 2][:dead]
    assert verdict.error == NO_TOKEN

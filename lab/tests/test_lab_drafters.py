"""The laboratory's drafters: what they draft, and from which q."""

import itertools
import math
import random
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare
from transformers import LlamaForCausalLM

from drafting import CONFIGS, DRAFT, PROMPTS, STAGED, VOCAB, build, fill, params, sequence
from forerun import LLM, SamplingParams
from forerun.core.errors import ConfigError
from forerun.speculate.draft.heterogeneous import Vocabulary, VocabularyMap
from forerun_lab.drafters.random import _distinct
from forerun_lab.drafters.slem import StringReading
from forerun_lab.drafters.staged import Ahead
from refusals import refused
from tiny import byte_tokenizer


def test_staged_drafts_what_its_draft_model_alone_would(llm, places):
    alone = fill({**DRAFT, "num_speculative_tokens": 5}, places)
    for temperature in (0.0, 0.8):
        rounds = []
        for config in (alone, fill(STAGED, places), fill(CONFIGS["staged-twice"], places)):
            answers = llm(config).generate(PROMPTS, params(temperature))
            rounds.append([answer.metrics.acceptance_histogram for answer in answers])
        assert rounds[0] == rounds[1] == rounds[2]


def test_staged_saves_forwards_of_its_draft_model(llm, tiny_target, tiny_draft):
    config = {"method": "staged", "model": tiny_draft, "num_speculative_tokens": 5,
              "drafter": {"method": "draft_model", "model": tiny_draft}}  # fmt: skip
    speculative = LLM(tiny_target, speculative_config=config)
    staged, rounds = next(iter(speculative.engine.router.drafters.values())), []
    run = staged._round
    staged._round = lambda *arguments: rounds.append(run(*arguments)) or rounds[-1]
    speculative.generate(PROMPTS, params(0.0))
    verdicts = [verdict for one in rounds for verdict in one.verdicts]
    assert sum(len(verdict.tokens) for verdict in verdicts) > 2.5 * len(rounds)
    assert sum(verdict.accepted for verdict in verdicts) > 0.9 * sum(
        len(draft) for one in rounds for draft in one.drafts
    )


@pytest.mark.parametrize("rule", ["token", "block"])
def test_staged_tokens_carry_the_draft_models_own_distribution(rule, llm, tiny_draft, places, monkeypatch):
    """q of every drafted token, against the draft checkpoint run by transformers."""
    speculative = llm(fill({**STAGED, "accept": rule}, places))
    model = LlamaForCausalLM.from_pretrained(tiny_draft).eval()
    drafter = next(iter(speculative.engine.router.drafters.values()))
    job = speculative.engine.add(speculative.encode(PROMPTS[1])[1], params(0.8)[1])[0]
    seen = 0
    propose = drafter.propose

    def checked(sequences, budgets):
        nonlocal seen
        drafts = propose(sequences, budgets)
        for request, draft in zip(sequences, drafts):
            with torch.inference_mode():
                text = torch.tensor([request.tokens + draft.tokens])
                logits = model(text).logits[0, len(request.tokens) - 1 :]
            for depth in range(len(draft)):
                (trial,) = draft.trials[depth]
                expected = torch.softmax(logits[depth] / 0.8, dim=0)
                torch.testing.assert_close(draft.q[trial.q_row], expected, atol=1e-5, rtol=1e-3)
                seen += 1
        return drafts

    monkeypatch.setattr(drafter, "propose", checked)
    while speculative.engine.busy:
        speculative.engine.step()
    assert job.metrics.draft_error is None
    assert seen > 20


def test_token_recycling_remembers_the_targets_top_candidates(llm, tiny_target):
    speculative = LLM(tiny_target, speculative_config={"method": "token_recycling", "recycled_candidates": 4})
    answer = speculative.generate(["ab"], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))[0]
    drafter = next(iter(speculative.engine.router.drafters.values()))
    prompt = answer.prompt_token_ids
    model = LlamaForCausalLM.from_pretrained(tiny_target).eval()
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1], dim=0).topk(4)
    assert drafter.ids[prompt[-1]].tolist() == expected.indices.tolist()
    assert drafter.logs[prompt[-1]].tolist() == pytest.approx(expected.values.tolist(), abs=1e-4)


def test_drafters_inside_drafters_draw_independently():
    """Uniform draws of two parts agree once in VOCAB rounds, wherever the parts are."""
    one = {"method": "random", "num_speculative_tokens": 1}
    parts = [{"method": "merged", "drafters": [one, one]}, one, one]
    merged = build("merged", "recursive", drafters=parts, num_speculative_tokens=1)
    requests = [sequence([1, 2, 3], temperature=1.0, seed=key, key=key) for key in range(400)]
    trees = merged.propose(requests, [1] * len(requests))
    draws = [[tree.tokens[trial.node] for trial in tree.trials[0]] for tree in trees]
    for one, other in itertools.combinations(zip(*draws, strict=True), 2):
        assert sum(a == b for a, b in zip(one, other)) / len(requests) < 0.062  # 0.02, six standard errors more


def test_a_grammar_inside_a_staged_draft_counts_from_the_committed_tokens():
    """The inner copy is some drafted tokens ahead; the grammar knows the committed ones only."""
    outer, inner = sequence([1, 2, 3]), sequence([1, 2, 3])
    inner.tokens += [7, 8]
    asked = []
    grammar = SimpleNamespace(allowed=lambda *where: asked.append(where))
    Ahead(outer, grammar).allowed(inner, [9])
    assert asked == [(outer, [7, 8, 9])]


CORPUS = ["def größe(x):\n    return x\n" * 3, "import os\nfor path in os.listdir('.'):\n    print(path)\n"]


@pytest.fixture(scope="module")
def bridge():
    target, draft = byte_tokenizer(CORPUS, 320, ["<end>"]), byte_tokenizer(CORPUS, 290, ["<stop>"])
    return VocabularyMap(Vocabulary(target, 320), Vocabulary(draft, 290), frozenset({0}), frozenset({0}))


def test_special_tokens_that_both_have_are_read_where_they_stand(bridge):
    reading = StringReading(bridge)
    reading.follow(bridge.target.encode("def "))
    expected = list(reading.tokens)
    foreseen = [*bridge.draft.encode("path"), 0]
    assert reading.adopt(foreseen, [*bridge.target.encode("path"), 0, 0]) == len(foreseen)
    expected += [*foreseen, 0]
    assert reading.tokens == expected
    unforeseen = bridge.draft.encode("path")
    assert reading.adopt(unforeseen, [0, *bridge.target.encode("path")]) == 0
    expected += [0, *unforeseen]
    assert reading.tokens == expected
    assert reading.adopt([0], bridge.target.encode("path")) == 0
    assert reading.tokens == expected + unforeseen


def test_what_the_draft_wrote_is_kept_as_far_as_its_text_was_committed(bridge):
    reading = StringReading(bridge)
    reading.follow(bridge.target.encode("def "))
    start = len(reading.tokens)
    written = bridge.draft.encode("path in os")
    committed = bridge.target.encode("path or")
    kept = reading.adopt(written, committed)
    assert bridge.draft.spell(written[:kept]).decode() in ("path ", "path", "pat", "pa", "p")
    assert reading.tokens[start : start + kept] == written[:kept]
    assert bridge.draft.spell(reading.tokens).decode() == "def path or"
    assert kept > 0


def test_random_tokens_are_uniform_and_say_so():
    for rule in ("token", "coupled"):
        drafter = build("random", rule, num_speculative_tokens=2)
        seen = Counter()
        for seed in range(2500):
            draft = drafter.propose([sequence([5, 6], temperature=1.0, seed=seed)], [2])[0]
            seen.update(draft.tokens)
            assert draft.q.shape == (1, VOCAB)
            torch.testing.assert_close(draft.q[0], torch.full((VOCAB,), 1 / VOCAB))
        assert chisquare([seen[token] for token in range(VOCAB)]).pvalue > 1e-4


def test_draws_without_replacement_cover_every_order_alike():
    rng = random.Random(0)
    seen = Counter(tuple(_distinct([rng.random() for _ in range(3)], 4)) for _ in range(12_000))
    assert len(seen) == 24
    assert all(len(set(draw)) == 3 for draw in seen)
    assert chisquare(list(seen.values())).pvalue > 1e-4


@pytest.mark.parametrize("order", [1, 2])
def test_table_draws_from_the_counts_of_its_file(tmp_path, order):
    text = "abacabadabacabb"
    (tmp_path / "text.txt").write_text(text)
    drafter = build("table", "token", table_file=str(tmp_path / "text.txt"), table_order=order)
    if order == 2:
        counts = Counter(after for before, after in pairwise(text) if before == "a")
    else:
        counts = Counter(text)
    total = sum(counts.values())
    draft = drafter.propose([sequence([7, 0], temperature=2.0)], [1])[0]
    weights = {letter: math.sqrt(count / total) for letter, count in counts.items()}
    expected = torch.zeros(VOCAB)
    for letter, weight in weights.items():
        expected[ord(letter) - ord("a")] = weight / sum(weights.values())
    torch.testing.assert_close(draft.q[draft.trials[0][0].q_row], expected)
    greedy = drafter.propose([sequence([7, 0])], [3])[0]
    assert greedy.tokens[0] == ord(counts.most_common(1)[0][0]) - ord("a")


def test_table_backs_off_to_all_tokens_and_names_a_missing_file(tmp_path):
    (tmp_path / "text.txt").write_text("aab")
    drafter = build("table", table_file=str(tmp_path / "text.txt"))
    assert drafter.propose([sequence([25])], [1])[0].tokens == [0]
    refused(ConfigError, r"missing\.txt cannot be read", build, "table", table_file=str(tmp_path / "missing.txt"))

"""``forerun check`` passes where speculation is lossless, and fails where it is made to lose something."""

import itertools
import json
import random
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import scipy.stats
import torch
from transformers import AutoModelForCausalLM

from forerun import kernels
from forerun.cli.bench import show_checks
from forerun.cli.main import run
from forerun.engine import engine
from forerun.measure import check as checking
from forerun.measure.check import (
    LENGTH,
    METHOD,
    MIXES,
    SHAPES,
    SUPPORT,
    CheckConfig,
    _self_test_result,
    check_distribution,
    check_identity,
    chi_square,
    estimate,
    exact_distribution,
    hand_made,
    variants,
)
from forerun.models.run import invariance
from forerun.models.run.native import NativeModel
from forerun.speculate import round as rounds
from forerun.speculate.accept import base
from forerun.speculate.accept.chains import Coupled, Token
from forerun.speculate.accept.compare import Comparison, compare
from forerun.speculate.draft import drafters

pytestmark = pytest.mark.slow

SMALL = ["--prompts", "6", "--prompt-tokens", "20", "--max-tokens", "12", "--prompt-set", "random"]


@pytest.fixture
def check(capsys, tiny_target, tiny_draft, monkeypatch):
    monkeypatch.setattr(invariance, "MOST_RUNS", 2)  # sixteen take minutes

    def call(*options, rows=60):
        monkeypatch.setattr(invariance, "ROWS", rows)
        code = run(["check", "--model", tiny_target, "--spec-model", tiny_draft, *SMALL, "--json", *options])
        return code, json.loads(capsys.readouterr().out)

    return call


def failures(result):
    return {item["check"] for item in result["results"] if not item["passed"]}


def test_everything_holds_on_the_tiny_pair(check):
    code, result = check("--samples", "60", rows=invariance.ROWS)
    assert (code, result["passed"], result["tested"], failures(result)) == (0, True, True, set())
    results = [(item["check"], item["what"], item["layout"], item["temperature"]) for item in result["results"]]
    for method, layout, temperature in itertools.product(
        ("ngram", "draft_model", "hand-made trees"), ("slotted", "paged 16"), (0.0, 0.8)
    ):
        assert ("same-seed identity", method, layout, temperature) in results
    paths = {item["what"].split(",")[0].split(":")[0] for item in result["results"] if item["check"] != "distribution"}
    assert paths >= {"native", "hf"}
    bits = [item for item in result["results"] if item["unit"] == "rows"]
    assert [(item["good"], item["total"]) for item in bits] == [(36, 36)] * 4
    assert [item["what"] for item in result["results"] if item["check"] == "distribution"] == [
        "ngram, coupled", "ngram, token", "draft_model, coupled", "draft_model, token",
    ]  # fmt: skip
    assert METHOD not in drafters


def test_each_way_of_a_method_is_named(check):
    ways = json.dumps({"draft_model": [{"num_speculative_tokens": n} for n in (2, 3)]})
    small = ["--methods", "draft_model", "--samples", "40", "--accept", "token", "--prompts", "2", "--no-trees"]
    _, result = check(*small, "--temperature", "0", "--layout", "slotted", "--speculative-config", ways)
    names = [f"draft_model num_speculative_tokens={n}" for n in (2, 3)]
    assert [item["what"] for item in lines(result, "same-seed identity")] == names
    assert [item["what"] for item in lines(result, "distribution")] == [f"{name}, token" for name in names]


def lines(result, check):
    return [item for item in result["results"] if item["check"] == check]


IDENTITY, BITS, DISTRIBUTION = "same-seed identity", "bit-equal logits", "distribution"


@pytest.mark.parametrize(("options", "reasons"), [
    ("pattern,draft_model --accept token --layout slotted",
     dict.fromkeys((IDENTITY, DISTRIBUTION), "nothing was drafted: give")),
    ("ngram,draft_model --samples 4 --layout slotted", {DISTRIBUTION: "4 samples cannot tell two answers apart"}),
    ("ngram,draft_model --samples 0 --max-tokens 1 --layout slotted",
     {IDENTITY: "nothing was drafted", BITS: "two tokens of a verif"}),
    ("draft_model --samples 0 --no-trees --prompts 4", {IDENTITY: "nothing was drafted at a temperature of its own"}),
])  # fmt: skip
def test_what_was_not_tested_has_not_passed(check, capsys, options, reasons):
    code, result = check("--methods", *options.split(), "--temperature", "0.8")
    assert (code, result["passed"], result["tested"]) == (1, False, False)
    for kind, reason in reasons.items():
        idle = [item for item in lines(result, kind) if not item["tested"]]
        assert idle
        assert all(reason in item["detail"] and not item["passed"] for item in idle)
    assert {item["tested"] for item in result["results"] if item["passed"]} <= {True}
    show_checks(result)
    shown = capsys.readouterr().out
    count = sum(not item["tested"] for item in result["results"])
    assert shown.endswith(f"{count} of {len(result['results'])} checks found nothing to test: not passed\n")
    assert shown.count("not tested") == count
    assert "holds" not in shown


def test_a_context_without_two_rows_to_compare_is_not_tested():
    for context, tested in ((10, False), (11, True)):
        model = SimpleNamespace(info=SimpleNamespace(max_len=context))
        result = _self_test_result("native", "slotted", model, [])
        assert (result.tested, result.passed) == (tested, tested)
        failed = _self_test_result("native", "slotted", model, ["2 rows differ"])
        assert (failed.tested, failed.passed, failed.detail) == (True, False, "2 rows differ")


def test_a_quick_check_tests_everything_that_a_whole_one_does(capsys, tiny_target, tiny_draft, monkeypatch):
    """The time is told before; explicit options win over those of --quick."""
    monkeypatch.setattr(invariance, "ROWS", 60)
    monkeypatch.setattr(invariance, "MOST_RUNS", 2)
    pair = ["check", "--model", tiny_target, "--spec-model", tiny_draft, "--prompt-set", "random", "--quick", "--json"]
    assert run([*pair, "--samples", "60"]) == 0
    captured = capsys.readouterr()
    assert re.fullmatch(r"this takes about \d+ (seconds|minutes)\n", captured.err)
    result = json.loads(captured.out)
    assert result["tested"]
    assert {item["check"] for item in result["results"]} >= {"same-seed identity", "distribution", "bit-equal logits"}
    assert {item["total"] for item in result["results"] if item["unit"] == "samples"} == {60}


def test_the_estimate_follows_the_work(llm, tiny_target, monkeypatch):
    model, prompt = llm(model=tiny_target), [1, 2, 3, 4]
    monkeypatch.setattr(checking, "run_requests", lambda *_, **__: ([], SimpleNamespace(tokens_per_second=2.0)))
    small, large = (estimate(CheckConfig(prompts=n, samples=0, rows=1), model, prompt, 1) for n in (4, 400))
    assert 0 < 10 * small < large


def test_the_estimate_has_the_self_test_in_it(llm, tiny_target, monkeypatch):
    """A forward pass takes at least as long as a token of plain decoding."""
    model, fed, feed = llm(model=tiny_target), [], invariance._Probe.feed
    monkeypatch.setattr(invariance._Probe, "feed", lambda *given: [fed.append(1), feed(*given)][1])
    monkeypatch.setattr(checking, "run_requests", lambda *_, **__: ([], SimpleNamespace(tokens_per_second=1.0)))
    given = {"engine": {"model": tiny_target}, "prompts": 1, "max_tokens": 1, "samples": 0, "page_sizes": (None,)}
    config = CheckConfig(**given, rows=30)
    for path in checking._paths(config, model):
        invariance.self_test(path, rows=config.rows)
    assert len(fed) <= estimate(config, model, [1, 2, 3, 4], 1) <= 20 * len(fed)
    assert estimate(CheckConfig(**given), model, [1, 2, 3, 4], 1) > 10 * estimate(config, model, [1, 2, 3, 4], 1)


@pytest.mark.parametrize("option", ["temperature", "accept", "layout"])
def test_an_empty_list_checks_nothing(capsys, tiny_target, option):
    assert run(["check", "--model", tiny_target, f"--{option}", ","]) == 2
    assert "must name at least one" in capsys.readouterr().err


def test_a_failure_without_a_draft_is_a_failure(llm, monkeypatch):
    """Another answer than plain decoding's is wrong, whether or not anything was drafted."""
    right = checking.run_requests

    def wrong(llm, speculative, *arguments, **options):
        result, total = right(llm, speculative, *arguments, **options)
        return [[answer._replace(text="?") for answer in group] if speculative else group for group in result], total

    monkeypatch.setattr(checking, "run_requests", wrong)
    config = CheckConfig(trees=False, temperatures=[0.0], max_tokens=4, page_sizes=[None], concurrency=8)
    result = list(check_identity(config, llm(), [{"method": "pattern"}], [[5, 6, 7]]))
    assert [(one.passed, one.tested) for one in result] == [(False, True)]


def test_a_rollback_that_keeps_too_much_is_found(check, monkeypatch):
    def careless(target, result, batch):
        correct(target, result, batch)
        pool = target.attention.pool
        for sequence, draft, verdict in zip(*batch.all):
            if len(draft) > len(verdict.path) and sequence.num_computed_tokens > sequence.num_prompt + 2:
                for side in (pool.keys, pool.values):
                    index = pool.slot_mapping(sequence.id, [sequence.num_computed_tokens - 1])
                    side[0][index[0], :, index[1]] += 1.0

    correct = rounds.roll_back
    monkeypatch.setattr(rounds, "roll_back", careless)
    code, result = check("--samples", "0", "--methods", "draft_model", "--temperature", "0.8")
    assert (code, result["passed"]) == (1, False)
    assert failures(result) == {"same-seed identity"}
    assert any("differs from token" in item["detail"] for item in result["results"])


def test_a_rule_that_likes_its_drafts_too_much_is_found(check, monkeypatch):
    def gullible(self, scores, sampler):
        verdicts = correct(self, scores, sampler)
        for verdict, draft in zip(verdicts, scores.drafts):
            if len(draft) and not verdict.path:
                verdict.path = [0]
        return verdicts

    correct = Coupled.accept
    monkeypatch.setattr(Coupled, "accept", gullible)
    code, result = check("--methods", "draft_model", "--accept", "coupled", "--no-trees", "--temperature", "0.8")
    assert code == 1
    assert failures(result) == {"same-seed identity", "distribution"}


def forgetful(self, compared, correct=Token.decide):
    accept = correct(self, compared)
    compared.residual = torch.softmax(compared.scores.warped, dim=-1)
    return accept


@pytest.mark.parametrize("form", [Comparison, compare] if kernels.has("acceptance") else [Comparison])
def test_the_distribution_finds_a_residual_that_forgets_q(llm, tiny_draft, monkeypatch, form):
    """The classic mistake: after a rejection, a token of p instead of max(0, p - q)."""
    monkeypatch.setattr(base, "compare", form)
    options = {"method": "draft_model", "model": tiny_draft, "accept": "token"}
    prompt = [10, 20, 30, 10, 20, 30, 10]
    assert check_distribution(llm(), options, prompt, seed=1).passed
    monkeypatch.setattr(Token, "decide", forgetful)
    result = check_distribution(llm(), options, prompt, seed=1)
    assert not result.passed
    assert result.p_value < 1e-8
    assert result.good == result.total  # every answer is possible: only their frequencies are wrong


def test_every_method_is_checked_or_left_out(check):
    code, result = check("--methods", "all", "--samples", "0", "--temperature", "0.8", "--layout", "slotted")
    assert code == 0
    checked = {item["what"] for item in result["results"] if item["check"] == "same-seed identity"}
    assert checked | set(result["left_out"]) >= set(drafters)
    assert {"ngram", "suffix", "layerskip", "token_recycling", "hand-made trees"} <= checked
    assert {"pattern", "medusa"} <= set(result["left_out"])


def test_variants_are_a_chain_a_tree_and_a_sharper_draft(tiny_draft):
    result = variants({"method": "draft_model", "model": tiny_draft})
    assert [set(config) - {"method", "model"} for config in result] == [set(), {"tree_nodes"}, {"draft_temperature"}]
    assert variants({"method": "prompt_lookup"})[0] == {"method": "prompt_lookup"}
    assert all(len(MIXES) % count for count in (2, 3))


def test_more_than_tokens_is_compared(llm, monkeypatch):
    """Logprobs that speculation changes are a failure, though every token is right."""

    def shifted(result, index, verdict, mode):
        outcome = correct(result, index, verdict, mode)
        return [replace(one, logprob=one.logprob - 0.01) for one in outcome] if len(verdict.tokens) > 1 else outcome

    correct = engine.emitted_logprobs
    monkeypatch.setattr(engine, "emitted_logprobs", shifted)
    prompts = [[5, 6, 7] * 4] * len(MIXES)
    config = CheckConfig(trees=False, temperatures=[0.0], max_tokens=12, page_sizes=[None], concurrency=8)
    results = list(check_identity(config, llm(), [{"method": "ngram"}], prompts))
    assert [result.passed for result in results] == [False]
    assert "same tokens and another logprobs" in results[0].detail


def test_bits_that_depend_on_the_batch_are_found(check, monkeypatch):
    def forward(self, batch, cache):
        output = correct(self, batch, cache)
        output.logits = output.logits * (1 + 1e-6 * batch.num_rows)
        return output

    correct = NativeModel.forward
    monkeypatch.setattr(NativeModel, "forward", forward)
    code, result = check("--samples", "0", "--methods", "draft_model", "--no-trees", "--model-path", "native")
    assert code == 1
    wrong = {item["what"].split(":")[0].split(",")[0] for item in result["results"] if not item["passed"]}
    assert "native" in wrong
    assert "hf" not in wrong


def test_hand_made_trees_have_their_shape_and_hide_the_text(llm):
    idle = llm(max_num_seqs=2).engine
    text = list(range(5, 45))
    with hand_made([text]) as config:
        drafter = drafters[METHOD](config.drafter, type("Context", (), {"sampler": idle.sampler}))
        branching, deepest = 0, 0
        for seed in range(60):
            length = random.Random(seed).randrange(10, 36)
            sequence = idle.add(text[:length], _params())[0].sequence
            sequence.seed, sequence.num_prompt = seed, 10
            draft = drafter.propose([sequence], [4])[0]
            assert any(len(shape) == len(draft) for shape in SHAPES)
            assert max(draft.depths()) <= 4
            for parent in range(-1, len(draft)):
                tokens = [draft.tokens[trial.node] for trial in draft.trials[parent + 1]]
                assert len(set(tokens)) == len(tokens)
            node, depth = -1, 0
            while (node := draft.children(node).get(text[length + depth])) is not None:
                depth += 1
            branching += not draft.is_chain
            deepest = max(deepest, depth)
    for job in list(idle.jobs.values()):
        idle.abort(job)
    assert branching > 20
    assert deepest == 4


def _params():
    from forerun import SamplingParams

    return SamplingParams(max_tokens=20)


def test_exact_distribution_is_the_product_of_transformers_probabilities(llm, tiny_target):
    prompt = [10, 20, 30, 10, 20]
    distribution = exact_distribution(llm(), prompt, 0.7)
    model = AutoModelForCausalLM.from_pretrained(tiny_target)
    assert len(distribution) == SUPPORT**LENGTH
    assert sum(distribution.values()) == pytest.approx(1.0, abs=1e-12)
    for answer in random.Random(0).sample(sorted(distribution), 8):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0].double()
        chance = 1.0
        for i, token in enumerate(answer):
            top = logits[len(prompt) - 1 + i].topk(SUPPORT)
            chance *= float(torch.softmax(top.values / 0.7, 0)[top.indices.tolist().index(token)])
        assert distribution[answer] == pytest.approx(chance, rel=1e-4)


def test_chi_square_is_scipys_and_rare_cells_are_joined():
    distribution = {(0,): 0.5, (1,): 0.3, (2,): 0.19, (3,): 0.006, (4,): 0.004}
    counts = {(0,): 110, (1,): 55, (2,): 32, (3,): 3}
    p_value, freedom = chi_square(counts, distribution)
    expected = scipy.stats.chisquare([110, 55, 35], [100, 60, 40])  # two come to 2, which is still rare
    assert (p_value, freedom) == (pytest.approx(expected.pvalue, rel=1e-9), 2)
    even = {(i,): 0.1 for i in range(10)}
    result = chi_square({(i,): 1 + i % 3 for i in range(10)}, even)  # 19 samples: three together are expected 5.7 times
    expected = scipy.stats.chisquare([6, 6, 7], [5.7, 5.7, 7.6])
    assert result == (pytest.approx(expected.pvalue, rel=1e-9), 2)
    assert chi_square({(0,): 3}, {(0,): 0.999, (1,): 0.001}) == (1.0, 0)
    assert chi_square({(0,): 1, (9,): 1}, distribution) == (0.0, 0)

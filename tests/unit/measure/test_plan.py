"""What a plan recommends is what it measured."""

import json
from itertools import product

import pytest

from forerun.cli.bench import with_methods
from forerun.cli.main import run
from forerun.cli.plan import conclusion
from forerun.engine.auto import choose
from forerun.engine.config import SpeculativeConfig
from forerun.engine.llm import LLM
from forerun.engine.metrics import RequestMetrics
from forerun.measure.config import PlanConfig
from forerun.measure.plan import Trial, run_plan
from forerun.measure.planner import Estimate, cost_curve, estimate, predict, reach
from forerun.measure.rounds import Measured, Sample, in_plain_forwards
from forerun.theory import best_gamma, walltime_improvement


def test_each_way_of_a_method_has_figures_of_its_own(tiny_target, tiny_draft):
    models = [str(tiny_target), str(tiny_draft)]
    result = run_plan(
        LLM(str(tiny_target)), [{"method": "draft_model", "model": model} for model in models], [[5, 9, 12, 7, 7, 3]],
        PlanConfig(max_tokens=12, longest=2), 1,
    )  # fmt: skip
    names = [f"draft_model model={model}" for model in models]
    for rows in (result["estimates"], result["measured"][:2]):
        assert [row["method"] for row in rows] == names
    assert [(row["method"], row["k"]) for row in result["predictions"]] == [*product(names, (1, 2))]
    same, other = (row["match_rate"] for row in result["estimates"])
    assert other < same == 1
    assert [row["config"] for row in result["usual"]] == [{"method": "draft_model", "model": m} for m in models]
    assert all(row["speedup"] > 0 for row in result["usual"])


@pytest.mark.parametrize("speedup", [99.0, 0.0])
def test_a_way_without_a_length_is_recommended_where_it_was_fastest(monkeypatch, tiny_target, speedup):
    config = {"method": "draft_model", "model": str(tiny_target)}
    monkeypatch.setattr(Trial, "usual", lambda *_: [{"method": "draft_model", "speedup": speedup, "config": config}])
    result = run_plan(LLM(str(tiny_target)), [config], [[5, 9, 12]], PlanConfig(max_tokens=8, longest=2), 1)
    assert (result["recommended"] == config) is (speedup == 99)


# ----------------------------------------------------------------------------------------------- what is recommended


@pytest.mark.slow
def test_the_recommendation_is_a_configuration_that_was_measured(plan, tiny_draft, monkeypatch):
    monkeypatch.setattr(Trial, "usual", lambda *_: [])  # ways without a length, which the clock may find faster
    result, ran = plan(*(draft := ("--methods", "draft_model", "--spec-model", tiny_draft)))
    assert result == {"method": "draft_model", "model": tiny_draft, "num_speculative_tokens": 3}
    assert SpeculativeConfig.parse(result) in ran
    hot = ("--accept", "lenient", "--temperature", "1", "--speculative-config", '{"lenience": 0.25}')
    result, ran = plan(*draft, *hot)
    assert (result["accept"], result["lenience"]) == ("lenient", 0.25)
    assert SpeculativeConfig.parse(result) in ran


@pytest.mark.parametrize(("methods", "options", "told"), [
    ("draft_model", {"tree": [2, 2]}, "remove 'tree'"),
    ("ngram", {"num_speculative_tokens": 2}, "remove 'num_speculative_tokens'"),
    ("ngram,draft_model", {"draft_model": {"tree": [2, 2]}}, "remove 'tree'"),
    ("merged", {"drafters": [{"method": "ngram", "num_speculative_tokens": 2}, {"method": "suffix"}]}, "'merged'"),
])  # fmt: skip
def test_a_plan_refuses_what_it_is_to_find_out(capsys, tiny_target, methods, options, told):
    given = ["--methods", methods, "--spec-model", tiny_target] if "draft" in methods else ["--methods", methods]
    assert run(["plan", "--model", tiny_target, *given, "--speculative-config", json.dumps(options)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert told in error


def test_trees_cost_what_their_rows_cost():
    curve = cost_curve({2: 1.0, 3: 1.1, 9: 2.0})
    result = Estimate("merged", 0.8, 0.75, 1.0, 0.0)
    chain, tree = (predict(result, curve, 2, 1, nodes)[-1] for nodes in (lambda k: k, lambda k: 4 * k))
    assert (chain.verify_cost, tree.verify_cost) == (1.1, 2.0)
    assert tree.speedup == pytest.approx(chain.speedup * 1.1 / 2.0)


# --------------------------------------------------------------------------------------------- what a plan goes on

FORWARD = {1: 2.0, 2: 2.2, 3: 2.5, 4: 2.8, 6: 3.5, 8: 4.4}
"""Seconds by rows."""


def decoded(depths, tokens):
    """A round whose drafting takes 0.3 seconds and 0.1 for each step, and in which 0.5 pass besides, drafts or none."""
    draft = 0.3 + 0.1 * max(depths) if any(depths) else 0.0
    rows = len(depths) + sum(depths)
    return Sample(tuple(depths), rows, tokens, draft, FORWARD[rows], 0.2, draft + FORWARD[rows] + 0.5)


def ran(rounds):
    metrics = RequestMetrics(tested=10, matched=6, overlap=7.0)
    seconds = sum(r.total for r in rounds)
    return Measured(metrics=[metrics], rounds=rounds, tokens=sum(r.tokens for r in rounds), seconds=seconds)


def planned(plain, by_length, sequences):
    """Predicted and real speed over plain decoding by length, of rounds with these."""
    base, result = ran(plain), {k: ran(rounds) for k, rounds in by_length.items()}
    real = {k: each.tokens_per_second / base.tokens_per_second for k, each in result.items()}
    assert in_plain_forwards([base, *result.values()], sequences) == FORWARD[sequences]
    item = estimate("x", result, base, sequences)
    curve = cost_curve({rows: seconds / FORWARD[sequences] for rows, seconds in FORWARD.items()}, sequences)
    return {p.k: p.speedup for p in predict(item, curve, max(by_length), sequences)}, real


def test_rounds_that_are_alike_are_predicted_as_they_were():
    drafted = {1: [decoded([1], 2), decoded([1], 1)], 3: [decoded([3], 4), decoded([3], 1)], 5: [decoded([5], 3)] * 2}
    said, was = planned([decoded([0], 1)] * 3, drafted, 1)
    assert {k: said[k] for k in was} == pytest.approx(was)
    assert min(said[1], said[3]) < said[2] < max(said[1], said[3])


def test_drafts_of_some_requests_leave_the_others_rows_alone():
    each = [decoded([a, b], 2 + bool(a) + bool(b)) for a, b in product((0, 2), repeat=2)]
    said, was = planned([decoded([0, 0], 2)] * 3, {2: each}, 2)
    assert said[2] == pytest.approx(was[2])


def test_a_disturbed_price_is_no_price():
    curve = cost_curve({1: 1.0, 2: 1.1, 4: 9.0, 5: 1.3, 8: 2.0})
    assert [curve(rows) for rows in (1, 2, 4, 5, 8)] == [1.0, 1.1, 1.3, 1.3, 2.0]


def test_reach_says_what_it_would_take():
    """A 1B draft of a 3B target, in bfloat16 (reference 001)."""
    result = reach(Estimate("draft_model", 0.9, 0.9, 1.0, 0.385))
    assert result["limit"] == pytest.approx(walltime_improvement(0.9, best_gamma(0.9, 0.385), 0.385))
    assert 1.6 < result["limit"] < 1.65
    half, double, triple = result["needs"]
    assert half["rate"] == pytest.approx(0.86)
    assert double["rate"] == pytest.approx(0.975)
    assert triple["rate"] is None
    assert walltime_improvement(0.9, best_gamma(0.9, double["c"]), double["c"]) >= 2.0
    assert reach(Estimate("ngram", 0.2, 0.2, 1.0, 0.0))["needs"][1]["c"] is None


def test_methods_where_none_are_named(tiny_target, monkeypatch):
    mine, shared = {"model": tiny_target}, {}
    assert with_methods({}, {}, {}) == with_methods({}, mine, {"model": "a draft"}) == {}
    assert with_methods({}, mine, {}) == {"methods": ["suffix", "ngram"]}
    monkeypatch.setattr("forerun.engine.auto.known_draft", lambda model: "known")
    assert with_methods({}, mine, shared) == {"methods": ["draft_model", "suffix", "ngram"]}
    assert shared == {"draft_model": {"model": "known"}}
    assert with_methods({"methods": ["none", "auto", "none"]}, mine, {}) == {"methods": ["none", "draft_model", "none"]}
    assert with_methods({"methods": ["draft_model"]}, mine, shared := {}) == {"methods": ["draft_model"]}
    assert shared == {"draft_model": {"model": "known"}}


def test_the_default_is_measured_beside_the_methods(monkeypatch, capsys, tiny_target, tiny_draft):
    """What ``auto`` takes for a model is planned, and recommended as it is where it was fastest; a sentence says so."""
    head = {"method": "draft_model", "model": str(tiny_draft), "num_speculative_tokens": 3, "length": "adaptive"}
    monkeypatch.setattr("forerun.engine.auto.known_drafter", lambda model, heads=True: dict(head))
    given = ["plan", "--model", str(tiny_target), "--prompts", "2", "--max-tokens", "8", "--longest", "2", "--json"]
    assert run(given) == 0
    result = json.loads(capsys.readouterr().out)
    default = choose(str(tiny_target))
    assert [item["method"] for item in default["drafters"]] == ["suffix", "draft_model"]
    assert ("auto", default) in [(item["method"], item["config"]) for item in result["usual"]]
    assert {"draft_model", "suffix", "ngram"} == {item["method"] for item in result["measured"]}
    way = {"method": "ngram", "num_speculative_tokens": 1}
    for speeds, recommended, start in [
        ((1.31, 1.2), default, "Leave the default as it is: it reaches 1.31 times"),
        ((1.1, 1.26), way, "Use ngram and 1 drafted token: it should reach 1.26 times"),
        ((0.9, 0.8), {"method": "none"}, "Do without drafts (--spec-method none): the best drafter reaches 0.90 times"),
    ]:
        usual = [{"method": "auto", "config": default, "speedup": speeds[0]}]
        said = {**result, "usual": usual, "predictions": [{"speedup": speeds[1]}], "recommended": recommended}
        assert conclusion(said).startswith(start)

"""What a plan recommends is what it measured; and the search for layerskip's layers, against all subsets."""

import json
from itertools import combinations, product

import pytest

from forerun.cli.main import run
from forerun.engine.config import SpeculativeConfig
from forerun.engine.llm import LLM
from forerun.engine.metrics import RequestMetrics
from forerun.measure.plan import _Trial, run_plan
from forerun.measure.planner import (
    CostCurve,
    Estimate,
    Prediction,
    Shaped,
    Subset,
    binomial,
    choose_layers,
    estimate,
    fixed,
    neighbours,
    predict,
    recommend,
    size,
)
from forerun.measure.rounds import Measured, Sample, in_plain_forwards

LAYERS = 6
SUBSETS = [chosen for size in range(1, LAYERS) for chosen in combinations(range(LAYERS), size)]
WORTH = (0.5, 0.1, 0.05, 0.2, 0.02, 0.4)


def measured(layers):
    """Every layer brings its worth and costs a sixth of a plain forward."""
    alpha = sum(WORTH[layer] for layer in layers)
    return Subset(layers, alpha, alpha, len(layers) / LAYERS, 1, 1 + alpha - 0.15 * len(layers))


def test_the_search_ends_at_the_best_of_all_subsets():
    expected = max(map(measured, SUBSETS), key=lambda subset: subset.speedup)
    result = choose_layers(measured, LAYERS, 1000)
    assert result[0] == expected
    assert expected.layers == (0, 3, 5)
    assert [subset.speedup for subset in result] == sorted((subset.speedup for subset in result), reverse=True)


@pytest.mark.parametrize("trials", [0, 1, 4, 9])
def test_no_subset_is_measured_twice_nor_too_many(trials):
    asked = []

    def measure(layers):
        asked.append(layers)
        return measured(layers)

    assert len(choose_layers(measure, LAYERS, trials)) == trials
    assert len(asked) == len(set(asked)) == trials
    assert asked == [tuple(range(last)) for last in range(1, LAYERS)][:trials] + asked[LAYERS - 1 :]


def test_layers_that_draft_nothing_are_left_out():
    assert choose_layers(lambda layers: None, LAYERS, 50) == []
    result = choose_layers(lambda layers: None if layers == (0,) else measured(layers), LAYERS, 50)
    assert (0,) not in [subset.layers for subset in result]


@pytest.mark.parametrize("layers", SUBSETS)
def test_neighbours_differ_in_one_layer(layers):
    here = set(layers)
    expected = set()
    for other in map(set, SUBSETS):
        gone, come = here - other, other - here
        if max(len(gone), len(come)) == 1:
            expected.add(tuple(sorted(other)))
    got = list(neighbours(layers, LAYERS))
    assert len(got) == len(set(got))
    assert set(got) == expected


def test_the_best_subset_is_recommended_where_it_beats_the_methods():
    rival = Prediction("ngram", 4, 0.5, 0.0, 1.1, 1.2)
    assert recommend([rival], [measured((0, 3, 5))])["layers"] == [0, 3, 5]
    assert recommend([rival], [measured((1, 2))]) == {"method": "ngram", "num_speculative_tokens": 4}


def test_a_plan_measures_subsets_of_a_real_target(tiny_target):
    llm = LLM(str(tiny_target))
    result = run_plan(
        llm, [{"method": "ngram"}], [[5, 9, 12, 7, 7, 3]], temperature=0.0, max_tokens=12, concurrency=1, longest=3,
        seed=0, layer_trials=1,
    )  # fmt: skip
    assert [item["layers"] for item in result["layers"]] == [(0,)]
    assert 0 <= result["layers"][0]["match_rate"] <= 1
    assert result["layers"][0]["c"] > 0


def test_each_way_of_a_method_has_figures_of_its_own(tiny_target, tiny_draft):
    models = [str(tiny_target), str(tiny_draft)]
    result = run_plan(
        LLM(str(tiny_target)), [{"method": "draft_model", "model": model} for model in models], [[5, 9, 12, 7, 7, 3]],
        temperature=0.0, max_tokens=12, concurrency=1, longest=2, seed=0, tree_nodes=2,
    )  # fmt: skip
    names = [f"draft_model model={model}" for model in models]
    for rows in (result["estimates"], result["trees"], result["measured"][:2]):
        assert [row["method"] for row in rows] == names
    same, other = (row["match_rate"] for row in result["estimates"])
    assert other < same == 1


# ----------------------------------------------------------------------------------------------- what is recommended


@pytest.fixture
def plan(capsys, tiny_target, monkeypatch):
    """Run the command with predictions that promise much: what it recommends, and what it ran."""
    ran = []
    build = _Trial.engine

    def watched(self, config):
        ran.append(SpeculativeConfig.parse(config))
        return build(self, config)

    def promising(result, *rest):
        return [Prediction(result.method, 3, result.match_rate, result.c, 1.0, 2.0)]

    monkeypatch.setattr(_Trial, "engine", watched)
    monkeypatch.setattr("forerun.measure.plan.predict", promising)

    def call(*options):
        ran.clear()
        short = "--prompts 1 --prompt-tokens 12 --max-tokens 12 --prompt-set random --longest 3 --json"
        assert run(["plan", "--model", tiny_target, *short.split(), *options]) == 0
        return json.loads(capsys.readouterr().out)["recommended"], ran

    return call


def test_the_recommendation_is_a_configuration_that_was_measured(plan, tiny_draft):
    draft = ("--methods", "draft_model", "--spec-model", tiny_draft)
    result, ran = plan(*draft)
    assert result == {"method": "draft_model", "model": tiny_draft, "num_speculative_tokens": 3}
    assert SpeculativeConfig.parse(result) in ran
    hot = ("--accept", "lenient", "--temperature", "1")
    result, ran = plan(*draft, *hot, "--speculative-config", '{"lenience": 0.25}')
    assert (result["accept"], result["lenience"]) == ("lenient", 0.25)
    assert SpeculativeConfig.parse(result) in ran
    result, ran = plan("--methods", "none", "--layer-trials", "1", *hot)
    assert (result["method"], result["layers"], result["accept"]) == ("layerskip", [0], "lenient")
    assert SpeculativeConfig.parse(result) in ran
    early = ("--methods", "layerskip", "--layer-trials", "1", "--speculative-config")
    result, ran = plan(*early, '{"exit_layer": 1, "draft_temperature": 0.5}')
    assert SpeculativeConfig.parse(result) in ran


@pytest.mark.parametrize(
    ("methods", "options", "told"),
    [
        ("draft_model", {"tree": [2, 2]}, "leave 'tree' out"),
        ("ngram", {"num_speculative_tokens": 2}, "leave 'num_speculative_tokens' out"),
        ("ngram,draft_model", {"draft_model": {"tree": [2, 2]}}, "leave 'tree' out"),
        ("merged", {"drafters": [{"method": "ngram", "num_speculative_tokens": 2}, {"method": "suffix"}]}, "'merged'"),
    ],
)
def test_a_plan_refuses_what_it_is_to_find_out(capsys, tiny_target, methods, options, told):
    given = ["--methods", methods, "--spec-model", tiny_target] if "draft" in methods else ["--methods", methods]
    assert run(["plan", "--model", tiny_target, *given, "--speculative-config", json.dumps(options)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert told in error


def test_trees_cost_what_their_rows_cost():
    curve = CostCurve({2: 1.0, 3: 1.1, 9: 2.0})
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
    for each in (*result.values(), base):
        in_plain_forwards(each, base, sequences)
    item = estimate("x", result, base, sequences)
    curve = CostCurve({rows: seconds / FORWARD[sequences] for rows, seconds in FORWARD.items()}, sequences)
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


def test_every_small_tree_is_tried():
    for nodes, longest in ((1, 1), (8, 3), (12, 5)):
        every = {
            widths
            for depth in range(1, longest + 1)
            for widths in product(range(1, 9), repeat=depth)
            if list(widths) == sorted(widths, reverse=True) and size(widths) <= nodes
        }
        assert sorted(fixed(nodes, longest)) == sorted(every)
    assert size((3, 2, 1)) == 3 + 6 + 6


def test_a_tree_is_recommended_where_it_is_best():
    rival = Prediction("eagle", 4, 0.5, 0.0, 1.1, 1.2)
    assert recommend([rival], (), [Shaped("eagle", (2, 1), 4, 2.5, 1.3)]) == {"method": "eagle", "tree": [2, 1]}


@pytest.mark.parametrize("nodes", [2, 6])
def test_a_plan_predicts_trees(tiny_target, nodes):
    result = run_plan(
        LLM(str(tiny_target)), [{"method": "draft_model", "model": str(tiny_target)}], [[5, 9, 12, 7, 7, 3]],
        temperature=0.0, max_tokens=24, concurrency=1, longest=3, seed=0, tree_nodes=nodes,
    )  # fmt: skip
    shapes = {tuple(item["tree"]): item for item in result["trees"][0]["fixed"]}
    assert set(shapes) == {tree for tree in fixed(nodes, 3) if tree[0] > 1}
    if nodes == 2:
        assert 1.8 < shapes[2,]["tokens"] <= 2
        return
    assert 3.4 < shapes[2, 1, 1]["tokens"] <= 4  # the target itself drafts, and its last round has no room
    assert shapes[2, 1]["tokens"] == pytest.approx(1 + (shapes[2, 1, 1]["tokens"] - 1) * 2 / 3)


@pytest.mark.parametrize("sequences", [1, 4, 1100])
def test_how_many_have_a_draft(sequences):
    for fraction in (0.0, 0.3, 1.0):
        result = binomial(sequences, fraction)
        assert sum(result) == pytest.approx(1.0)
        assert sum(count * chance for count, chance in enumerate(result)) == pytest.approx(fraction * sequences)

"""What a plan recommends is what it measured; and the search for layerskip's layers, against all subsets."""

from __future__ import annotations

import json
from itertools import combinations

import pytest

from forerun.cli.main import run
from forerun.engine.config import SpeculativeConfig
from forerun.engine.llm import LLM
from forerun.plan.layers import Subset, choose_layers, neighbours
from forerun.plan.planner import CostCurve, Estimate, Prediction, predict, recommend
from forerun.plan.run import _Trial, run_plan

LAYERS = 6
SUBSETS = [chosen for size in range(1, LAYERS) for chosen in combinations(range(LAYERS), size)]
WORTH = (0.5, 0.1, 0.05, 0.2, 0.02, 0.4)


def measured(layers: tuple[int, ...]) -> Subset:
    """Every layer brings its worth and costs a sixth of a plain forward."""
    alpha = sum(WORTH[layer] for layer in layers)
    return Subset(layers, alpha, alpha, len(layers) / LAYERS, 1, 1 + alpha - 0.15 * len(layers))


def test_the_search_ends_at_the_best_of_all_subsets():
    wanted = max(map(measured, SUBSETS), key=lambda subset: subset.speedup)
    found = choose_layers(measured, LAYERS, 1000)
    assert found[0] == wanted
    assert wanted.layers == (0, 3, 5)
    assert [subset.speedup for subset in found] == sorted((subset.speedup for subset in found), reverse=True)


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
    found = choose_layers(lambda layers: None if layers == (0,) else measured(layers), LAYERS, 50)
    assert (0,) not in [subset.layers for subset in found]


@pytest.mark.parametrize("layers", SUBSETS)
def test_neighbours_differ_in_one_layer(layers):
    here = set(layers)
    wanted = set()
    for other in map(set, SUBSETS):
        gone, come = here - other, other - here
        if max(len(gone), len(come)) == 1:
            wanted.add(tuple(sorted(other)))
    got = list(neighbours(layers, LAYERS))
    assert len(got) == len(set(got))
    assert set(got) == wanted


def test_the_best_subset_is_recommended_where_it_beats_the_methods():
    rival = Prediction("ngram", 4, 0.5, 0.0, 1.1, 1.2)
    assert recommend([rival], [measured((0, 3, 5))])["layers"] == [0, 3, 5]
    assert recommend([rival], [measured((1, 2))]) == {"method": "ngram", "num_speculative_tokens": 4}


def test_a_plan_measures_subsets_of_a_real_target(tiny_target):
    llm = LLM(str(tiny_target))
    found = run_plan(
        llm, [{"method": "ngram"}], [[5, 9, 12, 7, 7, 3]], temperature=0.0, max_tokens=12, concurrency=1, longest=3,
        seed=0, layer_trials=1,
    )  # fmt: skip
    assert [item["layers"] for item in found["layers"]] == [(0,)]
    assert 0 <= found["layers"][0]["match_rate"] <= 1
    assert found["layers"][0]["c"] > 0


# ----------------------------------------------------------------------------------------------- what is recommended


@pytest.fixture
def plan(capsys, tiny_target, monkeypatch):
    """Run the command with predictions that promise much: what it recommends, and what it ran."""
    ran: list[SpeculativeConfig] = []
    build = _Trial.engine

    def watched(self, config):
        ran.append(SpeculativeConfig.parse(config))
        return build(self, config)

    def promising(found, *rest):
        return [Prediction(found.method, 3, found.match_rate, found.c, 1.0, 2.0)]

    monkeypatch.setattr(_Trial, "engine", watched)
    monkeypatch.setattr("forerun.plan.run.predict", promising)

    def call(*options: str) -> tuple[dict, list[SpeculativeConfig]]:
        ran.clear()
        short = "--prompts 1 --prompt-tokens 12 --max-tokens 12 --prompt-set random --longest 3 --json"
        assert run(["plan", "--model", tiny_target, *short.split(), *options]) == 0
        return json.loads(capsys.readouterr().out)["recommended"], ran

    return call


def test_the_recommendation_is_a_configuration_that_was_measured(plan, tiny_draft):
    draft = ("--methods", "draft_model", "--spec-model", tiny_draft)
    found, ran = plan(*draft)
    assert found == {"method": "draft_model", "model": tiny_draft, "num_speculative_tokens": 3}
    assert SpeculativeConfig.parse(found) in ran
    hot = ("--accept", "lenient", "--temperature", "1")
    found, ran = plan(*draft, *hot, "--speculative-config", '{"lenience": 0.25}')
    assert (found["accept"], found["lenience"]) == ("lenient", 0.25)
    assert SpeculativeConfig.parse(found) in ran
    found, ran = plan("--methods", "none", "--layer-trials", "1", *hot)
    assert (found["method"], found["layers"], found["accept"]) == ("layerskip", [0], "lenient")
    assert SpeculativeConfig.parse(found) in ran
    early = ("--methods", "layerskip", "--layer-trials", "1", "--speculative-config")
    found, ran = plan(*early, '{"exit_layer": 1, "draft_temperature": 0.5}')
    assert SpeculativeConfig.parse(found) in ran


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
    found = Estimate("merged", 0.8, 0.75, 1.0, 0.0)
    chain, tree = (predict(found, curve, 2, 1, nodes)[-1] for nodes in (lambda k: k, lambda k: 4 * k))
    assert (chain.verify_cost, tree.verify_cost) == (1.1, 2.0)
    assert tree.speedup == pytest.approx(chain.speedup * 1.1 / 2.0)

"""What the laboratory adds to a plan: trees on paper, layers for layerskip against all subsets, and a page."""

import json
import re
from html.parser import HTMLParser
from itertools import combinations, product

import pytest

from forerun.cli.main import run
from forerun.engine.config import SpeculativeConfig
from forerun.engine.llm import LLM
from forerun.measure.config import PlanConfig
from forerun.measure.plan import run_plan
from forerun.measure.planner import Prediction, recommend
from forerun_lab.charts import chart
from forerun_lab.plans import Shaped, Subset, by_depth, choose_layers, fixed, interval, neighbours, size
from forerun_lab.theory import best_shape
from promised import promising

pytestmark = pytest.mark.slow

SMALL = "--prompts 1 --prompt-tokens 8 --max-tokens 8 --prompt-set random --longest 3"


def shapes(nodes, ranks):
    """Every tree of so many nodes, as paths of ranks: one more node each time, behind any node or beside it."""
    result = {frozenset[tuple[int, ...]]()}
    for _ in range(nodes):
        result = {
            here | {(*path, rank)}
            for here in result
            for path in [(), *here]
            for rank in range(ranks)
            if (*path, rank) not in here and (rank == 0 or (*path, rank - 1) in here)
        }
    return result


def worth(paths, acceptance):
    total = 1.0
    for path in paths:
        fraction = 1.0
        for rank in path:
            fraction *= acceptance[rank]
        total += fraction
    return total


@pytest.mark.parametrize("acceptance", [[0.6, 0.2, 0.1], [0.3, 0.3, 0.05], [0.1, 0.7, 0.2], [0.0, 0.9, 0.0]])
@pytest.mark.parametrize(("nodes", "depth"), [(1, 1), (2, 2), (3, 3), (4, 4), (4, 2)])
def test_the_best_shape_is_the_best_of_all(acceptance, nodes, depth):
    every = [paths for n in range(nodes + 1) for paths in shapes(n, 3) if max(map(len, paths), default=0) <= depth]
    result = best_shape(acceptance, nodes, depth)
    assert result.tokens == pytest.approx(max(worth(paths, acceptance) for paths in every))
    paths = []
    for parent, rank in zip(result.parents, result.ranks, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    assert len(set(paths)) == len(paths) <= nodes
    assert worth(paths, acceptance) == pytest.approx(result.tokens)
    assert set(paths) in every
    assert sum(by_depth(result.parents)) == len(paths)


def test_shapes_that_are_none_are_refused():
    for acceptance, nodes, depth in (([0.9, 0.2], 3, 3), ([-0.1], 1, 1), ([0.5], -1, 1), ([0.5], 1, -1)):
        with pytest.raises(ValueError, match="must be"):
            best_shape(acceptance, nodes, depth)
    assert best_shape([0.5], 0, 4) == (1.0, [], [])


def test_intervals_hold_the_share():
    low, high = interval(40, 100)
    assert low == pytest.approx(0.3094, abs=1e-4)  # Wilson, 95 %
    assert high == pytest.approx(0.4980, abs=1e-4)
    assert interval(0, 10)[0] == 0.0
    assert interval(10, 10)[1] == 1.0


class Tags(HTMLParser):
    """Fails where tags do not nest."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_draws_what_was_measured(tiny_target, tmp_path, capsys):
    page = tmp_path / "plan.html"
    command = (
        f"plan --model {tiny_target} --methods suffix,random {SMALL} --trees 4 --concurrency 1,2 --html {page} --json"
    )
    assert run(command.split()) == 0
    result = json.loads(capsys.readouterr().out)
    text = page.read_text(encoding="utf-8")
    parser = Tags()
    parser.feed(text)
    assert parser.open == []
    assert [load["concurrency"] for load in result["loads"]] == [1, 2]
    assert {row["method"] for row in result["measured"]} == {"suffix", "random"}
    for row in result["measured"]:
        assert all(0 <= count <= row["drafts"] for count in row["kept"])
    dots = len(re.findall("<circle", text))
    longest = [row for row in result["measured"] if row["k"] == 7 and row["drafts"]]
    assert dots == len(result["measured"]) + sum(len(row["kept"]) for row in longest) + len(result["verify_cost"])
    for tree in result["trees"]:
        assert f"<h3>{tree['method']}</h3>" in text
        assert [row["nodes"] for row in tree["shapes"]] == [1, 2, 4]


def test_a_page_without_a_folder_is_refused_before_the_work(tiny_target, tmp_path, capsys):
    assert run(["plan", "--model", tiny_target, "--html", str(tmp_path / "nowhere" / "plan.html")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_an_empty_chart_is_nothing():
    assert chart({}, {}, "x", "y") == ""


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
    ways = [(measured(layers).speedup, {"method": "layerskip", "layers": layers}) for layers in ((0, 3, 5), (1, 2))]
    assert recommend([rival], more=ways[:1])["layers"] == (0, 3, 5)
    assert recommend([rival], more=ways[1:]) == {"method": "ngram", "num_speculative_tokens": 4}


def test_a_plan_measures_subsets_of_a_real_target(tiny_target):
    llm = LLM(str(tiny_target))
    config = PlanConfig(max_tokens=12, longest=3, layer_trials=1)
    result = run_plan(llm, [{"method": "ngram"}], [[5, 9, 12, 7, 7, 3]], config, 1)
    assert [item["layers"] for item in result["layers"]] == [(0,)]
    assert 0 <= result["layers"][0]["match_rate"] <= 1
    assert result["layers"][0]["c"] > 0


@pytest.fixture
def plan(plan, monkeypatch):
    monkeypatch.setattr("forerun_lab.plans.predict", promising)
    return plan


def test_recommended_layers_are_a_configuration_that_was_measured(plan):
    hot = ("--accept", "lenient", "--temperature", "1")
    result, ran = plan("--methods", "none", "--layer-trials", "1", *hot)
    assert (result["method"], result["layers"], result["accept"]) == ("layerskip", [0], "lenient")
    assert SpeculativeConfig.parse(result) in ran
    early = ("--methods", "layerskip", "--layer-trials", "1", "--speculative-config")
    result, ran = plan(*early, '{"exit_layer": 1, "draft_temperature": 0.5}')
    assert SpeculativeConfig.parse(result) in ran


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


@pytest.mark.parametrize("nodes", [2, 6])
def test_a_plan_predicts_trees(tiny_target, nodes):
    result = run_plan(
        LLM(str(tiny_target)), [{"method": "draft_model", "model": str(tiny_target)}], [[5, 9, 12, 7, 7, 3]],
        PlanConfig(max_tokens=24, longest=3, trees=nodes), 1,
    )  # fmt: skip
    shapes = {tuple(item["tree"]): item for item in result["trees"][0]["fixed"]}
    assert set(shapes) == {tree for tree in fixed(nodes, 3) if tree[0] > 1}
    if nodes == 2:
        assert 1.8 < shapes[2,]["tokens"] <= 2
        return
    assert 3.4 < shapes[2, 1, 1]["tokens"] <= 4  # the target itself drafts, and its last round has no room
    assert shapes[2, 1]["tokens"] == pytest.approx(1 + (shapes[2, 1, 1]["tokens"] - 1) * 2 / 3)


def test_each_way_of_a_method_has_trees_of_its_own(tiny_target, tiny_draft):
    models = [str(tiny_target), str(tiny_draft)]
    result = run_plan(
        LLM(str(tiny_target)), [{"method": "draft_model", "model": model} for model in models], [[5, 9, 12, 7, 7, 3]],
        PlanConfig(max_tokens=12, longest=2, trees=2), 1,
    )  # fmt: skip
    assert [row["method"] for row in result["trees"]] == [f"draft_model model={model}" for model in models]


def test_a_tree_is_recommended_where_it_is_best(tiny_target, monkeypatch):
    """With the options that it was measured with."""
    monkeypatch.setattr(
        "forerun_lab.plans._TreePredictor.shaped", lambda self, tree: Shaped(self.estimate.method, tree, 2, 2.5, 99.0)
    )
    options = {"method": "draft_model", "model": str(tiny_target), "accept": "coupled", "draft_temperature": 0.5}
    result = run_plan(
        LLM(str(tiny_target)), [options], [[5, 9, 12, 7, 7, 3]], PlanConfig(max_tokens=12, longest=2, trees=2), 1,
    )  # fmt: skip
    del options["accept"]  # the default
    assert result["recommended"] == {**options, "tree": [2]}

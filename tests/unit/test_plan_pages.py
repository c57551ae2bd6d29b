"""Trees on paper, what is out of reach, and the page of a plan."""

import json
import re
from html.parser import HTMLParser

import pytest

from forerun.cli.main import run
from forerun.measure.page import chart, interval
from forerun.measure.planner import CostCurve, Estimate, by_depth, reach
from forerun.theory import best_gamma, best_shape, walltime_improvement

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


def test_a_disturbed_price_is_no_price():
    curve = CostCurve({1: 1.0, 2: 1.1, 4: 9.0, 5: 1.3, 8: 2.0})
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

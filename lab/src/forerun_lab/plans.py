"""Optional parts of ``forerun plan``: predicted trees, layers for ``layerskip``, and a page of the plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from html import escape
from itertools import accumulate
from math import sqrt
from operator import mul
from typing import Any

from forerun.cli.console import print_table
from forerun.core.errors import ConfigError
from forerun.engine.config import SpeculativeConfig
from forerun.measure.config import PlanConfig
from forerun.measure.methods import size
from forerun.measure.page import html, table
from forerun.measure.plan import LENGTHS, Trial, most_nodes, own_options
from forerun.measure.planner import Estimate, PlannedDraft, predict, speedup
from forerun.measure.rounds import Measured
from forerun.speculate.length.prices import Curve
from forerun_lab.charts import chart
from forerun_lab.theory import best_shape

LAYERSKIP = "layerskip"


def explore(
    trial: Trial, named: Mapping[str, Mapping[str, Any]], drafting: Mapping[str, Mapping[str, Any]], curve: Curve,
    config: PlanConfig,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[tuple[float, dict[str, Any]]]]:  # fmt: skip
    """Explore trees of up to ``config.trees`` tokens for the ``drafting`` configurations (``plan_trees``), and
    ``config.layer_trials`` subsets of layers for ``layerskip`` with its ``named`` options or under the plan's rule.
    Returns both, the best subset first, and all of them as (speed-up, ``speculative_config``)."""
    planned = plan_trees(drafting, config.trees, config.longest, trial, curve)
    options = named.get(LAYERSKIP, {"method": LAYERSKIP, "accept": config.accept})
    subsets = choose_layers(
        lambda layers: _measured_layers(trial, options, layers, curve, config.longest),
        trial.llm.model.info.num_layers,
        config.layer_trials,
    )
    ways = [
        (subset.speedup, {**with_layers(own_options(options), subset.layers), "num_speculative_tokens": subset.k})
        for subset in subsets
    ]
    ways += [
        (shape.speedup, {**own_options(named[shape.method]), "tree": list(shape.tree)})
        for item in planned
        for shape in item["fixed"]
    ]
    rows = [{**item, "fixed": [asdict(shape) for shape in item["fixed"]]} for item in planned]
    return rows, [asdict(subset) for subset in subsets], ways


def _measured_layers(
    trial: Trial, options: Mapping[str, Any], layers: tuple[int, ...], curve: Curve, longest: int
) -> Subset | None:
    """``layerskip`` with these layers; None if it drafted nothing."""
    trial.step(f"layers {', '.join(map(str, layers))}")
    config = with_layers(options, layers)
    _, measured = trial.run([{**config, "num_speculative_tokens": LENGTHS[1]}])
    item = trial.estimate(LAYERSKIP, {LENGTHS[1]: measured})
    if item is None:
        return None
    own = trial.curve({**curve.points, **trial.verify_costs([measured])})
    predictions = predict(item, own, longest, trial.concurrency, partial(most_nodes, config))
    best = max(predictions, key=lambda p: p.speedup)
    return Subset(layers, item.alpha, item.match_rate, item.c, best.k, best.speedup)


def with_layers(options: Mapping[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """``layerskip`` with ``options`` and these layers, which replace its exit layer."""
    rest = {key: value for key, value in options.items() if key != "exit_layer"}
    return {"method": LAYERSKIP, **rest, "layers": list(layers)}


@dataclass(frozen=True)
class Subset:
    """Layers, counted from 0, their measurements, and the best predicted speed-up, with ``k`` drafted tokens."""

    layers: tuple[int, ...]
    alpha: float
    match_rate: float
    c: float
    k: int
    speedup: float


def choose_layers(measure: Callable[[tuple[int, ...]], Subset | None], num_layers: int, trials: int) -> list[Subset]:
    """At most ``trials`` subsets of a target's layers, best first. ``measure`` returns None if nothing was drafted."""
    result: dict[tuple[int, ...], Subset | None] = {}

    def best() -> Subset | None:
        return max((subset for subset in result.values() if subset), key=lambda subset: subset.speedup, default=None)

    for last in range(1, num_layers):
        if len(result) < trials:
            layers = tuple(range(last))
            result[layers] = measure(layers)
    start = best()
    while start is not None and len(result) < trials:
        for layers in neighbours(start.layers, num_layers):
            if layers not in result and len(result) < trials:
                result[layers] = measure(layers)
        after = best()
        if after == start:
            break
        start = after
    return sorted((subset for subset in result.values() if subset), key=lambda subset: -subset.speedup)


def neighbours(layers: tuple[int, ...], num_layers: int) -> Iterator[tuple[int, ...]]:
    """Subsets, neither empty nor whole, that differ by one layer removed, added or exchanged for another."""
    others = [layer for layer in range(num_layers) if layer not in layers]
    if len(layers) > 1:
        for layer in layers:
            yield tuple(kept for kept in layers if kept != layer)
    for new in others:
        if len(layers) + 1 < num_layers:
            yield tuple(sorted((*layers, new)))
        for layer in layers:
            yield tuple(sorted((*(kept for kept in layers if kept != layer), new)))


RANKS = 8
"""Children of the root that are drafted to measure acceptance by rank."""
DEPTH = 3
"""Largest depth of the tree whose rounds measure the cost of trees."""


def rank_acceptance(result: Measured) -> list[float]:
    """Entry r is the fraction of drafts whose r-th likeliest first token was the target's."""
    ranks = [rank for sample in result.rounds for rank, depth in zip(sample.ranks, sample.depths) if depth]
    return [ranks.count(rank) / len(ranks) for rank in range(RANKS)] if ranks else []


def plan_trees(
    options: Mapping[str, Mapping[str, Any]], nodes: int, longest: int, trial: Trial, curve: Curve
) -> list[dict[str, Any]]:
    """Results for each drafter that branches.

    ``acceptance`` is measured by rank. ``fixed`` has a ``Shaped`` prediction for every ``tree`` of at most ``nodes``
    tokens and depth ``longest`` whose nodes of one depth have equally many children, no more than those above.
    ``shapes`` predicts the best tree of 1, 2, 4, ... tokens, by its nodes at each depth. ``best_first`` is measured
    with ``nodes`` tokens. The cost of trees, and how independent ranks are, is measured on the largest of the ``fixed``
    trees that have, or nearly have, depth ``DEPTH``."""
    result = []
    every = [tree for tree in fixed(nodes, longest) if tree[0] > 1]
    probe = max((tree for tree in every if len(tree) <= DEPTH), key=lambda tree: (len(tree), size(tree)), default=())
    for name, item in options.items() if probe else ():
        wide = {**item, "tree": [RANKS]}
        shaped = {**item, "tree": list(probe)}
        grown = {**item, "num_speculative_tokens": longest, "tree_nodes": nodes}
        try:
            for config in (wide, shaped, grown):
                SpeculativeConfig.parse(config)
        except ConfigError:
            continue
        plain, *measured = trial.run([wide, shaped, grown])
        acceptance = rank_acceptance(measured[0])
        prices = trial.estimate(name, {len(probe): measured[1]})
        if not acceptance or prices is None:
            continue
        predictor = _TreePredictor(acceptance, prices, probe, curve, trial.concurrency)
        result.append(
            {
                "method": name,
                "acceptance": acceptance,
                "fixed": [predictor.shaped(tree) for tree in every],
                "shapes": _shapes(predictor, nodes, longest),
                "best_first": {
                    "nodes": nodes,
                    "tokens": measured[2].total.tokens_per_round,
                    "speedup": measured[2].tokens_per_second / plain.tokens_per_second,
                },
            }
        )
    return result


def fixed(nodes: int, longest: int, above: int = RANKS) -> Iterator[tuple[int, ...]]:
    """Yields the children per node at each depth of every tree of 1 to ``nodes`` tokens, chains included."""
    for width in range(1, min(above, nodes) + 1):
        yield (width,)
        if longest > 1:
            yield from ((width, *below) for below in fixed(nodes // width - 1, longest - 1, width))


@dataclass(frozen=True)
class Shaped:
    """A ``tree``, as children per node at each depth: mean ``tokens`` per round, speed-up over plain decoding."""

    method: str
    tree: tuple[int, ...]
    nodes: int
    tokens: float
    speedup: float


@dataclass(frozen=True)
class _TreePredictor:
    """Predicts trees from the ``estimate`` of rounds with the tree ``probe``."""

    acceptance: Sequence[float]
    estimate: Estimate
    probe: tuple[int, ...]
    curve: Curve
    concurrency: int

    def gained(self, tree: Sequence[int]) -> float:
        """Accepted tokens per round if ranks are independent."""
        return float(sum(accumulate((sum(self.acceptance[:width]) for width in tree), mul)))

    def speedup(self, gained: float, nodes: int, depth: int) -> tuple[float, float]:
        """Mean tokens per round and speed, scaled by the probe's measured over its predicted tokens."""
        measured = self.estimate.lengths[len(self.probe)]
        predicted = self.gained(self.probe)
        tokens = gained * measured.tokens / predicted if predicted else 0.0
        work = self.estimate.drafted(depth, nodes).work
        drafted = PlannedDraft(tokens, measured.coverage, nodes * measured.nodes / size(self.probe), work)
        return 1 + tokens, speedup(self.estimate, drafted, self.curve, self.concurrency)

    def shaped(self, tree: tuple[int, ...]) -> Shaped:
        return Shaped(self.estimate.method, tree, size(tree), *self.speedup(self.gained(tree), size(tree), len(tree)))


def _shapes(predictor: _TreePredictor, nodes: int, longest: int) -> list[dict[str, Any]]:
    rows = []
    for count in sorted({min(1 << power, nodes) for power in range(nodes.bit_length() + 1)}):
        fitting = []
        for depth in range(1, longest + 1):
            shape = best_shape(predictor.acceptance, count, depth)
            tokens, speed = predictor.speedup(shape.tokens - 1, len(shape.parents), depth)
            fitting.append((speed, tokens, shape))
        speed, tokens, shape = max(fitting, key=lambda item: item[0])
        rows.append({"nodes": count, "by_depth": by_depth(shape.parents), "tokens": tokens, "speedup": speed})
    return rows


def by_depth(parents: Sequence[int]) -> list[int]:
    """Number of nodes at depth 1, 2, ..."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return [depths.count(depth) for depth in range(1, max(depths, default=0) + 1)]


def show(result: Mapping[str, Any]) -> None:
    """Tables of the layers and of the trees."""
    if result["layers"]:
        keys = ("alpha", "match_rate", "c", "speedup")
        rows = [
            [", ".join(map(str, item["layers"])), *(f"{item[key]:.2f}" for key in keys), str(item["k"])]
            for item in result["layers"][:10]
        ]
        print_table(["layerskip with layers", "alpha", "match", "c", "speed-up", "at k"], rows)
    for item in result["trees"]:
        print_table(
            [f"{item['method']}: tokens of a tree", "by depth", "tokens a round", "speed-up"], _shape_rows(item)
        )
        fixed = max(item["fixed"], key=lambda shape: shape["speedup"])
        print(f"as a setting: tree {list(fixed['tree'])}, {fixed['tokens']:.2f}, {fixed['speedup']:.2f} predicted")
        grown = item["best_first"]
        print(f"measured, grown best first to {grown['nodes']}: {grown['tokens']:.2f}, {grown['speedup']:.2f}")


def _shape_rows(item: Mapping[str, Any]) -> list[list[str]]:
    return [
        [str(row["nodes"]), "-".join(map(str, row["by_depth"])), f"{row['tokens']:.2f}", f"{row['speedup']:.2f}"]
        for row in item["shapes"]
    ]


SURE = 1.96
"""Standard errors of a 95 % interval."""


def report(result: Mapping[str, Any]) -> str:
    """HTML of what ``run_plan`` returned, with ``environment`` and, if several loads were planned, ``loads``."""
    about = result["environment"]
    recommended = json.dumps(result["recommended"])
    parts = [
        f"<h1>Plan for {escape(str(about['model']))}</h1>",
        f"<p>{escape(about['processor'])}, {about['threads']} threads, temperature {result['temperature']:g}, "
        f"{result['concurrency']} at a time. Recommended: <code>{escape(recommended)}</code></p>",
        "<h2>Speed over plain decoding by drafted tokens</h2><p>Lines are predicted, dots measured.</p>",
        chart(
            _by_method(result["predictions"], "speedup"),
            _by_method(result["measured"], "speedup"),
            "tokens",
            "speed-up",
        ),
        "<h2>Drafts that are kept up to each position</h2><p>Of the longest drafts measured; 95 % intervals.</p>",
        _positions(result),
        "<h2>A verification by its rows, in plain forwards</h2>",
        chart({}, {"rows": [(float(rows), cost) for rows, cost in result["verify_cost"].items()]}, "rows", "cost"),
        *_roof(result),
        "<h2>What is out of reach</h2>",
        table(
            ["drafter", "a chain comes to at most", "for", "acceptance must be", "or a step cost at most"],
            _reach(result),
        ),
    ]
    if result["trees"]:
        parts += ["<h2>Trees</h2>", *map(_tree_page, result["trees"])]
    if result.get("loads"):
        rows = [
            [str(load["concurrency"]), json.dumps(load["recommended"]), f"{load['best']:.2f}"]
            for load in result["loads"]
        ]
        parts += ["<h2>Loads</h2>", table(["at a time", "recommended", "predicted speed-up"], rows)]
    return html(f"Plan for {about['model']}", parts)


def _by_method(rows: Any, key: str) -> dict[str, list[tuple[float, float]]]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        lines.setdefault(row["method"], []).append((float(row["k"]), row[key]))
    return lines


def _positions(result: Mapping[str, Any]) -> str:
    dots: dict[str, list[tuple[float, float]]] = {}
    bands: dict[str, list[tuple[float, float, float]]] = {}
    longest = max((row["k"] for row in result["measured"]), default=0)
    for row in result["measured"]:
        if row["k"] != longest or not row["drafts"]:
            continue
        for index, count in enumerate(row["kept"], start=1):
            low, high = interval(count, row["drafts"])
            dots.setdefault(row["method"], []).append((float(index), count / row["drafts"]))
            bands.setdefault(row["method"], []).append((float(index), low, high))
    return chart({}, dots, "position", "share kept", bands)


def interval(count: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    fraction, weight = count / of, SURE * SURE / of
    middle = (fraction + weight / 2) / (1 + weight)
    half = SURE / (1 + weight) * sqrt(fraction * (1 - fraction) / of + weight / (4 * of))
    return max(0.0, middle - half), min(1.0, middle + half)


def _roof(result: Mapping[str, Any]) -> list[str]:
    """What reading the weights once a token allows, beside what plain decoding does."""
    about = result["environment"]
    read, held = about.get("read_bandwidth"), about["weights"][0]["bytes"]
    if not read:
        return []
    roof, plain = read / held, result["plain_tokens_per_second"] / result["concurrency"]
    return [
        "<h2>The roof</h2>",
        f"<p>A sum reads {read / 1e9:.1f} GB/s here; the weights are {held / 1e6:.0f} MB: at most {roof:.0f} rounds "
        f"a second. "
        f"Plain decoding makes {plain:.0f}, {plain / roof:.0%} of that.</p>",
    ]


def _reach(result: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for item in result["reach"]:
        for need in item["needs"]:
            rate = "no rate" if need["rate"] is None else f"{need['rate']:.2f}"
            cost = "nothing will do" if need["c"] is None else f"{need['c']:.3f}"
            rows.append([item["method"], f"{item['limit']:.2f}x", f"{need['speedup']:g}x", rate, cost])
    return rows


def _tree_page(item: Mapping[str, Any]) -> str:
    grown, ranks = item["best_first"], ", ".join(f"{fraction:.2f}" for fraction in item["acceptance"])
    reported = (
        f"<h3>{escape(item['method'])}</h3><p>The target's token was the drafter's first, second, ... in {ranks} of "
        f"the rounds. Best-first growth to {grown['nodes']} tokens, measured: {grown['tokens']:.2f} tokens a round, "
        f"{grown['speedup']:.2f} times plain decoding.</p>"
    )
    heads = ["tokens", "by depth", "tokens a round, predicted", "speed-up, predicted"]
    return reported + table(heads, _shape_rows(item))

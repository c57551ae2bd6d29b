"""A plan as a page: speed by depth, acceptance by position, cost by rows, trees, loads, the roof, and what is out of
reach."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from math import sqrt
from typing import Any

from forerun.plan.page import chart, html, table

SURE = 1.96
"""Standard errors of a 95 % interval."""


def report(found: Mapping[str, Any]) -> str:
    """HTML of what ``run_plan`` returned, with ``environment`` (``bench/environment.py``) and, where several loads were
    planned, ``loads``."""
    about = found["environment"]
    recommended = json.dumps(found["recommended"])
    parts = [
        f"<h1>Plan for {escape(str(about['model']))}</h1>",
        f"<p>{escape(about['processor'])}, {about['threads']} threads, temperature {found['temperature']:g}, "
        f"{found['concurrency']} at a time. Recommended: <code>{escape(recommended)}</code></p>",
        "<h2>Speed over plain decoding by drafted tokens</h2><p>Lines are predicted, dots measured.</p>",
        chart(
            _by_method(found["predictions"], "speedup"), _by_method(found["measured"], "speedup"), "tokens", "speed-up"
        ),
        "<h2>Drafts that are kept up to each position</h2><p>Of the longest drafts measured; 95 % intervals.</p>",
        _positions(found),
        "<h2>A verification by its rows, in plain forwards</h2>",
        chart({}, {"rows": [(float(rows), cost) for rows, cost in found["verify_cost"].items()]}, "rows", "cost"),
        *_roof(found),
        "<h2>What is out of reach</h2>",
        table(
            ["drafter", "a chain comes to at most", "for", "acceptance must be", "or a step cost at most"],
            _reach(found),
        ),
    ]
    if found["trees"]:
        parts += ["<h2>Trees</h2>", *map(_tree, found["trees"])]
    if found.get("loads"):
        rows = [
            [str(load["concurrency"]), json.dumps(load["recommended"]), f"{load['best']:.2f}"]
            for load in found["loads"]
        ]
        parts += ["<h2>Loads</h2>", table(["at a time", "recommended", "predicted speed-up"], rows)]
    return html(f"Plan for {about['model']}", parts)


def _by_method(rows: Any, key: str) -> dict[str, list[tuple[float, float]]]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        lines.setdefault(row["method"], []).append((float(row["k"]), row[key]))
    return lines


def _positions(found: Mapping[str, Any]) -> str:
    dots: dict[str, list[tuple[float, float]]] = {}
    bands: dict[str, list[tuple[float, float, float]]] = {}
    longest = max((row["k"] for row in found["measured"]), default=0)
    for row in found["measured"]:
        if row["k"] != longest or not row["drafts"]:
            continue
        for place, count in enumerate(row["kept"], start=1):
            low, high = interval(count, row["drafts"])
            dots.setdefault(row["method"], []).append((float(place), count / row["drafts"]))
            bands.setdefault(row["method"], []).append((float(place), low, high))
    return chart({}, dots, "position", "share kept", bands)


def interval(count: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    share, weight = count / of, SURE * SURE / of
    middle = (share + weight / 2) / (1 + weight)
    half = SURE / (1 + weight) * sqrt(share * (1 - share) / of + weight / (4 * of))
    return max(0.0, middle - half), min(1.0, middle + half)


def _roof(found: Mapping[str, Any]) -> list[str]:
    """What reading the weights once a token allows, beside what plain decoding does."""
    about = found["environment"]
    read, held = about.get("read_bandwidth"), about["weights"][0]["bytes"]
    if not read:
        return []
    roof, plain = read / held, found["plain_tokens_per_second"] / found["concurrency"]
    return [
        "<h2>The roof</h2>",
        f"<p>A sum reads {read / 1e9:.1f} GB/s here; the weights are {held / 1e6:.0f} MB: at most {roof:.0f} rounds "
        f"a second. "
        f"Plain decoding makes {plain:.0f}, {plain / roof:.0%} of that.</p>",
    ]


def _reach(found: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for item in found["reach"]:
        for need in item["needs"]:
            rate = "no rate" if need["rate"] is None else f"{need['rate']:.2f}"
            cost = "nothing will do" if need["c"] is None else f"{need['c']:.3f}"
            rows.append([item["method"], f"{item['limit']:.2f}x", f"{need['speedup']:g}x", rate, cost])
    return rows


def _tree(item: Mapping[str, Any]) -> str:
    rows = [
        [str(row["nodes"]), "-".join(map(str, row["by_depth"])), f"{row['tokens']:.2f}", f"{row['speedup']:.2f}"]
        for row in item["shapes"]
    ]
    grown, ranks = item["best_first"], ", ".join(f"{share:.2f}" for share in item["acceptance"])
    told = (
        f"<h3>{escape(item['method'])}</h3><p>The target's token was the drafter's first, second, ... in {ranks} of "
        f"the rounds. Best-first growth to {grown['nodes']} tokens, measured: {grown['tokens']:.2f} tokens a round, "
        f"{grown['speedup']:.2f} times plain decoding.</p>"
    )
    return told + table(["tokens", "by depth", "tokens a round, predicted", "speed-up, predicted"], rows)

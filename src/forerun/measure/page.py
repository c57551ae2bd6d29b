"""One-file HTML pages of tables and drawings, without scripts, and the page of a plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from math import sqrt
from typing import Any

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:left;border-bottom:1px solid #ccc}"
    "rect{fill:#38c}code{font-size:90%}svg text{font:12px system-ui,sans-serif}"
)
COLOURS = ("#38c", "#c63", "#393", "#936", "#666", "#b80", "#08a", "#a22")
WIDTH, HEIGHT, LEFT, BELOW = 560, 260, 50, 40
Points = Sequence[tuple[float, float]]


def html(title: str, parts: Sequence[str]) -> str:
    """The whole page, UTF-8."""
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return head + "\n".join(parts) + "</html>\n"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    body = "".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def bar(fraction: float) -> str:
    return f'<svg width="200" height="12"><rect width="{200 * min(1.0, max(0.0, fraction)):.0f}" height="12"/></svg>'


def chart(
    lines: Mapping[str, Points],
    dots: Mapping[str, Points],
    x: str,
    y: str,
    bands: Mapping[str, Sequence[tuple[float, float, float]]] | None = None,
) -> str:
    """Lines and dots of one colour per name over common axes; ``bands`` are intervals (x, low, high) at dots."""
    names = list(dict.fromkeys([*lines, *dots]))
    spans = [(at, value) for band in (bands or {}).values() for at, low, high in band for value in (low, high)]
    every = [point for points in [*lines.values(), *dots.values()] for point in points] + spans
    if not every:
        return ""
    right, top = max(a for a, _ in every), max(b for _, b in every) * 1.05 or 1.0
    left = min(a for a, _ in every)

    def at(a: float, b: float) -> tuple[float, float]:
        across = (a - left) / (right - left) if right > left else 0.5
        return LEFT + across * (WIDTH - LEFT - 10), (HEIGHT - BELOW) * (1 - b / top)

    drawn = [_axes(left, right, top, x, y)]
    for name, colour in zip(names, COLOURS * (1 + len(names) // len(COLOURS)), strict=False):
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in (at(*point) for point in lines.get(name, ())))
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for index, low, high in (bands or {}).get(name, ()):
            (a, b), (_, c) = at(index, low), at(index, high)
            drawn.append(f'<line x1="{a:.1f}" y1="{b:.1f}" x2="{a:.1f}" y2="{c:.1f}" stroke="{colour}"/>')
        for point in dots.get(name, ()):
            a, b = at(*point)
            drawn.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{colour}"/>')
        line = names.index(name)
        drawn.append(f'<text x="{WIDTH + 10}" y="{20 + 18 * line}" fill="{colour}">{escape(name)}</text>')
    return f'<svg width="{WIDTH + 180}" height="{max(HEIGHT, 30 + 18 * len(names))}">{"".join(drawn)}</svg>'


def _axes(left: float, right: float, top: float, x: str, y: str) -> str:
    floor = HEIGHT - BELOW
    levels = [(floor * (1 - fraction), top * fraction) for fraction in (0.0, 0.25, 0.5, 0.75, 1 / 1.05)]
    marks = [
        f'<text x="{LEFT - 6}" y="{level + 4:.0f}" text-anchor="end">{value:.3g}</text>'
        f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{level:.0f}" y2="{level:.0f}" stroke="#ddd"/>'
        for level, value in levels
    ]
    ends = (
        f'<text x="{LEFT}" y="{floor + 16}">{left:.3g}</text>'
        f'<text x="{WIDTH - 10}" y="{floor + 16}" text-anchor="end">{right:.3g}</text>'
        f'<text x="{(LEFT + WIDTH) // 2}" y="{floor + 32}" text-anchor="middle">{escape(x)}</text>'
        f'<text x="{LEFT + 4}" y="12">{escape(y)}</text>'
    )
    return "".join(marks) + ends


def _cell(text: str) -> str:
    return text if text.startswith("<svg") else escape(text)


SURE = 1.96
"""Standard errors of a 95 % interval."""


def report(result: Mapping[str, Any]) -> str:
    """HTML of what ``run_plan`` returned, with ``environment`` (``bench/environment.py``) and, where several loads were
    planned, ``loads``."""
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
        parts += ["<h2>Trees</h2>", *map(_tree, result["trees"])]
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


def _tree(item: Mapping[str, Any]) -> str:
    rows = [
        [str(row["nodes"]), "-".join(map(str, row["by_depth"])), f"{row['tokens']:.2f}", f"{row['speedup']:.2f}"]
        for row in item["shapes"]
    ]
    grown, ranks = item["best_first"], ", ".join(f"{fraction:.2f}" for fraction in item["acceptance"])
    reported = (
        f"<h3>{escape(item['method'])}</h3><p>The target's token was the drafter's first, second, ... in {ranks} of "
        f"the rounds. Best-first growth to {grown['nodes']} tokens, measured: {grown['tokens']:.2f} tokens a round, "
        f"{grown['speedup']:.2f} times plain decoding.</p>"
    )
    return reported + table(["tokens", "by depth", "tokens a round, predicted", "speed-up, predicted"], rows)

"""A fleet on paper as a page."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from forerun.measure.page import html, table
from forerun_lab.charts import chart

TIMES = {"ttft": "to the first token", "tpot": "each further token", "latency": "to the last token"}


def report(result: Mapping[str, Any]) -> str:
    """HTML of what ``plan_load`` returned, with ``environment``."""
    about, load = result["environment"], result["load"]
    rate = "" if load["rate"] is None else f"{load['rate']:.3g} requests a second, "
    fleets = result["fleets"]
    rows = [
        [str(one["replicas"]), f"{one['tokens_per_second']:.0f}"]
        + [f"{one[name][part]:.3g}" for name in TIMES for part in ("p50", "p95")]
        + [f"{one['utilisation']:.0%}", f"{one['hit_rate']:.0%}"]
        for one in fleets
    ]
    heads = ["replicas", "tokens/s", *(f"{reported}, {part}" for reported in TIMES.values() for part in ("p50", "p95"))]
    lines = {
        reported: [(float(one["replicas"]), one[name]["p95"]) for one in fleets] for name, reported in TIMES.items()
    }
    answer = "none" if result["replicas"] is None else str(result["replicas"])
    costs = {
        f"{way['method']} {way['k']}": [(float(count), 1000 * value) for count, value in way["seconds"].items()]
        for way in result["costs"]["ways"]
    }
    parts = [
        f"<h1>Replicas for {escape(str(about['model']))}</h1>",
        f"<p>{escape(about['processor'])}, {about['threads']} threads. {rate}prompts of {load['prompt_tokens']} "
        f"tokens, {load['shared_tokens']} of them shared, answers of {load['output_tokens']}, at the mean; "
        f"router: {escape(result['router'])}.</p>",
        f"<p>Replicas: <b>{answer}</b></p>",
        table([*heads, "busy", "cached"], rows),
        "<h2>95th percentiles by replicas, seconds</h2>",
        chart(lines, lines, "replicas", "seconds"),
        "<h2>A round by requests that decode together</h2>",
        chart(costs, costs, "requests", "milliseconds"),
    ]
    return html(f"Replicas for {about['model']}", parts)

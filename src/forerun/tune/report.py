"""The page that a tuning leaves: what was measured, as tables and bars, in one file without scripts."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from forerun.measure.page import bar, chart, html, table
from forerun.tune.state import State


def page(model: str, state: State) -> str:
    """HTML, UTF-8."""
    results, trained = state.results["choose"], state.results.get("train", {})
    wrote = state.results.get("write", {"tokens": 0})
    most = max(row["speedup"] for row in results["measured"])
    rows = [
        [_name(row["config"]), f"{row['speedup']:.2f}", f"{row['tokens_per_second']:.1f}",
         f"{row['tokens_per_round']:.2f}", bar(row["speedup"] / most)]
        for row in results["measured"]
    ]  # fmt: skip
    kept = [
        [name, str(index + 1), f"{before:.1%}", f"{after:.1%}", bar(max(before, after))]
        for name, result in trained.items()
        for index, (before, after) in enumerate(
            zip(result["fitted"]["accepted_at_0"], result["learnt"]["accepted_at_0"], strict=True)
        )
    ]
    learnt = "; ".join(f"{name} on {result['tokens']:,}, kept: {result['kept']}" for name, result in trained.items())
    checked = state.results["check"]
    minutes = [[name, f"{seconds / 60:.1f}"] for name, seconds in state.seconds.items()]
    parts = [
        f"<h1>{escape(model)}, tuned</h1>",
        f"<p>Chosen: <code>{escape(json.dumps(results['chosen']))}</code></p>",
        f"<p>{checked['answers']} held-out answers with and without speculation, {checked['different']} differ.</p>",
        "<h2>Speed, one request at a time, temperature 0</h2>",
        table(["drafter", "over plain decoding", "tokens/s", "tokens a round", ""], rows),
        "<h2>Held-out drafts that are kept up to each position, temperature 0</h2>",
        table(["draft", "position", "fitted", "trained", ""], kept),
        f"<p>{wrote['tokens']:,} tokens of the model's own text; {escape(learnt)}.</p>",
        "<h2>Minutes</h2>",
        table(["stage", "minutes"], minutes),
    ]
    return html(model, parts)


def _name(config: dict[str, Any]) -> str:
    inside = [_name(part) for part in config.get("drafters", ())]
    depth = config.get("num_speculative_tokens")
    texts = " with the model's own text" if "datastore" in config else ""
    return config["method"] + (f" {depth}" if depth else "") + texts + (f" ({', '.join(inside)})" if inside else "")


def pair_page(model: str, result: dict[str, Any]) -> str:
    """HTML, UTF-8, of what ``pair.search`` found."""
    checked, most = result["check"], max(row["speedup"] for row in result["measured"])
    rows = [
        [_name(row["config"]), json.dumps(row["config"]), f"{row['temperature']:g}", str(row["concurrency"]),
         str(row["answers"]), f"{row['speedup']:.2f}", f"{row['tokens_per_second']:.1f}",
         f"{row['tokens_per_round']:.2f}", bar(row["speedup"] / most)]
        for row in result["measured"]
    ]  # fmt: skip
    forms = [
        [json.dumps(form["config"]), f"{form['bytes'] / 1e6:.0f}", f"{form['guessed']:.1%}", f"{form['start']:.3f}",
         f"{form['step']:.3f}", f"{form['on_paper']:.2f}"]
        for form in result["forms"]
    ]  # fmt: skip
    costs = {
        f"{count} at a time": [(float(rows), cost) for rows, cost in points.items()]
        for count, points in result["verify_cost"].items()
    }
    parts = [
        f"<h1>{escape(model)} and its draft, tuned</h1>",
        f"<p>Chosen: <code>{escape(json.dumps(result['chosen']))}</code></p>",
        f"<p>{checked['answers']} held-out answers with and without speculation, {checked['different']} differ.</p>",
        "<h2>Measured, in turns with plain decoding</h2>",
        table(["drafter", "options", "temperature", "at a time", "answers", "over plain decoding", "tokens/s",
               "tokens a round", ""], rows),
        "<h2>Forms of the draft, each at its best on paper</h2><p>Prices in plain forwards.</p>",
        table(["form", "MB", "tokens guessed", "a draft's start", "a step", "over plain decoding, on paper"], forms),
        "<h2>A verification by its rows, in plain forwards</h2>",
        chart(costs, costs, "rows", "cost"),
        "<h2>Minutes</h2>",
        table(["stage", "minutes"], [[name, f"{seconds / 60:.1f}"] for name, seconds in result["seconds"].items()]),
    ]  # fmt: skip
    return html(model, parts)

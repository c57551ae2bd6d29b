"""The pages that ``forerun tune`` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from forerun.measure.page import bar, html, table


def header(tuned: str, chosen: Mapping[str, Any], checked: Mapping[str, Any]) -> list[str]:
    """The tuned model, the chosen config and the identity check."""
    return [
        f"<h1>{escape(tuned)}, tuned</h1>",
        f"<p>Chosen: <code>{escape(json.dumps(chosen))}</code></p>",
        f"<p>{checked['answers']} held-out answers with and without speculation, {checked['different']} differ.</p>",
    ]


def minutes(seconds: Mapping[str, float]) -> list[str]:
    rows = [[stage, f"{spent / 60:.1f}"] for stage, spent in seconds.items()]
    return ["<h2>Minutes</h2>", table(["stage", "minutes"], rows)]


def label(config: dict[str, Any]) -> str:
    """A drafter as the report names it: method, length, datastore and parts."""
    parts = [label(part) for part in config.get("drafters", ())]
    length = config.get("num_speculative_tokens")
    texts = " with the model's own text" if "datastore" in config else ""
    return (
        str(config["method"]) + (f" {length}" if length else "") + texts + (f" ({', '.join(parts)})" if parts else "")
    )


def pair_page(model: str, result: dict[str, Any]) -> str:
    """The report of ``pair.search``, as HTML."""
    most = max(row["speedup"] for row in result["measured"])
    rows = [
        [label(row["config"]), json.dumps(row["config"]), f"{row['temperature']:g}", str(row["concurrency"]),
         str(row["answers"]), f"{row['speedup']:.2f}", f"{row['tokens_per_second']:.1f}",
         f"{row['tokens_per_round']:.2f}", bar(row["speedup"] / most)]
        for row in result["measured"]
    ]  # fmt: skip
    forms = [
        [json.dumps(form["config"]), f"{form['bytes'] / 1e6:.0f}", f"{form['guessed']:.1%}", f"{form['start']:.3f}",
         f"{form['step']:.3f}", f"{form['speedup']:.2f}"]
        for form in result["forms"]
    ]  # fmt: skip
    dearest = max(cost for points in result["verify_cost"].values() for cost in points.values())
    costs = [
        [str(count), str(rows), f"{cost:.2f}", bar(cost / dearest)]
        for count, points in result["verify_cost"].items()
        for rows, cost in points.items()
    ]
    parts = [
        *header(f"{model} and its draft", result["chosen"], result["check"]),
        "<h2>Measured, interleaved with plain decoding</h2>",
        table(["drafter", "options", "temperature", "at a time", "answers", "over plain decoding", "tokens/s",
               "tokens a round", ""], rows),
        "<h2>Weight formats of the draft</h2><p>Costs in plain rounds.</p>",
        table(["format", "MB", "tokens guessed", "a draft's start", "a step", "over plain decoding"], forms),
        "<h2>A verification by its rows, in plain rounds</h2>",
        table(["at a time", "rows", "cost", ""], costs),
        *minutes(result["seconds"]),
    ]  # fmt: skip
    return html(model, parts)

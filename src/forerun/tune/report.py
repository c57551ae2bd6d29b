"""The page that a tuning leaves: what was measured, as tables and bars, in one file without scripts."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from forerun.tune.state import State

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:left;border-bottom:1px solid #ccc}"
    "td.n{text-align:right}rect{fill:#38c}code{font-size:90%}"
)


def page(model: str, state: State) -> str:
    """HTML, UTF-8."""
    found, wrote, trained = (state.results[name] for name in ("choose", "write", "train"))
    most = max(row["tokens_per_second"] for row in found["measured"])
    rows = [
        [_name(row["config"]), f"{row['tokens_per_second']:.1f}", f"{row['tokens_per_round']:.2f}",
         _bar(row["tokens_per_second"] / most)]
        for row in found["measured"]
    ]  # fmt: skip
    kept = [
        [str(place + 1), f"{before:.1%}", f"{after:.1%}", _bar(max(before, after))]
        for place, (before, after) in enumerate(
            zip(state.results["fitted"]["accepted_at_0"], trained["learnt"]["accepted_at_0"], strict=True)
        )
    ]
    checked = state.results["check"]
    minutes = [[name, f"{seconds / 60:.1f}"] for name, seconds in state.seconds.items()]
    parts = [
        f"<h1>{escape(model)}, tuned</h1>",
        f"<p>Chosen: <code>{escape(json.dumps(found['chosen']))}</code></p>",
        f"<p>{checked['answers']} held-out answers with and without speculation, {checked['different']} differ.</p>",
        "<h2>Speed, one request at a time, temperature 0</h2>",
        _table(["drafter", "tokens/s", "tokens a round", ""], rows),
        "<h2>Held-out drafts of the head that are kept up to each position, temperature 0</h2>",
        _table(["position", "fitted", "trained", ""], kept),
        f"<p>{wrote['tokens']:,} tokens of the model's own text; trained on {trained['tokens']:,}; kept: "
        f"{escape(trained['kept'])}.</p>",
        "<h2>Minutes</h2>",
        _table(["stage", "minutes"], minutes),
    ]
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(model)}</title><style>{STYLE}</style>'
    return head + "\n".join(parts) + "</html>\n"


def _name(config: dict[str, Any]) -> str:
    inside = [_name(part) for part in config.get("drafters", ())]
    depth = config.get("num_speculative_tokens")
    return config["method"] + (f" {depth}" if depth else "") + (f" ({', '.join(inside)})" if inside else "")


def _table(heads: list[str], rows: list[list[str]]) -> str:
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    body = "".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _cell(text: str) -> str:
    return text if text.startswith("<svg") else escape(text)


def _bar(share: float) -> str:
    return f'<svg width="200" height="12"><rect width="{200 * min(1.0, max(0.0, share)):.0f}" height="12"/></svg>'

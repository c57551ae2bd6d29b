"""Tables and bars for one-file HTML pages without scripts, and tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:left;border-bottom:1px solid #ccc}"
    "rect{fill:#38c}code{font-size:90%}svg text{font:12px system-ui,sans-serif}"
)


def html(title: str, parts: Sequence[str]) -> str:
    """The whole page, UTF-8."""
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return head + "\n".join(parts) + "</html>\n"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    shown = [[cell if cell.startswith("<svg") else escape(cell) for cell in row] for row in rows]
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in shown)
    return f"<table><tr>{top}</tr>{body}</table>"


def markdown(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table without a final newline; None becomes ``-``."""
    lines = []
    for row in (heads, ["---"] * len(heads), *rows):
        cells = ("-" if cell is None else str(cell).replace("|", "\\|") for cell in row)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def bar(fraction: float) -> str:
    return f'<svg width="200" height="12"><rect width="{200 * min(1.0, max(0.0, fraction)):.0f}" height="12"/></svg>'

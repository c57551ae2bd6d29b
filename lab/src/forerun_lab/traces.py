"""Rounds as a page: figure 1 of Leviathan et al. 2023 (arXiv 2211.17192), for ``forerun generate --trace-html``."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import forerun
from forerun.cli.trace import KINDS, REJECTED, parts, visible
from forerun.engine.metrics import ACCEPTED, RoundTrace

TOKENS = Path(forerun.__file__).parent / "serve" / "page" / "tokens.css"
"""The playground's colours of tokens, so that a colour means the same there and here."""
STYLE = """
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; background: var(--back); color: var(--text);
  font: 15px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 .6rem; } h2 { font-size: 1rem; margin: 1.8rem 0 .5rem; }
pre, td:last-child { font: 13.5px/1.7 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }
pre { margin: 0; background: var(--panel); border: 1px solid var(--line); border-radius: .6rem; padding: .8rem 1rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { color: var(--faint); font-weight: 400; font-size: .85rem; }
th, td { padding: .2rem .9rem .2rem 0; text-align: right; white-space: nowrap; width: 1%; vertical-align: baseline; }
th:last-child, td:last-child { text-align: left; width: auto; padding-right: 0; }
td { border-top: 1px solid var(--line); color: var(--faint); } td:last-child { color: var(--text); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0; }
dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; } dt span { color: var(--text); }
"""


def span(kind: str, text: str, title: str = "") -> str:
    reported = f' title="{escape(title)}"' if title else ""
    return f'<span class="{kind}"{reported}>{escape(text)}</span>'


def _cells(round_: RoundTrace, number: int, tokenizer: Any) -> list[tuple[str, str, str]]:
    """(kind, text, title) of a round's tokens, in the order of ``parts``."""
    kept = round_.origins.count(ACCEPTED)
    ids = [*round_.tokens[:kept], *round_.rejected, *round_.tokens[kept:]]
    reported = zip(parts(round_, tokenizer), ids, strict=True)
    return [(kind, text, f"{kind} in round {number}, token {token}") for (kind, text), token in reported]


def page(rounds: Sequence[RoundTrace], tokenizer: Any, prompt: str, facts: dict[str, str]) -> str:
    """A self-contained HTML page: the text, its rounds, the legend and ``facts``; light and dark."""
    reported = [_cells(round_, number, tokenizer) for number, round_ in enumerate(rounds, start=1)]
    text = "".join(span(*cell) for cells in reported for cell in cells if cell[0] != REJECTED)
    rows = []
    for number, (round_, cells) in enumerate(zip(rounds, reported), start=1):
        shown = "".join(span(kind, visible(piece_, "\u21b5"), title) for kind, piece_, title in cells)
        count = f"{round_.origins.count(ACCEPTED)} of {round_.drafted}" if round_.drafted else ""
        rows.append(f"<tr><td>{number}</td><td>{count}</td><td>{shown}</td></tr>")
    key = "".join(f"<dt>{span(kind, kind)}</dt><dd>{escape(look.meaning)}</dd>" for kind, look in KINDS.items())
    fact_rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    style = TOKENS.read_text(encoding="utf-8") + STYLE
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Forerun: a traced generation</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head><body>\n'
        f"<h1>A traced generation</h1><dl>{fact_rows}</dl>\n<h2>Colours</h2><dl>{key}</dl>\n"
        f"<h2>Text</h2><pre>{span('prompt', prompt)}{text}</pre>\n"
        "<h2>Rounds</h2><table><thead><tr><th>round</th><th>accepted</th><th>tokens</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></body></html>\n"
    )

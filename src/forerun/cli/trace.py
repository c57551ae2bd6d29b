"""Rounds as text: figure 1 of Leviathan et al. 2023 (arXiv 2211.17192) on a terminal and as a page."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from html import escape
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from forerun.engine.trace import ACCEPTED, BONUS, CORRECTED, PLAIN, TraceRound

REJECTED = "rejected"


class Kind(NamedTuple):
    """How one kind of token looks: a terminal style, marks where there is no colour, and what it means."""

    style: str
    left: str
    right: str
    meaning: str


KINDS = {
    ACCEPTED: Kind("green", "[", "]", "drafted and accepted"),
    REJECTED: Kind("red strike", "~", "~", "drafted and rejected"),
    CORRECTED: Kind("bold blue", "<", ">", "the target's own token in its place"),
    BONUS: Kind("bold magenta", "+", "+", "the target's extra token after a whole draft"),
    PLAIN: Kind("default", "", "", "decoded without a draft"),
}


def piece(tokenizer: Any, token: int) -> str:
    """A token's text alone, its leading space kept."""
    text = tokenizer.decode([token])
    raw = tokenizer.convert_ids_to_tokens(token)
    return f" {text}" if isinstance(raw, str) and raw.startswith("\u2581") and not text.startswith(" ") else text


def parts(round_: TraceRound, tokenizer: Any) -> list[tuple[str, str]]:
    """(kind, text) of a round's tokens: accepted ones, then rejected ones, then the target's own."""
    emitted = [(origin, piece(tokenizer, token)) for origin, token in zip(round_.origins, round_.tokens)]
    rejected = [(REJECTED, piece(tokenizer, token)) for token in round_.rejected]
    accepted = [part for part in emitted if part[0] == ACCEPTED]
    return [*accepted, *rejected, *emitted[len(accepted) :]]


def visible(text: str, newline: str = "\\n") -> str:
    """One line: line breaks and tabs as escapes."""
    return text.replace("\n", newline).replace("\r", "\\r").replace("\t", "\\t")


def plain_terminal(console: Console) -> bool:
    return console.color_system is None or console.no_color


def marked(kind: str, text: str, *, plain: bool) -> Text:
    look = KINDS[kind]
    text = visible(text)
    return Text(f"{look.left}{text}{look.right}") if plain else Text(text, style=look.style)


def line(round_: TraceRound, tokenizer: Any, *, plain: bool) -> Text:
    """One round on one line."""
    return Text.assemble(*(marked(kind, text, plain=plain) for kind, text in parts(round_, tokenizer)))


def legend(*, plain: bool) -> Text:
    samples = [Text.assemble(marked(kind, kind, plain=plain), f": {look.meaning}") for kind, look in KINDS.items()]
    return Text("\n").join(samples)


def telling(rounds: Seq[TraceRound]) -> TraceRound | None:
    """The round that shows most: with accepted and rejected tokens if there is one, else with most accepted."""
    drafted = [r for r in rounds if r.drafted]
    return max(drafted, key=lambda r: (ACCEPTED in r.origins and bool(r.rejected), len(r.tokens)), default=None)


def show(console: Console, rounds: Seq[TraceRound], tokenizer: Any) -> None:
    """Every round on a line of its own, and the legend."""
    plain = plain_terminal(console)
    width = len(str(len(rounds)))
    for number, round_ in enumerate(rounds, start=1):
        count = f"{round_.origins.count(ACCEPTED)}/{round_.drafted}" if round_.drafted else "-"
        head = Text(f"{number:>{width}} {count:>5}  ", style="default" if plain else "dim")
        console.print(Text.assemble(head, line(round_, tokenizer, plain=plain)), soft_wrap=True)
    console.print()
    console.print(legend(plain=plain), soft_wrap=True)


STYLE = """
:root { color-scheme: light dark; --paper: #fdfdfb; --ink: #22252a; --faint: #767b84; --line: #e2e2dd;
  --accepted: #1a7f37; --rejected: #b42318; --corrected: #1849c6; --bonus: #9333a8; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181c; --ink: #e4e6ea; --faint: #8d939d; --line: #2c3037;
  --accepted: #4cc26a; --rejected: #f2766a; --corrected: #7aa5ff; --bonus: #d28be0; } }
body { margin: 2rem auto; max-width: 68rem; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; } h2 { font-size: 1rem; margin-top: 2rem; }
pre, td { font: 13px/1.55 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
pre { border: 1px solid var(--line); border-radius: 6px; padding: .8rem; }
table { border-collapse: collapse; width: 100%; } td { border-top: 1px solid var(--line); padding: .15rem .5rem; }
td:nth-child(-n+2) { color: var(--faint); white-space: nowrap; width: 1%; text-align: right; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dt { color: var(--faint); } dd { margin: 0; }
.prompt { color: var(--faint); } .accepted { color: var(--accepted); } .bonus { color: var(--bonus); font-weight: 600; }
.rejected { color: var(--rejected); text-decoration: line-through; }
.corrected { color: var(--corrected); font-weight: 600; }
"""


def span(kind: str, text: str) -> str:
    return f'<span class="{kind}" title="{kind}">{escape(text)}</span>'


def page(rounds: Seq[TraceRound], tokenizer: Any, prompt: str, facts: dict[str, str]) -> str:
    """A self-contained HTML page: the text, its rounds, the legend and ``facts``; light and dark."""
    told = [parts(round_, tokenizer) for round_ in rounds]
    text = "".join(span(kind, piece_) for round_ in told for kind, piece_ in round_ if kind != REJECTED)
    rows = []
    for number, (round_, found) in enumerate(zip(rounds, told), start=1):
        cells = "".join(span(kind, visible(piece_, "\u21b5")) for kind, piece_ in found)
        count = f"{round_.origins.count(ACCEPTED)}/{round_.drafted}" if round_.drafted else ""
        rows.append(f"<tr><td>{number}</td><td>{count}</td><td>{cells}</td></tr>")
    key = "".join(f"<dt>{span(kind, kind)}</dt><dd>{escape(look.meaning)}</dd>" for kind, look in KINDS.items())
    told_facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Forerun: a traced generation</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>\n'
        f"<h1>A traced generation</h1><dl>{told_facts}</dl>\n<h2>Tokens</h2><dl>{key}</dl>\n"
        f"<h2>Text</h2><pre>{span('prompt', prompt)}{text}</pre>\n"
        f"<h2>Rounds</h2><table>{''.join(rows)}</table></body></html>\n"
    )

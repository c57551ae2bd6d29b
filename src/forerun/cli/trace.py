"""Rounds as text: figure 1 of Leviathan et al. 2023 (arXiv 2211.17192) on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from forerun.engine.metrics import ACCEPTED, BONUS, CORRECTED, PLAIN, RoundTrace

REJECTED = "rejected"


class TokenKind(NamedTuple):
    """How a kind of token is shown: a style, or marks where there is no colour; ``meaning`` is for the legend."""

    style: str
    left: str
    right: str
    meaning: str


KINDS = {
    ACCEPTED: TokenKind("green", "[", "]", "drafted and accepted"),
    REJECTED: TokenKind("red strike", "~", "~", "drafted and rejected"),
    CORRECTED: TokenKind("bold yellow", "<", ">", "the target's own token in its place"),
    BONUS: TokenKind("bold blue", "+", "+", "the target's extra token after a whole draft"),
    PLAIN: TokenKind("default", "", "", "decoded without a draft"),
}


def parts(round_: RoundTrace, tokenizer: Any) -> list[tuple[str, str]]:
    """A round's tokens as (kind, text): accepted ones, then rejected ones, then the target's own."""
    from forerun.models.text.tokenizer import token_text

    emitted = [(origin, token_text(tokenizer, token)) for origin, token in zip(round_.origins, round_.tokens)]
    rejected = [(REJECTED, token_text(tokenizer, token)) for token in round_.rejected]
    accepted = [part for part in emitted if part[0] == ACCEPTED]
    return [*accepted, *rejected, *emitted[len(accepted) :]]


def visible(text: str, newline: str = "\\n") -> str:
    """``text`` with line breaks and tabs as escapes."""
    return text.replace("\n", newline).replace("\r", "\\r").replace("\t", "\\t")


def plain_terminal(console: Console) -> bool:
    return console.color_system is None or console.no_color


def marked(kind: str, text: str, *, plain: bool) -> Text:
    """``text`` in its kind's style, or between its marks if ``plain``."""
    style, text = KINDS[kind], visible(text)
    return Text(f"{style.left}{text}{style.right}") if plain else Text(text, style=style.style)


def line(round_: RoundTrace, tokenizer: Any, *, plain: bool) -> Text:
    """One round on one line."""
    return Text.assemble(*(marked(kind, text, plain=plain) for kind, text in parts(round_, tokenizer)))


def legend(*, plain: bool) -> Text:
    samples = [Text.assemble(marked(kind, kind, plain=plain), f": {look.meaning}") for kind, look in KINDS.items()]
    return Text("\n").join(samples)


def telling(rounds: Sequence[RoundTrace]) -> RoundTrace | None:
    """The most instructive round: one with accepted and rejected tokens if there is one, else the longest."""
    drafted = [r for r in rounds if r.drafted]
    return max(drafted, key=lambda r: (ACCEPTED in r.origins and bool(r.rejected), len(r.tokens)), default=None)


def show(console: Console, rounds: Sequence[RoundTrace], tokenizer: Any) -> None:
    """Prints every round on its own line, and the legend."""
    plain = plain_terminal(console)
    width = len(str(len(rounds)))
    for number, round_ in enumerate(rounds, start=1):
        count = f"{round_.origins.count(ACCEPTED)}/{round_.drafted}" if round_.drafted else "-"
        head = Text(f"{number:>{width}} {count:>5}  ", style="default" if plain else "dim")
        console.print(Text.assemble(head, line(round_, tokenizer, plain=plain)), soft_wrap=True)
    console.print()
    console.print(legend(plain=plain), soft_wrap=True)

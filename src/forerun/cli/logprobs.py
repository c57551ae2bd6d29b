"""Log-probabilities on the terminal and in JSON."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.engine.logprobs import TokenLogprobs


def as_objects(found: Seq[TokenLogprobs | None], tokenizer: Any) -> list[dict[str, Any] | None]:
    """What ``--json`` prints of them; null for the prompt's first token, which nothing comes before. A token that
    cannot come has ``LOWEST``, as over HTTP."""

    from forerun.engine.logprobs import finite

    def one(item: TokenLogprobs) -> dict[str, Any]:
        top = [{"token": t, "text": tokenizer.decode([t]), "logprob": finite(value)} for t, value in item.top.items()]
        own = {"token": item.token, "text": tokenizer.decode([item.token]), "logprob": finite(item.logprob)}
        return own | {"rank": item.rank, "top": top}

    return [None if item is None else one(item) for item in found]


def lines(tokens: Seq[int], found: Seq[TokenLogprobs | None], tokenizer: Any) -> Iterator[str]:
    """A token a line: its text, log-probability and rank, and the likeliest ones."""

    def text(token: int) -> str:
        return repr(tokenizer.decode([token]))

    width = max((len(text(token)) for token in tokens), default=0)
    for token, item in zip(tokens, found):
        if item is None:
            yield f"  {text(token):<{width}}        -"
            continue
        top = "  ".join(f"{text(other)} {value:.2f}" for other, value in item.top.items())
        yield f"  {text(token):<{width}}  {item.logprob:7.2f}  rank {item.rank:<6d} {top}".rstrip()

"""Log-probabilities on the terminal and in JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.engine.logprobs import Logprob

Position = Mapping[int, "Logprob"]


def likeliest(item: Position, count: int) -> dict[int, Logprob]:
    """Those that were asked for: the token itself is there even if it is not among them."""
    ranked = sorted(item.items(), key=lambda pair: pair[1].rank)
    return dict(pair for pair in ranked if pair[1].rank <= count)


def as_objects(tokens: Sequence[int], result: Sequence[Position | None], count: int) -> list[dict[str, Any] | None]:
    """What ``--json`` prints of them; null for the prompt's first token, which nothing comes before. A token that
    cannot come has ``LOWEST``, as over HTTP."""

    from forerun.engine.logprobs import finite

    def one(token: int, value: Logprob) -> dict[str, Any]:
        return {"token": token, "text": value.decoded_token, "logprob": finite(value.logprob)}

    def whole(token: int, item: Position) -> dict[str, Any]:
        top = [one(*pair) for pair in likeliest(item, count).items()]
        return one(token, item[token]) | {"rank": item[token].rank, "top": top}

    return [None if item is None else whole(token, item) for token, item in zip(tokens, result)]


def lines(tokens: Sequence[int], result: Sequence[Position | None], count: int, tokenizer: Any) -> Iterator[str]:
    """A token a line: its text, log-probability and rank, and the likeliest ones."""
    from forerun.models.tokenizer import token_text

    texts = [repr(token_text(tokenizer, token)) for token in tokens]
    width = max(map(len, texts), default=0)
    for token, text, item in zip(tokens, texts, result):
        if item is None:
            yield f"  {text:<{width}}        -"
            continue
        top = "  ".join(f"{each.decoded_token!r} {each.logprob:.2f}" for each in likeliest(item, count).values())
        yield f"  {text:<{width}}  {item[token].logprob:7.2f}  rank {item[token].rank:<6d} {top}".rstrip()

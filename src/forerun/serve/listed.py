"""Log-probabilities as an answer lists them: which tokens, under what names, and where they are in the text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forerun.engine.jobs import TokenLogprobs, finite
from forerun.engine.stop import Finish
from forerun.models.tokenizer import Detokenizer
from forerun.serve.text import TextService


@dataclass(frozen=True, slots=True)
class Placed:
    """A token, and how many characters of its answer come before it."""

    offset: int
    item: TokenLogprobs


class Listed:
    """One answer's tokens, each listed when its text is shown: not while it may be part of a stop string.

    Where a stop string cuts the text, the list keeps the tokens whose text begins before the cut, so the last may reach
    beyond it. The parts of a character are all placed where it begins.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
        self._waiting: list[Placed] = []

    def after(self, items: Sequence[TokenLogprobs], shown: int, finish: Finish | None) -> list[Placed]:
        """Those to be listed once ``items`` have come and ``shown`` characters of the answer can be seen."""
        for item in items:
            self._waiting.append(Placed(len(self._detokenizer.text), item))
            self._detokenizer.push([item.token])
        end: float = shown
        if finish is not None:
            end = finish.cut if finish.cut is not None else math.inf
        count = sum(placed.offset < end for placed in self._waiting)
        ready, self._waiting = self._waiting[:count], self._waiting[count:]
        return ready


def by_name(item: TokenLogprobs, text: TextService) -> dict[str, float]:
    """The likeliest tokens and the emitted one. Of two that look the same, the second goes by its id."""
    holders = {text.token_name(item.token): item.token}
    result: dict[str, float] = {}
    for token, value in {**item.top, item.token: item.logprob}.items():
        name = text.token_name(token)
        if holders.setdefault(name, token) != token:
            name = f"token_id:{token}"
        result[name] = finite(value)
    return result

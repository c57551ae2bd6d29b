"""The markers between a model's reasoning and its answer, by the names that vLLM gives their parsers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forerun.core.errors import ConfigError


@dataclass(frozen=True)
class Markers:
    """``start`` begins the reasoning and ``end`` ends it. ``opened``: an answer begins with reasoning even without
    ``start``. ``label`` follows ``start`` and is not part of the reasoning. ``message_end`` ends the reasoning before
    ``end`` begins the answer, if the two are apart."""

    start: str
    end: str
    opened: bool = False
    label: str = ""
    message_end: str = ""


HARMONY = "openai_gptoss"
PARSERS = {
    "deepseek_r1": Markers("<think>", "</think>", opened=True),
    "qwen3": Markers("<think>", "</think>"),
    "glm45": Markers("<think>", "</think>"),
    "mistral": Markers("[THINK]", "[/THINK]"),
    "gemma4": Markers("<|channel>", "<channel|>", label="thought\n"),
    HARMONY: Markers(
        "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", opened=True, message_end="<|end|>"
    ),
}


def check_parser(name: str) -> None:
    """Raise ConfigError for an unknown name."""
    if name not in PARSERS:
        raise ConfigError(f"reasoning_parser is one of {', '.join(PARSERS)}, not {name!r}")


class Boundary:
    """One parser's markers as token ids. Raises ConfigError if the tokenizer splits one; gpt-oss's are three tokens."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        check_parser(name)
        self.markers = PARSERS[name]
        texts = self.markers.start, self.markers.end, self.markers.message_end
        self.start, self.end, self.message_end = (
            tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts
        )
        self._decode = tokenizer.decode
        longest = 3 if name == HARMONY else 1
        for text, ids in ((self.markers.start, self.start), (self.markers.end, self.end)):
            if len(ids) > longest:
                raise ConfigError(
                    f"reasoning_parser {name!r} needs a tokenizer in which {text!r} is {longest} token"
                    f"{'s' if longest > 1 else ''}; this model's spells it in {len(ids)}"
                )

    def opened(self, prompt: Sequence[int]) -> bool | None:
        """Whether the answer to ``prompt`` begins inside the reasoning: a marker at the prompt's end decides, if only
        white space follows it. None: the answer may begin it."""
        for length in range(len(prompt), 0, -1):
            before = prompt[:length]
            if tuple(before[-len(self.end) :]) == self.end:
                return False
            if tuple(before[-len(self.start) :]) == self.start:
                return True
            if self._decode(before[-1:]).strip():
                break
        return True if self.markers.opened else None

    def num_thoughts(self, prompt: Sequence[int], answer: Sequence[int]) -> int:
        """How many tokens of an answer to ``prompt`` are reasoning, markers included."""
        begun = tuple(answer[: len(self.start)]) == self.start
        if not begun and (self.markers.message_end or not self.opened(prompt)):
            return 0
        return _end_of(self.message_end or self.end, answer) or len(answer)

    def ends_at(self, tokens: Sequence[int], first: int = 0) -> int | None:
        """The number of tokens up to the end of the first end marker that ends at ``first`` or later, or None."""
        return _end_of(self.end, tokens, first)


def _end_of(marker: tuple[int, ...], tokens: Sequence[int], first: int = 0) -> int | None:
    for last in range(first, len(tokens)):
        if tuple(tokens[max(0, last + 1 - len(marker)) : last + 1]) == marker:
            return last + 1
    return None

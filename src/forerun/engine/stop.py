"""Decides where an answer ends, also inside an accepted draft. What follows is not emitted, counted or cached."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.core.request import RequestState
from forerun.core.tree import Draft, Verdict
from forerun.models.text.tokenizer import Detokenizer
from forerun.sampling.params import SamplingParams

STOP, LENGTH, ERROR, ABORT = "stop", "length", "error", "abort"
NEXT_LINE = re.compile(r"\n(?:[^\S\n]*\n)*([^\S\n]*)(\S)")
"""A line end, blank lines, and the beginning of a line: its indentation and first letter."""
UNDECIDED = re.compile(r"\n\s*\Z")
CLOSING = ")]}"
"""A line that begins with one of these may be indented by one character less."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Why and where an answer ended.

    ``reason`` is OpenAI's ``finish_reason``; ``cut`` is how many characters of the text stay (None: all); ``silent``
    says that the last token ended the answer without being part of its text.
    """

    reason: str
    stopped_by: str | int | None = None
    cut: int | None = None
    silent: bool = False

    def text_tokens(self, tokens: Sequence[int]) -> Sequence[int]:
        """Those of an answer's last ``tokens`` that are part of its text."""
        return tokens[:-1] if self.silent else tokens


class Stopper:
    """Looks for the end of one sequence. Text is decoded only where there are stop strings."""

    def __init__(self, sequence: RequestState, detokenizer: Detokenizer | None) -> None:
        self.sequence = sequence
        self.detokenizer = detokenizer
        params = sequence.params
        self.ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else sequence.eos_ids)
        self.finish: Finish | None = None

    def clip(self, draft: Draft, verdict: Verdict) -> list[int]:
        """Returns the tokens to emit: the accepted path's and the next one, up to a stop.

        An error in the row after the path counts only if nothing before it has ended the answer.
        """
        decided = verdict.decided_tokens(draft)
        tokens: list[int] = []
        for token in decided:
            tokens.append(token)
            self.finish = self._check(token, self.sequence.num_output + len(tokens))
            if self.finish is not None:
                break
        if self.finish is None and verdict.error is not None:
            constraint = self.sequence.constraint
            fault = constraint.fault(self.sequence, decided) if constraint is not None else None
            self.finish = Finish(ERROR, fault or verdict.error)
        if self.detokenizer is not None and not self.sequence.params.stops_in_text:
            self.detokenizer.add(tokens if self.finish is None else self.finish.text_tokens(tokens))
        return tokens

    def _check(self, token: int, num_output: int) -> Finish | None:
        params = self.sequence.params
        may_stop = num_output >= params.min_tokens
        result = None
        if token in self.ends and (may_stop or self.sequence.constraint is not None):
            listed = token in params.stop_token_ids
            keep = params.include_stop_str_in_output and listed
            result = Finish(STOP, token if listed else None, silent=not keep)
        if params.stops_in_text and self.detokenizer is not None and (result is None or not result.silent):
            fresh = self.detokenizer.push([token])
            if result is None and may_stop:
                result = self._find(self.detokenizer.text, len(fresh))
        if result is None and self.sequence.num_prompt + num_output >= self.sequence.max_tokens:
            return Finish(LENGTH)
        return result

    def _find(self, text: str, fresh: int) -> Finish | None:
        """A finish at the first stop string that ends among the last ``fresh`` characters, or at the end of the block
        before it; None if there is neither."""
        params = self.sequence.params
        old = len(text) - fresh
        matches = [(text.find(stop, max(0, old - len(stop) + 1)), stop) for stop in params.stop or ()]
        matches = [match for match in matches if match[0] >= 0]
        at, stop = min(matches) if matches else (len(text), "")
        for line in NEXT_LINE.finditer(text, 0, at) if params.min_indent is not None else ():
            less = len(line[1]) + (line[2] in CLOSING) < (params.min_indent or 0)
            if less and line.end() > old and text[: line.start()].strip():
                return Finish(STOP, cut=line.start())
        if not matches:
            return None
        return Finish(STOP, stop, at + len(stop) if params.include_stop_str_in_output else at)


def held_back(text: str, params: SamplingParams) -> int:
    """How many characters at the end of ``text`` must not be shown yet: those that may begin a stop string, or lie
    between a block and a line after it."""
    undecided = UNDECIDED.search(text) if params.min_indent is not None else None
    blank = 0 if undecided is None else len(text) - undecided.start()
    if params.include_stop_str_in_output:
        return blank
    lengths = (count for stop in params.stop or () for count in range(1, len(stop)) if text.endswith(stop[:count]))
    return max([blank, *lengths])

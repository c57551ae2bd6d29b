"""Where a request ends: inside an accepted block too. Nothing after the stop is emitted, counted or cached."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.core.sequence import Sequence
from forerun.core.tree import Draft, Verdict
from forerun.models.tokenizer import Detokenizer

STOP, LENGTH, ERROR, ABORT = "stop", "length", "error", "abort"


@dataclass(frozen=True, slots=True)
class Finish:
    """Why and where: ``reason`` is OpenAI's; ``cut`` is how much text stays (None: all)."""

    reason: str
    stopped_by: str | int | None = None
    cut: int | None = None


class Stopper:
    """Watches one sequence's new tokens."""

    def __init__(self, sequence: Sequence, detokenizer: Detokenizer | None) -> None:
        self.sequence = sequence
        self.detokenizer = detokenizer
        params = sequence.params
        self.ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else sequence.eos_ids)
        self.emitted: list[int] = []
        self.finish: Finish | None = None

    def clip(self, draft: Draft, verdict: Verdict) -> None:
        """Fill ``verdict.tokens`` with what is emitted: the path's tokens and the next one, up to a stop."""
        if verdict.error is not None:
            constraint = self.sequence.constraint
            broken = constraint.error if constraint is not None else None
            verdict.stop = self.finish = Finish(ERROR, broken or verdict.error)
            return
        assert verdict.token is not None
        drafted = [draft.tokens[node] for node in verdict.path]
        for count, token in enumerate([*drafted, verdict.token], start=1):
            verdict.tokens.append(token)
            self.finish = self._check(token, self.sequence.num_output + count)
            if self.finish is not None:
                break
        verdict.accepted = min(len(verdict.tokens), len(drafted))
        verdict.stop = self.finish

    def held_back(self, text: str) -> int:
        """How many characters at the end of ``text`` a stop string may begin with, and so must not be shown yet."""
        params = self.sequence.params
        if params.include_stop_str_in_output:
            return 0
        longest = 0
        for stop in params.stop:
            for count in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:count]):
                    longest = count
                    break
        return longest

    def _check(self, token: int, num_output: int) -> Finish | None:
        params = self.sequence.params
        may_stop = num_output >= params.min_tokens
        if may_stop and token in self.ends:
            keep = params.include_stop_str_in_output and token in params.stop_token_ids
            if keep:
                self._push(token)
            by = token if token in params.stop_token_ids else None
            return Finish(STOP, by)
        fresh = self._push(token)
        if may_stop and params.stop and self.detokenizer is not None:
            text = self.detokenizer.text
            known = len(text) - len(fresh)
            found = [(text.find(stop, max(0, known - len(stop) + 1)), stop) for stop in params.stop]
            found = [(at, stop) for at, stop in found if at >= 0]
            if found:
                at, stop = min(found)
                return Finish(STOP, stop, at + len(stop) if params.include_stop_str_in_output else at)
        if self.sequence.num_prompt + num_output >= self.sequence.max_tokens:
            return Finish(LENGTH)
        return None

    def _push(self, token: int) -> str:
        return self.detokenizer.push([token]) if self.detokenizer is not None else ""

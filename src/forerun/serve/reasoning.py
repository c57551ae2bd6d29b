"""The parser that splits the reasoning off an answer."""

from __future__ import annotations

from forerun.models.text.reasoning import Markers
from forerun.serve.tools.base import ParsedCall, Piece, ToolParser, length_without_marker


class ReasoningParser:
    """Splits off the reasoning between ``markers`` at the beginning of an answer, whose rest ``parser`` reads.

    ``opened`` says whether the prompt has opened the reasoning already; None: the answer may open it.
    """

    def __init__(self, markers: Markers, opened: bool | None, parser: ToolParser | None) -> None:
        self.markers = markers
        self.parser = parser
        self.calls: list[ParsedCall] = parser.calls if parser is not None else []
        self._opened = opened
        self._prefixes = [markers.start, markers.label] if opened is not False else []
        self._buffer = ""

    def push(self, text: str, *, last: bool = False) -> list[Piece]:
        """As ``ToolParser.push``."""
        self._buffer += text
        pieces = self._read_reasoning(last) if self._opened is not False else []
        if self._opened is False:
            text, self._buffer = self._buffer, ""
            if self.parser is not None:
                return [*pieces, *self.parser.push(text, last=last)]
            if text:
                pieces.append(Piece(text))
        return pieces

    def _read_reasoning(self, last: bool) -> list[Piece]:
        while self._prefixes:
            prefix, buffer = self._prefixes[0], self._buffer
            if prefix and prefix.startswith(buffer) and buffer != prefix and not last:
                return []
            self._prefixes.pop(0)
            if buffer.startswith(prefix):
                self._buffer = buffer.removeprefix(prefix)
                self._opened = True
            elif self._opened is None:
                self._opened = False
                return []
        reasoning, end, after = self._buffer.partition(self.markers.end)
        if end:
            self._opened, self._buffer = False, after
        else:
            count = len(reasoning) if last else length_without_marker(reasoning, (self.markers.end,))
            reasoning, self._buffer = reasoning[:count], reasoning[count:]
        return [Piece(reasoning, reasoning=True)] if reasoning else []


AnswerParser = ToolParser | ReasoningParser

"""Thoughts, text and calls of an answer, told apart as it grows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forerun.models.reasoning import PARSERS, Markers
from forerun.serve.forms import HARMONY, CallForm
from forerun.serve.tools import ParsedCall, Piece, Reader, begun_marker


class Thoughts:
    """Thoughts between ``markers``, in front of an answer that ``parser`` reads. ``opened``: whether the prompt has
    opened them already; None: the answer may."""

    def __init__(self, markers: Markers, opened: bool | None, parser: Reader | None) -> None:
        self.markers = markers
        self.parser = parser
        self.calls: list[ParsedCall] = parser.calls if parser is not None else []
        self._opened = opened
        self._prefixes = [markers.start, markers.label] if opened is not False else []
        self._held = ""

    def push(self, text: str, *, last: bool = False) -> list[Piece]:
        self._held += text
        pieces = self._think(last) if self._opened is not False else []
        if self._opened is False:
            text, self._held = self._held, ""
            if self.parser is not None:
                return [*pieces, *self.parser.push(text, last=last)]
            if text:
                pieces.append(Piece(text))
        return pieces

    def _think(self, last: bool) -> list[Piece]:
        while self._prefixes:
            prefix, held = self._prefixes[0], self._held
            if prefix and prefix.startswith(held) and held != prefix and not last:
                return []
            self._prefixes.pop(0)
            if held.startswith(prefix):
                self._held = held.removeprefix(prefix)
                self._opened = True
            elif self._opened is None:
                self._opened = False
                return []
        thought, end, rest = self._held.partition(self.markers.end)
        if end:
            self._opened, self._held = False, rest
        else:
            certain = len(thought) if last else begun_marker(thought, (self.markers.end,))
            thought, self._held = thought[:certain], thought[certain:]
        return [Piece(thought, reasoning=True)] if thought else []


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """How to read an answer.

    For calls in a ``form`` (None: there are none), of functions by the schemas of their parameters, at most ``most``
    (None: any number). It ``must`` be calls, or need not; a block of Markdown may be one if ``fenced``. And for the
    thoughts of a ``reasoning`` parser, which the prompt has ``opened`` or closed (None: neither).
    """

    form: CallForm | None = None
    schemas: Mapping[str, Any] = field(default_factory=dict)
    most: int | None = None
    must: bool = False
    fenced: bool = False
    reasoning: str | None = None
    opened: bool | None = None

    def reader(self) -> Reader | None:
        """A reader of one answer; None: it is text as it stands."""
        parser = None
        if self.form is not None:
            parser = self.form.parser(self.schemas, self.most, silent=self.must, fenced=self.fenced)
        if self.reasoning is None or self.form is HARMONY:  # whose messages tell thoughts from the rest
            return parser
        return Thoughts(PARSERS[self.reasoning], self.opened, parser)

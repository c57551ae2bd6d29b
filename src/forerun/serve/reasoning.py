"""Thoughts, text and calls of an answer, told apart as it grows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from forerun.models.reasoning import PARSERS, Markers
from forerun.serve.forms import HARMONY, HERMES, CallForm
from forerun.serve.schema import ChatRequest
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
class ToolOptions:
    """How to read an answer for calls: of which functions, by the schemas of their parameters, at most how many (None:
    any number), whether it must be calls, whether a block of Markdown may be one, and in which form they are."""

    schemas: Mapping[str, Any]
    most: int | None
    must: bool
    fenced: bool
    form: CallForm = HERMES

    @classmethod
    def of(cls, body: ChatRequest, *, fenced: bool, form: CallForm) -> ToolOptions:
        schemas = {tool.function.name: tool.function.parameters for tool in body.offered()}
        return cls(
            schemas, None if body.parallel_tool_calls else 1, body.tool_choice not in (None, "auto"), fenced, form
        )

    def parser(self) -> Reader:
        return self.form.parser(self.schemas, self.most, silent=self.must, fenced=self.fenced)


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read an answer: for calls, and for the thoughts of a ``reasoning`` parser, which the prompt has ``opened``
    or closed (None: neither)."""

    tools: ToolOptions | None = None
    reasoning: str | None = None
    opened: bool | None = None
    channels: bool = False
    """It is made of gpt-oss's messages."""

    @property
    def must(self) -> bool:
        return self.tools is not None and self.tools.must

    def reader(self) -> Reader | None:
        """A reader of one answer; None: it is text as it stands."""
        if self.channels:
            return HARMONY.parser(()) if self.tools is None else replace(self.tools, form=HARMONY).parser()
        parser = self.tools.parser() if self.tools is not None else None
        return parser if self.reasoning is None else Thoughts(PARSERS[self.reasoning], self.opened, parser)

"""Thoughts, text and calls of an answer, told apart as it grows."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from forerun.models.chat import CallForm
from forerun.models.reasoning import PARSERS, Markers
from forerun.serve.schema import ChatRequest
from forerun.serve.tools import ParsedCall, Piece, ToolParser, begun_marker

MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
HEADER = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
BEGUN_HEADER = ("<|start|>", "<|channel|>", "assistant", " to=")


class Reader(Protocol):
    """Reads one answer. ``content`` is its text and ``reasoning`` its thoughts, ``calls`` what it calls."""

    calls: list[ParsedCall]

    @property
    def content(self) -> str: ...

    @property
    def reasoning(self) -> str: ...

    def push(self, text: str, *, last: bool = False) -> list[Piece]:
        """What can be emitted once ``text`` has come; ``last``: nothing more will."""
        ...


class Thoughts:
    """Thoughts between ``markers``, in front of an answer that ``parser`` reads. ``opened``: whether the prompt has
    opened them already; None: the answer may."""

    def __init__(self, markers: Markers, opened: bool | None, parser: ToolParser | None) -> None:
        self.markers = markers
        self.parser = parser
        self.calls: list[ParsedCall] = parser.calls if parser is not None else []
        self.reasoning = ""
        self._content = ""
        self._opened = opened
        self._prefixes = [markers.start, markers.label] if opened is not False else []
        self._held = ""

    @property
    def content(self) -> str:
        return self._content if self.parser is None else self.parser.content

    def push(self, text: str, *, last: bool = False) -> list[Piece]:
        self._held += text
        pieces = self._think(last) if self._opened is not False else []
        if self._opened is False:
            text, self._held = self._held, ""
            if self.parser is not None:
                return [*pieces, *self.parser.push(text, last=last)]
            self._content += text
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
        self.reasoning += thought
        return [Piece(thought, reasoning=True)] if thought else []


class Channels:
    """gpt-oss's form (Harmony, https://cookbook.openai.com/articles/openai-harmony): messages with a header that names
    a channel. Those of the channel ``analysis`` are thoughts, those to a function of ``names`` are calls, of which all
    but the first ``most`` are dropped; everything else is text, unless it must be calls (``silent``)."""

    def __init__(self, names: Collection[str] = (), most: int | None = None, *, silent: bool = False) -> None:
        self.names = names
        self.most = most
        self.silent = silent
        self.calls: list[ParsedCall] = []
        self.content = ""
        self.reasoning = ""
        self._held = ""
        self._channel: str | None = None
        """Of the message that is being read; None: its header is."""

    def push(self, text: str, *, last: bool = False) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._header(pieces, last) if self._channel is None else self._body(pieces, last):
            pass
        return pieces

    def _header(self, pieces: list[Piece], last: bool) -> bool:
        held = self._held
        if not any(held.startswith(mark) or mark.startswith(held) for mark in BEGUN_HEADER):
            self._channel = "final"  # no header: it is text
            return self._body(pieces, last)
        header, message, rest = held.partition(MESSAGE)
        if not message:
            return self._rest(pieces) if last else False
        channel, recipient = HEADER.search(header), RECIPIENT.search(header)
        self._channel, self._held = channel[1] if channel is not None else "final", rest
        name = recipient[1].removeprefix("functions.") if recipient is not None else ""
        if name in self.names:
            self._channel = "call" if self.most is None or len(self.calls) < self.most else "dropped"
        if self._channel == "call":
            self.calls.append(ParsedCall(len(self.calls), name))
        return True

    def _rest(self, pieces: list[Piece]) -> bool:
        """A header that was cut off."""
        self._channel = "final" if self._held else None
        self._say(self._held, pieces, whole=True)
        self._held = ""
        return False

    def _body(self, pieces: list[Piece], last: bool) -> bool:
        held = self._held
        ends = [(at, mark) for mark in ENDS if (at := held.find(mark)) >= 0]
        at, mark = min(ends) if ends else (len(held) if last else begun_marker(held, ENDS), "")
        self._say(held[:at], pieces, whole=bool(mark) or last)
        self._held = held[at:] if mark == ENDS[-1] else held[at + len(mark) :]
        if mark:
            self._channel = None
        return bool(mark)

    def _say(self, text: str, pieces: list[Piece], *, whole: bool) -> None:
        if self._channel == "call":
            call = self.calls[-1]
            begins = not call.arguments and not call.complete
            if whole and not call.arguments:
                text = text or "{}"
            call.arguments += text
            call.complete = call.complete or (whole and call.arguments.rstrip().endswith("}"))
            if text:
                pieces.append(Piece(text, call, begins))
        elif self._channel == "analysis":
            self.reasoning += text
            if text:
                pieces.append(Piece(text, reasoning=True))
        elif text and not self.silent and self._channel != "dropped":
            self.content += text
            pieces.append(Piece(text))


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """How to read an answer for calls: of which functions, by the schemas of their parameters, at most how many (None:
    any number), whether it must be calls, whether a block of Markdown may be one, and in which form they are."""

    schemas: Mapping[str, Any]
    most: int | None
    must: bool
    fenced: bool
    form: CallForm = CallForm.HERMES

    @classmethod
    def of(cls, body: ChatRequest, *, fenced: bool, form: CallForm) -> ToolOptions:
        schemas = {tool.function.name: tool.function.parameters for tool in body.offered()}
        return cls(
            schemas, None if body.parallel_tool_calls else 1, body.tool_choice not in (None, "auto"), fenced, form
        )

    def parser(self) -> ToolParser:
        return ToolParser(
            self.schemas, self.most, silent=self.must, fenced=self.fenced, form=self.form, schemas=self.schemas
        )


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
        tools = self.tools
        if self.channels:
            return Channels() if tools is None else Channels(tools.schemas, tools.most, silent=tools.must)
        parser = tools.parser() if tools is not None else None
        return parser if self.reasoning is None else Thoughts(PARSERS[self.reasoning], self.opened, parser)

"""Parsers of answers: they separate reasoning, text and tool calls while the answer is still growing.

Two formats of calls are read for every model: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` of Hermes
models, and ``{"name": ..., "parameters": {...}}`` of Llama 3 at the beginning of the answer, with or without
``<|python_tag|>``. Small models also write a call as a Markdown code block, which counts if the answer is nothing else.
``tool_formats.py`` has the parsers of other formats.
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import regex

from forerun.engine.schemas import of_each_type
from forerun.models.chat import CLOSING, OPENING, PYTHON_TAG
from forerun.models.reasoning import Markers

STRING = r'"((?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))+)"'
HEAD = regex.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*' + STRING + r'\s*,\s*"(?:arguments|parameters)"\s*:\s*\{'
)
"""The beginning of a call, up to the bracket of its arguments. Llama 3.2 may write the call's type first."""
NAME_SO_FAR = re.compile(r'"name"\s*:\s*"([^"]*)')
FENCE = "```"
FENCED = regex.compile(FENCE + r"(?:json)?\s*(?={)")
ID_LENGTH = 9
"""Letters and digits of a call's id. Mistral's templates refuse any other length, and a prefix."""


@dataclass(slots=True)
class ParsedCall:
    """A call as far as it was parsed. ``arguments`` is JSON as the model wrote it."""

    index: int
    name: str
    arguments: str = ""
    complete: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:ID_LENGTH])


@dataclass(slots=True)
class Piece:
    """New text of the answer, of the reasoning before it, or of a call's arguments. ``begins``: the call is new."""

    text: str = ""
    call: ParsedCall | None = None
    begins: bool = False
    reasoning: bool = False


ParseCalls = Callable[[str], list[tuple[str, str]] | None]
"""Returns the names and arguments (JSON) of the calls in a text; None if it holds anything else."""


class Brackets:
    """Finds the end of a JSON object or list in text that comes in pieces. Other ``brackets`` and ``quotes`` may be
    given."""

    def __init__(self, depth: int = 0, brackets: tuple[str, str] = ("{[", "}]"), quotes: str = '"') -> None:
        self._depth = depth
        self._opening, self._closing = brackets
        self._quotes = quotes
        self._quoted = ""
        self._escaped = False

    def end(self, text: str) -> int | None:
        """Returns how many characters of the next ``text`` belong to the object; None if it goes on after them."""
        for index, letter in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = letter == "\\", "" if letter == self._quoted else self._quoted
            elif letter in self._quotes:
                self._quoted = letter
            elif letter in self._opening:
                self._depth += 1
            elif letter in self._closing:
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
        return None


class ToolParser:
    """Parses an answer that may call functions. It holds back only what may still become part of a call.

    An answer that looks like a call and turns out to be none is text. White space around calls belongs to them.

    Args:
        functions: the JSON schemas of parameters by function. A call without a marker must name one of these.
        parallel: whether calls after the first count; else they are dropped.
        calls_only: the answer must be calls. Other text is dropped: it comes from a call that was cut off.
        fenced: whether a Markdown code block may be a call.
    """

    start_markers: tuple[str, ...] = (OPENING, PYTHON_TAG)
    end_markers: tuple[str, ...] = (CLOSING, ";")
    """What may follow a call: its closing marker, or what Llama 3 writes between two calls."""
    unmarked = "{"
    """The characters that a call without a marker may begin with."""

    def __init__(
        self, functions: Mapping[str, Any], *, parallel: bool = True, calls_only: bool = False, fenced: bool = False
    ) -> None:
        self.functions = functions
        self.parallel = parallel
        self.calls_only = calls_only
        self.fenced = fenced
        self.calls: list[ParsedCall] = []
        self._buffer = ""
        self._last = False
        self._at_start = True
        """No text came before, so that a call without a marker may begin here."""
        self._marker = ""
        """What the call that is being read began with, as it was written."""
        self._brackets = Brackets()
        self._scanned = 0
        """Characters of the buffer in which the end of the call was not found."""
        self._enclosed = True
        """Whether an object encloses the arguments, as in JSON."""
        self._parse_whole: ParseCalls = json_calls
        self._pieces: list[Piece] = []
        self._state: Callable[[], bool] = self._read_text

    def push(self, text: str, *, last: bool = False) -> list[Piece]:
        """Returns what can be emitted after ``text`` was appended. ``last``: no more text follows."""
        self._buffer += text
        self._last = last
        self._pieces = []
        while self._state():
            pass
        return self._pieces

    # States. Each reads from the buffer, and returns whether the next state can go on with what is left.

    def _read_text(self) -> bool:
        buffer = self._buffer
        indent = len(buffer) - len(buffer.lstrip()) if self._at_start else -1
        if 0 <= indent < len(buffer) and buffer[indent] in self.unmarked:
            return self._begin_call(0, indent)
        if self.fenced and indent >= 0 and not self.calls:
            block = FENCED.match(buffer, indent, partial=not self._last)
            if block is not None:
                return not block.partial and self._begin_call(0, block.end())
        found = [(start, marker) for marker in self.start_markers if (start := buffer.find(marker)) >= 0]
        if found:
            start, marker = min(found)
            text = buffer[:start].rstrip()
            self._emit_text(text)
            return self._begin_call(len(text), start + len(marker))
        end = len(buffer)
        if self._last and self.calls and not buffer.strip():
            end = 0
        elif not self._last:
            end = len(buffer[: length_without_marker(buffer, self.start_markers)].rstrip())
        self._emit_text(buffer[:end])
        self._buffer = buffer[end:]
        return False

    def _begin_call(self, start: int, end: int) -> bool:
        self._marker, self._buffer = self._buffer[start:end], self._buffer[end:]
        self._scanned, self._state = 0, self._read_head
        return True

    def _read_head(self) -> bool:
        head = HEAD.match(self._buffer, partial=True)
        marked, fenced = bool(self._marker.strip()), FENCE in self._marker
        if (fenced or not marked) and not self._may_name_function(head):
            return self._reject(0)
        if head is not None and not head.partial and not fenced:
            self._buffer = self._buffer[head.end() - 1 :]
            return self._begin_arguments(json.loads(f'"{head[1]}"'), enclosed=True)
        if head is not None and head.partial and not self._last:
            return False
        if marked and self._buffer.lstrip().startswith(("{", "[")):
            return self._begin_whole(Brackets(), json_calls)
        return self._reject(0)

    def _may_name_function(self, head: regex.Match[str] | None) -> bool:
        """Whether the buffer is, or may become, a call of a known function."""
        if head is None:
            return False
        name = NAME_SO_FAR.search(self._buffer)
        if not head.partial:
            return name is not None and name[1] in self.functions
        return name is None or any(function.startswith(name[1]) for function in self.functions)

    def _begin_arguments(self, name: str, *, enclosed: bool) -> bool:
        """Begin a call whose arguments, a JSON object, come next."""
        self._start_call(name)
        self._brackets, self._enclosed, self._state = Brackets(), enclosed, self._read_arguments
        return True

    def _read_arguments(self) -> bool:
        end = self._brackets.end(self._buffer)
        self._emit_arguments(self._buffer[:end])
        self._buffer = self._buffer[end:] if end is not None else ""
        if end is None:
            return False
        self.calls[-1].complete = True
        self._brackets, self._state = Brackets(depth=1), self._skip_rest if self._enclosed else self._read_end
        return True

    def _skip_rest(self) -> bool:
        """Skip further keys of the call's object."""
        end = self._brackets.end(self._buffer)
        self._buffer = self._buffer[end:] if end is not None else ""
        if end is not None:
            self._state = self._read_end
        return end is not None

    def _begin_whole(self, brackets: Brackets, parse: ParseCalls) -> bool:
        """Begin calls that can only be parsed whole: their names do not come first, or they are not JSON."""
        self._brackets, self._parse_whole, self._scanned, self._state = brackets, parse, 0, self._read_whole
        return True

    def _read_whole(self) -> bool:
        end = self._brackets.end(self._buffer[self._scanned :])
        if end is None:
            self._scanned = len(self._buffer)
            return self._reject(self._scanned) if self._last else False
        self._scanned += end
        if FENCE in self._marker:
            self._state = self._read_fence
            return True
        return self._emit_whole(self._read_end)

    def _read_fence(self) -> bool:
        """The end of a code block must be the end of the answer."""
        after = self._buffer[self._scanned :].strip()
        if not self._last and FENCE.startswith(after):
            return False
        return self._emit_whole(self._drop) if after == FENCE else self._reject(self._scanned)

    def _emit_whole(self, state: Callable[[], bool]) -> bool:
        """Emit the calls of the text that was scanned."""
        calls = self._parse_whole(self._buffer[: self._scanned])
        if calls is None:
            return self._reject(self._scanned)
        self._buffer = self._buffer[self._scanned :]
        return self._emit_calls(calls, state)

    def _emit_calls(self, calls: list[tuple[str, str]], state: Callable[[], bool]) -> bool:
        for name, arguments in calls if self.parallel else calls[:1]:
            self._start_call(name)
            self._emit_arguments(arguments)
            self.calls[-1].complete = True
        self._state = state
        return True

    def _read_end(self) -> bool:
        buffer = self._buffer.lstrip()
        for marker in self.end_markers:
            if marker.startswith(buffer) and buffer != marker and not self._last:
                return False
            if buffer.startswith(marker):
                buffer = buffer.removeprefix(marker)
                break
        self._buffer, self._at_start = buffer, True
        self._state = self._read_text if self.parallel else self._drop
        return True

    def _drop(self) -> bool:
        self._buffer = ""
        return False

    def _reject(self, count: int) -> bool:
        """It is no call: its marker and ``count`` characters after it are text."""
        self._emit_text(self._marker + self._buffer[:count])
        self._buffer, self._at_start, self._state = self._buffer[count:], False, self._read_text
        return True

    def _emit_text(self, text: str) -> None:
        if not text or self.calls_only:
            return
        self._at_start = False
        if self._pieces and self._pieces[-1].call is None:
            self._pieces[-1].text += text
        else:
            self._pieces.append(Piece(text))

    def _start_call(self, name: str) -> None:
        self.calls.append(ParsedCall(len(self.calls), name))
        self._pieces.append(Piece(call=self.calls[-1], begins=True))

    def _emit_arguments(self, arguments: str) -> None:
        call = self.calls[-1]
        call.arguments += arguments
        if self._pieces and self._pieces[-1].call is call:
            self._pieces[-1].text += arguments
        elif arguments:
            self._pieces.append(Piece(arguments, call))


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


def length_without_marker(text: str, markers: Sequence[str]) -> int:
    """Returns how many characters of ``text`` cannot belong to one of the ``markers``, whatever follows."""
    longest = max(map(len, markers))
    for start in range(max(0, len(text) - longest + 1), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return start
    return len(text)


def json_calls(text: str) -> list[tuple[str, str]] | None:
    """``ParseCalls`` for JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    calls = []
    for call in value if isinstance(value, list) else [value]:
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or not name:
            return None
        arguments = call.get("arguments", call.get("parameters"))
        calls.append((name, as_text({} if arguments is None else arguments)))
    return calls or None


def as_text(value: Any) -> str:
    """A string as it is, any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    (simple, *_) = alternatives(schema, schema)
    properties = simple.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def alternatives(schema: Any, root: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the schemas of a single type that a schema permits; {} stands for anything."""
    return _alternatives(schema, root, set()) or [{}]


def _alternatives(schema: Any, root: Mapping[str, Any], seen: set[str]) -> list[dict[str, Any]]:
    """As above, without references that were ``seen``: a second time they add nothing."""
    if not isinstance(schema, Mapping):
        return [{}]
    if isinstance(ref := schema.get("$ref"), str):
        if ref in seen:
            return []
        seen.add(ref)
        section, _, name = ref.removeprefix("#/").partition("/")
        definitions = root.get(section)
        return _alternatives(definitions.get(name) if isinstance(definitions, Mapping) else None, root, seen)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(each := schema.get(key), list) and (key != "allOf" or len(each) == 1):
            return [simple for one in each for simple in _alternatives(one, root, seen)]
    if isinstance(types := schema.get("type"), list):
        return of_each_type(dict(schema), types)
    return [dict(schema)]


def literals_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """Returns the values of an enum or a constant; None if the schema is neither."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def typed(text: str, schemas: Sequence[Mapping[str, Any]]) -> Any:
    """Returns the value of a parameter with these ``alternatives``: a string if one permits strings, else JSON."""
    for value in (value for schema in schemas for value in literals_of(schema) or ()):
        if text == as_text(value):
            return value
    types = [schema.get("type") for schema in schemas if literals_of(schema) is None]
    if "string" in types and not ("null" in types and text in ("null", "None")):
        return text
    try:
        return loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def loads(text: str) -> Any:
    """Returns a JSON value, with numbers beyond float64 as its largest one: JSON has no infinity."""
    return json.loads(text, parse_constant=_refuse, parse_float=lambda number: finite_float(float(number)))


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def finite_float(number: float) -> float:
    return max(-sys.float_info.max, min(sys.float_info.max, number))

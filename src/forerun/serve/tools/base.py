"""What the parsers of tool calls share: they separate text and calls while the answer is still growing.

Two formats are read for every model: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` of Hermes models, and
``{"name": ..., "parameters": {...}}`` of Llama 3 at the beginning of the answer, with or without ``<|python_tag|>``.
Small models also write a call as a Markdown code block, which counts if the answer is nothing else.
"""

from __future__ import annotations

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import regex
from pydantic_core import from_json

from forerun.models.text.chat import CLOSING, OPENING, PYTHON_TAG, finite_float, loads

T = TypeVar("T")

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


Calls = list[tuple[str, str]]
"""Names and arguments, which are JSON."""


class Brackets:
    """Finds the end of a JSON object or list in text that comes in pieces."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._quoted = False
        self._escaped = False

    def end(self, text: str) -> int | None:
        """Returns how many characters of the next ``text`` belong to the object; None if it goes on after them."""
        for index, letter in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif letter == '"':
                self._quoted = not self._quoted
            elif self._quoted:
                self._escaped = letter == "\\"
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
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
        name = json.loads(f'"{head[1]}"') if head is not None and not head.partial else ""
        if head is not None and name and is_text(name) and not fenced:
            self._buffer = self._buffer[head.end() - 1 :]
            return self._begin_arguments(name, enclosed=True)
        if head is not None and head.partial and not self._last:
            return False
        if marked and self._buffer.lstrip().startswith(("{", "[")):
            self._brackets, self._scanned, self._state = Brackets(), 0, self._read_whole
            return True
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

    def _read_whole(self) -> bool:
        """Read JSON that can only be parsed whole, since names do not come first."""
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
        calls = json_calls(self._buffer[: self._scanned])
        if calls is None:
            return self._reject(self._scanned)
        self._buffer = self._buffer[self._scanned :]
        return self._emit_calls(calls, state)

    def _emit_calls(self, calls: Calls, state: Callable[[], bool]) -> bool:
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


class Unfinished(ValueError):
    """The text ends before the calls do."""


class WholeParser(ToolParser, ABC):
    """Parses calls once they are whole: whenever there is a new ``closing``, which may end them, and at the end of the
    answer. The closing may also stand in a string."""

    closing = CLOSING
    _tries = 0

    @abstractmethod
    def parse_calls(self, text: str) -> tuple[Calls, int]:
        """Returns the calls that ``text`` begins with, and where they end. More text would not change them.

        Raises:
            Unfinished: the text ends before they do.
            ValueError: they are not in this format.
            RecursionError: they are nested too deeply.
        """

    def _begin_calls(self) -> bool:
        self._scanned, self._tries, self._state = 0, 0, self._read_calls
        return True

    def _read_calls(self) -> bool:
        closed = self._tries < MOST_TRIES and self._buffer.find(self.closing, self._scanned) >= 0
        self._scanned = max(0, len(self._buffer) - len(self.closing) + 1)
        if not closed and not self._last:
            return False
        self._tries += 1
        try:
            calls, end = self.parse_calls(self._buffer)
        except (ValueError, RecursionError) as error:
            return False if isinstance(error, Unfinished) and not self._last else self._reject(0)
        self._buffer = self._buffer[end:]
        return self._emit_calls(calls, self._read_end)


MOST_TRIES = 100
"""Times that the parser tries whether calls are whole before the end of the answer: each try reads all of them, and
only a text made for it has more closings in its strings."""
QUOTED = re.compile(
    r"""([rR]?)('''|\"""|'|")((?:\\.|(?!\2(?=\s*[,)\]}:'"]))[^\\])*+)\2(?=\s*[,)\]}:'"])""", re.S
)  # fmt: skip
"""A string up to the quote after which a value may end. Models leave out the backslash before an apostrophe."""
NUMBER = re.compile(r"[+-]?(?:0[xX][0-9a-fA-F]+|(?:\d[\d_]*\.?[\d_]*|\.\d+)(?:[eE][+-]?\d+)?)")
WORD = re.compile(r"\w+")
CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|([0-7]{1,3})|(.))", re.S)
ESCAPED = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v",
    "\\": "\\", "/": "/", "'": "'", '"': '"', "\n": "",
}  # fmt: skip


class Reader:
    """Reads values from a text, from left to right: strings in quotes, numbers, constants, lists and objects."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Moves behind white space and ``pattern``, if that comes next."""
        while self.position < len(self.text) and self.text[self.position].isspace():
            self.position += 1
        found = pattern.match(self.text, self.position)
        if found is not None:
            self.position = found.end()
        return found

    def take(self, token: str) -> bool:
        """Moves behind white space and ``token``, if that comes next, and says whether it does."""
        return self.match(re.compile(re.escape(token))) is not None

    def expect(self, token: str) -> None:
        if not self.take(token):
            self.fail()

    def fail(self) -> NoReturn:
        """Raises Unfinished if the text may go on with what is expected, else ValueError."""
        if re.search(r"[,(){}\[\]]", self.text[self.position + 1 :]):
            raise ValueError(f"unexpected text at {self.position}")
        raise Unfinished

    def items(self, closing: str, read: Callable[[], T]) -> list[T]:
        """Returns what ``read`` returns for each item up to ``closing``. A comma may follow the last."""
        result: list[T] = []
        while not self.take(closing):
            if result:
                self.expect(",")
                if self.take(closing):
                    break
            result.append(read())
        return result

    def string(self) -> str | None:
        """Returns the string that comes next, if one does. Several in a row are one."""
        parts = []
        while (found := self.match(QUOTED)) is not None:
            parts.append(found[3] if found[1] else unescaped(found[3]))
        if self.text.startswith(("'", '"'), self.position):
            raise Unfinished
        return "".join(parts) if parts else None

    def value(self) -> Any:
        if (text := self.string()) is not None:
            return text
        if self.take("["):
            return self.items("]", self.value)
        if self.take("{"):
            return dict(self.items("}", self.pair))
        if (number := self.match(NUMBER)) is not None:
            whole = not re.search(r"[.eE]", number[0]) or "x" in number[0].lower()
            return int(number[0], 0) if whole else finite_float(float(number[0]))
        start = self.position
        if (word := self.match(WORD)) is not None and word[0] in CONSTANTS:
            return CONSTANTS[word[0]]
        self.position = start
        return self.fail()

    def pair(self) -> tuple[Any, Any]:
        """A key and its value."""
        key = self.value()
        self.expect(":")
        if isinstance(key, (list, dict)):
            raise ValueError("an object's key is a list or an object")
        return key, self.value()


def unescaped(text: str) -> str:
    """The text of a string with backslashes, alike in JSON and Python. Raises ValueError for half a surrogate pair."""

    def letter(found: re.Match[str]) -> str:
        code, octal, other = found[1] or found[2] or found[3], found[4], found[5]
        if code or octal:
            return chr(int(code, 16) if code else int(octal, 8))
        return ESCAPED.get(other, found[0])

    if "\\" not in text:
        return text
    return ESCAPE.sub(letter, text).encode("utf-16", "surrogatepass").decode("utf-16")


def length_without_marker(text: str, markers: Sequence[str]) -> int:
    """Returns how many characters of ``text`` cannot belong to one of the ``markers``, whatever follows."""
    for start in range(max(0, len(text) - max(map(len, markers)) + 1), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return start
    return len(text)


def json_calls(text: str) -> Calls | None:
    """Returns the calls in JSON; None if it holds anything else."""
    try:
        value = loads(text)
    except (ValueError, RecursionError):
        return None
    calls = []
    for call in value if isinstance(value, list) else [value]:
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or not name or not is_text(name):
            return None
        arguments = call.get("arguments", call.get("parameters"))
        calls.append((name, as_text({} if arguments is None else arguments)))
    return calls or None


def is_text(text: str) -> bool:
    """Whether it has no half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def arguments_of(text: str) -> dict[str, Any]:
    """Returns a call's arguments as an object: as much of it as there is, or any other text as one parameter."""
    try:
        arguments = from_json(text or "{}", allow_partial=True)
    except ValueError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"arguments": text}


def as_text(value: Any) -> str:
    """A string as it is, any other value as JSON."""
    if isinstance(value, str) and is_text(value):
        return value
    text = json.dumps(value, ensure_ascii=False)
    return text if is_text(text) else json.dumps(value)

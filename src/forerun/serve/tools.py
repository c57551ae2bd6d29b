"""Calls of tools, read out of an answer as it grows.

Two forms are read everywhere: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` of the Hermes models, and
``{"name": ..., "parameters": {...}}`` of Llama 3 at the beginning of the answer, with or without ``<|python_tag|>``.
Small models also write a call as a block of Markdown, which counts where the answer is nothing else. What a template
asks for besides is one of ``forms.py``; arguments that are not written as JSON are read below.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import regex

from forerun.engine.schemas import of_each_type
from forerun.models.chat import CLOSING, OPENING, PYTHON_TAG

TEXT = r'"((?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))+)"'
HEAD = regex.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*' + TEXT + r'\s*,\s*"(?:arguments|parameters)"\s*:\s*\{'
)
"""What a call begins with; Llama 3.2 may say its type first."""
FENCE = "```"
FENCED = regex.compile(FENCE + r"(?:json)?\s*(?={)")
ID = 9
"""Letters and digits of a call's id: Mistral's templates refuse any other number, and a prefix."""
BEGUN_NAME = re.compile(r'"name"\s*:\s*"([^"]*)')


@dataclass(slots=True)
class ParsedCall:
    """A call so far. ``arguments`` is JSON as the model wrote it."""

    index: int
    name: str
    arguments: str = ""
    complete: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:ID])


@dataclass(slots=True)
class Piece:
    """What is new: text of the answer or, if it is ``reasoning``, of the thoughts before it, or (more) arguments of a
    call, which ``begins`` with this."""

    text: str = ""
    call: ParsedCall | None = None
    begins: bool = False
    reasoning: bool = False


class Reader(Protocol):
    """Reads one answer. ``calls`` is what it calls so far."""

    calls: list[ParsedCall]

    def push(self, text: str, *, last: bool = False) -> list[Piece]:
        """What can be emitted once ``text`` has come; ``last``: nothing more will."""
        ...


class Brackets:
    """Finds where a JSON object or list, or what is between other ``brackets`` and ``quotes``, ends, in text that comes
    in pieces."""

    def __init__(self, depth: int = 0, brackets: tuple[str, str] = ("{[", "}]"), quotes: str = '"') -> None:
        self._depth = depth
        self._opening, self._closing = brackets
        self._quotes = quotes
        self._quoted = ""
        self._escaped = False

    def end(self, text: str) -> int | None:
        """How much of the next ``text`` belongs to it, if it ends there."""
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
    """One answer. What might still become part of a call is held back, and nothing else.

    ``names`` are the functions that a call without a marker must name, at best with the schemas of their parameters.
    More calls than ``most`` are dropped. An answer in the form of a call that is none is text. White space around calls
    belongs to them. ``silent``: the answer must be calls, so that what is none is one that was cut off, and not told.
    ``fenced``: a block of Markdown may be a call.
    """

    openings: tuple[str, ...] = (OPENING, PYTHON_TAG)
    closings: tuple[str, ...] = (CLOSING, ";")
    """What may stand behind a call: the marker at its end, or what is between two calls of Llama 3."""
    unmarked = "{"
    """What may begin a call without a marker."""

    def __init__(
        self, names: Collection[str], most: int | None = None, *, silent: bool = False, fenced: bool = False
    ) -> None:
        self.names = names
        self.schemas: Mapping[str, Any] = names if isinstance(names, Mapping) else {}
        self.most = most
        self.silent = silent
        self.fenced = fenced
        self.calls: list[ParsedCall] = []
        self._held = ""
        self._last = False
        self._bare = True
        """A call without a marker may begin here: no text came before."""
        self._marker = ""
        """What began the call that is being read, as it was written."""
        self._brackets = Brackets()
        self._scanned = 0
        self._new: list[Piece] = []
        self._step: Callable[[], bool] = self._read_text

    def push(self, text: str, *, last: bool = False) -> list[Piece]:
        """What can be told once ``text`` has come; ``last``: nothing more will."""
        self._held += text
        self._last = last
        self._new = []
        while self._step():
            pass
        return self._new

    def _say(self, text: str) -> None:
        if not text or self.silent:
            return
        self._bare = False
        if self._new and self._new[-1].call is None:
            self._new[-1].text += text
        else:
            self._new.append(Piece(text))

    # Each reads what is held in one state, and tells whether to go on with what is left.

    def _read_text(self) -> bool:
        held = self._held
        bare = len(held) - len(held.lstrip()) if self._bare else -1
        if 0 <= bare < len(held) and held[bare] in self.unmarked:
            return self._begin(0, bare)
        if self.fenced and bare >= 0 and not self.calls:
            block = FENCED.match(held, bare, partial=not self._last)
            if block is not None:
                return not block.partial and self._begin(0, block.end())
        result = [(at, marker) for marker in self.openings if (at := held.find(marker)) >= 0]
        if result:
            at, marker = min(result)
            before = held[:at].rstrip()
            self._say(before)
            return self._begin(len(before), at + len(marker))
        end = len(held) if self._last else len(held[: begun_marker(held, self.openings)].rstrip())
        if self._last and self.calls and not held.strip():
            end = 0
        self._say(held[:end])
        self._held = held[end:]
        return False

    def _begin(self, start: int, end: int) -> bool:
        self._marker, self._held = self._held[start:end], self._held[end:]
        self._scanned, self._step = 0, self._read_head
        return True

    def _read_head(self) -> bool:
        name, end = head_of(self._held)
        marked, fenced = bool(self._marker.strip()), FENCE in self._marker
        if (fenced or not marked) and not self._may_be_known(end):
            return self._release(0)
        if name is not None and not fenced:
            self._held = self._held[end - 1 :]  # from the arguments' bracket on
            self._start(name)
            self._brackets, self._step = Brackets(), self._read_arguments
            return True
        if end < 0 and not self._last:
            return False
        if marked and self._held.lstrip().startswith(("{", "[")):
            self._brackets, self._scanned, self._step = Brackets(), 0, self._read_object
            return True
        return self._release(0)

    def _may_be_known(self, end: int) -> bool:
        """Whether what is held begins, or may begin, a call of a known function."""
        named = BEGUN_NAME.search(self._held)
        if end > 0:
            return named is not None and named[1] in self.names
        return end < 0 and (named is None or any(name.startswith(named[1]) for name in self.names))

    def _read_arguments(self) -> bool:
        end = self._brackets.end(self._held)
        self._more(self._held[:end])
        self._held = self._held[end:] if end is not None else ""
        if end is None:
            return False
        self.calls[-1].complete = True
        self._brackets, self._step = Brackets(depth=1), self._read_rest
        return True

    def _read_rest(self) -> bool:
        """What a call says after its arguments means nothing."""
        end = self._brackets.end(self._held)
        self._held = self._held[end:] if end is not None else ""
        self._step = self._read_rest if end is None else self._read_closing
        return end is not None

    def _read_object(self) -> bool:
        """A call, or a list of them, whose name does not come first."""
        end = self._brackets.end(self._held[self._scanned :])
        if end is None:
            self._scanned = len(self._held)
            return self._release(self._scanned) if self._last else False
        self._scanned += end
        if FENCE in self._marker:
            self._step = self._read_fence
            return True
        return self._tell_calls(self._read_closing)

    def _read_fence(self) -> bool:
        """The end of a block, which must be the answer's."""
        rest = self._held[self._scanned :].strip()
        if not self._last and FENCE.startswith(rest):
            return False
        return self._tell_calls(self._drop) if rest == FENCE else self._release(self._scanned)

    def _tell_calls(self, step: Callable[[], bool]) -> bool:
        """Those of the text that was scanned, before the next ``step``."""
        calls = calls_in(self._held[: self._scanned])
        if calls is None:
            return self._release(self._scanned)
        self._held = self._held[self._scanned :]
        return self._emit_calls(calls, step)

    def _emit_calls(self, calls: list[tuple[str, str]], step: Callable[[], bool]) -> bool:
        """Whole ones, as many as are wanted, before the next ``step``."""
        room = None if self.most is None else self.most - len(self.calls)
        for name, arguments in calls[:room]:
            self._start(name)
            self._more(arguments)
            self.calls[-1].complete = True
        self._step = step
        return True

    def _read_closing(self) -> bool:
        rest = self._held.lstrip()
        for mark in self.closings:
            if mark.startswith(rest) and rest != mark and not self._last:
                return False
            if rest.startswith(mark):
                rest = rest[len(mark) :]
                break
        self._held, self._bare = rest, True
        self._step = self._drop if self.most is not None and len(self.calls) >= self.most else self._read_text
        return True

    def _drop(self) -> bool:
        self._held = ""
        return False

    def _release(self, count: int) -> bool:
        """It is no call: its marker is text, and ``count`` letters behind it."""
        self._say(self._marker + self._held[:count])
        self._held, self._bare, self._step = self._held[count:], False, self._read_text
        return True

    def _start(self, name: str) -> None:
        self.calls.append(ParsedCall(len(self.calls), name))
        self._new.append(Piece(call=self.calls[-1], begins=True))

    def _more(self, arguments: str) -> None:
        call = self.calls[-1]
        call.arguments += arguments
        if self._new and self._new[-1].call is call:
            self._new[-1].text += arguments
        elif arguments:
            self._new.append(Piece(arguments, call))


def begun_marker(text: str, markers: Sequence[str]) -> int:
    """How much of ``text`` cannot become one of the ``markers``, whatever follows."""
    longest = max(map(len, markers))
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if any(marker.startswith(text[at:]) for marker in markers):
            return at
    return len(text)


def head_of(text: str) -> tuple[str | None, int]:
    """The function that a call names first, and where its arguments' bracket ends. Without a name: -1 if more text may
    make it a call, 0 if none will."""
    head = HEAD.match(text, partial=True)
    if head is None:
        return None, 0
    return (None, -1) if head.partial else (json.loads(f'"{head[1]}"'), head.end())


def calls_in(text: str) -> list[tuple[str, str]] | None:
    """Names and arguments (JSON) of the calls that a JSON text holds; None: it is something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    result = []
    for call in value if isinstance(value, list) else [value]:
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or not name:
            return None
        result.append((name, _as_text(call.get("arguments", call.get("parameters")))))
    return result or None


def _as_text(arguments: Any) -> str:
    if arguments is None:
        return "{}"
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


GEMMA_QUOTE = '<|"|>'
GEMMA_KEY = re.compile(r"[^\s:{}\[\],]+")
GEMMA_NAMED = re.compile(r"([{,]\s*)(" + GEMMA_KEY.pattern + r")\s*(?=:)")
GEMMA_NONE = re.compile(r"([\[:,]\s*)None(?=\s*[,}\]])")
GEMMA_LAST = re.compile(r"([^\s\[{]\s*|^\s*),(?=\s*[}\]])")
"""A comma behind a value, and nothing behind it."""
CONSTANTS = {"true": True, "false": False, "null": None}


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    (simple, *_) = alternatives(schema, schema) or [{}]
    properties = simple.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def alternatives(schema: Any, root: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The schemas of one type each that a schema consists of; {} stands for anything."""
    return _alternatives(schema, root, set()) or [{}]


def _alternatives(schema: Any, root: Mapping[str, Any], seen: set[str]) -> list[dict[str, Any]]:
    """Those of references that were not ``seen``: a second time they add nothing."""
    if not isinstance(schema, Mapping):
        return [{}]
    if isinstance(ref := schema.get("$ref"), str):
        if ref in seen:
            return []
        seen.add(ref)
        home, _, name = ref.removeprefix("#/").partition("/")
        defined = root.get(home)
        return _alternatives(defined.get(name) if isinstance(defined, Mapping) else None, root, seen)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(each := schema.get(key), list) and (key != "allOf" or len(each) == 1):
            return [simple for one in each for simple in _alternatives(one, root, seen)]
    if isinstance(kinds := schema.get("type"), list):
        return of_each_type(dict(schema), kinds)
    return [dict(schema)]


def literals_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values of an enum or a constant."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def written(value: Any) -> str:
    """A value as it stands in a parameter."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """The value of a parameter, which is a text if its ``schema`` permits that."""
    simple = alternatives(schema, root)
    for value in (value for one in simple for value in literals_of(one) or ()):
        if text == written(value):
            return value
    kinds = [one.get("type") for one in simple if literals_of(one) is None]
    if "string" in kinds and not ("null" in kinds and text in ("null", "None")):
        return text
    try:
        return loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def loads(text: str) -> Any:
    """A JSON value. Numbers beyond float64 are its largest: JSON has no infinity."""
    return json.loads(text, parse_constant=_refused, parse_float=lambda number: _finite(float(number)))


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _finite(number: float) -> float:
    return max(-sys.float_info.max, min(sys.float_info.max, number))


def gemma_value(text: str) -> Any:
    """The value that ``text`` is in Gemma 4's form, made JSON before it is read. Raises ValueError where it is none,
    RecursionError where it is too deep."""
    parts = text.split(GEMMA_QUOTE)
    if len(parts) % 2 == 0:
        raise ValueError("a text does not end")
    for index, part in enumerate(parts):
        if index % 2:  # a text between quotes
            parts[index] = json.dumps(part)
        else:
            part = GEMMA_NAMED.sub(lambda found: found[1] + json.dumps(found[2]), part)
            parts[index] = GEMMA_LAST.sub(r"\1", GEMMA_NONE.sub(r"\1null", part))
    return loads("".join(parts))


def python_calls(text: str) -> list[tuple[str, str]] | None:
    """The calls in a list of Python's, whose arguments are named literals; None: it is something else."""
    calls = []
    try:
        tree = ast.parse(text, mode="eval").body
        for call in tree.elts if isinstance(tree, ast.List) else ():
            name = ""
            if isinstance(call, ast.BinOp) and isinstance(call.op, ast.Sub):  # a name with hyphens
                name, call = f"{ast.unparse(call.left)}-".replace(" - ", "-"), call.right
            if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
                return None
            values = {keyword.arg: ast.literal_eval(Constants().visit(keyword.value)) for keyword in call.keywords}
            text = json.dumps(values, ensure_ascii=False, allow_nan=False)
            text.encode()  # half a character is no text
            calls.append((name + ast.unparse(call.func), text))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return calls or None


class Constants(ast.NodeTransformer):
    """JSON's constants as Python's, and numbers that JSON has."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return ast.Constant(_finite(node.value)) if isinstance(node.value, float) else node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(CONSTANTS[node.id]) if node.id in CONSTANTS else node

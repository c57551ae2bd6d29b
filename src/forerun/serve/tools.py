"""Calls of tools, read out of an answer as it grows.

Two forms are read everywhere: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` of the Hermes models, and
``{"name": ..., "parameters": {...}}`` of Llama 3 at the beginning of the answer, with or without ``<|python_tag|>``.
Small models also write a call as a block of Markdown, which counts where the answer is nothing else. What a template
asks for (``CallForm``) is read besides:

- Qwen 3.5: ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``
- Gemma 4: ``<|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:3}<tool_call|>``
- Mistral: ``[TOOL_CALLS]NAME[ARGS]{...}``, or ``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``
- Llama 4: ``[NAME(KEY="TEXT", KEY=3)]``, with or without ``<|python_start|>``
"""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.core.errors import ConfigError
from forerun.models.chat import CLOSING, MARKERS, OPENING, PYTHON_TAG, CallForm
from forerun.sampling.params import StructuredOutputsParams
from forerun.serve.schema import ChatRequest, Chosen, Tool

GEMMA_OPENING, GEMMA_CLOSING, GEMMA_QUOTE = MARKERS[CallForm.GEMMA]
MISTRAL_OPENING = MARKERS[CallForm.MISTRAL][0]
PYTHONIC_OPENING, PYTHONIC_CLOSING = MARKERS[CallForm.PYTHONIC]
FUNCTION = "<function="
XML_CALL = re.compile(r"\s*<function=([^>\s]+)\s*>(.*)</function>\s*", re.S)
XML_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)\s*>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.S)
GEMMA_CALL = re.compile(r"\s*call:\s*([^\s{]+)\s*(?={)")
GEMMA_KEY = re.compile(r"\s*([^\s:{}\[\],]+)\s*:\s*")
MISTRAL_HEAD = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?={)")
BEGUN_MISTRAL = re.compile(r"\s*[\w.-]*(?:\[[^{]*)?\s*")
PYTHON_HEAD = re.compile(r"\[\s*([A-Za-z_][\w.]*)\(")
BEGUN_PYTHON = re.compile(r"\[\s*(?:([A-Za-z_][\w.]*))?")
DEEPEST = 64
"""Objects and lists within each other in a call's arguments."""
STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.S)
OPEN_STRING = re.compile(r'"(?:[^"\\]|\\.)*\\?', re.S)
FENCE = "```"
FENCED = re.compile(FENCE + r"(?:json)?\s*(?={)")
BEGUN_FENCE = re.compile("`{1,2}|" + FENCE + r"(?:j|js|jso|json)?\s*")
ID = 9
"""Letters and digits of a call's id: Mistral's templates refuse any other number, and a prefix."""
NAME = ""
"""Stands for the function's name among the parts of a call."""
BEGUN_NAME = re.compile(r'"name"\s*:\s*"([^"]*)')
HEAD = (('"name"',), (":",), (NAME,), (",",), ('"arguments"', '"parameters"'), (":",), ("{",))
HEADS = ((("{",), *HEAD), (("{",), ('"type"',), (":",), ('"function"',), (",",), *HEAD))
"""What a call begins with; Llama 3.2 may say its type first. White space may stand between the parts."""


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

    ``names`` are the functions that a call without a marker must name. More calls than ``most`` are dropped. An answer
    in the form of a call that is none is text. White space around calls belongs to them. ``silent``: the answer must be
    calls, so that what is none is one that was cut off, and not told. ``fenced``: a block of Markdown may be a call.
    ``form`` is what the template asks for, and ``schemas`` are the functions' parameters, which Qwen's form needs to
    tell numbers from texts.
    """

    reasoning = ""

    def __init__(
        self, names: Collection[str], most: int | None = None, *, silent: bool = False, fenced: bool = False,
        form: CallForm = CallForm.HERMES, schemas: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.names = names
        self.schemas = schemas or {}
        self.pythonic = form is CallForm.PYTHONIC
        self.openings = (OPENING, PYTHON_TAG, *MARKERS[form][:1]) if form in MARKERS else (OPENING, PYTHON_TAG)
        self.most = most
        self.silent = silent
        self.fenced = fenced
        self.calls: list[ParsedCall] = []
        self.content = ""
        """Text outside of calls."""
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
        self.content += text
        if self._new and self._new[-1].call is None:
            self._new[-1].text += text
        else:
            self._new.append(Piece(text))

    # Each reads what is held in one state, and tells whether to go on with what is left.

    def _read_text(self) -> bool:
        held = self._held
        bare = len(held) - len(held.lstrip()) if self._bare else -1
        if 0 <= bare < len(held) and held[bare] in ("{[" if self.pythonic else "{"):
            return self._begin(0, bare)
        if self.fenced and bare >= 0 and not self.calls:
            if block := FENCED.match(held, bare):
                return self._begin(0, block.end())
            if BEGUN_FENCE.fullmatch(held, bare) and not self._last:
                return False
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
        marker, begun = self._marker.strip(), self._held.lstrip()
        if marker == OPENING and (begun.startswith(FUNCTION) or (FUNCTION.startswith(begun) and not self._last)):
            return self._read_enclosed(CLOSING, self._xml_calls)
        if marker == GEMMA_OPENING:
            return self._read_enclosed(GEMMA_CLOSING, gemma_calls)
        if marker == MISTRAL_OPENING and not begun.startswith(("[", "{")):
            return self._read_mistral()
        if begun.startswith("[") and marker in ("", PYTHONIC_OPENING):
            self._brackets, self._scanned = Brackets(brackets=("[({", "])}"), quotes="\"'"), 0
            return self._read_pythonic()
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

    def _read_enclosed(self, closing: str, read: Callable[[str], list[tuple[str, str]] | None]) -> bool:
        """Calls that are read once they are whole: up to ``closing``, which an answer that is cut off may lack."""
        at = self._held.find(closing, self._scanned)
        if at < 0 and not self._last:
            self._scanned = max(0, len(self._held) - len(closing))
            return False
        calls = read(self._held if at < 0 else self._held[:at])
        self._scanned = 0
        if calls is None:
            return self._release(len(self._held) if at < 0 else at)
        self._held = "" if at < 0 else self._held[at + len(closing) :]
        return self._emit_calls(calls, self._read_closing)

    def _xml_calls(self, text: str) -> list[tuple[str, str]] | None:
        """The call that Qwen's form holds. Values are texts where the function's schema says so, or says nothing."""
        call = XML_CALL.fullmatch(text)
        if call is None:
            return None
        properties = (self.schemas.get(call[1]) or {}).get("properties") or {}
        values: dict[str, Any] = {}
        at = 0
        while parameter := XML_PARAMETER.match(call[2], at):
            at = parameter.end()
            text = parameter[2].removeprefix("\n").removesuffix("\n")
            values[parameter[1]] = _typed(text, properties.get(parameter[1]))
        if call[2][at:].strip():
            return None
        return [(call[1], json.dumps(values, ensure_ascii=False))]

    def _read_mistral(self) -> bool:
        """A function's name and its arguments, which are JSON."""
        head = MISTRAL_HEAD.match(self._held)
        if head is None:
            going_on = BEGUN_MISTRAL.fullmatch(self._held) is not None and not self._last
            return False if going_on else self._release(0)
        self._held = self._held[head.end() :]
        self._start(head[1])
        self._brackets, self._step = Brackets(), self._read_only_arguments
        return True

    def _read_only_arguments(self) -> bool:
        """Arguments with which a call ends."""
        read = self._read_arguments()
        self._step = self._read_closing if read else self._read_only_arguments
        return read

    def _read_pythonic(self) -> bool:
        """A list of Python's calls, of which the first names a known function."""
        self._step = self._read_pythonic
        begun = self._held.lstrip()
        head = PYTHON_HEAD.match(begun)
        if head is None:
            name = BEGUN_PYTHON.fullmatch(begun)
            known = name is not None and any(one.startswith(name[1] or "") for one in self.names)
            return False if known and not self._last else self._release(0)
        if head[1] not in self.names:
            return self._release(0)
        end = self._brackets.end(self._held[self._scanned :])
        if end is None:
            self._scanned = len(self._held)
            return self._release(self._scanned) if self._last else False
        end += self._scanned
        calls = python_calls(self._held[:end].strip())
        if calls is None:
            return self._release(end)
        self._held = self._held[end:]
        return self._emit_calls(calls, self._read_closing)

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
        """The marker at a call's end, or what stands between two calls of Llama 3."""
        rest = self._held.lstrip()
        for mark in (CLOSING, PYTHONIC_CLOSING, ";"):
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


def _typed(text: str, schema: Any) -> Any:
    """The value of a parameter, which is no text if its ``schema`` says so and it is JSON."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else "string"
    if kinds == "string" or (isinstance(kinds, list) and "string" in kinds and text != "null"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def gemma_calls(text: str) -> list[tuple[str, str]] | None:
    """The call in Gemma 4's form; None: it is none."""
    head = GEMMA_CALL.match(text)
    if head is None:
        return None
    try:
        value, end = _gemma_value(text, head.end(), 0)
    except ValueError:
        return None
    return None if text[end:].strip() else [(head[1], json.dumps(value, ensure_ascii=False))]


def _gemma_value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """A value that begins at ``at``, and where it ends. Raises ValueError where there is none."""
    if depth > DEEPEST:
        raise ValueError("too deep")
    at += len(text) - at - len(text[at:].lstrip())
    if text.startswith(GEMMA_QUOTE, at):
        start = at + len(GEMMA_QUOTE)
        end = text.index(GEMMA_QUOTE, start)
        return text[start:end], end + len(GEMMA_QUOTE)
    if text[at : at + 1] not in ("{", "["):
        end = next((index for index in range(at, len(text)) if text[index] in ",]}"), len(text))
        return json.loads(text[at:end]), end
    named: dict[str, Any] | None = {} if text[at] == "{" else None
    listed: list[Any] = []
    closing = "]" if named is None else "}"
    at += 1
    while text[at:].lstrip()[:1] != closing:
        if named is not None:
            key = GEMMA_KEY.match(text, at)
            if key is None:
                raise ValueError("no key")
            named[key[1]], at = _gemma_value(text, key.end(), depth + 1)
        else:
            value, at = _gemma_value(text, at, depth + 1)
            listed.append(value)
        at += len(text) - at - len(text[at:].lstrip())
        if text[at : at + 1] == ",":
            at += 1
        elif text[at : at + 1] != closing:
            raise ValueError("no end")
    return listed if named is None else named, text.index(closing, at) + 1


def python_calls(text: str) -> list[tuple[str, str]] | None:
    """The calls in a list of Python's, whose arguments are named literals; None: it is something else."""
    calls = []
    try:
        tree = ast.parse(text, mode="eval").body
        for call in tree.elts if isinstance(tree, ast.List) else ():
            if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
                return None
            values = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
            calls.append((ast.unparse(call.func), json.dumps(values, ensure_ascii=False)))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return calls or None


def head_of(text: str) -> tuple[str | None, int]:
    """The function that a call names first, and where its arguments' bracket ends. Without a name: -1 if more text may
    make it a call, 0 if none will."""
    ends = []
    for parts in HEADS:
        name, end = _match(text, parts)
        if name is not None and end > 0:
            return name, end
        ends.append(end)
    return None, min(ends)


def _match(text: str, parts: tuple[tuple[str, ...], ...]) -> tuple[str | None, int]:
    name, index = None, 0
    for options in parts:
        rest = text[index:].lstrip()
        index = len(text) - len(rest)
        if options == (NAME,):
            result = STRING.match(rest)
            if result is None:
                return None, -1 if not rest or OPEN_STRING.fullmatch(rest) else 0
            name = _unquoted(result[0])
            if not name:
                return None, 0
            index += result.end()
            continue
        whole = next((option for option in options if rest.startswith(option)), None)
        if whole is None:
            return None, -1 if any(option.startswith(rest) for option in options) else 0
        index += len(whole)
    return name, index


def _unquoted(text: str) -> str | None:
    try:
        return json.loads(text)
    except ValueError:
        return None


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


OBJECT = '{"name": '
MOST_CALLS = 4
"""In an answer that must call: a small model repeats its call until something ends it."""
NO_MARKERS: Mapping[str, int] = {}
OPEN_ENDED = {"additionalProperties", "unevaluatedProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"}


def required_shape(
    body: ChatRequest, form: CallForm, special: Mapping[str, int] = NO_MARKERS
) -> StructuredOutputsParams | None:
    """The grammar of a request with tools; None: the model is free to call or not. ``special`` are the markers of
    calls that are special tokens, with their ids.

    ``required`` or a named function permits calls alone. Under ``auto`` a ``response_format`` binds what is no call.
    Raises ConfigError for other structured output beside tools.
    """
    asked = body.structured()
    if asked is not None and (body.response_format is None or body.response_format.type == "text"):
        raise ConfigError("structured_outputs and guided_* exclude tools: send response_format, or tool_choice 'none'")
    choice = body.tool_choice
    tools = body.offered()
    if choice in (None, "auto"):
        if asked is None:
            return None
        rules, schemas = _calls(tools, form, special, several=body.parallel_tool_calls)
        schemas["answer"] = _as_object(json.loads(asked.key[1]))
        return StructuredOutputsParams(grammar=f"start: @answer | calls\n{rules}", schemas=schemas)
    if isinstance(choice, Chosen):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    several = body.parallel_tool_calls and not isinstance(choice, Chosen)
    rules, schemas = _calls(tools, form, special, several=several)
    return StructuredOutputsParams(grammar=f"start: calls\n{rules}", schemas=schemas)


def _calls(
    tools: list[Tool], form: CallForm, special: Mapping[str, int], *, several: bool
) -> tuple[str, dict[str, Any]]:
    """Rules in Lark, and the schemas of the functions' arguments by name. Llama 3 makes one call at a time. Raises
    ConfigError for forms whose calls no grammar here describes."""
    if form not in (CallForm.HERMES, CallForm.LLAMA, CallForm.MISTRAL):
        raise ConfigError(
            f"calls in this model's form ({form}) are read, but cannot be required, and take no response_format: "
            "leave tool_choice at 'auto', or tools out"
        )
    if form is CallForm.MISTRAL:
        return _mistral_calls(tools, special, several=several)
    hermes = form is CallForm.HERMES
    key = "arguments" if hermes else "parameters"
    functions = " | ".join(f"function_{index}" for index in range(len(tools)))
    more = f" ({_quoted(chr(10))} call){{0,{MOST_CALLS - 1}}}" if several and hermes else ""
    line = chr(10) if hermes else ""
    call = f"{_quoted(line + OBJECT)} ({functions}) {_quoted('}' + line)}"
    if hermes:  # a name without quotes is that special token
        opening, closing = (mark if mark in special else _quoted(mark) for mark in (OPENING, CLOSING))
        call = f"{opening} {call} {closing}"
    rules = [f"calls: call{more}", f"call: {call}"]
    for index, tool in enumerate(tools):
        begun = f"{json.dumps(tool.function.name)}, {json.dumps(key)}: "
        rules.append(f"function_{index}: {_quoted(begun)} @arguments_{index}")
    schemas = {f"arguments_{index}": _closed(tool.function.parameters) for index, tool in enumerate(tools)}
    return "\n".join(rules) + "\n", schemas


def _mistral_calls(tools: list[Tool], special: Mapping[str, int], *, several: bool) -> tuple[str, dict[str, Any]]:
    named = (f"<[{special[mark]}]>" if mark in special else _quoted(mark) for mark in MARKERS[CallForm.MISTRAL])
    opening, arguments, _ = named
    functions = " | ".join(f"function_{index}" for index in range(len(tools)))
    rules = [f"calls: call{f'{{1,{MOST_CALLS}}}' if several else ''}", f"call: {opening} ({functions})"]
    for index, tool in enumerate(tools):
        rules.append(f"function_{index}: {_quoted(tool.function.name)} {arguments} @arguments_{index}")
    schemas = {f"arguments_{index}": _closed(tool.function.parameters) for index, tool in enumerate(tools)}
    return "\n".join(rules) + "\n", schemas


def _closed(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A schema without parameters that it does not name, where it leaves that open: functions refuse those."""
    schema = {"type": "object", "properties": {}, **(parameters or {})}
    return schema if set(schema) & OPEN_ENDED else {**schema, "additionalProperties": False}


def _as_object(schema: dict[str, Any] | bool) -> dict[str, Any]:
    """A schema that is true or false, which llguidance does not take; nothing meets the latter."""
    if schema is False:
        raise ConfigError("the schema of response_format is false, which no answer can meet")
    return {} if schema is True else schema


def _quoted(text: str) -> str:
    """As Lark writes it."""
    return json.dumps(text)

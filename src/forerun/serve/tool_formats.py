"""The formats in which models write tool calls: each with the parser that reads it and the grammar that forces it.

- Hermes: ``<tool_call>{"name": NAME, "arguments": {...}}</tool_call>``
- Llama 3: ``{"name": NAME, "parameters": {...}}``
- Qwen 3.5: ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``
- Gemma 4: ``<|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:3}<tool_call|>``
- Mistral: ``[TOOL_CALLS]NAME[ARGS]{...}``, up to Nemo ``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``
- Llama 4: ``[NAME(KEY="TEXT", KEY=3)]``, with or without ``<|python_start|>``
- LFM2: ``<|tool_call_start|>[NAME(KEY="TEXT", KEY=3)]<|tool_call_end|>``
- gpt-oss (Harmony, https://cookbook.openai.com/articles/openai-harmony): messages, of which some are to a function
"""

from __future__ import annotations

import ast
import json
import keyword
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import regex

from forerun.core.errors import ConfigError, RequestError
from forerun.engine.schemas import SpelledRules, either, free_text, quoted
from forerun.models.chat import CLOSING, OPENING, PYTHON_TAG, knows_tools
from forerun.models.checkpoint import library
from forerun.sampling.params import StructuredOutputsParams
from forerun.serve.parsers import (
    Brackets,
    ParsedCall,
    Piece,
    ToolParser,
    alternatives,
    as_text,
    finite_float,
    length_without_marker,
    literals_of,
    loads,
    properties_of,
    typed,
)
from forerun.serve.schema import ChatRequest, Chosen, Tool

MAX_FORCED_CALLS = 4
"""In an answer that must call: a small model repeats its call until something ends it."""
OPEN_ENDED = {"additionalProperties", "unevaluatedProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"}


class CallGrammar:
    """A Lark grammar of calls, while a format writes it.

    Args:
        tools: the functions that may be called.
        special: the ids of markers that are special tokens.
        parallel: whether an answer may make several calls.
    """

    def __init__(self, tools: Sequence[Tool], special: Mapping[str, int], *, parallel: bool) -> None:
        self.tools = tools
        self.special = special
        self.parallel = parallel
        self.rules: dict[str, str] = {}
        self.schemas: dict[str, Any] = {}
        """JSON schemas by the name under which rules refer to them."""

    def marker(self, text: str) -> str:
        """Returns a marker's special token, or its spelling."""
        return f"<[{self.special[text]}]>" if text in self.special else quoted(text)

    def calls(self, call: str, separator: str = "") -> str:
        """Returns the rule of one call or, if ``parallel``, of several."""
        self.rules["call"] = call
        return f"call ({separator} call){{0,{MAX_FORCED_CALLS - 1}}}" if self.parallel else "call"

    def functions(
        self, prefix: Callable[[str], str], spelling: Callable[[str, dict[str, Any]], SpelledRules] | None = None
    ) -> str:
        """Returns the rule of any one function with its arguments.

        Args:
            prefix: writes the rule of what comes before the arguments of the function of this name.
            spelling: makes the rules of arguments, by their name and schema; None: they are JSON.
        """
        for index, tool in enumerate(self.tools):
            arguments, schema = f"arguments_{index}", _parameters_of(tool)
            if spelling is None:
                self.schemas[arguments] = schema
                rule = f"@{arguments}"
            else:
                spelled = spelling(arguments, schema)
                rule = spelled.arguments()
                self.rules |= spelled.rules
                self.schemas |= spelled.parts
            self.rules[f"function_{index}"] = f"{prefix(tool.function.name)} {rule}"
        return either([f"function_{index}" for index in range(len(self.tools))])

    def json_functions(self, key: str) -> str:
        """Returns the rule of a function's name and its arguments, under ``key``, as they stand in a JSON object."""
        return self.functions(lambda name: quoted(f'{json.dumps(name)}, "{key}": '))


def _parameters_of(tool: Tool) -> dict[str, Any]:
    """Returns the schema of a function's parameters. If it does not say whether others are permitted, they are not."""
    schema = {"type": "object", "properties": {}, **(tool.function.parameters or {})}
    return schema if set(schema) & OPEN_ENDED else {**schema, "additionalProperties": False}


class ToolFormat(ABC):
    """One format of calls."""

    markers: tuple[str, ...] = ()
    """The texts in it that may be special tokens."""
    in_template = re.compile(r"\Z.")
    """Found in the chat templates of models that use it."""
    parser: type[ToolParser] = ToolParser
    grammar_has_reasoning = False
    """Whether the grammar begins with the reasoning, not after it."""

    @abstractmethod
    def calls(self, grammar: CallGrammar) -> str:
        """Returns the rule of calls, and adds the rules that it refers to."""

    def answer(self, grammar: CallGrammar, text: str) -> str:
        """Returns the rule of a whole answer: calls or, if it is not empty, the rule ``text`` instead of them."""
        return f"{text} | calls" if text else "calls"


class HermesFormat(ToolFormat):
    markers = (OPENING, CLOSING)

    def calls(self, grammar: CallGrammar) -> str:
        opening, closing = map(grammar.marker, self.markers)
        begin, end = quoted('\n{"name": '), quoted("}\n")
        return grammar.calls(f"{opening} {begin} {grammar.json_functions('arguments')} {end} {closing}", quoted("\n"))


class LlamaFormat(ToolFormat):
    """Llama 3 makes one call at a time."""

    markers = (PYTHON_TAG,)
    in_template = re.compile(r'(?s)\A(?!.*<tool_call>).*("name\\?": [^\n]{0,80}"parameters\\?":|<\|python_tag\|>)')

    def calls(self, grammar: CallGrammar) -> str:
        begin, end = quoted('{"name": '), quoted("}")
        return f"{begin} {grammar.json_functions('parameters')} {end}"


FUNCTION = "<function="
XML_CALL = re.compile(r"\s*<function=([^>\s]+)\s*>(.*)</function>\s*", re.S)
XML_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)\s*>")
TAG = re.compile(r"</parameter>|(?=<parameter=)|\Z")
TAG_AFTER_JSON = re.compile(rf"\s*(?:{TAG.pattern})")
JSON = json.JSONDecoder()


class EnclosedParser(ToolParser, ABC):
    """Parses calls once they are whole: up to ``closing``, which is missing where the answer was cut off."""

    closing = CLOSING
    content = ""
    """What calls in this format begin with, after the last of the ``start_markers``."""

    @abstractmethod
    def parse_calls(self, text: str) -> list[tuple[str, str]] | None:
        """As ``ParseCalls``."""

    def _read_head(self) -> bool:
        begins, content = self._buffer.lstrip(), self.content
        own = begins.startswith(content) or (content.startswith(begins) and not self._last)
        if not own or self._marker.strip() != self.start_markers[-1]:
            return super()._read_head()
        end = self._buffer.find(self.closing, self._scanned)
        if end < 0 and not self._last:
            self._scanned = max(0, len(self._buffer) - len(self.closing))
            return False
        text = self._buffer if end < 0 else self._buffer[:end]
        calls = self.parse_calls(text)
        if calls is None:
            return self._reject(len(text))
        self._buffer = self._buffer[len(text) :].removeprefix(self.closing)
        return self._emit_calls(calls, self._read_end)


class QwenParser(EnclosedParser):
    """Values are strings where the function's schema permits that, or says nothing, else JSON."""

    start_markers = (PYTHON_TAG, OPENING)
    content = FUNCTION

    def parse_calls(self, text: str) -> list[tuple[str, str]] | None:
        call = XML_CALL.fullmatch(text)
        if call is None:
            return None
        name, body = call.groups()
        schema = self.functions.get(name) or {}
        properties = properties_of(schema)
        values: dict[str, Any] = {}
        position = 0
        while parameter := XML_PARAMETER.match(body, position):
            key = parameter[1]
            permitted = alternatives(properties.get(key, {"type": "string"}), schema)
            values[key], position = self._value(body, parameter.end(), permitted)
        if body[position:].strip():
            return None
        return [(name, json.dumps(values, ensure_ascii=False))]

    @staticmethod
    def _value(body: str, start: int, schemas: Sequence[Mapping[str, Any]]) -> tuple[Any, int]:
        """Returns the value of the parameter that begins at ``start``, and where the parameter ends.

        A string ends with the next tag. JSON, whose strings may hold such a tag, ends where its syntax says so.
        """
        if not any(schema.get("type") == "string" for schema in schemas):
            try:
                _, end = JSON.raw_decode(body, len(body) - len(body[start:].lstrip()))
            except (ValueError, RecursionError):
                end = -1
            if end >= 0 and (tag := TAG_AFTER_JSON.match(body, end)):
                return typed(body[start:end].strip(), schemas), tag.end()
        tag = TAG.search(body, start)
        assert tag is not None  # the end of the text counts as one
        return typed(body[start : tag.start()].removeprefix("\n").removesuffix("\n"), schemas), tag.end()


class QwenRules(SpelledRules):
    """Rules of Qwen 3.5's parameters: a string stands as it is, anything else is JSON."""

    form = "Qwen 3.5"
    END = "\n</parameter>\n"
    NEVER = ("</parameter>", "<parameter=", CLOSING)

    def _pairs(self, schema: dict[str, Any], key_of: Callable[[str], str] | None = None) -> str:
        pairs = []
        for key, each, needed in self._properties(schema):
            if not re.fullmatch(r"[^>\s]+", key):
                raise self._refused(f"with a parameter called {json.dumps(key)}")
            opening = quoted(f"<parameter={key}>\n")
            pair = f"{opening} {self._value(each)}"
            pairs.append(pair if needed else f"({pair})?")
        return " ".join(pairs)

    def _value(self, schema: Any) -> str:
        """Returns the rule of a value and its tag. If strings are permitted, any number or list is read as one."""
        simple = alternatives(schema, self.schema)
        options = [
            quoted(self._checked(as_text(value)) + self.END) for one in simple for value in literals_of(one) or ()
        ]
        free = [one for one in simple if literals_of(one) is None]
        strings = [one for one in free if one.get("type", "string") == "string"]
        for one in strings:
            self._check(one, "type", "minLength", "maxLength", "pattern")
            options.append(self._terminal(f"{free_text(one, *self.NEVER)} {quoted(self.END)}"))
        definitions: dict[str, Any] = {key: self.schema[key] for key in ("$defs", "definitions") if key in self.schema}
        for one in free:
            if one.get("type") in ("boolean", "null") and not (strings and one["type"] == "boolean"):
                options.append(f"{self._node(one)} {quoted(self.END)}")
            elif not strings:
                options.append(f"{self._named({**definitions, **one})} {quoted(self.END)}")
        return either(options)

    def _checked(self, text: str) -> str:
        if any(tag in text for tag in self.NEVER):
            raise self._refused(f"with the value {json.dumps(text)[:60]}")
        return text


class QwenFormat(ToolFormat):
    markers = (OPENING, CLOSING)
    in_template = re.compile(f"(?s){OPENING}.*{FUNCTION}")
    parser = QwenParser

    def calls(self, grammar: CallGrammar) -> str:
        opening, closing = map(grammar.marker, self.markers)
        functions = grammar.functions(lambda name: quoted(f"\n{FUNCTION}{name}>\n"), QwenRules)
        end = quoted("</function>\n")
        return grammar.calls(f"{opening} {functions} {end} {closing}", quoted("\n"))


GEMMA_OPENING, GEMMA_CLOSING, GEMMA_QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
GEMMA_CALL = re.compile(r"\s*call:\s*([^\s{]+)\s*(?={)")
GEMMA_KEY = re.compile(r"[^\s:{}\[\],]+")
GEMMA_NAMED = re.compile(r"([{,]\s*)(" + GEMMA_KEY.pattern + r")\s*(?=:)")
GEMMA_NONE = re.compile(r"([\[:,]\s*)None(?=\s*[,}\]])")
GEMMA_TRAILING = re.compile(r"([^\s\[{]\s*|^\s*),(?=\s*[}\]])")
"""A comma after the last value."""


def gemma_value(text: str) -> Any:
    """Returns the value of ``text`` in Gemma 4's format, which is turned into JSON first.

    Raises:
        ValueError: it is not a value.
        RecursionError: it is nested too deeply.
    """
    parts = text.split(GEMMA_QUOTE)
    if len(parts) % 2 == 0:
        raise ValueError("a string does not end")
    for index, part in enumerate(parts):
        if index % 2:  # a string between quotes
            parts[index] = json.dumps(part)
        else:
            part = GEMMA_NAMED.sub(lambda match: match[1] + json.dumps(match[2]), part)
            parts[index] = GEMMA_TRAILING.sub(r"\1", GEMMA_NONE.sub(r"\1null", part))
    return loads("".join(parts))


class GemmaParser(EnclosedParser):
    start_markers = (*ToolParser.start_markers, GEMMA_OPENING)
    closing = GEMMA_CLOSING

    def parse_calls(self, text: str) -> list[tuple[str, str]] | None:
        head = GEMMA_CALL.match(text)
        if head is None:
            return None
        try:
            return [(head[1], json.dumps(gemma_value(text[head.end() :]), ensure_ascii=False))]
        except (ValueError, RecursionError):
            return None


class GemmaRules(SpelledRules):
    """Rules of Gemma 4's arguments: strings between quotes of their own, bare keys in alphabetic order."""

    form = "Gemma 4"
    words = MappingProxyType({True: ("true",), False: ("false",), None: ("null",)})
    _between = '","'

    def __init__(self, name: str, schema: dict[str, Any], quote: str) -> None:
        super().__init__(name, schema)
        self.quote = quote

    def _ordered(self, named: dict[str, Any]) -> list[tuple[str, Any]]:
        return sorted(named.items(), key=lambda pair: pair[0].casefold())

    def _key(self, key: str) -> str:
        if not GEMMA_KEY.fullmatch(key) or GEMMA_QUOTE in key:
            raise self._refused(f"with a parameter called {json.dumps(key)}")
        return quoted(f"{key}:")

    def _any_key(self) -> str:
        return "/[A-Za-z_][A-Za-z0-9_]*:/"

    def _string(self, schema: dict[str, Any]) -> str:
        if self.quote.startswith("<["):  # a special token is part of no string
            return f"{self.quote} {self._terminal(free_text(schema, GEMMA_CLOSING))} {self.quote}"
        return self._terminal(f"{self.quote} {free_text(schema, GEMMA_QUOTE, GEMMA_CLOSING)} {self.quote}")

    def _text(self, value: str) -> str:
        if GEMMA_QUOTE in value or GEMMA_CLOSING in value:
            raise self._refused(f"with the value {json.dumps(value)[:60]}")
        return f"{self.quote} {quoted(value)} {self.quote}"


class GemmaFormat(ToolFormat):
    markers = (GEMMA_OPENING, GEMMA_CLOSING, GEMMA_QUOTE)
    in_template = re.compile(r"<\|tool_call>")
    parser = GemmaParser

    def calls(self, grammar: CallGrammar) -> str:
        opening, closing, quote = map(grammar.marker, self.markers)
        functions = grammar.functions(
            lambda name: quoted(f"call:{name}{{"), lambda name, schema: GemmaRules(name, schema, quote)
        )
        end = quoted("}")
        return grammar.calls(f"{opening} {functions} {end} {closing}")


MISTRAL_OPENING = "[TOOL_CALLS]"
MISTRAL_HEAD = regex.compile(r"\s*([\w.-]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?={)")


class MistralParser(ToolParser):
    """Parses a function's name and its arguments, which are JSON, or a list of JSON objects."""

    start_markers = (*ToolParser.start_markers, MISTRAL_OPENING)

    def _read_head(self) -> bool:
        if self._marker.strip() != MISTRAL_OPENING or self._buffer.lstrip().startswith(("[", "{")):
            return super()._read_head()
        head = MISTRAL_HEAD.match(self._buffer, partial=not self._last)
        if head is None:
            return self._reject(0)
        if head.partial:
            return False
        self._buffer = self._buffer[head.end() :]
        return self._begin_arguments(head[1], enclosed=False)


class MistralFormat(ToolFormat):
    markers = (MISTRAL_OPENING, "[CALL_ID]", "[ARGS]")
    in_template = re.compile(r"(?s)\A(?=.*\[TOOL_CALLS\]).*\[ARGS\]")
    parser = MistralParser

    def calls(self, grammar: CallGrammar) -> str:
        opening, call_id, arguments = map(grammar.marker, self.markers)
        functions = grammar.functions(lambda name: f"{quoted(name)} ({call_id} /[a-zA-Z0-9]{{9}}/)? {arguments}")
        return grammar.calls(f"{opening} {functions}")


class MistralListFormat(MistralFormat):
    """The format of models up to Nemo."""

    in_template = re.compile(r"\[TOOL_CALLS\]")

    def calls(self, grammar: CallGrammar) -> str:
        begin, end, call_id = quoted('{"name": '), quoted("}"), quoted(', "id": ')
        functions = grammar.json_functions("arguments")
        calls = grammar.calls(f'{begin} {functions} ({call_id} /"[a-zA-Z0-9]{{9}}"/)? {end}', quoted(", "))
        return f'{grammar.marker(MISTRAL_OPENING)} "[" {calls} "]"'


PYTHON_HEAD = re.compile(r"\[\s*(?:([A-Za-z_][\w.-]*)(\()?)?")


class PythonParser(ToolParser):
    """Parses a Python list of calls, of which the first names a known function."""

    start_markers = (*ToolParser.start_markers, "<|python_start|>")
    end_markers = (*ToolParser.end_markers, "<|python_end|>")
    unmarked = "{["

    def _read_head(self) -> bool:
        text = self._buffer.lstrip()
        head = PYTHON_HEAD.match(text)
        if head is None or self._marker.strip() not in ("", self.start_markers[-1]):
            return super()._read_head()
        name, bracket = head[1] or "", head[2]
        if bracket and name in self.functions:
            return self._begin_whole(Brackets(brackets=("[({", "])}"), quotes="\"'"), python_calls)
        may_grow = not bracket and head.end() == len(text) and not self._last
        if may_grow and any(function.startswith(name) for function in self.functions):
            return False
        return self._reject(0)


def python_calls(text: str) -> list[tuple[str, str]] | None:
    """``ParseCalls`` for a Python list of calls with literal keyword arguments."""
    calls = []
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        for call in tree.elts if isinstance(tree, ast.List) else ():
            name = ""
            if isinstance(call, ast.BinOp) and isinstance(call.op, ast.Sub):  # a name with hyphens
                name, call = f"{ast.unparse(call.left)}-".replace(" - ", "-"), call.right
            if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
                return None
            values = {keyword.arg: ast.literal_eval(JsonLiterals().visit(keyword.value)) for keyword in call.keywords}
            arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
            arguments.encode()  # raises for half a surrogate pair
            calls.append((name + ast.unparse(call.func), arguments))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return calls or None


CONSTANTS = {"true": True, "false": False, "null": None}


class JsonLiterals(ast.NodeTransformer):
    """Replaces JSON's constants by Python's, and floats that are not finite by the largest ones."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return ast.Constant(finite_float(node.value)) if isinstance(node.value, float) else node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(CONSTANTS[node.id]) if node.id in CONSTANTS else node


class Lfm2Parser(PythonParser):
    start_markers = (*ToolParser.start_markers, "<|tool_call_start|>")
    end_markers = (*ToolParser.end_markers, "<|tool_call_end|>")


PLAIN = r"[^'\\\x00-\x1f]*"
"""What may stand between single quotes without an escape."""


class PythonRules(SpelledRules):
    """Rules of keyword arguments. Strings are quoted as in JSON, or by single quotes."""

    form = "Llama 4"

    def _string(self, schema: dict[str, Any]) -> str:
        quote = quoted("'")
        single = self._terminal(f"{quote} ({free_text(schema)} & /{PLAIN}/) {quote}")
        return f"({self._part(schema)} | {single})"

    def _text(self, value: str) -> str:
        options = [quoted(json.dumps(value)), *([quoted(f"'{value}'")] if re.fullmatch(PLAIN, value) else [])]
        return either(options)

    def _name(self, key: str) -> str:
        if not key.isidentifier() or keyword.iskeyword(key):
            raise self._refused(f"with a parameter called {json.dumps(key)}")
        return quoted(f"{key}=")


class PythonicFormat(ToolFormat):
    markers = ("<|python_start|>", "<|python_end|>")
    in_template = re.compile(r"\[\w*func\w*\(\w+=|\{\{-? *'\[' *\}\}.{0,200}'\('", re.S)
    parser = PythonParser

    def calls(self, grammar: CallGrammar) -> str:
        for tool in grammar.tools:
            if not all(part.isidentifier() and not keyword.iskeyword(part) for part in tool.function.name.split("-")):
                raise ValueError(f"a call in Llama 4's form cannot be forced of the function {tool.function.name}")
        functions = grammar.functions(lambda name: quoted(f"{name}("), PythonRules)
        calls = grammar.calls(f'{functions} ")"', quoted(", "))
        return f'"[" {calls} "]"'


class Lfm2Format(PythonicFormat):
    markers = ("<|tool_call_start|>", "<|tool_call_end|>")
    in_template = re.compile(r"<\|tool_(?:call|list)_start\|>")
    parser = Lfm2Parser

    def calls(self, grammar: CallGrammar) -> str:
        opening, closing = map(grammar.marker, self.markers)
        return f"{opening} {super().calls(grammar)} {closing}"


CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
MESSAGE_ENDS = (END, "<|call|>", "<|return|>", START)
CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
HEADER_STARTS = (START, CHANNEL, "assistant", " to=")


class HarmonyParser(ToolParser):
    """Parses gpt-oss's messages, each with a header that names a channel and perhaps a recipient.

    The channel ``analysis`` is reasoning, and a message to one of the ``functions`` is a call. Any other is text.
    """

    _channel = ""
    """The channel of the message that is being read, or ``call`` or ``dropped``."""

    def _read_text(self) -> bool:
        """Reads a message's header."""
        buffer = self._buffer
        if not any(buffer.startswith(start) or start.startswith(buffer) for start in HEADER_STARTS):
            self._channel, self._state = "final", self._read_message  # text without a header
            return True
        header, marker, message = buffer.partition(MESSAGE)
        if not marker:
            if self._last and buffer:  # a header that was cut off
                self._channel, self._buffer = "final", ""
                self._emit(buffer, ends=True)
            return False
        channel, recipient = CHANNEL_NAME.search(header), RECIPIENT.search(header)
        self._channel, self._buffer = channel[1] if channel is not None else "final", message
        self._state = self._read_message
        name = recipient[1].removeprefix("functions.") if recipient is not None else ""
        if name in self.functions:
            self._channel = "call" if self.parallel or not self.calls else "dropped"
        if self._channel == "call":
            self.calls.append(ParsedCall(len(self.calls), name))
        return True

    def _read_message(self) -> bool:
        buffer = self._buffer
        found = [(start, marker) for marker in MESSAGE_ENDS if (start := buffer.find(marker)) >= 0]
        unfinished = len(buffer) if self._last else length_without_marker(buffer, MESSAGE_ENDS)
        end, marker = min(found, default=(unfinished, ""))
        self._emit(buffer[:end], ends=bool(found) or self._last)
        self._buffer = buffer[end:] if marker == START else buffer[end + len(marker) :]
        if found:
            self._state = self._read_text
        return bool(found)

    def _emit(self, text: str, *, ends: bool) -> None:
        """Emits ``text`` of the present message, which ``ends`` with it or goes on."""
        if self._channel == "call":
            call = self.calls[-1]
            begins = not call.arguments and not call.complete
            if ends and not call.arguments:
                text = text or "{}"
            call.arguments += text
            call.complete = call.complete or (ends and call.arguments.rstrip().endswith("}"))
            if text:
                self._pieces.append(Piece(text, call, begins))
        elif text and self._channel == "analysis":
            self._pieces.append(Piece(text, reasoning=True))
        elif text and not self.calls_only and self._channel != "dropped":
            self._pieces.append(Piece(text))


class HarmonyFormat(ToolFormat):
    """gpt-oss makes one call at a time. Its reasoning is a message of its own, before that of the call."""

    markers = (CHANNEL, MESSAGE, *MESSAGE_ENDS, "<|constrain|>")
    in_template = re.compile(r"<\|channel\|>")
    parser = HarmonyParser
    grammar_has_reasoning = True

    def calls(self, grammar: CallGrammar) -> str:
        channel, message, constrain = map(grammar.marker, (CHANNEL, MESSAGE, "<|constrain|>"))

        def header(name: str) -> str:
            to = f" to=functions.{name}"
            first, last = f"{channel} {quoted('commentary' + to)}", f"{quoted(to)} {channel} {quoted('commentary')}"
            return f'({first} | {last}) (" " {constrain}? "json")? {message}'

        return grammar.functions(header)

    def answer(self, grammar: CallGrammar, text: str) -> str:
        channel, message, end, start = map(grammar.marker, (CHANNEL, MESSAGE, END, START))
        if END in grammar.special:
            grammar.rules["thought"] = f"/(?s:.*)/ {end}"
        else:
            grammar.rules["thought"] = "THOUGHT"
            grammar.rules["THOUGHT"] = f"{free_text({}, END)} {end}"
        reasoning = f'({channel} "analysis" {message} thought {start} "assistant")?'
        return f'{reasoning} ({channel} "final" {message} {text} | calls)' if text else f"{reasoning} calls"


HERMES, LLAMA, QWEN, GEMMA = HermesFormat(), LlamaFormat(), QwenFormat(), GemmaFormat()
MISTRAL, MISTRAL_LIST, PYTHONIC, LFM2, HARMONY = (
    MistralFormat(), MistralListFormat(), PythonicFormat(), Lfm2Format(), HarmonyFormat()
)  # fmt: skip
FORMATS: tuple[ToolFormat, ...] = (GEMMA, MISTRAL, MISTRAL_LIST, HARMONY, LFM2, QWEN, PYTHONIC, LLAMA, HERMES)
"""In the order in which a template is searched for them."""


def tool_format(tokenizer: Any, chat_template: str | None = None) -> ToolFormat:
    """Returns the format that the chat template asks for or writes; Hermes' if it says nothing of tools."""
    with library("the chat template cannot be used", RequestError):  # one of several may have no name
        template = tokenizer.get_chat_template(chat_template, [{}])
    if not knows_tools(template):
        return HERMES
    return next((each for each in FORMATS if each.in_template.search(template)), HERMES)


def tool_grammar(
    body: ChatRequest, format: ToolFormat, special: Mapping[str, int] | None = None
) -> StructuredOutputsParams | None:
    """Returns the grammar of an answer to a request with tools; None if the model is free to call or not.

    ``required`` or a named function permits calls alone. Under ``auto``, a ``response_format`` applies to
    answers without calls.

    Args:
        body: the request.
        format: how calls are written.
        special: the ids of markers of calls that are special tokens.

    Raises:
        ConfigError: it asks for other structured output beside tools.
        RequestError: a schema cannot be written in this format.
    """
    requested = body.structured()
    if requested is not None and (body.response_format is None or body.response_format.type == "text"):
        raise ConfigError("structured_outputs and guided_* exclude tools: send response_format, or tool_choice 'none'")
    free = not body.must_call
    if free and requested is None:
        return None
    choice, tools = body.tool_choice, body.offered()
    if isinstance(choice, Chosen):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    parallel = body.parallel_tool_calls and not isinstance(choice, Chosen)
    grammar = CallGrammar(tools, special or {}, parallel=parallel)
    if free and requested is not None:
        schema = json.loads(requested.key[1])
        if schema is False:
            raise ConfigError("no answer can match the schema false of response_format")
        grammar.schemas["answer"] = {} if schema is True else schema  # llguidance takes no true
    try:
        grammar.rules["calls"] = format.calls(grammar)
        start = format.answer(grammar, "@answer" if free else "")
    except ValueError as error:
        raise RequestError(f"tools: {error}", param="tools") from None
    lark = "\n".join(f"{name}: {rule}" for name, rule in {"start": start, **grammar.rules}.items())
    return StructuredOutputsParams(grammar=lark, schemas=grammar.schemas, whole=format.grammar_has_reasoning)

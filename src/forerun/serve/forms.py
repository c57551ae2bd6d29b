"""The forms in which models write calls, each with the parser that reads it and the grammar that forces it.

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

import json
import keyword
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import regex

from forerun.core.errors import ConfigError, RequestError
from forerun.engine.schemas import SpelledRules, either, free_text, quoted
from forerun.models.chat import CLOSING, OPENING, PYTHON_TAG, knows_tools
from forerun.models.checkpoint import library
from forerun.sampling.params import StructuredOutputsParams
from forerun.serve.schema import ChatRequest, Chosen, Tool
from forerun.serve.tools import (
    GEMMA_KEY,
    GEMMA_QUOTE,
    Brackets,
    ParsedCall,
    Piece,
    Reader,
    ToolParser,
    alternatives,
    begun_marker,
    gemma_value,
    literals_of,
    properties_of,
    python_calls,
    typed,
    written,
)

MOST_CALLS = 4
"""In an answer that must call: a small model repeats its call until something ends it."""
OPEN_ENDED = {"additionalProperties", "unevaluatedProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"}


class CallRules:
    """A grammar of calls of ``tools`` while it is written, of one or of ``several``. ``special`` are the markers that
    are special tokens, with their ids."""

    def __init__(self, tools: Sequence[Tool], special: Mapping[str, int], *, several: bool) -> None:
        self.tools = tools
        self.special = special
        self.several = several
        self.rules: dict[str, str] = {}
        self.schemas: dict[str, Any] = {}

    def mark(self, text: str) -> str:
        """A marker, which is a token or spelled."""
        return f"<[{self.special[text]}]>" if text in self.special else quoted(text)

    def repeated(self, call: str, between: str = "") -> str:
        return f"{call} ({between} {call}){{0,{MOST_CALLS - 1}}}" if self.several else call

    def functions(self, begin: Callable[[str], str], arguments: Callable[[int], str] | None = None) -> str:
        """One of the functions: how each begins by its name, and its arguments, which are JSON if nothing else is
        said."""
        for index, tool in enumerate(self.tools):
            self.rules[f"function_{index}"] = f"{begin(tool.function.name)} {(arguments or self.json)(index)}"
        return either([f"function_{index}" for index in range(len(self.tools))])

    def json(self, index: int) -> str:
        self.schemas[f"arguments_{index}"] = self.schema(index)
        return f"@arguments_{index}"

    def schema(self, index: int) -> dict[str, Any]:
        """Without parameters that it does not name, where it leaves that open: functions refuse those."""
        schema = {"type": "object", "properties": {}, **(self.tools[index].function.parameters or {})}
        return schema if set(schema) & OPEN_ENDED else {**schema, "additionalProperties": False}

    def spelled(self, kind: Callable[[str, dict[str, Any]], SpelledRules]) -> Callable[[int], str]:
        """Arguments in a way of their own."""

        def arguments(index: int) -> str:
            rules = kind(f"arguments_{index}", self.schema(index))
            text = rules.arguments()
            self.rules |= rules.rules
            self.schemas |= rules.parts
            return text

        return arguments


class CallForm(ABC):
    """One form: ``marks`` are what it is written with that may be special tokens, ``told`` finds it in a template,
    ``parser`` reads answers, whole and as they grow, and ``calls`` writes the rule of calls that are forced."""

    marks: tuple[str, ...] = ()
    told = re.compile(r"\Z.")
    parser: Callable[..., Reader] = ToolParser
    whole = False
    """The grammar begins with the thoughts, not behind them."""

    @abstractmethod
    def calls(self, rules: CallRules) -> str: ...

    def start(self, rules: CallRules, answer: str) -> str:
        """The rule of answers: calls, or an ``answer`` without any."""
        return f"{answer} | calls" if answer else "calls"


class HermesForm(CallForm):
    marks = (OPENING, CLOSING)

    def calls(self, rules: CallRules) -> str:
        functions = rules.functions(lambda name: quoted(f'{json.dumps(name)}, "arguments": '))
        begun, ended = quoted('\n{"name": '), quoted("}\n")
        rules.rules["call"] = f"{rules.mark(OPENING)} {begun} {functions} {ended} {rules.mark(CLOSING)}"
        return rules.repeated("call", quoted("\n"))


class LlamaForm(CallForm):
    """Llama 3 makes one call at a time."""

    marks = (PYTHON_TAG,)
    told = re.compile(r'(?s)\A(?!.*<tool_call>).*("name\\?": [^\n]{0,80}"parameters\\?":|<\|python_tag\|>)')

    def calls(self, rules: CallRules) -> str:
        begun = quoted('{"name": ')
        functions = rules.functions(lambda name: quoted(f'{json.dumps(name)}, "parameters": '))
        return f"{begun} {functions} {quoted('}')}"


FUNCTION = "<function="
XML_CALL = re.compile(r"\s*<function=([^>\s]+)\s*>(.*)</function>\s*", re.S)
XML_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)\s*>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.S)


class EnclosedParser(ToolParser, ABC):
    """Reads calls that are told once they are whole: up to ``closing``, which an answer that is cut off may lack."""

    closing = CLOSING

    @abstractmethod
    def calls_of(self, text: str) -> list[tuple[str, str]] | None:
        """Names and arguments (JSON); None: it is something else."""

    def _mine(self, begun: str) -> bool:
        """Whether what ``begun`` is in this form."""
        return self._marker.strip() == self.openings[-1]

    def _read_head(self) -> bool:
        if not self._mine(self._held.lstrip()):
            return super()._read_head()
        at = self._held.find(self.closing, self._scanned)
        if at < 0 and not self._last:
            self._scanned = max(0, len(self._held) - len(self.closing))
            return False
        calls = self.calls_of(self._held if at < 0 else self._held[:at])
        self._scanned = 0
        if calls is None:
            return self._release(len(self._held) if at < 0 else at)
        self._held = "" if at < 0 else self._held[at + len(self.closing) :]
        return self._emit_calls(calls, self._read_closing)


class XmlParser(EnclosedParser):
    """Qwen 3.5's. Values are texts where the function's schema says so, or says nothing."""

    openings = (PYTHON_TAG, OPENING)

    def _mine(self, begun: str) -> bool:
        maybe = begun.startswith(FUNCTION) or (FUNCTION.startswith(begun) and not self._last)
        return maybe and super()._mine(begun)

    def calls_of(self, text: str) -> list[tuple[str, str]] | None:
        call = XML_CALL.fullmatch(text)
        if call is None:
            return None
        schema = self.schemas.get(call[1]) or {}
        values: dict[str, Any] = {}
        at = 0
        while parameter := XML_PARAMETER.match(call[2], at):
            at = parameter.end()
            text = parameter[2].removeprefix("\n").removesuffix("\n")
            values[parameter[1]] = typed(text, properties_of(schema).get(parameter[1], {"type": "string"}), schema)
        if call[2][at:].strip():
            return None
        return [(call[1], json.dumps(values, ensure_ascii=False))]


class XmlRules(SpelledRules):
    """Qwen 3.5's parameters: a text stands as it is, anything else is JSON."""

    form = "Qwen 3.5"
    END = "\n</parameter>\n"
    NEVER = ("</parameter>", "<parameter=", CLOSING)

    def _pairs(self, schema: dict[str, Any], key_of: Callable[[str], str] | None = None) -> str:
        pairs = []
        for key, each, needed in self._properties(schema):
            if not re.fullmatch(r"[^>\s]+", key):
                raise self._refused(f"with a parameter called {json.dumps(key)}")
            pair = f"{quoted(f'<parameter={key}>' + chr(10))} {self._value(each)}"
            pairs.append(pair if needed else f"({pair})?")
        return " ".join(pairs)

    def _value(self, schema: Any) -> str:
        """A value and the end of its parameter. Of a schema that permits texts, what is none is one."""
        simple = alternatives(schema, self.schema)
        free = [one for one in simple if literals_of(one) is None]
        texts = [one for one in free if one.get("type", "string") == "string"]
        options = [
            quoted(self._checked(written(value)) + self.END) for one in simple for value in literals_of(one) or ()
        ]
        for one in texts:
            self._check(one, "type", "minLength", "maxLength", "pattern")
            options.append(self._terminal(f"{free_text(one, *self.NEVER)} {quoted(self.END)}"))
        homes: dict[str, Any] = {key: self.schema[key] for key in ("$defs", "definitions") if key in self.schema}
        for one in free:
            if one.get("type") in ("boolean", "null") and not (texts and one["type"] == "boolean"):
                options.append(f"{self._node(one)} {quoted(self.END)}")
            elif not texts:
                options.append(f"{self._named({**homes, **one})} {quoted(self.END)}")
        return either(options)

    def _checked(self, text: str) -> str:
        if any(mark in text for mark in self.NEVER):
            raise self._refused(f"with the value {json.dumps(text)[:60]}")
        return text


GEMMA_OPENING, GEMMA_CLOSING = "<|tool_call>", "<tool_call|>"
GEMMA_CALL = re.compile(r"\s*call:\s*([^\s{]+)\s*(?={)")


class GemmaParser(EnclosedParser):
    openings = (*ToolParser.openings, GEMMA_OPENING)
    closing = GEMMA_CLOSING

    def calls_of(self, text: str) -> list[tuple[str, str]] | None:
        head = GEMMA_CALL.match(text)
        if head is None:
            return None
        try:
            return [(head[1], json.dumps(gemma_value(text[head.end() :]), ensure_ascii=False))]
        except (ValueError, RecursionError):
            return None


class GemmaRules(SpelledRules):
    """Gemma 4's arguments: texts between quotes of their own, keys without quotes and by the alphabet."""

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
        never = GEMMA_QUOTE, GEMMA_CLOSING
        if self.quote.startswith("<["):  # a special token is in no text
            return f"{self.quote} {self._terminal(free_text(schema, *never[1:]))} {self.quote}"
        return self._terminal(f"{self.quote} {free_text(schema, *never)} {self.quote}")

    def _text(self, value: str) -> str:
        if GEMMA_QUOTE in value or GEMMA_CLOSING in value:
            raise self._refused(f"with the value {json.dumps(value)[:60]}")
        return f"{self.quote} {quoted(value)} {self.quote}"


class GemmaForm(CallForm):
    marks = (GEMMA_OPENING, GEMMA_CLOSING, GEMMA_QUOTE)
    told = re.compile(r"<\|tool_call>")
    parser = GemmaParser

    def calls(self, rules: CallRules) -> str:
        quote = rules.mark(GEMMA_QUOTE)
        arguments = rules.spelled(lambda name, schema: GemmaRules(name, schema, quote))
        functions = rules.functions(lambda name: quoted(f"call:{name}{{"), arguments)
        rules.rules["call"] = f"{rules.mark(GEMMA_OPENING)} {functions} {quoted('}')} {rules.mark(GEMMA_CLOSING)}"
        return rules.repeated("call")


class QwenForm(CallForm):
    marks = (OPENING, CLOSING)
    told = re.compile(f"(?s){OPENING}.*{FUNCTION}")
    parser = XmlParser

    def calls(self, rules: CallRules) -> str:
        functions = rules.functions(lambda name: quoted(f"\n{FUNCTION}{name}>\n"), rules.spelled(XmlRules))
        ended = quoted("</function>\n")
        rules.rules["call"] = f"{rules.mark(OPENING)} {functions} {ended} {rules.mark(CLOSING)}"
        return rules.repeated("call", quoted("\n"))


MISTRAL_OPENING = "[TOOL_CALLS]"
MISTRAL_HEAD = regex.compile(r"\s*([\w.-]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?={)")


class MistralParser(ToolParser):
    openings = (*ToolParser.openings, MISTRAL_OPENING)

    def _read_head(self) -> bool:
        """A function's name and its arguments, which are JSON."""
        if self._marker.strip() != MISTRAL_OPENING or self._held.lstrip().startswith(("[", "{")):
            return super()._read_head()
        head = MISTRAL_HEAD.match(self._held, partial=not self._last)
        if head is None:
            return self._release(0)
        if head.partial:
            return False
        self._held = self._held[head.end() :]
        self._start(head[1])
        self._brackets, self._step = Brackets(), self._read_only_arguments
        return True

    def _read_only_arguments(self) -> bool:
        """Arguments with which a call ends."""
        read = self._read_arguments()
        self._step = self._read_closing if read else self._read_only_arguments
        return read


class MistralForm(CallForm):
    marks = (MISTRAL_OPENING, "[ARGS]", "[CALL_ID]")
    told = re.compile(r"(?s)\A(?=.*\[TOOL_CALLS\]).*\[ARGS\]")
    parser = MistralParser

    def calls(self, rules: CallRules) -> str:
        identity, arguments = map(rules.mark, ("[CALL_ID]", "[ARGS]"))
        functions = rules.functions(lambda name: f"{quoted(name)} ({identity} /[a-zA-Z0-9]{{9}}/)? {arguments}")
        rules.rules["call"] = f"{rules.mark(MISTRAL_OPENING)} {functions}"
        return rules.repeated("call")


class MistralListForm(MistralForm):
    """Of the models up to Nemo."""

    told = re.compile(r"\[TOOL_CALLS\]")

    def calls(self, rules: CallRules) -> str:
        functions = rules.functions(lambda name: quoted(f'{json.dumps(name)}, "arguments": '))
        begun, identity = quoted('{"name": '), quoted(', "id": ')
        rules.rules["call"] = f'{begun} {functions} ({identity} /"[a-zA-Z0-9]{{9}}"/)? {quoted("}")}'
        return f'{rules.mark(MISTRAL_OPENING)} "[" {rules.repeated("call", quoted(", "))} "]"'


PYTHON_HEAD = re.compile(r"\[\s*([A-Za-z_][\w.-]*)\(")
BEGUN_PYTHON = re.compile(r"\[\s*(?:([A-Za-z_][\w.-]*))?")


class PythonParser(ToolParser):
    """Llama 4's."""

    openings = (*ToolParser.openings, "<|python_start|>")
    closings = (*ToolParser.closings, "<|python_end|>")
    unmarked = "{["

    def _read_head(self) -> bool:
        if not self._held.lstrip().startswith("[") or self._marker.strip() not in ("", self.openings[-1]):
            return super()._read_head()
        self._brackets, self._scanned = Brackets(brackets=("[({", "])}"), quotes="\"'"), 0
        return self._read_pythonic()

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


class Lfm2Parser(PythonParser):
    openings = (*ToolParser.openings, "<|tool_call_start|>")
    closings = (*ToolParser.closings, "<|tool_call_end|>")


PLAIN = r"[^'\\\x00-\x1f]*"
"""What may stand between single quotes as it is."""


class PythonRules(SpelledRules):
    """Llama 4's arguments: Python's, by their names. Texts are quoted as in JSON, or by single quotes."""

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


class PythonicForm(CallForm):
    marks = ("<|python_start|>", "<|python_end|>")
    told = re.compile(r"\[\w*func\w*\(\w+=|\{\{-? *'\[' *\}\}.{0,200}'\('", re.S)
    parser = PythonParser

    def calls(self, rules: CallRules) -> str:
        for tool in rules.tools:
            if not all(part.isidentifier() and not keyword.iskeyword(part) for part in tool.function.name.split("-")):
                raise ValueError(f"a call in Llama 4's form cannot be forced of the function {tool.function.name}")
        functions = rules.functions(lambda name: quoted(f"{name}("), rules.spelled(PythonRules))
        rules.rules["call"] = f'{functions} ")"'
        return f'"[" {rules.repeated("call", quoted(", "))} "]"'


class Lfm2Form(PythonicForm):
    marks = ("<|tool_call_start|>", "<|tool_call_end|>")
    told = re.compile(r"<\|tool_(?:call|list)_start\|>")
    parser = Lfm2Parser

    def calls(self, rules: CallRules) -> str:
        opening, closing = map(rules.mark, self.marks)
        return f"{opening} {super().calls(rules)} {closing}"


MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
HEADER = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
BEGUN_HEADER = ("<|start|>", "<|channel|>", "assistant", " to=")


class Channels:
    """gpt-oss's messages, with a header that names a channel. Those of the channel ``analysis`` are thoughts, those to
    a function of ``names`` are calls, of which all but the first ``most`` are dropped; everything else is text, unless
    it must be calls (``silent``)."""

    def __init__(
        self, names: Collection[str] = (), most: int | None = None, *, silent: bool = False, fenced: bool = False
    ) -> None:
        self.names = names
        self.most = most
        self.silent = silent
        self.calls: list[ParsedCall] = []
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
        elif text and self._channel == "analysis":
            pieces.append(Piece(text, reasoning=True))
        elif text and not self.silent and self._channel != "dropped":
            pieces.append(Piece(text))


class HarmonyForm(CallForm):
    """gpt-oss makes one call at a time. Its thoughts are a message of their own, before that of the call."""

    marks = ("<|channel|>", MESSAGE, *ENDS, "<|constrain|>")
    told = re.compile(r"<\|channel\|>")
    parser = Channels
    whole = True

    def calls(self, rules: CallRules) -> str:
        channel, message, kind = map(rules.mark, ("<|channel|>", MESSAGE, "<|constrain|>"))

        def begin(name: str) -> str:
            to = f" to=functions.{name}"
            first, last = f"{channel} {quoted('commentary' + to)}", f"{quoted(to)} {channel} {quoted('commentary')}"
            return f'({first} | {last}) (" " {kind}? "json")? {message}'

        return rules.functions(begin)

    def start(self, rules: CallRules, answer: str) -> str:
        channel, message, end, start = map(rules.mark, ("<|channel|>", MESSAGE, *ENDS[:1], *ENDS[-1:]))
        if ENDS[0] in rules.special:
            rules.rules["thought"] = f"/(?s:.*)/ {end}"
        else:
            rules.rules["thought"] = "THOUGHT"
            rules.rules["THOUGHT"] = f"{free_text({}, ENDS[0])} {end}"
        before = f'({channel} "analysis" {message} thought {start} "assistant")?'
        return f'{before} ({channel} "final" {message} {answer} | calls)' if answer else f"{before} calls"


HERMES, LLAMA, QWEN, GEMMA = HermesForm(), LlamaForm(), QwenForm(), GemmaForm()
MISTRAL, MISTRAL_LIST, PYTHONIC, LFM2, HARMONY = (
    MistralForm(), MistralListForm(), PythonicForm(), Lfm2Form(), HarmonyForm()
)  # fmt: skip
FORMS: tuple[CallForm, ...] = (GEMMA, MISTRAL, MISTRAL_LIST, HARMONY, LFM2, QWEN, PYTHONIC, LLAMA, HERMES)
"""In the order in which a template is searched for them."""


def call_form(tokenizer: Any, chat_template: str | None = None) -> CallForm:
    """The form of calls that the prompt asks for, by what a template writes or tells of; those that say nothing are
    taken for Hermes'."""
    with library("the chat template cannot be used", RequestError):  # one of several may have no name
        template = tokenizer.get_chat_template(chat_template, [{}])
    told = (form for form in FORMS if form.told.search(template))
    return next(told, HERMES) if knows_tools(template) else HERMES


def required_shape(
    body: ChatRequest, form: CallForm, special: Mapping[str, int] | None = None
) -> StructuredOutputsParams | None:
    """The grammar of a request with tools; None: the model is free to call or not. ``special`` are the markers of
    calls that are special tokens, with their ids.

    ``required`` or a named function permits calls alone. Under ``auto`` a ``response_format`` binds what is no call.
    Raises ConfigError for other structured output beside tools, RequestError for a schema that cannot be written so.
    """
    asked = body.structured()
    if asked is not None and (body.response_format is None or body.response_format.type == "text"):
        raise ConfigError("structured_outputs and guided_* exclude tools: send response_format, or tool_choice 'none'")
    choice = body.tool_choice
    tools = body.offered()
    free = choice in (None, "auto")
    if free and asked is None:
        return None
    if isinstance(choice, Chosen):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    rules = CallRules(tools, special or {}, several=body.parallel_tool_calls and not isinstance(choice, Chosen))
    if free and asked is not None:
        rules.schemas["answer"] = _as_object(json.loads(asked.key[1]))
    try:
        rules.rules["calls"] = form.calls(rules)
        start = form.start(rules, "@answer" if free else "")
    except ValueError as error:
        raise RequestError(f"tools: {error}", param="tools") from None
    text = "\n".join(f"{name}: {rule}" for name, rule in {"start": start, **rules.rules}.items())
    return StructuredOutputsParams(grammar=text, schemas=rules.schemas, whole=form.whole)


def _as_object(schema: dict[str, Any] | bool) -> dict[str, Any]:
    """A schema that is true or false, which llguidance does not take; nothing meets the latter."""
    if schema is False:
        raise ConfigError("the schema of response_format is false, which no answer can meet")
    return {} if schema is True else schema

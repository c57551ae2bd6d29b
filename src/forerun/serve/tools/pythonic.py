"""Lists of calls as in Python.

- Llama 4: ``[NAME(KEY="TEXT", KEY=3)]``, with or without ``<|python_start|>``
- LFM2: ``<|tool_call_start|>[NAME(KEY="TEXT", KEY=3)]<|tool_call_end|>``
"""

from __future__ import annotations

import json
import re
from typing import Any

from forerun.engine.schemas import SpelledRules, either, free_text, quoted
from forerun.serve.tools.base import Calls, Reader, ToolParser, WholeParser, as_text
from forerun.serve.tools.grammar import CallGrammar, ToolFormat, formats

HEAD = re.compile(r"\[\s*(?:([A-Za-z_][\w.-]*)(\()?)?")
NAME = re.compile(r"[A-Za-z_][\w.-]*")
KEY = re.compile(r"""[^\s=,:()\[\]{}'"]+(?=\s*=)""")


class PythonReader(Reader):
    """Reads calls with keyword arguments. Any name may be a keyword, also one of Python's."""

    def value(self) -> Any:
        if not self.take("("):
            return super().value()
        values = self.items(")", self.value)
        before = self.text[: self.position - 1].rstrip()
        return values[0] if len(values) == 1 and not before.endswith(",") else values

    def argument(self) -> tuple[str, Any]:
        if (key := self.match(KEY)) is None:
            self.fail()
        self.expect("=")
        return key[0], self.value()

    def call(self) -> tuple[str, str]:
        if (name := self.match(NAME)) is None:
            self.fail()
        self.expect("(")
        return name[0], as_text(dict(self.items(")", self.argument)))


class PythonParser(WholeParser):
    """Parses a list of calls, of which the first names a known function. Between markers, there may be JSON."""

    start_markers = (*ToolParser.start_markers, "<|python_start|>")
    end_markers = (*ToolParser.end_markers, "<|python_end|>")
    unmarked = "{["
    closing = "]"

    def _read_head(self) -> bool:
        text, marker = self._buffer.lstrip(), self._marker.strip()
        head = HEAD.match(text)
        if head is None or marker not in ("", self.start_markers[-1]) or (marker and text[head.end() :][:1] == "{"):
            return super()._read_head()
        name, bracket = head[1] or "", head[2]
        if bracket and name in self.functions:
            return self._begin_calls()
        may_grow = not bracket and head.end() == len(text) and not self._last
        if may_grow and any(function.startswith(name) for function in self.functions):
            return False
        return self._reject(0)

    def parse_calls(self, text: str) -> tuple[Calls, int]:
        reader = PythonReader(text)
        reader.expect("[")
        return reader.items("]", reader.call), reader.position


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
        return either([quoted(json.dumps(value)), *([quoted(f"'{value}'")] if re.fullmatch(PLAIN, value) else [])])

    def _name(self, key: str) -> str:
        if not key.isidentifier():
            raise self._refused(f"with a parameter called {json.dumps(key)}")
        return quoted(f"{key}=")


@formats.register("pythonic")
class PythonicFormat(ToolFormat):
    markers = ("<|python_start|>", "<|python_end|>")
    in_template = re.compile(r"\[\w*func\w*\(\w+=|\{\{-? *'\[' *\}\}.{0,200}'\('", re.S)
    rank = 2
    parser = PythonParser

    def calls(self, grammar: CallGrammar) -> str:
        for tool in grammar.tools:
            if not all(part.isidentifier() for part in tool.function.name.split("-")):
                raise ValueError(f"a call in Llama 4's form cannot be forced of the function {tool.function.name}")
        functions = grammar.functions(lambda name: quoted(f"{name}("), PythonRules)
        calls = grammar.calls(f'{functions} ")"', quoted(", "))
        return f'"[" {calls} "]"'


@formats.register("lfm2")
class Lfm2Format(PythonicFormat):
    markers = ("<|tool_call_start|>", "<|tool_call_end|>")
    in_template = re.compile(r"<\|tool_(?:call|list)_start\|>")
    rank = 0
    parser = Lfm2Parser

    def calls(self, grammar: CallGrammar) -> str:
        opening, closing = map(grammar.marker, self.markers)
        return f"{opening} {super().calls(grammar)} {closing}"

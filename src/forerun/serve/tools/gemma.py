"""Gemma 4: ``<|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:3}<tool_call|>``."""

from __future__ import annotations

import json
import re
from types import MappingProxyType
from typing import Any

from forerun.engine.schemas import SpelledRules, free_text, quoted
from forerun.serve.tools.base import Calls, Reader, ToolParser, Unfinished, WholeParser, as_text
from forerun.serve.tools.grammar import CallGrammar, ToolFormat, formats

OPENING, CLOSING, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
CALL = re.compile(r"call:\s*([^\s{]+)\s*{")
KEY = re.compile(r"""[^\s,{}\[\]][^,{}\[\]]*?(?=\s*:\s*(?:<\||["'{\[\d.+-]|true|false|null|True|False|None))""")
"""A bare key. It ends with a colon before a value: it may have colons itself."""
NAME = re.compile(r"[^\s:{}\[\],]+")
"""Keys that grammars write."""


class GemmaReader(Reader):
    """Reads values whose strings stand between quotes of their own, or in JSON's, and whose keys are bare."""

    def string(self) -> str | None:
        if not self.take(QUOTE):
            return super().string()
        end = self.text.find(QUOTE, self.position)
        if end < 0:
            raise Unfinished
        start, self.position = self.position, end + len(QUOTE)
        return self.text[start:end]

    def pair(self) -> tuple[Any, Any]:
        if (key := self.string()) is None:
            if (found := self.match(KEY)) is None:
                self.fail()
            key = found[0]
        self.expect(":")
        return key, self.value()


class GemmaParser(WholeParser):
    start_markers = (*ToolParser.start_markers, OPENING)
    end_markers = (CLOSING, *ToolParser.end_markers)
    closing = CLOSING

    def _read_head(self) -> bool:
        return self._begin_calls() if self._marker.strip() == OPENING else super()._read_head()

    def parse_calls(self, text: str) -> tuple[Calls, int]:
        reader = GemmaReader(text)
        if (head := reader.match(CALL)) is None:
            reader.fail()
        return [(head[1], as_text(dict(reader.items("}", reader.pair))))], reader.position


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
        if not NAME.fullmatch(key) or QUOTE in key:
            raise self._refused(f"with a parameter called {json.dumps(key)}")
        return quoted(f"{key}:")

    def _any_key(self) -> str:
        return "/[A-Za-z_][A-Za-z0-9_]*:/"

    def _string(self, schema: dict[str, Any]) -> str:
        if self.quote.startswith("<["):  # a special token is part of no string
            return f"{self.quote} {self._terminal(free_text(schema, CLOSING))} {self.quote}"
        return self._terminal(f"{self.quote} {free_text(schema, QUOTE, CLOSING)} {self.quote}")

    def _text(self, value: str) -> str:
        if QUOTE in value or CLOSING in value:
            raise self._refused(f"with the value {json.dumps(value)[:60]}")
        return f"{self.quote} {quoted(value)} {self.quote}"


@formats.register("gemma4")
class GemmaFormat(ToolFormat):
    markers = (OPENING, CLOSING, QUOTE)
    in_template = re.compile(r"<\|tool_call>")
    parser = GemmaParser

    def calls(self, grammar: CallGrammar) -> str:
        opening, closing, quote = map(grammar.marker, self.markers)
        functions = grammar.functions(
            lambda name: quoted(f"call:{name}{{"), lambda name, schema: GemmaRules(name, schema, quote)
        )
        end = quoted("}")
        return grammar.calls(f"{opening} {functions} {end} {closing}")

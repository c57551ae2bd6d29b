"""Mistral: ``[TOOL_CALLS]NAME[ARGS]{...}``, up to Nemo ``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``."""

from __future__ import annotations

import re

import regex

from forerun.engine.schemas import quoted
from forerun.serve.tools.base import ToolParser
from forerun.serve.tools.grammar import CallGrammar, ToolFormat, formats

OPENING = "[TOOL_CALLS]"
HEAD = regex.compile(r"\s*([\w.-]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?={)")


class MistralParser(ToolParser):
    """Parses a function's name and its arguments, which are JSON, or a list of JSON objects."""

    start_markers = (*ToolParser.start_markers, OPENING)

    def _read_head(self) -> bool:
        if self._marker.strip() != OPENING or self._buffer.lstrip().startswith(("[", "{")):
            return super()._read_head()
        head = HEAD.match(self._buffer, partial=not self._last)
        if head is None:
            return self._reject(0)
        if head.partial:
            return False
        self._buffer = self._buffer[head.end() :]
        return self._begin_arguments(head[1], enclosed=False)


@formats.register("mistral")
class MistralFormat(ToolFormat):
    markers = (OPENING, "[CALL_ID]", "[ARGS]")
    in_template = re.compile(r"(?s)\A(?=.*\[TOOL_CALLS\]).*\[ARGS\]")
    parser = MistralParser

    def calls(self, grammar: CallGrammar) -> str:
        opening, call_id, arguments = map(grammar.marker, self.markers)
        functions = grammar.functions(lambda name: f"{quoted(name)} ({call_id} /[a-zA-Z0-9]{{9}}/)? {arguments}")
        return grammar.calls(f"{opening} {functions}")


@formats.register("mistral_list")
class MistralListFormat(MistralFormat):
    """The format of models up to Nemo."""

    in_template = re.compile(r"\[TOOL_CALLS\]")
    rank = 1

    def calls(self, grammar: CallGrammar) -> str:
        begin, end, call_id = quoted('{"name": '), quoted("}"), quoted(', "id": ')
        functions = grammar.json_functions("arguments")
        calls = grammar.calls(f'{begin} {functions} ({call_id} /"[a-zA-Z0-9]{{9}}"/)? {end}', quoted(", "))
        return f'{grammar.marker(OPENING)} "[" {calls} "]"'

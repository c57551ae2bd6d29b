"""Hermes models: ``<tool_call>{"name": NAME, "arguments": {...}}</tool_call>``."""

from __future__ import annotations

from forerun.engine.schemas import quoted
from forerun.models.text.chat import CLOSING, OPENING
from forerun.serve.tools.grammar import CallGrammar, ToolFormat, formats


@formats.register("hermes")
class HermesFormat(ToolFormat):
    markers = (OPENING, CLOSING)

    def calls(self, grammar: CallGrammar) -> str:
        opening, closing = map(grammar.marker, self.markers)
        begin, end = quoted('\n{"name": '), quoted("}\n")
        return grammar.calls(f"{opening} {begin} {grammar.json_functions('arguments')} {end} {closing}", quoted("\n"))

"""Llama 3: ``{"name": NAME, "parameters": {...}}``."""

from __future__ import annotations

import re

from forerun.engine.schemas import quoted
from forerun.models.text.chat import PYTHON_TAG
from forerun.serve.tools.grammar import CallGrammar, ToolFormat, formats


@formats.register("llama3")
class LlamaFormat(ToolFormat):
    """Llama 3 makes one call at a time."""

    markers = (PYTHON_TAG,)
    rank = 3
    in_template = re.compile(r'(?s)\A(?!.*<tool_call>).*("name\\?": [^\n]{0,80}"parameters\\?":|<\|python_tag\|>)')

    def calls(self, grammar: CallGrammar) -> str:
        begin, end = quoted('{"name": '), quoted("}")
        return f"{begin} {grammar.json_functions('parameters')} {end}"

"""Formats of tool calls, and the grammars that force calls in them."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forerun.core.errors import ConfigError, RequestError
from forerun.core.registry import Registry
from forerun.engine.schemas import SpelledRules, either, quoted
from forerun.sampling.params import StructuredOutputsParams
from forerun.serve.schema import ChatRequest, Chosen, Tool
from forerun.serve.tools.base import ToolParser

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
    """One format of calls: the parser that reads it and the grammar that forces it."""

    markers: tuple[str, ...] = ()
    """The texts in it that may be special tokens."""
    in_template = re.compile(r"\Z.")
    """Found in the chat templates of models that use it."""
    rank = 0
    """Where several formats are found in a template, the one of the lowest rank is meant."""
    parser: type[ToolParser] = ToolParser
    grammar_has_reasoning = False
    """Whether the grammar begins with the reasoning, not after it."""

    @abstractmethod
    def calls(self, grammar: CallGrammar) -> str:
        """Returns the rule of calls, and adds the rules that it refers to."""

    def answer(self, grammar: CallGrammar, text: str) -> str:
        """Returns the rule of a whole answer: calls or, if it is not empty, the rule ``text`` instead of them."""
        return f"{text} | calls" if text else "calls"


formats: Registry[ToolFormat] = Registry(
    "tool format",
    "forerun.tool_formats",
    "forerun.serve.tools",
    ("gemma4", "harmony", "hermes", "lfm2", "llama3", "mistral", "mistral_list", "pythonic", "qwen3_coder"),
)


def tool_grammar(
    body: ChatRequest, format: ToolFormat, special: Mapping[str, int] | None = None
) -> StructuredOutputsParams | None:
    """Returns the grammar of an answer to a request with tools; None if the model is free to call or not.

    ``required`` or a named function permits calls alone. Under ``auto``, ``response_format`` applies to other answers.

    Args:
        body: the request.
        format: how calls are written.
        special: the ids of markers of calls that are special tokens.

    Raises:
        ConfigError: it asks for other structured output beside tools.
        RequestError: a schema cannot be written in this format.
    """
    requested = body.structured()
    if body.structured_outputs is not None:
        raise ConfigError("structured_outputs excludes tools: send response_format, or tool_choice 'none'")
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
            raise ConfigError("the schema of response_format is false, which no answer can meet")
        grammar.schemas["answer"] = {} if schema is True else schema  # llguidance takes no true
    try:
        grammar.rules["calls"] = format.calls(grammar)
        start = format.answer(grammar, "@answer" if free else "")
    except ValueError as error:
        raise RequestError(f"tools: {error}", param="tools") from None
    lark = "\n".join(f"{name}: {rule}" for name, rule in {"start": start, **grammar.rules}.items())
    return StructuredOutputsParams(grammar=lark, schemas=grammar.schemas, whole=format.grammar_has_reasoning)

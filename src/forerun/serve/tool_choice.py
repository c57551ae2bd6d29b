"""What an answer must look like where a request has tools: calls that ``tool_choice`` asks for always name a function
and meet its schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from forerun.core.errors import ConfigError
from forerun.models.chat import CLOSING, MARKERS, OPENING, CallForm
from forerun.sampling.params import StructuredOutputsParams
from forerun.serve.messages import Chosen, Tool
from forerun.serve.schema import ChatRequest

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

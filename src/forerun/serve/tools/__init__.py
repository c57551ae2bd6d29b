"""Formats of tool calls, one in each module. Importing this package fills the registry."""

from __future__ import annotations

from typing import Any

from forerun.core.errors import RequestError
from forerun.models.files.checkpoint import library
from forerun.models.text.chat import knows_tools
from forerun.serve.tools import gemma, harmony, hermes, llama, mistral, pythonic, qwen  # noqa: F401
from forerun.serve.tools.grammar import ToolFormat, formats, tool_grammar

__all__ = ["ToolFormat", "format_of", "formats", "tool_grammar"]


def format_of(tokenizer: Any, chat_template: str | None = None) -> ToolFormat:
    """Returns the format that the chat template asks for or writes; Hermes' if it says nothing of tools."""
    with library("the chat template cannot be used", RequestError):  # one of several may have no name
        template = tokenizer.get_chat_template(chat_template, [{}])
    known = sorted(map(formats.__getitem__, formats), key=lambda each: each.rank) if knows_tools(template) else []
    return next((each for each in known if each.in_template.search(template)), formats["hermes"])()

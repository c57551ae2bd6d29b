"""Conversations as text, by a tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from jinja2 import TemplateError

from forerun.core.errors import RequestError

Message = Mapping[str, Any]


def render_chat(
    tokenizer: Any,
    messages: Seq[Message],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The prompt of a conversation: its messages, in order, with ``role`` and ``content``.

    ``chat_template`` replaces the tokenizer's; it runs in transformers' sandbox. ``continue_final_message`` leaves the
    last message open, for the model to go on with it. Raises RequestError if there is no template, or it refuses the
    messages.
    """
    if chat_template is None and getattr(tokenizer, "chat_template", None) is None:
        raise RequestError("this model has no chat template: give chat_template, or call generate with a prompt")
    if add_generation_prompt and continue_final_message:
        raise RequestError("continue_final_message continues the last message: set add_generation_prompt=False with it")
    try:
        return tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(chat_template_kwargs or {}),
        )
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RequestError(f"the chat template refuses these messages: {reason}", param="messages") from error


def conversations(messages: Any) -> list[list[Message]]:
    """One conversation or several, as several. Raises RequestError for anything else than lists of messages."""
    if not isinstance(messages, Seq) or isinstance(messages, (str, bytes)):
        raise RequestError(f"messages are a list of mappings with role and content, not {_kind(messages)}")
    several = bool(messages) and not isinstance(messages[0], Mapping)
    found = list(messages) if several else [messages]
    for conversation in found:
        if not isinstance(conversation, Seq) or isinstance(conversation, (str, bytes)) or not conversation:
            raise RequestError(f"a conversation is a list of at least one message, not {_kind(conversation)}")
        for message in conversation:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
                raise RequestError(f"a message is a mapping with role and content, not {_kind(message)}")
    return [list(conversation) for conversation in found]


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"one with {', '.join(map(str, value)) or 'nothing'}"
    return "an empty list" if value == [] else type(value).__name__

"""Conversations as text, by a tokenizer's chat template."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from forerun.core.errors import RequestError, shown
from forerun.models.checkpoint import library

log = logging.getLogger("forerun")

Message = Mapping[str, Any]

DEEPEST = 64
"""Objects and lists within each other in a tool's schema or a call's arguments."""
NO_TEXTS = ("image", "image_url", "input_image", "audio", "audio_url", "input_audio", "video", "video_url", "file")
"""Types of parts that are no text."""
OPENING, CLOSING, PYTHON_TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"
EXPLANATION = """You can call functions. Here they are, one in each line, with their parameters as JSON schemas:
<tools>
{tools}
</tools>
To call a function, answer with nothing but its name and its arguments as a JSON object between <tool_call> and \
</tool_call>, like this:
<tool_call>
{{"name": "function_name", "arguments": {{"parameter": "value"}}}}
</tool_call>
The function's result comes between <tool_response> and </tool_response>. Say then in your own words what it means."""
"""For a template without words of its own: the form of the Hermes models
(https://github.com/NousResearch/Hermes-Function-Calling)."""


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The prompt of a conversation: its messages, in order, with ``role`` and ``content``.

    ``tools`` are OpenAI's, and so are an assistant's ``tool_calls`` and the ``tool_call_id`` of a message of the role
    ``tool``. A template that does not know of them gets them as text, in the form of the Hermes models.
    ``chat_template`` replaces the tokenizer's; it runs in transformers' sandbox. ``continue_final_message`` leaves the
    last message open, for the model to go on with it. Raises RequestError if there is no template, or it refuses the
    messages, and for calls and tools that are none.
    """
    if chat_template is None and getattr(tokenizer, "chat_template", None) is None:
        raise RequestError("this model has no chat template: give chat_template, or call generate with a prompt")
    if add_generation_prompt and continue_final_message:
        raise RequestError("continue_final_message continues the last message: set add_generation_prompt=False with it")
    tools = _checked_tools(tools or ())
    turns = _with_parsed_calls(messages)
    refused = partial(RequestError, param="messages")
    with library("the chat template refuses these messages", refused):  # a template may divide by zero
        template = tokenizer.get_chat_template(chat_template, tools or None)
        if "developer" not in template:
            turns = _developer_as_system(turns)
        if "tool_calls" not in template:
            turns = _calls_as_text(turns)
        if tools and not knows_tools(template):
            turns, tools = _explained(turns, tools), []
        render = partial(
            tokenizer.apply_chat_template,
            tools=tools or None,
            chat_template=chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(chat_template_kwargs or {}),
        )
        text = render(turns)
        _check_all_there(turns, text, render)
        return text


def _check_all_there(turns: Sequence[dict[str, Any]], text: str, render: Callable[[Sequence[Message]], str]) -> None:
    """Raise RequestError for a message that the template leaves out. What an assistant says beside its calls may be
    missing, which is logged, and so may what a template changes on purpose, such as thoughts."""
    marks, start = {}, 0
    for index, turn in enumerate(turns):
        for part in map(str.strip, _texts(turn)):
            result = text.find(part, start)
            if result < 0:
                marks[index] = f"forerun-{index}-left-out"
            else:
                start = result + len(part)
    if not marks:
        return
    marked = render([_with_text(turn, marks[index]) if index in marks else turn for index, turn in enumerate(turns)])
    for index, mark in marks.items():
        if mark not in marked.lower():
            left = f"the chat template leaves out what message {index}, of the role {turns[index]['role']}, says"
            if not turns[index].get("tool_calls"):
                raise RequestError(f"{left}: say it in another message", param=f"messages.{index}.content")
            log.warning("%s beside its calls", left)


def _with_text(turn: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A message that says something else in the same form."""
    return {**turn, "content": [{"type": "text", "text": text}] if isinstance(turn["content"], list) else text}


def knows_tools(template: str) -> bool:
    return re.search(r"\btools\b", template) is not None


def _checked_tools(tools: Any) -> list[dict[str, Any]]:
    """Copies of the tools. Raises RequestError for what has no function with a name, and for schemas too deep."""
    if isinstance(tools, (str, bytes)) or not isinstance(tools, Sequence):
        raise RequestError(f"tools are a list of mappings, not {_kind(tools)}", param="tools")
    for index, tool in enumerate(tools):
        function = _function(tool, "a tool", f"tools.{index}")
        _check_depth(function.get("parameters"), f"tools.{index}.function.parameters")
    return [dict(tool) for tool in tools]


def _function(given: Any, what: str, param: str) -> Mapping[str, Any]:
    """That of a tool or a call. Raises RequestError where there is none with a name."""
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{what} is a mapping with a function, which has a name", param=param)
    return function


def _check_depth(value: Any, param: str) -> None:
    level = [value]
    for _ in range(DEEPEST + 1):
        inner: list[Any] = []
        for item in level:
            inner.extend(item.values() if isinstance(item, Mapping) else item if isinstance(item, list) else ())
        if not inner:
            return
        level = inner
    raise RequestError(f"{param}: more than {DEEPEST} objects and lists within each other", param=param)


def _with_parsed_calls(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as templates expect them: arguments as mappings, content that is text, a tool's name beside its
    answer. Raises RequestError for arguments that are not a JSON object."""
    names: dict[Any, Any] = {}
    turns = []
    for index, message in enumerate(messages):
        turn = dict(message)
        if turn.get("tool_calls"):
            turn["tool_calls"] = _parsed(turn["tool_calls"], f"messages.{index}.tool_calls")
            turn["content"] = turn.get("content") or ""
            names |= {call.get("id"): call["function"]["name"] for call in turn["tool_calls"]}
        if turn["role"] == "tool" and turn.get("tool_call_id") in names:
            turn.setdefault("name", names[turn["tool_call_id"]])
        turns.append(turn)
    return turns


def _parsed(calls: Any, param: str) -> list[dict[str, Any]]:
    result = []
    for index, call in enumerate(calls if isinstance(calls, list) else [calls]):
        where = f"{param}.{index}.function"
        function = _function(call, "a tool call", where)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _loaded(arguments)
        if not isinstance(arguments, Mapping):
            message = f"{where}.arguments: must be a JSON object, as text"
            raise RequestError(message, param=f"{where}.arguments")
        _check_depth(arguments, f"{where}.arguments")
        result.append({**call, "function": {**function, "arguments": arguments}})
    return result


def _loaded(text: str) -> Any:
    """What a JSON text says; None where it is none."""
    try:
        return json.loads(text or "{}", parse_constant=_refused)
    except (ValueError, RecursionError):
        return None


def _refused(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _calls_as_text(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls within the assistant's text, and a tool's answers as one message of the user."""
    result: list[dict[str, Any]] = []
    answers = False
    """Whether the last message is made of answers."""
    for turn in turns:
        if turn["role"] == "tool":
            text = f"<tool_response>\n{_text(turn)}\n</tool_response>"
            if answers:
                result[-1]["content"] += "\n" + text
            else:
                result.append({"role": "user", "content": text})
        elif turn.get("tool_calls"):
            calls = [written(call["function"]) for call in turn["tool_calls"]]
            text = "\n".join([_text(turn), *calls] if turn["content"] else calls)
            result.append({"role": turn["role"], "content": text})
        else:
            result.append(turn)
        answers = turn["role"] == "tool"
    return result


def written(function: Mapping[str, Any]) -> str:
    """A call as a Hermes model writes it."""
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"{OPENING}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSING}"


def _explained(turns: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools in the system's message, which comes first."""
    text = EXPLANATION.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
    if turns and turns[0]["role"] in ("system", "developer"):
        first = {**turns[0], "content": f"{_text(turns[0])}\n\n{text}"}
        return [first, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]


def _developer_as_system(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A developer's messages as the system's, which comes first."""
    asked = [turn for turn in turns if turn["role"] == "developer"]
    others = [turn for turn in turns if turn["role"] != "developer"]
    if asked and others and others[0]["role"] == "system":
        asked.insert(0, others.pop(0))
    first = [{**asked[0], "role": "system"}] if asked else []
    for turn in asked[1:]:
        first[0]["content"] = f"{_text(first[0])}\n\n{_text(turn)}"
    return [*first, *others]


def _texts(turn: Mapping[str, Any]) -> list[str]:
    """The texts of a message's content. Raises RequestError for an image or the like, which no model here sees."""
    content = turn.get("content")
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    for part in parts:
        if part.get("type") in NO_TEXTS:
            raise RequestError(f"a message holds {shown(part['type'])}: only texts are read", param="messages")
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in parts if isinstance(part.get("text"), str)]


def _text(turn: Mapping[str, Any]) -> str:
    if not isinstance(turn["content"], str):
        raise RequestError(f"the content of a message of the role {turn['role']} must be text here", param="messages")
    return turn["content"]


def conversations(messages: Any) -> list[list[Message]]:
    """One conversation or several, as several. Raises RequestError for anything else than lists of messages."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise RequestError(f"messages are a list of mappings with role and content, not {_kind(messages)}")
    several = bool(messages) and not isinstance(messages[0], Mapping)
    result = list(messages) if several else [messages]
    for conversation in result:
        if not isinstance(conversation, Sequence) or isinstance(conversation, (str, bytes)) or not conversation:
            raise RequestError(f"a conversation is a list of at least one message, not {_kind(conversation)}")
        for message in conversation:
            known = isinstance(message, Mapping) and isinstance(message.get("role"), str)
            if not known or ("content" not in message and not message.get("tool_calls")):
                raise RequestError(f"a message is a mapping with role and content, not {_kind(message)}")
    return [list(conversation) for conversation in result]


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"one with {', '.join(map(str, value)) or 'nothing'}"
    return "an empty list" if value == [] else type(value).__name__

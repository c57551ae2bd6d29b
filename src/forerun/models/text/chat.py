"""Renders conversations to prompts, by a tokenizer's chat template."""

from __future__ import annotations

import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from forerun.core.errors import RequestError, shown
from forerun.models.files.checkpoint import library

log = logging.getLogger("forerun")

Message = Mapping[str, Any]

MAX_DEPTH = 64
"""Levels of objects and lists in a tool's schema or a call's arguments."""
NOT_TEXT = ("image", "image_url", "input_image", "audio", "audio_url", "input_audio", "video", "video_url", "file")
"""Types of content parts that no model here reads."""
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
"""For a template that does not mention tools: the format of the Hermes models
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
    """Render a conversation, a list of messages with ``role`` and ``content``, to the text of its prompt.

    ``tools``, an assistant's ``tool_calls`` and the ``tool_call_id`` of a message of the role ``tool`` are as in
    OpenAI's API. A template that does not know them gets them as text, in the format of the Hermes models.
    ``chat_template`` replaces the tokenizer's; it runs in transformers' sandbox. ``continue_final_message`` leaves the
    last message open, for the model to continue. Raises RequestError if there is no template, or it refuses the
    messages, and for malformed calls and tools.
    """
    if chat_template is None and getattr(tokenizer, "chat_template", None) is None:
        raise RequestError("this model has no chat template: pass chat_template, or use generate")
    if add_generation_prompt and continue_final_message:
        raise RequestError("continue_final_message continues the last message: set add_generation_prompt=False with it")
    if not isinstance(chat_template_kwargs or {}, Mapping):
        kind = type(chat_template_kwargs).__name__
        raise RequestError(f"chat_template_kwargs is a mapping, not {kind}", param="chat_template_kwargs")
    taken = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters} & set(chat_template_kwargs or ())
    if taken - {"documents"}:
        name = min(taken - {"documents"})
        raise RequestError(f"chat_template_kwargs: {name} is no variable of a template", param="chat_template_kwargs")
    tools = _checked_tools(tools or ())
    messages = _with_parsed_calls(messages)
    refused = partial(RequestError, param="messages")
    with library("the chat template refuses these messages", refused):  # a template may divide by zero
        template = tokenizer.get_chat_template(chat_template, tools or None)
        if "developer" not in template:
            messages = _developer_as_system(messages)
        if "tool_calls" not in template:
            messages = _calls_as_text(messages)
        if tools and not knows_tools(template):
            messages, tools = _with_explanation(messages, tools), []
        render = partial(
            tokenizer.apply_chat_template,
            tools=tools or None,
            chat_template=chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(chat_template_kwargs or {}),
        )
        broken = [text for message in messages for text in _broken_arguments(message)]
        try:
            with library("the chat template refuses these messages", refused):
                text = render(messages)
        except RequestError:
            if not broken:
                raise
            text = ""
        if not all(each in text or json.dumps(each)[1:-1] in text or _dumps(each)[1:-1] in text for each in broken):
            messages = _with_mapped_arguments(messages)  # the template lists parameters
            text = render(messages)
        _check_nothing_omitted(messages, text, render)
        return str(text)


def _check_nothing_omitted(
    messages: Sequence[dict[str, Any]], text: str, render: Callable[[Sequence[Message]], str]
) -> None:
    """Raise RequestError for a message that the template leaves out: one whose text, replaced by a marker, does not
    appear in the prompt. An assistant's text beside its calls may be missing, which is logged."""
    markers, start = {}, 0
    for index, message in enumerate(messages):
        for part in map(str.strip, _texts(message)):
            position = text.find(part, start)
            if position < 0:
                markers[index] = f"forerun-{index}-left-out"
            else:
                start = position + len(part)
    if not markers:
        return
    marked = [dict(message) for message in messages]
    for index, marker in markers.items():
        as_parts = isinstance(marked[index]["content"], list)
        marked[index]["content"] = [{"type": "text", "text": marker}] if as_parts else marker
    prompt = render(marked).lower()
    for index, marker in markers.items():
        if marker not in prompt:
            reason = f"the chat template leaves out what message {index}, of the role {messages[index]['role']}, says"
            if not messages[index].get("tool_calls"):
                raise RequestError(f"{reason}: say it in another message", param=f"messages.{index}.content")
            log.warning("%s beside its calls", reason)


def knows_tools(template: str) -> bool:
    return re.search(r"\btools\b", template) is not None


def _checked_tools(tools: Any) -> list[dict[str, Any]]:
    """Copies of the tools. Raises RequestError for one without a function's name, and for schemas nested too deeply."""
    if isinstance(tools, (str, bytes)) or not isinstance(tools, Sequence):
        raise RequestError(f"tools are a list of mappings, not {_kind(tools)}", param="tools")
    for index, tool in enumerate(tools):
        function = _function(tool, "a tool", f"tools.{index}")
        _check_depth(function.get("parameters"), f"tools.{index}.function.parameters")
    return [dict(tool) for tool in tools]


def _function(item: Any, what: str, param: str) -> Mapping[str, Any]:
    """The function of a tool or a call. Raises RequestError unless there is one with a name."""
    function = item.get("function") if isinstance(item, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{what} is a mapping with a function, which has a name", param=param)
    return function


def _check_depth(value: Any, param: str) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for item in level:
            inner.extend(item.values() if isinstance(item, Mapping) else item if isinstance(item, list) else ())
        if not inner:
            return
        level = inner
    raise RequestError(f"{param}: more than {MAX_DEPTH} objects and lists within each other", param=param)


def _with_parsed_calls(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: arguments as mappings, content as text, a tool's name with its result."""
    names: dict[Any, Any] = {}
    result = []
    for index, original in enumerate(messages):
        message = dict(original)
        if message["role"] == "assistant":
            message["content"] = message.get("content") or ""
        if message.get("tool_calls"):
            message["tool_calls"] = _parsed_calls(message["tool_calls"], f"messages.{index}.tool_calls")
            names |= {call.get("id"): call["function"]["name"] for call in message["tool_calls"]}
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])
        result.append(message)
    return result


def _parsed_calls(calls: Any, param: str) -> list[dict[str, Any]]:
    result = []
    for index, call in enumerate(calls if isinstance(calls, list) else [calls]):
        path = f"{param}.{index}.function"
        function = _function(call, "a tool call", path)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _parsed_arguments(arguments)
        elif isinstance(arguments, Mapping):
            _check_depth(arguments, f"{path}.arguments")
        else:
            raise RequestError(f"{path}.arguments: must be a JSON object, as text", param=f"{path}.arguments")
        result.append({**call, "function": {**function, "arguments": arguments}})
    return result


def _parsed_arguments(text: str) -> Any:
    """A call's arguments, or the text itself if it is no JSON object that a template can write. A model's call may be
    cut off or badly written, and the conversation must go on."""
    try:
        arguments = loads(text or "{}")
        _dumps(arguments).encode()  # raises for half a surrogate pair
        _check_depth(arguments, "arguments")
    except (ValueError, RecursionError, RequestError):
        return text
    return arguments if isinstance(arguments, Mapping) else text


def _broken_arguments(message: Mapping[str, Any]) -> list[str]:
    """The arguments of a message's calls that are no JSON object."""
    given = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
    return [arguments for arguments in given if isinstance(arguments, str)]


def _with_mapped_arguments(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with arguments that are no JSON object as one parameter."""

    def mapped(call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        arguments = {"arguments": arguments} if isinstance(arguments, str) else arguments
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return [
        {**each, "tool_calls": [mapped(call) for call in each["tool_calls"]]} if _broken_arguments(each) else each
        for each in messages
    ]


def loads(text: str) -> Any:
    """A JSON value, with numbers beyond float64 as its largest one: JSON has no infinity. Strings may have raw line
    ends. Raises ValueError."""
    return json.loads(text, strict=False, parse_constant=_refuse, parse_float=lambda each: finite_float(float(each)))


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def finite_float(number: float) -> float:
    return max(-sys.float_info.max, min(sys.float_info.max, number))


def _calls_as_text(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls as part of the assistant's text, and consecutive tool results as one message of the user."""
    result: list[dict[str, Any]] = []
    after_tool = False
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{_text(message)}\n</tool_response>"
            if after_tool:
                result[-1]["content"] += "\n" + text
            else:
                result.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            calls = [_call_as_text(call["function"]) for call in message["tool_calls"]]
            text = "\n".join([_text(message), *calls] if message["content"] else calls)
            result.append({"role": message["role"], "content": text})
        else:
            result.append(message)
        after_tool = message["role"] == "tool"
    return result


def _call_as_text(function: Mapping[str, Any]) -> str:
    """A call in the Hermes format, with arguments that are no JSON as they are."""
    arguments = function["arguments"]
    written = arguments if isinstance(arguments, str) else _dumps(arguments)
    return f'{OPENING}\n{{"name": {_dumps(function["name"])}, "arguments": {written}}}\n{CLOSING}'


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _with_explanation(messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools explained in the system message, which comes first."""
    text = EXPLANATION.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
    if messages and messages[0]["role"] in ("system", "developer"):
        return [{**messages[0], "content": f"{_text(messages[0])}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _developer_as_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The developer's messages joined to the system message, which comes first."""
    system = [message for message in messages if message["role"] == "developer"]
    others = [message for message in messages if message["role"] != "developer"]
    if not system:
        return others
    if others and others[0]["role"] == "system":
        system.insert(0, others.pop(0))
    if len(system) == 1:
        return [{**system[0], "role": "system"}, *others]
    return [{**system[0], "role": "system", "content": "\n\n".join(map(_text, system))}, *others]


def _texts(message: Mapping[str, Any]) -> list[str]:
    """The texts of a message's content. Raises RequestError for images and the like."""
    content = message.get("content")
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    for part in parts:
        if part.get("type") in NOT_TEXT:
            raise RequestError(f"a message holds {shown(part['type'])}: only texts are read", param="messages")
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in parts if isinstance(part.get("text"), str)]


def _text(message: Mapping[str, Any]) -> str:
    if not isinstance(message["content"], str):
        reason = f"the content of a message of the role {message['role']} must be text here"
        raise RequestError(reason, param="messages")
    return message["content"]


def conversations(messages: Any) -> list[list[Message]]:
    """A list of conversations, from one or several. Raises RequestError for anything but lists of messages."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise RequestError(f"messages are a list of mappings with role and content, not {_kind(messages)}")
    several = bool(messages) and not isinstance(messages[0], Mapping)
    result = list(messages) if several else [messages]
    for conversation in result:
        if not isinstance(conversation, Sequence) or isinstance(conversation, (str, bytes)) or not conversation:
            raise RequestError(f"a conversation is a list of at least one message, not {_kind(conversation)}")
        for message in conversation:
            known = isinstance(message, Mapping) and isinstance(message.get("role"), str)
            alone = known and message["role"] == "assistant"  # reasoning or calls without content
            if not known or ("content" not in message and not alone):
                raise RequestError(f"a message is a mapping with role and content, not {_kind(message)}")
    return [list(conversation) for conversation in result]


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"one with {', '.join(map(str, value)) or 'nothing'}"
    return "an empty list" if value == [] else type(value).__name__

"""/v1/responses: its requests, chat answers as its items, whole or as events, and the stored answers."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from itertools import count
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, Tag, TypeAdapter, model_validator

from forerun.engine.stop import LENGTH
from forerun.serve import answers
from forerun.serve.errors import ApiError, converted
from forerun.serve.schema import (
    IGNORED,
    MAX_LOGPROBS,
    MAX_TOOLS,
    MAX_WORD,
    NAMED,
    SESSION,
    TOOL_CHOICES,
    Absent,
    Body,
    CallId,
    ChatRequest,
    Function,
    FunctionName,
    Int,
    Sampled,
    Schema,
    Text,
    ToolMode,
    Word,
    one_of,
    plain_call,
    plain_text,
)
from forerun.serve.stream import ChatReply, Choice
from forerun.serve.tools.base import ParsedCall, Piece

LOGPROBS = "message.output_text.logprobs"
REPEATED = (
    "previous_response_id", "instructions", "max_output_tokens", "max_tool_calls", "parallel_tool_calls",
    "prompt_cache_key", "safety_identifier", "store", "temperature", "top_p", "user",
)  # fmt: skip
"""Fields of a request that its answer repeats."""
FIELDS = {"messages": "input", "prompt": "input", "response_format": "text.format"}
"""What a chat's fields are called here."""


class ContentPart(Body):
    type: Literal["input_text", "output_text"]
    text: Text
    annotations: Absent = None
    logprobs: list[Any] | None = Field(None, description=IGNORED)


Parts = Annotated[Text | Annotated[list[ContentPart], Tag("list")], one_of("a text or a list of text parts")]


class Item(Body):
    """An item of a conversation. Those of an answer may be sent back as they are."""

    id: str | None = Field(None, description=IGNORED)
    status: str | None = Field(None, description=IGNORED)


class InputMessage(Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts
    phase: str | None = Field(None, description=IGNORED)


class InputCall(Item):
    """A function that an answer called."""

    type: Literal["function_call"]
    call_id: CallId
    name: Annotated[Text, Field(min_length=1)]
    arguments: Text = Field(description="a JSON object, as text; another text is shown to the model as it is")
    namespace: FunctionName | None = None
    caller: Absent = None


class InputCallOutput(Item):
    """The result of a function."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Parts
    name: str | None = Field(None, description=IGNORED)
    namespace: str | None = Field(None, description=IGNORED)
    caller: Absent = None


class ReasoningPart(Body):
    type: Literal["reasoning_text"]
    text: Text


class InputReasoning(Item):
    """Reasoning of an earlier answer, for templates that show it."""

    type: Literal["reasoning"]
    summary: list[Any] | None = Field(None, description=IGNORED)
    content: list[ReasoningPart] | None = None
    encrypted_content: str | None = Field(None, description=IGNORED)


def _item_type(item: Any) -> str | None:
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[InputCallOutput, Tag("function_call_output")],
    one_of("a message, a function_call, a function_call_output or a reasoning", _item_type),
]


InputItems = Annotated[list[InputItem], Field(max_length=4096), Tag("list")]


def _messages(items: list[Any]) -> list[dict[str, Any]]:
    """Returns the items as messages of a chat. An assistant's reasoning, text and calls are one message."""
    result: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, InputReasoning) and item.content:
            result.append({"role": "assistant", "content": "", "reasoning_content": plain_text(item.content)})
        elif isinstance(item, InputMessage):
            thought = item.role == "assistant" and bool(result) and "reasoning_content" in result[-1]
            if thought and not result[-1]["content"] and not result[-1].get("tool_calls"):
                result[-1]["content"] = plain_text(item.content)
            else:
                result.append({"role": item.role, "content": plain_text(item.content)})
        elif isinstance(item, InputCallOutput):
            result.append({"role": "tool", "tool_call_id": item.call_id, "content": plain_text(item.output)})
        elif isinstance(item, InputCall):
            if not result or result[-1]["role"] != "assistant":
                result.append({"role": "assistant", "content": ""})
            call = plain_call(item.call_id, qualified(item.namespace, item.name), item.arguments)
            result[-1].setdefault("tool_calls", []).append(call)
    return result


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=64)
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema goes with type 'json_schema', and only with it")
        return self

    def chat(self) -> dict[str, Any]:
        """As chat's ``response_format``."""
        if self.schema_ is None:
            return {"type": self.type}
        about = {"description": self.description, "schema": self.schema_, "strict": self.strict}
        return {"type": self.type, "json_schema": {"name": self.name, **about}}


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Word | None = Field(None, description=NAMED)


class ResponseTool(Function):
    type: Literal["function"]

    def answered(self) -> dict[str, Any]:
        return self.model_dump()


class OtherTool(BaseModel):
    """A tool that OpenAI's servers run, or that is no function; the model is not told of it."""

    model_config = ConfigDict(extra="allow")
    type: str = Field(
        pattern="^[a-z0-9_]{1,64}$", description=NAMED, json_schema_extra={"not": {"enum": ["function", "namespace"]}}
    )


def _tool_kind(tool: Any) -> str | None:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return kind if kind is None or kind in ("function", "namespace") else "other"


PlainTool = Annotated[ResponseTool, Tag("function")] | Annotated[OtherTool, Tag("other")]
TOOL_KINDS = one_of("a tool with a type", _tool_kind)


class NamespaceTool(Body):
    """Functions of one MCP server or plugin. The model knows each as ``NAMESPACE__FUNCTION``; its calls have both
    names apart."""

    type: Literal["namespace"]
    name: FunctionName
    description: Text | None = Field(None, description=NAMED)
    tools: list[Annotated[PlainTool, TOOL_KINDS]] = Field(max_length=MAX_TOOLS)

    def answered(self) -> dict[str, Any]:
        functions = [tool.answered() for tool in self.tools if isinstance(tool, ResponseTool)]
        return {"type": self.type, "name": self.name, "description": self.description or "", "tools": functions}


AnyTool = Annotated[PlainTool | Annotated[NamespaceTool, Tag("namespace")], TOOL_KINDS]


def qualified(namespace: str | None, name: str) -> str:
    """A function's name for the model, as vLLM and Codex write it."""
    return name if namespace is None else f"{namespace}__{name}"


class ResponseChosen(Body):
    """The function to call."""

    type: Literal["function"]
    name: Text


ResponseToolChoice = Annotated[ToolMode | Annotated[ResponseChosen, Tag("object")], TOOL_CHOICES]


class ResponseStreamOptions(Body):
    include_obfuscation: Literal[False] = Field(False, description="events are not padded here")


class ResponseAsChat(ChatRequest):
    """A request for a response as one for a chat."""

    limit_field: ClassVar[str | None] = "max_output_tokens"


class ResponseRequest(Sampled):
    input: Annotated[Text | InputItems, one_of("a text or a list of items")]
    instructions: Text | None = Field(None, description="the system's message; not kept for the next response")
    previous_response_id: str | None = Field(None, description="continues this one, while it is kept in memory")
    max_output_tokens: Int | None = Field(None, ge=1)
    text: TextOptions | None = None
    tools: list[AnyTool] | None = Field(None, max_length=MAX_TOOLS, description="those that are no functions: ignored")
    tool_choice: ResponseToolChoice | None = Field(None, description="default: auto")
    parallel_tool_calls: bool = Field(True, description="false: at most one call")
    include: list[Annotated[str, Field(pattern="^[a-z0-9_.]{1,64}$")]] | None = Field(
        None, description=f"{LOGPROBS}; others are ignored, which the header Forerun-Ignored says"
    )
    top_logprobs: Int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    store: bool = Field(True, description="false: the answer is not kept")
    stream_options: ResponseStreamOptions | None = None
    reasoning: dict[str, Any] | None = Field(None, description=NAMED)
    client_metadata: dict[str, Any] | None = Field(None, description=NAMED)
    truncation: Literal["disabled"] = Field("disabled", description="what does not fit is refused")
    background: Literal[False] = Field(False, description="answers are not made in the background")
    max_tool_calls: Int | None = Field(None, ge=1, description="of tools that a server runs: there are none here")
    conversation: Absent = None
    prompt: Absent = None
    context_management: Absent = None
    moderation: Absent = None
    service_tier: str | None = Field(None, description=IGNORED)
    safety_identifier: str | None = Field(None, description=IGNORED)
    prompt_cache_key: str | None = Field(None, description=SESSION)
    prompt_cache_retention: str | None = Field(None, description=IGNORED)

    @model_validator(mode="after")
    def _check_options(self) -> ResponseRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream: true")
        if self.top_logprobs is not None and not self.wants_logprobs:
            raise ValueError(f"top_logprobs goes with include: ['{LOGPROBS}']")
        if self.wants_logprobs and self.functions and self.tool_choice != "none":
            raise ValueError("tools do not support log-probabilities: remove one")
        return self

    @property
    def all_tools(self) -> list[tuple[str | None, ResponseTool | OtherTool]]:
        """Each with its namespace, if it has one."""
        result: list[tuple[str | None, ResponseTool | OtherTool]] = []
        for tool in self.tools or ():
            result += [(tool.name, each) for each in tool.tools] if isinstance(tool, NamespaceTool) else [(None, tool)]
        return result

    @property
    def functions(self) -> dict[str, tuple[str | None, ResponseTool]]:
        """Namespaces and functions by the names that the model knows."""
        every = [(space, tool) for space, tool in self.all_tools if isinstance(tool, ResponseTool)]
        return {qualified(space, tool.name): (space, tool) for space, tool in every}

    @property
    def effort(self) -> str | None:
        effort = (self.reasoning or {}).get("effort")
        return effort if isinstance(effort, str) and len(effort) <= MAX_WORD else None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def items(self) -> list[Any]:
        if isinstance(self.input, str):
            return [InputMessage.model_validate({"role": "user", "content": self.input})]
        return list(self.input)

    def field_of(self, param: str | None) -> str | None:
        begins = (param or "").partition(".")[0]
        if begins in FIELDS:
            return FIELDS[begins]
        field = super().field_of(param)
        return field and field.replace(".function.", ".")

    def ignored(self, known: Callable[[str], bool]) -> list[str]:
        asked = {name for name, value in (self.reasoning or {}).items() if value is not None}
        used = {"effort"} if self.effort is not None and known("reasoning_effort") else set()
        names = ["reasoning"] if asked - used else []
        names += ["client_metadata"] if self.client_metadata else []
        names += ["text.verbosity"] if self.text is not None and self.text.verbosity is not None else []
        names += [f"tools.{tool.type}" for _, tool in self.all_tools if isinstance(tool, OtherTool)]
        spaces = [tool for tool in self.tools or () if isinstance(tool, NamespaceTool)]
        names += ["tools.namespace.description" for space in spaces if space.description]
        names += [f"include.{name}" for name in self.include or () if name != LOGPROBS]
        return [*names, *super().ignored(known)]

    def chat(self, before: list[Any]) -> ResponseAsChat:
        """Returns the request as one for a chat that continues the items ``before``. Raises ApiError."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions is not None else []
        choice: Any = self.tool_choice
        if isinstance(choice, ResponseChosen):
            choice = {"type": "function", "function": {"name": choice.name}}
        tools = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}) | {"name": qualified(space, tool.name)}}
            for space, tool in self.all_tools
            if isinstance(tool, ResponseTool)
        ]
        given = {
            **{name: getattr(self, name) for name in Sampled.model_fields if name in self.model_fields_set},
            "messages": system + _messages([*before, *self.items]),
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self.text.format.chat() if self.text and self.text.format else None,
            "tools": tools or None,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning_effort": self.effort,
        }
        return converted(ResponseAsChat, given, self.field_of)


INPUT_ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[InputItem])


class ResponseReply(ChatReply):
    """Answers ``request``. ``keep`` is called with the finished answer."""

    id_prefix = "resp_"
    parsed = True

    def __init__(self, *arguments: Any, request: ResponseRequest, keep: Callable[[answers.Response], None]) -> None:
        super().__init__(*arguments)
        self.request = request
        self.keep = keep
        self.output: list[answers.OutputItem] = []
        self._functions = request.functions
        self._call: ParsedCall | None = None
        """The latest one."""
        self._text_start = 0
        """Characters of the answer before the latest item's text."""
        self._numbers = count()

    # ------------------------------------------------------------------------------------------------ whole or streamed

    def _whole(self) -> answers.Response:
        self._choice_events(self.choices[0])
        return self._finished()

    def _opening_events(self) -> list[str]:
        return [self._event_of(state, response=self._response("in_progress")) for state in ("created", "in_progress")]

    def _final_events(self) -> str:
        answer = self._finished()
        return self._event_of(answer.status, response=answer)

    def _error_events(self, error: ApiError) -> str:
        return self._event_of("failed", response=self._response("failed", error))

    def _choice_events(self, new: Choice) -> list[str]:
        events: list[str] = []
        pieces = self.pieces(new)
        if not pieces and new.logprobs and self.output and self.output[-1].type == "message":
            pieces = [Piece()]
        for piece in pieces:
            events += self._text_events(piece, new) if piece.call is None else self._call_events(piece, piece.call)
        if new.finish is not None:
            if not self.output and not self.calls_only:
                events += self._open_text(reasoning=False)
            events += self._close_item(complete=new.finish.reason != LENGTH)
        return events

    # ------------------------------------------------------------------------------------------------ items

    def _text_events(self, piece: Piece, new: Choice) -> list[str]:
        """The events of new text of the answer, or of the reasoning before it."""
        events: list[str] = []
        if not self.output or self.output[-1].type != ("reasoning" if piece.reasoning else "message"):
            events = self._open_text(piece.reasoning)
            self._text_start = self.choices[0].text.rfind(piece.text)
        (part,) = self.output[-1].content  # type: ignore[union-attr]
        part.text += piece.text
        fields: dict[str, Any] = {"delta": piece.text}
        if isinstance(part, answers.OutputText):
            fields["logprobs"] = [self._token(each) for each in new.logprobs if each.offset >= self._text_start]
            part.logprobs += fields["logprobs"]
            new.logprobs = []
        return [*events, self._event_in_item(f"{part.type}.delta", content_index=0, **fields)]

    def _call_events(self, piece: Piece, call: ParsedCall) -> list[str]:
        events: list[str] = []
        if piece.begins:
            item = answers.FunctionCall(
                id=_new_id("fc"), type="function_call", call_id=call.id, name=call.name, arguments="",
                status="in_progress",
            )  # fmt: skip
            space, function = self._functions.get(call.name, (None, None))
            if space is not None and function is not None:
                item.namespace, item.name = space, function.name
            events = self._open_item(item)  # which closes the call before
            self._call = call
        self.output[-1].arguments += piece.text  # type: ignore[union-attr]
        if piece.text:
            events.append(self._event_in_item("function_call_arguments.delta", delta=piece.text))
        return events

    def _open_text(self, reasoning: bool) -> list[str]:
        if reasoning:
            part: Any = answers.ReasoningText(type="reasoning_text", text="")
            item: answers.ReasoningItem | answers.OutputMessage = answers.ReasoningItem(
                id=_new_id("rs"), type="reasoning", summary=[], content=[], status="in_progress"
            )
        else:
            part = answers.OutputText(type="output_text", text="", annotations=[], logprobs=[])
            item = answers.OutputMessage(
                id=_new_id("msg"), type="message", role="assistant", status="in_progress", content=[]
            )
        events = self._open_item(item)
        item.content.append(part)
        return [*events, self._event_in_item("content_part.added", content_index=0, part=part)]

    def _open_item(self, item: answers.OutputItem) -> list[str]:
        """Begins an item, which ends the one before."""
        events = self._close_item()
        self.output.append(item)
        return [*events, self._item_event("added")]

    def _close_item(self, *, complete: bool = True) -> list[str]:
        """Ends the last item, unless it has ended. ``complete``: it was not cut off."""
        if not self.output or self.output[-1].status != "in_progress":
            return []
        item = self.output[-1]
        if isinstance(item, answers.FunctionCall):
            assert self._call is not None
            complete = self._call.complete
            fields = {"name": item.name, "arguments": item.arguments}
            events = [self._event_in_item("function_call_arguments.done", **fields)]
        else:
            (part,) = item.content
            fields = part.model_dump(include={"text", "logprobs"})
            events = [
                self._event_in_item(f"{part.type}.done", content_index=0, **fields),
                self._event_in_item("content_part.done", content_index=0, part=part),
            ]
        item.status = "completed" if complete else "incomplete"
        return [*events, self._item_event("done")]

    # ------------------------------------------------------------------------------------------------ events

    def _event_of(self, name: str, /, **fields: Any) -> str:
        event = {"type": f"response.{name}", "sequence_number": next(self._numbers), **fields}
        data = answers.ResponseEvent.model_validate(event).model_dump_json(exclude_unset=True)
        return f"event: {event['type']}\ndata: {data}\n\n"

    def _item_event(self, name: str) -> str:
        return self._event_of(f"output_item.{name}", output_index=len(self.output) - 1, item=self.output[-1])

    def _event_in_item(self, name: str, /, **fields: Any) -> str:
        return self._event_of(name, output_index=len(self.output) - 1, item_id=self.output[-1].id, **fields)

    # ------------------------------------------------------------------------------------------------ the response

    def _finished(self) -> answers.Response:
        """Returns the finished answer, and keeps it."""
        finish = self.choices[0].finish
        answer = self._response("incomplete" if finish is not None and finish.reason == LENGTH else "completed")
        self.keep(answer)
        return answer

    def _response(self, status: Any, error: ApiError | None = None) -> answers.Response:
        request, ended = self.request, status != "in_progress"
        fields = request.model_dump(include=set(REPEATED))
        fields["tools"] = [tool.answered() for tool in request.tools or () if not isinstance(tool, OtherTool)]
        if ended:
            fields["metrics"] = self.metrics()
        if ended and self.traced:
            fields["trace"] = self.choices[0].trace
        choice = request.tool_choice or "auto"
        format: Any = request.text.format if request.text is not None else None
        format = {"type": "text"} if format is None else format.model_dump(by_alias=True, exclude_none=True)
        return answers.Response(
            id=self.head["id"],
            object="response",
            created_at=self.head["created"],
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,
            error=None if error is None else answers.ResponseError(code=_error_code(error), message=error.message),
            incomplete_details=answers.Incomplete(reason="max_output_tokens") if status == "incomplete" else None,
            model=self.head["model"],
            output=list(self.output),
            usage=self._usage() if ended else None,
            background=False,
            metadata=request.metadata or {},
            reasoning={"effort": None, "summary": None, **(request.reasoning or {})},
            text={"format": format},
            top_logprobs=request.top_logprobs or 0,
            truncation="disabled",
            tool_choice=choice if isinstance(choice, str) else answers.ChosenFunction(**choice.model_dump()),
            **fields,
        )

    def _usage(self) -> answers.ResponseUsage:
        usage = self.usage()
        return answers.ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=answers.InputDetails(
                cached_tokens=usage.prompt_tokens_details.cached_tokens, cache_write_tokens=0
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=answers.OutputDetails(reasoning_tokens=self._details().get("reasoning_tokens", 0)),
            total_tokens=usage.total_tokens,
        )


class ResponseStore:
    """The latest responses that fit into ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        self._stored: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()
        """Answers, and the items of their conversations up to their ends: JSON, as objects may take far more memory."""

    def put(self, answer: answers.Response, before: list[Any]) -> None:
        """Keeps an answer to the items ``before``; the oldest ones go if there is no space."""
        items = [*before, *INPUT_ITEMS.validate_python([item.model_dump(exclude_unset=True) for item in answer.output])]
        new = answer.model_dump_json(exclude_unset=True).encode(), INPUT_ITEMS.dump_json(items)
        self._stored[answer.id] = new
        self.size += sum(map(len, new))
        while self.size > self.limit:
            self.size -= sum(map(len, self._stored.popitem(last=False)[1]))

    def get(self, id: str) -> bytes:
        """Returns an answer as JSON. Raises ApiError if there is none."""
        if id not in self._stored:
            raise ApiError(404, _missing(id), code="response_not_found")
        return self._stored[id][0]

    def items_up_to(self, id: str | None) -> list[Any]:
        """Returns the items of a conversation up to the end of a response. Raises ApiError if there is none."""
        if id is None:
            return []
        if id not in self._stored:
            param = "previous_response_id"
            raise ApiError(400, f"{param}: {_missing(id)}", param=param, code="previous_response_not_found")
        return INPUT_ITEMS.validate_json(self._stored[id][1])

    def delete(self, id: str) -> None:
        """Raises ApiError if there is none."""
        self.get(id)
        self.size -= sum(map(len, self._stored.pop(id)))


def _missing(id: str) -> str:
    return f"there is no response {id!r} here: it was not stored, was deleted, or has made room for later ones"


def _error_code(error: ApiError) -> Any:
    return {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"

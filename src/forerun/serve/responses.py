"""/v1/responses: its requests, a chat's answer as items, whole or as OpenAI's events, and the answers that are kept."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from itertools import count
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter, ValidationError, model_validator

from forerun.engine.stop import LENGTH
from forerun.serve import answers
from forerun.serve.errors import ApiError
from forerun.serve.parsers import ParsedCall, Piece
from forerun.serve.schema import (
    IGNORED,
    MAX_LOGPROBS,
    MOST_TOOLS,
    SESSION,
    Absent,
    Body,
    CallId,
    ChatRequest,
    Function,
    Sampled,
    Schema,
    Text,
    one_of,
)
from forerun.serve.stream import ChatReply, Choice

LOGPROBS = "message.output_text.logprobs"
REPEATED = (
    "previous_response_id", "instructions", "max_output_tokens", "max_tool_calls", "parallel_tool_calls",
    "prompt_cache_key", "safety_identifier", "store", "temperature", "top_p", "user",
)  # fmt: skip
"""Fields of a request that its answer has, too."""


class ContentPart(Body):
    type: Literal["input_text", "output_text"]
    text: Text
    annotations: Absent = None
    logprobs: list[Any] | None = Field(None, description=IGNORED)


Parts = Annotated[
    Annotated[Text, Tag("text")] | Annotated[list[ContentPart], Tag("list")], one_of("a text or a list of text parts")
]


def _text(content: str | list[ContentPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Item(Body):
    """What a conversation is made of. An answer's own items are some."""

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
    name: Annotated[Text, Field(min_length=1, max_length=256)]
    arguments: Text = Field(description="a JSON object, as text")
    namespace: Absent = None
    caller: Absent = None


class InputCallOutput(Item):
    """What the function said."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Parts
    name: str | None = Field(None, description=IGNORED)
    namespace: Absent = None
    caller: Absent = None


class InputReasoning(Item):
    """Thoughts of an earlier answer, which say nothing to the next one."""

    type: Literal["reasoning"]
    summary: list[Any] | None = Field(None, description=IGNORED)
    content: list[Any] | None = Field(None, description=IGNORED)
    encrypted_content: str | None = Field(None, description=IGNORED)


def _kind(item: Any) -> str | None:
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[InputCallOutput, Tag("function_call_output")],
    Discriminator(
        _kind,
        custom_error_type="wrong_kind",
        custom_error_message="must be a message, a function_call, a function_call_output or a reasoning",
    ),
]


def _messages(items: list[Any]) -> list[dict[str, Any]]:
    """The items as messages of a chat. An assistant's text and the calls behind it are one."""
    result: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, InputMessage):
            result.append({"role": item.role, "content": _text(item.content)})
        elif isinstance(item, InputCallOutput):
            result.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif isinstance(item, InputCall):
            if not result or result[-1]["role"] != "assistant":
                result.append({"role": "assistant", "content": ""})
            function = {"name": item.name, "arguments": item.arguments}
            result[-1].setdefault("tool_calls", []).append(
                {"id": item.call_id, "type": "function", "function": function}
            )
    return result


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=64)
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> TextFormat:
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
    verbosity: Absent = None


class ResponseTool(Function):
    type: Literal["function"]


class ResponseChosen(Body):
    """The function to call."""

    type: Literal["function"]
    name: Text


class ResponseStreamOptions(Body):
    include_obfuscation: Literal[False] = Field(False, description="events are not padded here")


class AsChat(ChatRequest):
    """A response as a chat; its errors name the response's own fields."""

    def field_of(self, param: str | None) -> str | None:
        return _own_name(super().field_of(param))

    @property
    def limit_field(self) -> str:
        return "max_output_tokens"

    @property
    def shape_field(self) -> str | None:
        return "text.format"


def _own_name(param: str | None) -> str | None:
    """The field of a response for one of its chat."""
    if param is None or param.partition(".")[0] == "messages":
        return None if param is None else "input"
    return param.replace(".function.", ".")


class ResponseRequest(Sampled):
    input: Annotated[
        Annotated[Text, Tag("text")] | Annotated[list[InputItem], Field(max_length=4096), Tag("list")],
        one_of("a text or a list of items"),
    ]
    instructions: Text | None = Field(None, description="the system's message; not kept for the next response")
    previous_response_id: str | None = Field(None, description="continues this one, while it is kept in memory")
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextOptions | None = None
    tools: list[ResponseTool] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("text")] | Annotated[ResponseChosen, Tag("object")],
            one_of("'none', 'auto', 'required' or an object that names a function"),
        ]
        | None
    ) = Field(None, description="default: auto")
    parallel_tool_calls: bool = Field(True, description="false: at most one call")
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    store: bool = Field(True, description="false: the answer is not kept")
    stream_options: ResponseStreamOptions | None = None
    reasoning: dict[str, Any] | None = Field(
        None, description="accepted; makes no difference, which the header Forerun-Ignored says"
    )
    truncation: Literal["disabled"] = Field("disabled", description="what does not fit is refused")
    background: Literal[False] = Field(False, description="answers are not made in the background")
    max_tool_calls: int | None = Field(None, ge=1, description="of tools that a server runs: there are none here")
    conversation: Absent = None
    prompt: Absent = None
    context_management: Absent = None
    moderation: Absent = None
    service_tier: str | None = Field(None, description=IGNORED)
    safety_identifier: str | None = Field(None, description=IGNORED)
    prompt_cache_key: str | None = Field(None, description=SESSION)
    prompt_cache_retention: str | None = Field(None, description=IGNORED)

    @model_validator(mode="after")
    def _consistent(self) -> ResponseRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream: true")
        if self.top_logprobs is not None and not self.wants_logprobs:
            raise ValueError(f"top_logprobs goes with include: ['{LOGPROBS}']")
        if self.wants_logprobs and self.tools and self.tool_choice != "none":
            raise ValueError("log-probabilities come without tools: leave one of them out")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def items(self) -> list[Any]:
        """The input as items."""
        if isinstance(self.input, str):
            return [InputMessage.model_validate({"role": "user", "content": self.input})]
        return list(self.input)

    def ignored(self) -> list[str]:
        return ["reasoning"] if any(self.reasoning.values() if self.reasoning else ()) else []

    def chat(self, before: list[Any]) -> AsChat:
        """The request as a chat that goes on behind the items ``before``. Raises ApiError."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions is not None else []
        choice: Any = self.tool_choice
        if isinstance(choice, ResponseChosen):
            choice = {"type": "function", "function": {"name": choice.name}}
        tools = [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools or ()]
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
        }
        try:
            return AsChat.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            param = _own_name(".".join(str(part) for part in first["loc"][:1]))
            message = first["msg"].removeprefix("Value error, ").replace(" after validation", "")
            raise ApiError(400, f"{param}: {message}", param=param, code=first["type"]) from None


Output = answers.OutputMessage | answers.FunctionCall | answers.ReasoningItem
ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[InputItem])


class ResponseReply(ChatReply):
    """``asked`` is what is answered. ``keep`` is told of an answer that is whole."""

    def __init__(
        self, *arguments: Any, asked: ResponseRequest, keep: Callable[[answers.Response], None], **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.parsed = True
        self.asked = asked
        self.keep = keep
        self.id = f"resp_{self.head['id'].removeprefix(f'{self.prefix}-')}"
        self.output: list[Output] = []
        (self._parser,) = self._parsers
        self._call: ParsedCall | None = None
        """The last one."""
        self._numbers = count()

    # ------------------------------------------------------------------------------------------------ whole or streamed

    def _collected(self) -> answers.Response:
        self._emit(self.choices[0])
        return self._done()

    def _begun(self) -> list[str]:
        return [self._state("created") + self._state("in_progress")]

    def _ended(self) -> str:
        answer = self._done()
        return self._event_of(answer.status, response=answer)

    def _broken(self, error: ApiError) -> str:
        return self._state("failed", error)

    def _emit(self, choice: Choice) -> list[str]:
        pieces = [Piece(choice.text)] if choice.text or choice.logprobs else []
        if self._parser is not None:
            pieces = self._parser.push(choice.text, last=choice.finish is not None)
        events: list[str] = []
        for piece in pieces:
            events += self._more_of_text(piece, choice) if piece.call is None else self._more_of_call(piece, piece.call)
        if choice.finish is not None:
            if not self.output and not self.calls_only:
                events += self._open_text(reasoning=False)
            events += self._close(whole=choice.finish.reason != LENGTH)
            self.reasons[choice.index] = self._reason(choice.finish, self._parser) or ""
        return events

    # ------------------------------------------------------------------------------------------------ items

    def _more_of_text(self, piece: Piece, choice: Choice) -> list[str]:
        """Of the answer, or of the thoughts before it."""
        events: list[str] = []
        if not self.output or self.output[-1].type != ("reasoning" if piece.reasoning else "message"):
            events = self._open_text(piece.reasoning)
        (part,) = self.output[-1].content  # type: ignore[union-attr]
        part.text += piece.text
        about: dict[str, Any] = {"delta": piece.text}
        if isinstance(part, answers.OutputText):
            about["logprobs"] = [self._token(item) for item in choice.logprobs]
            part.logprobs += about["logprobs"]
        return [*events, self._in_item(f"{part.type}.delta", content_index=0, **about)]

    def _more_of_call(self, piece: Piece, call: ParsedCall) -> list[str]:
        events: list[str] = []
        if piece.begins:
            item = answers.FunctionCall(
                id=_new("fc"), type="function_call", call_id=call.id, name=call.name, arguments="",
                status="in_progress",
            )  # fmt: skip
            events = self._open(item)  # which ends the call before
            self._call = call
        self.output[-1].arguments += piece.text  # type: ignore[union-attr]
        if piece.text:
            events.append(self._in_item("function_call_arguments.delta", delta=piece.text))
        return events

    def _open_text(self, reasoning: bool) -> list[str]:
        if reasoning:
            part: Any = answers.ReasoningText(type="reasoning_text", text="")
            item: answers.ReasoningItem | answers.OutputMessage = answers.ReasoningItem(
                id=_new("rs"), type="reasoning", summary=[], content=[], status="in_progress"
            )
        else:
            part = answers.OutputText(type="output_text", text="", annotations=[], logprobs=[])
            item = answers.OutputMessage(
                id=_new("msg"), type="message", role="assistant", status="in_progress", content=[]
            )
        events = self._open(item)
        item.content.append(part)
        return [*events, self._of_part("added", part)]

    def _open(self, item: Output) -> list[str]:
        """Begin an item, which ends the last one."""
        events = self._close()
        self.output.append(item)
        return [*events, self._of_item("added")]

    def _close(self, *, whole: bool = True) -> list[str]:
        """End the last item; ``whole``: nothing has cut it off."""
        if not self.output or self.output[-1].status != "in_progress":
            return []
        item = self.output[-1]
        if isinstance(item, answers.FunctionCall):
            assert self._call is not None
            whole = self._call.complete
            about = {"name": item.name, "arguments": item.arguments}
            events = [self._in_item("function_call_arguments.done", **about)]
        else:
            (part,) = item.content
            about = part.model_dump(include={"text", "logprobs"})
            events = [self._in_item(f"{part.type}.done", content_index=0, **about), self._of_part("done", part)]
        item.status = "completed" if whole else "incomplete"
        return [*events, self._of_item("done")]

    # ------------------------------------------------------------------------------------------------ events

    def _event_of(self, what: str, **about: Any) -> str:
        event = {"type": f"response.{what}", "sequence_number": next(self._numbers), **about}
        data = answers.ResponseEvent.model_validate(event).model_dump_json(exclude_unset=True)
        return f"event: {event['type']}\ndata: {data}\n\n"

    def _of_item(self, what: str) -> str:
        return self._event_of(f"output_item.{what}", output_index=len(self.output) - 1, item=self.output[-1])

    def _in_item(self, what: str, **about: Any) -> str:
        return self._event_of(what, output_index=len(self.output) - 1, item_id=self.output[-1].id, **about)

    def _of_part(self, what: str, part: answers.OutputText | answers.ReasoningText) -> str:
        return self._in_item(f"content_part.{what}", content_index=0, part=part)

    def _state(self, what: str, error: ApiError | None = None) -> str:
        return self._event_of(what, response=self._response("in_progress" if error is None else "failed", error))

    # ------------------------------------------------------------------------------------------------ the response

    def _done(self) -> answers.Response:
        """The whole answer, which is kept."""
        finish = self.choices[0].finish
        answer = self._response("incomplete" if finish is not None and finish.reason == LENGTH else "completed")
        self.keep(answer)
        return answer

    def _response(self, status: Any, error: ApiError | None = None) -> answers.Response:
        asked, ended = self.asked, status != "in_progress"
        after: dict[str, Any] = {}
        if ended:
            after["metrics"] = self.metrics()
        if ended and self.traced:
            after["trace"] = self.choices[0].trace
        given, choice = asked.model_dump(include={*REPEATED, "tools"}), asked.tool_choice or "auto"
        form = asked.text.format if asked.text is not None else None
        return answers.Response(
            id=self.id,
            object="response",
            created_at=self.head["created"],
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,
            error=None if error is None else answers.ResponseError(code=_code(error), message=error.message),
            incomplete_details=answers.Incomplete(reason="max_output_tokens") if status == "incomplete" else None,
            model=self.head["model"],
            output=list(self.output),
            usage=self._usage() if ended else None,
            background=False,
            metadata=asked.metadata or {},
            reasoning={"effort": None, "summary": None, **(asked.reasoning or {})},
            text={"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
            top_logprobs=asked.top_logprobs or 0,
            truncation="disabled",
            tool_choice=choice if isinstance(choice, str) else answers.ChosenFunction(**choice.model_dump()),
            **{**given, "tools": given["tools"] or []},
            **after,
        )

    def _usage(self) -> answers.ResponseUsage:
        counts = self.usage()
        return answers.ResponseUsage(
            input_tokens=counts.prompt_tokens,
            input_tokens_details=answers.InputDetails(
                cached_tokens=counts.prompt_tokens_details.cached_tokens, cache_write_tokens=0
            ),
            output_tokens=counts.completion_tokens,
            output_tokens_details=answers.OutputDetails(reasoning_tokens=0),
            total_tokens=counts.total_tokens,
        )


class ResponseStore:
    """The latest responses, as many as ``limit`` bytes hold, and the items of the conversations that they end."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        self._kept: OrderedDict[str, tuple[answers.Response, list[Any], int]] = OrderedDict()

    def put(self, answer: answers.Response, before: list[Any]) -> None:
        """Keep an answer to the items ``before``; the oldest go where there is no room."""
        own = [item.model_dump(exclude_unset=True) for item in answer.output]
        items = [*before, *ITEMS.validate_python(own)]
        size = len(answer.model_dump_json()) + len(ITEMS.dump_json(items))
        self._kept[answer.id] = (answer, items, size)
        self.size += size
        while self.size > self.limit:
            self.size -= self._kept.popitem(last=False)[1][2]

    def get(self, id: str) -> answers.Response:
        """Raises ApiError where there is none."""
        return self._find(id, ApiError(404, _lacking(id), code="response_not_found"))[0]

    def before(self, id: str | None) -> list[Any]:
        """The items up to a response's end. Raises ApiError where there is none."""
        if id is None:
            return []
        param = "previous_response_id"
        return self._find(
            id, ApiError(400, f"{param}: {_lacking(id)}", param=param, code="previous_response_not_found")
        )[1]

    def drop(self, id: str) -> None:
        """Forget one. Raises ApiError where there is none."""
        self.get(id)
        self.size -= self._kept.pop(id)[2]

    def _find(self, id: str, error: ApiError) -> tuple[answers.Response, list[Any], int]:
        if id not in self._kept:
            raise error
        return self._kept[id]


def _lacking(id: str) -> str:
    return f"there is no response {id!r} here: it was not stored, was deleted, or has made room for later ones"


def _code(error: ApiError) -> Any:
    return {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")


def _new(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"

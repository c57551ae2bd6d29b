"""Bodies of /v1/responses, and the chat that each of them is."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from forerun.serve.errors import ApiError
from forerun.serve.fields import IGNORED, Absent, Body, Object, Text, one_of
from forerun.serve.messages import MOST_TOOLS, CallId, Function
from forerun.serve.schema import MAX_LOGPROBS, SESSION, ChatRequest, Sampled

LOGPROBS = "message.output_text.logprobs"


class Part(Body):
    type: Literal["input_text", "output_text"]
    text: Text
    annotations: Absent = None
    logprobs: list[Any] | None = Field(None, description=IGNORED)


Parts = Annotated[
    Annotated[Text, Tag("text")] | Annotated[list[Part], Tag("list")], one_of("a text or a list of text parts")
]


def _text(content: str | list[Part]) -> str:
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
    schema_: Annotated[Object | Annotated[bool, Tag("flag")], one_of("an object, true or false")] | None = Field(
        None, alias="schema"
    )
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
    previous_response_id: str | None = Field(None, description="goes on behind this one, while it is kept in memory")
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

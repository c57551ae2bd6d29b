"""Conversations and tools, as request bodies hold them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Tag, ValidationInfo, field_validator, model_validator

from forerun.serve.fields import IGNORED, Absent, Body, Replaced, Text, Whole, one_of

MOST_TOOLS = 128
FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
CallId = Annotated[str, Field(min_length=1, max_length=256), Whole]


class Function(Body):
    """What a model may call. ``parameters`` is a JSON schema of an object; left out: there are none."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="calls that tool_choice asks for always meet the schema")

    @field_validator("parameters")
    @classmethod
    def _of_an_object(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None and schema.get("type", "object") != "object":
            raise ValueError("must be the schema of an object: its type is 'object'")
        return schema


class Tool(Body):
    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """As chat templates want it."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": {"parameters": {"type": "object", "properties": {}}, **function}}


def _named_once(tools: list[Tool]) -> list[Tool]:
    seen: set[str] = set()
    for tool in tools:
        if tool.function.name in seen:
            raise ValueError(f"two tools are called {tool.function.name!r}")
        seen.add(tool.function.name)
    return tools


Tools = Annotated[list[Tool], Field(min_length=1, max_length=MOST_TOOLS), AfterValidator(_named_once)]


class Named(Body):
    name: Annotated[str, Whole]


class Chosen(Body):
    """The function to call."""

    type: Literal["function"]
    function: Named


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("text")] | Annotated[Chosen, Tag("object")],
    one_of("'none', 'auto', 'required' or an object that names a function"),
]


class CalledFunction(Body):
    name: Annotated[str, Field(min_length=1, max_length=256), Whole]
    arguments: Text = Field(description="a JSON object, as text")


class ToolCall(Body):
    """A call that an answer made."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, description="left over from a stream; makes no difference")


class TextPart(Body):
    type: Literal["text"]
    text: Text


Content = Annotated[
    Annotated[Text, Tag("text")] | Annotated[list[TextPart], Tag("list")], one_of("a text or a list of text parts")
]


class Message(Body):
    """A turn. An answer's own message is one: what clients add to it may stay, as long as it says nothing."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: list[ToolCall] | None = Field(None, max_length=1024, description="an assistant's")
    tool_call_id: CallId | None = Field(None, description="the call that a tool's message answers")
    function_call: Replaced = None
    refusal: Absent = None
    annotations: Absent = None
    audio: Absent = None
    provider_specific_fields: dict[str, Any] | None = Field(None, description=f"litellm's; {IGNORED}")
    reasoning_content: Text | None = Field(None, description="an assistant's thoughts, for templates that show them")
    content: Content = Field(description="may be null or left out where there are tool_calls")
    name: Annotated[str, Field(max_length=256), Whole] | None = None

    @model_validator(mode="before")
    @classmethod
    def _calls_say_enough(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("tool_calls") and given.get("content") is None:
            return {**given, "content": ""}
        return given

    @field_validator("tool_calls")
    @classmethod
    def _by_an_assistant(cls, calls: list[ToolCall] | None, given: ValidationInfo) -> list[ToolCall] | None:
        if calls and given.data.get("role", "assistant") != "assistant":
            raise ValueError("goes with the role assistant")
        return calls

    @model_validator(mode="after")
    def _answer_to_a_call(self) -> Message:
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id goes with the role tool, and only with it")
        return self

    def plain(self) -> dict[str, Any]:
        """As ``render_chat`` wants it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        plain: dict[str, Any] = {"role": self.role, "content": text}
        if self.tool_calls:
            plain["tool_calls"] = [call.model_dump(exclude={"index"}) for call in self.tool_calls]
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                plain[name] = getattr(self, name)
        return plain


def _answers_calls(messages: list[Message]) -> list[Message]:
    made: set[str] = set()
    for index, message in enumerate(messages):
        if message.role == "tool" and message.tool_call_id not in made:
            raise ValueError(f"message {index} answers the call {message.tool_call_id!r}, which no message before made")
        made |= {call.id for call in message.tool_calls or ()}
    return messages


Messages = Annotated[list[Message], Field(min_length=1, max_length=4096), AfterValidator(_answers_calls)]

"""Anthropic's API: its requests as chats, and its answers, whole or as events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request, Response
from pydantic import Field, RootModel, Tag

from forerun.engine.stop import LENGTH
from forerun.serve import answers
from forerun.serve.answering import answer, naming
from forerun.serve.answers import Answer
from forerun.serve.errors import ApiError, converted
from forerun.serve.models import Models
from forerun.serve.openapi import BODY, GENERATION, responses
from forerun.serve.schema import (
    IGNORED,
    MAX_TOOLS,
    NAMED,
    Asked,
    Body,
    CallId,
    FunctionName,
    Int,
    OpenEndedChat,
    Stop,
    Text,
    Word,
    one_of,
    plain_call,
    plain_text,
)
from forerun.serve.server import Server
from forerun.serve.stream import ChatReply, Choice
from forerun.serve.tools.base import Piece, arguments_of

SIGNATURE = "forerun"
"""Of thoughts: clients send those back that have one."""


# ---------------------------------------------------------------- requests


class Block(Body):
    """A part of a message."""

    cache_control: dict[str, Any] | None = Field(None, description=f"{IGNORED}: prompts are cached anyway")


class TextBlock(Block):
    type: Literal["text"]
    text: Text
    citations: Any = Field(None, description=IGNORED)


class ThinkingBlock(Block):
    type: Literal["thinking", "redacted_thinking"]
    thinking: Text = Field("", description="for templates that show it")
    signature: str | None = Field(None, description=IGNORED)
    data: str | None = Field(None, description="of redacted thoughts: nobody here can read it")


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: CallId
    name: Annotated[Text, Field(min_length=1)]
    input: dict[str, Any]
    caller: Any = Field(None, description=IGNORED)


def _type(block: Any) -> str | None:
    """Returns the type of a block. Redacted thoughts are thoughts."""
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return "thinking" if kind == "redacted_thinking" else kind


TextBlocks = Annotated[list[TextBlock], Tag("list")]
TextOrBlocks = Annotated[Text | TextBlocks, one_of("a text or a list of text blocks")]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: CallId
    content: TextOrBlocks = ""
    is_error: bool = Field(False, description=f"{IGNORED}: the content says what went wrong")


AnyBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    one_of("a block of the type text, thinking, tool_use or tool_result: this model reads text", _type),
]


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Text | Annotated[list[AnyBlock], Tag("list")], one_of("a text or a list of blocks")]


class AnthropicTool(Block):
    """A function. A tool of another type runs on Anthropic's servers; the model is not told of it."""

    type: Word = "custom"
    name: FunctionName | None = None
    description: Text | None = None
    input_schema: dict[str, Any] | None = Field(None, description="a JSON schema of an object")
    strict: bool | None = Field(None, description=IGNORED)
    eager_input_streaming: bool | None = Field(None, description=IGNORED)


class AnthropicChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = Field(None, description="of the tool to call")
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class JsonFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Word | None = Field(None, description="reasoning_effort of the chat template")
    format: JsonFormat | None = None


class CountRequest(Asked):
    """What ``/v1/messages`` and ``/v1/messages/count_tokens`` share."""

    messages: list[AnthropicMessage] = Field(min_length=1, max_length=4096)
    system: TextOrBlocks | None = None
    tools: list[AnthropicTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: AnthropicChoice | None = Field(None, description="default: auto")
    thinking: Thinking | None = Field(None, description="enable_thinking of the chat template; default: disabled")
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = Field(None, description=f"{IGNORED}: prompts are cached anyway")
    service_tier: Word | None = Field(None, description=IGNORED)

    @property
    def functions(self) -> list[AnthropicTool]:
        return [tool for tool in self.tools or () if tool.type == "custom"]

    def unknown(self) -> Iterator[str]:
        yield from (f"tools.{tool.type}" for tool in self.tools or () if tool.type != "custom")
        named = {f"tools.{name}" for tool in self.functions for name in tool.unknown()}
        for name in super().unknown():
            if not name.startswith("tools.") or name in named:
                yield name

    def ignored(self, known: Callable[[str], bool]) -> list[str]:
        effort = self.output_config is not None and self.output_config.effort is not None
        names = ["output_config.effort"] if effort and not known("reasoning_effort") else []
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        names += ["thinking"] if thinks and not known("enable_thinking") else []
        blocks = [
            block for message in self.messages if not isinstance(message.content, str) for block in message.content
        ]
        names += ["messages.is_error"] if any(getattr(block, "is_error", False) for block in blocks) else []
        names += ["messages.redacted_thinking"] if any(block.type == "redacted_thinking" for block in blocks) else []
        return [*names, *super().ignored(known)]

    def field_of(self, param: str | None) -> str | None:
        return {"stop": "stop_sequences", "response_format": "output_config.format"}.get(param or "", param)

    def chat(self) -> OpenEndedChat:
        """Returns the request as one for a chat. Raises ApiError."""
        choice, config = self.tool_choice, self.output_config
        system = [] if not self.system else [{"role": "system", "content": plain_text(self.system, "\n")}]
        messages = [*system, *_messages(self.messages)]
        prefilled = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
        given: dict[str, Any] = {
            "messages": messages, "stream": self.stream, "continue_final_message": prefilled,
            "enable_thinking": self.thinking is not None and self.thinking.type != "disabled",
            "reasoning_effort": config and config.effort,
        }  # fmt: skip
        if config is not None and config.format is not None:
            given["response_format"] = {"type": "json_schema", "json_schema": {"schema": config.format.schema_}}
        if self.functions:
            given["tools"] = [_function(tool) for tool in self.functions]
        if choice is not None:
            named = {"type": "function", "function": {"name": choice.name}}
            modes: dict[str, Any] = {"any": "required", "tool": named}
            given["tool_choice"] = modes.get(choice.type, choice.type)
            given["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        return converted(OpenEndedChat, {**given, **self.sampled()}, self.field_of)

    def sampled(self) -> dict[str, Any]:
        """Returns the fields of sampling, as a chat has them."""
        return {}


class Metadata(Body):
    user_id: str | None = None


class MessagesRequest(CountRequest):
    max_tokens: Int = Field(ge=1, description="an answer that reaches the end of the context ends there")
    stop_sequences: Stop | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: Int | None = Field(None, ge=-1, lt=1 << 31)
    metadata: Metadata | None = Field(None, description="user_id: requests with the same go to the same replica")
    context_management: dict[str, Any] | None = Field(None, description=NAMED)

    def ignored(self, known: Callable[[str], bool]) -> list[str]:
        return ["context_management"] * bool(self.context_management) + super().ignored(known)

    def sampled(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "max_tokens")}
        user = None if self.metadata is None else self.metadata.user_id
        return {**given, "stop": self.stop_sequences or None, "user": user}


def _function(tool: AnthropicTool) -> dict[str, Any]:
    about = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": about}


def _messages(given: list[AnthropicMessage]) -> list[dict[str, Any]]:
    """Returns the messages as a chat's: a tool's result is its own message, texts of one role in a row are one."""
    result: list[dict[str, Any]] = []
    for message in given:
        blocks: list[Any] = message.content if isinstance(message.content, list) else []
        for block in blocks:
            if block.type == "tool_result":
                content = plain_text(block.content, "\n")
                result.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        texts = [block for block in blocks if block.type == "text"]
        text = plain_text(message.content if isinstance(message.content, str) else texts, "\n")
        calls = [plain_call(block.id, block.name, block.input) for block in blocks if block.type == "tool_use"]
        thoughts = "\n".join(block.thinking for block in blocks if block.type == "thinking")
        if blocks and all(block.type == "tool_result" for block in blocks):
            continue
        last = result[-1] if result else {}
        if last.get("role") == message.role and not last.get("tool_calls") and not thoughts:
            last["content"] = "\n".join(filter(None, (last["content"], text)))
        else:
            last = {"role": message.role, "content": text}
            result.append(last)
        last |= {"tool_calls": calls} if calls else {}
        last |= {"reasoning_content": thoughts} if thoughts else {}
    return result


# ---------------------------------------------------------------- answers


class AnthropicErrorDetail(Answer):
    type: str
    message: str


class AnthropicError(Answer):
    type: Literal["error"]
    error: AnthropicErrorDetail


class TextContent(Answer):
    type: Literal["text"]
    text: str


class ThinkingContent(Answer):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUse(Answer):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Content = Annotated[TextContent | ThinkingContent | ToolUse, Field(discriminator="type")]
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class AnthropicUsage(Answer):
    input_tokens: int = Field(description="without those from the cache")
    cache_creation_input_tokens: Literal[0] = Field(description="they are not counted here")
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicAnswer(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage


class InputTokens(Answer):
    input_tokens: int


class MessageStart(Answer):
    type: Literal["message_start"]
    message: AnthropicAnswer


class BlockStart(Answer):
    type: Literal["content_block_start"]
    index: int
    content_block: Content


class BlockDelta(Answer):
    type: Literal["content_block_delta"]
    index: int
    delta: dict[str, str] = Field(description="its type, and a text, thinking, signature or partial_json")


class BlockStop(Answer):
    type: Literal["content_block_stop"]
    index: int


class MessageDelta(Answer):
    type: Literal["message_delta"]
    delta: dict[str, str | None] = Field(description="stop_reason and stop_sequence")
    usage: AnthropicUsage


class MessageStop(Answer):
    type: Literal["message_stop"]


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | AnthropicError


class AnthropicEvent(RootModel[Annotated[Event, Field(discriminator="type")]]):
    """One event of a stream, by its type."""


DELTAS = {
    "text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}  # fmt: skip


class AnthropicReply(ChatReply):
    """``most`` is the request's ``max_tokens``."""

    id_prefix = "msg_"
    parsed = True

    def __init__(self, *arguments: Any, most: int) -> None:
        super().__init__(*arguments)
        self.most = most
        self.content: list[Any] = []
        self.arguments = ""
        """Of the latest call."""
        self._open = False
        """Whether more of the last block may come."""

    def _opening_events(self) -> list[str]:
        return [_event("message_start", message=self._answer())]

    def _choice_events(self, new: Choice) -> list[str]:
        events: list[str] = []
        for piece in self.pieces(new):
            kind = "tool_use" if piece.call is not None else "thinking" if piece.reasoning else "text"
            if piece.begins or not self._open or self.content[-1].type != kind:
                events += [*self._close(), self._start(piece)]
            if piece.text:
                if piece.call is not None:
                    self.arguments += piece.text
                else:
                    setattr(self.content[-1], kind, getattr(self.content[-1], kind) + piece.text)
                name, field = DELTAS[kind]
                events.append(self._delta(type=name, **{field: piece.text}))
        if new.finish is not None:
            if not self.content:
                events.append(self._start(Piece()))
            events += self._close()
        return events

    def _start(self, piece: Piece) -> str:
        call = piece.call
        if call is not None:
            self.arguments = ""
            self.content.append(ToolUse(type="tool_use", id=call.id, name=call.name, input={}))
        elif piece.reasoning:
            self.content.append(ThinkingContent(type="thinking", thinking="", signature=""))
        else:
            self.content.append(TextContent(type="text", text=""))
        self._open = True
        return _event("content_block_start", index=len(self.content) - 1, content_block=self.content[-1])

    def _close(self) -> list[str]:
        """Ends the last block, unless it has ended."""
        if not self._open:
            return []
        self._open, block, events = False, self.content[-1], []
        if isinstance(block, ToolUse):
            block.input = arguments_of(self.arguments)
        if isinstance(block, ThinkingContent):
            block.signature = SIGNATURE
            events.append(self._delta(type="signature_delta", signature=SIGNATURE))
        return [*events, _event("content_block_stop", index=len(self.content) - 1)]

    def _delta(self, **delta: str) -> str:
        return _event("content_block_delta", index=len(self.content) - 1, delta=delta)

    def _final_events(self) -> str:
        answer = self._answer()
        delta = {"stop_reason": answer.stop_reason, "stop_sequence": answer.stop_sequence}
        return _event("message_delta", delta=delta, usage=answer.usage) + _event("message_stop")

    def _error_events(self, error: ApiError) -> str:
        return _event("error", error=error.body_for("/v1/messages")["error"])

    def _whole(self) -> answers.Answer:
        self._choice_events(self.choices[0])
        return self._answer()

    def _answer(self) -> AnthropicAnswer:
        choice, usage = self.choices[0], self.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        reason: Any = self.finish_reason(choice)
        stopped_by = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        if reason == LENGTH:
            reason = "max_tokens" if choice.num_tokens >= self.most else "model_context_window_exceeded"
        elif reason is not None:
            reason = "tool_use" if reason == "tool_calls" else "stop_sequence" if stopped_by else "end_turn"
        return AnthropicAnswer(
            id=self.head["id"], type="message", role="assistant", model=self.head["model"], content=self.content,
            stop_reason=reason, stop_sequence=stopped_by,
            usage=AnthropicUsage(
                input_tokens=usage.prompt_tokens - cached, cache_creation_input_tokens=0,
                cache_read_input_tokens=cached, output_tokens=usage.completion_tokens,
            ),
        )  # fmt: skip


def _event(kind: str, **fields: Any) -> str:
    data = AnthropicEvent.model_validate({"type": kind, **fields}).model_dump_json(exclude_unset=True)
    return f"event: {kind}\ndata: {data}\n\n"


# ---------------------------------------------------------------- routes

MODELS = (AnthropicError, AnthropicEvent)
"""Of errors and events."""


def install(app: FastAPI, models: Models) -> None:
    """Adds the routes."""

    async def reply(server: Server, body: MessagesRequest, request_id: str) -> Any:
        return await server.chat(body.chat(), request_id, AnthropicReply, most=body.max_tokens)

    described = responses(*GENERATION, answer=AnthropicAnswer, chunk=AnthropicEvent, error=AnthropicError)

    @app.post("/v1/messages", response_model=None, responses=described)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        return await answer(models, request, body, reply)

    @app.post("/v1/messages/count_tokens", responses=responses(*BODY, 503, answer=InputTokens, error=AnthropicError))
    async def count_tokens(body: CountRequest, request: Request, response: Response) -> InputTokens:
        server = await models.served(request, body)
        response.headers.update(naming(body.ignored(server.text.has_variable), server, request))
        conversation = body.chat().conversation(server.text.has_variable)
        return InputTokens(input_tokens=len(await server.text.encode_chat(conversation, counted=True)))

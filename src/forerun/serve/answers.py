"""The shapes of answers, for the server's description of itself. Answers are not built from these: tests hold them
against each other."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


def sometimes(when: str) -> Any:
    """A field that is left out otherwise."""
    return Field(default_factory=lambda: None, description=f"there {when}")


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Answer):
    message: str
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "timeout_error",
        "rate_limit_error",
        "internal_error",
        "unavailable_error",
    ]
    param: str | None = Field(description="the field that is wrong, as a path: messages.0.content")
    code: str | None


class Error(Answer):
    error: ErrorDetail


class TraceRound(Answer):
    """What became of one round's draft."""

    tokens: list[tuple[str, Literal["accepted", "corrected", "bonus", "plain"]]]
    token_ids: list[int]
    rejected: list[str]
    rejected_ids: list[int]
    drafted: int
    method: str | None


class Traced(Answer):
    trace: list[TraceRound] = sometimes("if speculative.trace asked for it")


class PromptDetails(Answer):
    cached_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class SpeculativeMetrics(Answer):
    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: list[int]
    per_step_drafted: list[int]
    alpha: float | None
    method: str | None
    identical_to_plain_decoding: bool
    draft_error: str | None


class Metrics(Answer):
    tokens_per_second: float | None
    time_to_first_token: float | None
    rounds: int
    tokens_per_round: float | None
    speculative_decoding: SpeculativeMetrics


class Head(Answer):
    id: str
    created: int
    model: str


class Whole(Head):
    usage: Usage
    metrics: Metrics


class Chunk(Head):
    """One event of a stream. The last may bring the counts and no choices."""

    usage: Usage = sometimes("if stream_options asked for it")
    metrics: Metrics = sometimes("beside the last usage")


class CompletionLogprobs(Answer):
    """One entry per token whose text begins in the answer's; half a character is written as ``bytes:\\xe6``."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(description="characters of the text before each token")


class CompletionChoice(Traced):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None = Field(description="the stop string or token id that ended it")


class CompletionChunkChoice(CompletionChoice):
    finish_reason: Literal["stop", "length"] | None  # type: ignore[assignment]


class Completion(Whole):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionChunk(Chunk):
    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]


class TokenLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class ListedToken(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    content: list[ListedToken]


class CalledFunction(Answer):
    name: str
    arguments: str = Field(description="JSON, as the model wrote it")


class ToolCall(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Answer):
    role: Literal["assistant"]
    content: str | None = Field(description="null where there is nothing but tool_calls")
    refusal: None
    tool_calls: list[ToolCall] = sometimes("if tools are called")


class FunctionDelta(Answer):
    name: str = sometimes("in a call's first")
    arguments: str = Field(description="what is new of them")


class ToolCallDelta(Answer):
    index: int
    id: str = sometimes("in a call's first")
    type: Literal["function"] = sometimes("in a call's first")
    function: FunctionDelta


class ChatDelta(Answer):
    role: Literal["assistant"] = sometimes("in the first")
    content: str = sometimes("if there is new text")
    tool_calls: list[ToolCallDelta] = sometimes("if there is something new of a call")


class ChatChoiceBase(Traced):
    index: int
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: str | int | None = Field(description="the stop string or token id that ended it")


class ChatChoice(ChatChoiceBase):
    message: ChatMessage
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatChunkChoice(ChatChoiceBase):
    delta: ChatDelta


class Chat(Whole):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatChunk(Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class Tokens(Answer):
    tokens: list[int]
    count: int
    max_model_len: int


class Prompt(Answer):
    prompt: str


class DraftsOf(Answer):
    num_speculative_tokens: int


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    chat_template: bool = Field(description="whether it can chat")
    speculative: dict[str, DraftsOf] = Field(description="the loaded drafters")


class Models(Answer):
    object: Literal["list"]
    data: list[Model]


class Health(Answer):
    status: Literal["ok"]


class Version(Answer):
    version: str

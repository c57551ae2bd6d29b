"""The models of answers, which serialise them and describe them in ``/openapi.json``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel


def sometimes(when: str) -> Any:
    """Declares a field that is left out in other cases, which ``when`` describes."""
    return Field(default_factory=lambda: None, description=f"present only {when}")


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


class PromptDetails(Answer):
    cached_tokens: int


class CompletionDetails(Answer):
    reasoning_tokens: int = sometimes("with --reasoning-parser; markers count")
    accepted_prediction_tokens: int = sometimes("if the request had a prediction, of its tokens and the text so far")
    rejected_prediction_tokens: int = sometimes("if the request had a prediction, of its tokens and the text so far")


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails = sometimes("once an answer with any of them has ended")


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


class Whole(Answer):
    id: str
    created: int
    model: str
    usage: Usage
    metrics: Metrics


class Chunk(Answer):
    """One event of a stream. The last may have usage and no choices."""

    id: str
    created: int
    model: str
    usage: Usage = sometimes("if stream_options asked for it")
    metrics: Metrics = sometimes("beside the last usage")


class ChoiceBase(Answer):
    index: int
    stop_reason: str | int | None = Field(description="the stop string or token id that ended it")
    trace: list[TraceRound] = sometimes("if speculative.trace asked for it")


class CompletionLogprobs(Answer):
    """One entry per token that starts inside the returned text. A partial character is shown as ``bytes:\\xe6``."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(description="characters of the text before each token")


class PromptLogprob(Answer):
    """vLLM's form of a token's log-probability."""

    logprob: float
    rank: int = Field(description="1: the likeliest")
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""For each token of a prompt but the first, by id: its own and the likeliest tokens'."""


class CompletionChoice(ChoiceBase):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: PromptLogprobs = sometimes("if prompt_logprobs asked for it: by id, for each token of the prompt")
    finish_reason: Literal["stop", "length"]


class CompletionChunkChoice(CompletionChoice):
    finish_reason: Literal["stop", "length"] | None  # type: ignore[assignment]


class Completion(Whole):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionChunk(Chunk):
    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]


class Timings(Answer):
    """How long the prompt and the answer took; without the tokens of the prompt that were in the cache."""

    prompt_n: int
    prompt_ms: float
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float | None
    draft_n: int = Field(description="drafted tokens")
    draft_n_accepted: int


class InfillChunk(Answer):
    """One event of llama.cpp's ``/infill``. The last one has ``stop``, and all fields."""

    index: Literal[0]
    content: str
    stop: bool
    model: str = sometimes("at the end")
    tokens_predicted: int = sometimes("at the end")
    tokens_evaluated: int = sometimes("at the end: tokens of the prompt")
    tokens_cached: int = sometimes("at the end: those of them that were in the prefix cache")
    truncated: bool = sometimes("at the end: whether files of input_extra had no room in the prompt")
    has_new_line: bool = sometimes("at the end")
    stop_type: Literal["eos", "limit", "word"] = sometimes("at the end; an answer that n_indent ends has limit")
    stopping_word: str = sometimes("at the end")
    timings: Timings = sometimes("at the end")
    trace: list[TraceRound] = sometimes("if speculative.trace asked for it")


class Infill(InfillChunk):
    """An answer of llama.cpp's ``/infill``."""

    stop: Literal[True]


class ChosenFields(Answer):
    """The fields of an answer that ``response_fields`` lists, by their paths."""

    model_config = ConfigDict(extra="allow")


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
    content: str | None = Field(description="null if there are only tool_calls or reasoning")
    refusal: None
    reasoning_content: str | None = sometimes("if the server has a reasoning_parser: what comes before the answer")
    tool_calls: list[ToolCall] = sometimes("if tools are called")


class FunctionDelta(Answer):
    name: str = sometimes("in the first delta of a call")
    arguments: str = Field(description="the new part")


class ToolCallDelta(Answer):
    index: int
    id: str = sometimes("in the first delta of a call")
    type: Literal["function"] = sometimes("in the first delta of a call")
    function: FunctionDelta


class ChatDelta(Answer):
    role: Literal["assistant"] = sometimes("in the first")
    content: str = sometimes("if there is new text")
    reasoning_content: str = sometimes("if there is new reasoning")
    tool_calls: list[ToolCallDelta] = sometimes("if there is something new of a call")


class ChatChoice(ChoiceBase):
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatChunkChoice(ChoiceBase):
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class Chat(Whole):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs = sometimes("if prompt_logprobs asked for it: by id, for each token of the prompt")


class ChatChunk(Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class OutputText(Answer):
    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(description="none")
    logprobs: list[ListedToken] = Field(description="if include asked for them")


Status = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class FunctionCall(Answer):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str = sometimes("of a function in a namespace")
    arguments: str = Field(description="JSON, as the model wrote it")
    status: Status


class ReasoningText(Answer):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Answer):
    """The reasoning before an answer, if the server has a ``reasoning_parser``."""

    id: str
    type: Literal["reasoning"]
    summary: list[Any] = Field(description="none")
    content: list[ReasoningText]
    status: Status


OutputItem = Annotated[OutputMessage | FunctionCall | ReasoningItem, Field(discriminator="type")]


class FunctionTool(Answer):
    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class NamespaceTool(Answer):
    type: Literal["namespace"]
    name: str
    description: str
    tools: list[FunctionTool]


class ChosenFunction(Answer):
    type: Literal["function"]
    name: str


class InputDetails(Answer):
    cached_tokens: int
    cache_write_tokens: Literal[0] = Field(description="they are not counted here")


class OutputDetails(Answer):
    reasoning_tokens: int


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(Answer):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class Incomplete(Answer):
    reason: Literal["max_output_tokens"]


class Response(Answer):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: Incomplete | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    previous_response_id: str | None
    instructions: str | None
    background: Literal[False]
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction
    tools: list[FunctionTool | NamespaceTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None
    metrics: Metrics = sometimes("once it has ended")
    trace: list[TraceRound] = sometimes("if speculative.trace asked for it, once it has ended")


class DeletedResponse(Answer):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class EventBase(Answer):
    sequence_number: int


class ResponseState(EventBase):
    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    response: Response


class ItemEvent(EventBase):
    output_index: int
    type: Literal["response.output_item.added", "response.output_item.done"]
    item: OutputItem


class InItem(EventBase):
    output_index: int
    item_id: str


class InPart(InItem):
    content_index: int


class PartEvent(InPart):
    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText | ReasoningText


class TextDelta(InPart):
    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[ListedToken]


class TextDone(InPart):
    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[ListedToken]


class ReasoningDelta(InPart):
    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningDone(InPart):
    type: Literal["response.reasoning_text.done"]
    text: str


class ArgumentsDelta(InItem):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(InItem):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


Event = (
    ResponseState | ItemEvent | PartEvent | TextDelta | TextDone | ReasoningDelta | ReasoningDone | ArgumentsDelta
    | ArgumentsDone
)  # fmt: skip


class ResponseEvent(RootModel[Annotated[Event, Field(discriminator="type")]]):
    """One event of a response's stream, by its type."""


class ModelCard(Answer):
    """OpenAI's and Anthropic's fields, and our own."""

    id: str
    object: Literal["model"]
    type: Literal["model"]
    display_name: str
    created: int
    created_at: str
    owned_by: str
    max_model_len: int = sometimes("once it is loaded")
    chat_template: bool = sometimes("once it is loaded: whether it can chat")
    speculative: dict[str, dict[Literal["num_speculative_tokens"], int]] = sometimes("once it is loaded: its drafters")


class Models(Answer):
    object: Literal["list"]
    data: list[ModelCard]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None


class Health(Answer):
    status: Literal["ok"]


class Version(Answer):
    version: str

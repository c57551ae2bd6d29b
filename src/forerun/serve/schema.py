"""The models of requests: fields, messages, and the bodies of completions and chat."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from forerun.core.errors import ConfigError
from forerun.sampling.params import COLDEST, STEEPEST, BeamSearchParams, Params, SamplingParams, StructuredOutputsParams

Text = Annotated[str, Tag("text")]


def _to_integer(value: Any) -> Any:
    """JSON has one type of numbers: 16.0 is an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_to_integer)]


def _tag(value: Any) -> str | None:
    """Returns which member of a union is meant, so that errors are about that one alone."""
    if isinstance(value, list):
        first = value[0] if value else None
        return "lists" if isinstance(first, list) else "numbers" if isinstance(first, (int, float)) else "list"
    return {str: "text", dict: "object", bool: "flag"}.get(type(value))


def one_of(what: str, tag: Callable[[Any], str | None] = _tag) -> Discriminator:
    """Tells the members of a union apart by ``tag``; ``what`` is in the error for any other value."""
    return Discriminator(tag, custom_error_type="wrong_kind", custom_error_message=f"must be {what}")


Object = Annotated[dict[str, Any], Tag("object")]
Schema = Annotated[Object | Annotated[bool, Tag("flag")], one_of("an object, true or false")]
ObjectOrText = Annotated[Object | Text, one_of("an object or a text")]


def _absent(why: str, value: Any) -> None:
    if value is not None and value not in ("", [], {}):
        raise ValueError(why)


NOTHING = WithJsonSchema({"enum": [None, "", [], {}]})
Absent = Annotated[None, BeforeValidator(partial(_absent, "this server does not support it: remove it")), NOTHING]
"""A field of OpenAI's that is not supported: it may only be empty."""
Replaced = Annotated[
    None, BeforeValidator(partial(_absent, "functions are called tools now: send tools, tool_choice and tool_calls")),
    NOTHING,
]  # fmt: skip
"""A field of OpenAI's that came before tools."""
IGNORED = "accepted; makes no difference"
MAX_WORD = 64
Word = Annotated[str, Field(max_length=MAX_WORD)]
VARIABLES = ("reasoning_effort", "enable_thinking")
VARIABLE = "for templates that know it; others make no difference, which the header Forerun-Ignored says"
KEEP_ALIVE, KWARGS = "keep_alive", "chat_template_kwargs"
MAX_FIELDS = 4096
"""Of one object: each may be an error."""
MAX_NAMED = 32
"""Ignored fields of a request that are named."""
NAMED = f"{IGNORED}, which the header Forerun-Ignored says"


def in_header(name: str) -> str:
    """Returns a field's name as a header may hold it."""
    return re.sub(r"[^\w.-]", "?", name[:64], flags=re.ASCII)


class Body(BaseModel):
    """A JSON object without converted types. Null stands for an optional field's default.

    Unknown fields are ignored and named, or refused by ``--strict``.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    def unknown(self) -> Iterator[str]:
        """Yields the names of unknown fields, those of objects within this one included."""
        yield from self.model_extra or ()
        for name, value in vars(self).items():
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, Body):
                    yield from (f"{name}.{inner}" for inner in each.unknown())

    def ignored(self, known: Callable[[str], bool]) -> list[str]:
        """Returns the fields that ask for something and change nothing; the answer's headers name the first ones.

        Args:
            known: says whether the chat template has a variable of this name.
        """
        return list(dict.fromkeys(self.unknown()))

    @model_serializer(mode="wrap")
    def _without_unknown(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if name not in (self.model_extra or ())}

    @classmethod
    @cache
    def _optional(cls) -> set[str]:
        return {field.alias or name for name, field in cls.model_fields.items() if not field.is_required()}

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if any(isinstance(each, dict) and len(each) > MAX_FIELDS for each in (given, *given.values())):
            raise ValueError(f"an object has more than {MAX_FIELDS} fields")
        optional = cls._optional()
        return cls._renamed({name: value for name, value in given.items() if value is not None or name not in optional})

    @classmethod
    def _renamed(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Gives fields that have several names the name that they have here."""
        return given

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        parts: list[Any] = [schema]
        for part in parts:
            if isinstance(part, dict) and part.get("type") == "list":
                part["fail_fast"] = True  # only the first error is told of, and a million take seconds
            parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        return schema

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        fields = handler.resolve_ref_schema(schema).get("properties", {})
        for name in cls._optional() & set(fields):
            about = {key: fields[name].pop(key) for key in ("title", "description", "default") if key in fields[name]}
            kinds = fields[name].get("anyOf", [fields[name]])
            if {"type": "null"} not in kinds and None not in fields[name].get("enum", []):
                fields[name] = {"anyOf": [*kinds, {"type": "null"}]}
            fields[name] |= about
        return schema


MAX_TOOLS = 128
FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,128}$")]
CallId = Annotated[str, Field(min_length=1, max_length=256)]


class Function(Body):
    """A function that the model may call. ``parameters`` is a JSON schema of an object; the default has none."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="calls that tool_choice asks for always meet the schema")

    @field_validator("parameters")
    @classmethod
    def _must_be_object(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None and schema.get("type", "object") != "object":
            raise ValueError("must be the schema of an object: its type is 'object'")
        return schema


class Tool(Body):
    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """Returns the tool as chat templates take it."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": {"parameters": {"type": "object", "properties": {}}, **function}}


def _check_names(tools: list[Tool]) -> list[Tool]:
    names = [tool.function.name for tool in tools]
    repeated = [name for index, name in enumerate(names) if name in names[:index]]
    if repeated:
        raise ValueError(f"two tools are called {repeated[0]!r}")
    return tools


Tools = Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS), AfterValidator(_check_names)]


class FunctionChoice(Body):
    name: Text


class Chosen(Body):
    """The function to call."""

    type: Literal["function"]
    function: FunctionChoice


ToolMode = Annotated[Literal["none", "auto", "required"], Tag("text")]
TOOL_CHOICES = one_of("'none', 'auto', 'required' or an object that names a function")
ToolChoice = Annotated[ToolMode | Annotated[Chosen, Tag("object")], TOOL_CHOICES]


class GivenFunction(Body):
    name: Annotated[str, Field(min_length=1)]
    arguments: Text = Field(description="a JSON object, as text; another text is shown to the model as it is")


class GivenToolCall(Body):
    """A call that an answer made."""

    id: CallId
    type: Literal["function"] = "function"
    function: GivenFunction
    index: Int | None = Field(None, description="left over from a stream; makes no difference")


def plain_call(id: str, name: str, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    """Returns a call as a message has it."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


class TextPart(Body):
    type: Literal["text"]
    text: Text


Content = Annotated[Text | Annotated[list[TextPart], Tag("list")], one_of("a text or a list of text parts")]


def plain_text(content: Any, between: str = "") -> str:
    """Returns the text of a message's content, which is a text or a list of text parts."""
    return content if isinstance(content, str) else between.join(part.text for part in content)


class Message(Body):
    """One message. An answer's own message may be sent back: what clients add to it may stay if it is empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: list[GivenToolCall] | None = Field(None, description="an assistant's")
    tool_call_id: CallId | None = Field(None, description="the call that a tool's message answers")
    function_call: Replaced = None
    refusal: Absent = None
    annotations: Absent = None
    audio: Absent = None
    provider_specific_fields: dict[str, Any] | None = Field(None, description=f"litellm's; {IGNORED}")
    reasoning_content: Text | None = Field(None, description="an assistant's thoughts, for templates that show them")
    content: Content = Field(description="an assistant's may be null or left out")
    name: Annotated[str, Field(max_length=256)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _allow_missing_content(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("role") == "assistant" and given.get("content") is None:
            return {**given, "content": ""}
        return given

    @field_validator("tool_calls")
    @classmethod
    def _check_calls_role(cls, calls: list[GivenToolCall] | None, given: ValidationInfo) -> list[GivenToolCall] | None:
        if calls and given.data.get("role", "assistant") != "assistant":
            raise ValueError("goes with the role assistant")
        return calls

    @model_validator(mode="after")
    def _check_call_id(self) -> Message:
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id goes with the role tool, and only with it")
        return self

    def plain(self) -> dict[str, Any]:
        """Returns the message as ``render_chat`` takes it."""
        plain: dict[str, Any] = {"role": self.role, "content": plain_text(self.content)}
        if self.tool_calls:
            plain["tool_calls"] = [call.model_dump(exclude={"index"}) for call in self.tool_calls]
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                plain[name] = getattr(self, name)
        return plain


def _check_call_ids(messages: list[Message]) -> list[Message]:
    calls: set[str] = set()
    for index, message in enumerate(messages):
        if message.role == "tool" and message.tool_call_id not in calls:
            raise ValueError(f"message {index} answers the call {message.tool_call_id!r}, which no message before made")
        calls |= {call.id for call in message.tool_calls or ()}
    return messages


Messages = Annotated[list[Message], Field(min_length=1, max_length=4096), AfterValidator(_check_call_ids)]


class Prediction(Body):
    """OpenAI's predicted output."""

    type: Literal["content"]
    content: Content


MAX_CHOICES = 128
UNLIMITED = 1 << 30
"""Tokens of an answer that only the context limits."""
SAMPLED = {
    "top_p", "top_k", "min_p", "min_tokens", "stop", "stop_token_ids", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "bad_words",
}  # fmt: skip
"""Options of sampling that beam search does not have, beside temperature and structured output."""
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""Fields that vLLM had before ``structured_outputs``. They are refused: unknown ones would be ignored."""
MAX_LOGPROBS = 20
MAX_STOPS = 64

SESSION = "requests with the same value go to the same replica; makes no other difference"

TokenId = Annotated[Int, Field(ge=0, lt=1 << 31)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Regex = Annotated[str, Field(max_length=65536)]
StopText = Annotated[str, Field(min_length=1, max_length=1024), Tag("text")]
StopTexts = Annotated[list[StopText], Field(max_length=MAX_STOPS), Tag("list")]
Stop = Annotated[StopText | StopTexts, one_of("a text or a list of texts")]
Prompt = Annotated[
    Text
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES), Tag("list")]
    | Annotated[list[TokenId], Field(min_length=1), Tag("numbers")]
    | Annotated[
        list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES), Tag("lists")
    ],
    one_of("a text, a list of texts, a list of token ids, or a list of such lists"),
]
Never = Annotated[Literal["never"], Tag("text")]
EarlyStopping = Annotated[Annotated[bool, Tag("flag")] | Never, one_of('true, false or "never"')]


StopAt = Literal["line", "block"]


class Speculative(Body):
    """This request's choice among the server's drafters. The server's own field: others are refused."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool = Field(True, description="false: decode plainly")
    method: str | None = Field(None, description="one of the loaded methods (default: the first), or none")
    num_speculative_tokens: Int | None = Field(None, ge=0, description="at most the server's; 0: decode plainly")
    trace: bool = Field(False, description="return what became of every draft, round by round")


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = Field(False, description="events are not padded here")


class JsonSchema(Body):
    """OpenAI's wrapper of a schema."""

    name: str = Field("schema", max_length=64)
    description: str | None = None
    schema_: Schema = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type 'json_schema', and only with it")
        return self


class StructuredOutputs(Body):
    """vLLM's field: exactly one of these."""

    json_: ObjectOrText | None = Field(None, alias="json")
    regex: Regex | None = None
    choice: list[Text] | None = None
    grammar: Text | None = None
    json_object: bool | None = None


class Asked(Body):
    """What requests of all APIs share. ``field_of`` is for whoever answers."""

    model: str | None = None
    stream: bool = False

    def field_of(self, param: str | None) -> str | None:
        """Returns the field of this body for what the engine or the chat calls ``param``."""
        return param


class Sampled(Asked):
    """The fields of all requests for texts in OpenAI's APIs."""

    min_tokens: Int = Field(0, ge=0)
    temperature: float = Field(1.0, ge=0, le=100, description=f"below {COLDEST:g}: the likeliest token")
    top_p: float = Field(1.0, ge=0, le=1, description="0: the likeliest token")
    top_k: Int = Field(0, ge=-1, lt=1 << 31)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: Int | None = Field(None, ge=-(1 << 63), lt=1 << 63, description="-1: a random one")
    stop: Stop | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOPS)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    logit_bias: dict[str, Bias] | None = Field(None, max_length=1024)
    bad_words: list[StopText] | None = Field(None, max_length=MAX_STOPS)
    skip_special_tokens: bool = True
    speculative: Speculative | None = None
    priority: Int = Field(
        0, ge=-1000, le=1000, description="lower is served earlier; no value moves a turn by more than 1024 rounds"
    )
    user: str | None = Field(None, description=SESSION)
    metadata: dict[str, Any] | None = Field(None, description=IGNORED)

    def settle(self, defaults: Mapping[str, Any]) -> None:
        """Sets what the request leaves open to ``defaults``, the model's own settings."""
        for name in set(defaults) - self.model_fields_set:
            setattr(self, name, defaults[name])

    def field_of(self, param: str | None) -> str | None:
        return f"speculative.{param}" if param in Speculative.model_fields else param


SYNONYMS = {"n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
"""llama.cpp's names of fields. Its ``n_predict`` may be -1: no limit."""


class Generation(Sampled):
    """The fields that chat and completions share."""

    limit_field: ClassVar[str | None] = "max_tokens"
    """The field of a limit that is refused beyond the context; None: the answer ends where the context does."""
    max_tokens: Int | None = Field(None, ge=1)
    n: Int = Field(1, ge=1, le=MAX_CHOICES, description="answers; with use_beam_search, as many beams, the best first")
    use_beam_search: bool = Field(False, description="search instead of sampling; the answers come at its end")
    length_penalty: float = Field(1.0, ge=-STEEPEST, le=STEEPEST, description="of beams: above 0 favours long answers")
    early_stopping: EarlyStopping = Field(False, description="of beams, as in transformers")
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    store: bool | None = Field(None, description="accepted; nothing is stored")
    cache_prompt: bool | None = Field(None, description="accepted; a kept prefix is always used and changes no token")
    prompt_logprobs: Int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="of the prompt's tokens, and this many of the likeliest"
    )
    prediction: Prediction | None = Field(None, description="what the answer may be, to draft from; changes no token")

    @classmethod
    def _renamed(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name in GUIDED:
            if given.get(name) is not None:
                raise ValueError(f"{name} is not supported: send structured_outputs")
        for name, ours in SYNONYMS.items():
            if name in given and ours in given:
                raise ValueError(f"{name} and {ours} are the same: give one of them")
        given = {name: value for name, value in given.items() if value is not None or name not in SYNONYMS}
        if given.get("n_predict") == -1:
            given["n_predict"] = None
        return {SYNONYMS.get(name, name): value for name, value in given.items()}

    @model_validator(mode="after")
    def _check_options(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream: true")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs does not go with stream: true")
        if not self.use_beam_search and (self.length_penalty != 1.0 or self.early_stopping is not False):
            raise ValueError("length_penalty and early_stopping go with use_beam_search: true")
        return self

    def settle(self, defaults: Mapping[str, Any]) -> None:
        if not self.use_beam_search:
            super().settle(defaults)

    @property
    def session(self) -> str | None:
        """A name that requests share which are best answered by the same replica."""
        return self.user

    @property
    def prompt_only(self) -> bool:
        """Whether the prompt is only read: the engine makes a token all the same, which is no part of the answer."""
        return self.max_tokens == 0

    @property
    def shape_field(self) -> str | None:
        """The field that asks for structured output."""
        names = ("response_format", "structured_outputs")
        return next((name for name in names if getattr(self, name) is not None), None)

    def structured(self) -> StructuredOutputsParams | None:
        """Returns the structured output that is requested. Raises ConfigError if that is done in both fields."""
        format, wanted = self.response_format, self.structured_outputs
        if format is not None and format.type != "text":
            if wanted is not None:
                raise ConfigError("response_format and structured_outputs conflict: remove one")
            if format.json_schema is None:
                return StructuredOutputsParams(json_object=True)
            return StructuredOutputsParams(json=format.json_schema.schema_)
        if wanted is not None:
            return StructuredOutputsParams(**wanted.model_dump(by_alias=True, exclude_none=True))
        return None

    def beam_search(self, max_tokens: int | None) -> BeamSearchParams:
        """Returns the engine's options for beam search. Raises ConfigError for those of sampling."""
        for name in self.model_fields_set & SAMPLED:
            if getattr(self, name) != Generation.model_fields[name].get_default(call_default_factory=True):
                raise ConfigError(f"beam search does not sample: remove {name} or use_beam_search")
        if "temperature" in self.model_fields_set and self.temperature != 0:
            raise ConfigError(f"beam search does not sample: temperature must be 0 or unset, not {self.temperature:g}")
        if self.structured() is not None:
            raise ConfigError(f"beam search does not support grammars: remove {self.shape_field} or use_beam_search")
        return BeamSearchParams(
            self.n,
            max_tokens or UNLIMITED,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
            include_stop_str_in_output=self.include_stop_str_in_output,
            early_stopping=self.early_stopping,
        )

    def sampling(self, *, logprobs: int | None, max_tokens: int | None, prompt_logprobs: int | None) -> Params:
        """Returns the engine's options. Raises ConfigError for a combination that makes no sense."""
        max_tokens = 1 if self.prompt_only else max_tokens
        if self.use_beam_search:
            if logprobs is not None or prompt_logprobs is not None:
                raise ConfigError("beam search does not return log-probabilities: remove logprobs or use_beam_search")
            return self.beam_search(max_tokens)
        given = {name: getattr(self, name) for name in SamplingParams.names() if name in Generation.model_fields}
        given |= {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
        given["structured_outputs"] = self.structured()
        if self.top_p == 0:
            given |= {"top_p": 1.0, "temperature": 0.0}
        return SamplingParams(**given)


class ExtraFile(Body):
    """Another file of the repository."""

    filename: Text = "tmp"
    text: Text


ExtraFiles = Annotated[list[ExtraFile], Field(max_length=4096)]


class CompletionRequest(Generation):
    prompt: Prompt
    max_tokens: Int | None = Field(16, ge=0, description="0, with echo: the prompt alone, and its logprobs")
    logprobs: Int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    best_of: Int | None = Field(None, ge=1, description="refused unless it equals n: there is no re-ranking here")
    suffix: Text | None = Field(
        None, description="what follows the answer, for models with tokens to fill in the middle"
    )
    input_extra: ExtraFiles | None = Field(None, description="other files, the least important first")
    stop_at: StopAt | None = Field(None, description="end the answer with the cursor's line, or with its block")

    @property
    def fills(self) -> bool:
        """Whether the prompt is only what is before the cursor."""
        return bool(self.suffix or self.input_extra)

    @model_validator(mode="after")
    def _check_best_of(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError("best_of is not supported: use n")
        if (self.fills or self.stop_at is not None) and not isinstance(self.prompt, str):
            raise ValueError("suffix, input_extra and stop_at go with one text as prompt")
        if self.fills and self.echo:
            raise ValueError("echo does not go with suffix or input_extra: remove it")
        return self


class ChatRequest(Generation):
    messages: Messages
    max_completion_tokens: Int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: Int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Tools | None = None
    tool_choice: ToolChoice | None = Field(None, description="default: auto, if there are tools")
    parallel_tool_calls: bool = Field(True, description="false: at most one call")
    functions: Replaced = None
    function_call: Replaced = None
    modalities: list[Literal["text"]] | None = Field(None, description=IGNORED)
    audio: Absent = None
    web_search_options: Absent = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables of the chat template")
    reasoning_effort: Word | None = Field(None, description=VARIABLE)
    enable_thinking: bool | None = Field(None, description=VARIABLE)
    add_generation_prompt: bool | None = Field(None, description="default: unless continue_final_message is true")
    continue_final_message: bool = Field(False, description="the answer goes on with the last message")
    verbosity: Word | None = Field(None, description=NAMED)
    service_tier: str | None = Field(None, description=IGNORED)
    safety_identifier: str | None = Field(None, description=IGNORED)
    prompt_cache_key: str | None = Field(None, description=SESSION)

    @field_validator("tool_choice")
    @classmethod
    def _check_choice(cls, choice: Any, given: ValidationInfo) -> Any:
        tools: list[Tool] = given.data.get("tools") or []
        if choice not in (None, "none", "auto") and not tools:
            raise ValueError("tool_choice needs tools: send tools")
        if isinstance(choice, Chosen) and choice.function.name not in [tool.function.name for tool in tools]:
            raise ValueError(f"there is no tool {choice.function.name!r} among tools")
        return choice

    def offered(self) -> list[Tool]:
        """Returns the tools that may be called."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def must_call(self) -> bool:
        """Whether the answer must consist of calls."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def session(self) -> str | None:
        return self.prompt_cache_key or self.user

    def conversation(self, known: Callable[[str], bool]) -> dict[str, Any]:
        """Returns the arguments of ``render_chat``. ``known`` is as in ``ignored``."""
        given = {name: getattr(self, name) for name in VARIABLES if getattr(self, name) is not None and known(name)}
        begins = self.add_generation_prompt
        return {
            "messages": [message.plain() for message in self.messages],
            "tools": [tool.plain() for tool in self.offered()],
            "chat_template_kwargs": {**given, **(self.chat_template_kwargs or {})},
            "continue_final_message": self.continue_final_message,
            "add_generation_prompt": not self.continue_final_message if begins is None else begins,
        }

    def ignored(self, known: Callable[[str], bool]) -> list[str]:
        names = [name for name in (*VARIABLES, "verbosity") if getattr(self, name) is not None]
        names = [name for name in names if name == "verbosity" or not known(name)]
        variables = [f"{KWARGS}.{name}" for name in self.chat_template_kwargs or () if not known(name)]
        return [*names, *variables, *super().ignored(known)]

    def field_of(self, param: str | None) -> str | None:
        return "messages" if param == "prompt" else super().field_of(param)

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens conflicts with max_completion_tokens: remove one")
        return self


class OpenEndedChat(ChatRequest):
    """A chat of another API. Its answer may end where the context does."""

    limit_field: ClassVar[str | None] = None

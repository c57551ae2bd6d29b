"""Request bodies. Names are OpenAI's and vLLM's. A field that is not here is an error that names it; fields that make
no difference to the answer are accepted, and null leaves any optional field at its default."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from forerun.core.errors import ConfigError
from forerun.sampling.params import COLDEST, SamplingParams, StructuredOutputsParams

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64


def _encodable(text: Any) -> Any:
    """JSON can spell half a surrogate pair, which is no text."""
    if isinstance(text, str):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("the text has half a surrogate pair") from None
    return text


Whole = BeforeValidator(_encodable)
Text = Annotated[str, Whole]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Regex = Annotated[str, Field(max_length=65536), Whole]
StopText = Annotated[str, Field(min_length=1, max_length=1024), Whole]


def _shape(value: Any) -> str | None:
    """Which member of a union is meant: errors are then about that one alone."""
    if isinstance(value, list):
        first = value[0] if value else None
        return "lists" if isinstance(first, list) else "numbers" if isinstance(first, int) else "list"
    return {str: "text", dict: "object", bool: "flag"}.get(type(value))


def _choice(what: str) -> Discriminator:
    return Discriminator(_shape, custom_error_type="wrong_kind", custom_error_message=f"must be {what}")


Stop = Annotated[
    Annotated[StopText, Tag("text")] | Annotated[list[StopText], Field(max_length=MAX_STOPS), Tag("list")],
    _choice("a text or a list of texts"),
]
Object = Annotated[dict[str, Any], Tag("object")]
ObjectOrText = Annotated[Object | Annotated[Text, Tag("text")], _choice("an object or a text")]
Prompt = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES), Tag("list")]
    | Annotated[list[TokenId], Field(min_length=1), Tag("numbers")]
    | Annotated[
        list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES), Tag("lists")
    ],
    _choice("a text, a list of texts, a list of token ids, or a list of such lists"),
]


def _absent(value: Any) -> None:
    if value is not None and value not in ("", [], {}):
        raise ValueError("this server does not support it: leave it out")


Absent = Annotated[None, BeforeValidator(_absent), WithJsonSchema({"enum": [None, "", [], {}]})]
"""OpenAI's, and without a meaning here: accepted only where it asks for nothing."""
IGNORED = "accepted; makes no difference"


class Body(BaseModel):
    """A JSON object without unknown fields or converted types. Null is an optional field's default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def _optional(cls) -> set[str]:
        return {field.alias or name for name, field in cls.model_fields.items() if not field.is_required()}

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        optional = cls._optional()
        return {name: value for name, value in given.items() if value is not None or name not in optional}

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


class Speculative(Body):
    """This request's choice among the server's drafters."""

    enabled: bool = Field(True, description="false: decode plainly")
    method: str | None = Field(None, description="one of the loaded methods (default: the first), or none")
    num_speculative_tokens: int | None = Field(None, ge=0, description="at most the server's; 0: decode plainly")
    trace: bool = Field(False, description="return what became of every draft, round by round")


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = Field(False, description="events are not padded here")


class JsonSchema(Body):
    """OpenAI's wrapper of a schema."""

    name: str = Field("schema", max_length=64)
    description: str | None = None
    schema_: Annotated[Object | Annotated[bool, Tag("flag")], _choice("an object, true or false")] = Field(
        alias="schema"
    )
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
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


class Generation(Body):
    """What chat and completions have in common."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int = Field(0, ge=0)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    temperature: float = Field(1.0, ge=0, le=100, description=f"below {COLDEST:g}: the likeliest token")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=1 << 31)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
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
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: ObjectOrText | None = None
    guided_regex: Regex | None = None
    guided_choice: list[Text] | None = None
    guided_grammar: Text | None = None
    speculative: Speculative | None = None
    priority: int = Field(
        0,
        ge=-1000,
        le=1000,
        description="lower is served earlier; no value moves a turn by more than 1024 rounds",
    )
    user: str | None = Field(None, description=IGNORED)
    metadata: dict[str, Any] | None = Field(None, description=IGNORED)
    store: bool | None = Field(None, description="accepted; nothing is stored")

    @model_validator(mode="after")
    def _consistent(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream: true")
        return self

    def structured(self) -> StructuredOutputsParams | None:
        """The request's grammar. Raises ConfigError if several are asked for."""
        given: dict[str, Any] = {}
        if self.response_format is not None and self.response_format.type == "json_object":
            given["json_object"] = True
        if self.response_format is not None and self.response_format.json_schema is not None:
            given["json"] = self.response_format.json_schema.schema_
        sources = [given] if given else []
        if self.structured_outputs is not None:
            sources.append(self.structured_outputs.model_dump(by_alias=True, exclude_none=True))
        guided = {
            "json": self.guided_json, "regex": self.guided_regex, "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }  # fmt: skip
        guided = {key: value for key, value in guided.items() if value is not None}
        if guided:
            sources.append(guided)
        if len(sources) > 1:
            raise ConfigError("response_format, structured_outputs and guided_* exclude each other: give one of them")
        return StructuredOutputsParams(**sources[0]) if sources else None

    def sampling(self, *, logprobs: int | None, max_tokens: int | None, prompt_logprobs: int | None) -> SamplingParams:
        """The engine's options. Raises ConfigError for a combination that makes no sense."""
        return SamplingParams(
            n=self.n,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,  # type: ignore[arg-type]  # ids as text: SamplingParams reads them
            bad_words=self.bad_words,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            skip_special_tokens=self.skip_special_tokens,
            structured_outputs=self.structured(),
        )


class CompletionRequest(Generation):
    prompt: Prompt
    max_tokens: int | None = Field(16, ge=0, description="0, with echo: the prompt alone, and its logprobs")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    best_of: int | None = Field(None, ge=1, description="refused unless it equals n: there is no re-ranking here")
    suffix: Absent = None

    @model_validator(mode="after")
    def _no_best_of(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError("best_of is not supported: ask for n answers and choose among them")
        return self


class TextPart(Body):
    type: Literal["text"]
    text: Text


Content = Annotated[
    Annotated[Text, Tag("text")] | Annotated[list[TextPart], Tag("list")], _choice("a text or a list of text parts")
]


class Message(Body):
    """A turn. An answer's own message is one: what OpenAI's client adds to it may stay, as long as it says nothing."""

    # Before the content, which is null where a tool is called: that is what the error should be about.
    tool_calls: Absent = None
    function_call: Absent = None
    refusal: Absent = None
    annotations: Absent = None
    audio: Absent = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Annotated[str, Field(max_length=256), Whole] | None = None

    def plain(self) -> dict[str, str]:
        """As a chat template wants it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text} | ({"name": self.name} if self.name is not None else {})


class ChatRequest(Generation):
    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Absent = None
    tool_choice: Literal["none", "auto"] | None = Field(None, description=IGNORED)
    parallel_tool_calls: bool | None = Field(None, description=IGNORED)
    functions: Absent = None
    function_call: Literal["none", "auto"] | None = Field(None, description=IGNORED)
    modalities: list[Literal["text"]] | None = Field(None, description=IGNORED)
    audio: Absent = None
    prediction: Absent = None
    web_search_options: Absent = None
    reasoning_effort: Absent = None
    verbosity: Absent = None
    service_tier: str | None = Field(None, description=IGNORED)
    safety_identifier: str | None = Field(None, description=IGNORED)
    prompt_cache_key: str | None = Field(None, description=IGNORED)

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens are the same: give one of them")
        return self


class TokenizeRequest(Body):
    model: str | None = None
    prompt: Text | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=4096)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_text(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[TokenId]

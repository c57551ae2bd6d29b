"""Ollama's API: its requests as chats and completions, and its answers, whole or as lines of JSON."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

from fastapi import FastAPI, Request, Response
from pydantic import BeforeValidator, Field, Tag, WithJsonSchema

from forerun.engine.stop import LENGTH
from forerun.serve import answers
from forerun.serve.answering import answer
from forerun.serve.answers import Answer, sometimes
from forerun.serve.errors import ApiError, converted
from forerun.serve.models import Listed, Loaded, Models
from forerun.serve.openapi import BODY, GENERATION, responses
from forerun.serve.options import seconds_of
from forerun.serve.schema import (
    KEEP_ALIVE,
    MAX_LOGPROBS,
    NAMED,
    VARIABLE,
    VARIABLES,
    Absent,
    Asked,
    Body,
    CallId,
    CompletionRequest,
    FunctionName,
    Int,
    Object,
    OpenEndedChat,
    Text,
    Tools,
    one_of,
    plain_call,
)
from forerun.serve.server import Server
from forerun.serve.stream import ChatReply, Choice, CompletionReply, Reply
from forerun.serve.tools.base import arguments_of

VERSION = "0.13.0"
"""Of Ollama, whose API this is: clients compare it to learn what a server can do."""
OPTIONS = {
    "num_predict": "n_predict", "repeat_penalty": "repetition_penalty",
    **{name: name for name in (
        "temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty",
    )},
}  # fmt: skip
"""Ollama's options that are served, and what chats and completions call them."""
FOREVER = "9999-12-31T23:59:59Z"
KeepAlive = Annotated[
    Any, BeforeValidator(seconds_of), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "number"}]})
]
"""A number of seconds or a text such as 5m."""


# ---------------------------------------------------------------- requests


class OllamaAsked(Asked):
    """What both kinds of requests have."""

    stream: bool = True
    options: dict[str, Any] | None = Field(
        None,
        description=f"{', '.join(f'`{name}`' for name in OPTIONS)}; others are ignored, which Forerun-Ignored says",
    )
    format: Annotated[Object | Annotated[Literal["", "json"], Tag("text")], one_of("'json' or a JSON schema")] = Field(
        "", description="json, or a JSON schema"
    )
    think: Annotated[Annotated[bool, Tag("flag")] | Text, one_of("true, false or an effort")] | None = Field(
        None, description=VARIABLE
    )
    keep_alive: KeepAlive = Field(
        None, description="with --models, how long the model stays once it is idle; without, it makes no difference"
    )
    logprobs: bool = False
    top_logprobs: Int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @classmethod
    def _renamed(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in given.items() if name != "tools" or value != []}

    def ignored(self, known: Callable[[str], bool]) -> list[str]:
        names = [f"options.{name}" for name, value in (self.options or {}).items()
                 if name not in OPTIONS and value is not None]  # fmt: skip
        names += [KEEP_ALIVE] if self.keep_alive is not None and not known(KEEP_ALIVE) else []
        names += ["think"] if self.think is not None and not any(map(known, VARIABLES)) else []
        return [*names, *super().ignored(known)]

    def field_of(self, param: str | None) -> str | None:
        param = {"max_tokens": "n_predict", "response_format": "format"}.get(param or "", param)
        return next((f"options.{name}" for name, ours in OPTIONS.items() if ours == param), param)

    def given(self) -> dict[str, Any]:
        """Returns the fields that chats and completions share."""
        options = {OPTIONS[name]: value for name, value in (self.options or {}).items() if name in OPTIONS}
        if isinstance(limit := options.get("n_predict"), int) and limit < 0:
            options["n_predict"] = -1  # Ollama's -2 is no limit either: the context is
        if isinstance(self.format, dict):
            options["response_format"] = {"type": "json_schema", "json_schema": {"schema": self.format}}
        elif self.format:
            options["response_format"] = {"type": "json_object"}
        return {"stream": self.stream, **options}

    def chat(self, messages: list[dict[str, Any]], **more: Any) -> OpenEndedChat:
        """Returns the request as one for a chat. Raises ApiError."""
        given = {**self.given(), "messages": messages, "logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        if self.think is not None:
            given["enable_thinking"] = self.think is not False
            given["reasoning_effort"] = self.think if isinstance(self.think, str) else None
        return converted(OpenEndedChat, {**given, **more}, self.field_of)


class OllamaAsCompletion(CompletionRequest):
    limit_field: ClassVar[str | None] = None


class OllamaFunction(Body):
    name: FunctionName
    arguments: dict[str, Any]


class OllamaCall(Body):
    id: CallId | None = None
    function: OllamaFunction


class OllamaMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text = ""
    thinking: Text | None = Field(None, description="an assistant's thoughts, for templates that show them")
    images: Absent = None
    tool_calls: list[OllamaCall] | None = Field(None, description="an assistant's")
    tool_name: Text | None = Field(None, description="the function whose result this is; default: the next call's")
    tool_call_id: CallId | None = Field(None, description="the call whose result this is")


class OllamaChat(OllamaAsked):
    messages: list[OllamaMessage] = Field(default_factory=list, max_length=4096, description="none: the model is ready")
    tools: Tools | None = None

    def as_chat(self) -> OpenEndedChat:
        tools = None if self.tools is None else [tool.model_dump(exclude_none=True) for tool in self.tools]
        return self.chat(_messages(self.messages), tools=tools)


class OllamaGenerate(OllamaAsked):
    prompt: Text = Field("", description="none: the model is ready")
    suffix: Text | None = Field(None, description="the text after the answer")
    system: Text | None = None
    raw: bool = Field(False, description="true: the prompt as it is; so it is without a chat template")
    images: Absent = None
    context: list[Int] | None = Field(None, description=NAMED)
    template: Text | None = Field(None, description=NAMED)

    def ignored(self, known: Callable[[str], bool]) -> list[str]:
        names = [name for name in ("context", "template") if getattr(self, name)]
        return [*names, *super().ignored(known)]

    def as_chat(self) -> OpenEndedChat:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.chat([*system, {"role": "user", "content": self.prompt}])

    def as_completion(self) -> OllamaAsCompletion:
        given = {"n_predict": -1, **self.given(), "prompt": self.prompt, "suffix": self.suffix}
        given["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        return converted(OllamaAsCompletion, given, self.field_of)


class OllamaShow(Asked):
    verbose: bool | None = Field(None, description="accepted; makes no difference")
    name: str | None = Field(None, description="the older name of model")


def _messages(given: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Returns the messages as a chat's. Ollama's calls have no ids: a result goes to the next call of its name."""
    result: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []
    """Ids and names of calls without a result so far."""
    number = 0
    for index, message in enumerate(given):
        plain: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking is not None:
            plain["reasoning_content"] = message.thinking
        for call in message.tool_calls or ():
            number += 1
            id, function = call.id or f"call{number:05}", call.function
            waiting.append((id, function.name))
            plain.setdefault("tool_calls", []).append(plain_call(id, function.name, function.arguments))
        if message.role == "tool":
            wanted = (message.tool_call_id, message.tool_name)
            found = [call for call in waiting if call[0] == wanted[0] or (wanted[0] is None and call[1] == wanted[1])]
            found = found or (waiting if wanted == (None, None) else [])
            if not found:
                what = message.tool_call_id or message.tool_name or "a tool"
                raise ApiError(400, f"message {index} is the result of {what!r}, which no message before called")
            plain["tool_call_id"] = found[0][0]
            waiting.remove(found[0])
        result.append(plain)
    return result


# ---------------------------------------------------------------- answers


class OllamaError(Answer):
    error: str


class OllamaCalled(Answer):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(Answer):
    id: str
    index: int = Field(description="as in `function`: litellm looks for it here")
    function: OllamaCalled


class OllamaAnswerMessage(Answer):
    role: Literal["assistant"]
    content: str
    thinking: str = sometimes("if there is reasoning")
    tool_calls: list[OllamaToolCall] = sometimes("if tools are called")


class OllamaLine(Answer):
    """A whole answer, or a line of a stream, of which only the last has reason, counts and times in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] = sometimes("at the end")
    total_duration: int = sometimes("at the end")
    load_duration: int = sometimes("at the end")
    prompt_eval_count: int = sometimes("at the end")
    prompt_eval_duration: int = sometimes("at the end")
    eval_count: int = sometimes("at the end")
    eval_duration: int = sometimes("at the end")
    logprobs: list[answers.ListedToken] = sometimes("if they were asked for")


class OllamaChatAnswer(OllamaLine):
    message: OllamaAnswerMessage


class OllamaGenerateAnswer(OllamaLine):
    response: str
    thinking: str = sometimes("if there is reasoning")


class OllamaDetails(Answer):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Answer):
    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    modified_at: str = sometimes("in the list of models")
    expires_at: str = sometimes("in the list of loaded models")
    size_vram: int = sometimes("in the list of loaded models")
    context_length: int = sometimes("in the list of loaded models")


class OllamaModels(Answer):
    models: list[OllamaModel]


class OllamaShown(Answer):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float | None) -> int:
    return round((seconds or 0.0) * 1e9)


class Lines(Reply):
    """Answers in lines of JSON of the kind ``line``."""

    media_type = "application/x-ndjson"
    line: type[OllamaLine] = OllamaGenerateAnswer
    id_prefix = ""
    parsed = True

    def _news(self, new: Choice) -> dict[str, Any]:
        """Returns what is new of the answer, by its kind."""
        pieces = self.pieces(new)
        result = {
            "text": "".join(piece.text for piece in pieces if piece.call is None and not piece.reasoning),
            "thinking": "".join(piece.text for piece in pieces if piece.reasoning),
            "tool_calls": self.calls(last=new.finish is not None),
            "logprobs": [self._token(placed) for placed in new.logprobs],
        }
        return {name: value for name, value in result.items() if value}

    def _line(self, news: dict[str, Any], **fields: Any) -> OllamaLine:
        fields |= {"logprobs": news.pop("logprobs")} if "logprobs" in news else {}
        text = news.pop("text", "")
        if self.line is OllamaChatAnswer:
            fields["message"] = OllamaAnswerMessage(role="assistant", content=text, **news)
        else:
            fields |= {"response": text, **news}
        return self.line(model=self.head["model"], created_at=_time(time.time()), **{"done": False, **fields})

    def calls(self, *, last: bool) -> list[OllamaToolCall]:
        """Returns the calls that have become whole and, at the end, the ``last`` one, which may be cut off."""
        return []

    def _choice_events(self, new: Choice) -> list[str]:
        news = self._news(new)
        return [_json(self._line(news))] if news else []

    def _opening_events(self) -> list[str]:
        return []

    def _final_events(self) -> str:
        return _json(self._line({}, **self._end()))

    def _error_events(self, error: ApiError) -> str:
        return json.dumps(error.body_for("/api/")) + "\n"

    def _whole(self) -> answers.Answer:
        return self._line(self._news(self.choices[0]), **self._end())

    def _end(self) -> dict[str, Any]:
        """What only the last line has."""
        metrics, usage = self.streams[0].jobs[0].metrics, self.usage()
        first, total = _nanoseconds(metrics.time_to_first_token), _nanoseconds(metrics.seconds)
        return {
            "done": True, "done_reason": "length" if self.finish_reason(self.choices[0]) == LENGTH else "stop",
            "total_duration": total, "load_duration": 0, "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": first, "eval_count": usage.completion_tokens,
            "eval_duration": max(1, total - first),
        }  # fmt: skip


class OllamaChatReply(Lines, ChatReply):
    line: type[OllamaLine] = OllamaChatAnswer
    sent = 0
    """Calls that lines had."""

    def calls(self, *, last: bool) -> list[OllamaToolCall]:
        parser = self._parsers[0] if self.line is OllamaChatAnswer else None
        new = [call for call in parser.calls[self.sent :] if call.complete or last] if parser is not None else []
        begin, self.sent = self.sent, self.sent + len(new)
        return [
            OllamaToolCall(
                id=call.id, index=index,
                function=OllamaCalled(index=index, name=call.name, arguments=arguments_of(call.arguments)),
            )
            for index, call in enumerate(new, begin)
        ]  # fmt: skip


class OllamaGenerateReply(OllamaChatReply):
    line = OllamaGenerateAnswer


class OllamaTextReply(Lines, CompletionReply):
    """An answer to a prompt as it is."""


def _json(line: OllamaLine) -> str:
    return line.model_dump_json(exclude_unset=True) + "\n"


# ---------------------------------------------------------------- routes

MODELS = (OllamaError, OllamaChatAnswer, OllamaGenerateAnswer)
"""Of errors and lines."""


def install(app: FastAPI, models: Models) -> None:
    """Adds the routes."""
    chatting = responses(*GENERATION, answer=OllamaChatAnswer, chunk=OllamaChatAnswer, error=OllamaError, lines=True)
    generating = responses(
        *GENERATION, answer=OllamaGenerateAnswer, chunk=OllamaGenerateAnswer, error=OllamaError, lines=True
    )

    async def ready(request: Request, body: OllamaAsked, kind: type[OllamaLine], **fields: Any) -> Response:
        """Loads a model without a question or, where ``keep_alive`` is 0, puts it away."""
        name = await models.find(body.model)
        reason: Literal["load", "unload"] = "load"
        if models.several and body.keep_alive == 0:
            await models.put_away(name)
            reason = "unload"
        else:
            await models.served(request, body, body.keep_alive)
        line = kind(model=name, created_at=_time(time.time()), done=True, done_reason=reason, **fields)
        return Response(line.model_dump_json(exclude_unset=True), media_type="application/json")

    @app.post("/api/chat", response_model=None, responses=chatting)
    async def ollama_chat(body: OllamaChat, request: Request) -> Response:
        if not body.messages:
            message = OllamaAnswerMessage(role="assistant", content="")
            return await ready(request, body, OllamaChatAnswer, message=message)
        return await answer(models, request, body, _chat, body.keep_alive)

    @app.post("/api/generate", response_model=None, responses=generating)
    async def ollama_generate(body: OllamaGenerate, request: Request) -> Response:
        if not body.prompt and not body.suffix:
            return await ready(request, body, OllamaGenerateAnswer, response="")
        return await answer(models, request, body, _generate, body.keep_alive)

    lists = responses(answer=OllamaModels, error=OllamaError)

    @app.get("/api/tags", responses=lists, response_model_exclude_unset=True)
    async def ollama_tags() -> OllamaModels:
        return OllamaModels(models=[_entry(each, modified_at=_time(each.modified)) for each in await models.listed()])

    @app.get("/api/ps", responses=lists, response_model_exclude_unset=True)
    async def ollama_ps() -> OllamaModels:
        known = {each.name: each for each in await models.listed()}
        return OllamaModels(
            models=[_in_memory(known[name], each) for name, each in models.loaded().items() if name in known]
        )

    @app.get("/api/version", responses=responses(answer=answers.Version, error=OllamaError))
    async def ollama_version() -> dict[str, str]:
        return {"version": VERSION}

    @app.post("/api/show", responses=responses(*BODY, answer=OllamaShown, error=OllamaError))
    async def ollama_show(body: OllamaShow) -> OllamaShown:
        facts = await models.facts(await models.find(body.model or body.name))
        template, names = facts.chat_template, {ours: name for name, ours in OPTIONS.items()}
        kinds = {
            "completion": True, "tools": template is not None, "insert": facts.fills, "thinking": facts.thinks,
        }  # fmt: skip
        details = _details(facts)
        return OllamaShown(
            modelfile=f"FROM {facts.name}", modified_at=_time(facts.modified), details=details,
            capabilities=[name for name, has in kinds.items() if has],
            parameters="\n".join(f"{names.get(name, name)} {value:g}" for name, value in facts.sampling.items()),
            template=template if isinstance(template, str) else "",
            model_info={
                "general.basename": facts.name, "general.architecture": details.family,
                f"{details.family}.context_length": facts.max_model_len,
            },
        )  # fmt: skip


async def _chat(server: Server, body: OllamaChat, request_id: str) -> Reply:
    return await server.chat(body.as_chat(), request_id, OllamaChatReply)


async def _generate(server: Server, body: OllamaGenerate, request_id: str) -> Reply:
    if body.raw or body.suffix or server.text.chat_template is None:
        return await server.completion(body.as_completion(), request_id, OllamaTextReply)
    return await server.chat(body.as_chat(), request_id, OllamaGenerateReply)


def _details(model: Listed) -> OllamaDetails:
    family = re.sub("For[A-Z].*", "", model.architecture).lower()
    return OllamaDetails(
        parent_model="", format="", family=family, families=[family], parameter_size="",
        quantization_level=model.quantization,
    )  # fmt: skip


def _in_memory(model: Listed, loaded: Loaded) -> OllamaModel:
    facts = loaded.server.engine.facts
    entry = _entry(
        replace(model, architecture=facts.architecture, quantization=facts.quantization),
        expires_at=FOREVER if loaded.expires is None else _time(loaded.expires),
        size_vram=0 if facts.device == "cpu" else loaded.size, context_length=facts.max_model_len,
    )  # fmt: skip
    entry.size = loaded.size
    return entry


def _entry(model: Listed, **fields: Any) -> OllamaModel:
    digest = hashlib.sha256(f"{model.name} {model.size}".encode()).hexdigest()
    return OllamaModel(
        name=model.name, model=model.name, size=model.size, digest=digest, details=_details(model), **fields
    )

"""Turns deltas of the engine into OpenAI's answers, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from json.encoder import encode_basestring as quote
from typing import TYPE_CHECKING, Any, TypeVar

from forerun.core.errors import ForerunError
from forerun.engine.client import Delta, Stream
from forerun.engine.jobs import TokenLogprobs, finite
from forerun.engine.metrics import RequestMetrics, RoundTrace
from forerun.engine.stop import ABORT, ERROR, LENGTH, STOP, Finish
from forerun.serve import answers
from forerun.serve.errors import ApiError, as_api_error
from forerun.serve.schema import ChatRequest, Generation
from forerun.serve.text import PendingLogprobs, PlacedToken, top_by_name
from forerun.serve.tools.base import ParsedCall, Piece
from forerun.speculate.accept.base import NO_TOKEN

if TYPE_CHECKING:
    from forerun.serve.server import Server

M = TypeVar("M", answers.Metrics, answers.SpeculativeMetrics)
PLACEHOLDER = "\0"
"""Stands for the text of an event whose other parts are reused."""
DONE = "data: [DONE]\n\n"


@dataclass(slots=True)
class Choice:
    """One answer: all of it, or what is new of it."""

    index: int
    text: str = ""
    logprobs: list[PlacedToken] = field(default_factory=list)
    finish: Finish | None = None
    num_tokens: int = 0
    trace: list[answers.TraceRound] = field(default_factory=list)

    @property
    def stop_reason(self) -> str | int | None:
        return None if self.finish is None else self.finish.stopped_by


async def merge(streams: Sequence[Stream]) -> AsyncGenerator[list[tuple[int, Delta]]]:
    """Yields deltas of several requests with the request's index: each time all that are there.

    Ends the requests when its reader leaves early.
    """
    reading: dict[asyncio.Task[list[Delta]], int] = {}
    try:
        if len(streams) == 1:
            while deltas := await streams[0].read():
                yield [(0, delta) for delta in deltas]
            return
        reading = {asyncio.create_task(stream.read()): index for index, stream in enumerate(streams)}
        while reading:
            ready, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            batch: list[tuple[int, Delta]] = []
            for task in ready:
                deltas, index = task.result(), reading.pop(task)
                if deltas:
                    batch += [(index, delta) for delta in deltas]
                    reading[asyncio.create_task(streams[index].read())] = index
            if batch:
                yield batch
    finally:
        for task in reading:
            if not task.cancel():
                task.exception()  # so that asyncio does not report it
        for stream in streams:
            stream.abort()


class Reply(ABC):
    """The answers to one HTTP request; each kind of endpoint has a subclass."""

    answer_model: Callable[..., answers.Whole]
    answer_object: str
    chunk_model: Callable[..., answers.Chunk]
    chunk_object: str
    id_prefix: str
    media_type = "text/event-stream"
    """Of a stream."""
    parsed = False
    """Whether a parser reads the text before it is sent."""

    def __init__(self, server: Server, streams: Sequence[Stream], body: Generation, request_id: str) -> None:
        self.streams = streams
        self.text = server.text
        options, sequence = body.stream_options, streams[0].jobs[0].sequence
        self.logprobs = sequence.params.logprobs is not None
        self.include_usage = options is not None and options.include_usage
        self.continuous_usage = options is not None and options.continuous_usage_stats
        self.traced = body.speculative is not None and body.speculative.trace
        self.predicted = body.prediction is not None
        self.of_prompt = body.prompt_logprobs
        self.prompt_only = body.prompt_only
        facts = server.engine.facts
        self.identity = facts.identity
        self.method = sequence.drafter
        most = facts.drafters.get(sequence.drafter or "", 0)
        self.num_spec_tokens = most if sequence.max_draft is None else min(most, sequence.max_draft)
        created = int(time.time())
        self.head: dict[str, Any] = {"id": self.id_prefix + request_id, "created": created, "model": server.name}
        self.per_prompt = len(streams[0].jobs)
        self.choices = [Choice(index) for index in range(self.per_prompt * len(streams))]
        self.failed = False
        self._pending_logprobs = [PendingLogprobs() for _ in self.choices]
        self._frames: dict[int, tuple[str, str]] = {}
        """By choice: what comes before and after the text in an event that has nothing else new."""

    @abstractmethod
    def whole_choice(self, choice: Choice) -> Any:
        """Returns a finished answer's entry in ``choices``."""

    @abstractmethod
    def chunk_choices(self, choice: Choice) -> list[Any]:
        """Returns the entries of what is new of an answer, an event each; none if nothing can be sent yet."""

    def pieces(self, choice: Choice) -> list[Piece]:
        """Returns what is new of an answer, by its kind: text, reasoning or calls."""
        return [Piece(choice.text)] if choice.text or choice.logprobs else []

    def finish_reason(self, choice: Choice) -> str | None:
        return None if choice.finish is None else choice.finish.reason

    def _read(self, index: int, delta: Delta) -> Choice:
        """Appends a delta to its choice, and returns what is new of it. Raises ApiError if the answer failed."""
        if delta.finish is not None and delta.finish.reason == ERROR:
            message = str(delta.finish.stopped_by)
            raise ApiError(400 if message == NO_TOKEN or message.startswith("the grammar") else 500, message)
        choice = self.choices[index * self.per_prompt + delta.index]
        choice.text += delta.text
        new = Choice(choice.index, delta.text, [], delta.finish, len(delta.token_ids))
        if self.logprobs:
            new.logprobs = self._pending_logprobs[choice.index].push(delta, len(choice.text))
        if self.traced and delta.round is not None:
            new.trace = [self._trace(delta.round, delta.texts)]
        choice.logprobs.extend(new.logprobs)
        choice.num_tokens += new.num_tokens
        choice.finish = delta.finish
        choice.trace.extend(new.trace)
        return new

    def _trace(self, round_: RoundTrace, texts: Sequence[str]) -> answers.TraceRound:
        """A round in text: every emitted token with its origin, and the drafted tokens that were not kept. The emitted
        tokens may go on after the answer's text, where a stop string cut it."""
        return answers.TraceRound(
            tokens=list(zip(texts, round_.origins)),  # type: ignore[arg-type]
            token_ids=list(round_.tokens),
            rejected=[self.text.token_text(token)[0] for token in round_.rejected],
            rejected_ids=list(round_.rejected),
            drafted=round_.drafted,
            method=round_.method,
        )

    def _token(self, placed: PlacedToken) -> answers.ListedToken:
        item = placed.item
        top = [answers.TokenLogprob(**self._logprob(token, value)) for token, value in item.top.items()]
        return answers.ListedToken(**self._logprob(item.token, item.logprob), top_logprobs=top)

    def _logprob(self, token: int, value: float) -> dict[str, Any]:
        text, encoded = self.text.token_text(token)
        return {"token": text, "logprob": finite(value), "bytes": encoded}

    def _prompt_logprobs(self, stream: Stream) -> answers.PromptLogprobs:
        """Those of a prompt's tokens: each token's own first, then the likeliest tokens'."""
        return [None if item is None else self._listed(item) for item in stream.jobs[0].prompt_logprobs or ()]

    def _listed(self, item: TokenLogprobs) -> dict[int, answers.PromptLogprob]:
        ranked = item.with_top(self.of_prompt or 0).ranked()
        return {
            token: answers.PromptLogprob(
                logprob=finite(value), rank=rank, decoded_token=self.text.token_text(token)[0]
            )
            for token, (value, rank) in ranked.items()
        }  # fmt: skip

    async def collect(self) -> answers.Answer:
        """Returns the whole answer. Raises ApiError or ForerunError if it failed."""
        async with aclosing(merge(self.streams)) as batches:
            async for batch in batches:
                for index, delta in batch:
                    self._read(index, delta)
        return self._whole()

    def _whole(self) -> answers.Answer:
        choices = []
        for choice in self.choices:
            choices.append(self.whole_choice(choice))
            if self.traced:
                choices[-1].trace = choice.trace
        return self.answer_model(
            **self.head, object=self.answer_object, choices=choices, usage=self.usage(), metrics=self.metrics()
        )

    async def events(self) -> AsyncIterator[tuple[str, bool]]:
        """Yields the answer as server-sent events, each time all that are there, and whether they are the last. A
        failure is an event, too."""
        last = ""
        try:
            for event in self._opening_events():
                yield event, False
            async with aclosing(merge(self.streams)) as batches:
                async for batch in batches:
                    events, failure = self._delta_events(batch)
                    if failure is not None:
                        last = events
                        raise failure
                    if all(choice.finish is not None for choice in self.choices):
                        last = events
                        break
                    if events:
                        yield events, False
            last += self._final_events()
        except (ApiError, ForerunError) as error:
            self.failed = True
            last += self._error_events(as_api_error(error))
        yield last, True

    def _opening_events(self) -> list[str]:
        """Returns the events before the first token."""
        return []

    def _final_events(self) -> str:
        usage = self._event([], usage=self.usage(), metrics=self.metrics()) if self.include_usage else ""
        return usage + DONE

    def _error_events(self, error: ApiError) -> str:
        return _data(answers.Error.model_validate(error.body)) + DONE

    def _delta_events(self, batch: Sequence[tuple[int, Delta]]) -> tuple[str, ApiError | None]:
        """Returns the events of deltas, up to one that failed, and its error."""
        events: list[str] = []
        for stream, delta in batch:
            index = stream * self.per_prompt + delta.index
            if delta.finish is None and not (self.logprobs or self.traced or self.continuous_usage or self.parsed):
                self.choices[index].num_tokens += len(delta.token_ids)
                events.append(self._text_event(index, delta.text))
                continue
            try:
                new = self._read(stream, delta)
            except ApiError as error:
                return "".join(events), error
            if new.text or new.finish is not None or new.trace or (self.logprobs and new.logprobs):
                events.extend(self._choice_events(new))
        return "".join(events), None

    def _choice_events(self, new: Choice) -> list[str]:
        entries = self.chunk_choices(new)
        if new.trace:
            entries[-1].trace = new.trace
        return [self._event([entry]) for entry in entries]

    def _text_event(self, index: int, text: str) -> str:
        """The event of a choice with nothing new but text: it is formatted once, and then only the text changes."""
        if not text:
            return ""
        self.choices[index].text += text
        frame = self._frames.get(index)
        if frame is None:
            event = self._event(self.chunk_choices(Choice(index, PLACEHOLDER)))
            before, _, after = event.partition(quote(PLACEHOLDER))
            frame = self._frames[index] = (before, after)
        return frame[0] + quote(text) + frame[1]

    def _event(self, choices: list[Any], **fields: Any) -> str:
        if self.continuous_usage:
            fields.setdefault("usage", self.usage())
        return _data(self.chunk_model(**self.head, object=self.chunk_object, choices=choices, **fields))

    @property
    def outcome(self) -> str:
        """Why the answers ended; ``abort``: the client left before."""
        if self.failed:
            return ERROR
        return ",".join(dict.fromkeys(self.finish_reason(choice) or ABORT for choice in self.choices))

    def usage(self) -> answers.Usage:
        """Counts each prompt once, and every emitted token, that which ended the answer included."""
        prompt = sum(len(stream.jobs[0].sequence.prompt) for stream in self.streams)
        completion = sum(choice.num_tokens for choice in self.choices)
        cached = sum(stream.jobs[0].metrics.num_cached_tokens for stream in self.streams)
        usage = answers.Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=answers.PromptDetails(cached_tokens=cached),
        )
        if details := self._details():
            usage.completion_tokens_details = answers.CompletionDetails(**details)
        return usage

    def _details(self) -> dict[str, int]:
        """Counts of some of the emitted tokens."""
        if not self.predicted:
            return {}
        each = [job.metrics for stream in self.streams for job in stream.jobs]
        accepted = sum(metrics.num_accepted_prediction_tokens for metrics in each)
        looked_up = sum(metrics.num_prediction_tokens for metrics in each)
        return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": looked_up - accepted}

    def metrics(self) -> answers.Metrics:
        counts = RequestMetrics.merged([job.metrics for stream in self.streams for job in stream.jobs]).as_dict()
        speculative = _of_counts(
            answers.SpeculativeMetrics, counts, method=self.method, identical_to_plain_decoding=self.identity,
            num_spec_steps=counts["num_drafts"], num_spec_tokens=self.num_spec_tokens,
            per_step_accepted=counts["accepted_per_step"], per_step_drafted=counts["drafted_per_step"],
        )  # fmt: skip
        return _of_counts(answers.Metrics, counts, speculative_decoding=speculative)


def _of_counts(model: type[M], counts: Mapping[str, Any], **others: Any) -> M:
    """Fills a model with the ``counts`` of its fields' names, and ``others``."""
    return model(**{name: counts[name] for name in model.model_fields if name in counts}, **others)


def _data(body: answers.Answer) -> str:
    return f"data: {body.model_dump_json(exclude_unset=True)}\n\n"


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as an answer repeats it, and the offsets of its tokens."""

    text: str = ""
    offsets: Sequence[int] = ()
    top: int = 0
    """The likeliest tokens that are listed for each of its tokens."""


class CompletionReply(Reply):
    """``echo`` are the prompts, if the answers repeat them. Where nothing else is asked for, the one token that the
    engine makes when it reads a prompt is dropped."""

    answer_model, answer_object = answers.Completion, "text_completion"
    chunk_model, chunk_object = answers.CompletionChunk, "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, *arguments: Any, echo: Sequence[Echo] | None = None) -> None:
        super().__init__(*arguments)
        self.echo = echo

    def _echo(self, choice: Choice) -> Echo:
        return self.echo[choice.index // self.per_prompt] if self.echo is not None else Echo()

    def _read(self, index: int, delta: Delta) -> Choice:
        if self.prompt_only and delta.finish is not None and delta.finish.reason != ERROR:
            delta = Delta(delta.index, [], [], None, Finish(LENGTH), delta.seconds)
        return super()._read(index, delta)

    def _opening_events(self) -> list[str]:
        if self.echo is None:
            return []
        return [self._event([self._entry(each, self._echo(each).text, None)]) for each in self.choices]

    def whole_choice(self, choice: Choice) -> answers.CompletionChunkChoice:
        prompt = self._echo(choice)
        entry = self._entry(choice, prompt.text + choice.text, self._logprobs(choice, prompt))
        if self.of_prompt is not None:
            entry.prompt_logprobs = self._prompt_logprobs(self.streams[choice.index // self.per_prompt])
        return entry

    def chunk_choices(self, choice: Choice) -> list[answers.CompletionChunkChoice]:
        return [self._entry(choice, choice.text, self._logprobs(choice, Echo()))]

    def _entry(
        self, choice: Choice, text: str, logprobs: answers.CompletionLogprobs | None
    ) -> answers.CompletionChunkChoice:
        reason: Any = self.finish_reason(choice)
        return answers.CompletionChunkChoice(
            index=choice.index, text=text, logprobs=logprobs, finish_reason=reason, stop_reason=choice.stop_reason
        )

    def _logprobs(self, choice: Choice, prompt: Echo) -> answers.CompletionLogprobs | None:
        """Of the prompt, whose first token has no probability, and of the answer."""
        if not self.logprobs:
            return None
        job = self.streams[choice.index // self.per_prompt].jobs[0]
        listed = [item and item.with_top(prompt.top) for item in job.prompt_logprobs or ()]
        tokens = list(zip(job.sequence.tokens, listed, prompt.offsets))
        start = len(prompt.text)
        tokens += [(placed.item.token, placed.item, start + placed.offset) for placed in choice.logprobs]
        return answers.CompletionLogprobs(
            tokens=[self.text.token_name(token) for token, _, _ in tokens],
            token_logprobs=[None if item is None else finite(item.logprob) for _, item, _ in tokens],
            top_logprobs=[None if item is None else top_by_name(item, self.text) for _, item, _ in tokens],
            text_offset=[offset for _, _, offset in tokens],
        )


class ChatReply(Reply):
    answer_model, answer_object = answers.Chat, "chat.completion"
    chunk_model, chunk_object = answers.ChatChunk, "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, server: Server, streams: Sequence[Stream], body: ChatRequest, request_id: str) -> None:
        super().__init__(server, streams, body, request_id)
        self.calls_only = body.must_call
        prompt = streams[0].jobs[0].sequence.prompt
        self._parsers = [self.text.answer_parser(prompt, body) for _ in self.choices]
        self.parsed = self.parsed or self._parsers[0] is not None

    def _opening_events(self) -> list[str]:
        delta = answers.ChatDelta(role="assistant", content="")
        return [self._event([answers.ChatChunkChoice(delta=delta, **self._fields(each))]) for each in self.choices]

    def whole_choice(self, choice: Choice) -> answers.ChatChoice:
        message = answers.ChatMessage(role="assistant", content=choice.text, refusal=None)
        parser = self._parsers[choice.index]
        if parser is not None:
            texts = [piece for piece in parser.push(choice.text, last=True) if piece.call is None]
            reasoning = "".join(piece.text for piece in texts if piece.reasoning)
            message.content = "".join(piece.text for piece in texts if not piece.reasoning)
            if parser.calls or reasoning or self.calls_only:
                message.content = message.content or None
            if self.text.reasoning_parser is not None:
                message.reasoning_content = reasoning or None
            if parser.calls:
                message.tool_calls = [_tool_call(call) for call in parser.calls]
        return answers.ChatChoice(message=message, **self._fields(choice))

    def _whole(self) -> answers.Answer:
        answer = super()._whole()
        if self.of_prompt is not None and isinstance(answer, answers.Chat):
            answer.prompt_logprobs = self._prompt_logprobs(self.streams[0])
        return answer

    def _details(self) -> dict[str, int]:
        details, boundary = super()._details(), self.text.boundary
        if boundary is not None and all(choice.finish is not None for choice in self.choices):
            jobs = [job for stream in self.streams for job in stream.jobs]
            thoughts = [boundary.num_thoughts(job.sequence.prompt, job.output_ids) for job in jobs]
            details["reasoning_tokens"] = sum(thoughts)
        return details

    def pieces(self, choice: Choice) -> list[Piece]:
        parser = self._parsers[choice.index]
        return super().pieces(choice) if parser is None else parser.push(choice.text, last=choice.finish is not None)

    def chunk_choices(self, choice: Choice) -> list[answers.ChatChunkChoice]:
        parser = self._parsers[choice.index]
        if parser is None:
            return [answers.ChatChunkChoice(delta=answers.ChatDelta(content=choice.text), **self._fields(choice))]
        last = choice.finish is not None
        deltas = [_delta(piece) for piece in self.pieces(choice)]
        if not deltas and (last or choice.trace or choice.logprobs):
            deltas = [answers.ChatDelta()]
        text_only = replace(choice, finish=None, logprobs=[])
        choices = [*[text_only] * (len(deltas) - 1), choice]
        return [answers.ChatChunkChoice(delta=delta, **self._fields(each)) for delta, each in zip(deltas, choices)]

    def _fields(self, choice: Choice) -> dict[str, Any]:
        """The fields that whole answers and chunks share."""
        logprobs = None
        if self.logprobs:
            logprobs = answers.ChatLogprobs(content=[self._token(placed) for placed in choice.logprobs])
        return {
            "index": choice.index, "logprobs": logprobs, "finish_reason": self.finish_reason(choice),
            "stop_reason": choice.stop_reason,
        }  # fmt: skip

    def finish_reason(self, choice: Choice) -> str | None:
        parser, reason = self._parsers[choice.index], super().finish_reason(choice)
        called = parser is not None and parser.calls and all(call.complete for call in parser.calls)
        return "tool_calls" if reason == STOP and called else reason


def _tool_call(call: ParsedCall) -> answers.ToolCall:
    function = answers.CalledFunction(name=call.name, arguments=call.arguments)
    return answers.ToolCall(id=call.id, type="function", function=function)


def _delta(piece: Piece) -> answers.ChatDelta:
    call, text = piece.call, piece.text
    if call is None:
        return answers.ChatDelta(reasoning_content=text) if piece.reasoning else answers.ChatDelta(content=text)
    function = answers.FunctionDelta(arguments=text)
    delta = answers.ToolCallDelta(index=call.index, function=function)
    if piece.begins:
        function.name, delta.id, delta.type = call.name, call.id, "function"
    return answers.ChatDelta(tool_calls=[delta])

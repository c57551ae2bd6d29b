"""From deltas to OpenAI's objects, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from json.encoder import encode_basestring as quote
from typing import Any, TypeVar

from forerun.core.errors import ForerunError
from forerun.engine.client import Delta, EngineClient, Stream
from forerun.engine.jobs import TokenLogprobs, finite
from forerun.engine.metrics import RequestMetrics, RoundTrace
from forerun.engine.stop import ABORT, ERROR, LENGTH, STOP, Finish
from forerun.serve import answers
from forerun.serve.errors import ApiError, as_api_error
from forerun.serve.parsers import AnswerParser, ParsedCall, Piece
from forerun.serve.schema import ChatRequest, Generation
from forerun.serve.text import Listing, Placed, TextService, by_name
from forerun.speculate.accept.base import NO_TOKEN

M = TypeVar("M", answers.Metrics, answers.SpeculativeMetrics)
MARK = "\0"
"""Stands for a choice's text while an event is taken apart."""
DONE = "data: [DONE]\n\n"


@dataclass(slots=True)
class Choice:
    """One answer: all of it, or what is new of it."""

    index: int
    text: str = ""
    logprobs: list[Placed] = field(default_factory=list)
    finish: Finish | None = None
    num_tokens: int = 0
    trace: list[answers.TraceRound] = field(default_factory=list)

    @property
    def stopped_by(self) -> str | int | None:
        return None if self.finish is None else self.finish.stopped_by


async def merge(streams: Sequence[Stream]) -> AsyncGenerator[list[tuple[int, Delta]]]:
    """Deltas of several requests, with the request's place, as they come: each time all that are there. Whoever leaves
    early ends them all."""
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
    """One HTTP request's answers, of one kind of endpoint."""

    kind: str
    chunk_kind: str
    whole_answer: Callable[..., answers.Whole]
    chunk: Callable[..., answers.Chunk]
    prefix: str
    parsed = False
    """Whether the text is read before it is shown."""

    def __init__(
        self,
        streams: Sequence[Stream],
        text: TextService,
        *,
        body: Generation,
        engine: EngineClient,
        model: str,
        logprobs: bool,
        request_id: str,
    ) -> None:
        self.streams = streams
        self.text = text
        self.logprobs = logprobs
        options, sequence = body.stream_options, streams[0].jobs[0].sequence
        self.include_usage = options is not None and options.include_usage
        self.continuous_usage = options is not None and options.continuous_usage_stats
        self.traced = body.speculative is not None and body.speculative.trace
        self.identical = engine.facts.identity
        self.method = sequence.drafter
        most = engine.facts.drafters.get(sequence.drafter or "", 0)
        self.num_spec_tokens = most if sequence.max_draft is None else min(most, sequence.max_draft)
        self.head: dict[str, Any] = {"id": f"{self.prefix}-{request_id}", "created": int(time.time()), "model": model}
        self.per_prompt = len(streams[0].jobs)
        self.choices = [Choice(index) for index in range(self.per_prompt * len(streams))]
        self.reasons: dict[int, str] = {}
        """Why answers ended, as they say it; by index."""
        self.failed = False
        self._listings = [Listing() for _ in self.choices]
        self._frames: dict[int, tuple[str, str]] = {}

    @abstractmethod
    def whole(self, choice: Choice) -> Any:
        """A finished answer."""

    @abstractmethod
    def pieces(self, choice: Choice) -> list[Any]:
        """What is new of an answer, as one event each; none if nothing can be told yet."""

    def _read(self, index: int, delta: Delta) -> Choice:
        """The delta as a choice; the full one is extended by it. Raises ApiError if the answer failed."""
        if delta.finish is not None and delta.finish.reason == ERROR:
            message = str(delta.finish.stopped_by)
            raise ApiError(400 if message == NO_TOKEN or message.startswith("the grammar") else 500, message)
        choice = self.choices[index * self.per_prompt + delta.index]
        choice.text += delta.text
        new = Choice(choice.index, delta.text, [], delta.finish, len(delta.token_ids))
        if self.logprobs:
            listing = self._listings[choice.index]
            listing.add(delta)
            new.logprobs = listing.listed(len(choice.text), delta.finish)
        if self.traced and delta.round is not None:
            new.trace = [self._trace(delta.round, delta.texts)]
        choice.logprobs.extend(new.logprobs)
        choice.num_tokens += new.num_tokens
        choice.finish = delta.finish
        choice.trace.extend(new.trace)
        return new

    def _trace(self, round_: RoundTrace, texts: Sequence[str]) -> answers.TraceRound:
        """A round in text: every emitted token with its origin, and the drafted tokens that were not kept. All emitted
        tokens begin with the answer's text; behind it is what a stop cut off."""
        return answers.TraceRound(
            tokens=list(zip(texts, round_.origins)),  # type: ignore[arg-type]
            token_ids=list(round_.tokens),
            rejected=[self.text.token_text(token)[0] for token in round_.rejected],
            rejected_ids=list(round_.rejected),
            drafted=round_.drafted,
            method=round_.method,
        )

    async def collect(self) -> answers.Answer:
        """The whole answer. Raises ApiError or ForerunError if it failed."""
        async with aclosing(merge(self.streams)) as batches:
            async for batch in batches:
                for index, delta in batch:
                    self._read(index, delta)
        return self._collected()

    def _collected(self) -> answers.Answer:
        choices = []
        for choice in self.choices:
            body = self.whole(choice)
            self.reasons[choice.index] = body.finish_reason
            if self.traced:
                body.trace = choice.trace
            choices.append(body)
        usage, metrics = self.usage(), self.metrics()
        return self.whole_answer(**self.head, object=self.kind, choices=choices, usage=usage, metrics=metrics)

    async def events(self) -> AsyncIterator[tuple[str, bool]]:
        """The answer as server-sent events, all that are there at once, and whether they are the last; a failure is an
        event too."""
        ending = ""
        try:
            for opening in self._begun():
                yield opening, False
            async with aclosing(merge(self.streams)) as batches:
                async for batch in batches:
                    events, failure = self._tell(batch)
                    if failure is not None:
                        ending = events
                        raise failure
                    if all(choice.finish is not None for choice in self.choices):
                        ending = events
                        break
                    if events:
                        yield events, False
            ending += self._ended()
        except (ApiError, ForerunError) as error:
            self.failed = True
            ending += self._broken(as_api_error(error))
        finally:
            for stream in self.streams:
                stream.abort()
        yield ending, True

    def _begun(self) -> list[str]:
        """Events before the first token."""
        return []

    def _ended(self) -> str:
        """The last events of an answer that is whole."""
        usage = self._event([], usage=self.usage(), metrics=self.metrics()) if self.include_usage else ""
        return usage + DONE

    def _broken(self, error: ApiError) -> str:
        """The last events of one that failed."""
        return _data(answers.Error.model_validate(error.body)) + DONE

    def _tell(self, batch: Sequence[tuple[int, Delta]]) -> tuple[str, ApiError | None]:
        """Events for deltas, up to one that failed."""
        events: list[str] = []
        for slot, delta in batch:
            index = slot * self.per_prompt + delta.index
            if delta.finish is None and not (self.logprobs or self.traced or self.continuous_usage or self.parsed):
                self.choices[index].num_tokens += len(delta.token_ids)
                events.append(self._more_text(index, delta.text))
                continue
            try:
                new = self._read(slot, delta)
            except ApiError as error:
                return "".join(events), error
            if new.text or new.finish is not None or new.trace or (self.logprobs and new.logprobs):
                events.extend(self._emit(new))
        return "".join(events), None

    def _emit(self, new: Choice) -> list[str]:
        """The events of what is new of an answer."""
        bodies = self.pieces(new)
        if new.finish is not None:
            self.reasons[new.index] = bodies[-1].finish_reason
        if new.trace:
            bodies[-1].trace = new.trace
        return [self._event([body]) for body in bodies]

    def _more_text(self, index: int, text: str) -> str:
        """The event of a choice that goes on; all of them are the same but for the text."""
        if not text:
            return ""
        self.choices[index].text += text
        frame = self._frames.get(index)
        if frame is None:
            before, _, after = self._event(self.pieces(Choice(index, MARK))).partition(quote(MARK))
            frame = self._frames[index] = (before, after)
        return frame[0] + quote(text) + frame[1]

    def _event(self, choices: list[Any], **rest: Any) -> str:
        if self.continuous_usage:
            rest.setdefault("usage", self.usage())
        return _data(self.chunk(**self.head, object=self.chunk_kind, choices=choices, **rest))

    @property
    def outcome(self) -> str:
        """Why the answers ended, in a word each; ``abort``: the client left before."""
        if self.failed:
            return ERROR
        return ",".join(dict.fromkeys(self.reasons.get(choice.index, ABORT) for choice in self.choices))

    def usage(self) -> answers.Usage:
        """Token counts: prompts once each, and every emitted token, the one that ended the answer included."""
        prompt = sum(stream.num_prompt_tokens for stream in self.streams)
        completion = sum(choice.num_tokens for choice in self.choices)
        cached = sum(stream.jobs[0].metrics.num_cached_tokens for stream in self.streams)
        return answers.Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=answers.PromptDetails(cached_tokens=cached),
        )

    def metrics(self) -> answers.Metrics:
        counts = RequestMetrics.merged([job.metrics for stream in self.streams for job in stream.jobs]).as_dict()
        speculative = _of_counts(
            answers.SpeculativeMetrics, counts, method=self.method, identical_to_plain_decoding=self.identical,
            num_spec_steps=counts["num_drafts"], num_spec_tokens=self.num_spec_tokens,
            per_step_accepted=counts["accepted_per_step"], per_step_drafted=counts["drafted_per_step"],
        )  # fmt: skip
        return _of_counts(answers.Metrics, counts, speculative_decoding=speculative)


def _of_counts(kind: type[M], counts: Mapping[str, Any], **others: Any) -> M:
    """An answer's figures: those of ``counts`` of the same names, and ``others``."""
    return kind(**{name: counts[name] for name in kind.model_fields if name in counts}, **others)


def _data(body: answers.Answer) -> str:
    return f"data: {body.model_dump_json(exclude_unset=True)}\n\n"


TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as an answer repeats it, and where its tokens begin."""

    text: str = ""
    offsets: Sequence[int] = ()


class CompletionReply(Reply):
    kind = chunk_kind = "text_completion"
    whole_answer, chunk = answers.Completion, answers.CompletionChunk
    prefix = "cmpl"

    def __init__(
        self, *arguments: Any, echo: Sequence[Echo] | None = None, silent: bool = False, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.silent = silent
        """Only the prompt was asked for: the token that the engine makes in reading it is not part of the answer."""
        self.echo = echo
        """The prompts, where the answer repeats them."""

    def _echo(self, choice: Choice) -> Echo:
        return self.echo[choice.index // self.per_prompt] if self.echo is not None else Echo()

    def _read(self, index: int, delta: Delta) -> Choice:
        if self.silent and delta.finish is not None and delta.finish.reason != ERROR:
            delta = Delta(delta.index, [], [], None, Finish(LENGTH), delta.seconds)
        return super()._read(index, delta)

    def _begun(self) -> list[str]:
        if self.echo is None:
            return []
        return [self._event([self._body(choice, self._echo(choice).text, None)]) for choice in self.choices]

    def whole(self, choice: Choice) -> answers.CompletionChunkChoice:
        prompt = self._echo(choice)
        return self._body(choice, prompt.text + choice.text, self._logprobs(choice, prompt))

    def pieces(self, choice: Choice) -> list[answers.CompletionChunkChoice]:
        return [self._body(choice, choice.text, self._logprobs(choice, Echo()))]

    @staticmethod
    def _body(choice: Choice, text: str, logprobs: answers.CompletionLogprobs | None) -> answers.CompletionChunkChoice:
        reason: Any = None if choice.finish is None else choice.finish.reason
        return answers.CompletionChunkChoice(
            index=choice.index, text=text, logprobs=logprobs, finish_reason=reason, stop_reason=choice.stopped_by
        )

    def _logprobs(self, choice: Choice, prompt: Echo) -> answers.CompletionLogprobs | None:
        """Of the prompt, whose first token has no probability, and the answer."""
        if not self.logprobs:
            return None
        lists = answers.CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        job = self.streams[choice.index // self.per_prompt].jobs[0]
        for token, item, offset in zip(job.sequence.tokens, job.prompt_logprobs or (), prompt.offsets):
            self._append(lists, token, item, offset)
        for placed in choice.logprobs:
            self._append(lists, placed.item.token, placed.item, len(prompt.text) + placed.offset)
        return lists

    def _append(self, lists: answers.CompletionLogprobs, token: int, item: TokenLogprobs | None, offset: int) -> None:
        lists.tokens.append(self.text.token_name(token))
        lists.token_logprobs.append(None if item is None else finite(item.logprob))
        lists.top_logprobs.append(None if item is None else by_name(item, self.text))
        lists.text_offset.append(offset)


class ChatReply(Reply):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    whole_answer, chunk = answers.Chat, answers.ChatChunk
    prefix = "chatcmpl"

    def __init__(self, *arguments: Any, prompt: Sequence[int], body: ChatRequest, **options: Any) -> None:
        super().__init__(*arguments, body=body, **options)
        self.calls_only = body.must_call
        self._parsers = [self.text.answer_parser(prompt, body) for _ in self.choices]
        self.parsed = self._parsers[0] is not None

    def _begun(self) -> list[str]:
        begun = answers.ChatDelta(role="assistant", content="")
        return [self._event([answers.ChatChunkChoice(delta=begun, **self._about(choice))]) for choice in self.choices]

    def whole(self, choice: Choice) -> answers.ChatChoice:
        message = answers.ChatMessage(role="assistant", content=choice.text, refusal=None)
        parser = self._parsers[choice.index]
        if parser is not None:
            texts = [piece for piece in parser.push(choice.text, last=True) if piece.call is None]
            thoughts = "".join(piece.text for piece in texts if piece.reasoning)
            message.content = "".join(piece.text for piece in texts if not piece.reasoning)
            if parser.calls or thoughts or self.calls_only:
                message.content = message.content or None
            if self.text.reasoning_parser is not None:
                message.reasoning_content = thoughts or None
            if parser.calls:
                message.tool_calls = [_call(call) for call in parser.calls]
        return answers.ChatChoice(message=message, **self._about(choice, parser))

    def pieces(self, choice: Choice) -> list[answers.ChatChunkChoice]:
        parser = self._parsers[choice.index]
        if parser is None:
            return [answers.ChatChunkChoice(delta=answers.ChatDelta(content=choice.text), **self._about(choice))]
        last = choice.finish is not None
        deltas = [_delta(piece) for piece in parser.push(choice.text, last=last)]
        if not deltas and (last or choice.trace or choice.logprobs):
            deltas = [answers.ChatDelta()]
        alone = replace(choice, finish=None, logprobs=[])
        bodies = [answers.ChatChunkChoice(delta=delta, **self._about(alone)) for delta in deltas[:-1]]
        return bodies + [answers.ChatChunkChoice(delta=each, **self._about(choice, parser)) for each in deltas[-1:]]

    def _about(self, choice: Choice, parser: AnswerParser | None = None) -> dict[str, Any]:
        logprobs = None
        if self.logprobs:
            logprobs = answers.ChatLogprobs(content=[self._token(item) for item in choice.logprobs])
        reason = self._reason(choice.finish, parser)
        return {
            "index": choice.index, "logprobs": logprobs, "finish_reason": reason, "stop_reason": choice.stopped_by
        }  # fmt: skip

    @staticmethod
    def _reason(finish: Finish | None, parser: AnswerParser | None) -> str | None:
        if finish is None:
            return None
        called = parser is not None and parser.calls and all(call.complete for call in parser.calls)
        return TOOL_CALLS if finish.reason == STOP and called else finish.reason

    def _token(self, placed: Placed) -> answers.ListedToken:
        item = placed.item
        top = [answers.TokenLogprob(**self._entry(token, value)) for token, value in item.top.items()]
        return answers.ListedToken(**self._entry(item.token, item.logprob), top_logprobs=top)

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        text, encoded = self.text.token_text(token)
        return {"token": text, "logprob": finite(value), "bytes": encoded}


def _call(call: ParsedCall) -> answers.ToolCall:
    function = answers.CalledFunction(name=call.name, arguments=call.arguments)
    return answers.ToolCall(id=call.id, type="function", function=function)


def _delta(piece: Piece) -> answers.ChatDelta:
    call = piece.call
    if call is None:
        text = piece.text
        return answers.ChatDelta(reasoning_content=text) if piece.reasoning else answers.ChatDelta(content=text)
    function = answers.FunctionDelta(arguments=piece.text)
    delta = answers.ToolCallDelta(index=call.index, function=function)
    if piece.begins:
        function.name, delta.id, delta.type = call.name, call.id, "function"
    return answers.ChatDelta(tool_calls=[delta])

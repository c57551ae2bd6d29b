"""The kinds of answers: completions and chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.engine.jobs import TokenLogprobs, finite
from forerun.engine.stop import ERROR, LENGTH, STOP, Finish
from forerun.engine.stream import Delta
from forerun.serve import answers
from forerun.serve.reasoning import AnswerReading, Reader
from forerun.serve.stream import Choice, Reply
from forerun.serve.text import Placed, by_name
from forerun.serve.tools import ParsedCall, Piece

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

    def __init__(self, *arguments: Any, reading: AnswerReading, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.reading = reading
        self._readers = [reading.reader() for _ in self.choices]
        self.parsed = self._readers[0] is not None

    def _begun(self) -> list[str]:
        begun = answers.ChatDelta(role="assistant", content="")
        return [self._event([answers.ChatChunkChoice(delta=begun, **self._about(choice))]) for choice in self.choices]

    def whole(self, choice: Choice) -> answers.ChatChoice:
        message = answers.ChatMessage(role="assistant", content=choice.text, refusal=None)
        reader = self._readers[choice.index]
        if reader is not None:
            texts = [piece for piece in reader.push(choice.text, last=True) if piece.call is None]
            thoughts = "".join(piece.text for piece in texts if piece.reasoning)
            message.content = "".join(piece.text for piece in texts if not piece.reasoning)
            if reader.calls or thoughts or self.reading.must:
                message.content = message.content or None
            if self.reading.reasoning is not None:
                message.reasoning_content = thoughts or None
            if reader.calls:
                message.tool_calls = [_call(call) for call in reader.calls]
        return answers.ChatChoice(message=message, **self._about(choice, reader))

    def pieces(self, choice: Choice) -> list[answers.ChatChunkChoice]:
        reader = self._readers[choice.index]
        if reader is None:
            return [answers.ChatChunkChoice(delta=answers.ChatDelta(content=choice.text), **self._about(choice))]
        last = choice.finish is not None
        deltas = [_delta(piece) for piece in reader.push(choice.text, last=last)]
        if not deltas and (last or choice.trace or choice.logprobs):
            deltas = [answers.ChatDelta()]
        alone = replace(choice, finish=None, logprobs=[])
        bodies = [answers.ChatChunkChoice(delta=delta, **self._about(alone)) for delta in deltas[:-1]]
        return bodies + [answers.ChatChunkChoice(delta=each, **self._about(choice, reader)) for each in deltas[-1:]]

    def _about(self, choice: Choice, reader: Reader | None = None) -> dict[str, Any]:
        logprobs = None
        if self.logprobs:
            logprobs = answers.ChatLogprobs(content=[self._token(item) for item in choice.logprobs])
        reason = self._reason(choice.finish, reader)
        return {
            "index": choice.index, "logprobs": logprobs, "finish_reason": reason, "stop_reason": choice.stopped_by
        }  # fmt: skip

    @staticmethod
    def _reason(finish: Finish | None, reader: Reader | None) -> str | None:
        if finish is None:
            return None
        called = reader is not None and reader.calls and all(call.complete for call in reader.calls)
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

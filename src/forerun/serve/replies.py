"""The kinds of answers: completions and chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.engine.jobs import TokenLogprobs, finite
from forerun.engine.stop import ERROR, LENGTH, STOP, Finish
from forerun.engine.stream import Delta
from forerun.serve.reasoning import Reader, Reading
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

    def openings(self) -> list[dict[str, Any]]:
        if self.echo is None:
            return []
        return [self._body(choice, self._echo(choice).text, None) for choice in self.choices]

    def whole(self, choice: Choice) -> dict[str, Any]:
        prompt = self._echo(choice)
        return self._body(choice, prompt.text + choice.text, self._logprobs(choice, prompt))

    def pieces(self, choice: Choice) -> list[dict[str, Any]]:
        return [self._body(choice, choice.text, self._logprobs(choice, Echo()))]

    @staticmethod
    def _body(choice: Choice, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        finish = choice.finish
        return {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish.reason if finish is not None else None,
            "stop_reason": finish.stopped_by if finish is not None else None,
        }

    def _logprobs(self, choice: Choice, prompt: Echo) -> dict[str, Any] | None:
        """Of the prompt, whose first token has no probability, and the answer."""
        if not self.logprobs:
            return None
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        job = self.streams[choice.index // self.per_prompt].jobs[0]
        for token, item, offset in zip(job.sequence.tokens, job.prompt_logprobs or (), prompt.offsets):
            self._append(lists, token, item, offset)
        for placed in choice.logprobs:
            self._append(lists, placed.item.token, placed.item, len(prompt.text) + placed.offset)
        return lists

    def _append(self, lists: dict[str, list[Any]], token: int, item: TokenLogprobs | None, offset: int) -> None:
        lists["tokens"].append(self.text.token_name(token))
        lists["token_logprobs"].append(None if item is None else finite(item.logprob))
        lists["top_logprobs"].append(None if item is None else by_name(item, self.text))
        lists["text_offset"].append(offset)


class ChatReply(Reply):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, *arguments: Any, reading: Reading | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.reading = reading or Reading()
        self.parsed = self.reading.reader() is not None
        self._readers: dict[int, Reader] = {}

    def openings(self) -> list[dict[str, Any]]:
        return [self._body(choice, {"delta": {"role": "assistant", "content": ""}}) for choice in self.choices]

    def whole(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        reader = self.reading.reader()
        if reader is None:
            return self._body(choice, {"message": message})
        texts = [piece for piece in reader.push(choice.text, last=True) if piece.call is None]
        thoughts = "".join(piece.text for piece in texts if piece.reasoning)
        message["content"] = "".join(piece.text for piece in texts if not piece.reasoning)
        if reader.calls or thoughts or self.reading.must:
            message["content"] = message["content"] or None
        if self.reading.reasoning is not None:
            message["reasoning_content"] = thoughts or None
        if reader.calls:
            message["tool_calls"] = [_call(call) for call in reader.calls]
        return self._body(choice, {"message": message}, reader)

    def pieces(self, choice: Choice) -> list[dict[str, Any]]:
        if choice.index not in self._readers and self.parsed:
            self._readers[choice.index] = self.reading.reader()  # type: ignore[assignment]
        reader = self._readers.get(choice.index)
        if reader is None:
            return [self._body(choice, {"delta": {"content": choice.text}})]
        last = choice.finish is not None
        deltas = [_delta(piece) for piece in reader.push(choice.text, last=last)]
        if not deltas and (last or choice.trace or choice.logprobs):
            deltas = [{}]
        alone = replace(choice, finish=None, logprobs=[])
        bodies = [self._body(alone, {"delta": delta}) for delta in deltas[:-1]]
        return bodies + [self._body(choice, {"delta": delta}, reader) for delta in deltas[-1:]]

    def _body(self, choice: Choice, content: dict[str, Any], reader: Reader | None = None) -> dict[str, Any]:
        finish = choice.finish
        return {
            "index": choice.index,
            **content,
            "logprobs": {"content": [self._token(item) for item in choice.logprobs]} if self.logprobs else None,
            "finish_reason": self._reason(finish, reader),
            "stop_reason": finish.stopped_by if finish is not None else None,
        }

    @staticmethod
    def _reason(finish: Finish | None, reader: Reader | None) -> str | None:
        if finish is None:
            return None
        called = reader is not None and reader.calls and all(call.complete for call in reader.calls)
        return TOOL_CALLS if finish.reason == STOP and called else finish.reason

    def _token(self, placed: Placed) -> dict[str, Any]:
        item = placed.item
        top = [self._entry(token, value) for token, value in item.top.items()]
        return {**self._entry(item.token, item.logprob), "top_logprobs": top}

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        text, encoded = self.text.token_text(token)
        return {"token": text, "logprob": finite(value), "bytes": encoded}


def _call(call: ParsedCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _delta(piece: Piece) -> dict[str, Any]:
    if piece.call is None:
        return {"reasoning_content" if piece.reasoning else "content": piece.text}
    function = {"arguments": piece.text}
    if not piece.begins:
        return {"tool_calls": [{"index": piece.call.index, "function": function}]}
    begun = {"id": piece.call.id, "type": "function", "function": {"name": piece.call.name, **function}}
    return {"tool_calls": [{"index": piece.call.index, **begun}]}

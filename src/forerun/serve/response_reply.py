"""Answers of /v1/responses: a chat's answer as items, whole or as OpenAI's events, and those that are kept."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from itertools import count
from typing import Any

from pydantic import TypeAdapter

from forerun.engine.stop import LENGTH
from forerun.serve import answers
from forerun.serve.errors import ApiError
from forerun.serve.replies import ChatReply
from forerun.serve.response_schema import InputItem, ResponseChosen, ResponseRequest
from forerun.serve.stream import Choice
from forerun.serve.tools import Call, Piece

Output = answers.OutputMessage | answers.FunctionCall | answers.ReasoningItem
ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[InputItem])


class ResponseReply(ChatReply):
    """``asked`` is what is answered. ``keep`` is told of an answer that is whole."""

    def __init__(
        self, *arguments: Any, asked: ResponseRequest, keep: Callable[[answers.Response], None], **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.parsed = True
        self.asked = asked
        self.keep = keep
        self.id = f"resp_{self.head['id'].removeprefix(f'{self.prefix}-')}"
        self.output: list[Output] = []
        self._reader = self.reading.reader()
        self._call: Call | None = None
        """The last one."""
        self._numbers = count()

    # ------------------------------------------------------------------------------------------------ whole or streamed

    def _collected(self) -> dict[str, Any]:
        self._emit(self.choices[0])
        return self._done().model_dump(mode="json", exclude_unset=True)

    def _begun(self) -> list[str]:
        return [self._state("created") + self._state("in_progress")]

    def _ended(self) -> str:
        answer = self._done()
        return self._event_of(answers.ResponseState, type=f"response.{answer.status}", response=answer)

    def _broken(self, error: ApiError) -> str:
        return self._state("failed", error)

    def _emit(self, choice: Choice) -> list[str]:
        last = choice.finish is not None
        pieces = [Piece(choice.text)] if choice.text or choice.logprobs else []
        if self._reader is not None:
            pieces = self._reader.push(choice.text, last=last)
        events: list[str] = []
        for piece in pieces:
            if piece.reasoning:
                events += self._more_of_thoughts(piece.text)
            else:
                events += self._more_of_text(piece.text, choice) if piece.call is None else self._more_of_call(piece)
        if choice.finish is not None:
            if not self.output and not self.reading.must:
                events += self._open(self._message())
            events += self._close(whole=choice.finish.reason != LENGTH)
            self.reasons[choice.index] = self._reason(choice.finish, self._reader) or ""
        return events

    # ------------------------------------------------------------------------------------------------ items

    def _more_of_text(self, text: str, choice: Choice) -> list[str]:
        events: list[str] = []
        if not self.output or not isinstance(self.output[-1], answers.OutputMessage):
            events = self._close() + self._open(self._message())
        (part,) = self.output[-1].content  # type: ignore[union-attr]
        logprobs = [answers.ListedToken(**self._token(item)) for item in choice.logprobs]
        part.text += text
        part.logprobs += logprobs  # type: ignore[union-attr]
        delta = {"content_index": 0, "delta": text, "logprobs": logprobs}
        return [*events, self._in_item(answers.TextDelta, "output_text.delta", **delta)]

    def _more_of_thoughts(self, text: str) -> list[str]:
        events: list[str] = []
        if not self.output or not isinstance(self.output[-1], answers.ReasoningItem):
            item = answers.ReasoningItem(id=_new("rs"), type="reasoning", summary=[], content=[], status="in_progress")
            events = self._close() + self._open(item)
        (part,) = self.output[-1].content  # type: ignore[union-attr]
        part.text += text
        delta = {"content_index": 0, "delta": text}
        return [*events, self._in_item(answers.ReasoningDelta, "reasoning_text.delta", **delta)]

    def _more_of_call(self, piece: Piece) -> list[str]:
        assert piece.call is not None
        events: list[str] = []
        if piece.begins:
            call = answers.FunctionCall(
                id=_new("fc"), type="function_call", call_id=piece.call.id, name=piece.call.name, arguments="",
                status="in_progress",
            )  # fmt: skip
            events = self._close() + self._open(call)
            self._call = piece.call
        call = self.output[-1]  # type: ignore[assignment]
        call.arguments += piece.text
        if piece.text:
            events.append(self._in_item(answers.ArgumentsDelta, "function_call_arguments.delta", delta=piece.text))
        return events

    @staticmethod
    def _message() -> answers.OutputMessage:
        return answers.OutputMessage(id=_new("msg"), type="message", role="assistant", status="in_progress", content=[])

    def _open(self, item: Output) -> list[str]:
        self.output.append(item)
        events = [self._of_item("added")]
        if isinstance(item, answers.OutputMessage):
            item.content.append(answers.OutputText(type="output_text", text="", annotations=[], logprobs=[]))
            events.append(self._of_part("added"))
        if isinstance(item, answers.ReasoningItem):
            item.content.append(answers.ReasoningText(type="reasoning_text", text=""))
            events.append(self._of_part("added"))
        return events

    def _close(self, *, whole: bool = True) -> list[str]:
        """End the last item; ``whole``: nothing has cut it off."""
        if not self.output or self.output[-1].status != "in_progress":
            return []
        item = self.output[-1]
        about: dict[str, Any]
        if isinstance(item, answers.FunctionCall):
            assert self._call is not None
            whole = self._call.complete
            about = {"name": item.name, "arguments": item.arguments}
            events = [self._in_item(answers.ArgumentsDone, "function_call_arguments.done", **about)]
        elif isinstance(item, answers.ReasoningItem):
            about = {"content_index": 0, "text": item.content[0].text}
            events = [self._in_item(answers.ReasoningDone, "reasoning_text.done", **about), self._of_part("done")]
        else:
            (part,) = item.content
            about = {"content_index": 0, "text": part.text, "logprobs": part.logprobs}
            events = [self._in_item(answers.TextDone, "output_text.done", **about), self._of_part("done")]
        item.status = "completed" if whole else "incomplete"
        return [*events, self._of_item("done")]

    # ------------------------------------------------------------------------------------------------ events

    def _event_of(self, kind: type[answers.Numbered], **about: Any) -> str:
        event = kind(sequence_number=next(self._numbers), **about)
        return f"event: {about['type']}\ndata: {event.model_dump_json(exclude_unset=True)}\n\n"

    def _of_item(self, what: str) -> str:
        index, item = len(self.output) - 1, self.output[-1]
        return self._event_of(answers.ItemEvent, type=f"response.output_item.{what}", output_index=index, item=item)

    def _in_item(self, kind: type[answers.InItem], what: str, **about: Any) -> str:
        index, item = len(self.output) - 1, self.output[-1]
        return self._event_of(kind, type=f"response.{what}", output_index=index, item_id=item.id, **about)

    def _of_part(self, what: str) -> str:
        (part,) = self.output[-1].content  # type: ignore[union-attr]
        return self._in_item(answers.PartEvent, f"content_part.{what}", content_index=0, part=part)

    def _state(self, what: str, error: ApiError | None = None) -> str:
        status = "failed" if error is not None else "in_progress"
        answer = self._response(status, error)
        return self._event_of(answers.ResponseState, type=f"response.{what}", response=answer)

    # ------------------------------------------------------------------------------------------------ the response

    def _done(self) -> answers.Response:
        """The whole answer, which is kept."""
        finish = self.choices[0].finish
        answer = self._response("incomplete" if finish is not None and finish.reason == LENGTH else "completed")
        self.keep(answer)
        return answer

    def _response(self, status: Any, error: ApiError | None = None) -> answers.Response:
        asked, ended = self.asked, status != "in_progress"
        after: dict[str, Any] = {}
        if ended:
            after["metrics"] = answers.Metrics(**self.metrics())
        if ended and self.traced:
            after["trace"] = self.choices[0].trace
        choice = asked.tool_choice
        if isinstance(choice, ResponseChosen):
            choice = answers.ChosenFunction(**choice.model_dump())  # type: ignore[assignment]
        form = asked.text.format if asked.text is not None else None
        return answers.Response(
            id=self.id,
            object="response",
            created_at=self.head["created"],
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,
            error=None if error is None else answers.ResponseError(code=_code(error), message=error.message),
            incomplete_details=answers.Incomplete(reason="max_output_tokens") if status == "incomplete" else None,
            model=self.head["model"],
            output=list(self.output),
            usage=self._usage() if ended else None,
            previous_response_id=asked.previous_response_id,
            instructions=asked.instructions,
            background=False,
            max_output_tokens=asked.max_output_tokens,
            max_tool_calls=asked.max_tool_calls,
            metadata=asked.metadata or {},
            parallel_tool_calls=asked.parallel_tool_calls,
            prompt_cache_key=asked.prompt_cache_key,
            reasoning={"effort": None, "summary": None, **(asked.reasoning or {})},
            safety_identifier=asked.safety_identifier,
            store=asked.store,
            temperature=asked.temperature,
            text={"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
            tool_choice=choice or "auto",  # type: ignore[arg-type]
            tools=[answers.FunctionTool(**tool.model_dump()) for tool in asked.tools or ()],
            top_logprobs=asked.top_logprobs or 0,
            top_p=asked.top_p,
            truncation="disabled",
            user=asked.user,
            **after,
        )

    def _usage(self) -> answers.ResponseUsage:
        counts = self.usage()
        return answers.ResponseUsage(
            input_tokens=counts["prompt_tokens"],
            input_tokens_details=answers.InputDetails(**counts["prompt_tokens_details"], cache_write_tokens=0),
            output_tokens=counts["completion_tokens"],
            output_tokens_details=answers.OutputDetails(reasoning_tokens=0),
            total_tokens=counts["total_tokens"],
        )


class ResponseStore:
    """The latest responses, as many as ``limit`` bytes hold, and the items of the conversations that they end."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        self._kept: OrderedDict[str, tuple[answers.Response, list[Any], int]] = OrderedDict()

    def put(self, answer: answers.Response, before: list[Any]) -> None:
        """Keep an answer to the items ``before``; the oldest go where there is no room."""
        own = [item.model_dump(exclude_unset=True) for item in answer.output]
        items = [*before, *ITEMS.validate_python(own)]
        size = len(answer.model_dump_json()) + len(ITEMS.dump_json(items))
        self._kept[answer.id] = (answer, items, size)
        self.size += size
        while self.size > self.limit:
            self.size -= self._kept.popitem(last=False)[1][2]

    def get(self, id: str) -> answers.Response:
        """Raises ApiError where there is none."""
        return self._find(id, ApiError(404, _lacking(id), code="response_not_found"))[0]

    def before(self, id: str | None) -> list[Any]:
        """The items up to a response's end. Raises ApiError where there is none."""
        if id is None:
            return []
        param = "previous_response_id"
        return self._find(
            id, ApiError(400, f"{param}: {_lacking(id)}", param=param, code="previous_response_not_found")
        )[1]

    def drop(self, id: str) -> None:
        """Forget one. Raises ApiError where there is none."""
        self.get(id)
        self.size -= self._kept.pop(id)[2]

    def _find(self, id: str, error: ApiError) -> tuple[answers.Response, list[Any], int]:
        if id not in self._kept:
            raise error
        return self._kept[id]


def _lacking(id: str) -> str:
    return f"there is no response {id!r} here: it was not stored, was deleted, or has made room for later ones"


def _code(error: ApiError) -> Any:
    return {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")


def _new(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"

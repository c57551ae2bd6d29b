"""llama.cpp's ``/infill``: its requests, and completions in its form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from forerun.core.errors import ConfigError
from forerun.engine.client import Stream
from forerun.engine.stop import LENGTH
from forerun.models.text.infill import Hole, ending
from forerun.sampling.params import SamplingParams
from forerun.serve import answers
from forerun.serve.schema import Absent, ExtraFiles, Generation, Int, StopAt, Text
from forerun.serve.server import Server
from forerun.serve.stream import Choice, CompletionReply

REPOSITORY, FILE = "myproject", "filename"
"""The names that llama.cpp gives to the repository and to the file with the cursor."""


class InfillRequest(Generation):
    """The defaults of sampling are llama.cpp's."""

    input_prefix: Text = Field(description="the text before the cursor's line, or before the cursor")
    input_suffix: Text = Field(description="the text after the cursor")
    input_extra: ExtraFiles | None = Field(None, description="other files; the first ones go if there is no room")
    prompt: Text = Field("", description="what follows input_prefix, such as the cursor's line up to the cursor")
    max_tokens: Int | None = Field(None, ge=0, description="0: the prompt is read into the cache, and nothing else")
    n: Int = Field(1, ge=1, le=1)
    prompt_logprobs: Absent = None
    n_indent: Int = Field(0, ge=0, description="end before a line that is indented by fewer characters")
    stop_at: StopAt | None = Field(None, description="end the answer with the cursor's line, or with its block")
    temperature: float = Field(0.8, ge=0, le=100)
    top_k: Int = Field(40, ge=-1, lt=1 << 31)
    top_p: float = Field(0.95, ge=0, le=1)
    min_p: float = Field(0.05, ge=0, le=1)
    response_fields: list[Text] | None = Field(None, max_length=64, description="the answer has these paths alone")

    def field_of(self, param: str | None) -> str | None:
        return {"suffix": "input_suffix", "min_indent": "n_indent"}.get(param or "", super().field_of(param))


async def reply(server: Server, body: InfillRequest, request_id: str) -> InfillReply:
    """Queues a request. Raises ApiError and RequestError."""
    files = [(each.filename, each.text) for each in body.input_extra or ()]
    hole = Hole(body.input_prefix, body.input_suffix, body.prompt, files, REPOSITORY, FILE)
    room = max(1, server.max_model_len - (body.max_tokens or server.max_model_len // 8))
    prompt = await server.text.fill(hole)
    truncated = bool(files) and len(prompt) > room
    if truncated:
        prompt = await server.text.fill(hole, room)
    params = body.sampling(logprobs=None, max_tokens=body.max_tokens, prompt_logprobs=None)
    if not isinstance(params, SamplingParams):
        raise ConfigError("beam search does not fill in the middle: remove use_beam_search")
    params = ending(params, body.stop_at, body.input_prefix + body.prompt, server.text.fill_ends)
    if body.n_indent:
        params = params.clone(min_indent=max(body.n_indent, params.min_indent or 0))
    streams = await server.submit([prompt], params, body, body.max_tokens)
    return InfillReply(server, streams, body, request_id, truncated=truncated)


class InfillReply(CompletionReply):
    id_prefix = ""

    def __init__(
        self, server: Server, streams: Sequence[Stream], body: InfillRequest, request_id: str, *, truncated: bool
    ) -> None:
        super().__init__(server, streams, body, request_id)
        self.truncated = truncated
        self.fields = body.response_fields

    def _whole(self) -> answers.Answer:
        choice = self.choices[0]
        answer = answers.Infill(**self._end(choice).model_dump(exclude_unset=True))
        if self.traced:
            answer.trace = choice.trace
        return answer if self.fields is None else _chosen(answer, self.fields)

    def chunk_choices(self, choice: Choice) -> list[Any]:
        if choice.finish is not None:
            return [self._end(choice)]
        return [answers.InfillChunk(index=0, content=choice.text, stop=False)]

    def _end(self, choice: Choice) -> answers.InfillChunk:
        """What is new of a finished answer, and all that is said at its end."""
        finish, usage, text = choice.finish, self.usage(), self.choices[0].text
        assert finish is not None
        word = finish.stopped_by if isinstance(finish.stopped_by, str) else ""
        limited = finish.reason == LENGTH or (finish.cut is not None and not word)
        return answers.InfillChunk(
            index=0,
            content=choice.text,
            stop=True,
            model=self.head["model"],
            tokens_predicted=usage.completion_tokens,
            tokens_evaluated=usage.prompt_tokens,
            tokens_cached=usage.prompt_tokens_details.cached_tokens,
            truncated=self.truncated,
            has_new_line="\n" in text,
            stop_type="word" if word else "limit" if limited else "eos",
            stopping_word=word,
            timings=self._timings(usage),
        )

    def _timings(self, usage: answers.Usage) -> answers.Timings:
        metrics = self.metrics()
        drafts, first = metrics.speculative_decoding, metrics.time_to_first_token or 0.0
        read, rate = usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens, metrics.tokens_per_second
        return answers.Timings(
            prompt_n=read,
            prompt_ms=1000 * first,
            prompt_per_second=read / first if first else None,
            predicted_n=usage.completion_tokens,
            predicted_ms=1000 * max(0, usage.completion_tokens - 1) / rate if rate else 0.0,
            predicted_per_second=rate,
            draft_n=drafts.num_draft_tokens,
            draft_n_accepted=drafts.num_accepted_draft_tokens,
        )

    def _event(self, choices: list[Any], **fields: Any) -> str:
        return "".join(f"data: {each.model_dump_json(exclude_unset=True)}\n\n" for each in choices)

    def _final_events(self) -> str:
        return ""


def _chosen(answer: answers.Infill, paths: Sequence[str]) -> answers.ChosenFields:
    """The fields at ``paths``, such as ``timings/prompt_n``, by these paths; those that do not exist are left out."""
    whole, chosen = answer.model_dump(exclude_unset=True), {}
    for path in paths:
        value: Any = whole
        for part in path.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            chosen[path] = value
    return answers.ChosenFields(**chosen)

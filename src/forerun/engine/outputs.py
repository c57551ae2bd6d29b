"""What ``LLM`` returns: whole answers, and the pieces of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from operator import itemgetter
from typing import Any, ClassVar

from forerun.core.errors import RequestError, shown
from forerun.engine.client import StreamedText
from forerun.engine.jobs import Job, Logprob
from forerun.engine.metrics import RequestMetrics, RoundTrace
from forerun.engine.stop import Finish
from forerun.models.text.tokenizer import Detokenizer
from forerun.sampling.params import SamplingParams


def summary(metrics: RequestMetrics) -> str:
    """Speed and acceptance in one line."""
    rate, length = metrics.tokens_per_second, metrics.mean_acceptance_length
    result = [f"{metrics.rounds} rounds"] + ([f"{rate:.0f} tokens/s"] if rate else [])
    if length is None:
        return ", ".join([*result, "nothing drafted"])
    accepted, drafted = metrics.num_accepted_draft_tokens, metrics.num_draft_tokens
    return ", ".join(
        [*result, f"mean acceptance length {length:.2f}", f"{accepted} of {drafted} drafted tokens accepted"]
    )


@dataclass(frozen=True, repr=False)
class CompletionOutput:
    """One of a request's n answers."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None = None
    """The stop string or token id that ended it; an error's text where ``finish_reason`` is ``error``."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token a mapping by id: the token itself, then the ``SamplingParams.logprobs`` likeliest."""
    cumulative_logprob: float | None = None
    """The sum over the answer's tokens; only with ``logprobs``, and for beams."""
    trace: list[RoundTrace] | None = None
    drafted: list[bool] = field(default_factory=list)
    """Whether each token was drafted and accepted; none for beams."""

    def __repr__(self) -> str:
        return f"CompletionOutput({shown(self.text)}, {len(self.token_ids)} tokens, {self.finish_reason})"


@dataclass(frozen=True, repr=False)
class RequestOutput:
    """A prompt's answers and what speculation did for them."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """As ``CompletionOutput.logprobs``; None for the first token."""
    request_id: str = ""
    """A number, unique within the ``LLM``."""
    finished: bool = True
    _tokenizer: ClassVar[Any] = None
    """The LLM's, for the texts of tokens. It is no field, so that copies and pickles are without it."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_tokenizer"}

    def __repr__(self) -> str:
        return f"RequestOutput({shown(self.prompt)}, {self.outputs}, {summary(self.metrics)})"

    def _repr_html_(self) -> str:
        """For notebooks: the answers with their accepted tokens marked, and a line of metrics."""
        answers = "".join(f'<pre style="white-space: pre-wrap">{self._marked(each)}</pre>' for each in self.outputs)
        return f"{answers}<small>{escape(summary(self.metrics))}</small>"

    def _marked(self, answer: CompletionOutput) -> str:
        texts: list[str] = []
        if self._tokenizer is not None and answer.drafted:
            texts = Detokenizer(self._tokenizer, self.prompt_token_ids).spell(answer.token_ids, last=True)
        if not "".join(texts).startswith(answer.text):  # special tokens are shown, or no tokens are known
            return escape(answer.text)
        result, left = [], len(answer.text)  # a stop string is cut off
        for drafted, group in groupby(zip(answer.drafted, texts), key=itemgetter(0)):
            text = "".join(text for _, text in group)[:left]
            left -= len(text)
            result.append(f"<mark>{escape(text)}</mark>" if drafted and text else escape(text))
        return "".join(result)


class Outputs(list[RequestOutput]):
    """A list; notebooks show the first twenty outputs of it as they show one."""

    def _repr_html_(self) -> str:
        return "<hr>".join([each._repr_html_() for each in self[:20]] + [f"{len(self)} outputs"] * (len(self) > 20))


@dataclass(frozen=True)
class StreamPiece:
    """A token of an answer, as it comes."""

    text: str
    """What can be shown now: empty within a character, or while it could still become a stop string."""
    token_ids: list[int]
    """One id; none where the answer ends without a further token."""
    drafted: bool
    """Whether the token was drafted and accepted."""
    output: RequestOutput | None = None
    """The whole answer, with its last piece."""


class Pieces:
    """Turns the rounds of a job into pieces. ``finished`` makes the output."""

    def __init__(self, job: Job, tokenizer: Any, finished: Callable[[], RequestOutput]) -> None:
        self.job = job
        self.text = StreamedText(job, tokenizer)
        self.finished = finished
        self.count = 0

    def of(self, tokens: Sequence[int], finish: Finish | None) -> Iterator[StreamPiece]:
        for token in tokens[:-1]:
            yield self._piece([token], None)
        yield self._piece(list(tokens[-1:]), finish)

    def _piece(self, tokens: list[int], finish: Finish | None) -> StreamPiece:
        drafted = bool(tokens) and self.job.drafted[self.count]
        self.count += len(tokens)
        text = self.text.push(tokens, finish)
        return StreamPiece(text, tokens, drafted, None if finish is None else self.finished())


def one_answer(given: SamplingParams) -> SamplingParams:
    """The options of a stream, which has one answer. Raises RequestError."""
    if not isinstance(given, SamplingParams):
        raise RequestError(f"a stream takes SamplingParams, not {type(given).__name__}", param="sampling_params")
    if given.n != 1:
        raise RequestError("a stream has one answer: set n to 1, or use generate", param="n")
    return given

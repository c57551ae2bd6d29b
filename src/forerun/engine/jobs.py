"""What the engine keeps of each sequence in flight, and its log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch

from forerun.core.request import Hypothesis, RequestState
from forerun.core.tree import Verdict
from forerun.engine.metrics import RequestMetrics, RoundTrace
from forerun.engine.stop import Finish, Stopper
from forerun.kernels.gpu import send, to_host
from forerun.models.text.tokenizer import Detokenizer, token_text
from forerun.speculate.accept.compare import take
from forerun.speculate.verify import Verification

LOWEST = -9999.0
"""Replaces a log-probability of minus infinity, which JSON lacks."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's log-probability (natural log) and rank (1: the likeliest), and ``top``, the likeliest tokens'."""

    token: int
    logprob: float
    rank: int
    top: dict[int, float]

    def with_top(self, count: int) -> TokenLogprobs:
        """Returns the same with at most ``count`` of the likeliest tokens."""
        return self if len(self.top) <= count else replace(self, top=dict(islice(self.top.items(), count)))

    def ranked(self) -> dict[int, tuple[float, int]]:
        """Returns log-probabilities and ranks by token: its own first, then those of the likeliest."""
        own = {self.token: (self.logprob, self.rank)}
        likeliest = {token: (value, rank) for rank, (token, value) in enumerate(self.top.items(), start=1)}
        return own | likeliest | own  # its own rank: tokens that are as likely share one


@dataclass(frozen=True, slots=True)
class Logprob:
    """A log-probability (natural log), the token's rank (1: the likeliest), and its text, as in vLLM."""

    logprob: float
    rank: int
    decoded_token: str


def by_token(items: Sequence[TokenLogprobs], tokenizer: Any, before: Sequence[int]) -> list[dict[int, Logprob]]:
    """Log-probabilities as vLLM gives them: for each token a mapping by id, the token itself first, then the likeliest.

    The tokens follow ``before``. Their texts joined are the answer's text: a token that ends inside a character leaves
    that character to the next one.
    """
    detokenizer = Detokenizer(tokenizer, before, skip_special_tokens=False)
    result = []
    for item, text in zip(items, detokenizer.spell([item.token for item in items], last=True)):
        result.append({
            token: Logprob(value, rank, text if token == item.token else token_text(tokenizer, token))
            for token, (value, rank) in item.ranked().items()
        })  # fmt: skip
    return result


def finite(value: float) -> float:
    """Clamps a log-probability to a number that JSON can hold."""
    return max(value, LOWEST)


def _token_logprobs(logits: torch.Tensor, tokens: list[int], count: int) -> list[TokenLogprobs]:
    """Log-probabilities of ``tokens`` and of the ``count`` likeliest, from ``logits`` [len(tokens), vocabulary]."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, send(tokens, logits.device)[:, None])
    ranks, count = (logprobs > chosen).sum(dim=1) + 1, min(count, logprobs.shape[1])
    top = logprobs.topk(count, dim=1)
    logs, places, values, ids = to_host(chosen[:, 0], ranks, top.values.flatten(), top.indices.flatten())
    result = []
    for i, token in enumerate(tokens):
        row = slice(i * count, (i + 1) * count)
        result.append(TokenLogprobs(token, logs[i], places[i], dict(zip(ids[row], values[row]))))
    return result


def emitted_logprobs(result: Verification, index: int, verdict: Verdict, mode: str) -> list[TokenLogprobs]:
    """Log-probabilities of the tokens that a round emitted for its ``index``-th sequence.

    ``mode``: ``raw_logprobs``, the model's own, or ``processed_logprobs``, of the distribution that was sampled.
    """
    scores = result.scores
    slot = result.deciding.index(index)
    rows = [scores.row(slot, node) for node in [-1, *verdict.path][: len(verdict.tokens)]]
    source = scores.warped if mode == "processed_logprobs" or scores.raw is None else scores.raw
    return _token_logprobs(take(source, rows), verdict.tokens, scores.sequences[slot].params.logprobs)


def prompt_logprobs(job: Job, result: Verification, index: int, sequence: RequestState) -> None:
    """Appends those of the prompt tokens whose logits this prefill chunk produced; the first token's are None."""
    span = result.batch.spans[index]
    results: list[TokenLogprobs | None] = job.prompt_logprobs if job.prompt_logprobs is not None else [None]
    first = result.logit_first[index]
    following = sequence.tokens[span.start + 1 : min(span.start + span.count + 1, sequence.num_prompt)]
    rows = result.output.logits[first : first + len(following)]
    if following and len(results) == span.start + 1:
        results.extend(_token_logprobs(rows, following, sequence.params.prompt_logprobs))
    job.prompt_logprobs = results


@dataclass(eq=False)
class Job:
    """One sequence in flight, and everything about it but its tokens."""

    sequence: RequestState
    stopper: Stopper
    metrics: RequestMetrics
    index: int = 0
    finish: Finish | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    traced: bool = False
    trace: list[RoundTrace] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    """Whether each token of the answer was drafted and accepted; none for beams."""
    beam: Hypothesis | None = None
    """The finished beam that became this answer of a beam search."""
    peers: list[Job] = field(default_factory=list)
    """All answers of its beam search, which end together. The first one's sequence is the group's root."""

    @property
    def output_ids(self) -> list[int]:
        return self.sequence.tokens[self.sequence.num_prompt :]

    @property
    def text(self) -> str:
        """The answer so far; a stop string is cut off."""
        detokenizer = self.stopper.detokenizer
        if detokenizer is None:
            return ""
        if self.finish is None:
            return detokenizer.text
        detokenizer.finish()
        return detokenizer.text[: self.finish.cut]


@dataclass(slots=True)
class Update:
    """What one engine step did for one sequence."""

    job: Job
    tokens: list[int]
    finish: Finish | None

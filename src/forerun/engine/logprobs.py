"""Log-probabilities of emitted and prompt tokens: always the target's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from forerun.core.request import RequestState
from forerun.core.tree import Verdict
from forerun.models.tokenizer import Detokenizer, token_text
from forerun.speculate.verify.score import Verification

if TYPE_CHECKING:
    from forerun.engine.jobs import Job


LOWEST = -9999.0
"""Stands for a log-probability of minus infinity, which JSON lacks."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's log-probability (natural log) and rank (1: the likeliest), and the likeliest tokens'."""

    token: int
    logprob: float
    rank: int
    top: dict[int, float]


@dataclass(frozen=True, slots=True)
class Logprob:
    """vLLM's: a log-probability (natural log), the token's rank (1: the likeliest), and its text."""

    logprob: float
    rank: int
    decoded_token: str


def by_token(items: Sequence[TokenLogprobs], tokenizer: Any, before: Sequence[int]) -> list[dict[int, Logprob]]:
    """Positions as vLLM gives them: by id, the token itself first, then the likeliest ones. The tokens come after
    ``before``, and their texts together are the text: a token that ends inside a character has none of it yet."""
    spelled = Detokenizer(tokenizer, before, skip_special_tokens=False)
    texts = [spelled.push([item.token]) for item in items]
    texts[-1:] = [text + spelled.finish() for text in texts[-1:]]
    return [_by_token(item, text, tokenizer) for item, text in zip(items, texts)]


def _by_token(item: TokenLogprobs, text: str, tokenizer: Any) -> dict[int, Logprob]:
    others = enumerate(item.top.items(), start=1)
    return {item.token: Logprob(item.logprob, item.rank, text)} | {
        token: Logprob(value, rank, token_text(tokenizer, token))
        for rank, (token, value) in others
        if token != item.token
    }


def finite(value: float) -> float:
    """A log-probability as JSON can hold it."""
    return max(value, LOWEST)


def _describe(logits: torch.Tensor, tokens: list[int], count: int) -> list[TokenLogprobs]:
    """``logits`` [len(tokens), vocabulary]."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks = (logprobs > chosen).sum(dim=1) + 1
    top = logprobs.topk(min(count, logprobs.shape[1]), dim=1) if count else None
    result = []
    for i, token in enumerate(tokens):
        best = dict(zip(top.indices[i].tolist(), top.values[i].tolist())) if top is not None else {}
        result.append(TokenLogprobs(token, float(chosen[i, 0]), int(ranks[i]), best))
    return result


def emitted_logprobs(result: Verification, index: int, verdict: Verdict, mode: str) -> list[TokenLogprobs]:
    """Of the tokens that a round emitted for the index-th sequence; ``raw_logprobs`` are the model's own,
    ``processed_logprobs`` those of the distribution that was sampled."""
    scores = result.scores
    slot = result.deciding.index(index)
    nodes = [-1, *verdict.path][: len(verdict.tokens)]
    rows = [scores.row(slot, node) for node in nodes]
    source = scores.warped if mode == "processed_logprobs" or scores.raw is None else scores.raw
    count = scores.sequences[slot].params.logprobs
    return _describe(source[rows], verdict.tokens, count)


def prompt_logprobs(job: Job, result: Verification, index: int, sequence: RequestState) -> None:
    """Append those of the prompt tokens whose logits this prefill chunk produced (the first has none)."""
    span = result.batch.spans[index]
    results: list[TokenLogprobs | None] = job.prompt_logprobs if job.prompt_logprobs is not None else [None]
    first = result.logit_first[index]
    following = sequence.tokens[span.start + 1 : min(span.start + span.count + 1, sequence.num_prompt)]
    rows = result.output.logits[first : first + len(following)]
    if following and len(results) == span.start + 1:
        results.extend(_describe(rows, following, sequence.params.prompt_logprobs))
    job.prompt_logprobs = results

"""Beam search in the engine: admission, bookkeeping after each round, and the answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from forerun.core.errors import ConfigError, RequestError
from forerun.core.request import Beams, Hypothesis, RequestState
from forerun.core.tree import Draft, Verdict
from forerun.engine.jobs import Job, Update
from forerun.engine.metrics import RequestMetrics
from forerun.engine.stop import ERROR, LENGTH, STOP, Finish
from forerun.models.run.base import ModelInfo
from forerun.sampling.params import BeamSearchParams, SamplingParams
from forerun.speculate.accept.base import NO_TOKEN

if TYPE_CHECKING:
    from forerun.engine.engine import Engine
    from forerun.speculate.round import Round


@dataclass(frozen=True)
class BeamSearchSequence:
    """One finished beam."""

    tokens: list[int]
    """The prompt and the answer; the token that ended it is there only with ``include_stop_str_in_output``."""
    cum_logprob: float
    """The sum over the answer's tokens, the one that ended it included."""
    text: str
    """The text of ``tokens`` without special tokens."""
    finish_reason: str
    score: float
    """``cum_logprob`` / answer length ** length penalty, by which beams are ranked."""


@dataclass(frozen=True)
class BeamSearchOutput:
    """A prompt's beams, best first, and what speculation did for them."""

    sequences: list[BeamSearchSequence]
    metrics: RequestMetrics


def admit(params: BeamSearchParams, info: ModelInfo, trace: bool) -> SamplingParams:
    """The sampling options of each beam. Raises RequestError for a search that this model cannot run."""
    words = info.vocab_size - (0 if params.ignore_eos else len(info.eos_ids))
    if params.beam_width > words:
        raise RequestError(
            f"beam_width {params.beam_width} exceeds the {words} tokens that may follow: lower it", param="beam_width",
        )  # fmt: skip
    if trace:
        raise RequestError("beam search has no trace: remove trace", param="trace")
    return params.each


def attach(job: Job, before: list[Job], params: BeamSearchParams, new_id: Callable[[], int]) -> bool:
    """Makes ``job`` the next answer of a beam search whose answers so far are ``before``.

    Returns whether it is the first one: the scheduler sees only its sequence, the group's root.
    """
    job.traced = job.metrics.synthetic = False  # no acceptance rule decides here
    job.peers = before[0].peers if before else []
    job.peers.append(job)
    if before:
        job.metrics = before[0].metrics
        return False
    sequence = job.sequence
    sequence.group = Beams(
        sequence,
        params.beam_width,
        float(params.length_penalty),
        params.early_stopping,
        frozenset() if params.ignore_eos else sequence.eos_ids,
        new_id,
    )
    return True


def parts(sequence: RequestState) -> list[RequestState]:
    """All sequences of a request that drafters and policies know: its own and its beams."""
    group = sequence.group
    return [sequence] if group is None else [*group.members, *group.dropped, sequence]


def publish(engine: Engine, group: Beams, prefilling: set[int], result: Round, now: float) -> list[Update]:
    """Counts a round's steps, frees the beams that ended in it, and returns the answers once the search is done."""
    job = engine.jobs[group.root.id]
    scores = result.verification.scores
    nodes = sum(len(draft) for sequence, draft in zip(scores.sequences, scores.drafts) if sequence.group is group)
    taken = Verdict(path=[*range(group.steps - 1)], tokens=[0] * group.steps)
    engine.count(job, Draft([0] * nodes), taken, group.root.id in prefilling, now)
    errors = (engine.router.failures.get(part.id) for part in group.members + group.dropped)
    job.metrics.draft_error = next(filter(None, errors), job.metrics.draft_error)
    for beam in group.dropped:
        if beam is not group.root:
            beam.num_computed_tokens = 0  # drafters must not learn from it: its tokens are nobody's answer
        engine.forget(beam)
    group.dropped = []
    if not group.done:
        return []
    return [
        _answer(engine, peer, beam, group.error, now)
        for peer, beam in zip_longest(job.peers, group.finished[: len(job.peers)])
    ]


def _answer(engine: Engine, job: Job, beam: Hypothesis | None, error: str | None, now: float) -> Update:
    """Ends one answer with the tokens of its beam, or with an error where there is none."""
    tokens: list[int] = []
    finish = Finish(ERROR, error or NO_TOKEN)
    if beam is not None and error is None:
        job.beam, tokens = beam, beam.tokens
        keep = job.sequence.params.include_stop_str_in_output
        finish = Finish(STOP, silent=not keep) if beam.ended else Finish(LENGTH)
        job.sequence.tokens.extend(tokens)
        if job.stopper.detokenizer is not None:
            job.stopper.detokenizer.add(finish.text_tokens(tokens))
    engine.end(job, finish, now)
    return Update(job, tokens, finish)


def only(params: object) -> BeamSearchParams:
    """Raises ConfigError for other options than those of a search."""
    if not isinstance(params, BeamSearchParams):
        raise ConfigError(f"params must be BeamSearchParams, not {type(params).__name__}")
    return params


def output(tokenizer: Any, jobs: list[Job]) -> BeamSearchOutput:
    """The answers of one finished search. Raises RequestError if it failed."""
    beams = []
    for job in jobs:
        assert job.finish is not None
        if job.beam is None:
            raise RequestError(f"beam search failed: {job.finish.stopped_by}")
        tokens = [*job.sequence.tokens[: job.sequence.num_prompt], *job.finish.text_tokens(job.output_ids)]
        text = "" if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=True)
        beams.append(BeamSearchSequence(tokens, job.beam.logprob, text, job.finish.reason, job.beam.score))
    return BeamSearchOutput(beams, jobs[0].metrics)

"""Beam search with speculation (Leviathan et al. 2023, A.4, made exact).

Every beam drafts, and one forward scores all their trees. Plain beam steps are then replayed over the scored nodes for
as long as all live beams stay inside their drafts; the step that leaves a draft counts, too. So beams and scores equal
plain beam search's to the last bit wherever logits do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isnan
from typing import NamedTuple

import torch

from forerun.core.batch import Scores
from forerun.core.request import Beams, Hypothesis, Requests, RequestState
from forerun.core.tree import Draft, Drafts, Verdict
from forerun.sampling.draw import Sampler
from forerun.speculate.accept.base import NAN
from forerun.speculate.draft.router import Router
from forerun.speculate.length.base import LengthPolicy
from forerun.speculate.verify import Target, Verification

Ranked = tuple[list[int], list[float]]
"""A row's best ids, best first, and their log-probabilities."""


class LiveBeam(NamedTuple):
    """A beam inside the round: it has reached ``node`` of the draft of a member's sequence."""

    member: int
    node: int
    logprob: float


class Continuation(NamedTuple):
    """A candidate of the next step: the index of the live beam that it continues, its token, its log-probability."""

    parent: int
    token: int
    logprob: float


def step(
    beams: Beams, logprobs: Sequence[float], rows: Sequence[Ranked], length: int
) -> tuple[list[Continuation], list[Continuation]]:
    """One plain beam step, as in transformers since 4.50.

    Of all continuations, the ``candidates`` best are looked at. Returns the best ``width`` that go on, and those among
    the first ``width`` that end. ``length`` counts the new token. Ties go to the better beam, then the smaller id.
    """
    continuations = [
        Continuation(parent, token, logprob + value)
        for parent, (logprob, (ids, values)) in enumerate(zip(logprobs, rows, strict=True))
        for token, value in zip(ids, values)
    ]
    continuations.sort(key=lambda candidate: -candidate.logprob)
    best = continuations[: beams.candidates]
    last = length >= beams.longest
    ended = [candidate for candidate in best[: beams.width] if last or candidate.token in beams.ends]
    live = [] if last else [candidate for candidate in best if candidate.token not in beams.ends]
    return live[: beams.width], ended


def finished(beams: Beams, live: Sequence[Continuation], length: int) -> bool:
    """Whether the search is over: no beam of ``length`` tokens is live, or enough have finished for
    ``early_stopping``."""
    if not live:
        return True
    if len(beams.finished) < beams.width:
        return False
    if beams.early_stopping is True:
        return True
    farthest = beams.longest if beams.early_stopping == "never" and beams.length_penalty > 0.0 else length
    return live[0].logprob / float(farthest**beams.length_penalty) <= beams.finished[-1].score


@dataclass(slots=True)
class Outcome:
    """What a round decided: its sequences with drafts and verdicts, then the beams that forked off in it."""

    sequences: list[RequestState]
    drafts: list[Draft]
    verdicts: list[Verdict]
    sources: list[int]
    """Per sequence, the index of the one that had its rows in the forward."""
    groups: list[Beams]
    """The beam searches that took steps."""

    @property
    def all(self) -> tuple[list[RequestState], list[Draft], list[Verdict]]:
        return self.sequences, self.drafts, self.verdicts

    def add_fork(self, sequence: RequestState, verdict: Verdict, source: int) -> None:
        self.sequences.append(sequence)
        self.drafts.append(self.drafts[source])
        self.verdicts.append(verdict)
        self.sources.append(source)


def branch(
    sequences: Requests,
    drafts: Drafts,
    verdicts: Sequence[Verdict],
    result: Verification,
    sampler: Sampler,
    target: Target,
    observers: tuple[Router, LengthPolicy],
) -> Outcome:
    """Takes the steps of every beam search, and fills the verdicts of its members.

    The first beam that continues a member goes on as that member. A further one is a fork: it shares the member's pages
    and what ``observers`` know of it. Members that no beam continues are ``dropped``, and give up their pages.
    """
    groups: dict[Beams, list[int]] = {}
    for member, sequence in enumerate(result.scores.sequences):
        if sequence.group is not None:
            groups.setdefault(sequence.group, []).append(member)
    outcome = Outcome([*sequences], [*drafts], [*verdicts], [*range(len(sequences))], [*groups])
    if not groups:
        return outcome
    scores, pool = result.scores, target.attention.pool
    ranked = _rank(scores, groups, sampler)
    for beams, members in groups.items():
        live = _replay(beams, members, scores, ranked)
        beams.members, beams.logprobs = [], []
        continued: set[int] = set()
        for beam, token in live:
            index, sequence = result.deciding[beam.member], scores.sequences[beam.member]
            verdict = Verdict(scores.drafts[beam.member].path(beam.node), token)
            if sequence is beams.root or beam.member in continued:
                fork = replace(sequence, id=beams.new_id(), tokens=list(sequence.tokens))
                pool.fork(sequence.id, fork.id, pool.length(sequence.id))
                for observer in observers:
                    observer.fork(sequence, fork)
                outcome.add_fork(fork, verdict, index)
                sequence = fork
            else:
                outcome.verdicts[index] = verdict
            continued.add(beam.member)
            beams.members.append(sequence)
            beams.logprobs.append(beam.logprob)
        beams.dropped = [scores.sequences[i] for i in members if scores.sequences[i] not in beams.members]
        for sequence in beams.dropped:
            pool.free(sequence.id)
        for member in members if beams.error is not None else ():
            outcome.verdicts[result.deciding[member]] = Verdict(error=beams.error)
    return outcome


def beam_progress(sequence: RequestState, draft: Draft, verdict: Verdict) -> Verdict:
    """What a length policy learns of a sequence: its verdict, or how far a beam's group came, one token a step."""
    if sequence.group is None or not sequence.group.steps:
        return verdict
    steps, depth = sequence.group.steps, draft.depth
    return replace(verdict, path=[*range(min(depth, steps - 1))], tokens=[0] * steps, tested=min(depth, steps))


def _rank(scores: Scores, groups: dict[Beams, list[int]], sampler: Sampler) -> dict[int, Ranked]:
    """The best continuations of every row of every group. Ids that are not permitted have log-probability -inf."""
    rows = [
        scores.row(member, node)
        for members in groups.values()
        for member in members
        for node in range(-1, len(scores.drafts[member]))
    ]
    count = min(max(beams.candidates for beams in groups), scores.warped.shape[1])
    ids, logprobs = torch.empty(len(rows), count, dtype=torch.int32), torch.empty(len(rows), count)
    sampler.rank_into(scores.warped, rows, range(len(rows)), ids, logprobs)
    return dict(zip(rows, zip(ids.tolist(), logprobs.tolist())))


def _replay(
    beams: Beams, members: Sequence[int], scores: Scores, ranked: dict[int, Ranked]
) -> list[tuple[LiveBeam, int]]:
    """Takes plain steps up to the first that leaves the drafts.

    Returns, for each beam that goes on, where in the drafts it stands, with its new log-probability, and the token that
    follows; nothing if the search is over.
    """
    beams.steps = 0
    live = [LiveBeam(member, -1, logprob) for member, logprob in zip(members, beams.logprobs or [0.0])]
    while True:
        rows = []
        for beam in live:
            row = scores.row(beam.member, beam.node)
            ids, values = ranked[row]
            # A row with NaN is not ranked, or NaN spoils all of its log-probabilities.
            if isnan(values[0]) or (ids[0] < 0 and bool(scores.warped[row].isnan().any())):
                beams.error, beams.done = NAN, True
                return []
            count = values.index(-inf) if -inf in values else len(values)  # ids that are permitted
            rows.append((ids[:count], values[:count]))
        beams.steps += 1
        first = live[0]
        length = scores.sequences[first.member].num_output + len(scores.drafts[first.member].path(first.node)) + 1
        chosen, ended = step(beams, [beam.logprob for beam in live], rows, length)
        _finish(beams, scores, live, ended, length)
        if finished(beams, chosen, length):
            beams.done = True
            return []
        parents = [live[candidate.parent]._replace(logprob=candidate.logprob) for candidate in chosen]
        nodes = [
            scores.drafts[beam.member].child(beam.node, candidate.token) for beam, candidate in zip(parents, chosen)
        ]
        if None in nodes:
            return [(beam, candidate.token) for beam, candidate in zip(parents, chosen)]
        live = [beam._replace(node=node) for beam, node in zip(parents, nodes) if node is not None]


def _finish(beams: Beams, scores: Scores, live: Sequence[LiveBeam], ended: Sequence[Continuation], length: int) -> None:
    """Adds ended beams to the finished ones, of which the best ``width`` stay."""
    for candidate in ended:
        beam = live[candidate.parent]
        sequence, draft = scores.sequences[beam.member], scores.drafts[beam.member]
        tokens = [*sequence.tokens[sequence.num_prompt :], *draft.path_tokens(beam.node), candidate.token]
        score = candidate.logprob / length**beams.length_penalty
        beams.finished.append(Hypothesis(tokens, candidate.logprob, score, candidate.token in beams.ends))
    beams.finished.sort(key=lambda hypothesis: -hypothesis.score)
    del beams.finished[beams.width :]

"""Beam search with speculation (Leviathan et al. 2023, A.4, made exact).

Every beam drafts and one forward scores all their trees. Then the plain beam step is taken again and again over the
scored positions, as long as all live beams stay inside what was drafted; the step that leaves it counts, too. So beams
and scores are plain beam search's to the last bit, whatever the drafts, where logits are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isnan
from typing import NamedTuple, Protocol

import torch

from forerun.core.batch import Scores
from forerun.core.request import Beams, Hypothesis, Requests, RequestState
from forerun.core.tree import Draft, Drafts, Verdict
from forerun.sampling.draw import Sampler
from forerun.speculate.accept.base import NAN
from forerun.speculate.verify import Target, Verification

Ranked = tuple[list[int], list[float]]
"""A row's best ids, best first, and their log-probabilities."""


class Live(NamedTuple):
    """A beam inside the round: behind which node of which sequence's draft it stands, and its log-probability."""

    member: int
    node: int
    log: float


class Continuation(NamedTuple):
    """A beam of the next step: the live one that it continues, its token, and its log-probability."""

    parent: int
    token: int
    log: float


class Fork(NamedTuple):
    """A beam more behind the ``source``-th sequence of the round: what that was before the round, with a verdict of its
    own."""

    source: int
    sequence: RequestState
    verdict: Verdict


class Follower(Protocol):
    """Whoever remembers something of a sequence, and has to know of its forks."""

    def fork(self, source: RequestState, sequence: RequestState) -> None: ...


def step(
    beams: Beams, logs: Sequence[float], rows: Sequence[Ranked], length: int
) -> tuple[list[Continuation], list[Continuation]]:
    """One plain beam step (transformers' since 4.50): of all continuations of the live beams, the ``candidates`` best;
    the best ``width`` of them that go on, and those that end among the best ``width``.

    ``length`` is the output's with the new token. Ties go to the better beam, then to the smaller id.
    """
    every = [
        Continuation(parent, token, log + value)
        for parent, (log, (ids, values)) in enumerate(zip(logs, rows, strict=True))
        for token, value in zip(ids, values)
    ]
    every.sort(key=lambda chosen: -chosen.log)
    best = every[: beams.candidates]
    last = length >= beams.longest
    ended = [chosen for chosen in best[: beams.width] if last or chosen.token in beams.ends]
    live = [] if last else [chosen for chosen in best if chosen.token not in beams.ends]
    return live[: beams.width], ended


def finished(beams: Beams, live: Sequence[Continuation], length: int) -> bool:
    """Whether no live beam, of ``length`` output tokens, goes on: none is left, or enough have finished for
    ``early_stopping``."""
    if not live:
        return True
    if len(beams.finished) < beams.width:
        return False
    if beams.early_stopping is True:
        return True
    farthest = beams.longest if beams.early_stopping == "never" and beams.length_penalty > 0.0 else length
    return live[0].log / farthest**beams.length_penalty <= beams.finished[-1].score


@dataclass(slots=True)
class Branched:
    """A round's sequences with their drafts and verdicts, and behind them the beams that forked off in it."""

    sequences: Requests
    drafts: Drafts
    verdicts: Sequence[Verdict]
    sources: Sequence[int]
    """Per sequence, which of the round's sequences had its rows in the forward."""
    groups: list[Beams]
    """The beam searches that took steps."""

    @property
    def all(self) -> tuple[Requests, Drafts, Sequence[Verdict]]:
        return self.sequences, self.drafts, self.verdicts

    def seen(self) -> list[Verdict]:
        """What a length policy learns of each of the round's own sequences. Of a beam: how far its group came, one
        token a step."""
        own = max(self.sources, default=-1) + 1
        return [_seen(*each) for each in zip(self.sequences[:own], self.drafts, self.verdicts)]


def branch(
    sequences: Requests,
    drafts: Drafts,
    verdicts: list[Verdict],
    result: Verification,
    sampler: Sampler,
    target: Target,
    followers: Sequence[Follower],
) -> Branched:
    """Take every beam search's steps over what was scored; ``verdicts`` of beams are filled. A beam that forks shares
    its source's pages and what ``followers`` know of it; beams that are dropped give up their pages."""
    groups: dict[Beams, list[int]] = {}
    for member, sequence in enumerate(result.scores.sequences):
        if sequence.group is not None:
            groups.setdefault(sequence.group, []).append(member)
    if not groups:
        return Branched(sequences, drafts, verdicts, range(len(sequences)), [])
    forks, pool = _search(result, groups, sampler, verdicts), target.attention.pool
    for fork in forks:
        source = sequences[fork.source]
        pool.fork(source.id, fork.sequence.id, pool.length(source.id))
        for follower in followers:
            follower.fork(source, fork.sequence)
    for sequence in [sequence for group in groups for sequence in group.dropped]:
        pool.free(sequence.id)  # first, so that the others find free pages
    return Branched(
        [*sequences, *(fork.sequence for fork in forks)],
        [*drafts, *(drafts[fork.source] for fork in forks)],
        [*verdicts, *(fork.verdict for fork in forks)],
        [*range(len(sequences)), *(fork.source for fork in forks)],
        list(groups),
    )


def _search(
    result: Verification, groups: dict[Beams, list[int]], sampler: Sampler, verdicts: list[Verdict]
) -> list[Fork]:
    """Replay every group's plain beam steps over what was scored. The first beam behind a member goes on as that
    member, further ones are forks; members without any are ``dropped``. ``verdicts`` [round's sequences] are filled."""
    scores = result.scores
    ranked = _rank(scores, groups, sampler)
    forks: list[Fork] = []
    for beams, members_at in groups.items():
        live = _replay(beams, members_at, scores, ranked)
        members, beams.members, beams.logs = [scores.sequences[member] for member in members_at], [], []
        taken: set[int] = set()
        for beam, token in live:
            index, draft = result.deciding[beam.member], scores.drafts[beam.member]
            source = scores.sequences[beam.member]
            verdict = Verdict(draft.path(beam.node), token)
            if source is beams.root or beam.member in taken:
                source = replace(source, id=beams.new_id(), tokens=list(source.tokens))
                forks.append(Fork(index, source, verdict))
            else:
                verdicts[index] = verdict
            taken.add(beam.member)
            beams.members.append(source)
            beams.logs.append(beam.log)
        beams.dropped = [member for member in members if member not in beams.members]
        for member in members_at if beams.error is not None else ():
            verdicts[result.deciding[member]] = Verdict(error=beams.error)
    return forks


def _rank(scores: Scores, groups: dict[Beams, list[int]], sampler: Sampler) -> dict[int, Ranked]:
    """The best continuations of every row of every group."""
    rows = [
        scores.row(member, node)
        for members_at in groups.values()
        for member in members_at
        for node in range(-1, len(scores.drafts[member]))
    ]
    count = min(max(beams.candidates for beams in groups), scores.warped.shape[1])
    ids, logs = torch.empty(len(rows), count, dtype=torch.int32), torch.empty(len(rows), count)
    sampler.rank_into(scores.warped, rows, range(len(rows)), ids, logs)
    return dict(zip(rows, zip(ids.tolist(), logs.tolist())))


def _replay(
    beams: Beams, members_at: Sequence[int], scores: Scores, ranked: dict[int, Ranked]
) -> list[tuple[Live, int]]:
    """Plain steps up to the first that leaves the drafts. The beams that go on: where in the drafts each stands, with
    the log-probability of the token behind it; none if the search is over."""
    beams.steps = 0
    live = [Live(member, -1, log) for member, log in zip(members_at, beams.logs or [0.0])]
    while True:
        rows = []
        for beam in live:
            row = scores.row(beam.member, beam.node)
            beams.error = _fault(scores.warped[row], *ranked[row])
            if beams.error is not None:
                beams.done = True
                return []
            rows.append(_permitted(*ranked[row]))
        beams.steps += 1
        first = live[0]
        length = scores.sequences[first.member].num_output + len(scores.drafts[first.member].path(first.node)) + 1
        chosen, ended = step(beams, [beam.log for beam in live], rows, length)
        _finish(beams, scores, live, ended, length)
        if finished(beams, chosen, length):
            beams.done = True
            return []
        ahead = [scores.drafts[live[one.parent].member].child(live[one.parent].node, one.token) for one in chosen]
        if None in ahead:
            return [(live[one.parent]._replace(log=one.log), one.token) for one in chosen]
        live = [Live(live[one.parent].member, node, one.log) for one, node in zip(chosen, ahead) if node is not None]


def _fault(logits: torch.Tensor, ids: Sequence[int], logs: Sequence[float]) -> str | None:
    """NaN in a row: it is not ranked, or spoils every log-probability."""
    if isnan(logs[0]) or (ids[0] < 0 and bool(logits.isnan().any())):
        return NAN
    return None


def _permitted(ids: list[int], logs: list[float]) -> Ranked:
    count = next((member for member, log in enumerate(logs) if log == float("-inf")), len(logs))
    return ids[:count], logs[:count]


def _finish(beams: Beams, scores: Scores, live: Sequence[Live], ended: Sequence[Continuation], length: int) -> None:
    """Enter ended beams among the finished ones, of which the best ``width`` stay."""
    for one in ended:
        beam = live[one.parent]
        sequence, draft = scores.sequences[beam.member], scores.drafts[beam.member]
        tokens = [*sequence.tokens[sequence.num_prompt :], *draft.path_tokens(beam.node), one.token]
        score = one.log / length**beams.length_penalty
        beams.finished.append(Hypothesis(tokens, one.log, score, one.token in beams.ends))
    beams.finished.sort(key=lambda result: -result.score)
    del beams.finished[beams.width :]


def _seen(sequence: RequestState, draft: Draft, verdict: Verdict) -> Verdict:
    if sequence.group is None or not sequence.group.steps:
        return verdict
    steps, depth = sequence.group.steps, draft.depth
    return replace(verdict, path=[*range(min(depth, steps - 1))], tokens=[0] * steps, tested=min(depth, steps))

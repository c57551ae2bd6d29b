"""What every acceptance rule shares. A rule decides, from the target's scores, which path of a draft is kept and
which token follows it, so that the output keeps the target's law."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from typing import ClassVar

import torch

from forerun.core.errors import ConfigError
from forerun.core.scores import Scores
from forerun.core.tree import POINT_MASS, Draft, Verdict
from forerun.sampling.compiled import Compiled, Weighed
from forerun.sampling.draw import Sampler, best, probabilities
from forerun.sampling.noise import ACCEPT, RESIDUAL, fold, uniform
from forerun.sampling.warp import Row
from forerun.speculate.names import rules as rules

NAN = "the model returned NaN logits"
NO_TOKEN = "no token is permitted: the bans and masks of this request leave nothing to sample"


@dataclass(frozen=True)
class RuleConfig:
    """Options of a rule; its own extend it. Field names are keys of ``speculative_config``."""


class Rule(ABC):
    """One acceptance rule, named in ``rules``."""

    name: ClassVar[str]
    config_class: ClassVar[type[RuleConfig]] = RuleConfig
    identity: ClassVar[bool] = False
    """The same seed gives the same tokens as plain decoding."""
    lossless: ClassVar[bool] = True
    needs_q: ClassVar[bool] = True
    """Compares p with q: drafts are drawn with noise of their own and carry their q."""
    trees: ClassVar[bool] = True
    """Accepts drafts that branch."""
    replacement: bool = True
    """How drafters draw siblings: with replacement or without (``needs_q`` rules)."""

    def __init__(self, config: RuleConfig | None = None) -> None:
        self.config = config if config is not None else self.config_class()

    @classmethod
    def options(cls) -> list[str]:
        """The keys of ``speculative_config`` that are this rule's."""
        return [field.name for field in fields(cls.config_class)]

    @abstractmethod
    def accept(self, scores: Scores, sampler: Sampler) -> list[Verdict]:
        """One verdict per sequence of ``scores``."""


def row_contexts(scores: Scores) -> list[Row]:
    """The context of every row of ``scores``, in row order."""
    if scores.contexts is None:
        rows: list[Row] = []
        for sequence, draft in zip(scores.sequences, scores.drafts):
            root = len(rows)
            rows.append(Row(sequence))
            for token, parent in zip(draft.tokens, draft.parents):
                rows.append(Row(sequence, [*rows[root + 1 + parent].path, token]))
        scores.contexts = rows
    return scores.contexts


@dataclass(slots=True)
class Trials:
    """All trials of a round, flat: their row of p (the parent's), token, sequence, parent node, rank under the
    parent, row of q (the sequence's own), and the row of p behind their node."""

    row: list[int]
    token: list[int]
    index: list[int]
    parent: list[int]
    rank: list[int]
    q_row: list[int]
    below: list[int]


def flatten(scores: Scores) -> Trials:
    flat = Trials([], [], [], [], [], [], [])
    for index, draft in enumerate(scores.drafts):
        root = scores.first[index]
        for parent, trials in enumerate(draft.trials, start=-1):
            for rank, trial in enumerate(trials):
                flat.row.append(root + 1 + parent)
                flat.token.append(draft.tokens[trial.node])
                flat.index.append(index)
                flat.parent.append(parent)
                flat.rank.append(rank)
                flat.q_row.append(trial.row)
                flat.below.append(root + 1 + trial.node)
    return flat


def slots(chosen: Seq[int]) -> slice | list[int]:
    """An index for rows ``chosen``: a slice where they lie side by side, which copies nothing and costs a fifth."""
    first, count = chosen[0], len(chosen)
    if chosen[-1] == first + count - 1 and list(chosen) == list(range(first, first + count)):
        return slice(first, first + count)
    return list(chosen)


def take(rows: torch.Tensor, chosen: Seq[int]) -> torch.Tensor:
    """``rows[chosen]``; a view where they lie side by side."""
    return rows[slots(chosen)]


def column(values: Seq[int], like: torch.Tensor) -> torch.Tensor:
    """Indices as [n, 1] int64, for ``gather``."""
    return torch.tensor(values, dtype=torch.long, device=like.device)[:, None]


def gather_q(scores: Scores, trials: Trials, chosen: Seq[int], like: torch.Tensor) -> torch.Tensor:
    """[len(chosen), vocabulary] in ``like``'s dtype: the exact q of each chosen trial; a point mass is one-hot.
    Read only: it may share memory with the drafts."""
    groups: dict[int, list[int]] = {}
    masses = []
    for place, t in enumerate(chosen):
        if trials.q_row[t] == POINT_MASS:
            masses.append(place)
        else:
            groups.setdefault(id(scores.drafts[trials.index[t]].q), []).append(place)

    def rows(places: Seq[int]) -> torch.Tensor:
        q = scores.drafts[trials.index[chosen[places[0]]]].q
        assert q is not None
        return take(q, [trials.q_row[chosen[place]] for place in places]).to(like.dtype)

    if not masses and len(groups) == 1:
        return rows(range(len(chosen)))
    out = torch.zeros(len(chosen), like.shape[1], dtype=like.dtype, device=like.device)
    if masses:
        out[masses, [trials.token[chosen[place]] for place in masses]] = 1.0
    for places in groups.values():
        out[places] = rows(places)
    return out


def overlaps(
    scores: Scores, trials: Trials, rows: Seq[Row], choice: torch.Tensor, p: torch.Tensor | None = None
) -> tuple[list[int], torch.Tensor]:
    """Rows that hold trials, and for each sum_x min(p, q) against its first trial (Leviathan et al. 2023, theorem
    3.5): a point mass counts p(x), and a greedy row whether the trial is its ``choice`` [rows]. ``p`` [rows,
    vocabulary] is computed where needed if it is not given."""

    def target(members: Seq[int]) -> torch.Tensor:
        places = [trials.row[t] for t in members]
        return take(p, places) if p is not None else probabilities(take(scores.warped, places))

    greedy: list[int] = []
    masses: list[int] = []
    spread: list[int] = []
    for t, rank in enumerate(trials.rank):
        if rank == 0:
            kind = greedy if rows[trials.row[t]].heat == 0.0 else masses if trials.q_row[t] == POINT_MASS else spread
            kind.append(t)
    parts = []
    if greedy:
        drafted = column([trials.token[t] for t in greedy], choice)[:, 0]
        parts.append((take(choice, [trials.row[t] for t in greedy]) == drafted).to(scores.warped.dtype))
    if masses:
        at = target(masses)
        parts.append(at.gather(1, column([trials.token[t] for t in masses], at))[:, 0])
    if spread:
        at = target(spread)
        parts.append(torch.minimum(at, gather_q(scores, trials, spread, at)).sum(dim=1))
    ordered = [trials.row[t] for t in [*greedy, *masses, *spread]]
    return ordered, torch.cat(parts) if len(parts) > 1 else parts[0] if parts else scores.warped.new_empty(0)


def _quick_overlaps(
    scores: Scores, trials: Trials, rows: Seq[Row], choice: Seq[int], compiled: Compiled
) -> dict[int, float]:
    """``overlaps`` by row, for rows that lie on the host."""
    found: dict[int, float] = {}
    asked: list[int] = []
    for t, rank in enumerate(trials.rank):
        row = trials.row[t]
        if rank == 0 and rows[row].heat == 0.0:
            found[row] = float(choice[row] == trials.token[t])
        elif rank == 0:
            asked.append(t)
    if asked:
        drafts = [scores.drafts[trials.index[t]] for t in asked]
        qs = [d.q[trials.q_row[t]] if d.q is not None and trials.q_row[t] != POINT_MASS else None
              for d, t in zip(drafts, asked)]  # fmt: skip
        at = [trials.row[t] for t in asked]
        found.update(zip(at, compiled.overlaps(scores.warped, at, [trials.token[t] for t in asked], qs)))
    return found


def fetch(*tensors: torch.Tensor) -> list[list]:
    """The values of several vectors, brought to the host in one transfer."""
    if tensors[0].device.type == "cpu":
        return [tensor.tolist() for tensor in tensors]
    values = torch.cat([tensor.double() for tensor in tensors]).tolist()
    result = []
    for tensor in tensors:
        part, values = values[: len(tensor)], values[len(tensor) :]
        result.append(part if tensor.is_floating_point() else [int(value) for value in part])
    return result


def measure(verdict: Verdict, scores: Scores, index: int, overlap: dict[int, float]) -> None:
    """Fill a verdict's ``tested`` and ``overlap`` along its path. A row with a fault tests nothing."""
    nodes = [-1, *verdict.path]
    for node in nodes[:-1] if verdict.error is not None else nodes:
        value = overlap.get(scores.row(index, node))
        if value is not None:
            verdict.tested += 1
            verdict.overlap += value


def fault(value: float) -> str | None:
    """What is wrong with a row whose best score is ``value``; None: nothing."""
    if math.isnan(value):
        return NAN
    if value == -math.inf:
        return NO_TOKEN
    return None


def unspoilt(tops: Seq[float]) -> tuple[int, str | None]:
    """How far a path goes before a row with a fault, given the best scores of the root's row and its own; and the
    fault."""
    for place, top in enumerate(tops):
        if (error := fault(top)) is not None:
            return place, error
    return len(tops) - 1, None


def follow(scores: Scores, sampler: Sampler) -> list[Verdict]:
    """Every row's token is the best of its scores and the noise of its position (greedy rows: no noise); from the
    root, the child that carries it is followed while there is one."""
    rows, trials = row_contexts(scores), flatten(scores)
    if sampler.compiled is not None:
        tops, tokens, _ = sampler.pick(scores.warped, rows)
        overlap = _quick_overlaps(scores, trials, rows, tokens, sampler.compiled)
    else:
        top, choice = best(sampler.shared(scores.warped, rows))
        tested, shares = overlaps(scores, trials, rows, choice)
        tops, tokens, shared = fetch(top, choice, shares)
        overlap = dict(zip(tested, shared))
    verdicts = []
    for index, draft in enumerate(scores.drafts):
        path: list[int] = []
        row = scores.row(index, -1)
        error = fault(tops[row])
        while error is None and (child := draft.child(path[-1] if path else -1, tokens[row])) is not None:
            path.append(child)
            row = scores.row(index, child)
            error = fault(tops[row])
        verdict = Verdict(path=path, token=tokens[row], error=error)
        measure(verdict, scores, index, overlap)
        verdicts.append(verdict)
    return verdicts


@dataclass(slots=True)
class Decision:
    """A q-ratio rule's deterministic half.

    ``accept`` [trials]: the probability that each trial's test succeeds. ``residual`` [rows, vocabulary]:
    unnormalised law of the token emitted where the walk stops at that row.
    """

    accept: torch.Tensor
    residual: torch.Tensor


class RatioRule(Rule):
    """Rules that accept by comparing p with q: a pure ``decide``, then a walk over independent uniform tests."""

    def __init_subclass__(cls) -> None:
        if "decide" in vars(cls) and "weigh" not in vars(cls):
            cls.weigh = RatioRule.weigh  # type: ignore[method-assign]  # a parent's kernel decides as the parent does

    @abstractmethod
    def decide(self, p: torch.Tensor, scores: Scores, trials: Trials) -> Decision:
        """From p [rows, vocabulary] and the drafts' trials to test probabilities and residuals; no randomness. It
        computes in p's dtype and leaves p as it is."""

    def weigh(
        self, scores: Scores, trials: Trials, rows: Seq[Row], compiled: Compiled
    ) -> tuple[Weighed, list[float]] | None:
        """The same through kernels, from logits on the host, with the trials' test probabilities; None: not here. Such
        a rule's walk never asks for a draw from p itself."""
        return None

    def walk(self, draft: Draft, passed: list[list[bool]]) -> tuple[list[int], bool]:
        """The accepted path, given each trial's test result (``passed[parent + 1][rank]``), and whether the token
        behind it is drawn from p itself instead of the row's residual.

        Here: from the root, the first trial that passes is followed."""
        path: list[int] = []
        node = -1
        while draft.trials:
            for trial, good in zip(draft.trials[node + 1], passed[node + 1]):
                if good:
                    node = trial.node
                    path.append(node)
                    break
            else:
                break
        return path, False

    def accept(self, scores: Scores, sampler: Sampler) -> list[Verdict]:
        rows = row_contexts(scores)
        trials = self.check(scores, flatten(scores))
        if self.lossless and all(row.heat == 0.0 for row in rows):
            return follow(scores, sampler)  # what p against q comes to, where p is a point mass
        p, tops, overlap, chances, residual = self._judge(scores, trials, rows, sampler)
        verdicts, ends = [], []
        cursor = 0
        for index, draft in enumerate(scores.drafts):
            count = sum(map(len, draft.trials))
            path, again = self.walk(draft, self._test(scores, index, chances[cursor : cursor + count]))
            cursor += count
            visited = [scores.row(index, node) for node in [-1, *path]]
            good, error = unspoilt([tops[row] for row in visited])
            ends.append((visited[good], again))
            verdict = Verdict(path=path[:good], error=error)
            measure(verdict, scores, index, overlap)
            verdicts.append(verdict)
        laws = take(residual, [row for row, _ in ends])
        if any(again for _, again in ends):
            assert p is not None
            laws = torch.stack([(p if again else residual)[row] for row, again in ends])
        keys = [
            fold(sequence.seed, RESIDUAL, len(sequence.tokens), row - scores.row(index, -1) - 1)
            for index, (sequence, (row, _)) in enumerate(zip(scores.sequences, ends))
        ]
        for verdict, token in zip(verdicts, sampler.draw(laws, keys).tolist()):
            verdict.token = token
        return verdicts

    def _judge(
        self, scores: Scores, trials: Trials, rows: Seq[Row], sampler: Sampler
    ) -> tuple[torch.Tensor | None, list[float], dict[int, float], list[float], torch.Tensor]:
        """p [rows, vocabulary], a greedy row being a point mass (None where nobody needs it any more); each row's best
        score; overlaps by row; and the rule's decision."""
        weighing = self.weigh(scores, trials, rows, sampler.compiled) if sampler.compiled is not None else None
        if weighing is not None:
            weighed, chances = weighing
            return None, weighed.tops, dict(zip(trials.row, weighed.shared)), chances, weighed.residual
        if sampler.compiled is not None:
            p, tops, places = sampler.law(scores.warped)
            choice = torch.tensor(places)
        else:
            p = probabilities(scores.warped)
            top, choice = best(scores.warped)
        greedy = [i for i, row in enumerate(rows) if row.heat == 0.0]
        if greedy:
            p[greedy] = 0.0
            p[greedy, choice[greedy]] = 1.0
        decision = self.decide(p, scores, trials)
        if sampler.compiled is not None:
            overlap = _quick_overlaps(scores, trials, rows, places, sampler.compiled)
            return p, tops, overlap, decision.accept.tolist(), decision.residual
        tested, shares = overlaps(scores, trials, rows, choice, p)
        tops, chances, shared = fetch(top, decision.accept, shares)
        return p, tops, dict(zip(tested, shared)), chances, decision.residual

    def check(self, scores: Scores, trials: Trials) -> Trials:
        if not self.trees and any(trials.rank):
            draft = scores.drafts[trials.index[trials.rank.index(1)]]
            raise ConfigError(f"accept={self.name!r} works on chains, but {draft.method or 'the drafter'} sent a tree")
        return trials

    @staticmethod
    def _test(scores: Scores, index: int, chances: list[float]) -> list[list[bool]]:
        """Draw every trial's test of one draft; ``chances`` are in trial order."""
        sequence, draft = scores.sequences[index], scores.drafts[index]
        cursor = iter(chances)
        round_key = fold(sequence.seed, ACCEPT, len(sequence.tokens))
        return [
            [uniform(fold(round_key, parent, rank)) < next(cursor) for rank in range(len(trials))]
            for parent, trials in enumerate(draft.trials)
        ]

"""What every acceptance rule shares. A rule decides, from the target's scores, which path of a draft is kept and
which token follows it, so that the output keeps the target's law."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar

import torch

from forerun.core.registry import Registry
from forerun.core.scores import Scores
from forerun.core.tree import POINT_MASS, Draft, Verdict
from forerun.sampling.draw import Sampler, node_key, probabilities
from forerun.sampling.noise import ACCEPT, RESIDUAL, uniform
from forerun.sampling.warp import Row

rules: Registry[Rule] = Registry("acceptance rule", "forerun.rules")


class Rule(ABC):
    """One acceptance rule, named in ``rules``."""

    name: ClassVar[str]
    identity: ClassVar[bool] = False
    """The same seed gives the same tokens as plain decoding."""
    lossless: ClassVar[bool] = True
    needs_q: ClassVar[bool] = True
    """Compares p with q: drafts are drawn with noise of their own and carry their q."""
    trees: ClassVar[bool] = True
    """Accepts drafts that branch."""
    replacement: bool = True
    """How drafters draw siblings: with replacement or without (``needs_q`` rules)."""

    @abstractmethod
    def accept(self, scores: Scores, sampler: Sampler) -> list[Verdict]:
        """One verdict per sequence of ``scores``."""


def row_contexts(scores: Scores) -> list[Row]:
    """The context of every row of ``scores``, in row order."""
    rows = []
    for sequence, draft in zip(scores.sequences, scores.drafts):
        rows.append(Row(sequence))
        paths: list[list[int]] = []
        for token, parent in zip(draft.tokens, draft.parents):
            path = [*paths[parent], token] if parent >= 0 else [token]
            paths.append(path)
            rows.append(Row(sequence, path))
    return rows


@dataclass(slots=True)
class Trials:
    """All trials of a round, flat: their row of p (the parent's), token, sequence and rank under the parent."""

    row: list[int]
    token: list[int]
    index: list[int]
    parent: list[int]
    rank: list[int]
    q_row: list[int]


def flatten(scores: Scores) -> Trials:
    flat = Trials([], [], [], [], [], [])
    for index, draft in enumerate(scores.drafts):
        for parent, trials in enumerate(draft.trials):
            for rank, trial in enumerate(trials):
                flat.row.append(scores.first[index] + parent)
                flat.token.append(draft.tokens[trial.node])
                flat.index.append(index)
                flat.parent.append(parent - 1)
                flat.rank.append(rank)
                flat.q_row.append(trial.row)
    return flat


def gather_q(scores: Scores, trials: Trials, chosen: Seq[int], like: torch.Tensor) -> torch.Tensor:
    """[len(chosen), vocabulary]: the exact q of each chosen trial; a point mass is one-hot."""
    tensors = [scores.drafts[trials.index[t]].q for t in chosen]
    rows = [trials.q_row[t] for t in chosen]
    if all(row != POINT_MASS for row in rows) and all(q is tensors[0] for q in tensors):
        assert tensors[0] is not None
        return tensors[0][rows].to(like.dtype)
    out = torch.zeros(len(chosen), like.shape[1], dtype=like.dtype, device=like.device)
    for i, (q, row) in enumerate(zip(tensors, rows)):
        if row == POINT_MASS:
            out[i, trials.token[chosen[i]]] = 1.0
        else:
            assert q is not None
            out[i] = q[row]
    return out


def overlaps(scores: Scores, rows: Seq[Row], greedy_choice: Seq[int]) -> dict[int, float]:
    """Row -> sum_x min(p, q) against the first trial under it (Leviathan et al. 2023, theorem 3.5); a point mass
    counts p(x). Rows without a trial are absent. ``greedy_choice`` is each row's argmax, used where T = 0."""
    trials = flatten(scores)
    firsts = [t for t, rank in enumerate(trials.rank) if rank == 0]
    result = {}
    masses: list[int] = []
    spread: list[int] = []
    for t in firsts:
        row = trials.row[t]
        if rows[row].heat == 0.0:
            result[row] = float(greedy_choice[row] == trials.token[t])
        else:
            (masses if trials.q_row[t] == POINT_MASS else spread).append(t)
    if masses:
        p = probabilities(scores.warped[[trials.row[t] for t in masses]])
        tokens = torch.tensor([trials.token[t] for t in masses], device=p.device)
        for t, value in zip(masses, p.gather(1, tokens[:, None])[:, 0].tolist()):
            result[trials.row[t]] = value
    if spread:
        p = probabilities(scores.warped[[trials.row[t] for t in spread]])
        shared = torch.minimum(p, gather_q(scores, trials, spread, p)).sum(dim=1).tolist()
        for t, value in zip(spread, shared):
            result[trials.row[t]] = value
    return result


def measure(verdict: Verdict, scores: Scores, index: int, overlap: dict[int, float]) -> None:
    """Fill a verdict's ``tested``, ``matched`` and ``overlap`` along its path."""
    draft = scores.drafts[index]
    for node in [-1, *verdict.path]:
        value = overlap.get(scores.row(index, node))
        if value is not None:
            verdict.tested += 1
            verdict.overlap += value
    verdict.matched = len(verdict.path)
    assert len(draft) or not verdict.path


def fault(value: float) -> str | None:
    """What is wrong with a row whose best score is ``value``; None: nothing."""
    if math.isnan(value):
        return "the model returned NaN logits"
    if value == -math.inf:
        return "no token is permitted: the bans and masks of this request leave nothing to sample"
    return None


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

    @abstractmethod
    def decide(self, p: torch.Tensor, scores: Scores, trials: Trials) -> Decision:
        """From p [rows, vocabulary] and the drafts' trials to test probabilities and residuals; no randomness."""

    def walk(self, draft: Draft, passed: list[list[bool]]) -> list[int]:
        """The accepted path, given each trial's test result (``passed[parent + 1][rank]``). Here: from the root,
        the first trial that passes is followed."""
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
        return path

    def accept(self, scores: Scores, sampler: Sampler) -> list[Verdict]:
        rows = row_contexts(scores)
        top = scores.warped.max(dim=1)
        best, choice = top.values.tolist(), top.indices
        p = self._target(scores, rows, choice)
        trials = flatten(scores)
        decision = self.decide(p, scores, trials)
        residual = torch.where(decision.residual.sum(dim=1, keepdim=True) > 0, decision.residual, p)
        keys = self._row_keys(scores, rows)
        drawn = sampler.draw(residual, keys).tolist()
        chances = decision.accept.tolist()
        overlap = overlaps(scores, rows, choice.tolist())
        verdicts = []
        cursor = 0
        for index, draft in enumerate(scores.drafts):
            count = sum(len(t) for t in draft.trials)
            passed = self._test(rows, scores, index, chances[cursor : cursor + count])
            cursor += count
            path = self.walk(draft, passed)
            row = scores.row(index, path[-1] if path else -1)
            verdict = Verdict(path=path, token=drawn[row])
            visited = [scores.row(index, node) for node in [-1, *path]]
            verdict.error = next((text for r in visited if (text := fault(best[r]))), None)
            measure(verdict, scores, index, overlap)
            verdicts.append(verdict)
        return verdicts

    @staticmethod
    def _target(scores: Scores, rows: Seq[Row], choice: torch.Tensor) -> torch.Tensor:
        """p of every row; a greedy row is a point mass on its argmax."""
        p = probabilities(scores.warped)
        greedy = [i for i, row in enumerate(rows) if row.heat == 0.0]
        if greedy:
            p[greedy] = 0.0
            p[greedy, choice[greedy]] = 1.0
        return p

    @staticmethod
    def _row_keys(scores: Scores, rows: Seq[Row]) -> list[int]:
        keys = []
        for index, draft in enumerate(scores.drafts):
            root = len(scores.sequences[index].tokens)
            for node in range(-1, len(draft)):
                keys.append(node_key(RESIDUAL, rows[scores.row(index, node)], root, node))
        return keys

    @staticmethod
    def _test(rows: Seq[Row], scores: Scores, index: int, chances: list[float]) -> list[list[bool]]:
        """Draw every trial's test of one draft; ``chances`` are in trial order."""
        draft = scores.drafts[index]
        root = len(scores.sequences[index].tokens)
        passed = []
        cursor = 0
        for parent, trials in enumerate(draft.trials):
            row = rows[scores.first[index] + parent]
            results = []
            for rank in range(len(trials)):
                results.append(uniform(node_key(ACCEPT, row, root, parent - 1, rank)) < chances[cursor])
                cursor += 1
            passed.append(results)
        return passed

"""p against q, for all rows of a round: ratios, residuals max(0, p - q) and overlaps, in torch and through kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from forerun.core.batch import Scores
from forerun.core.tree import POINT_MASS
from forerun.kernels.gpu import HostCopy, send, to_host
from forerun.sampling.compiled import CompiledSampling
from forerun.sampling.draw import Sampler, probabilities, target_keys
from forerun.sampling.warp import Row

if TYPE_CHECKING:
    from forerun.sampling.triton import TritonSampling


def row_contexts(scores: Scores) -> list[Row]:
    """The context of every row of ``scores``, in row order."""
    if scores.contexts is None:
        rows: list[Row] = []
        for sequence, draft in zip(scores.sequences, scores.drafts):
            root = len(rows)
            rows.append(Row(sequence))
            for token, parent in zip(draft.ids, draft.parents):
                rows.append(Row(sequence, [*rows[root + 1 + parent].path, token]))
        scores.contexts = rows
    return scores.contexts


@dataclass(slots=True)
class Trials:
    """All trials of a round, as columns."""

    row: list[int]
    """The parent's row of p."""
    token: list[int]
    index: list[int]
    """The sequence."""
    parent: list[int]
    rank: list[int]
    """How many draws were made under the parent before."""
    q_row: list[int]
    """The row of the draft's q."""
    below: list[int]
    """The node's own row of p."""


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
                flat.q_row.append(trial.q_row)
                flat.below.append(root + 1 + trial.node)
    return flat


def row_index(chosen: Sequence[int]) -> slice | list[int]:
    """An index of the rows ``chosen``: a slice where they are consecutive, which copies nothing and costs a fifth."""
    first, count = chosen[0], len(chosen)
    if chosen[-1] == first + count - 1 and list(chosen) == list(range(first, first + count)):
        return slice(first, first + count)
    return list(chosen)


def take(rows: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
    """``rows[chosen]``; a view where they are consecutive."""
    return rows[row_index(chosen)]


def column(values: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Indices as [n, 1] int64, for ``gather``."""
    return torch.tensor(values, dtype=torch.long, device=like.device)[:, None]


class Comparison:
    """A round's rows and trials, in torch, in the dtype of its scores and on their device."""

    def __init__(self, scores: Scores, sampler: Sampler) -> None:
        self.scores, self.sampler = scores, sampler
        self.rows = row_contexts(scores)
        self._best: list[int] = []
        """Each row's first id of the largest score; after ``pick``, with noise."""

    @cached_property
    def trials(self) -> Trials:
        return flatten(self.scores)

    @cached_property
    def p(self) -> torch.Tensor:
        """[rows, vocabulary], read only. A greedy row has all of its mass on its best id."""
        p, self.tops, self._best = self.sampler.distribution(self.scores.warped)
        greedy = [i for i, row in enumerate(self.rows) if row.effective_temperature == 0.0]
        if greedy:  # scores are not divided by a temperature of 0: their softmax is not p
            p[greedy] = 0.0
            p[greedy, [self._best[i] for i in greedy]] = 1.0
        return p

    @cached_property
    def tops(self) -> list[float]:
        """Each row's largest score; after ``pick``, with noise. NaN if the row has one."""
        _ = self.p  # sets it
        return self.tops

    @cached_property
    def residual(self) -> torch.Tensor:
        """[rows, vocabulary]: what is left of p after the trials so far; rows need not sum to 1."""
        return self.p.clone()

    def pick(self) -> list[int]:
        """Samples each row's token with the noise of its position."""
        self.tops, self._best, _ = self.sampler.sample(self.scores.warped, self.rows)
        return self._best

    def gather_q(self, chosen: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """[len(chosen), vocabulary] in ``like``'s dtype: the exact q of each chosen trial; a point mass is one-hot.
        Read only: it may share memory with the drafts."""
        scores, trials = self.scores, self.trials
        groups: dict[int, list[int]] = {}
        masses = []
        for index, t in enumerate(chosen):
            if trials.q_row[t] == POINT_MASS:
                masses.append(index)
            else:
                groups.setdefault(id(scores.drafts[trials.index[t]].q), []).append(index)

        def rows(indices: Sequence[int]) -> torch.Tensor:
            q = scores.drafts[trials.index[chosen[indices[0]]]].q
            assert q is not None
            return take(q, [trials.q_row[chosen[index]] for index in indices]).to(like.dtype)

        if not masses and len(groups) == 1:
            return rows(range(len(chosen)))
        out = torch.zeros(len(chosen), like.shape[1], dtype=like.dtype, device=like.device)
        if masses:
            out[masses, [trials.token[chosen[index]] for index in masses]] = 1.0
        for indices in groups.values():
            out[indices] = rows(indices)
        return out

    def left(
        self, rows: Sequence[int], q: torch.Tensor, factor: torch.Tensor | float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """max(0, factor * p - q) and its mass [rows, 1], for different ``rows`` p of the residual, ``q`` [rows,
        vocabulary] and ``factor`` [rows, 1]. A row stays as it is where only rounding left it without mass."""
        at = take(self.residual, rows)
        left = (factor * at - q).clamp_(min=0.0)
        # q >= p everywhere makes them equal, so a rejection is rounding's fault: p itself is then right.
        mass = left.sum(dim=1, keepdim=True)
        return torch.addcmul(left, at, (mass <= 0.0).to(at.dtype), out=left), mass

    def chains(self, *, linked: bool = False, lenience: float = 1.0) -> tuple[list[float], list[float]]:
        """Replaces the row of every trial of drafts that are chains by max(0, factor * p - q).

        Returns each trial's weight min(1, factor * p / (lenience * q)) of its token, and the mass left in its row. The
        factor is 1, or, if trials are ``linked``, the weight of the trial before in the chain.
        """
        trials = self.trials
        if not trials.row:
            return [], []
        q, tokens = self.gather_q(range(len(trials.row)), self.p), column(trials.token, self.p)
        ratio = take(self.p, trials.row).gather(1, tokens) / (q.gather(1, tokens) * lenience)
        weights, factor = self._link(ratio) if linked else (ratio.clamp_(max=1.0), 1.0)
        left, mass = self.left(trials.row, q, factor)
        self.residual[row_index(trials.row)] = left
        result, masses = to_host(weights[:, 0], mass[:, 0])
        return result, masses

    def _link(self, ratio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The running product of each chain's ratios, cut at 1: after and before each trial, [trials, 1] each."""
        trials = self.trials
        depth = max(trials.parent) + 1
        # A row per sequence. Column 0 and missing trials are 1; the ratio of the trial under node d - 2 is in column d.
        grid = ratio.new_ones(trials.index[-1] + 1, depth + 2)
        indices = [index * (depth + 2) + parent + 2 for index, parent in zip(trials.index, trials.parent)]
        flat = grid.view(-1, 1)
        flat[row_index(indices)] = ratio
        for length in range(1, depth + 2):
            grid[:, length] = (grid[:, length - 1] * grid[:, length]).clamp_(max=1.0)
        return take(flat, indices), take(flat, [slot - 1 for slot in indices])

    def overlaps(self) -> dict[int, float]:
        """For each row with trials, sum_x min(p, q) for the q of the first (Leviathan et al. 2023, theorem 3.5).

        A point mass counts p(x), and a greedy row whether the trial is its best id. Needs ``tops`` to be computed.
        """
        trials, result = self.trials, {}
        sampled = []
        for t, rank in enumerate(trials.rank):
            row = trials.row[t]
            if rank == 0 and self.rows[row].effective_temperature == 0.0:
                result[row] = float(self._best[row] == trials.token[t])
            elif rank == 0:
                sampled.append(t)
        if sampled:
            result.update(self._overlaps(sampled))
        return result

    def _overlaps(self, chosen: Sequence[int]) -> dict[int, float]:
        """``overlaps`` of chosen trials whose rows are not greedy."""
        trials = self.trials

        def target(members: Sequence[int]) -> torch.Tensor:
            indices = [trials.row[t] for t in members]
            return take(self.p, indices) if "p" in vars(self) else probabilities(take(self.scores.warped, indices))

        masses = [t for t in chosen if trials.q_row[t] == POINT_MASS]
        spread = [t for t in chosen if trials.q_row[t] != POINT_MASS]
        parts = []
        if masses:
            at = target(masses)
            parts.append(at.gather(1, column([trials.token[t] for t in masses], at))[:, 0])  # min(p, 1) at its token
        if spread:
            at = target(spread)
            parts.append(torch.minimum(at, self.gather_q(spread, at)).sum(dim=1))
        return dict(zip([trials.row[t] for t in [*masses, *spread]], torch.cat(parts).tolist()))


class CompiledComparison(Comparison):
    """The same for float32 scores on the host, through kernels: chains are compared in one call that needs no p."""

    def __init__(self, scores: Scores, sampler: Sampler, kernels: CompiledSampling) -> None:
        super().__init__(scores, sampler)
        self.kernels = kernels
        self._shared: list[float] | None = None
        """Every trial's overlap, once chains were compared."""

    def chains(self, *, linked: bool = False, lenience: float = 1.0) -> tuple[list[float], list[float]]:
        trials, kept = self.trials, {}  # kept: the call gets bare addresses, so their tensors must outlive it
        qs = []
        for index, row in zip(trials.index, trials.q_row):
            q = self.scores.drafts[index].q
            if row == POINT_MASS or q is None:
                qs.append(0)
                continue
            if index not in kept:
                kept[index] = q.float().contiguous()
            qs.append(kept[index].data_ptr() + 4 * row * q.shape[1])  # 4 bytes a float32
        greedy = [row.effective_temperature == 0.0 for row in self.rows]
        follows = [linked and parent >= 0 for parent in trials.parent]
        weighed = self.kernels.weigh(self.scores.warped, greedy, trials.row, trials.token, qs, follows, lenience)
        self.residual, self.tops, self._shared = weighed.residual, weighed.tops, weighed.shared
        return weighed.weights, weighed.left

    def overlaps(self) -> dict[int, float]:
        return super().overlaps() if self._shared is None else dict(zip(self.trials.row, self._shared))

    def _overlaps(self, chosen: Sequence[int]) -> dict[int, float]:
        trials, drafts = self.trials, self.scores.drafts
        qs = []
        for t in chosen:
            q = drafts[trials.index[t]].q
            qs.append(None if q is None or trials.q_row[t] == POINT_MASS else q[trials.q_row[t]])
        at, tokens = [trials.row[t] for t in chosen], [trials.token[t] for t in chosen]
        return dict(zip(at, self.kernels.overlaps(self.scores.warped, at, tokens, qs)))


class ComparisonOnGPU(Comparison):
    """The same for float32 scores on a GPU. ``pick`` is the one time in a round where the host waits for it: what is
    chosen and the chances of what was drafted come in one copy, and drafts that are late have come before."""

    def __init__(self, scores: Scores, sampler: Sampler, kernels: TritonSampling) -> None:
        super().__init__(scores, sampler)
        self.kernels = kernels
        self._chances: list[float] = []
        """Of the first token that was drafted under each row."""

    def pick(self) -> list[int]:
        scores, warped, ids = self.scores, self.scores.warped, [0] * len(self.rows)
        for index, draft in enumerate(scores.drafts):
            for parent, trials in enumerate(draft.trials, -1):
                if trials:
                    ids[scores.row(index, parent)] = draft.ids[trials[0].node]
        found = self.kernels.find(warped, target_keys(self.rows))
        if any(ids) and any(row.effective_temperature for row in self.rows):
            drafted = send(ids, warped.device)
            for late in {draft.late for draft in scores.drafts if draft.late is not None}:
                late.fill_in(drafted)
            found = torch.cat([found, probabilities(warped).gather(1, drafted[:, None]).view(torch.int32)], 1)
        found = HostCopy(found).read()
        self.tops, self._best = found[:, 0].contiguous().view(torch.float32).tolist(), found[:, 1].tolist()
        self._chances = found[:, 2:].contiguous().view(torch.float32).flatten().tolist()
        return self._best

    def _overlaps(self, chosen: Sequence[int]) -> dict[int, float]:
        trials = self.trials
        if not self._chances or any(trials.q_row[t] != POINT_MASS for t in chosen):
            return super()._overlaps(chosen)
        return {trials.row[t]: self._chances[trials.row[t]] for t in chosen}


def compare(scores: Scores, sampler: Sampler) -> Comparison:
    """A comparison through kernels where there are some, else in torch."""
    on_gpu = sampler.noise.on_gpu
    if on_gpu is not None and scores.warped.dtype is torch.float32:
        return ComparisonOnGPU(scores, sampler, on_gpu)
    if sampler.compiled is None:
        return Comparison(scores, sampler)
    return CompiledComparison(scores, sampler, sampler.compiled)

"""Sampling with keyed noise, for all rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch

from forerun.kernels.gpu import to_host
from forerun.sampling.noise import Gumbel, fold, target_key, uniform
from forerun.sampling.warp import Row

_AHEAD = 4
_ALMOST_ONE = 1.0 - 2.0**-40


class Sampler:
    """Draws token ids from warped logits. Target and drafters share it, and with it the noise.

    ``vocab_size`` is the target's; a drafter's logits are mapped to it first.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.noise = Gumbel(vocab_size, device)
        self.compiled = self.noise.compiled

    def couple(self, warped: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
        """Adds to each row the noise of its absolute position (greedy rows: none); the argmax then samples the row.

        This is the coupling: target and drafter call it with the same seed and position.
        """
        keys = target_keys(rows)
        ahead: list[int] = []
        if any(key is not None and key not in self.noise for key in keys):
            # The round will need the next positions, too; together they cost little more than one.
            noisy = [row for row, key in zip(rows, keys) if key is not None]
            ahead = [target_key(row.sequence.seed, row.position + i) for row in noisy for i in range(1, _AHEAD)]
        return self.perturb(warped, keys, ahead)

    def sample(
        self, warped: torch.Tensor, rows: Sequence[Row], distribution: bool = False
    ) -> tuple[list[float], list[int], torch.Tensor | None]:
        """Samples each row with the noise of its position.

        Returns the largest scores, the first ids that have them, and with ``distribution`` the softmax of ``warped``.
        """
        if self.compiled is not None:
            return self.compiled.choose(warped, target_keys(rows), distribution)
        if self.noise.on_gpu is not None and warped.dtype is torch.float32:
            best = self.noise.on_gpu.choose(warped, target_keys(rows))
            return *best, probabilities(warped) if distribution else None
        return *argmax(self.couple(warped, rows)), probabilities(warped) if distribution else None

    def distribution(self, warped: torch.Tensor) -> tuple[torch.Tensor, list[float], list[int]]:
        """Softmax of each row, its largest score, and the first id that has it."""
        if self.compiled is not None:
            tops, ids, distribution = self.compiled.choose(warped, [None] * len(warped), distribution=True)
            assert distribution is not None
            return distribution, tops, ids
        return probabilities(warped), *argmax(warped)

    def rank(self, scores: torch.Tensor, count: int) -> tuple[list[list[int]], list[list[float]]]:
        """The best ``count`` ids of each row of ``scores`` [rows, vocabulary], best first, and their log-probabilities;
        fewer where fewer are permitted."""
        count = min(count, scores.shape[1])
        ids, logs = torch.empty(len(scores), count, dtype=torch.int32), torch.empty(len(scores), count)
        rows = range(len(scores))
        self.rank_into(scores, rows, rows, ids, logs)
        permitted = [[log for log in row if log > -inf] for row in logs.tolist()]
        return [row[: len(kept)] for row, kept in zip(ids.tolist(), permitted)], permitted

    def rank_into(
        self, scores: torch.Tensor, rows: Sequence[int], into: Sequence[int], ids: torch.Tensor, logs: torch.Tensor
    ) -> None:
        """Writes the best ids of some ``rows`` of ``scores`` [rows, vocabulary], best first, and their
        log-probabilities to rows ``into`` of ``ids``, int32 [any, count], and ``logs``, float32, both on the host.
        Where fewer ids are permitted, the last logs are not above -inf."""
        if self.compiled is not None and scores.dtype is torch.float32:
            self.compiled.rank(scores, rows, into, ids, logs)
            return
        scores = scores[torch.as_tensor(rows, device=scores.device)].float()
        values, result = scores.topk(ids.shape[1], dim=1)
        ids[list(into)] = result.int().cpu()
        # In float64, so that the order of the sum, which depends on the number of rows, does not show.
        logs[list(into)] = (values - scores.double().logsumexp(dim=1, keepdim=True)).float().cpu()

    def perturb(self, warped: torch.Tensor, keys: Sequence[int | None], ahead: Sequence[int] = ()) -> torch.Tensor:
        """Adds the Gumbel row of each key to ``warped`` (None: no noise). Keys of ``ahead`` will be needed soon."""
        noisy = [i for i, key in enumerate(keys) if key is not None]
        if not noisy:
            return warped
        noise = self.noise.rows([key for key in keys if key is not None], ahead)
        if len(noisy) == len(warped):
            return warped + noise
        scores = warped.clone()
        scores[noisy] += noise
        return scores

    def draw(self, weights: torch.Tensor, keys: Sequence[int]) -> torch.Tensor:
        """Draws an id per row of unnormalised probabilities ``weights`` [rows, vocabulary], by inverting the cumulative
        sum at the uniform number of its key. An id of weight 0 is drawn only if its whole row is 0."""
        quantiles = [uniform(key) for key in keys]
        if self.compiled is not None and weights.dtype is torch.float32:
            return torch.tensor(self.compiled.draw(weights, quantiles))
        return invert(weights, torch.tensor(quantiles, dtype=torch.float64, device=weights.device)[:, None])


def target_keys(rows: Sequence[Row]) -> list[int | None]:
    """The key of each row's noise; None: the row is greedy."""
    return [target_key(row.sequence.seed, row.position) if row.effective_temperature != 0.0 else None for row in rows]


def invert(weights: torch.Tensor, quantiles: torch.Tensor) -> torch.Tensor:
    """Per row of ``weights`` [rows, size], the first id at which the cumulative share exceeds ``quantiles`` [rows, 1],
    in [0, 1)."""
    reach = weights.cumsum(dim=1, dtype=torch.float64)
    goal = reach[:, -1:] * quantiles.clamp(0.0, _ALMOST_ONE)
    return torch.searchsorted(reach, goal, right=True).clamp_(max=reach.shape[1] - 1)[:, 0]


def argmax(scores: torch.Tensor) -> tuple[list[float], list[int]]:
    """Each row's largest entry (NaN if it has one) and the first id that holds it."""
    ids = scores.argmax(dim=1, keepdim=True)
    tops, indices = to_host(scores.gather(1, ids)[:, 0], ids[:, 0])
    return tops, indices


def node_key(purpose: int, row: Row, root: int, parent: int, trial: int = 0) -> int:
    """The key of noise for one trial of one round; ``root`` is the root's absolute position.

    Rules that compare p with q must not reuse the noise of an earlier round, another parent or another trial.
    """
    return fold(row.sequence.seed, purpose, row.position, root, parent, trial)


def probabilities(warped: torch.Tensor) -> torch.Tensor:
    return torch.softmax(warped, dim=-1)

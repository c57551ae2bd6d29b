"""Draws from distributions with keyed noise, for all rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch

from forerun.sampling.noise import Gumbel, fold, target_key, uniform
from forerun.sampling.warp import Row

_AHEAD = 4
_ALMOST_ONE = 1.0 - 2.0**-40


class Sampler:
    """Warped logits and keys in, token ids out. Shares one noise store between target and drafters.

    ``vocab_size`` is the target's; a drafter's logits are brought to it first.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.noise = Gumbel(vocab_size, device)
        self.compiled = self.noise.compiled

    def couple(self, warped: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
        """Scores whose argmax samples each row with the noise of its absolute position (greedy rows: no noise).

        This is the coupling: target and drafter call it with the same seed and position.
        """
        keys = _target_keys(rows)
        ahead: list[int] = []
        if any(key is not None and key not in self.noise for key in keys):
            # A round needs its next positions too; together they cost little more than one.
            hot = [row for row, key in zip(rows, keys) if key is not None]
            ahead = [target_key(row.sequence.seed, row.position + i) for row in hot for i in range(1, _AHEAD)]
        return self.perturb(warped, keys, ahead)

    def sample(
        self, warped: torch.Tensor, rows: Sequence[Row], distribution: bool = False
    ) -> tuple[list[float], list[int], torch.Tensor | None]:
        """``best`` of ``shared``, on the host, and with ``distribution`` the softmax of ``warped``."""
        if self.compiled is not None:
            return self.compiled.choose(warped, _target_keys(rows), distribution)
        top, ids = fetch(*best(self.couple(warped, rows)))
        return top, ids, probabilities(warped) if distribution else None

    def distribution(self, warped: torch.Tensor) -> tuple[torch.Tensor, list[float], list[int]]:
        """Softmax of each row, and its ``best`` on the host."""
        if self.compiled is not None:
            tops, ids, distribution = self.compiled.choose(warped, [None] * len(warped), distribution=True)
            assert distribution is not None
            return distribution, tops, ids
        top, indices = fetch(*best(warped))
        return probabilities(warped), top, indices

    def rank(self, scores: torch.Tensor, count: int) -> tuple[list[list[int]], list[list[float]]]:
        """Per row of ``scores`` [rows, vocabulary] the best ``count`` ids, best first, and the logs of their softmax;
        fewer where fewer are permitted."""
        count = min(count, scores.shape[1])
        ids, logs = torch.empty(len(scores), count, dtype=torch.int32), torch.empty(len(scores), count)
        every = range(len(scores))
        self.rank_into(scores, every, every, ids, logs)
        result = [[log for log in row if log > -inf] for row in logs.tolist()]
        return [row[: len(kept)] for row, kept in zip(ids.tolist(), result)], result

    def rank_into(
        self, scores: torch.Tensor, rows: Sequence[int], into: Sequence[int], ids: torch.Tensor, logs: torch.Tensor
    ) -> None:
        """The best ids of some ``rows`` of ``scores`` [rows, vocabulary], best first, and the logs of their softmax:
        into rows ``into`` of ``ids``, int32 [any, count], and ``logs``, float32, both on the host. Where fewer ids are
        permitted, the last logs are not above -inf."""
        if self.compiled is not None and scores.dtype is torch.float32:
            self.compiled.rank(scores, rows, into, ids, logs)
            return
        scores = scores[torch.as_tensor(rows, device=scores.device)].float()
        values, result = scores.topk(ids.shape[1], dim=1)
        ids[list(into)] = result.int().cpu()
        # In float64, so that the order in which a sum is taken, which depends on how many rows there are, is not seen.
        logs[list(into)] = (values - scores.double().logsumexp(dim=1, keepdim=True)).float().cpu()

    def perturb(self, warped: torch.Tensor, keys: Sequence[int | None], ahead: Sequence[int] = ()) -> torch.Tensor:
        """``warped`` plus the Gumbel row of each key; None: unchanged. Rows of ``ahead`` will be asked for soon."""
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
        """One id per row of unnormalised probabilities ``weights`` [rows, vocabulary]: where the row's cumulative
        sum passes the uniform of its key. An id of weight 0 is never drawn, unless its whole row is 0."""
        quantiles = [uniform(key) for key in keys]
        if self.compiled is not None and weights.dtype is torch.float32:
            return torch.tensor(self.compiled.draw(weights, quantiles))
        return invert(weights, torch.tensor(quantiles, dtype=torch.float64, device=weights.device)[:, None])


def _target_keys(rows: Sequence[Row]) -> list[int | None]:
    """The key of each row's noise; None: it is greedy."""
    return [target_key(row.sequence.seed, row.position) if row.effective_temperature != 0.0 else None for row in rows]


def invert(weights: torch.Tensor, quantiles: torch.Tensor) -> torch.Tensor:
    """Per row of ``weights`` [rows, size], the first id at which the cumulative share exceeds ``quantiles`` [rows, 1],
    in [0, 1)."""
    reach = weights.cumsum(dim=1, dtype=torch.float64)
    goal = reach[:, -1:] * quantiles.clamp(0.0, _ALMOST_ONE)
    return torch.searchsorted(reach, goal, right=True).clamp_(max=reach.shape[1] - 1)[:, 0]


def best(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's largest entry (NaN if it has one) and the first id that holds it."""
    ids = scores.argmax(dim=1, keepdim=True)
    return scores.gather(1, ids)[:, 0], ids[:, 0]


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


def node_key(purpose: int, row: Row, root: int, parent: int, trial: int = 0) -> int:
    """Key of noise that belongs to one trial of one round: rules that compare p with q must not meet noise that an
    earlier round, another parent or another trial has looked at. ``root`` is the root's absolute position."""
    return fold(row.sequence.seed, purpose, row.position, root, parent, trial)


def probabilities(warped: torch.Tensor) -> torch.Tensor:
    return torch.softmax(warped, dim=-1)

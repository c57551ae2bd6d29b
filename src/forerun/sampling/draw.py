"""Draws from distributions with keyed noise, for all rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch

from forerun.sampling.noise import Gumbel, fold, target_key, uniform
from forerun.sampling.warp import Row

_AHEAD = 4
_BLOCK = 128
_NARROW = 8192
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

    def shared(self, warped: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
        """Scores whose argmax samples each row with the noise of its absolute position (greedy rows: no noise).

        This is the coupling: target and drafter call it with the same seed and position.
        """
        noisy = [i for i, row in enumerate(rows) if row.effective_temperature != 0.0]
        if not noisy:
            return warped
        indices = [(rows[i].sequence.seed, rows[i].position) for i in noisy]
        keys = [target_key(seed, position) for seed, position in indices]
        ahead: list[int] = []
        if any(key not in self.noise for key in keys):
            # A round needs its next positions too; together they cost little more than one.
            ahead = [target_key(seed, position + i) for seed, position in indices for i in range(1, _AHEAD)]
        return _add(warped, noisy, self.noise.rows(keys, ahead))

    def pick(
        self, warped: torch.Tensor, rows: Sequence[Row], distribution: bool = False
    ) -> tuple[list[float], list[int], torch.Tensor | None]:
        """``best`` of ``shared``, on the host, and with ``distribution`` the softmax of ``warped``."""
        if self.compiled is not None:
            keys = [
                target_key(row.sequence.seed, row.position) if row.effective_temperature != 0.0 else None
                for row in rows
            ]
            return self.compiled.choose(warped, keys, distribution)
        top, ids = fetch(*best(self.shared(warped, rows)))
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

    def perturb(self, warped: torch.Tensor, keys: Sequence[int | None]) -> torch.Tensor:
        """``warped`` plus the Gumbel row of each key; None: unchanged."""
        noisy = [i for i, key in enumerate(keys) if key is not None]
        if not noisy:
            return warped
        return _add(warped, noisy, self.noise.rows([key for key in keys if key is not None]))

    def draw(self, weights: torch.Tensor, keys: Sequence[int]) -> torch.Tensor:
        """One id per row of unnormalised probabilities ``weights`` [rows, vocabulary]: where the row's cumulative
        sum passes the uniform of its key. An id of weight 0 is never drawn, unless its whole row is 0."""
        quantiles = [uniform(key) for key in keys]
        if self.compiled is not None and weights.dtype is torch.float32:
            return torch.tensor(self.compiled.draw(weights, quantiles))
        return invert(weights, torch.tensor(quantiles, dtype=torch.float64, device=weights.device)[:, None])


def _add(warped: torch.Tensor, noisy: Sequence[int], noise: torch.Tensor) -> torch.Tensor:
    if len(noisy) == len(warped):
        return warped + noise
    scores = warped.clone()
    scores[noisy] += noise
    return scores


def invert(weights: torch.Tensor, quantiles: torch.Tensor) -> torch.Tensor:
    """Per row of ``weights`` [rows, size], the first id at which the cumulative share exceeds ``quantiles`` [rows, 1],
    in [0, 1). Wide rows take two levels: first the block, then the id inside it."""
    size = weights.shape[1]
    if size <= _NARROW:
        return _first_above(weights.cumsum(dim=1, dtype=torch.float64), quantiles)[:, 0]
    whole = size // _BLOCK
    sums = weights[:, : whole * _BLOCK].unflatten(1, (whole, _BLOCK)).sum(dim=2)
    if whole * _BLOCK < size:
        sums = torch.cat([sums, weights[:, whole * _BLOCK :].sum(dim=1, keepdim=True)], dim=1)
    sums = sums.double()
    reach = sums.cumsum(dim=1)
    block = _first_above(reach, quantiles)
    first = block * _BLOCK
    ids = first + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(1, ids.clamp(max=size - 1)).double()
    if whole * _BLOCK < size:
        inside.masked_fill_(ids >= size, 0.0)
    # What is left as a share of the block, times the block's sum as added up here: no rounding of the one or the
    # other sum can lead outside.
    fraction = 1.0 - (reach.gather(1, block) - reach[:, -1:] * quantiles) / sums.gather(1, block)
    return (first + _first_above(inside.cumsum(dim=1), fraction)).clamp_(max=size - 1)[:, 0]


def _first_above(reach: torch.Tensor, fraction: torch.Tensor) -> torch.Tensor:
    """The first column of each row of cumulative sums that exceeds ``fraction`` [rows, 1] of the last one."""
    goal = reach[:, -1:] * fraction.clamp(0.0, _ALMOST_ONE)
    return torch.searchsorted(reach, goal, right=True).clamp_(max=reach.shape[1] - 1)


def best(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's largest entry (NaN if it has one) and the first id that holds it.

    On CPU a maximum with its place costs fifteen times one without, so wide rows are searched block by block.
    """
    size = scores.shape[1]
    whole = size // _BLOCK
    if scores.device.type != "cpu" or whole < 64:
        ids = scores.argmax(dim=1, keepdim=True)
        return scores.gather(1, ids)[:, 0], ids[:, 0]
    tops = scores[:, : whole * _BLOCK].unflatten(1, (whole, _BLOCK)).amax(dim=2)
    if whole * _BLOCK < size:
        tops = torch.cat([tops, scores[:, whole * _BLOCK :].amax(dim=1, keepdim=True)], dim=1)
    block = tops.argmax(dim=1, keepdim=True)
    ids = (block * _BLOCK + torch.arange(_BLOCK, device=scores.device)).clamp_(max=size - 1)
    inside = scores.gather(1, ids)
    ids = ids.gather(1, inside.argmax(dim=1, keepdim=True))
    return tops.gather(1, block)[:, 0], ids[:, 0]


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

"""Draws from distributions with keyed noise, for all rows at once."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from forerun.sampling.noise import Gumbel, fold, target_key
from forerun.sampling.warp import Row


class Sampler:
    """Warped logits and keys in, token ids out. Shares one noise store between target and drafters.

    ``vocab_size`` is the target's; a drafter's logits are brought to it first.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.noise = Gumbel(vocab_size, device)

    def shared(self, warped: torch.Tensor, rows: Seq[Row]) -> torch.Tensor:
        """Scores whose argmax samples each row with the noise of its absolute position (greedy rows: no noise).

        This is the coupling: target and drafter call it with the same seed and position.
        """
        keys = [None if row.heat == 0.0 else target_key(row.sequence.seed, row.position) for row in rows]
        return self.perturb(warped, keys)

    def perturb(self, warped: torch.Tensor, keys: Seq[int | None]) -> torch.Tensor:
        """``warped`` plus the Gumbel row of each key; None: unchanged."""
        noisy = [i for i, key in enumerate(keys) if key is not None]
        if not noisy:
            return warped
        noise = self.noise.rows([key for key in keys if key is not None])
        if len(noisy) == len(keys):
            return warped + noise
        scores = warped.clone()
        scores[noisy] += noise
        return scores

    def draw(self, weights: torch.Tensor, keys: Seq[int]) -> torch.Tensor:
        """One id per row of unnormalised probabilities ``weights`` [rows, vocabulary]."""
        return (weights.log() + self.noise.rows(keys)).argmax(dim=1)


def node_key(purpose: int, row: Row, root: int, parent: int, trial: int = 0) -> int:
    """Key of noise that belongs to one trial of one round: rules that compare p with q must not meet noise that an
    earlier round, another parent or another trial has looked at. ``root`` is the root's absolute position."""
    return fold(row.sequence.seed, purpose, row.position, root, parent, trial)


def probabilities(warped: torch.Tensor) -> torch.Tensor:
    return torch.softmax(warped, dim=-1)

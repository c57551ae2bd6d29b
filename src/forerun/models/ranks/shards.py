"""Layers of which every rank has a part."""

from __future__ import annotations

from collections.abc import Callable

import torch

from forerun.models.formats.base import Linear
from forerun.models.layout import Words
from forerun.models.ranks.team import Team


class Summed:
    """A linear layer whose inputs are split: each rank's part of the sums, in the rows' dtype, added up in float32."""

    def __init__(self, linear: Linear, team: Team) -> None:
        self.linear, self.team = linear, team
        self.kind, self.nbytes, self.exact = linear.kind, linear.nbytes, linear.exact

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        total = self.team.sum(self.linear(x))
        return (total if add is None else total.add_(add)).to(x.dtype)


class Gathered:
    """An output layer whose outputs are split, ``outputs`` of them in all."""

    def __init__(self, linear: Linear, team: Team, outputs: int) -> None:
        self.linear, self.team, self.outputs = linear, team, outputs
        self.kind, self.nbytes, self.exact = linear.kind, linear.nbytes, linear.exact

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        result = self.team.join(self.linear(x))[:, : self.outputs]
        return result if add is None else result + add


class SplitWords(Words):
    """An embedding of ``count`` tokens of which each rank has as many, one after the other's."""

    def __init__(self, words: Words, team: Team, count: int) -> None:
        super().__init__(words.rows, words.dtype, shared=words.shared, scale=words.scale)
        self.team, self.each, self.count = team, self.count, count

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        flat = ids.flatten()
        mine = super().__call__((flat - self.team.rank * self.each).clamp_(0, self.each - 1))
        result = torch.stack(self.team.shards(mine))[flat // self.each, torch.arange(len(flat), device=flat.device)]
        return result.view(*ids.shape, self.width)

    def fields(self) -> None:
        return None


class OverAll:
    """A norm over the heads of all ranks together; each gives its own rows' numbers and takes them back."""

    def __init__(self, norm: Callable[[torch.Tensor], torch.Tensor], team: Team) -> None:
        self.norm, self.team = norm, team

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        whole = self.norm(self.team.join(x))
        return whole.chunk(self.team.size, -1)[self.team.rank].contiguous()

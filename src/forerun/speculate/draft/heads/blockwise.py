"""``blockwise``: one hidden layer that is as wide as all positions ahead together (Stern et al. 2018, arXiv
1811.03115): d -> k h, relu, k parallel maps h -> d, each added to its input, then the target's own output layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from forerun.speculate.draft.base import drafters
from forerun.speculate.draft.heads.head import Sizes
from forerun.speculate.draft.heads.medusa import ResidualDrafter, ResidualHead


class BlockwiseHead(ResidualHead):
    method = "blockwise"
    options_known = frozenset({"inner_size"})

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.inner = int(sizes.options.get("inner_size", sizes.hidden_size // 2))
        self.spread = nn.Linear(sizes.hidden_size, sizes.depth * self.inner)
        self.gather = nn.Parameter(torch.zeros(sizes.depth, self.inner, sizes.hidden_size))

    def transform(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.spread(hidden)).unflatten(-1, (self.sizes.depth, self.inner))
        return hidden[:, None] + torch.einsum("nti,tih->nth", inner, self.gather)


@drafters.register("blockwise")
class Blockwise(ResidualDrafter):
    name = "blockwise"
    head_class = BlockwiseHead

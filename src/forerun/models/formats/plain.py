"""``plain``: weights as torch has them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from forerun.models.formats.base import Format, Rows, whole


class Plain:
    """``F.linear``."""

    __slots__ = ("bias", "exact", "kind", "nbytes", "weight")

    def __init__(self, weight: Rows, bias: torch.Tensor | None) -> None:
        self.weight = whole(weight)
        self.bias = bias
        self.kind = "plain"
        self.exact = False
        self.nbytes = self.weight.nbytes

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y if add is None else y.add_(add)


FORMAT = Format("plain", lambda dtype, device: True, "nothing", lambda weight, bias: Plain(weight, bias))

"""What a linear layer is, whatever form its weights have, and what a form is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch


class Linear(Protocol):
    """y = x W^T + b for x [rows, inputs]; ``add``, of y's shape and contiguous, is added to it."""

    kind: str
    """How the weights are stored, for ``ModelInfo.path``."""
    nbytes: int
    exact: bool
    """Whether a row's bits depend on the row alone, by the order of its sums; otherwise on the shape of the call."""

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor: ...


@dataclass(frozen=True)
class Format:
    """A form of weights. ``make`` takes a weight [outputs, inputs] and a bias [outputs] or None."""

    name: str
    """Its name as an option."""
    can: Callable[[torch.dtype, torch.device], bool]
    """Whether it can be had there for rows of that dtype."""
    needs: str
    """What it takes, for an error: '... needs a CPU on which ...'."""
    make: Callable[[torch.Tensor, torch.Tensor | None], Linear]
    pays: Callable[[torch.Tensor], bool] = lambda weight: True
    """Whether it is worth while for such a weight."""


def size(layers: Iterable[Linear]) -> int:
    """Bytes of the layers' weights."""
    return sum(layer.nbytes for layer in layers)

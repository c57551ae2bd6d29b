"""What a linear layer is, whatever form its weights have, and what a form is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

CHUNK = 1 << 18
"""Numbers that are converted, rounded or laid out at a time."""
CPU = torch.device("cpu")


class Rows(Protocol):
    """A weight [outputs, inputs] whose rows are made when they are asked for; every tensor is one."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def nbytes(self) -> int: ...

    def __getitem__(self, rows: slice | torch.Tensor, /) -> torch.Tensor: ...


@dataclass(frozen=True)
class MadeRows:
    """A weight of ``shape`` whose rows ``make`` makes; ``nbytes`` of files are read for it."""

    shape: torch.Size
    make: Callable[[slice | torch.Tensor], torch.Tensor]
    nbytes: int
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU

    def __getitem__(self, rows: slice | torch.Tensor) -> torch.Tensor:
        return self.make(rows)


def across(
    parts: Sequence[Callable[[slice], Any]], sizes: Sequence[int], rows: slice, join: Callable[[list[Any]], Any]
) -> Any:
    """What ``parts`` give for ``rows``, where one has its so many rows behind the other's: joined."""
    first, end, _ = rows.indices(sum(sizes))
    result, start = [], 0
    for part, size in zip(parts, sizes):
        here = slice(max(first - start, 0), min(max(end - start, 0), size))
        if here.start < here.stop:
            result.append(part(here))
        start += size
    return result[0] if len(result) == 1 else join(result)


def pieces(weight: Rows, multiple: int = 1) -> Iterator[tuple[int, torch.Tensor]]:
    """Row after row of a weight, some ``CHUNK`` numbers at a time: the first one's place, a multiple of ``multiple``,
    and the rows."""
    outputs, inputs = weight.shape
    step = max(1, CHUNK // max(1, inputs) // multiple) * multiple
    for first in range(0, outputs, step):
        yield first, weight[first : first + step]


def whole(weight: Rows) -> torch.Tensor:
    """The weight as a contiguous tensor: itself if it is one."""
    if isinstance(weight, torch.Tensor):
        return weight.contiguous()
    result = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    for first, rows in pieces(weight):
        result[first : first + len(rows)] = rows
    return result


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
    make: Callable[[Rows, torch.Tensor | None], Linear]
    pays: Callable[[Rows], bool] = lambda weight: True
    """Whether it is worth while for such a weight."""


def size(layers: Iterable[Linear]) -> int:
    """Bytes of the layers' weights."""
    return sum(layer.nbytes for layer in layers)

"""The protocol of linear layers, weights that are read lazily, and the description of a weight format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

CHUNK = 1 << 18
"""Weights that are converted, rounded or laid out at a time."""
CPU = torch.device("cpu")


class Rows(Protocol):
    """A weight [outputs, inputs] that may be read or computed by rows; every tensor is one."""

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
class LazyRows:
    """A weight of ``shape`` whose rows ``make`` computes, from ``nbytes`` of files."""

    shape: torch.Size
    make: Callable[[slice | torch.Tensor], torch.Tensor]
    nbytes: int
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU

    def __getitem__(self, rows: slice | torch.Tensor) -> torch.Tensor:
        return self.make(rows)


def concat_rows(
    parts: Sequence[Callable[[slice], Any]], sizes: Sequence[int], rows: slice, concat: Callable[[list[Any]], Any]
) -> Any:
    """Rows of several parts of these sizes, one after the other, as if they were one: ``parts`` get slices of their
    own, and ``concat`` joins the results."""
    first, end, _ = rows.indices(sum(sizes))
    result, start = [], 0
    for part, size in zip(parts, sizes):
        own = slice(max(first - start, 0), min(max(end - start, 0), size))
        if own.start < own.stop:
            result.append(part(own))
        start += size
    return result[0] if len(result) == 1 else concat(result)


def row_chunks(weight: Rows, multiple: int = 1) -> Iterator[tuple[int, torch.Tensor]]:
    """A weight in chunks of about ``CHUNK`` numbers: index of the first row, in steps of ``multiple``, and rows."""
    outputs, inputs = weight.shape
    step = max(1, CHUNK // max(1, inputs) // multiple) * multiple
    for first in range(0, outputs, step):
        yield first, weight[first : first + step]


def to_tensor(weight: Rows) -> torch.Tensor:
    """The weight as a contiguous tensor: itself if it is one."""
    if isinstance(weight, torch.Tensor):
        return weight.contiguous()
    result = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    for first, rows in row_chunks(weight):
        result[first : first + len(rows)] = rows
    return result


class Linear(Protocol):
    """y = x W^T + b for x [rows, inputs], plus ``add``, which has y's shape and is contiguous."""

    kind: str
    """How the weights are stored, for ``ModelInfo.path``."""
    nbytes: int
    exact: bool
    """Whether a row's result, to the last bit, depends on that row alone, not on the shape of the call."""

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor: ...


@dataclass(frozen=True)
class Format:
    """A weight format. ``make`` takes a weight [outputs, inputs] and a bias [outputs] or None."""

    name: str
    """As an option."""
    can: Callable[[torch.dtype, torch.device], bool]
    """Whether it runs on this device for activations of this dtype."""
    needs: str
    """What it takes, for an error: '... needs a CPU on which ...'."""
    make: Callable[[Rows, torch.Tensor | None], Linear]
    pays: Callable[[Rows], bool] = lambda weight: True
    """Whether a weight gains by it."""


def size(layers: Iterable[Linear]) -> int:
    """Bytes of the layers' weights."""
    return sum(layer.nbytes for layer in layers)

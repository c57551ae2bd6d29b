"""Stage three, lay out: weights become the layers and embeddings that kernels read.

``Maker`` asks for each weight once, brings its rows into a layer's order, joins projections over the same inputs, and
stores them in one of the forms that ``formats`` lists: its own numbers, tiled, packed or plain; blocks as files have
them; or rounded to 4 or 8 bits. A layer at a time, then its source is let go of. What is laid out may come from an
earlier start (``formats/kept.py``), and with several processes each lays out its own part (``ranks/split.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F

from forerun.core.loading import Advance
from forerun.kernels import structs
from forerun.models.formats import blocks, make_linear
from forerun.models.formats.base import Format, Linear, MadeRows, Rows, across, whole
from forerun.models.formats.blocks import Blocked, Blocks, join
from forerun.models.formats.compiled import Joined
from forerun.models.formats.int8 import Levels, TiledInt8
from forerun.models.formats.plain import Plain
from forerun.models.formats.tiled import TiledLinear
from forerun.models.kinds import KINDS
from forerun.models.transform import Weights

Order = Callable[[torch.Tensor], torch.Tensor] | None
"""Brings rows of a weight, or numbers of a bias, into another order; it may leave some out."""


class Words:
    """An embedding times ``scale``: ids int64 of any shape -> [..., width] in ``dtype``. Its rows are those of a tensor
    [tokens, width] or of a layer, which may be the output layer too (``shared``)."""

    def __init__(
        self,
        rows: torch.Tensor | Blocked | TiledLinear,
        dtype: torch.dtype,
        *,
        shared: bool = False,
        scale: float = 1.0,
    ) -> None:
        self.rows = rows.contiguous() if isinstance(rows, torch.Tensor) else rows
        self.dtype, self.shared = dtype, shared
        if isinstance(rows, torch.Tensor):
            (self.count, self.width), self.device = rows.shape, rows.device
        else:
            self.count, self.width, self.device = rows.outputs, rows.inputs, torch.device("cpu")
        self.nbytes = 0 if shared else rows.nbytes
        """Of memory that nothing else has a share in."""
        self.factor = torch.tensor(scale, dtype=torch.float32, device=self.device)
        self.scale = float(self.factor)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        if isinstance(self.rows, torch.Tensor):
            result = F.embedding(ids, self.rows)
        else:
            result = self.rows.rows(ids, self.dtype).view(*ids.shape, self.width)
        return result if self.scale == 1.0 else result * self.factor

    def fields(self) -> tuple[int, structs.LinearStruct] | None:
        """What a compiled decoder reads: the address of the numbers, or 0 and the layer; None: it cannot."""
        if isinstance(self.rows, torch.Tensor):
            return self.rows.data_ptr(), structs.NO_LAYER
        return 0, self.rows.fields()


def stack(parts: Sequence[tuple[Rows, torch.Tensor | None]], dtype: torch.dtype, device: torch.device) -> Rows:
    """Weights of several projections over the same inputs, one's rows behind the other's, each in an order of its own:
    as one weight in ``dtype`` on ``device``."""

    def side(part: Rows, order: torch.Tensor | None, rows: slice) -> torch.Tensor:
        return part[rows if order is None else order[rows]].to(device, dtype)

    def make(rows: slice | torch.Tensor) -> torch.Tensor:
        assert isinstance(rows, slice)
        return across(sides, sizes, rows, torch.cat)

    sides = [partial(side, part, order) for part, order in parts]
    sizes = [part.shape[0] if order is None else len(order) for part, order in parts]
    shape = torch.Size((sum(sizes), parts[0][0].shape[1]))
    return MadeRows(shape, make, shape.numel() * dtype.itemsize, dtype, device)


@dataclass
class Maker:
    """Makes layers for rows in ``dtype``, in the form ``quantized`` where that pays; without one, weights in blocks
    keep theirs, and numbers are held as ``how`` says. ``advance`` is told how many bytes of files went into each."""

    weights: Weights
    dtype: torch.dtype
    device: torch.device
    how: str
    quantized: Format | None
    advance: Advance

    def __post_init__(self) -> None:
        self.reads_blocks = self.how == "streamed" and blocks.can(self.dtype, self.device)
        self.keeps_blocks = self.quantized is None and self.reads_blocks

    def numbers(self, name: str) -> torch.Tensor:
        """A copy, in the dtype that they have."""
        return self.weights.values(name)[:].to(self.device, copy=True)

    def number(self, name: str) -> torch.Tensor:
        """A tensor of a single one, float32, of no dimension."""
        return torch.as_tensor(self.weights.values(name)).to(self.device, torch.float32, copy=True).view(())

    def linear(self, *parts: str, order: Sequence[Order] = ()) -> Linear:
        """The layer of one or several projections ("model.layers.0.mlp.up_proj"), the outputs of one behind those of
        the other, each in an order of its own."""
        orders: Sequence[Order] = order or [None] * len(parts)
        result = [self._blocks(f"{part}.weight", order) for part, order in zip(parts, orders)]
        made: list[Any] = []
        for kind, group in groupby(range(len(parts)), lambda i: None if (item := result[i]) is None else item.kind):
            indices = [*group]
            names, reorders = [parts[i] for i in indices], [orders[i] for i in indices]
            bias = self._bias(names, reorders)
            if kind is None:
                made.append(self._make(self._stack(names, reorders), bias))
            else:
                made.append(_packed([item for i in indices if (item := result[i]) is not None], bias))
        self.advance(self.weights.release())
        return made[0] if len(made) == 1 else Joined(made)

    def router(self, part: str) -> Linear:
        """A layer that is small and chooses: never quantized."""
        return make_linear(self._stack([part], [None]), self._bias([part], [None]), self.how)

    def _make(self, weight: Rows, bias: torch.Tensor | None) -> Linear:
        if self.quantized is not None and self.quantized.pays(weight):
            return self.quantized.make(weight, bias)
        return make_linear(weight, bias, self.how)

    def _stack(self, parts: Sequence[str], orders: Sequence[Order]) -> Rows:
        result = [self.weights.values(f"{part}.weight") for part in parts]
        return stack([(part, _places(part, order)) for part, order in zip(result, orders)], self.dtype, self.device)

    def _blocks(self, name: str, order: Order) -> Blocks | Levels | None:
        result = self.weights.blocks(name) if self.keeps_blocks else None
        if result is None:
            return None
        indices = _places(self.weights.values(name), order)
        return result if indices is None else result.rows(indices)

    def _bias(self, parts: Sequence[str], orders: Sequence[Order]) -> torch.Tensor | None:
        """The projections' biases end to end; a missing one counts as zeros beside others."""
        names = [f"{part}.bias" for part in parts]
        if not any(name in self.weights for name in names):
            return None
        result = []
        for part, name, order in zip(parts, names, orders):
            if name in self.weights:
                bias = self.numbers(name).to(self.dtype)
                result.append(bias if order is None else order(bias))
            else:
                outputs = self.weights.values(f"{part}.weight").shape[0]
                result.append(torch.zeros(outputs, dtype=self.dtype, device=self.device))
        return torch.cat(result)

    def words(self, name: str, head: Linear | None = None, scale: float = 1.0) -> Words:
        """The embedding times ``scale``; ``head`` is the output layer where that has the same weights."""
        result = self.weights.blocks(f"{name}.weight") if self.reads_blocks else None
        rows: torch.Tensor | Blocked | TiledLinear
        if isinstance(result, Blocks):
            rows = head if self.keeps_blocks and isinstance(head, Blocked) else Blocked(result, None)
        elif isinstance(head, (TiledLinear, Plain)):
            rows = head if isinstance(head, TiledLinear) else head.weight
        else:
            rows = whole(self._stack([name], [None]))
        self.advance(self.weights.release())
        shared = rows is head or (isinstance(head, Plain) and rows is head.weight)
        return Words(rows, self.dtype, shared=shared, scale=scale)


def _packed(parts: Sequence[Blocks | Levels], bias: torch.Tensor | None) -> Linear:
    """The layer of weights of one kind."""
    levels = [part for part in parts if isinstance(part, Levels)]
    if levels:
        return TiledInt8(Levels.join(levels), bias, KINDS["int8_rows"])
    return Blocked(join([part for part in parts if isinstance(part, Blocks)]), bias)


def _places(weight: Rows, order: Order) -> torch.Tensor | None:
    """Which row of a weight comes first, and so on; None: they stay."""
    if order is None:
        return None
    indices = torch.arange(weight.shape[0])
    moved = order(indices[:, None])[:, 0]
    return None if torch.equal(moved, indices) else moved

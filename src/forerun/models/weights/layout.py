"""Stage three of loading, layout: weights become the layers and embeddings that kernels read.

``Maker`` reads each weight once, reorders its rows, joins projections over the same inputs, and stores them in a form
of ``formats``: as numbers (tiled, packed or plain), in blocks as files have them, or rounded to 4 or 8 bits. It makes
one layer at a time and then releases its source. Results of an earlier start may be used
(``formats/weight_cache.py``); with several processes, each lays out its own shard (``ranks/split.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F

from forerun.core.loading import Advance
from forerun.kernels import structs
from forerun.models.formats import blocks, make_linear
from forerun.models.formats.base import Format, LazyRows, Linear, Rows, concat_rows, to_tensor
from forerun.models.formats.blocks import Blocked, Blocks
from forerun.models.formats.compiled import Joined
from forerun.models.formats.gguf_types import PACKED
from forerun.models.formats.int8 import Levels, TiledInt8
from forerun.models.formats.tiled import TiledLinear
from forerun.models.kinds import KINDS, TRITON_BLOCKS
from forerun.models.weights.prequantized import Grouped
from forerun.models.weights.transform import Weights

Order = Callable[[torch.Tensor], torch.Tensor] | None
"""Reorders rows of a weight, or numbers of a bias; it may drop some."""


class Embedding:
    """An embedding times ``scale``: ids int64 of any shape -> [..., width] in ``dtype``. ``rows`` is a tensor [tokens,
    width] or a linear layer; with ``shared`` it is the output layer too, and its memory is not counted."""

    def __init__(self, rows: Any, dtype: torch.dtype, *, shared: bool = False, scale: float = 1.0) -> None:
        self.rows = rows.contiguous() if isinstance(rows, torch.Tensor) else rows
        self.dtype, self.shared = dtype, shared
        if isinstance(rows, torch.Tensor):
            (self.count, self.width), self.device = rows.shape, rows.device
        else:
            self.count, self.width = rows.outputs, rows.inputs
            self.device = rows.weight.levels.device if hasattr(rows, "weight") else torch.device("cpu")
        self.nbytes = 0 if shared else rows.nbytes
        self.factor = torch.tensor(scale, dtype=torch.float32, device=self.device)
        self.scale = float(self.factor)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        if isinstance(self.rows, torch.Tensor):
            result = F.embedding(ids, self.rows)
        else:
            result = self.rows.rows(ids, self.dtype).view(*ids.shape, self.width)
        return result if self.scale == 1.0 else result * self.factor

    def fields(self) -> tuple[int, structs.LinearStruct] | None:
        """What a compiled decoder reads: the address of the numbers, or else the layer. None: it cannot read these."""
        if isinstance(self.rows, torch.Tensor):
            return self.rows.data_ptr(), structs.NO_LAYER
        return 0, self.rows.fields()


def stack(parts: Sequence[tuple[Rows, torch.Tensor | None]], dtype: torch.dtype, device: torch.device) -> Rows:
    """One weight in ``dtype`` on ``device`` for projections of the same inputs, end to end, each with its row order."""

    def side(part: Rows, order: torch.Tensor | None, rows: slice) -> torch.Tensor:
        return part[rows if order is None else order[rows]].to(device, dtype)

    def make(rows: slice | torch.Tensor) -> torch.Tensor:
        assert isinstance(rows, slice)
        result: torch.Tensor = concat_rows(sides, sizes, rows, torch.cat)
        return result

    sides = [partial(side, part, order) for part, order in parts]
    sizes = [part.shape[0] if order is None else len(order) for part, order in parts]
    shape = torch.Size((sum(sizes), parts[0][0].shape[1]))
    return LazyRows(shape, make, shape.numel() * dtype.itemsize, dtype, device)


@dataclass
class Maker:
    """Makes layers for rows in ``dtype``, in the form ``quantized`` where that pays. Without one, weights in blocks
    stay so unless ``numbers_only``, and numbers are stored as ``how`` says. ``advance`` gets each layer's bytes."""

    weights: Weights
    dtype: torch.dtype
    device: torch.device
    how: str
    quantized: Format | None
    advance: Advance
    numbers_only: bool = False
    _read_names: set[str] = field(default_factory=set, init=False)
    _bytes: int = field(default=0, init=False)
    """Read since the last layer."""

    def __post_init__(self) -> None:
        able = self.how == "triton" or (self.how == "streamed" and blocks.can(self.dtype, self.device))
        self.reads_blocks = able and not self.numbers_only
        self.keeps_blocks = self.quantized is None and self.reads_blocks

    def numbers(self, name: str) -> torch.Tensor:
        """A copy of a tensor, in its own dtype."""
        return self._read(name)[:].to(self.device, copy=True)

    def number(self, name: str) -> torch.Tensor:
        """A tensor of one number, as float32 without dimensions."""
        return torch.as_tensor(self._read(name)).to(self.device, torch.float32, copy=True).view(())

    def _read(self, name: str) -> Rows:
        """A tensor, whose bytes count when it is read first."""
        result = self.weights.values(name)
        if name not in self._read_names:
            self._read_names.add(name)
            self._bytes += result.nbytes
        return result

    def _finish(self) -> None:
        """A layer is made: release its source and report progress."""
        self.weights.release()
        self.advance(self._bytes)
        self._bytes = 0

    def linear(self, *parts: str, order: Sequence[Order] = ()) -> Linear:
        """A layer of one or several projections ("model.layers.0.mlp.up_proj"), end to end, each with its row order."""
        orders: Sequence[Order] = order or [None] * len(parts)
        packed = [self._blocks(f"{part}.weight", order) for part, order in zip(parts, orders)]
        made: list[Any] = []
        for kind, group in groupby(zip(parts, orders, packed), key=lambda part: getattr(part[2], "kind", None)):
            names, reorders, same_kind = zip(*group)
            bias, form = self._bias(names, reorders), self.quantized
            if kind is not None:
                made.append(self._packed(same_kind, bias))
                continue
            weight = self._stack(names, reorders)
            if form is not None and form.pays(weight):
                made.append(form.make(weight, bias))
            else:
                made.append(make_linear(weight, bias, self.how))
        self._finish()
        if len(made) == 1:
            only: Linear = made[0]
            return only
        if self.how == "triton":
            from forerun.models.formats.triton import TritonJoined

            return TritonJoined(made)
        return Joined(made)

    def _packed(self, parts: Sequence[Any], bias: torch.Tensor | None) -> Linear:
        """A layer of weights in one block format."""
        weight: Blocks | Levels = type(parts[0]).join(parts)
        if self.how == "triton":
            from forerun.models.formats.triton import kept  # which not every system has

            return kept(weight, bias, self.dtype, self.device)
        return TiledInt8(weight, bias, KINDS["int8_rows"]) if isinstance(weight, Levels) else Blocked(weight, bias)

    def _as_blocks(self, weight: Rows) -> Blocks | Levels | None:
        """A weight as blocks that a layer can keep here; None if it can only be read as numbers."""
        result = as_blocks(weight)
        if isinstance(result, Blocks):
            triton = self.how == "triton"
            able = result.kind in TRITON_BLOCKS if triton else blocks.can(self.dtype, self.device, result.kind)
            return result if able else None
        return result

    def router(self, part: str) -> Linear:
        """A small layer that decides something: never quantized."""
        return make_linear(self._stack([part], [None]), self._bias([part], [None]), self.how)

    def _stack(self, parts: Sequence[str], orders: Sequence[Order]) -> Rows:
        result = [self._read(f"{part}.weight") for part in parts]
        return stack(
            [(part, _row_indices(part, order)) for part, order in zip(result, orders)], self.dtype, self.device
        )

    def _blocks(self, name: str, order: Order) -> Blocks | Levels | None:
        weight = self._read(name)
        result = self._as_blocks(weight) if self.keeps_blocks else None
        if result is None:
            return None
        indices = _row_indices(weight, order)
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
                outputs = self._read(f"{part}.weight").shape[0]
                result.append(torch.zeros(outputs, dtype=self.dtype, device=self.device))
        return torch.cat(result)

    def embedding(self, name: str, head: Linear | None = None, scale: float = 1.0) -> Embedding:
        """The embedding times ``scale``; ``head`` is the output layer where that has the same weights."""
        weight = self._read(f"{name}.weight")
        result = self._as_blocks(weight) if self.reads_blocks else None
        rows: Any
        shared = head is not None and hasattr(head, "rows") and self.keeps_blocks
        if isinstance(result, Blocks):
            rows = head if shared else self._packed([result], None)
        elif head is not None and (isinstance(head, TiledLinear) or getattr(head, "numbers", None) is not None):
            rows, shared = getattr(head, "numbers", head), True
        else:
            rows, shared = to_tensor(stack([(weight, None)], self.dtype, self.device)), False
        self._finish()
        return Embedding(rows, self.dtype, shared=shared, scale=scale)


def as_blocks(weight: Rows) -> Blocks | Levels | None:
    """A weight as blocks that a layer can keep; None if it can only be read as numbers."""
    if isinstance(weight, Grouped):
        return weight.blocks()
    return weight if isinstance(weight, Blocks) and weight.kind in PACKED else None


def _row_indices(weight: Rows, order: Order) -> torch.Tensor | None:
    """Indices of a weight's rows in their new order; None: the order stays."""
    if order is None:
        return None
    indices = torch.arange(weight.shape[0])
    moved = order(indices[:, None])[:, 0]
    return None if torch.equal(moved, indices) else moved

"""Where a model's weights come from, by their names in the checkpoint, and the layers that are made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby, product
from typing import Any, Protocol

import torch

from forerun.core.errors import ModelError
from forerun.core.loading import Advance
from forerun.models.architectures.spec import Multiples, Spec
from forerun.models.formats import blocks, make_linear
from forerun.models.formats.base import Format, Linear, MadeRows, Rows, across, whole
from forerun.models.formats.blocks import Blocked
from forerun.models.formats.compiled import Joined
from forerun.models.formats.gguf_blocks import Blocks, join
from forerun.models.formats.int8 import Levels, TiledInt8
from forerun.models.formats.plain import Plain
from forerun.models.formats.tiled import TiledLinear
from forerun.models.kinds import KINDS
from forerun.models.latent import HeadPart
from forerun.models.words import LayerRows, ScaledWords, Words, WordTable

Order = Callable[[torch.Tensor], torch.Tensor] | None
"""Brings rows of a weight, or numbers of a bias, into another order; it may leave some out."""


class Weights(Protocol):
    """Tensors by name."""

    def __contains__(self, name: str) -> bool: ...

    def values(self, name: str) -> Rows:
        """Numbers; a vector is a tensor."""

    def blocks(self, name: str) -> Blocks | Levels | None:
        """None where a tensor is numbers."""

    def release(self) -> int:
        """A layer has been made of what was asked for: memory that it took may be given back. Returns the bytes read
        since the last call."""

    @property
    def nbytes(self) -> int:
        """Of all of them, as they lie in files."""


class Read:
    """How much has been asked for, each tensor counted once."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._bytes = 0

    def add(self, name: str, count: int) -> None:
        if name not in self._names:
            self._names.add(name)
            self._bytes += count

    def done(self) -> int:
        """Bytes since the last call."""
        result, self._bytes = self._bytes, 0
        return result


def unstacked(result: dict[str, torch.Tensor], spec: Spec) -> dict[str, torch.Tensor]:
    """Tensors under a checkpoint's names, where a module of transformers' stacks the experts of a layer."""
    names = spec.architecture.experts
    for index, layer in enumerate(spec.layers):
        at = f"{spec.architecture.layers.checkpoint}.{index}."
        if names is not None and names.interleaved and layer.experts:
            _unstack(result, f"{at}mlp.experts", layer.experts)
            continue
        if names is None or not layer.experts or any(f"{at}{stack}" not in result for stack in names.stacks):
            continue
        gate_up, down = (result.pop(f"{at}{stack}") for stack in names.stacks)
        if (gate := result.pop(f"{at}mlp.gate.weight", None)) is not None:
            result[f"{at}{names.router.checkpoint}.weight"] = gate
        for expert, (both, last) in enumerate(zip(gate_up.detach(), down.detach())):
            for name, part in zip((*names.gate_up, names.down), (*both.chunk(len(names.gate_up)), last)):
                result[f"{at}{name.checkpoint.format(expert)}.weight"] = part
    return result


def by_heads(result: dict[str, Rows], spec: Spec, place: object) -> None:
    """Take the projections of latents apart, which checkpoints hold for all heads together. Raises ModelError for
    one of another shape; ``place`` begins it."""
    names, sizes = spec.architecture.latent, spec.latent
    if names is None or sizes is None:
        return
    each = sizes.plain + sizes.value
    for index in range(len(spec.layers)):
        at = f"{spec.architecture.layers.checkpoint}.{index}."
        weight = result.pop(f"{at}{names.both}", None)
        if weight is None:
            raise ModelError(f"{place}: {at}{names.both} is missing")
        if tuple(weight.shape) != (spec.heads * each, sizes.rank):
            raise ModelError(f"{place}: {at}{names.both} has shape {[*weight.shape]}; its config asks for "
                             f"{[spec.heads * each, sizes.rank]}")  # fmt: skip
        for head in range(spec.heads):
            first, second = head * each, head * each + sizes.plain
            keys = HeadPart(weight, slice(first, second), transposed=True)
            result[f"{at}{names.keys.checkpoint.format(head)}.weight"] = keys
            values = HeadPart(weight, slice(second, first + each), transposed=False)
            result[f"{at}{names.values.checkpoint.format(head)}.weight"] = values


def _unstack(result: dict[str, torch.Tensor], at: str, count: int) -> None:
    """Take the stacks of a layer's experts apart whose gate and up have outputs by turns. Raises ModelError."""
    ends = {"_bias": ("bias", 2), "": ("weight", 3), "_blocks": ("mxfp4_blocks", 4), "_scales": ("mxfp4_scales", 3)}
    for (end, (kind, dims)), part in product(ends.items(), ("gate_up_proj", "down_proj")):
        stack = result.pop(f"{at}.{part}{end}", None)
        if stack is None:
            continue
        if stack.dim() != dims or len(stack) != count:
            raise ModelError(f"{at}.{part}{end} has shape {[*stack.shape]}, where {count} experts are stacked")
        for expert, own in enumerate(stack.detach()):
            rows = own.T if kind == "weight" else own  # outputs first
            sides = {part: rows} if part == "down_proj" else {"gate_proj": rows[::2], "up_proj": rows[1::2]}
            result |= {f"{at}.{expert}.{name}.{kind}": side for name, side in sides.items()}


class ChangedWeights:
    """``weights`` of which a subclass changes ``values`` and ``blocks``."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes

    def __contains__(self, name: str) -> bool:
        return name in self.weights

    def release(self) -> int:
        return self.weights.release()


class MultipliedWeights(ChangedWeights):
    """``weights`` whose projections are multiplied as ``spec`` says: as numbers, whatever they are held in."""

    def __init__(self, weights: Weights, spec: Spec) -> None:
        super().__init__(weights)
        self.parts = dict(spec.multiples)
        self.prefix = f"{spec.architecture.layers.checkpoint}."

    def _multiples(self, name: str) -> tuple[Multiples | None, str]:
        stem, _, kind = name.rpartition(".")
        part = stem.removeprefix(self.prefix).partition(".")[2] if stem.startswith(self.prefix) else ""
        return self.parts.get(part), kind

    def values(self, name: str) -> Rows:
        result, (by, kind) = self.weights.values(name), self._multiples(name)
        if by is None:
            return result
        numbers = by.bias if kind == "bias" else by.weight
        counts = by.rows if len(by.rows) > 1 else (result.shape[0],)
        factors = torch.tensor(numbers, dtype=torch.float32).repeat_interleave(torch.tensor(counts))
        if kind == "bias":
            return result[:].float() * factors
        return MadeRows(
            result.shape, lambda rows: result[rows].float() * factors[rows, None], result.nbytes, device=result.device
        )

    def blocks(self, name: str) -> Blocks | Levels | None:
        return self.weights.blocks(name) if self._multiples(name)[0] is None else None


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


class Maker:
    """Makes layers for rows in ``dtype``, in the form ``quantized`` where that pays; without one, weights in blocks
    keep theirs, and numbers are held as ``how`` says. ``advance`` is told how many bytes of files went into each."""

    def __init__(
        self,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        how: str,
        quantized: Format | None,
        advance: Advance,
    ) -> None:
        self.weights = weights
        self.device = device
        self.dtype = dtype
        self.how = how
        self.quantized = quantized
        self.advance = advance
        self.reads_blocks = how == "streamed" and blocks.can(dtype, device)
        self.keeps_blocks = quantized is None and self.reads_blocks

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
        words: Words
        if isinstance(result, Blocks):
            layer = head if self.keeps_blocks and isinstance(head, Blocked) else Blocked(result, None)
            words = LayerRows(layer, self.dtype, shared=layer is head)
        elif isinstance(head, TiledLinear):
            words = LayerRows(head, self.dtype, shared=True)
        elif isinstance(head, Plain):
            words = WordTable(head.weight, shared=True)
        else:
            words = WordTable(whole(self._stack([name], [None])))
        self.advance(self.weights.release())
        return words if scale == 1.0 else ScaledWords(words, scale)


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

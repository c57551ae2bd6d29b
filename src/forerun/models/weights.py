"""Where a model's weights come from, by their names in the checkpoint, and the layers that are made of them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import nn

from forerun.models.architectures.spec import Spec
from forerun.models.formats import blocks
from forerun.models.formats.base import Format, Linear
from forerun.models.formats.blocks import Blocked
from forerun.models.formats.compiled import Joined
from forerun.models.formats.gguf_blocks import Blocks, join
from forerun.models.linear import make_linear
from forerun.models.words import Rows, Scaled, Table, Words

Order = Callable[[torch.Tensor], torch.Tensor] | None
"""Brings rows of a weight, or numbers of a bias, into another order."""


class Weights(Protocol):
    """Tensors by name. ``blocks``: None where a tensor is numbers."""

    def __contains__(self, name: str) -> bool: ...

    def values(self, name: str) -> torch.Tensor: ...

    def blocks(self, name: str) -> Blocks | None: ...

    def taken(self) -> None:
        """Nothing more is asked for."""


class ModuleWeights:
    """Those of a module of transformers', which is emptied when they are taken; ``spec`` says how a checkpoint calls
    the experts that a module stacks."""

    def __init__(self, module: nn.Module, spec: Spec) -> None:
        self.module = module
        self.found: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
        for index, layer in enumerate(spec.layers):
            if layer.experts:
                self._unstack(f"{spec.architecture.layers.checkpoint}.{index}.", spec.architecture.experts)

    def _unstack(self, layer: str, names: Any) -> None:
        found = self.found
        gate_up, down = (found.pop(f"{layer}mlp.experts.{part}") for part in ("gate_up_proj", "down_proj"))
        found[f"{layer}{names.router.checkpoint}.weight"] = found.pop(f"{layer}mlp.gate.weight")
        for expert, (both, last) in enumerate(zip(gate_up.detach(), down.detach())):
            parts = (*both.chunk(2), last)
            for name, part in zip((*names.gate_up, names.down), parts):
                found[f"{layer}{name.checkpoint.format(expert)}.weight"] = part

    def __contains__(self, name: str) -> bool:
        return name in self.found

    def values(self, name: str) -> torch.Tensor:
        return self.found[name].detach()

    def blocks(self, name: str) -> Blocks | None:
        return None

    def taken(self) -> None:
        self.found.clear()
        for parameter in self.module.parameters():
            parameter.data = parameter.data.new_empty(0)


class Maker:
    """Makes layers for rows in ``dtype``, in the form ``quantized`` where that pays; without one, weights in blocks
    keep theirs, and numbers are held as ``how`` says."""

    def __init__(self, weights: Weights, dtype: torch.dtype, device: torch.device, how: str, quantized: Format | None):
        self.weights = weights
        self.device = device
        self.dtype = dtype
        self.how = how
        self.quantized = quantized
        self.keeps_blocks = quantized is None and how == "streamed" and blocks.can(dtype, device)

    def numbers(self, name: str) -> torch.Tensor:
        """In the dtype that they have."""
        return self.weights.values(name).to(self.device)

    def linear(self, *parts: str, order: Seq[Order] = ()) -> Linear:
        """The layer of one or several projections ("model.layers.0.mlp.up_proj"), the outputs of one behind those of
        the other, each in an order of its own."""
        orders: Seq[Order] = order or [None] * len(parts)
        found = [self._blocks(f"{part}.weight", turn) for part, turn in zip(parts, orders)]
        if all(item is None for item in found):
            weight = torch.cat([self._turned(f"{part}.weight", turn) for part, turn in zip(parts, orders)])
            return self._make(weight, self._bias(parts, orders))
        made: list[Any] = []
        for kind, group in groupby(range(len(parts)), lambda i: None if (item := found[i]) is None else item.kind):
            places = [*group]
            names, turns = [parts[i] for i in places], [orders[i] for i in places]
            bias = self._bias(names, turns)
            if kind is None:
                weight = torch.cat([self._turned(f"{part}.weight", turn) for part, turn in zip(names, turns)])
                made.append(self._make(weight, bias))
            else:
                made.append(Blocked(join([item for i in places if (item := found[i]) is not None]), bias))
        return made[0] if len(made) == 1 else Joined(made)

    def router(self, part: str) -> Linear:
        """A layer that is small and chooses: never quantized."""
        return make_linear(self.numbers(f"{part}.weight").to(self.dtype), None, self.how)

    def _make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        if self.quantized is not None and self.quantized.pays(weight):
            return self.quantized.make(weight, bias)
        return make_linear(weight, bias, self.how)

    def _blocks(self, name: str, order: Order) -> Blocks | None:
        found = self.weights.blocks(name) if self.keeps_blocks else None
        if found is None or order is None:
            return found
        places = torch.arange(len(found.raw))
        moved = order(places[:, None])[:, 0]
        return found if torch.equal(moved, places) else found.rows(moved)

    def _turned(self, name: str, order: Order) -> torch.Tensor:
        found = self.numbers(name).to(self.dtype)
        return found if order is None else order(found)

    def _bias(self, parts: Seq[str], orders: Seq[Order]) -> torch.Tensor | None:
        """The projections' biases end to end; a missing one counts as zeros beside others."""
        names = [f"{part}.bias" for part in parts]
        if not any(name in self.weights for name in names):
            return None
        found = [
            self._turned(name, turn)
            if name in self.weights
            else torch.zeros(self.weights.values(f"{part}.weight").shape[0], dtype=self.dtype, device=self.device)
            for part, name, turn in zip(parts, names, orders)
        ]
        return torch.cat(found)

    def words(self, name: str, head: Linear | None = None, scale: float = 1.0) -> Words:
        """The embedding times ``scale``; ``head`` is the output layer where that has the same weights."""
        found = self.weights.blocks(f"{name}.weight") if self.keeps_blocks else None
        words: Words
        if found is None:
            words = Table(self.numbers(f"{name}.weight").to(self.dtype).clone())
        else:
            shared = isinstance(head, Blocked)
            words = Rows(head if isinstance(head, Blocked) else Blocked(found, None), self.dtype, shared=shared)
        return words if scale == 1.0 else Scaled(words, scale)

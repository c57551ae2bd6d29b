"""Mixtures of experts in which a row's bits do not depend on the rows beside it.

An expert takes the rows that chose it in one call. Their number changes no bit: our kernels' results never depend on
it, and torch gets calls of sizes that ``core/tiles.py`` finds to agree. Outputs are added in expert order, in float32.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from forerun import kernels
from forerun.core import tiles
from forerun.kernels import structs
from forerun.models.architectures.spec import Routing
from forerun.models.formats.base import Linear, size
from forerun.models.formats.compiled import Compiled, address
from forerun.models.run import activations
from forerun.models.run.base import pad_rows
from forerun.models.run.parts import KernelGate


@dataclass(frozen=True, slots=True)
class Expert:
    gate_up: Linear
    down: Linear


@dataclass(slots=True, eq=False)
class Experts:
    """A layer's router and experts. A rank may have only some of the ``count`` experts: those from number ``first`` on.
    ``total`` adds up the ranks' outputs."""

    router: Linear
    experts: Sequence[Expert]
    activation: Callable[[torch.Tensor], torch.Tensor]
    routing: Routing
    count: int
    first: int = 0
    score_bias: torch.Tensor | None = None
    """[experts] float32, added to sigmoids when experts are chosen."""
    scales: torch.Tensor | None = None
    """[experts] float32, factors of the experts' weights."""
    total: Callable[[torch.Tensor], torch.Tensor] = lambda output: output
    compiled: KernelMixture | None = field(init=False)
    """The whole mixture in one call, if every part has a kernel."""

    def __post_init__(self) -> None:
        layers = [layer for layer in self.linears() if isinstance(layer, Compiled)]
        able = len(layers) == 1 + 2 * len(self.experts) and isinstance(self.activation, KernelGate)
        self.compiled = KernelMixture(self, layers, self.activation) if able else None

    def linears(self) -> Iterator[Linear]:
        yield self.router
        for expert in self.experts:
            yield from (expert.gate_up, expert.down)

    @property
    def nbytes(self) -> int:
        """Bytes of all experts here."""
        return sum(size((expert.gate_up, expert.down)) for expert in self.experts)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row's experts, the highest score first, and their weights in float32: both [rows, top_k]."""
        how, scores = self.routing, self.router(x).float()
        weights = activations.sigmoid(scores) if how.sigmoid else torch.exp(scores - scores.amax(-1, keepdim=True))
        ranks = weights if how.sigmoid or how.groups else scores
        ranks = ranks if self.score_bias is None else ranks + self.score_bias
        if how.groups is not None:
            ranks = _in_best_groups(ranks, *how.groups, how.group_best)
        order = ranks.argsort(dim=-1, descending=True, stable=True)[:, : how.top_k]
        taken = weights.gather(1, order)
        if how.normalize:
            taken = taken / (taken.cumsum(-1)[:, -1:] + (how.eps if how.sigmoid else 0.0))  # cumsum adds one by one
        elif not how.sigmoid:
            taken = taken / weights.cumsum(-1)[:, -1:]
        taken = taken * how.factor
        return order, taken if self.scales is None else taken * self.scales[order]

    def __call__(
        self, x: torch.Tensor, sizes: Sequence[int] | None = None, router_input: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, int]:
        """The mixture's output for rows x [rows, width], in their dtype, and how many of the experts here were read.
        ``sizes`` are the row counts of calls; the router reads x unless it has an input of its own."""
        if self.compiled is not None:
            total, read = self.compiled(x, router_input)
            return self.total(total).to(x.dtype), read
        chosen, weights = self.route(x if router_input is None else router_input)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = torch.zeros(self.count, dtype=torch.long, device=x.device)
        counts.index_add_(0, flat, torch.ones_like(flat))
        rows, weights = order // self.routing.top_k, weights.flatten()[order]
        total = torch.zeros(x.shape, device=x.device)
        every = counts.tolist()
        first, here = sum(every[: self.first]), every[self.first : self.first + len(self.experts)]
        for expert, count in zip(self.experts, here):
            if count:
                own, end = rows[first : first + count], first + count
                output = self._run(expert, x.index_select(0, own), sizes).float()
                total.index_add_(0, own, output.mul_(weights[first:end, None]))
                first = end
        return self.total(total).to(x.dtype), sum(count > 0 for count in here)

    def _run(self, expert: Expert, x: torch.Tensor, sizes: Sequence[int] | None) -> torch.Tensor:
        if sizes is None:
            return expert.down(self.activation(expert.gate_up(x)))
        parts = []
        for first, end, count in tiles.split_rows(len(x), sizes):
            parts.append(expert.down(self.activation(expert.gate_up(pad_rows(x[first:end], count))))[: end - first])
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class KernelMixture:
    """A router and the experts that are here on the kernel, ``kernels/experts.cpp``. ``layers`` are the router's, then
    gate_up and down of each expert. Raises ValueError for layers or scales that it would misread."""

    def __init__(self, mixture: Experts, layers: Sequence[Compiled], gate: Any) -> None:
        router, *rest = layers
        scales, bias, how = mixture.scales, mixture.score_bias, mixture.routing
        if any(layer.dtype not in (None, gate.dtype) for layer in layers):
            raise ValueError(f"experts must all be for rows in {gate.dtype}")
        if scales is not None and (scales.dtype is not torch.float32 or scales.shape != (mixture.count,)):
            raise ValueError(f"scales {scales.dtype} {[*scales.shape]} of {mixture.count} experts")
        numbers = array("q", [field for layer in rest for field in layer.fields()])
        scales = None if scales is None else scales.contiguous()
        groups, kept = how.groups or (1, 1)
        own = structs.ExpertsStruct(
            size=mixture.count, first=mixture.first, num_local=len(mixture.experts), top_k=how.top_k,
            normalize=how.normalize, sigmoid=how.sigmoid, score_bias=address(bias) or 0,
            scaling_factor=structs.number(how.factor), eps=structs.number(how.eps), groups=groups, top_groups=kept,
            group_top_k=how.group_best if how.groups else 1, activation=gate.activation, gated=gate.gated,
            activation_params=gate.pointer, layers=structs.address(numbers), scales=address(scales) or 0,
        )  # fmt: skip
        self.fields = array("q", (*own, *router.fields()))
        self.address = self.fields.buffer_info()[0]
        self.kept = router, rest, numbers, scales, bias
        self.inputs, self.dtype = router.inputs, gate.dtype
        self.call = kernels.kernel("moe", self.dtype)

    def __call__(self, x: torch.Tensor, router_input: torch.Tensor | None = None) -> tuple[torch.Tensor, int]:
        """The sum of the experts' outputs for rows x [rows, inputs] in float32, and how many experts were read."""
        scored = x if router_input is None else router_input
        for rows in (x, scored):
            if rows.dtype is not self.dtype:
                raise TypeError(f"rows in {rows.dtype} for experts in {self.dtype}")
            if rows.dim() != 2 or rows.shape[1] != self.inputs or len(rows) != len(x) or not rows.is_cpu:
                raise ValueError(f"rows {[*rows.shape]} on {rows.device} for experts with {self.inputs} inputs on cpu")
        x, scored = x.contiguous(), scored.contiguous()
        total, read = torch.empty(x.shape), array("q", [0])
        self.call(
            self.address, x.data_ptr(), scored.data_ptr(), total.data_ptr(), len(x), kernels.threads(),
            read.buffer_info()[0],
        )  # fmt: skip
        return total, read[0]


def _in_best_groups(scores: torch.Tensor, count: int, kept: int, best: int) -> torch.Tensor:
    """Scores [rows, experts], -inf outside the ``kept`` of ``count`` groups whose ``best`` highest sum to most."""
    grouped: torch.Tensor = scores.unflatten(1, (count, -1))
    highest = grouped.sort(dim=-1, descending=True).values[..., :best].cumsum(-1)[..., -1]
    order = highest.argsort(dim=-1, descending=True, stable=True)
    out = torch.ones_like(highest, dtype=torch.bool).scatter_(1, order[:, :kept], False)
    return grouped.masked_fill(out[..., None], float("-inf")).flatten(1)

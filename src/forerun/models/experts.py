"""Mixtures of experts in which a row's bits do not depend on the rows beside it.

Every row is scored by itself and sent to its own experts. An expert takes the rows that chose it in one call, and their
bits do not depend on how many they are: the kernels' never do, and where torch computes, calls have the sizes that
``core/tiles.py`` finds to agree. A row's results are added up in the order of the experts' numbers, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from forerun.core import tiles
from forerun.kernels import structs
from forerun.models import activations
from forerun.models.base import pad_rows
from forerun.models.formats.base import Linear, size
from forerun.models.formats.compiled import Compiled
from forerun.models.parts import KernelGate, KernelMixture


@dataclass(frozen=True, slots=True)
class Expert:
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Choice:
    """Weights are the softmax of scores, or their sigmoids, times ``factor`` and each expert's number of ``scales``;
    ``correction`` is added to sigmoids where the highest are chosen; both are [experts] float32. ``groups``: of how
    many groups of experts, and how many of them are chosen among, those whose ``best`` highest add up to most. Where
    weights are to add up to 1, ``eps`` is added to the sum of sigmoids that they are divided by."""

    sigmoid: bool = False
    correction: torch.Tensor | None = None
    factor: float = 1.0
    groups: tuple[int, int] | None = None
    best: int = 2
    eps: float = 0.0
    scales: torch.Tensor | None = None

    def allowed(self, scores: torch.Tensor) -> torch.Tensor:
        """[rows, experts] with those of other groups out of reach."""
        if self.groups is None:
            return scores
        count, kept = self.groups
        grouped = scores.unflatten(1, (count, -1))
        highest = grouped.sort(dim=-1, descending=True).values[..., : self.best].cumsum(-1)[..., -1]
        order = highest.argsort(dim=-1, descending=True, stable=True)
        out = torch.ones_like(highest, dtype=torch.bool).scatter_(1, order[:, :kept], False)
        return grouped.masked_fill(out[..., None], float("-inf")).flatten(1)


@dataclass(slots=True, eq=False)
class Experts:
    """Router and experts of a layer; ``chosen`` experts per row, whose weights add up to 1 if ``normalised``. There may
    be others elsewhere: ``count`` in all, those here from number ``first`` on; ``total`` adds what they make."""

    router: Linear
    experts: Sequence[Expert]
    gate: Callable[[torch.Tensor], torch.Tensor]
    chosen: int
    normalised: bool
    choice: Choice
    count: int
    first: int = 0
    total: Callable[[torch.Tensor], torch.Tensor] = lambda made: made
    compiled: KernelMixture | None = field(init=False)
    """All of it in one call, where every part has a kernel."""

    def __post_init__(self) -> None:
        self.compiled = self._compile()

    def _compile(self) -> KernelMixture | None:
        layers = [layer for layer in self.linears() if isinstance(layer, Compiled)]
        if len(layers) != 1 + 2 * len(self.experts) or not isinstance(self.gate, KernelGate):
            return None
        how = self.choice
        groups, kept = how.groups or (1, 1)
        sizes = structs.ExpertsStruct(
            self.count,
            self.first,
            len(self.experts),
            self.chosen,
            int(self.normalised),
            int(how.sigmoid),
            0 if how.correction is None else how.correction.data_ptr(),
            structs.number(how.factor),
            structs.number(how.eps),
            groups,
            kept,
            how.best if how.groups else 1,
            self.gate.activation,
            int(self.gate.gated),
            self.gate.pointer,
            0,
        )
        return KernelMixture(sizes, layers[0], layers[1:], self.gate.dtype, how.scales)

    def linears(self) -> Iterator[Linear]:
        yield self.router
        for expert in self.experts:
            yield from (expert.gate_up, expert.down)

    @property
    def chosen_bytes(self) -> int:
        """Of the experts that a row reads, on average."""
        return sum(size((expert.gate_up, expert.down)) for expert in self.experts) - self.idle_bytes

    @property
    def idle_bytes(self) -> int:
        """Of the experts that a row does not read."""
        held = sum(size((expert.gate_up, expert.down)) for expert in self.experts)
        return held * (self.count - self.chosen) // self.count

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which experts each row goes to, the highest first, and their weights in float32: [rows, chosen] both."""
        how, scores = self.choice, self.router(x).float()
        weights = activations.sigmoid(scores) if how.sigmoid else torch.exp(scores - scores.amax(-1, keepdim=True))
        ranks = weights if how.sigmoid or how.groups else scores
        ranks = how.allowed(ranks if how.correction is None else ranks + how.correction)
        order = ranks.argsort(dim=-1, descending=True, stable=True)[:, : self.chosen]
        taken = weights.gather(1, order)
        if self.normalised:
            taken = taken / (taken.cumsum(-1)[:, -1:] + (how.eps if how.sigmoid else 0.0))  # cumsum adds one by one
        elif not how.sigmoid:
            taken = taken / weights.cumsum(-1)[:, -1:]
        taken = taken * how.factor
        return order, taken if how.scales is None else taken * how.scales[order]

    def __call__(
        self, x: torch.Tensor, sizes: Sequence[int] | None = None, scored: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, int]:
        """What the experts make of rows [rows, width], in their dtype; ``sizes``: the row counts of calls. The router
        reads ``scored`` if that is given. And how many of the experts here were read."""
        if self.compiled is not None:
            total, read = self.compiled(x, scored)
            return self.total(total).to(x.dtype), read
        chosen, weights = self.route(x if scored is None else scored)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = torch.zeros(self.count, dtype=torch.long, device=x.device)
        counts.index_add_(0, flat, torch.ones_like(flat))
        rows, weights = order // self.chosen, weights.flatten()[order]
        total = torch.zeros(x.shape, device=x.device)
        every = counts.tolist()
        first, here = sum(every[: self.first]), every[self.first : self.first + len(self.experts)]
        for expert, count in zip(self.experts, here):
            if count:
                own, end = rows[first : first + count], first + count
                made = self._run(expert, x.index_select(0, own), sizes).float()
                total.index_add_(0, own, made.mul_(weights[first:end, None]))
                first = end
        return self.total(total).to(x.dtype), sum(count > 0 for count in here)

    def _run(self, expert: Expert, x: torch.Tensor, sizes: Sequence[int] | None) -> torch.Tensor:
        if sizes is None:
            return expert.down(self.gate(expert.gate_up(x)))
        parts = []
        for first, end, count in tiles.split_rows(len(x), sizes):
            rows = pad_rows(x[first:end], count)
            parts.append(expert.down(self.gate(expert.gate_up(rows)))[: end - first])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

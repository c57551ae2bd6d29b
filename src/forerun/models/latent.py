"""Multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1).

A token's entry in the cache is its latent and one turned key for all heads. A head's projection of latents to keys is
applied to its queries instead, and that to values to what attention makes of latents, so that attention is one with a
single key-value head. Every number of rows takes this way: a row has the same bits in a prompt and in a round.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch

from forerun.kernels import structs
from forerun.models.architectures.spec import LatentSpec
from forerun.models.formats.base import Linear
from forerun.models.formats.compiled import Compiled
from forerun.models.parts import KernelEach, KernelNorm

Rows = Callable[[torch.Tensor], torch.Tensor]


class Heads:
    """A layer for each head: in one call, where they have kernels."""

    def __init__(self, layers: Sequence[Linear], dtype: torch.dtype) -> None:
        self.layers = tuple(layers)
        own = [layer for layer in layers if isinstance(layer, Compiled)]
        self.compiled = KernelEach(own, dtype) if len(own) == len(layers) else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, heads, outputs] of [rows, heads, inputs]."""
        if self.compiled is not None:
            return self.compiled(x)
        return torch.stack([layer(part) for layer, part in zip(self.layers, x.transpose(0, 1).contiguous())], 1)


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """What is between a layer's first projection, the cache and its last projection. ``up`` and ``norm_query`` are None
    where queries have no latent; ``keys`` makes a latent's numbers of a query's."""

    sizes: LatentSpec
    up: Linear | None
    norm_query: Any
    norm: Any
    keys: Heads
    values: Heads

    def linears(self) -> Iterator[Linear]:
        yield from () if self.up is None else (self.up,)
        yield from (*self.keys.layers, *self.values.layers)

    def norms(self) -> Iterator[Any]:
        yield from () if self.norm_query is None else (self.norm_query,)
        yield self.norm

    def fields(self) -> array[int] | None:
        """What a compiled decoder reads, which this must outlive; None where some part has no kernel."""
        sizes, keys, values, up = self.sizes, self.keys.compiled, self.values.compiled, self.up
        if keys is None or values is None or not all(isinstance(norm, KernelNorm) for norm in self.norms()):
            return None
        if not isinstance(up, (Compiled, NoneType)):
            return None
        asked = 0 if self.norm_query is None else self.norm_query.pointer
        own = structs.LatentStruct(
            sizes.rank, sizes.query_rank, sizes.plain, sizes.turned, sizes.value, asked, self.norm.pointer,
            structs.number(self.norm.eps), keys.address, values.address,
        )  # fmt: skip
        return array("q", (*own, *(structs.NO_LAYER if up is None else up.fields())))

    def ask(self, made: torch.Tensor, count: int, turn: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [count, heads, entry] and entries [count, 1, entry] of the first ``count`` rows of ``made``, the
        layer's first projection; ``turn`` turns heads [count, heads, turned] by their position."""
        sizes, heads = self.sizes, len(self.keys.layers)
        first = sizes.query_rank or heads * sizes.query
        query, latent, key = made.split_with_sizes((first, sizes.rank, sizes.turned), 1)
        if self.up is not None:
            query = self.up(self.norm_query(query))
        plain, turned = query.view(-1, heads, sizes.query).split_with_sizes((sizes.plain, sizes.turned), 2)
        absorbed = self.keys(plain)[:count]
        turned, key = turn(turned[:count].contiguous()), turn(key[:count].contiguous()[:, None])
        entry = torch.cat([self.norm(latent)[:count, None], key], 2)
        return torch.cat([absorbed, turned], 2), entry

    def answer(self, out: torch.Tensor) -> torch.Tensor:
        """[rows, heads * value] of what attention made of latents, [rows, heads * rank]."""
        return self.values(out.view(-1, len(self.values.layers), self.sizes.rank)).flatten(1)

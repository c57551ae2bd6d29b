"""What a model asks of attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from forerun.cache.pool import Pool
from forerun.core.batch import Batch


@dataclass(slots=True)
class Query:
    """One layer's question: q is [rows, heads, width], k and v are [rows, kv heads, width]. Rows past the batch's are
    padding. ``window`` counts positions; ``softcap`` bounds the scores."""

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    window: int | None = None
    softcap: float | None = None


class Attention(ABC):
    """Attention over a pool: ``begin`` once per forward, ``run`` per layer, ``finish`` at the end."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    @abstractmethod
    def begin(self, batch: Batch) -> None:
        """Reserve entries and lay out the forward. Raises OutOfPages before anything is written."""

    @abstractmethod
    def run(self, query: Query, batch: Batch) -> torch.Tensor:
        """Store k and v, attend, return [rows, heads * value width].

        Each row sees its sequence's committed entries and, among the nodes, its ancestors.
        """

    def finish(self, batch: Batch) -> None:
        """Record the new lengths."""
        for span in batch.spans:
            self.pool.advance(span.key, span.end)

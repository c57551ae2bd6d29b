"""What a model asks of attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from forerun.cache.pool import Pool
from forerun.cache.states import States
from forerun.core.batch import Batch


@dataclass(slots=True)
class Query:
    """One layer's question: q is [rows, heads, width], k and v are [rows, kv heads, width]. Rows past the batch's are
    padding. ``window`` counts positions; ``softcap`` bounds the scores. ``bias`` [heads, reach] float32, contiguous, is
    added to them: the last column to that of a key at the row's own position, the one before it to that of the position
    before. ``sinks`` [heads] float32, contiguous: the score of one more key of each head, which has no value."""

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    window: int | None = None
    softcap: float | None = None
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


@dataclass(slots=True)
class Metadata:
    """What a backend lays out once per forward, for all layers."""

    batch: Batch


M = TypeVar("M", bound=Metadata)


class Backend(ABC, Generic[M]):
    """Attention over a KV cache, the pool: ``begin`` once per forward, ``run`` per layer with the metadata that it
    returned, ``finish`` at the end."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    @property
    def states(self) -> States | None:
        """What layers keep beside keys and values."""
        return self.pool.states

    @abstractmethod
    def begin(self, batch: Batch) -> M:
        """Reserve the cache's entries and lay out the forward.

        Raises:
            OutOfPages: there is no room; nothing was written.
        """

    @abstractmethod
    def run(self, query: Query, metadata: M) -> torch.Tensor:
        """One layer: store k and v, and attend. Each row sees its sequence's committed entries, and its ancestors among
        the nodes.

        Args:
            query: q [rows, heads, width], k and v [rows, kv heads, width], in the model's dtype.
            metadata: what ``begin`` returned for this forward.

        Returns:
            [rows, heads * value width], in the dtype of q.
        """

    def cross(self, layer: int, q: torch.Tensor, scale: float, metadata: M) -> torch.Tensor:
        """Attend to the whole of each sequence's source, which ``pool.sources`` has ready: q [rows, heads, width] ->
        [rows, heads * value width]. Only where encoder-decoders are run."""
        raise TypeError(f"{type(self).__name__} does not attend to sources")

    def finish(self, metadata: M) -> None:
        """Record the new lengths."""
        for span in metadata.batch.spans:
            self.pool.advance(span.key, span.end)


Attention = Backend[Any]
"""Any backend; its metadata is its own affair."""

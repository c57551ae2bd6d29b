"""The interface between models and attention backends."""

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
    """One layer's input: q [rows, heads, width], k and v [rows, kv heads, width]. Rows past the batch's are padding."""

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    window: int | None = None
    """A sliding window, in positions."""
    softcap: float | None = None
    bias: torch.Tensor | None = None
    """[heads, reach] float32, contiguous: added to the scores by distance. The last column is for a key at the row's
    own position, the one before it for the position before."""
    sinks: torch.Tensor | None = None
    """[heads] float32, contiguous: each head's score of one more key, which has no value."""
    causal: bool = True
    """False: a row also sees the later rows of its span, which is no tree."""
    sink_tokens: int = 0
    """So many first keys are seen besides the window."""


@dataclass(slots=True)
class Metadata:
    """What a backend prepares once per forward, for all layers."""

    batch: Batch


M = TypeVar("M", bound=Metadata)


class Backend(ABC, Generic[M]):
    """Attention over the KV cache: ``begin`` once per forward, ``run`` once per layer, ``finish`` at the end."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    @property
    def states(self) -> States | None:
        """The layers' recurrent states, if they have any."""
        return self.pool.states

    @abstractmethod
    def begin(self, batch: Batch) -> M:
        """Reserves the cache's entries and prepares the forward.

        Raises:
            OutOfPages: there are too few free pages; nothing was written.
        """

    @abstractmethod
    def run(self, query: Query, metadata: M) -> torch.Tensor:
        """Stores k and v of one layer, and attends. A row sees its sequence's committed entries and its own ancestors.

        Args:
            query: q [rows, heads, width], k and v [rows, kv heads, width], in the model's dtype.
            metadata: what ``begin`` returned for this forward.

        Returns:
            [rows, heads * value width], in the dtype of q.
        """

    def cross(self, layer: int, q: torch.Tensor, scale: float, metadata: M) -> torch.Tensor:
        """Cross-attention to sources in ``pool.sources``: q [rows, heads, width] -> [rows, heads * value width]."""
        raise TypeError(f"{type(self).__name__} does not attend to sources")

    def finish(self, metadata: Metadata) -> None:
        """Records the new lengths."""
        for span in metadata.batch.spans:
            self.pool.advance(span.key, span.end)


Attention = Backend[Any]
"""A backend with metadata of any kind."""

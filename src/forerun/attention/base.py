"""What a model asks of attention."""

from __future__ import annotations

from typing import Protocol

import torch

from forerun.cache.pool import Pool
from forerun.core.batch import Batch


class Attention(Protocol):
    """Attention over a pool: ``begin`` once per forward, ``run`` per layer, ``finish`` at the end."""

    pool: Pool

    def begin(self, batch: Batch) -> None:
        """Reserve entries and lay out the forward. Raises OutOfPages before anything is written."""

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: Batch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Store k and v, attend, return [rows, heads * value width].

        q is [rows, heads, width], k and v [rows, kv heads, width]; rows past ``batch.num_rows`` are padding.
        Each row sees its sequence's committed entries and, among the nodes, its ancestors.
        """

    def finish(self, batch: Batch) -> None:
        """Record the new lengths."""

"""Rotary position tables, grown on demand."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from forerun.core.batch import Batch

ROPE_TYPES = ("default", "linear", "llama3")
"""Kinds whose frequencies do not depend on the length of the text."""
GROWTH = 2048


class Rotary:
    """Turns queries and keys by their position: one complex product, for which the pairs of a head lie side by side.

    The rows of the projections are arranged for that; attention does not notice, as queries and keys agree. Values
    may pass through the same product, turned by nothing, so that all heads stay one tensor.
    """

    def __init__(self, config: PretrainedConfig, width: int, device: torch.device) -> None:
        self.width = width
        self.aligned = width % 16 == 0
        """Whether values may pass through ``turn`` too: where heads end within a vector, torch's complex product of
        whole tensors rounds differently in the vector body and in the tail."""
        self.device = device
        self.frequencies, self.factor = _frequencies(config, width)
        self._table = torch.empty(0)

    def arrange(self, heads: torch.Tensor) -> torch.Tensor:
        """The last dimension, one head, in the order that ``turn`` expects."""
        half = self.width // 2
        return torch.stack([heads[..., :half], heads[..., half:]], dim=-1).flatten(-2)

    def _grow(self, size: int) -> None:
        positions = torch.arange(-(-size // GROWTH) * GROWTH, dtype=torch.float32)
        angles = positions[:, None] * self.frequencies
        table = torch.complex(angles.cos() * self.factor, angles.sin() * self.factor)
        self._table = table[:, None].to(self.device)

    def angles(self, batch: Batch, turned: int, still: int) -> torch.Tensor:
        """Per row of the batch, ``turned`` heads' angles and then ``still`` heads' ones, for ``turn``."""
        end = max(span.end for span in batch.spans)
        if end > self._table.shape[0]:
            self._grow(end)
        if len(batch.spans) == 1 and batch.spans[0].parents is None:
            first = batch.spans[0].start + batch.spans[0].stored
            rows = self._table[first : first + batch.num_rows]
        else:
            rows = self._table.index_select(0, batch.positions)
        if not still:
            return rows
        return torch.cat([rows.expand(-1, turned, -1), torch.ones_like(rows).expand(-1, still, -1)], dim=1)

    @staticmethod
    def turn(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Turn [rows, heads, width]."""
        wide = heads if heads.dtype == torch.float32 else heads.float()
        return (wide.view(torch.complex64) * angles).view(torch.float32).to(heads.dtype)


def _frequencies(config: PretrainedConfig, width: int) -> tuple[torch.Tensor, float]:
    """One frequency per pair, float32, and the factor on cosines and sines."""
    rope: dict[str, Any] = dict(config.rope_parameters or {})
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return 1.0 / (rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width)), 1.0
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies.float(), factor

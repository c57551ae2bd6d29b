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
    """Turns queries and keys by their position.

    In float32 a head's pairs lie side by side and the turn is one complex product; the rows of the weights are
    arranged for it. In half precision a head keeps transformers' order, halves (x1, x2), and the table of sines
    carries the sign of -x2.
    """

    def __init__(self, config: PretrainedConfig, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.width = width
        self.dtype = dtype
        self.device = device
        self.paired = dtype == torch.float32
        self.frequencies, self.factor = _frequencies(config, width)
        self._size = 0
        self._tables: tuple[torch.Tensor, ...] = ()

    def arrange(self, heads: torch.Tensor) -> torch.Tensor:
        """The last dimension, one head, in the order that ``turn`` expects."""
        if not self.paired:
            return heads
        half = self.width // 2
        return torch.stack([heads[..., :half], heads[..., half:]], dim=-1).flatten(-2)

    def _grow(self, size: int) -> None:
        self._size = -(-size // GROWTH) * GROWTH
        angles = torch.arange(self._size, dtype=torch.float32)[:, None] * self.frequencies
        cos, sin = angles.cos() * self.factor, angles.sin() * self.factor
        if self.paired:
            tables: tuple[torch.Tensor, ...] = (torch.complex(cos, sin),)
        else:
            tables = (torch.cat([cos, cos], -1).to(self.dtype), torch.cat([-sin, sin], -1).to(self.dtype))
        self._tables = tuple(table[:, None].to(self.device) for table in tables)

    def angles(self, batch: Batch, rows: int) -> tuple[torch.Tensor, ...]:
        """Table entries of the batch's rows (padding included), for ``turn``."""
        end = max(span.end for span in batch.spans) + rows
        if end > self._size:
            self._grow(end)
        if len(batch.spans) == 1 and batch.spans[0].parents is None:
            first = batch.spans[0].start + batch.spans[0].stored
            return tuple(table[first : first + rows] for table in self._tables)
        where = batch.positions
        if rows > batch.num_rows:
            where = torch.cat([where, where[-1:].expand(rows - batch.num_rows)])
        return tuple(table.index_select(0, where) for table in self._tables)

    def turn(self, heads: torch.Tensor, angles: Any) -> torch.Tensor:
        """Turn [rows, heads, width]."""
        if self.paired:
            return (heads.view(torch.complex64) * angles[0]).view(torch.float32)
        cos, sin = angles
        return torch.addcmul(heads * cos, heads.roll(self.width // 2, -1), sin)


def _frequencies(config: PretrainedConfig, width: int) -> tuple[torch.Tensor, float]:
    """One frequency per pair, float32, and the factor on cosines and sines."""
    rope: dict[str, Any] = dict(config.rope_parameters or {})
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return 1.0 / (rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width)), 1.0
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies.float(), factor

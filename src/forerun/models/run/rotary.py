"""Rotary position tables, grown on demand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from forerun import kernels
from forerun.core.batch import Batch
from forerun.core.errors import shown
from forerun.kernels import gpu
from forerun.models.files import checkpoint

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
"""Those whose frequencies do not depend on the length of the text."""
GROWTH = 2048


Angles = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def room(count: int) -> int:
    """The next power of two: what grows with a text is seldom made anew."""
    return 1 << max(0, count - 1).bit_length()


def is_constant(rope: Mapping[str, Any]) -> bool:
    """Whether a ``dynamic`` type has constant frequencies all the same: those of Hunyuan's ``alpha``."""
    return rope.get("rope_type") == "dynamic" and bool(rope.get("alpha"))


class Rotary:
    """The rotary embedding of queries and keys: one complex product, for which a head's rotated pairs are side by side.

    Rows of the projections are arranged for that when they are loaded. With a partial embedding, the other numbers are
    multiplied by 1. ``kind`` is the layer type whose parameters are meant, in a config with several sets.
    ``interleaved``: checkpoints have the pairs side by side already.
    """

    def __init__(
        self,
        config: Any,
        width: int,
        device: torch.device,
        dtype: torch.dtype,
        kind: str | None = None,
        *,
        interleaved: bool = False,
    ) -> None:
        self.width, self.interleaved = width, interleaved
        self.dtype = dtype
        name = f"apply_rotary_{kernels.dtype_name(dtype)}"
        self._kernel = getattr(kernels.library(), name) if device.type == "cpu" and kernels.has(name) else None
        self.device = device
        frequencies, self.factor = rotary_frequencies(config, width, kind)
        self.pairs = len(frequencies)
        self.frequencies = torch.cat([frequencies, frequencies.new_zeros(width // 2 - self.pairs)])
        self._table = torch.empty(0)

    def arrange(self, heads: torch.Tensor) -> torch.Tensor:
        """Heads along the last dimension, in the order that ``apply_rotary`` expects."""
        if self.interleaved:
            return heads
        first, second, others = heads.split_with_sizes((self.pairs, self.pairs, self.width - 2 * self.pairs), -1)
        return torch.cat([torch.stack([first, second], dim=-1).flatten(-2), others], dim=-1)

    def arrange_rows(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """Rows of a joint qkv matrix (or its bias), each of the first ``count`` heads in that order."""
        rotated = count * self.width
        heads = rows[:rotated].view(count, self.width, -1).transpose(1, 2)
        heads = self.arrange(heads).transpose(1, 2).reshape(rows[:rotated].shape)
        return torch.cat([heads, rows[rotated:]])

    def table(self, size: int) -> torch.Tensor:
        """Cosines and sines as complex numbers [positions, 1, width / 2], of at least ``size`` positions."""
        if size > self._table.shape[0]:
            positions = torch.arange(GROWTH * room(-(-size // GROWTH)), dtype=torch.float32)
            angles = positions[:, None] * self.frequencies
            table = torch.complex(angles.cos() * self.factor, angles.sin() * self.factor)
            table[:, self.pairs :] = 1.0
            self._table = table[:, None].to(self.device)
        return self._table

    def angles(self, batch: Batch) -> Angles:
        """Those of a batch's rows: [rows, 1, width / 2]. On a GPU the table, and the positions to look up in it."""
        table = self.table(max((span.end for span in batch.spans), default=0))
        if gpu.serves(self.device):
            return table, batch.positions
        if len(batch.spans) == 1 and batch.spans[0].parents is None:
            first = batch.spans[0].start + batch.spans[0].stored
            return table[first : first + batch.num_rows]
        return table.index_select(0, batch.positions)

    def apply_rotary(self, heads: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Heads [rows, heads, width], rotated in place if possible."""
        if isinstance(angles, tuple):
            from forerun.models.run.rows import rotate

            return rotate(heads, *angles)
        if self._kernel is not None and heads.stride()[1:] == (self.width, 1):
            rows, count = heads.shape[:2]
            if heads.dtype is not self.dtype:
                raise ValueError(f"heads {[*heads.shape]} in {heads.dtype}, not in {self.dtype}")
            if angles.shape != (rows, 1, self.width // 2) or not angles.is_contiguous():
                raise ValueError(f"angles {[*angles.shape]} for {rows} rows of {self.width} numbers")
            self._kernel(heads.data_ptr(), heads.stride(0), angles.data_ptr(), rows, count, self.width)
            return heads
        wide = heads if heads.dtype == torch.float32 else heads.float()
        wide.view(torch.complex64).mul_(angles)
        return wide.to(heads.dtype)


def rotary_frequencies(config: Any, width: int, kind: str | None = None) -> tuple[torch.Tensor, float]:
    """Float32 frequencies of the rotated pairs, and the factor of cosines and sines."""
    if not hasattr(config, "rope_parameters"):
        return torch.empty(0), 1.0
    rope: dict[str, Any] = dict(config.rope_parameters or {})
    rope = rope if kind is None else rope[kind]
    with checkpoint.library(f"the model's rope_parameters cannot be used ({shown(rope)})"):
        if is_constant(rope):
            theta = rope["rope_theta"] * rope["alpha"] ** (width / (width - 2))
            return default_frequencies(width, theta), 1.0
        if rope.get("rope_type", "default") == "default":
            width = int(width * rope.get("partial_rotary_factor", 1.0))
            return default_frequencies(width, rope["rope_theta"]), 1.0
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        given = {} if kind is None else {"layer_type": kind}
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"), **given)
        return frequencies.float(), factor


def default_frequencies(width: int, theta: float) -> torch.Tensor:
    """Float32 [width / 2], radians per position."""
    return 1.0 / (theta ** (torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width))

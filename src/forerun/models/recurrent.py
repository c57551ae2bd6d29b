"""What layers have in the place of attention: they keep a state, and run it token by token in one order.

Every row is computed from the records of its own path alone, in sums whose shapes do not depend on how many rows there
are, so that its bits are the same whatever is fed with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from forerun.cache.states import Replay, States
from forerun.models.architectures.spec import MixerSpec


class Mixer(Protocol):
    """Of the inputs [rows, numbers] that a projection makes of a batch's rows, what the projection behind it reads."""

    def __call__(self, inputs: torch.Tensor, states: States, replay: Replay) -> torch.Tensor: ...

    def norms(self) -> Iterator[object]:
        """Those inside."""


class Convolution:
    """A causal convolution over each channel by itself: of a row's record and those before it, oldest first."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight [channels, 1, columns + 1]"""
        self.weight = weight[:, 0].float().T.contiguous()
        self.bias = None if bias is None else bias.float()

    def __call__(self, records: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
        """Float32 [nodes, channels] of ``records`` [records, at least so many]; ``taps`` [nodes, columns + 1]."""
        channels = self.weight.shape[1]
        total = records[taps[:, 0], :channels].float() * self.weight[0]
        for column, weight in enumerate(self.weight[1:], 1):
            total += records[taps[:, column], :channels].float() * weight
        return total if self.bias is None else total + self.bias


def remember(records: torch.Tensor, layer: int, states: States, replay: Replay) -> torch.Tensor:
    """Store the rows' records [rows, width]; returns them with those that are read behind them."""
    ring = states.records[layer]
    assert ring is not None
    flat = ring.view(-1, ring.shape[-1])
    every = torch.cat([records, flat[replay.read]])
    flat[replay.written] = records[replay.kept]
    return every


class ShortConv:
    """C * conv(B * x) of [B, C, x] (LFM2)."""

    def __init__(
        self, layer: int, sizes: MixerSpec, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        self.layer, self.sizes, self.dtype = layer, sizes, dtype
        self.conv = Convolution(weight, bias)

    def __call__(self, inputs: torch.Tensor, states: States, replay: Replay) -> torch.Tensor:
        before, after, x = inputs.chunk(3, -1)
        records = remember(before * x, self.layer, states, replay)
        rows = replay.taps[replay.fed]
        return self.conv(records, rows).to(self.dtype).mul_(after)

    def norms(self) -> Iterator[object]:
        yield from ()

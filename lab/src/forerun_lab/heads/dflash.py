"""``dflash``, as it is trained: blocks at many anchors of a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from forerun.models.run.parts import BlockConvolution
from forerun.models.run.rotary import default_frequencies
from forerun.speculate.draft.heads.dflash import Convolution, DFlashBlock, DFlashHead
from forerun_lab.heads.block import BlockAttention, BlockHead
from forerun_lab.heads.training import TrainingBatch, feed_forward

Part = Callable[[torch.Tensor], torch.Tensor]


class TrainedBlock(BlockAttention, DFlashBlock):
    """One layer with its pass over blocks."""

    def __init__(self, size: int, options: Mapping[str, Any]) -> None:
        super().__init__(size, options)
        self.frequencies = default_frequencies(self.width, options["theta"])

    def forward(self, x: torch.Tensor, attend: Part) -> torch.Tensor:
        x = x + within(self.attention_conv, self.input_layernorm(x), lambda rows: self.o_proj(attend(rows)))
        return x + within(self.mlp_conv, self.post_attention_layernorm(x), lambda rows: feed_forward(self.mlp, rows))


def within(weights: Convolution | None, x: torch.Tensor, part: Part) -> torch.Tensor:
    """``part`` of rows [..., block, hidden size], between the two convolutions if there are some."""
    if weights is None:
        return part(x)
    convolution = BlockConvolution(weights.base_kernel, weights.kernel_projection, x.shape[-2])
    rows, mixed = convolution.enter(x.flatten(0, -2))
    return convolution.leave(part(rows.view(x.shape)).flatten(0, -2), mixed).view(x.shape)


class TrainedDFlash(DFlashHead, BlockHead):
    """DFlash's head with its passes over blocks."""

    block_class = TrainedBlock

    def attention_mask(self, index: int, positions: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        windows, causal = self.options["windows"], self.options["causal"]
        window = windows[index] if windows else None
        query, key = positions[..., :, None], positions[..., None, :]
        before = (context < positions[..., :1, None]).expand(*positions.shape, len(context))
        own = key <= (query if causal and causal[index] else positions[..., -1:, None])
        own = own.expand(*positions.shape, positions.shape[-1])
        if window is not None:
            before, own = before & (query - context < window), own & (query - key < window)
        return torch.cat([before, own], dim=-1)

    def training_blocks(self, batch: TrainingBatch, anchors: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return batch.embedding[self.inputs(batch.tokens[:, anchors])].to(features.dtype)

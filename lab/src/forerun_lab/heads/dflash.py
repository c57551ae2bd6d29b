"""``dflash``, as it is trained: blocks at many anchors of a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from forerun.models.run.parts import BlockConvolution
from forerun.models.run.rotary import default_frequencies
from forerun.speculate.draft.heads.dflash import DFlashHead
from forerun.speculate.draft.heads.head import Sizes
from forerun_lab.heads.block import BlockAttention, BlockHead
from forerun_lab.heads.training import FeedForward, Norm, TrainingBatch, feed_forward

Part = Callable[[torch.Tensor], torch.Tensor]


class Convolution(nn.Module):
    """Weights of ``parts.BlockConvolution``, each shared by ``group`` channels."""

    def __init__(self, size: int, group: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.zeros(2, BlockConvolution.TAPS, size))
        nn.init.ones_(self.base_kernel[:, 0])
        self.kernel_projection = nn.Linear(size, 2 * BlockConvolution.TAPS * (size // group), bias=False)


class TrainedBlock(BlockAttention, nn.Module):
    """One layer: attention over context and block, then a feed-forward layer."""

    def __init__(self, size: int, options: Mapping[str, Any]) -> None:
        super().__init__()
        eps, group, biased = options["eps"], options["group"], options["biased"]
        self.heads, self.kv_heads, self.width = options["heads"], options["kv_heads"], options["width"]
        self.frequencies = default_frequencies(self.width, options["theta"])
        self.q_proj = nn.Linear(size, self.heads * self.width, bias=biased)
        self.k_proj = nn.Linear(size, self.kv_heads * self.width, bias=biased)
        self.v_proj = nn.Linear(size, self.kv_heads * self.width, bias=biased)
        self.o_proj = nn.Linear(self.heads * self.width, size, bias=biased)
        self.q_norm, self.k_norm = Norm(self.width, eps), Norm(self.width, eps)
        self.mlp = FeedForward(size, options["inner_size"])
        self.input_layernorm, self.post_attention_layernorm = Norm(size, eps), Norm(size, eps)
        self.attention_conv, self.mlp_conv = (None if group is None else Convolution(size, group) for _ in range(2))

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

    pack = BlockHead.pack

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        size, o = sizes.hidden_size, self.options
        self.fc = nn.Linear(len(self.layers) * size, size, bias=False)
        self.hidden_norm, self.norm = Norm(size, o["eps"]), Norm(size, o["eps"])
        self.blocks = nn.ModuleList(TrainedBlock(size, o) for _ in range(o["blocks"]))
        self.make_lm_head(bool(o.get("own_head")))
        if o["markov"]:
            self.markov_w1 = nn.Embedding(sizes.vocab_size, o["markov"])
            self.markov_w2 = nn.Linear(o["markov"], o.get("draft_vocab_size") or sizes.vocab_size, bias=False)
        self.hold()

    def condition(self, logits: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        return logits + self.markov_w2(self.markov_w1(previous)).float() if self.options["markov"] else logits

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

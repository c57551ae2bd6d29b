"""A head that starts from what its target knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun.speculate.draft.heads.eagle import EagleHead
from forerun.tune.features import Features

LEARN = 60_000
"""Tokens that the linear start is fitted to."""
RIDGE = 0.01
"""Of the mean square of its inputs."""


def options(config: Any, layers: list[int], rows: int) -> dict[str, Any]:
    """Options of an EAGLE-3 head whose layer is one of a Llama target's."""
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    return {
        "heads": heads,
        "kv_heads": config.num_key_value_heads,
        "width": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "inner_size": config.intermediate_size,
        "theta": float(rope.get("rope_theta", 10000.0)),
        "eps": config.rms_norm_eps,
        "layers": layers,
        "draft_vocab_size": rows,
        "mixed": True,
    }


def vocabulary(counts: Tensor, rows: int, always: list[int]) -> Tensor:
    """The ``rows`` commonest tokens of ``counts`` int64 [vocabulary] in ascending order, ``always`` among them."""
    wanted = counts.clone()
    wanted[always] = int(counts.max()) + 1
    return wanted.topk(rows).indices.sort().values


@torch.no_grad()
def start(head: EagleHead, target: PreTrainedModel, ids: Tensor, features: Features) -> Tensor:
    """Gives ``head`` the rows ``ids`` of the target's output layer and its final norm. Its feature is the target's last
    hidden state before that norm's weights, and its output the next token's, as a linear map of feature and embedding
    fits it best. Returns the size of every input of ``fc``, a root mean square, float32 [inputs]."""
    body: Any = target.get_decoder()
    output: Any = target.get_output_embeddings()
    size, norm = head.sizes.hidden_size, body.norm.weight.float()
    head.d2t.copy_(ids - torch.arange(len(ids)))
    head.lm_head.weight.copy_(output.weight[ids].float())
    head.norm.weight.copy_(norm)
    head.fc.weight.zero_()
    head.fc.weight[:, -size:] += torch.diag(1 / norm)
    embedding = target.get_input_embeddings().weight.float()
    left, right = torch.zeros(2 * size, 2 * size), torch.zeros(2 * size, size)
    squares, count = torch.zeros(head.fc.in_features), 0
    for part, place, length, prompt in features.sample(LEARN):
        states = part["hidden"][place : place + length].float()
        tokens = part["tokens"][place : place + length].long()
        squares += states.square().sum(0)
        states = states[max(0, prompt - 2) :]
        tokens = tokens[max(0, prompt - 2) :]
        known = torch.cat([head.input_layernorm(embedding[tokens[1:]]), states[:-1, -size:] / norm], dim=-1)
        left += known.T @ known
        right += known.T @ (states[1:, -size:] / norm)
        count += length
    left += RIDGE * torch.diag(left.diagonal().mean().expand(2 * size))
    head.mix.weight.copy_(torch.linalg.solve(left, right).T)
    return (squares / count).sqrt()


class Scaled(nn.Module):
    """A weight as it is learnt: for inputs of size 1, whatever theirs are."""

    def __init__(self, size: Tensor) -> None:
        super().__init__()
        self.register_buffer("size", size.clamp_min(1e-3), persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        return weight / self.size

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight * self.size

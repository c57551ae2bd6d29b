"""Training batches of heads: the target's hidden states and logits of a text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.speculate.draft.heads.head import TrainingBatch


def lesson(target: PreTrainedModel, tokens: Tensor, exit_layer: int | None = None) -> TrainingBatch:
    """The frozen target's hidden states and logits of token ids [rows, length]. With ``exit_layer``, that layer's
    output through the final norm replaces the last hidden state."""
    with torch.no_grad():
        return view(target, tokens, exit_layer)


def view(target: PreTrainedModel, tokens: Tensor, exit_layer: int | None = None) -> TrainingBatch:
    """``lesson`` with gradients through the target, where they are on."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        out = target(input_ids=tokens, use_cache=False, output_hidden_states=True)
        hidden = {index: state.float() for index, state in enumerate(out.hidden_states)}
        if exit_layer is not None:
            hidden[len(hidden) - 1] = target.get_decoder().norm(out.hidden_states[exit_layer]).float()
    embedding: Any = target.get_input_embeddings().weight
    head: Any = target.get_output_embeddings().weight
    return TrainingBatch(
        tokens=tokens,
        hidden=hidden,
        logits=out.logits.float(),
        embedding=embedding.float(),
        head=head.float(),
        target=target,
    )

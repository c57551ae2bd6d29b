"""A draft model that is a few of its target's layers."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from forerun.speculate.draft.heads.head import Guess, Lesson

LAYERS = (0, 1, -1)
"""Of the target's."""
LOOKED_AT = 4
"""Tokens ahead that figures are given for."""


class DistilledDraft(nn.Module):
    """Layers ``LAYERS`` of ``target`` in float32 between its embedding and its output layer, which stay as they are."""

    def __init__(self, target: PreTrainedModel) -> None:
        super().__init__()
        body: Any = target.get_decoder()
        count = len(body.layers)
        kept = sorted({layer % count for layer in LAYERS if layer < count})
        memo: Any = {id(layer): nn.Identity() for index, layer in enumerate(body.layers) if index not in kept}
        self.model: Any = deepcopy(target, memo)
        body = self.model.get_decoder()
        body.layers = nn.ModuleList(body.layers[index] for index in kept)
        for index, layer in enumerate(body.layers):
            layer.self_attn.layer_idx = index
        text = self.model.config.get_text_config()
        text.num_hidden_layers = len(kept)
        if getattr(text, "layer_types", None):
            text.layer_types = [text.layer_types[index] for index in kept]
        for part in (body.layers, body.norm):
            part.float().requires_grad_(True)
        self.norm, self.last = body.norm, body.layers[-1]

    def guesses(self, lesson: Lesson) -> Iterator[Guess]:
        """What it says behind the text as it is, of the next token while it learns, and of ``LOOKED_AT`` otherwise."""
        steps = 1 if self.training else LOOKED_AT
        length = lesson.tokens.shape[1]
        at = torch.arange(length - steps)
        indices = lesson.places(at, 1, steps)
        seen = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        if lesson.segments is not None:
            seen = seen & (lesson.segments[:, None, :, None] == lesson.segments[:, None, None, :])
        mask = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
        body = self.model.get_decoder()
        states = body(input_ids=lesson.tokens, attention_mask=mask, use_cache=False).last_hidden_state
        for step in range(steps):
            said = states[:, at + step] if indices is None else states[:, at + step][indices]
            yield Guess(functional.linear(said, lesson.head), lesson.wanted(at + step, indices))

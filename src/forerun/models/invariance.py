"""Does this model, on this machine, give a row the same bits however its batch is laid out?"""

from __future__ import annotations

import torch

from forerun.core.batch import Batch, Span
from forerun.models.base import Model, new_cache


@torch.inference_mode()
def self_test(model: Model) -> list[str]:
    """Compare plain decoding with one verification of the same tokens; returns what differed, empty if nothing."""
    tokens = [(7 * i + 3) % model.info.vocab_size for i in range(24)]
    cache = new_cache(model, max_seqs=2, max_len=64)
    device = model.info.device
    model.forward(Batch([Span(0, 0, tokens[:16])], device), cache)
    model.forward(Batch([Span(1, 0, tokens[:16])], device), cache)
    plain = [
        model.forward(Batch([Span(0, 16 + i, [tokens[16 + i]], logits=[0])], device), cache).logits[0] for i in range(8)
    ]
    wide = model.forward(Batch([Span(1, 16, tokens[16:], logits=list(range(8)))], device), cache).logits
    return [f"row {i} of a verification differs from plain decoding" for i in range(8) if not torch.equal(plain[i], wide[i])]

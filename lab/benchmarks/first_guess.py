"""What an eagle head of ours makes of random features and tokens, for comparison with other engines' modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from forerun_lab.heads.eagle import TrainedEagle

LENGTH = 64


class Said(NamedTuple):
    """``features`` [1, n, layers * hidden size] and ``tokens`` [1, n] went in; ``finished`` [1, n, hidden size] and
    ``logits`` [1, n, rows of the output layer] came out."""

    head: TrainedEagle
    embedding: torch.Tensor
    features: torch.Tensor
    tokens: torch.Tensor
    finished: torch.Tensor
    logits: torch.Tensor


@torch.no_grad()
def said(head: str, target: str) -> Said:
    """By the head and the target in these folders, without a cache."""
    ours = TrainedEagle.load(Path(head), json.loads((Path(target) / "config.json").read_text())["num_hidden_layers"])
    assert isinstance(ours, TrainedEagle)
    torch.manual_seed(0)
    size, vocabulary = ours.sizes.hidden_size, ours.sizes.vocab_size
    features = torch.randn(1, LENGTH, len(ours.layers) * size)
    tokens = torch.randint(0, vocabulary, (1, LENGTH))
    embedding = load_file(Path(target) / "model.safetensors")["model.embed_tokens.weight"].float()
    stream = ours.enter(embedding[tokens], ours.fc(features))
    q, k, v = ours.qkv(embedding[tokens], stream, torch.arange(LENGTH))
    groups = ours.heads // ours.kv_heads
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    attended = ours._unrolled(q, [k.repeat_interleave(groups, -2)], [v.repeat_interleave(groups, -2)], seen)
    finished = ours.finish(stream, attended)
    rows = embedding if ours.lm_head is None else ours.lm_head.weight
    return Said(ours, embedding, features, tokens, finished, ours.norm(finished) @ rows.T)

"""An EAGLE head's drafts by one dense pass over the whole text."""

import json

import torch

from forerun.speculate.draft.heads.head import Sizes


def sizes_of(target, depth=4):
    """Of a head for the checkpoint in folder ``target``."""
    config = json.loads((target / "config.json").read_text())
    return Sizes(config["hidden_size"], config["vocab_size"], config["num_hidden_layers"], depth)


def scramble(head):
    """Random weights everywhere: a fresh head starts with zeros that would hide mistakes."""
    torch.manual_seed(3)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)


def seen_by(count, window=None):
    """bool [count, count]: the positions that each row of a causal decoder sees, the first four besides a window."""
    rows, keys = torch.arange(count)[:, None], torch.arange(count)
    return (keys <= rows) & ((window is None) | (rows - keys < (window or 0)) | (keys < 4))


def unrolled(head, features, embedded, first, steps, window=None):
    """[steps, hidden size]: what ``head`` says behind the features before ``first``, its own outputs appended to them,
    by dense causal attention over all of it or in a window."""
    said = []
    for step in range(steps):
        count = first + step
        stream = head.enter(embedded[1 : count + 1], features[:count])
        q, k, v = head.qkv(embedded[1 : count + 1], stream, torch.arange(count))
        scores = torch.einsum("qhw,khw->hqk", q, k.repeat_interleave(2, 1)) / head.width**0.5
        scores = scores.masked_fill(~seen_by(count, window), float("-inf"))
        seen = torch.einsum("hqk,khw->qhw", scores.softmax(-1), v.repeat_interleave(2, 1)).flatten(1)
        said.append(head.finish(stream, seen)[-1])
        features = torch.cat([features[:count], said[-1][None]])
    return torch.stack(said)


SOME = torch.arange(1, 60, 3)
"""Tokens of a reduced vocabulary."""


def narrowed(head, reference, ids):
    """Scrambles a head and lets it draft among ``ids`` alone; gives the rows that read it."""
    scramble(head)
    rows = reference.lm_head.weight
    if ids is not None:
        head.reduce_vocabulary(ids, rows[ids])
    return rows if ids is None else rows[ids]

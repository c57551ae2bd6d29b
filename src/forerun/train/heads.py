"""`forerun train medusa | blockwise | eagle | parallel | lookahead | layerskip`: heads on a frozen target.

The loss belongs to the head; lessons.py gives it the target's hidden states and distributions over text.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from forerun.speculate.draft.heads.blockwise import BlockwiseHead
from forerun.speculate.draft.heads.eagle import EagleHead
from forerun.speculate.draft.heads.head import Head, Sizes
from forerun.speculate.draft.heads.lookahead import LookaheadHead
from forerun.speculate.draft.heads.medusa import MedusaHead
from forerun.speculate.draft.heads.parallel import ParallelHead
from forerun.speculate.draft.layerskip import ExitHead
from forerun.train import corpus as corpora
from forerun.train import loop
from forerun.train.config import HeadTrainConfig
from forerun.train.lessons import lesson
from forerun.train.material import gather

HEADS: dict[str, type[Head]] = {
    "medusa": MedusaHead,
    "blockwise": BlockwiseHead,
    "eagle": EagleHead,
    "parallel": ParallelHead,
    "lookahead": LookaheadHead,
    "layerskip": ExitHead,
}


def train_head(config: HeadTrainConfig) -> Path:
    """Trains a head; gives its folder, which ``speculative_config`` can name as ``model``."""
    material = gather(config)
    target = material.target
    text = target.config.get_text_config()
    depth, options = config.depth or 1, dict(config.options)
    sizes = Sizes(text.hidden_size, text.vocab_size, text.num_hidden_layers, depth, options)
    torch.manual_seed(config.seed)
    head = HEADS[config.method](sizes)
    exit_layer = (config.exit_layer or max(1, text.num_hidden_layers // 2)) if config.method == "layerskip" else None

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        assert isinstance(model, Head)
        with torch.autocast(batch.device.type, torch.bfloat16):
            return model.loss(lesson(target, batch, exit_layer))

    def evaluate(model: nn.Module) -> dict[str, float]:
        rows = corpora.whole_rows(material.test, config.length + 1)[:8]
        with torch.no_grad():
            return {"held_out_loss": float(loss(model, rows))}

    untrained = evaluate(head)["held_out_loss"]
    state = loop.run(head, material.batches, loss, config.settings(), evaluate)
    record = {
        "target": str(config.target or "forerun:target"),
        "tokens": state.tokens,
        "seconds": round(state.seconds),
        "seed": config.seed,
        "held_out_loss": evaluate(head)["held_out_loss"],
        "untrained_loss": untrained,
        "exit_layer": exit_layer,
    }
    head.save(config.out, record)
    return config.out

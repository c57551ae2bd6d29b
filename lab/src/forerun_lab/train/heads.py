"""`forerun train medusa | blockwise | eagle | parallel | lookahead | layerskip`: heads on a frozen target.

The loss belongs to the head; ``material.lesson`` gives it the target's hidden states and distributions over text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forerun.speculate.draft.heads.head import Sizes
from forerun_lab.drafters.layerskip import ExitHead
from forerun_lab.drafters.medusa import BlockwiseHead, LookaheadHead, MedusaHead
from forerun_lab.drafters.parallel import ParallelHead
from forerun_lab.heads.dflash import TrainedDFlash
from forerun_lab.heads.eagle import TrainedEagle
from forerun_lab.heads.training import TrainedHead, weights
from forerun_lab.train import corpus as corpora
from forerun_lab.train.config import HeadTrainConfig
from forerun_lab.train.losses import show
from forerun_lab.train.material import gather, lesson
from forerun_lab.tune import loop
from forerun_lab.tune.kinds import Figures, evaluate_head

HEADS: dict[str, type[TrainedHead]] = {
    "medusa": MedusaHead,
    "blockwise": BlockwiseHead,
    "dflash": TrainedDFlash,
    "eagle": TrainedEagle,
    "parallel": ParallelHead,
    "lookahead": LookaheadHead,
    "layerskip": ExitHead,
}


def loss_label(head: TrainedHead) -> loop.LossLabel:
    """The label of a head's loss."""
    first, last = head.first_token, head.sizes.depth
    fractions = weights(last - first + 1)
    if len(fractions) == 1:
        return loop.LossLabel("cross entropy of the guess under the target's distribution, nats per token")
    return loop.LossLabel(
        f"cross entropy of the guesses for tokens {first} to {last} ahead under the target's distribution, nats per "
        f"token, a mean with weights {', '.join(f'{fraction:.2g}' for fraction in fractions)}",
        sum(fractions),
    )


def _rounded(value: Any) -> Any:
    return [round(item, 5) for item in value] if isinstance(value, list) else value


def train_head(config: HeadTrainConfig) -> Path:
    """Train a head; returns its folder, which ``speculative_config`` can name as ``model``."""
    material = gather(config, config.method)
    target = material.target
    text = target.config.get_text_config()
    depth, options = config.depth or 1, dict(config.options)
    sizes = Sizes(text.hidden_size, text.vocab_size, text.num_hidden_layers, depth, options)
    torch.manual_seed(config.seed)
    head = HEADS[config.method](sizes)
    exit_layer = (config.exit_layer or max(1, text.num_hidden_layers // 2)) if config.method == "layerskip" else None

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        assert isinstance(model, TrainedHead)
        with torch.autocast(batch.device.type, torch.bfloat16):
            return model.loss(lesson(target, batch, exit_layer))

    def evaluate(model: nn.Module, count: int = 8) -> Figures:
        assert isinstance(model, TrainedHead)
        rows = corpora.whole_rows(material.test, config.length + 1)[:count]
        with torch.autocast(rows.device.type, torch.bfloat16):
            return evaluate_head(lambda row: model.guesses(lesson(target, row, exit_layer)), rows)

    untrained = loop.evaluated(evaluate, head)["held_out_loss"]
    state = loop.run(head, material.batches, loss, config.settings(), evaluate, loss_label(head))
    figures = loop.evaluated(lambda model: evaluate(model, 32), head)
    show(figures, config.progress, head.first_token)
    record = {
        "target": str(config.target or "forerun:target"),
        "tokens": state.tokens,
        "seconds": round(state.seconds),
        "seed": config.seed,
        **{name: _rounded(value) for name, value in figures.items()},
        "untrained_loss": untrained,
        "exit_layer": exit_layer,
    }
    head.save(config.out, record)
    return config.out

"""`forerun train medusa | blockwise | eagle | parallel | lookahead | layerskip`: heads on a frozen target.

The loss belongs to the head; lessons.py gives it the target's hidden states and distributions over text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forerun.core.errors import ConfigError
from forerun.speculate.draft.heads.blockwise import BlockwiseHead
from forerun.speculate.draft.heads.eagle import EagleHead
from forerun.speculate.draft.heads.head import Head, Sizes
from forerun.speculate.draft.heads.lookahead import LookaheadHead
from forerun.speculate.draft.heads.medusa import MedusaHead
from forerun.speculate.draft.heads.parallel import ParallelHead
from forerun.speculate.draft.layerskip import ExitHead
from forerun.train import corpus as corpora
from forerun.train import loop
from forerun.train.lessons import lesson
from forerun.train.material import gather
from forerun.train.on_policy import OnPolicyConfig

HEADS: dict[str, type[Head]] = {
    "medusa": MedusaHead,
    "blockwise": BlockwiseHead,
    "eagle": EagleHead,
    "parallel": ParallelHead,
    "lookahead": LookaheadHead,
    "layerskip": ExitHead,
}


@dataclass(frozen=True, kw_only=True)
class HeadTrainConfig(OnPolicyConfig):
    """What `forerun train METHOD` is told."""

    method: str = "medusa"  # which head
    depth: int | None = None  # tokens ahead that the head learns to guess; none means 5, and 1 for layerskip
    exit_layer: int | None = None  # layerskip: after how many layers the target leaves; none means half
    options: dict[str, Any] = field(default_factory=dict)  # the head's own sizes
    tokens: int = 300_000
    length: int = 256
    long_share: float = 0.0
    lr: float = 1e-3
    matrix_lr: float = 5e-3
    generated_tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method not in HEADS:
            raise ConfigError(f"no head is called {self.method!r}: choose one of {', '.join(sorted(HEADS))}")
        early = self.method == "layerskip"
        if self.depth is None:
            object.__setattr__(self, "depth", 1 if early else 5)
        elif self.depth < 1:
            raise ConfigError(f"depth must be at least 1, not {self.depth}")
        elif early and self.depth > 1:
            raise ConfigError(f"layerskip's head guesses one token at a time: remove depth ({self.depth})")
        if self.exit_layer is not None and not early:
            raise ConfigError(
                f"only layerskip leaves the target early: remove exit_layer, or train that, not {self.method}"
            )
        known = HEADS[self.method].options_known
        for key in self.options:
            if key not in known:
                has = f"it has {', '.join(sorted(known))}" if known else "it has none"
                raise ConfigError(f"{self.method} has no option {key!r}; {has}")


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

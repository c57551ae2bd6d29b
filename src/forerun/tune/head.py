"""Training of an EAGLE-3 head on features that were kept on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from forerun.speculate.draft.heads.eagle import EagleHead
from forerun.speculate.draft.heads.head import Head, Sizes
from forerun.train import loop
from forerun.train.positions import Figures, of_head
from forerun.train.settings import LoopSettings
from forerun.tune.features import Features
from forerun.tune.start import Scaled, options, start, vocabulary


@dataclass(frozen=True)
class HeadPlan:
    """What is trained: tokens ahead, rows of the draft vocabulary, the target's layer that it starts as."""

    depth: int = 3
    rows: int = 8192


def new_head(target: PreTrainedModel, features: Features, plan: HeadPlan, always: list[int]) -> EagleHead:
    config: Any = target.config.get_text_config()
    ids = vocabulary(features.counts(config.vocab_size), min(plan.rows, config.vocab_size), always)
    given = options(config, features.layers, len(ids))
    sizes = Sizes(config.hidden_size, config.vocab_size, config.num_hidden_layers, plan.depth, given)
    torch.manual_seed(0)
    head = EagleHead(sizes)
    scales = start(head, target, ids, features)
    scale(head, scales, target)
    return head


def scale(head: EagleHead, sizes: Tensor, target: PreTrainedModel) -> None:
    """Lets the matrices that read the target learn as if all their inputs were of size 1."""
    embedding: Any = target.get_input_embeddings().weight
    both = torch.ones(head.mix.in_features)
    both[: head.sizes.hidden_size] = embedding.float().square().mean().sqrt()
    parametrize.register_parametrization(head.fc, "weight", Scaled(sizes))
    parametrize.register_parametrization(head.mix, "weight", Scaled(both))


class Trainer:
    """The loss of a head, and how much of its drafts is kept on held-out conversations."""

    def __init__(self, target: PreTrainedModel, train: Features, test: Features, eval_rows: int = 24) -> None:
        self.target, self.train, self.test = target, train, test
        embedding: Any = target.get_input_embeddings().weight
        output: Any = target.get_output_embeddings().weight
        self.embedding, self.output = embedding.float(), output.float()
        self.rows = test.batch(0, eval_rows, 512)

    def loss(self, head: nn.Module, places: Tensor) -> Tensor:
        assert isinstance(head, Head)
        with torch.autocast("cpu", torch.bfloat16):
            lesson = self.train.lesson(places, self.target, self.embedding, self.output, narrow=True)
            return head.loss(lesson)

    def evaluate(self, head: nn.Module) -> Figures:
        assert isinstance(head, Head)

        def guesses(row: Tensor) -> Any:
            lesson = self.test.lesson(row, self.target, self.embedding, self.output, narrow=False)
            return head.guesses(lesson)

        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return of_head(guesses, self.rows)

    def run(self, head: EagleHead, settings: LoopSettings) -> loop.State:
        return loop.run(head, self.train, self.loss, settings, self.evaluate)


def export(sizes: Sizes, state: dict[str, Tensor], folder: Path, **said: Any) -> None:
    """Writes the head that a run's weights make, with what ``said`` tells of it."""
    plain = EagleHead(sizes)
    weights = {}
    for name, tensor in state.items():
        if name.endswith(".parametrizations.weight.original"):
            size = state[name.replace("original", "0.size")]
            name, tensor = name.replace(".parametrizations.weight.original", ".weight"), tensor / size
        weights[name] = tensor
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
    plain.save(folder, said)

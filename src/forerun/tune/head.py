"""An EAGLE head for a target: where it starts and how it is written; what any draft learns on, and how much of its
drafts is kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from forerun.speculate.draft.heads.eagle import EagleHead
from forerun.speculate.draft.heads.head import Guess, Sizes, weights
from forerun.train.loop import Meaning
from forerun.train.losses import lk
from forerun.train.positions import Figures, of_head
from forerun.tune.features import Features
from forerun.tune.last import Draft
from forerun.tune.start import Scaled, options, start, vocabulary

LEARNT = 3
"""Tokens ahead that an EAGLE head learns."""
AHEAD = 4
"""Tokens ahead that heads learn which guess all at once."""
DRAFTED = 8
"""Tokens ahead that it may draft: its output stands in for the target's feature as often as is asked for."""
LENGTH = 512
"""Tokens of a row, several conversations end to end."""
LOOKED_AT = 12
"""Rows of held-out text."""
MEANING = Meaning("minus the logarithm of the share of drafts that is kept at temperature 1, led in by KL")


def layers(target: Any) -> list[int]:
    """The target's hidden states that a head reads: low, middle, high, and the last, after the final norm."""
    count = target.num_hidden_layers
    return sorted({min(2, count), count // 2, max(0, count - 4), count})


def drafted(target: PreTrainedModel, features: Features, rows: int) -> Tensor:
    """The tokens that are drafted, int64 [rows]: the commonest of the target's text, and those that end one."""
    config: Any = target.config.get_text_config()
    always = [token for token in _ends(target) if token < config.vocab_size]
    return vocabulary(features.counts(config.vocab_size), min(rows, config.vocab_size), always)


def new_head(target: PreTrainedModel, features: Features, ids: Tensor, tokens: int) -> EagleHead:
    """A head that drafts among ``ids``, fitted to ``tokens`` tokens of the features, ready to be trained."""
    config: Any = target.config.get_text_config()
    sizes = Sizes(
        config.hidden_size, config.vocab_size, config.num_hidden_layers, LEARNT,
        options(config, features.layers, len(ids)),
    )  # fmt: skip
    torch.manual_seed(0)
    head = EagleHead(sizes)
    scales = start(head, target, ids, features, tokens)
    return learnable(head, scales, target)


def _ends(target: PreTrainedModel) -> list[int]:
    ends: Any = target.config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def learnable(head: EagleHead, scales: Tensor, target: PreTrainedModel) -> EagleHead:
    """Lets the matrices that read the target learn as if all their inputs were of size 1; the output layer is the
    target's and stays."""
    embedding: Any = target.get_input_embeddings().weight
    assert head.mix is not None
    assert head.lm_head is not None
    both = torch.ones(head.mix.in_features)
    both[: head.sizes.hidden_size] = embedding.float().square().mean().sqrt()
    parametrize.register_parametrization(head.fc, "weight", Scaled(scales))
    parametrize.register_parametrization(head.mix, "weight", Scaled(both))
    head.lm_head.weight.requires_grad_(False)
    return head


def export(head: EagleHead, folder: Path, said: Mapping[str, Any]) -> None:
    """Writes the head as a drafter loads it, with what ``said`` tells of it."""
    sizes = Sizes(**{**vars(head.sizes), "depth": DRAFTED})
    plain = EagleHead(sizes)
    weights = {}
    for name in plain.state_dict():
        module, _, part = name.rpartition(".")
        weights[name] = getattr(head.get_submodule(module), part) if module else getattr(head, name)
    plain.load_state_dict(weights)
    plain.save(folder, dict(said))


class Trainer:
    """The loss of a draft over the tokens ``ids`` int64 [n], and how much of its drafts is kept on held-out
    conversations."""

    def __init__(self, target: PreTrainedModel, train: Features, test: Features, ids: Tensor) -> None:
        self.train, self.test, self.target = train, test, target
        embedding: Any = target.get_input_embeddings().weight
        output: Any = target.get_output_embeddings().weight
        self.embedding, self.output, self.narrow = embedding, output, output[ids]
        self.rows = test.batch(0, LOOKED_AT, LENGTH)

    def loss(self, draft: nn.Module, indices: Tensor) -> Tensor:
        lesson = self.train.lesson(indices, self.target, self.embedding, self.narrow, narrow=True)
        with torch.autocast("cpu", torch.bfloat16):
            guesses = cast(Draft, draft).guesses(lesson)
            losses = [lk(guess.wanted, guess.logits).mean() for guess in guesses]
        fractions = weights(len(losses))
        return torch.stack([fraction * loss for fraction, loss in zip(fractions, losses)]).sum() / sum(fractions)

    def evaluate(self, draft: nn.Module) -> Figures:
        def guesses(row: Tensor) -> Iterator[Guess]:
            return cast(Draft, draft).guesses(
                self.test.lesson(row, self.target, self.embedding, self.output, narrow=False)
            )

        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return of_head(guesses, self.rows)

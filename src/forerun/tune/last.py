"""What a draft's last layer says, found by least squares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun.speculate.draft.heads.head import Guess, Lesson
from forerun.train.losses import overlap
from forerun.tune.features import Features
from forerun.tune.start import CALIBRATED, SHARPNESS, Fit

LOUD = 8.0
"""The size of what is said over that of the stream it is said into, which is no guess and cannot be unsaid."""


class Draft(Protocol):
    """What ``Trainer`` trains."""

    def guesses(self, lesson: Lesson) -> Iterator[Guess]: ...


@dataclass(frozen=True)
class Material:
    """``tokens`` tokens of a target's text, a lesson for each conversation, and the share of it that is answer.
    ``head`` [n, hidden size] reads hidden states."""

    target: PreTrainedModel
    features: Features
    head: Tensor
    tokens: int

    def __iter__(self) -> Iterator[tuple[Lesson, float]]:
        embedding: Any = self.target.get_input_embeddings().weight
        layers = self.features.layers
        for part, index, length, prompt in self.features.sample(self.tokens):
            here = slice(index, index + length - 1)  # the last token's states are not known
            states = part["hidden"][here].float()[None].chunk(len(layers), dim=-1)
            tokens = part["tokens"][here].long()[None]
            hidden = dict(zip(layers, states))
            yield Lesson(tokens, hidden, None, embedding, self.head, self.target), 1 - prompt / length


@torch.no_grad()
def fit_last(draft: Draft, norm: Any, linears: Sequence[nn.Linear], material: Material) -> None:
    """Fits each of ``linears`` in turn, what the parts of the last layer say, so that the stream before ``norm`` points
    where the target's last hidden state does. What is behind one says nothing until then."""
    size = len(norm.weight)
    states = replace(material, head=torch.eye(size))
    seen: dict[nn.Module, Tensor] = {}
    loud = 0.0

    def keep(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        seen[module] = given[0]

    for linear in linears:
        nn.init.zeros_(linear.weight)
    for linear in linears:
        fit = Fit(linear.in_features, linear.out_features)
        hooks = [part.register_forward_pre_hook(keep) for part in (linear, norm)]
        for lesson, fraction in states:
            requested = torch.stack([guess.wanted for guess in draft.guesses(lesson)], dim=-2)[0]
            few = round(fraction * len(requested))
            if few:
                inputs, stream = (seen[part][0, len(requested) - few : len(requested)] for part in (linear, norm))
                loud = loud or LOUD * float(stream.square().mean().sqrt())
                lack = loud * requested[-few:].view_as(stream) / norm.weight - stream
                fit.add(inputs.reshape(-1, linear.in_features), lack.reshape(-1, size))
        for hook in hooks:
            hook.remove()
        linear.weight.copy_(fit.solve())


@torch.no_grad()
def sharpen(draft: Draft, norm: Any, material: Material) -> None:
    """Scales ``norm``, and logits with it, so that most of the drafts are kept at temperature 1."""
    kept = torch.zeros(len(SHARPNESS))
    for lesson, fraction in replace(material, tokens=CALIBRATED):
        for guess in draft.guesses(lesson):
            few = round(fraction * guess.logits.shape[1])
            logits, requested = (part[0, guess.logits.shape[1] - few :] for part in (guess.logits, guess.wanted))
            kept += torch.stack([overlap(requested, factor * logits).sum() for factor in SHARPNESS])
    norm.weight.mul_(SHARPNESS[int(kept.argmax())])

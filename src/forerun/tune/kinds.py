"""What learns to draft for a target: where it starts, how fast and from which loss it learns, what it has learnt
position by position, and how it is written. Kinds beside EAGLE's are the laboratory's (``forerun_lab.kinds``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.core.errors import ConfigError
from forerun.core.folders import replace_with
from forerun.core.registry import from_lab
from forerun.speculate.draft.heads.eagle import EagleHead
from forerun.speculate.draft.heads.head import Guess, Head, Sizes, TrainingBatch, overlap, weights
from forerun.tune.features import Features, Scaled, options, start, vocabulary
from forerun.tune.loop import UNFIT, Meaning


class HeadKind(ABC):
    """A kind of draft. ``matrix_lr`` and ``lr`` are peak learning rates of hidden matrices and of the rest."""

    matrix_lr: ClassVar[float]
    lr: ClassVar[float] = 1e-4
    quantization: ClassVar[str]
    """Of its weights while it drafts, where there are kernels for that."""

    def require(self, config: Any) -> None:
        """Raises ConfigError for a target, by its text config, that it cannot start from."""
        if not hasattr(config, "rms_norm_eps"):
            raise ConfigError(f"drafts start from targets with RMS norms, which {config.model_type!r} has not")

    @abstractmethod
    def blank(self, target: PreTrainedModel, sizes: Mapping[str, Any]) -> nn.Module:
        """As ``save_start`` found it, but for the weights."""

    @abstractmethod
    def fitted(self, target: PreTrainedModel, features: Features, ids: Tensor, tokens: int) -> nn.Module:
        """From what the target knows, fitted to ``tokens`` tokens of ``features``; drafts among ``ids`` int64 [n]."""

    @abstractmethod
    def export(
        self, draft: nn.Module, folder: Path, tokenizer: PreTrainedTokenizerBase, said: Mapping[str, Any]
    ) -> None:
        """Writes what a drafter loads, with what ``said`` tells of it."""


class EagleKind(HeadKind):
    matrix_lr = 2e-3
    lr = 1e-3
    quantization = "q4_0"

    def blank(self, target: PreTrainedModel, sizes: Mapping[str, Any]) -> nn.Module:
        head = EagleHead(Sizes(**sizes))
        return learnable(head, torch.ones(head.fc.in_features), target)

    def fitted(self, target: PreTrainedModel, features: Features, ids: Tensor, tokens: int) -> nn.Module:
        config: Any = target.config.get_text_config()
        torch.manual_seed(0)
        sizes = sizes_of(target, options(config, features.layers, len(ids)), LEARNT)
        head = EagleHead(sizes).to(ids.device)
        scales = start(head, target, ids, features, tokens)
        return learnable(head, scales, target)

    def export(
        self, draft: nn.Module, folder: Path, tokenizer: PreTrainedTokenizerBase, said: Mapping[str, Any]
    ) -> None:
        assert isinstance(draft, EagleHead)
        plain = EagleHead(Sizes(**{**vars(draft.sizes), "depth": DRAFTED}))
        weights = {}
        for name in plain.state_dict():
            module, _, part = name.rpartition(".")
            weights[name] = getattr(draft.get_submodule(module), part) if module else getattr(draft, name)
        plain.load_state_dict(weights)
        plain.save(folder, dict(said))


EAGLE = EagleKind()


def kind_of(name: str) -> HeadKind:
    """One of ``config.TRAINED``. Raises ConfigError for one that is the laboratory's where that is not installed."""
    return EAGLE if name == "eagle" else from_lab("kinds", f"tune --train {name}").KINDS[name]


def sizes_of(target: PreTrainedModel, more: Mapping[str, Any], depth: int) -> Sizes:
    """Of a head that drafts ``depth`` tokens ahead, with the options ``more``."""
    config: Any = target.config.get_text_config()
    return Sizes(config.hidden_size, config.vocab_size, config.num_hidden_layers, depth, dict(more))


def save_start(draft: nn.Module, path: Path) -> None:
    sizes = vars(draft.sizes) if isinstance(draft, Head) else {}
    replace_with(path, lambda to: torch.save({"sizes": sizes, "state": draft.state_dict()}, to))


def read_start(kind: HeadKind, path: Path, target: PreTrainedModel) -> nn.Module:
    """What ``save_start`` wrote. Raises ConfigError where that is damaged."""
    try:
        saved = torch.load(path, weights_only=True)
        draft = kind.blank(target, saved["sizes"])
        draft.load_state_dict(saved["state"])
    except UNFIT as error:
        raise ConfigError(f"{path} cannot be read ({type(error).__name__}): remove it") from error
    return draft


CACHED = 1 << 18
"""Numbers of a kind that are worked on at a time: a few such arrays stay in a processor's caches."""
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
    always = [token for token in ends_of(target) if token < config.vocab_size]
    return vocabulary(features.counts(config.vocab_size), min(rows, config.vocab_size), always)


def ends_of(target: PreTrainedModel) -> list[int]:
    ends: Any = target.config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def learnable(head: EagleHead, scales: Tensor, target: PreTrainedModel) -> EagleHead:
    """Lets the matrices that read the target learn as if all their inputs were of size 1; the output layer is the
    target's and stays."""
    embedding: Any = target.get_input_embeddings().weight
    assert head.mix is not None
    assert head.lm_head is not None
    both = torch.ones(head.mix.in_features, device=embedding.device)
    both[: head.sizes.hidden_size] = embedding.float().square().mean().sqrt()
    parametrize.register_parametrization(head.fc, "weight", Scaled(scales))
    parametrize.register_parametrization(head.mix, "weight", Scaled(both))
    head.lm_head.weight.requires_grad_(False)
    return head


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
        with torch.autocast(self.embedding.device.type, torch.bfloat16):
            guesses = cast(DraftLayers, draft).guesses(lesson)
            losses = [lk(guess.target_logits, guess.logits).mean() for guess in guesses]
        fractions = weights(len(losses))
        return torch.stack([fraction * loss for fraction, loss in zip(fractions, losses)]).sum() / sum(fractions)

    def evaluate(self, draft: nn.Module) -> Figures:
        def guesses(row: Tensor) -> Iterator[Guess]:
            return cast(DraftLayers, draft).guesses(
                self.test.lesson(row, self.target, self.embedding, self.output, narrow=False)
            )

        with torch.no_grad(), torch.autocast(self.embedding.device.type, torch.bfloat16):
            return of_head(guesses, self.rows)


class DraftLayers(Protocol):
    """What ``Trainer`` trains."""

    def guesses(self, lesson: TrainingBatch) -> Iterator[Guess]: ...


def lk(p_logits: Tensor, q_logits: Tensor, eta: float = 3.0) -> Tensor:
    """-log alpha, led in by KL: w * KL + (1 - w) * -log alpha, with w = exp(-eta * mean alpha).

    After the LK losses of arXiv 2602.23881: w falls on its own as the draft gets better, so nothing is to be scheduled.
    p is given: its logits get no gradient.
    """
    divergence, alpha = _Compared.apply(p_logits, q_logits)
    weight = torch.exp(-eta * alpha.detach().mean())
    return weight * divergence - (1 - weight) * alpha.clamp_min(1e-6).log()


class _Compared(torch.autograd.Function):
    """KL(p || q) and alpha of each position, and with them their gradients by the logits of q, some rows at a time: one
    operation after another would bring [..., vocabulary] numbers from memory a dozen times."""

    @staticmethod
    def forward(ctx: Any, p_logits: Tensor, q_logits: Tensor) -> tuple[Tensor, Tensor]:
        size = q_logits.shape[-1]
        theirs, ours = p_logits.reshape(-1, size), q_logits.reshape(-1, size)
        wide = torch.promote_types(ours.dtype, torch.float32)
        divergence, alpha = torch.empty(2, len(ours), dtype=wide, device=ours.device)
        slopes = torch.empty(2, *ours.shape, dtype=ours.dtype, device=ours.device) if ctx.needs_input_grad[1] else None
        rows = max(1, CACHED // size) if ours.device.type == "cpu" else len(ours)
        for part in range(0, len(ours), rows):
            here = slice(part, part + rows)
            log_p, log_q = (logits[here].to(wide).log_softmax(-1) for logits in (theirs, ours))
            p, q = log_p.exp(), log_q.exp()
            divergence[here] = (p * log_p.sub_(log_q)).sum(-1)
            alpha[here] = torch.minimum(p, q).sum(-1)
            if slopes is not None:
                below = torch.where(q < p, q, 0)
                slopes[0, here] = q - p
                slopes[1, here] = below.sub_(q * below.sum(-1, keepdim=True))
        ctx.save_for_backward(slopes)
        return divergence.view(q_logits.shape[:-1]), alpha.view(q_logits.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *slopes_of_loss: Tensor) -> tuple[None, Tensor]:
        (slopes,) = ctx.saved_tensors
        by_divergence, by_alpha = (part.reshape(-1, 1).to(slopes.dtype) for part in slopes_of_loss)
        out = (slopes[0] * by_divergence).addcmul_(slopes[1], by_alpha)
        return None, out.view(*slopes_of_loss[0].shape, slopes.shape[-1])


Figures = dict[str, Any]


@torch.no_grad()
def of_head(guesses: Callable[[Tensor], Iterable[Guess]], rows: Tensor) -> Figures:
    """A head on token ids int64 [rows, length], by position: ``loss_by_position``, nats per token, and
    ``accepted_at_0`` and ``accepted_at_1``, the share of drafts of which this position and all before it are kept, at
    temperatures 0 and 1. ``held_out_loss`` is the loss that is trained, the weighted sum."""
    totals: list[list[float]] = []
    indices = 0
    for row in rows.split(1):
        hit, fraction = torch.tensor(True), torch.tensor(1.0)
        for position, guess in enumerate(guesses(row)):
            logits, requested = guess.logits.float(), guess.target_logits.float()
            if guess.ids is not None:
                logits = torch.full_like(requested, float("-inf")).index_copy_(-1, guess.ids, logits)
            hit = hit & (logits.argmax(-1) == requested.argmax(-1))
            fraction = fraction * overlap(requested, logits)
            if position == len(totals):
                totals.append([0.0, 0.0, 0.0])
            for index, value in enumerate((guess.loss(), hit, fraction)):
                totals[position][index] += float(value.sum())
        indices += hit.numel()
    losses, cold, warm = ([total[index] / indices for total in totals] for index in range(3))
    trained = sum(weight * loss for weight, loss in zip(weights(len(losses)), losses, strict=True))
    return {"held_out_loss": trained, "loss_by_position": losses, "accepted_at_0": cold, "accepted_at_1": warm}

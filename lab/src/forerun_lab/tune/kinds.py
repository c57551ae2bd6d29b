"""A kind of draft that ``forerun tune`` trains, and EAGLE's: initialisation, learning rates, loss and evaluation."""

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
from forerun.speculate.draft.heads.head import Head, Sizes
from forerun_lab.heads.eagle import TrainedEagle
from forerun_lab.heads.training import Guess, TrainingBatch, overlap, weights
from forerun_lab.tune.features import Features
from forerun_lab.tune.fit import InputScaled, eagle_options, fit_eagle
from forerun_lab.tune.loop import UNFIT, LossLabel

CHUNK = 1 << 18
"""Logits of which the loss is computed at a time: a few such arrays fit into a processor's caches."""
EAGLE_DEPTH = 3
"""Tokens ahead that an EAGLE head is trained for."""
EAGLE_MAX_DEPTH = 8
"""Tokens ahead that it may draft: its output takes the place of the target's feature as often as needed."""
PARALLEL_DEPTH = 4
"""Tokens ahead of heads that predict them all at once."""
LENGTH = 512
"""Tokens of a row, several conversations end to end."""
HELD_OUT_ROWS = 12
LOSS_LABEL = LossLabel("minus the logarithm of the share of drafts that is kept at temperature 1, led in by KL")


class HeadKind(ABC):
    """A kind of draft. ``matrix_lr`` and ``lr`` are the peak learning rates of hidden matrices and of the rest."""

    matrix_lr: ClassVar[float]
    lr: ClassVar[float] = 1e-4
    quantization: ClassVar[str]
    """Weight format while it drafts, where there are kernels for it."""

    def require(self, config: Any) -> None:
        """Raise ConfigError for a target that the kind cannot start from; ``config`` is its text config."""
        if not hasattr(config, "rms_norm_eps"):
            raise ConfigError(f"drafts start from targets with RMS norms, which {config.model_type!r} has not")

    @abstractmethod
    def blank(self, target: PreTrainedModel, sizes: Mapping[str, Any]) -> nn.Module:
        """A draft with the shapes of one that ``save_start`` wrote."""

    @abstractmethod
    def fitted(self, target: PreTrainedModel, features: Features, ids: Tensor, tokens: int) -> nn.Module:
        """A draft initialised from the target and fitted to ``tokens`` tokens of ``features``. ``ids`` int64 [n] is its
        vocabulary."""

    @abstractmethod
    def export(
        self, draft: nn.Module, folder: Path, tokenizer: PreTrainedTokenizerBase, metadata: Mapping[str, Any]
    ) -> None:
        """Write the folder that a drafter loads, with ``metadata``."""


class EagleKind(HeadKind):
    matrix_lr = 2e-3
    lr = 1e-3
    quantization = "q4_0"

    def blank(self, target: PreTrainedModel, sizes: Mapping[str, Any]) -> nn.Module:
        head = TrainedEagle(Sizes(**sizes))
        return make_trainable(head, torch.ones(head.fc.in_features), target)

    def fitted(self, target: PreTrainedModel, features: Features, ids: Tensor, tokens: int) -> nn.Module:
        config: Any = target.config.get_text_config()
        torch.manual_seed(0)
        sizes = sizes_of(target, eagle_options(config, features.layers, len(ids)), EAGLE_DEPTH)
        head = TrainedEagle(sizes).to(ids.device)
        return make_trainable(head, fit_eagle(head, target, ids, features, tokens), target)

    def export(
        self, draft: nn.Module, folder: Path, tokenizer: PreTrainedTokenizerBase, metadata: Mapping[str, Any]
    ) -> None:
        assert isinstance(draft, TrainedEagle)
        plain = TrainedEagle(Sizes(**{**vars(draft.sizes), "depth": EAGLE_MAX_DEPTH}))
        weights = {}
        for name in plain.state_dict():
            module, _, part = name.rpartition(".")
            weights[name] = getattr(draft.get_submodule(module), part) if module else getattr(draft, name)
        plain.load_state_dict(weights)
        plain.save(folder, dict(metadata))


EAGLE = EagleKind()


def sizes_of(target: PreTrainedModel, more: Mapping[str, Any], depth: int) -> Sizes:
    """Sizes of a head for ``target`` that predicts ``depth`` tokens ahead, with the options ``more``."""
    config: Any = target.config.get_text_config()
    return Sizes(config.hidden_size, config.vocab_size, config.num_hidden_layers, depth, dict(more))


def save_start(draft: nn.Module, path: Path) -> None:
    sizes = vars(draft.sizes) if isinstance(draft, Head) else {}
    replace_with(path, lambda to: torch.save({"sizes": sizes, "state": draft.state_dict()}, to))


def read_start(kind: HeadKind, path: Path, target: PreTrainedModel) -> nn.Module:
    """Load what ``save_start`` wrote. Raises ConfigError if that is damaged."""
    try:
        saved = torch.load(path, weights_only=True)
        draft = kind.blank(target, saved["sizes"])
        draft.load_state_dict(saved["state"])
    except UNFIT as error:
        raise ConfigError(f"{path} cannot be read ({type(error).__name__}): remove it") from error
    return draft


def feature_layers(config: Any) -> list[int]:
    """The target's hidden states that a head reads: low, middle, high, and the last, after the final norm."""
    count = config.num_hidden_layers
    return sorted({min(2, count), count // 2, max(0, count - 4), count})


def draft_vocabulary(target: PreTrainedModel, features: Features, rows: int) -> Tensor:
    """Token ids that are drafted, int64 [rows], ascending: the most frequent of the target's text, and EOS tokens."""
    size: int = target.config.get_text_config().vocab_size
    counts = features.counts(size)
    counts[[token for token in eos_ids(target) if token < size]] = int(counts.max()) + 1
    return counts.topk(min(rows, size)).indices.sort().values


def eos_ids(target: PreTrainedModel) -> list[int]:
    ids: Any = target.config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def make_trainable(head: TrainedEagle, scales: Tensor, target: PreTrainedModel) -> TrainedEagle:
    """Train the matrices that read the target as if their inputs, whose root mean squares are ``scales``, had size 1;
    freeze the output layer, which is the target's."""
    embedding: Any = target.get_input_embeddings().weight
    assert head.mix is not None
    assert head.lm_head is not None
    both = torch.ones(head.mix.in_features, device=embedding.device)
    both[: head.sizes.hidden_size] = embedding.float().square().mean().sqrt()
    parametrize.register_parametrization(head.fc, "weight", InputScaled(scales))
    parametrize.register_parametrization(head.mix, "weight", InputScaled(both))
    head.lm_head.weight.requires_grad_(False)
    return head


class Trainer:
    """Loss of a draft with the vocabulary ``ids`` int64 [n], and its acceptance on held-out conversations."""

    def __init__(self, target: PreTrainedModel, train: Features, test: Features, ids: Tensor) -> None:
        self.train, self.test, self.target = train, test, target
        embedding: Any = target.get_input_embeddings().weight
        output: Any = target.get_output_embeddings().weight
        self.embedding, self.output, self.narrow = embedding, output, output[ids]
        self.rows = test.batch(0, HELD_OUT_ROWS, LENGTH)

    def loss(self, draft: nn.Module, indices: Tensor) -> Tensor:
        lesson = self.train.lesson(indices, self.target, self.embedding, self.narrow, narrow=True)
        with torch.autocast(self.embedding.device.type, torch.bfloat16):
            guesses = cast(DraftLayers, draft).guesses(lesson)
            losses = [lk_loss(guess.target_logits, guess.logits).mean() for guess in guesses]
        fractions = weights(len(losses))
        return torch.stack([fraction * loss for fraction, loss in zip(fractions, losses)]).sum() / sum(fractions)

    def evaluate(self, draft: nn.Module) -> Figures:
        def guesses(row: Tensor) -> Iterator[Guess]:
            return cast(DraftLayers, draft).guesses(
                self.test.lesson(row, self.target, self.embedding, self.output, narrow=False)
            )

        with torch.no_grad(), torch.autocast(self.embedding.device.type, torch.bfloat16):
            return evaluate_head(guesses, self.rows)


class DraftLayers(Protocol):
    """A draft that ``Trainer`` trains."""

    def guesses(self, lesson: TrainingBatch) -> Iterator[Guess]: ...


def lk_loss(p_logits: Tensor, q_logits: Tensor, eta: float = 3.0) -> Tensor:
    """LK loss of each position: w * KL + (1 - w) * -log alpha, with w = exp(-eta * mean alpha) (arXiv 2602.23881). It
    begins as KL and becomes -log alpha as the draft improves, without a schedule. p's logits get no gradient."""
    divergence, alpha = _DivergenceAndAlpha.apply(p_logits, q_logits)  # type: ignore[no-untyped-call]
    weight = torch.exp(-eta * alpha.detach().mean())
    loss: Tensor = weight * divergence - (1 - weight) * alpha.clamp_min(1e-6).log()
    return loss


class _DivergenceAndAlpha(torch.autograd.Function):
    """KL(p || q) and alpha of each position, and their gradients by q's logits, computed chunk by chunk: operations on
    whole [..., vocabulary] tensors would read memory a dozen times."""

    @staticmethod
    def forward(ctx: Any, p_logits: Tensor, q_logits: Tensor) -> tuple[Tensor, Tensor]:
        size = q_logits.shape[-1]
        p_rows, q_rows = p_logits.reshape(-1, size), q_logits.reshape(-1, size)
        dtype, device = torch.promote_types(q_rows.dtype, torch.float32), q_rows.device
        divergence, alpha = torch.empty(2, len(q_rows), dtype=dtype, device=device)
        grads = torch.empty(2, *q_rows.shape, dtype=q_rows.dtype, device=device) if ctx.needs_input_grad[1] else None
        count = max(1, CHUNK // size) if device.type == "cpu" else len(q_rows)
        for first in range(0, len(q_rows), count):
            chunk = slice(first, first + count)
            log_p, log_q = (logits[chunk].to(dtype).log_softmax(-1) for logits in (p_rows, q_rows))
            p, q = log_p.exp(), log_q.exp()
            divergence[chunk] = (p * log_p.sub_(log_q)).sum(-1)
            alpha[chunk] = torch.minimum(p, q).sum(-1)
            if grads is not None:
                below = torch.where(q < p, q, 0)
                grads[0, chunk] = q - p
                grads[1, chunk] = below.sub_(q * below.sum(-1, keepdim=True))
        ctx.save_for_backward(grads)
        return divergence.view(q_logits.shape[:-1]), alpha.view(q_logits.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor) -> tuple[None, Tensor]:
        (grads,) = ctx.saved_tensors
        by_divergence, by_alpha = (grad.reshape(-1, 1).to(grads.dtype) for grad in output_grads)
        out = (grads[0] * by_divergence).addcmul_(grads[1], by_alpha)
        return None, out.view(*output_grads[0].shape, grads.shape[-1])


Figures = dict[str, Any]


@torch.no_grad()
def evaluate_head(guesses: Callable[[Tensor], Iterable[Guess]], rows: Tensor) -> Figures:
    """Evaluate a head on rows of token ids or indices, int64 [rows, length, ...]. Returns, by draft position,
    ``loss_by_position`` in nats per token, and ``accepted_at_0`` and ``accepted_at_1``, the fraction of drafts accepted
    up to this position at temperatures 0 and 1. ``held_out_loss`` is the weighted sum of losses."""
    totals: list[list[float]] = []
    count = 0
    for row in rows.split(1):
        accepted, chance = torch.tensor(True), torch.tensor(1.0)
        for position, guess in enumerate(guesses(row)):
            logits, target_logits = guess.logits.float(), guess.target_logits.float()
            if guess.ids is not None:
                logits = torch.full_like(target_logits, float("-inf")).index_copy_(-1, guess.ids, logits)
            accepted = accepted & (logits.argmax(-1) == target_logits.argmax(-1))
            chance = chance * overlap(target_logits, logits)
            if position == len(totals):
                totals.append([0.0, 0.0, 0.0])
            for index, value in enumerate((guess.loss(), accepted, chance)):
                totals[position][index] += float(value.sum())
        count += accepted.numel()
    losses, at_0, at_1 = ([total[index] / count for total in totals] for index in range(3))
    loss = sum(weight * loss for weight, loss in zip(weights(len(losses)), losses, strict=True))
    return {"held_out_loss": loss, "loss_by_position": losses, "accepted_at_0": at_0, "accepted_at_1": at_1}

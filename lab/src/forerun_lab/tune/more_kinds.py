"""Kinds of drafts that ``forerun tune`` trains beside EAGLE's: Medusa heads, parallel heads, and a draft model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.core.errors import ConfigError
from forerun.speculate.draft.heads.head import Sizes
from forerun_lab.drafters.medusa import MedusaHead
from forerun_lab.drafters.parallel import ParallelHead
from forerun_lab.heads.dflash import TrainedDFlash
from forerun_lab.heads.training import Guess, TrainedHead, TrainingBatch, overlap
from forerun_lab.train.folder import save_model
from forerun_lab.tune.features import Features
from forerun_lab.tune.fit import CALIBRATION_TOKENS, LOGIT_SCALES, LeastSquares, copy_layer, eagle_options, factor_of
from forerun_lab.tune.kinds import EAGLE, PARALLEL_DEPTH, DraftLayers, HeadKind, eos_ids, sizes_of

DISTILLED = ("llama", "mistral", "qwen2", "qwen3", "phi3")
"""Targets whose layers can be a draft: they run in float32, and their ``o_proj`` and ``down_proj`` can be fitted."""


class MedusaKind(HeadKind):
    """Initialised to predict the target's next token at every position ahead: its blocks cannot be fitted by least
    squares."""

    matrix_lr = 3e-3
    quantization = "int8_rows"
    head: ClassVar[type[TrainedHead]] = MedusaHead

    def blank(self, target: PreTrainedModel, sizes: Mapping[str, Any]) -> nn.Module:
        head = self.head(Sizes(**sizes))
        if head.lm_head is not None:  # the target's rows
            head.lm_head.requires_grad_(False)
        return head

    def fitted(self, target: PreTrainedModel, features: Features, ids: Tensor, tokens: int) -> nn.Module:
        return _narrowed(MedusaHead(sizes_of(target, {}, PARALLEL_DEPTH)), target, ids)

    def export(
        self, draft: nn.Module, folder: Path, tokenizer: PreTrainedTokenizerBase, metadata: Mapping[str, Any]
    ) -> None:
        assert isinstance(draft, TrainedHead)
        draft.save(folder, dict(metadata))


class ParallelKind(MedusaKind):
    """Initialised with the target's last layer over its last states; ``o_proj``, ``down_proj`` by least squares."""

    head: ClassVar[type[TrainedHead]] = ParallelHead

    def blank_for(self, target: PreTrainedModel, known: dict[str, Any]) -> tuple[Any, nn.Linear, tuple[Any, Any]]:
        """A fresh head with options ``known``, the matrix that reads features, and the norms of its layer."""
        head = ParallelHead(sizes_of(target, known, PARALLEL_DEPTH))
        (block,) = head.each_block()
        return head, head.fuse, (block.norm, block.norm_mlp)

    def fitted(self, target: PreTrainedModel, features: Features, ids: Tensor, tokens: int) -> nn.Module:
        config: Any = target.config.get_text_config()
        own = eagle_options(config, features.layers, len(ids))
        known = {name: own[name] for name in ("heads", "kv_heads", "width", "inner_size", "theta", "layers")}
        torch.manual_seed(0)
        head, reader, norms = self.blank_for(target, known)
        (block,) = head.each_block()
        body: Any = target.get_decoder()
        with torch.no_grad():
            head.norm.weight.copy_(factor_of(body.norm))
            reader.weight.zero_()
            last = torch.diag(1 / factor_of(body.norm))  # features come after the norm
            reader.weight[:, -len(last) :] = last
            copy_layer(block, norms, body.layers[-1])
        _fitted(head, head.norm, [block.o_proj, block.mlp.down_proj], target, features, ids, tokens)
        return _narrowed(head, target, ids)


class DFlashKind(ParallelKind):
    """Initialised as ``ParallelKind``, with one layer that predicts from its anchor on; its mask is a token that occurs
    in no text."""

    head = TrainedDFlash

    def blank_for(self, target: PreTrainedModel, known: dict[str, Any]) -> tuple[Any, nn.Linear, tuple[Any, Any]]:
        ends = eos_ids(target)
        head = TrainedDFlash(
            sizes_of(target, {**known, "from_anchor": True, "mask": ends[0] if ends else 0}, PARALLEL_DEPTH)
        )
        (block,) = head.each_block()
        return head, head.fc, (block.input_layernorm, block.post_attention_layernorm)


class Distilled(HeadKind):
    """A few of the target's layers; the last one's ``o_proj`` and ``down_proj`` are fitted by least squares."""

    matrix_lr = 3e-3
    quantization = "int8_rows"

    def require(self, config: Any) -> None:
        if config.model_type not in DISTILLED:
            raise ConfigError(
                f"a draft_model of a target's own layers is made for {', '.join(DISTILLED)}, not for "
                f"{config.model_type!r}: --train eagle"
            )

    def blank(self, target: PreTrainedModel, sizes: Mapping[str, Any]) -> nn.Module:
        return DistilledDraft(target)

    def fitted(self, target: PreTrainedModel, features: Features, ids: Tensor, tokens: int) -> nn.Module:
        draft = DistilledDraft(target)
        linears = [draft.last.self_attn.o_proj, draft.last.mlp.down_proj]
        _fitted(draft, draft.norm, linears, target, features, ids, tokens)
        return draft

    def export(
        self, draft: nn.Module, folder: Path, tokenizer: PreTrainedTokenizerBase, metadata: Mapping[str, Any]
    ) -> None:
        assert isinstance(draft, DistilledDraft)
        save_model(draft.model, tokenizer, folder, metadata)


KINDS: dict[str, HeadKind] = {
    "eagle": EAGLE,
    "medusa": MedusaKind(),
    "parallel": ParallelKind(),
    "dflash": DFlashKind(),
    "draft_model": Distilled(),
}


def _fitted(
    draft: Any, norm: Any, linears: list[nn.Linear], target: Any, features: Features, ids: Tensor, tokens: int
) -> None:
    output: Any = target.get_output_embeddings().weight
    material = Material(target, features, output[ids].float(), tokens)
    fit_last(draft, norm, linears, material)
    sharpen(draft, norm, material)


def _narrowed(head: TrainedHead, target: PreTrainedModel, ids: Tensor) -> TrainedHead:
    """``head`` with the draft vocabulary ``ids`` and the target's output rows for it."""
    output: Any = target.get_output_embeddings().weight
    head.reduce_vocabulary(ids, output[ids])
    return head


FITTED_SCALE = 8.0
"""Size of the fitted output over that of the residual stream, which is no prediction and cannot be removed."""


@dataclass(frozen=True)
class Material:
    """Iterates over conversations of ``tokens`` tokens in all: a training batch, and the fraction that is the answer.
    ``head`` [n, hidden size] reads hidden states."""

    target: PreTrainedModel
    features: Features
    head: Tensor
    tokens: int

    def __iter__(self) -> Iterator[tuple[TrainingBatch, float]]:
        embedding: Any = self.target.get_input_embeddings().weight
        layers = self.features.layers
        for part, index, length, prompt in self.features.sample(self.tokens):
            here = slice(index, index + length - 1)  # the last token's states are not known
            states = part["hidden"][here].float()[None].chunk(len(layers), dim=-1)
            tokens = part["tokens"][here].long()[None]
            hidden = dict(zip(layers, states))
            yield TrainingBatch(tokens, hidden, None, embedding, self.head, self.target), 1 - prompt / length


@torch.no_grad()
def fit_last(draft: DraftLayers, norm: Any, linears: Sequence[nn.Linear], material: Material) -> None:
    """Fit each of ``linears``, the output projections of the last layer's parts, so that the residual stream before
    ``norm`` is parallel to the target's last hidden state. Later ones are zero until they are fitted."""
    size = len(norm.weight)
    states = replace(material, head=torch.eye(size, device=material.head.device))
    seen: dict[nn.Module, Tensor] = {}
    scale = 0.0

    def keep(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        seen[module] = given[0]

    for linear in linears:
        nn.init.zeros_(linear.weight)
    for linear in linears:
        fit = LeastSquares(linear.in_features, linear.out_features, states.head.device)
        hooks = [part.register_forward_pre_hook(keep) for part in (linear, norm)]
        for batch, fraction in states:
            requested = torch.stack([guess.target_logits for guess in draft.guesses(batch)], dim=-2)[0]
            count = round(fraction * len(requested))
            if count:
                inputs, stream = (seen[part][0, len(requested) - count : len(requested)] for part in (linear, norm))
                scale = scale or FITTED_SCALE * float(stream.square().mean().sqrt())
                residual = scale * requested[-count:].view_as(stream) / norm.weight - stream
                fit.add(inputs.reshape(-1, linear.in_features), residual.reshape(-1, size))
        for hook in hooks:
            hook.remove()
        linear.weight.copy_(fit.solve())


@torch.no_grad()
def sharpen(draft: DraftLayers, norm: Any, material: Material) -> None:
    """Scale ``norm``, and thereby logits, for the highest acceptance at temperature 1."""
    kept = torch.zeros(len(LOGIT_SCALES), device=material.head.device)
    for batch, fraction in replace(material, tokens=CALIBRATION_TOKENS):
        for guess in draft.guesses(batch):
            count = round(fraction * guess.logits.shape[1])
            logits, target_logits = (part[0, part.shape[1] - count :] for part in (guess.logits, guess.target_logits))
            kept += torch.stack([overlap(target_logits, factor * logits).sum() for factor in LOGIT_SCALES])
    norm.weight.mul_(LOGIT_SCALES[int(kept.argmax())])


LAYERS = (0, 1, -1)
"""The target's layers that make the draft model."""
GUESSES = 4
"""Tokens ahead that are evaluated."""


class DistilledDraft(nn.Module):
    """Layers ``LAYERS`` of ``target`` in float32, between its frozen embedding and output layer."""

    def __init__(self, target: PreTrainedModel) -> None:
        super().__init__()
        body: Any = target.get_decoder()
        count = len(body.layers)
        kept = sorted({layer % count for layer in LAYERS if layer < count})
        memo: Any = {id(layer): nn.Identity() for index, layer in enumerate(body.layers) if index not in kept}
        self.model: Any = deepcopy(target, memo)
        body = self.model.get_decoder()
        body.layers = nn.ModuleList(body.layers[index] for index in kept)
        for index, layer in enumerate(body.layers):
            layer.self_attn.layer_idx = index
        text = self.model.config.get_text_config()
        text.num_hidden_layers = len(kept)
        if getattr(text, "layer_types", None):
            text.layer_types = [text.layer_types[index] for index in kept]
        for part in (body.layers, body.norm):
            part.float().requires_grad_(True)
        self.norm, self.last = body.norm, body.layers[-1]

    def guesses(self, batch: TrainingBatch) -> Iterator[Guess]:
        """Predictions of the next token in training, of ``GUESSES`` tokens in evaluation, all after the true text."""
        steps = 1 if self.training else GUESSES
        length = batch.tokens.shape[1]
        at = torch.arange(length - steps, device=batch.tokens.device)
        indices = batch.trainable(at, 1, steps)
        seen = torch.ones(length, length, dtype=torch.bool, device=at.device).tril()[None, None]
        if batch.segments is not None:
            seen = seen & (batch.segments[:, None, :, None] == batch.segments[:, None, None, :])
        mask = torch.zeros(seen.shape, device=at.device).masked_fill_(~seen, float("-inf"))
        body = self.model.get_decoder()
        states = body(input_ids=batch.tokens, attention_mask=mask, use_cache=False).last_hidden_state
        for step in range(steps):
            selected = states[:, at + step] if indices is None else states[:, at + step][indices]
            yield Guess(functional.linear(selected, batch.head), batch.target_logits(at + step, indices))

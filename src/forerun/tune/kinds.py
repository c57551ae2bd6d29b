"""What may learn to draft for a target: where each kind starts, how fast it learns, and how it is written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.core.errors import ConfigError
from forerun.core.folders import replace_with
from forerun.speculate.draft.heads.eagle import EagleHead
from forerun.speculate.draft.heads.head import Head, Sizes
from forerun.speculate.draft.heads.medusa import MedusaHead
from forerun.speculate.draft.heads.parallel import ParallelHead
from forerun.train.checkpoint import save_model
from forerun.train.loop import UNFIT
from forerun.tune.distilled import DistilledDraft
from forerun.tune.features import Features
from forerun.tune.head import AHEAD, export, learnable, new_head
from forerun.tune.last import Material, fit_last, sharpen
from forerun.tune.start import options, scale, take

DISTILLED = ("llama", "mistral", "qwen2", "qwen3", "phi3")
"""Targets whose layers may be a draft: their parts take and give float32, and least squares know what these say."""


class Kind(ABC):
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


class Eagle(Kind):
    matrix_lr = 2e-3
    lr = 1e-3
    quantization = "q4_0"

    def blank(self, target: PreTrainedModel, sizes: Mapping[str, Any]) -> nn.Module:
        head = EagleHead(Sizes(**sizes))
        return learnable(head, torch.ones(head.fc.in_features), target)

    def fitted(self, target: PreTrainedModel, features: Features, ids: Tensor, tokens: int) -> nn.Module:
        return new_head(target, features, ids, tokens)

    def export(
        self, draft: nn.Module, folder: Path, tokenizer: PreTrainedTokenizerBase, said: Mapping[str, Any]
    ) -> None:
        assert isinstance(draft, EagleHead)
        export(draft, folder, said)


class Medusa(Kind):
    """Starts as the target's own guess of the next token, for every token ahead: its blocks are no matrices that least
    squares could find."""

    matrix_lr = 3e-3
    quantization = "int8_rows"
    head: ClassVar[type[Head]] = MedusaHead

    def blank(self, target: PreTrainedModel, sizes: Mapping[str, Any]) -> nn.Module:
        head = self.head(Sizes(**sizes))
        if head.lm_head is not None:  # the target's rows
            head.lm_head.requires_grad_(False)
        return head

    def fitted(self, target: PreTrainedModel, features: Features, ids: Tensor, tokens: int) -> nn.Module:
        return _narrowed(MedusaHead(_sizes(target)), target, ids)

    def export(
        self, draft: nn.Module, folder: Path, tokenizer: PreTrainedTokenizerBase, said: Mapping[str, Any]
    ) -> None:
        assert isinstance(draft, Head)
        draft.save(folder, dict(said))


class Parallel(Medusa):
    """Starts with the target's last layer, which looks at its last hidden states; least squares say what it makes of
    what it finds."""

    head = ParallelHead

    def fitted(self, target: PreTrainedModel, features: Features, ids: Tensor, tokens: int) -> nn.Module:
        config: Any = target.config.get_text_config()
        own = options(config, features.layers, len(ids))
        known = {name: own[name] for name in ("heads", "kv_heads", "width", "inner_size", "theta", "layers")}
        torch.manual_seed(0)
        head = ParallelHead(_sizes(target, known))
        (block,) = head.each_block()
        body: Any = target.get_decoder()
        with torch.no_grad():
            head.norm.weight.copy_(scale(body.norm))
            head.fuse.weight.zero_()
            last = torch.diag(1 / scale(body.norm))  # features are what comes behind the norm
            head.fuse.weight[:, -len(last) :] = last
            take(block, (block.norm, block.norm_mlp), body.layers[-1])
        _settled(head, head.norm, [block.o_proj, block.mlp.down_proj], target, features, ids, tokens)
        return _narrowed(head, target, ids)


class Distilled(Kind):
    """A few of the target's layers; least squares say what the last of them makes of what it finds."""

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
        says = [draft.last.self_attn.o_proj, draft.last.mlp.down_proj]
        return _settled(draft, draft.norm, says, target, features, ids, tokens)

    def export(
        self, draft: nn.Module, folder: Path, tokenizer: PreTrainedTokenizerBase, said: Mapping[str, Any]
    ) -> None:
        assert isinstance(draft, DistilledDraft)
        save_model(draft.model, tokenizer, folder, said)


KINDS: dict[str, Kind] = {
    "eagle": Eagle(),
    "medusa": Medusa(),
    "parallel": Parallel(),
    "draft_model": Distilled(),
}


def _settled(
    draft: Any, norm: Any, says: list[nn.Linear], target: Any, features: Features, ids: Tensor, tokens: int
) -> Any:
    output: Any = target.get_output_embeddings().weight
    material = Material(target, features, output[ids].float(), tokens)
    fit_last(draft, norm, says, material)
    sharpen(draft, norm, material)
    return draft


def _narrowed(head: Head, target: PreTrainedModel, ids: Tensor) -> Head:
    """Drafts among ``ids`` alone, with the target's own rows."""
    output: Any = target.get_output_embeddings().weight
    head.narrow(ids, output[ids])
    return head


def _sizes(target: PreTrainedModel, more: Mapping[str, Any] | None = None) -> Sizes:
    config: Any = target.config.get_text_config()
    return Sizes(config.hidden_size, config.vocab_size, config.num_hidden_layers, AHEAD, dict(more or {}))


def save_start(draft: nn.Module, path: Path) -> None:
    sizes = vars(draft.sizes) if isinstance(draft, Head) else {}
    replace_with(path, lambda to: torch.save({"sizes": sizes, "state": draft.state_dict()}, to))


def read_start(kind: Kind, path: Path, target: PreTrainedModel) -> nn.Module:
    """What ``save_start`` wrote. Raises ConfigError where that is damaged."""
    try:
        saved = torch.load(path, weights_only=True)
        draft = kind.blank(target, saved["sizes"])
        draft.load_state_dict(saved["state"])
    except UNFIT as error:
        raise ConfigError(f"{path} cannot be read ({type(error).__name__}): remove it") from error
    return draft

"""Base classes of drafters with a trained head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from forerun.core.batch import HiddenStates
from forerun.core.errors import ConfigError
from forerun.core.folders import expanded
from forerun.core.registry import from_lab, has_lab
from forerun.core.request import Requests, RequestState
from forerun.core.tree import Drafts, Verdicts
from forerun.models.files.open import BUNDLED, Checkpoint, resolve
from forerun.models.formats import int8
from forerun.models.kinds import BLOCKS, UNQUANTIZED
from forerun.models.run.base import Model, ModelInfo
from forerun.speculate.draft.base import Chooser, DraftContext, Drafter, DrafterConfig, Needs, scatter_logits
from forerun.speculate.draft.heads.head import OUTPUT, Head, Sizes
from forerun.speculate.verify import Verification

C = TypeVar("C", bound="HeadConfig")


@dataclass(frozen=True)
class HeadConfig(DrafterConfig):
    num_speculative_tokens: int = 4
    model: str | None = None
    """Folder or hub id of the trained head; None: the one bundled for the bundled target."""
    adapt: Any = None
    """Train the head while it serves, with forerun-lab: true, or a mapping of options (every, share, window, batch,
    buffer_tokens, lr, save). The tokens stay the same."""
    quantization: str | None = None
    """Quantization of the head's own output layer, and of the decoder layers of eagle, mtp and dflash, where our CPU
    kernels run them: int8_rows, or a block format of GGUF files such as q8_0, which also applies to the projection of
    the target's states. None or none: no quantization."""

    def __post_init__(self) -> None:
        super().__post_init__()
        formats = ("int8_rows", *BLOCKS, UNQUANTIZED)
        if self.quantization not in (None, *formats):
            raise ConfigError(f"a head's quantization is one of {', '.join(formats)}, not {self.quantization!r}")
        if self.adapt is not None:
            object.__setattr__(self, "adapt", from_lab("adapt", "adapt").Adaptation.parse(self.adapt))

    def form(self, info: ModelInfo) -> str | None:
        """The ``quantization`` that the CPU kernels run for such a target."""
        none = self.quantization in (None, UNQUANTIZED) or not int8.has_kernels(info.device, info.dtype)
        return None if none else self.quantization


class FeatureDrafter(Drafter[C]):
    """Collects the target's hidden states of every sequence.

    There are none of tokens that the target took from its prefix cache: what a drafter reads begins after them, or
    after those that it kept itself.
    """

    per_sequence: ClassVar[tuple[str, ...]] = ("seen", "skipped")
    seen: dict[int, int]
    """Per sequence: up to which token hidden states were seen."""
    skipped: dict[int, int]
    """Per sequence: how many tokens before them the drafter has not read."""
    layers: tuple[int, ...] = ()
    """Indices of the hidden states that it reads."""

    def observe(self, sequences: Requests, drafts: Drafts, verdicts: Verdicts, result: Verification) -> None:
        for sequence, verdict in zip(sequences, verdicts):
            if verdict.hidden is None or verdict.error is not None or not self.layers:
                continue
            self.skipped.setdefault(sequence.id, sequence.num_computed_tokens - len(verdict.hidden))
            self.seen[sequence.id] = sequence.num_computed_tokens
            self.add_hidden(sequence, verdict.hidden)

    def add_hidden(self, sequence: RequestState, hidden: HiddenStates) -> None:
        """Stores the target's hidden states of newly cached tokens."""

    def learn(self) -> None:
        """Called before drafting."""

    def ready(self, sequence: RequestState) -> bool:
        """Whether it has the hidden states of all tokens that the target has read."""
        return self.seen.get(sequence.id, 0) == len(sequence.tokens) - 1

    def cached_tokens(self, sequence: RequestState) -> list[int]:
        return sequence.tokens[: self.seen.get(sequence.id, 0)]


class HeadDrafter(FeatureDrafter[C]):
    """Drafts with a trained ``head``."""

    config_class: ClassVar[type[DrafterConfig]] = HeadConfig
    head_class: ClassVar[type[Head]]
    example_options: ClassVar[dict[str, Any]] = {}
    """``Sizes.options`` of the head that ``example`` writes."""

    def __init__(self, config: C, context: DraftContext) -> None:
        super().__init__(config, context)
        context.require_decoder(self.name)
        info = context.target.info
        self.head = self._load(config, context.target).to(device=info.device, dtype=info.dtype)
        sizes = self.head.sizes
        trained_for = sizes.hidden_size, sizes.num_layers, sizes.vocab_size
        actual = info.hidden_size, info.num_layers, info.vocab_size
        if trained_for != actual:
            raise ConfigError(
                "the {} head was trained for a target of hidden size {}, {} layers and {} tokens; "
                "{} has {}, {} and {}".format(self.name, *trained_for, info.name, *actual)
            )
        if config.num_speculative_tokens > sizes.depth:
            raise ConfigError(f"this {self.name} head guesses {sizes.depth} tokens ahead, not "
                              f"{config.num_speculative_tokens}")  # fmt: skip
        trained_with = self.head.record.get("target_fingerprint")
        if trained_with is not None and trained_with != Checkpoint.open(info.name).fingerprint(info.lora):
            raise ConfigError(
                f"this {self.name} head was trained together with the weights saved in {self.head.record['target']}, "
                f"which {info.name} does not hold: load that folder as the model"
            )
        self.learner: Any = None
        hidden = self.head.layers
        if config.adapt is not None:
            self.learner = from_lab("adapt", "adapt").Learner(self.head, context.target, config.adapt)
            hidden = self.learner.layers
        if config.quantization not in (None, UNQUANTIZED) and not (self.head.quantizes or OUTPUT in self.head.tensors):
            raise ConfigError(f"this {self.name} head has no output layer of its own to quantize: remove quantization")
        self.head.quantization = config.form(info)
        self.head.pack()
        self.layers = self.head.layers
        self.needs = Needs(hidden=hidden, model=True)
        self.chooser = Chooser.of(config, context)

    def _load(self, config: C, target: Model) -> Head:
        if config.model is None and target.info.name != f"{BUNDLED}target":
            name, lab = target.info.name, "" if has_lab("training") else " (in forerun-lab: pip install ./lab)"
            how = f"'forerun train {self.name} --target {name} --out FOLDER'{lab} makes one"
            if self.name == "eagle":
                how = f"'forerun tune {name} --out FOLDER'{lab} makes one, which 'tuned' takes instead of a method"
            raise ConfigError(
                f"method {self.name!r} needs a head trained on {name}, to be named as 'model': {how}. Where a head "
                "comes with this model, give 'tuned': 'bundled' and no method"
            )
        return self.head_class.load(resolve(config.model or f"{BUNDLED}{self.name}"), target.info.num_layers)

    def to_target_ids(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over the target's vocabulary; -inf for tokens outside the head's reduced one."""
        ids = self.head.token_ids()
        return logits if ids is None else scatter_logits(logits, ids, self.head.sizes.vocab_size)

    def add_hidden(self, sequence: RequestState, hidden: HiddenStates) -> None:
        if self.learner is not None:
            self.learner.watch(sequence, hidden)

    def learn(self) -> None:
        """Takes a step of online adaptation, if one is due."""
        if self.learner is not None:
            self.learner.learn()

    def close(self) -> None:
        if self.learner is not None and self.config.adapt.save is not None:
            self.learner.save(expanded(self.config.adapt.save))

    def release(self, sequence: RequestState) -> None:
        super().release(sequence)
        if self.learner is not None:
            self.learner.forget(sequence)

    @classmethod
    def example(cls, target: Path, folder: Path) -> dict[str, Any]:
        config = Checkpoint.at(target).config.get_text_config()
        sizes = Sizes(config.hidden_size, config.vocab_size, config.num_hidden_layers, 4, cls.example_options)
        torch.manual_seed(0)
        cls.head_class.example(sizes).save(folder)
        return {"model": str(folder)}

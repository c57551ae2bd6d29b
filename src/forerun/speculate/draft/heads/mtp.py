"""``mtp``: the layer for multi-token prediction that a checkpoint brings along (DeepSeek-V3, arXiv 2412.19437,
section 2.2).

``layers.py`` says how it drafts: [norm(embedding), norm(hidden)] go through one matrix, a decoder layer and a norm into
the target's output layer. The feature is the target's last hidden state; deeper tokens use the layer's own normed
output instead, as in vLLM and transformers. If a checkpoint has several such layers, only the first one is used.

The layer is in the target's own files or a file beside them (``models/weights/drafters.py``). Gemma 4's assistant,
another kind of drafter under the same method, is in ``assistant.py``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file

from forerun.core.config import COUNT
from forerun.core.errors import ConfigError, ModelError
from forerun.models.architectures.drafters import mtp_example
from forerun.models.files.checkpoint import CONFIG
from forerun.models.files.open import quick_config, read_config, resolve
from forerun.models.formats import ON_CPU
from forerun.models.run.assistant import is_assistant
from forerun.models.run.drafter import DraftDecoder
from forerun.models.weights.drafters import output_rows, read_mtp
from forerun.models.weights.transform import ChangedWeights
from forerun.speculate.draft.base import Chooser, DraftContext, Drafter, Needs, drafters
from forerun.speculate.draft.chain import FEEDS_NORMED
from forerun.speculate.draft.heads.layers import LayerConfig, LayerDrafter
from forerun.speculate.draft.model import most_common

LARGE_VOCABULARY, REDUCED_VOCABULARY = 65536, 32768
"""By default, a vocabulary larger than the first is reduced to the second, because the output layer is most of a step
(FastMTP, arXiv 2509.18362)."""


def has_layer(path: Path, config: Any) -> bool:
    """Whether a target's own files have a supported layer; its weights are not read."""
    try:
        read_mtp(path, config)
    except ModelError:
        return False
    return True


@dataclass(frozen=True)
class MtpConfig(LayerConfig):
    """As eagle's. ``model`` is a file with the layer, if that is not in the target's files, or Gemma 4's assistant."""

    draft_vocab_size: int | None = None
    """How many tokens its output layer predicts, as for a draft model. None: 32,768 of a vocabulary of more than
    65,536, otherwise all tokens."""
    limits: ClassVar = {"draft_vocab_size": COUNT}
    unsupported: ClassVar = {"adapt": "method 'mtp' does not learn"}


@drafters.register("mtp")
class Mtp(LayerDrafter[MtpConfig]):
    name = "mtp"
    config_class = MtpConfig

    @classmethod
    def build(cls, config: Any, context: DraftContext) -> Drafter[Any]:
        if config.model is not None and is_assistant(resolve(config.model)):
            from forerun.speculate.draft.heads.assistant import Assistant

            return Assistant(config, context)
        return cls(config, context)

    def __init__(self, config: MtpConfig, context: DraftContext) -> None:
        super().__init__(config, context)
        context.require_decoder(self.name)
        info = context.target.info
        self.layers = (info.num_layers,)
        self.needs = Needs(hidden=self.layers, model=True)
        self.chooser = Chooser.of(config, context)
        own, form, ids = resolve(info.name), config.form(info), output_ids(config, context)
        path = own if config.model is None else resolve(config.model)
        one, spec, weights = read_mtp(path, read_config(own).get_text_config())
        if ids is not None or form is not None:
            weights = ChangedWeights(weights, {}, {f"{spec.architecture.head.checkpoint}.weight": output_rows(own)})
        decoder = DraftDecoder(context.target, one, spec, weights, None if form is None else ON_CPU[form], ids)
        self.use(decoder, FEEDS_NORMED, ids)

    @classmethod
    def example(cls, target: Path, folder: Path) -> dict[str, Any]:
        config = quick_config(target).get_text_config()
        torch.manual_seed(0)
        save_file(mtp_example(config), folder / "model.safetensors", {"format": "pt"})
        (folder / CONFIG).write_text(json.dumps({"speculators_model_type": "mtp"}), encoding="utf8")
        return {"model": str(folder)}


def output_ids(config: MtpConfig, context: DraftContext) -> torch.Tensor | None:
    """The tokens of a reduced output layer, int64 ascending; None: all. Raises ConfigError."""
    info = context.target.info
    size = config.draft_vocab_size or (REDUCED_VOCABULARY if info.vocab_size > LARGE_VOCABULARY else None)
    if size is None:
        return None
    if size > info.vocab_size:
        raise ConfigError(f"draft_vocab_size is {size}, and {info.name} has {info.vocab_size} tokens")
    return most_common(context, size, info.vocab_size)

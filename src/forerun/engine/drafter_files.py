"""Finds the method that a drafter's files are for, so that a ``speculative_config`` may name the files alone."""

from __future__ import annotations

import re
from collections.abc import Iterable

from forerun.core.errors import ConfigError, ModelError, shown
from forerun.models.files.checkpoint import CONFIG, read_object
from forerun.models.files.inventory import here
from forerun.models.files.open import Checkpoint
from forerun.speculate.names import drafters

OURS = "forerun_head"
"""The key with the method in configs of our own heads."""
GGUF_METHODS = {"eagle3": "eagle", "dflash": "dflash", "gemma4-assistant": "mtp"}
"""Methods by the architecture in a GGUF file's metadata."""
SPECULATORS = {
    "eagle": "eagle", "eagle3": "eagle", "dflash": "dflash", "dflash2": "dflash", "dspark": "dflash", "mtp": "mtp",
}  # fmt: skip
"""Methods by ``speculators_model_type``."""
ASSISTANT = "gemma4_assistant"
"""A ``model_type`` of ``mtp``."""
MTP_LAYER = re.compile(r"(?:.*\.)?(?:mtp\.|mtp_layers\.0\.).*|(?:.*\.)?eh_proj\.weight")
FIRST_LAYER = re.compile(r"(?:.*\.)?layers\.0\..*|blk\.0\..*")


def method_of(name: str) -> str:
    """The method for the drafter called ``name``, which may be a path.

    ``draft_model`` for a whole model, and for one not on this machine yet. Raises ConfigError for unsupported drafters.
    """
    try:
        path = here(name)
    except ModelError:
        return "draft_model"
    opened = Checkpoint.at(path)
    if opened.gguf is not None:
        kind = str(opened.gguf.metadata.get("general.architecture"))
        return GGUF_METHODS.get(kind) or _by_tensors(opened.gguf.tensors)
    config = read_object(path / CONFIG)
    for key, methods in ((OURS, {method: method for method in drafters}), ("speculators_model_type", SPECULATORS)):
        if key in config:
            if config[key] not in methods:
                raise ConfigError(f"{name} is a drafter of kind {shown(config[key])}; there are {', '.join(methods)}")
            return methods[config[key]]
    if config.get("model_type") == ASSISTANT:
        return "mtp"
    return _by_tensors(opened.files(packed=True).tensors)


def _by_tensors(names: Iterable[str]) -> str:
    names = {name.removeprefix("model.") for name in names}
    if {"fc.weight", "hidden_norm.weight"} <= names:
        return "dflash"
    if "fc.weight" in names and any(name.startswith(("midlayer.", "layers.0.")) for name in names):
        return "eagle"
    whole_model = any(FIRST_LAYER.fullmatch(name) and not MTP_LAYER.fullmatch(name) for name in names)
    return "mtp" if not whole_model and any(map(MTP_LAYER.fullmatch, names)) else "draft_model"


def brings_mtp(model: str) -> bool:
    """Whether a model on this machine has its own layer for multi-token prediction, of a kind that ``mtp`` runs."""
    try:
        opened = Checkpoint.at(here(model))
        if not any(map(MTP_LAYER.fullmatch, opened.files(packed=True).tensors)):
            return False
        config = opened.config.get_text_config()
    except ModelError:  # loading it will report the error
        return False
    from forerun.speculate.draft.heads.mtp import has_layer

    return has_layer(opened, config)

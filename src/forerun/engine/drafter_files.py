"""Which method a drafter's files are for, so that a ``speculative_config`` may name the files alone."""

from __future__ import annotations

import re
from collections.abc import Iterable

from forerun.core.errors import ConfigError, ModelError, shown
from forerun.models.checkpoint import CONFIG, read_object
from forerun.models.gguf import is_gguf, open_gguf
from forerun.models.inventory import here
from forerun.models.open import open_files, quick_config
from forerun.speculate.names import drafters

OURS = "forerun_head"
"""In configs of heads that we have saved."""
GGUF_METHODS = {"eagle3": "eagle", "dflash": "dflash", "gemma4-assistant": "mtp"}
"""By the architecture in a GGUF file's metadata."""
SPECULATORS = {
    "eagle": "eagle", "eagle3": "eagle", "dflash": "dflash", "dflash2": "dflash", "dspark": "dflash", "mtp": "mtp",
}  # fmt: skip
"""By ``speculators_model_type``."""
ASSISTANT = "gemma4_assistant"
"""As ``model_type``."""
NEXTN = re.compile(r"(?:.*\.)?(?:mtp\.|mtp_layers\.0\.).*|(?:.*\.)?eh_proj\.weight")
FIRST = re.compile(r"(?:.*\.)?layers\.0\..*|blk\.0\..*")


def method_of(name: str) -> str:
    """The method that reads the drafter of a name or in a path; ``draft_model`` for a whole model, and for what is not
    on this machine yet. Raises ConfigError for a drafter of a kind that is not served."""
    try:
        path = here(name)
    except ModelError:
        return "draft_model"
    if is_gguf(path):
        file = open_gguf(path)
        return GGUF_METHODS.get(str(file.metadata.get("general.architecture"))) or _by_tensors(file.tensors)
    config = read_object(path / CONFIG)
    for key, methods in ((OURS, {method: method for method in drafters}), ("speculators_model_type", SPECULATORS)):
        if key in config:
            if config[key] not in methods:
                served = ", ".join(methods)
                raise ConfigError(f"{name} is a drafter of kind {shown(config[key])}; there are {served}")
            return methods[config[key]]
    if config.get("model_type") == ASSISTANT:
        return "mtp"
    return _by_tensors(open_files(path, packed=True).tensors)


def _by_tensors(names: Iterable[str]) -> str:
    bare = {name.removeprefix("model.") for name in names}
    if {"fc.weight", "hidden_norm.weight"} <= bare:
        return "dflash"
    if "fc.weight" in bare and any(name.startswith(("midlayer.", "layers.0.")) for name in bare):
        return "eagle"
    own = any(FIRST.fullmatch(name) and not NEXTN.fullmatch(name) for name in bare)
    return "mtp" if not own and any(map(NEXTN.fullmatch, bare)) else "draft_model"


def brings_mtp(model: str) -> bool:
    """Whether a model on this machine brings a layer for multi-token prediction that ``mtp`` runs in its own files."""
    try:
        path = here(model)
        if not any(map(NEXTN.fullmatch, open_files(path, packed=True).tensors)):
            return False
        config = quick_config(path).get_text_config()
    except ModelError:  # whoever loads it says so
        return False
    from forerun.speculate.draft.heads.mtp import within

    return within(path, config)

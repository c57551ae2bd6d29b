"""Finished models on disk: a folder that transformers can load, and the record of how it was made."""

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from forerun.core.errors import ModelError
from forerun.models import sanity
from forerun.models.load import read_config
from forerun.models.modules import read_module
from forerun.models.tokenizer import load_tokenizer

RECORD = "training.json"


def save_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, record: Mapping[str, Any]
) -> Path:
    """Writes weights (safetensors, bfloat16), configuration, tokenizer and `training.json` to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    model = deepcopy(model)
    nn.Module.to(model, torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return folder


@torch.no_grad()
def round_weights(model: nn.Module) -> None:
    """Rounds weights to bfloat16 in place, so that figures measured next are those of the saved model."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))


def load_target(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The frozen target, bfloat16, and its tokenizer, which must have an EOS token to separate documents. Raises
    ModelError."""
    config = read_config(folder)
    sanity.require_decoder(config, folder, "forerun train")
    target, tokenizer = read_module(folder, config, torch.bfloat16, attention=None), load_tokenizer(folder)
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer in {folder} has no EOS token to separate documents with")
    return target.eval().requires_grad_(False), tokenizer

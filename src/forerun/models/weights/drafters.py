"""The weights of drafters' layers, out of a target's files or others."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch

from forerun.core.errors import ModelError
from forerun.models.architectures.drafters import MIMO, MTP_MIX, gguf_names, mtp_names, mtp_spec
from forerun.models.architectures.spec import Spec
from forerun.models.files.checkpoint import Safetensors
from forerun.models.files.gguf import GGUFFile
from forerun.models.files.open import Checkpoint
from forerun.models.formats.base import Rows
from forerun.models.formats.blocks import Blocks
from forerun.models.weights.transform import ChangedWeights, CheckpointWeights, GGUFWeights, Weights

HEADS = ("lm_head.weight", "output.weight", "embed_tokens.weight", "token_embd.weight")
"""How the names of output layers end; the last two are tied."""


def read_mtp(opened: Checkpoint, config: Any, most: int = 1) -> list[tuple[Any, Spec, Weights]]:
    """The first modules for multi-token prediction in a model's files, at most this many, for a target of ``config``:
    their configs, specs and weights, which are read later. Raises ModelError if there is none that is supported."""
    files, layers = opened.files(packed=True), config.num_hidden_layers
    found = [*takewhile(bool, (mtp_names(files.tensors, layers, module) for module in range(most)))]
    if not found:
        raise ModelError(
            f"{files.path} has no layer for multi-token prediction (mtp.*, model.layers.{layers}.eh_proj, "
            f"model.mtp_layers.0.* or blk.{layers}.nextn.*): name a file that has one as 'model'"
        )
    try:
        return [_module(files, config, names) for names in found]
    except ModelError as error:
        raise ModelError(f"{files.path}: its layer for multi-token prediction cannot be used: {error}") from error


def _module(files: Safetensors | GGUFFile, config: Any, names: Mapping[str, str]) -> tuple[Any, Spec, Weights]:
    one, spec = mtp_spec(config, {*names.values()})
    if isinstance(files, Safetensors):
        weights: Weights = CheckpointWeights(files, one, spec, names)
    else:
        weights = GGUFWeights(_layer_alone(files, spec, names), one, spec)
    if any(MIMO in name for name in names):
        swapped = {f"{MTP_MIX.checkpoint}.weight": lambda weight: torch.cat(weight[:].chunk(2, dim=1)[::-1], dim=1)}
        weights = ChangedWeights(weights, swapped)
    return one, spec, weights


def _layer_alone(file: GGUFFile, spec: Spec, names: Mapping[str, str]) -> GGUFFile:
    """A GGUF file of these tensors alone."""
    result, inside = copy.copy(file), gguf_names(spec.architecture)
    tensors: dict[str, Any] = {}
    for name, own in names.items():
        stem, _, kind = own.rpartition(".")
        own = f"{inside[stem]}.{kind}" if stem in inside else own
        tensors[own] = replace(file.tensors[name], name=own)
    result.tensors = tensors
    return result


def output_rows(opened: Checkpoint) -> Rows:
    """The output layer of a checkpoint. Raises ModelError if it has none."""
    files = opened.files()
    for end in HEADS:
        for name in files.tensors:
            if name.endswith(end) and "mtp" not in name and not any(part.isdecimal() for part in name.split(".")):
                if isinstance(files, GGUFFile):
                    tensor = files.tensors[name]
                    return Blocks(tensor.kind.name.lower(), files.rows(name), tensor.shape[1])
                return files.values(name)
    raise ModelError(f"{files.path} has no output layer")

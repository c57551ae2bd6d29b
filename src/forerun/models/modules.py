"""Checkpoints as modules of transformers', for the transformers path, training and comparisons. Importing those takes
as long as torch itself, so that ``load`` does so only for a model that needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.utils import logging as hf_logging

from forerun.core.errors import ModelError
from forerun.models import checkpoint, sanity
from forerun.models import lora as adapter
from forerun.models.architectures.families import ARCHITECTURES
from forerun.models.architectures.spec import TILED_HEADS
from forerun.models.gguf import GGUFFile, is_gguf, open_gguf
from forerun.models.hf import NAME
from forerun.models.hf import HFModel as HFModel
from forerun.models.open import quiet
from forerun.models.transform import GGUFWeights


def read_module(
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    *,
    attention: str | None = NAME,
    lora: Sequence[str] | str | None = None,
) -> PreTrainedModel:
    """The checkpoint as a module of transformers', every weight from its safetensors files, or those of a GGUF file,
    dequantized; with LoRA adapters merged. Raises ModelError."""
    adapters = adapter.read(lora)
    read = _gguf_module if is_gguf(folder) else _checkpoint_module
    module = read(folder, config, dtype, attention)
    adapter.merge_into(module, adapters, str(folder))
    return module


def _checkpoint_module(folder: Path, config: Any, dtype: torch.dtype, attention: str | None) -> PreTrainedModel:
    path = folder / checkpoint.CONFIG
    packed = getattr(config, "quantization_config", None)
    if packed is not None:
        raise ModelError(
            f"{folder} holds weights quantized with {sanity.scheme(packed)}, which only the native path reads: that "
            "is not used here: take the checkpoint they were made from"
        )
    tensors = checkpoint.read_headers(checkpoint.weight_files(folder))
    sanity.check_fit(config, tensors, path)
    hf_logging.disable_progress_bar()
    kind: Any = AutoModelForSeq2SeqLM if sanity.has_encoder(config) else AutoModelForCausalLM
    read = kind.from_pretrained
    with checkpoint.library(f"{folder} cannot be loaded"), quiet():
        module, info = read(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    for name, result, requested in sorted(info["mismatched_keys"]):
        raise ModelError(f"{folder}: {name} has shape {list(result)}; its config asks for {list(requested)}")
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(f"{folder} lacks {len(missing)} weights, {missing[0]} among them")
    extra = sanity.misplaced(info["unexpected_keys"], (name for name, _ in module.named_parameters()), config)
    if extra:
        raise ModelError(f"{folder} has {len(extra)} weights that its config leaves out, {extra[0]} among them")
    return module


def _gguf_module(path: Path, config: Any, dtype: torch.dtype, attention: str | None) -> PreTrainedModel:
    weights = read_weights(open_gguf(path), config, dtype)
    with checkpoint.library(f"{path} cannot be loaded"), quiet():
        module: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        left = module.load_state_dict(weights, strict=False)
    lacking = [*left.unexpected_keys, *(name for name in left.missing_keys if name != "lm_head.weight")]  # if tied
    if lacking:
        raise ModelError(f"{path}: transformers calls {len(lacking)} of its weights otherwise, {lacking[0]} among "
                         "them: only the native path runs it")  # fmt: skip
    return module.eval()


def read_weights(file: GGUFFile, config: Any, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
    """Every weight by its name in a checkpoint, dequantized. Raises ModelError."""
    if getattr(config, TILED_HEADS, False) or ARCHITECTURES[config.model_type].latent is not None:
        raise ModelError(f"{file.path} has its heads in an order of its own, which only the native path computes with")
    weights = GGUFWeights(file, config)
    return {name: weights.values(name)[:].to(dtype) for name in (*weights.tensors, *weights.listed)}

"""PEFT's LoRA adapters, merged into a model's weights while these are loaded: W + weight * scale * B A, where scale is
alpha / r, or alpha / sqrt(r) for rsLoRA (arXiv 2106.09685, 2312.03732)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from forerun.core.config import POSITIVE, Within
from forerun.core.errors import ConfigError, ModelError, shown
from forerun.core.folders import expanded
from forerun.models import checkpoint
from forerun.models.checkpoint import ADAPTER

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
PARTS = re.compile(r"(.+)\.lora_([AB])\.weight")
KNOWN_KEYS = frozenset(
    {
        "peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision",
        "inference_mode", "runtime_config", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "bias",
        "lora_dropout", "init_lora_weights", "target_modules", "exclude_modules", "layers_to_transform",
        "layers_pattern", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
        "qalora_group_size",
    }
)  # fmt: skip
"""Keys of ``adapter_config.json`` that are read here, or that only say how the adapter was trained. Any other key with
a value (``use_dora``, ``modules_to_save``) asks for what is not merged."""
PLAIN_INITS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` that leave the base weights as they are."""


@dataclass(frozen=True)
class Pair:
    """The update scale * b a of one layer: b [outputs, r], a [r, inputs], float32."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    def rows(self, which: slice | torch.Tensor) -> torch.Tensor:
        return (self.b[which] @ self.a).mul_(self.scale)


@dataclass(frozen=True)
class Adapter:
    folder: Path
    weight: float
    pairs: Mapping[str, Pair]
    """By layers' names in a checkpoint."""


def parse(given: Sequence[str | Path] | str | Path | None) -> tuple[tuple[Path, float], ...]:
    """Folders and weights of one or several ``FOLDER`` or ``FOLDER=WEIGHT``. Raises ConfigError."""
    result = []
    for item in [given] if isinstance(given, (str, Path)) else given or []:
        folder, equals, weight = str(item).rpartition("=")
        if not equals or Path(str(item)).is_dir():
            folder, weight = str(item), "1"
        try:
            number = float(weight)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError(f"lora is FOLDER or FOLDER=WEIGHT, and {shown(weight)} is no weight")
        result.append((expanded(folder), number))
    return tuple(result)


def read(given: Sequence[str | Path] | str | Path | None) -> list[Adapter]:
    """The adapters that ``parse`` names. Raises ConfigError, and ModelError for a folder without an adapter or with one
    that cannot be merged."""
    return [_read(folder, weight) for folder, weight in parse(given)]


def _read(folder: Path, weight: float) -> Adapter:
    if not (folder / ADAPTER).is_file():
        raise ModelError(f"{folder} is no LoRA adapter: it has no {ADAPTER}")
    config = checkpoint.read_object(folder / ADAPTER)
    _check(folder, config)
    if not (folder / WEIGHTS).is_file():
        raise ModelError(f"{folder} has no {WEIGHTS}: adapters are read from safetensors")
    with checkpoint.library(f"{folder / WEIGHTS} cannot be read"):
        tensors = load_file(folder / WEIGHTS)
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = PARTS.fullmatch(name.removeprefix(PREFIX))
        if match is None or tensor.dim() != 2 or not tensor.is_floating_point():
            raise ModelError(f"{folder} holds {name} {[*tensor.shape]}, which is no part of a LoRA of linear layers")
        sides.setdefault(match[1], {})[match[2]] = tensor.float()
    if not sides:
        raise ModelError(f"{folder / WEIGHTS} is empty")
    pairs = {}
    for name, parts in sides.items():
        if len(parts) < 2 or parts["A"].shape[0] != parts["B"].shape[1]:
            raise ModelError(f"{folder}: lora_A and lora_B of {name} do not belong together")
        pairs[name] = Pair(parts["A"], parts["B"], _scale(folder, config, name, len(parts["A"])))
    return Adapter(folder, weight, pairs)


def _check(folder: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{folder} holds an adapter of type {shown(config.get('peft_type'))}; only LORA is merged")
    for key, value in config.items():
        if key not in KNOWN_KEYS and value not in (None, False, "", [], {}):
            raise ModelError(f"{folder} asks for {key} ({shown(value)}), which forerun does not merge")
    if config.get("bias", "none") != "none":
        raise ModelError(f"{folder} holds biases (bias is {shown(config['bias'])}), which forerun does not merge")
    if (init := config.get("init_lora_weights")) not in PLAIN_INITS:
        raise ModelError(
            f"{folder} was initialised with {shown(init)}, which may change the base weights: convert it to plain LoRA"
        )
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(key) or {}, Mapping):
            raise ModelError(f"{folder / ADAPTER} cannot be used: {key} must be an object, not {shown(config[key])}")


def _for_layer(folder: Path, config: Mapping[str, Any], key: str, patterns: str, name: str) -> Any:
    """The value of ``key`` for a layer: that of the first of ``patterns`` that matches its name, as PEFT matches them,
    or else the common one."""
    for pattern, value in (config.get(patterns) or {}).items():
        with checkpoint.library(f"{folder / ADAPTER} cannot be used: {shown(pattern)} is no regular expression"):
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
    return config.get(key)


def _scale(folder: Path, config: Mapping[str, Any], name: str, actual: int) -> float:
    """The scale of a layer's update, whose weights are of rank ``actual``."""
    rank = _for_layer(folder, config, "r", "rank_pattern", name)
    alpha = _for_layer(folder, config, "lora_alpha", "alpha_pattern", name)
    if not Within().permits(alpha):
        raise ModelError(f"{folder / ADAPTER} cannot be used: lora_alpha must be a number, not {shown(alpha)}")
    if not POSITIVE.permits(rank) or rank != actual:
        raise ModelError(
            f"{folder}: the rank of {name} is {shown(rank)} by its {ADAPTER} and {actual} by its weights; both must be "
            "the same, and at least 1"
        )
    scale = float(alpha) / (math.sqrt(actual) if config.get("use_rslora") else actual)
    if abs(scale) > torch.finfo(torch.float32).max:
        raise ModelError(f"{folder / ADAPTER} cannot be used: lora_alpha {shown(alpha)} is beyond 32-bit numbers")
    return scale


def check_fit(adapter: Adapter, layer: str, pair: Pair, shape: torch.Size | None, model: str) -> None:
    """Raise ModelError for a layer that ``model`` does not have, or has in another shape."""
    if shape is None:
        raise ModelError(f"{adapter.folder} adapts {layer}, which {model} does not have: it is for another model")
    asked = [len(pair.b), pair.a.shape[1]]
    if asked != [*shape]:
        raise ModelError(
            f"{adapter.folder} adapts {layer} {asked}, which is {[*shape]} in {model}: it is for another model"
        )


@torch.no_grad()
def merge_into(module: nn.Module, adapters: Sequence[Adapter], model: str) -> None:
    """Merge adapters into transformers' module. Raises ModelError."""
    layers = dict(module.named_modules())
    for adapter in adapters:
        for name, pair in adapter.pairs.items():
            layer = layers.get(name)
            weight = layer.weight if isinstance(layer, nn.Linear) else None
            check_fit(adapter, name, pair, None if weight is None else weight.shape, model)
            assert weight is not None
            weight.copy_(weight.float().add_(pair.rows(slice(None)), alpha=adapter.weight))

"""PEFT's LoRA adapters, merged into a model's weights while these are loaded: W + weight * scale * B A, where scale is
alpha / r, or alpha / sqrt(r) for rsLoRA (arXiv 2106.09685, 2312.03732). DoRA (arXiv 2402.09353) then gives each row a
norm of its own. Layers of ``modules_to_save`` replace the model's."""

from __future__ import annotations

import logging
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
from forerun.models.files import checkpoint
from forerun.models.files.checkpoint import ADAPTER

log = logging.getLogger("forerun")
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
PARTS = re.compile(r"(.+)\.lora_(A|B|magnitude_vector)(?:\.weight)?")
WHOLE = re.compile(r"[\w.]+\.(?:weight|bias)")
SENSES = re.compile(r"(?:^|\.)(?:visual|vision_\w+|audio_\w+|embed_vision|embed_audio|multi_modal_projector)\.")
"""Layers that read pictures and sound, which no model here has."""
KNOWN_KEYS = frozenset(
    {
        "peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision",
        "inference_mode", "runtime_config", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "bias",
        "lora_dropout", "init_lora_weights", "target_modules", "exclude_modules", "layers_to_transform",
        "layers_pattern", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
        "qalora_group_size", "use_dora", "modules_to_save",
    }
)  # fmt: skip
"""Keys of ``adapter_config.json`` that are read here, or that only say how the adapter was trained. Any other key with
a value asks for what is not merged."""
PLAIN_INITS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` that leave the base weights as they are."""


@dataclass(frozen=True)
class Pair:
    """The update scale * b a of one layer: b [outputs, r], a [r, inputs], float32. With DoRA, the norms of its rows."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    magnitude: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size([len(self.b), self.a.shape[1]])

    def merge(self, weight: torch.Tensor, which: slice | torch.Tensor, factor: float) -> torch.Tensor:
        """These rows of the layer's ``weight``, float32, with ``factor`` of the update."""
        update = (self.b[which] @ self.a).mul_(self.scale)
        if self.magnitude is None:
            return weight.add_(update, alpha=factor)
        update += weight
        update *= (self.magnitude[which] / torch.linalg.norm(update, dim=1))[:, None]
        return weight.lerp_(update, factor)


@dataclass(frozen=True)
class Adapter:
    folder: Path
    weight: float
    pairs: Mapping[str, Pair]
    """By layers' names in a text model's checkpoint, whichever class the adapter was made on."""
    whole: Mapping[str, torch.Tensor]
    """Weights that replace the model's, by their names."""


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
        raise ModelError(f"{folder} is not a LoRA adapter: it has no {ADAPTER}")
    config = checkpoint.read_object(folder / ADAPTER)
    _check(folder, config)
    if not (folder / WEIGHTS).is_file():
        raise ModelError(f"{folder} has no {WEIGHTS}: adapters are read from safetensors")
    with checkpoint.library(f"{folder / WEIGHTS} cannot be read"):
        tensors = load_file(folder / WEIGHTS)
    sides: dict[str, dict[str, torch.Tensor]] = {}
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        own = text_name(name.removeprefix(PREFIX))
        match, floats = PARTS.fullmatch(own), tensor.is_floating_point()
        if SENSES.search(own):
            log.info("%s also adapts what reads pictures or sound: that part is left out", folder)
        elif floats and match and tensor.dim() == (1 if match[2] == "magnitude_vector" else 2):
            sides.setdefault(match[1], {})[match[2]] = tensor.float()
        elif floats and tensor.dim() and "lora_" not in own and WHOLE.fullmatch(own):
            whole[own.replace(".base_layer.", ".")] = tensor
        else:
            raise ModelError(f"{folder} holds {name} {[*tensor.shape]}, which is no part of a LoRA of linear layers")
    if not sides and not whole:
        raise ModelError(f"{folder / WEIGHTS} is empty")
    if whole and weight != 1:
        raise ConfigError(f"{folder} replaces whole weights ({next(iter(whole))}): its weight is 1, not {weight:g}")
    pairs = {}
    for name, parts in sides.items():
        magnitude = parts.get("magnitude_vector")
        if len({*parts} & {"A", "B"}) < 2 or len(parts["A"]) != parts["B"].shape[1]:
            raise ModelError(f"{folder}: lora_A and lora_B of {name} do not belong together")
        if bool(config.get("use_dora")) != (magnitude is not None and len(magnitude) == len(parts["B"])):
            raise ModelError(f"{folder}: {name} has no norms of DoRA that belong to its use_dora")
        pairs[name] = Pair(parts["A"], parts["B"], _scale(folder, config, name, len(parts["A"])), magnitude)
    return Adapter(folder, weight, pairs, whole)


def text_name(name: str) -> str:
    """A layer's name in a class that reads text alone, from that in any class."""
    name = re.sub(r"(^|\.)(?:language_model|backbone)\.", r"\1", name)
    return re.sub(r"^(?:model\.)+", "model.", name if re.match(r"(?:model|lm_head)\b", name) else f"model.{name}")


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
    """A layer's ``key``: that of the first of ``patterns`` to match its name, as PEFT does it, or the common one."""
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


def check_fit(adapter: Adapter, layer: str, asked: Sequence[int], shape: Sequence[int] | None, model: str) -> None:
    """Raise ModelError for a layer that ``model`` does not have, or has in another shape."""
    if shape is None:
        raise ModelError(f"{adapter.folder} adapts {layer}, which {model} does not have: it is for another model")
    if [*asked] != [*shape]:
        raise ModelError(
            f"{adapter.folder} adapts {layer} {[*asked]}, which is {[*shape]} in {model}: it is for another model"
        )


def vocabulary(adapters: Sequence[Adapter], ends: tuple[str, str], before: int) -> int:
    """How many tokens a model has with adapters, of which some replace its embedding and its output layer (``ends``).
    Raises ModelError."""
    found = before
    for adapter in adapters:
        counts = {len(adapter.whole[name]) if name in adapter.whole else found for name in ends}
        if len(counts) > 1:
            raise ModelError(f"{adapter.folder} adds tokens, so it needs both {' and '.join(ends)}, of one size")
        found = counts.pop()
    return found


def tokenizer(given: Sequence[str | Path] | str | Path | None) -> Path | None:
    """The folder of an adapter that has an embedding of its own, and a tokenizer for it."""
    for folder, _ in parse(given):
        both = (folder / WEIGHTS).is_file() and (folder / "tokenizer_config.json").is_file()
        names = checkpoint.read_headers([folder / WEIGHTS]) if both else ()
        if any(name.endswith("embed_tokens.weight") for name in names):
            return folder
    return None


@torch.no_grad()
def merge_into(module: nn.Module, adapters: Sequence[Adapter], model: str) -> None:
    """Merge adapters into transformers' module. Raises ModelError."""
    if not adapters:
        return
    layers = {text_name(name): layer for name, layer in module.named_modules()}
    outer: Any = module
    ends = [each for each in (outer.get_input_embeddings(), outer.get_output_embeddings()) if each is not None]
    names = [f"{name}.weight" for name, layer in layers.items() if layer in ends]
    outer.config.get_text_config().vocab_size = vocabulary(adapters, (names[0], names[-1]), len(ends[0].weight))
    for adapter in adapters:
        for name, tensor in adapter.whole.items():
            stem, _, kind = name.rpartition(".")
            before = getattr(layers.get(stem), kind, None)
            shape = None if before is None else before.shape
            shape = [len(tensor), *ends[0].weight.shape[1:]] if name in names else shape
            check_fit(adapter, name, tensor.shape, shape, model)
            assert before is not None
            setattr(layers[stem], kind, nn.Parameter(tensor.to(before), requires_grad=False))  # no longer tied
    for adapter in adapters:
        for name, pair in adapter.pairs.items():
            layer = layers.get(name)
            weight = layer.weight if isinstance(layer, nn.Linear) else None
            check_fit(adapter, name, pair.shape, None if weight is None else weight.shape, model)
            assert weight is not None
            weight.copy_(pair.merge(weight.to(torch.float32, copy=True), slice(None), adapter.weight))

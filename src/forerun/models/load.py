"""From a path or hub id to a running model. Only safetensors are read; remote code never runs."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, logging
from transformers.utils import logging as hf_logging

from forerun import pretrained
from forerun.core.errors import ConfigError, ModelError
from forerun.core.tiles import ENOUGH
from forerun.models.base import Model
from forerun.models.fetch import SOURCES, fetched
from forerun.models.hf import NAME, HFModel
from forerun.models.kinds import UNQUANTIZED
from forerun.models.native import NativeModel, applies

DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
BUNDLED = "forerun:"
PATHS = ("auto", "native", "hf")


def resolve(path_or_id: str | Path) -> Path:
    """The checkpoint's folder: a local one, a bundled one (``forerun:target``), a fetched one (``smollm2``; a folder of
    that name is ``./smollm2``), or a hub download (config, tokenizer and safetensors only). Raises ModelError."""
    text = str(path_or_id)
    if text.startswith(BUNDLED):
        return pretrained.path(text.removeprefix(BUNDLED))
    if text in SOURCES:
        return fetched(text)
    folder = Path(text).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} has no config.json: not a Hugging Face checkpoint")
        return folder
    if folder.exists() or text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise ModelError(f"no checkpoint folder at {text}")
    try:
        return Path(snapshot_download(text, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(f"no folder {text!r} here, and the hub has no such model or cannot be reached: "
                         f"{str(error).splitlines()[0]}") from error  # fmt: skip


def read_config(folder: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise ModelError(f"{folder}/config.json cannot be used: {str(error).splitlines()[0]}") from error


def parse_dtype(dtype: str | torch.dtype | None, config: Any) -> torch.dtype:
    """``auto`` is the checkpoint's own dtype (float32 where it names none)."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype in (None, "auto"):
        found = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
        return found if isinstance(found, torch.dtype) else torch.float32
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}: choose auto, float32, bfloat16 or float16")
    return DTYPES[dtype]


def eos_ids(folder: Path, config: Any) -> frozenset[int]:
    """Every id that ends a text: the generation config's, else the model config's."""
    found = None
    if (folder / "generation_config.json").is_file():
        try:
            found = GenerationConfig.from_pretrained(folder).eos_token_id
        except (OSError, ValueError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise ModelError(f"{folder}/generation_config.json cannot be used: {reason}") from error
    if found is None:
        found = getattr(config.get_text_config(), "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])


def _check_rope(config: Any, max_model_len: int | None) -> None:
    """Refuse frequencies that depend on the longest position in the call, where they could differ between calls."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = {rope.get("rope_type", "default")} if "rope_type" in rope or "type" in rope else set()
    for value in rope.values():
        if isinstance(value, dict):
            kinds.add(value.get("rope_type", "default"))
    bad = kinds & {"dynamic", "longrope"}
    if not bad:
        return
    original: int = (
        rope.get("original_max_position_embeddings")
        or getattr(text, "original_max_position_embeddings", None)
        or getattr(text, "max_position_embeddings", None)
        or 0
    )
    if max_model_len is None or max_model_len > original:
        raise ModelError(
            f"rope type {bad.pop()!r} changes its frequencies with the length of the text; "
            f"set max_model_len to at most {original} to use this model"
        )


def _read_module(folder: Path, config: Any, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    if not list(folder.glob("*.safetensors")):
        others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        hint = f" (it has {', '.join(others[:3])}; pickled weights are not loaded, convert them)" if others else ""
        raise ModelError(f"{folder} has no safetensors weights{hint}")
    hf_logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    read: Any = AutoModelForCausalLM.from_pretrained  # its annotation forgets ``output_loading_info``
    try:
        module, info = read(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=NAME,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except SafetensorError as error:
        raise ModelError(f"{folder}: a safetensors file is truncated or damaged: {error}") from error
    except (OSError, ValueError, RuntimeError, KeyError, AttributeError) as error:
        raise ModelError(f"{folder} cannot be loaded: {str(error).splitlines()[0]}") from error
    finally:
        logging.set_verbosity(verbosity)
    for name, found, wanted in sorted(info["mismatched_keys"]):
        raise ModelError(f"{folder}: {name} has shape {list(found)}; its config asks for {list(wanted)}")
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(f"{folder} lacks {len(missing)} weights, {missing[0]} among them")
    return module.to(device)


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def parse_device(device: str | torch.device | None) -> torch.device:
    """None: the GPU if there is one. Raises ConfigError for a device that is unknown or not here."""
    if device is None:
        return default_device()
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ConfigError(f"device {str(device)!r} cannot be used: {str(error).splitlines()[0]}") from error


def load_model(
    path_or_id: str | Path,
    *,
    dtype: str | torch.dtype | None = "auto",
    device: str | torch.device | None = None,
    invariant: bool | None = False,
    model_path: str = "auto",
    weights: str = "auto",
    quantization: str | None = None,
    max_model_len: int | None = None,
) -> Model:
    """Load a decoder.

    ``invariant`` True asks for logits whose bits do not depend on how rows are batched; None does so on CPU, unless
    only single rows keep their bits, which it warns of; False does not pad. ``model_path``
    is ``native`` (the lean Llama-family path), ``hf`` or ``auto``; ``weights`` is ``streamed``, ``packed``,
    ``plain`` or ``auto``; ``quantization`` is a kind of ``quantize.py``, ``none`` or None.
    """
    if quantization == UNQUANTIZED:
        quantization = None
    if model_path not in PATHS:
        raise ConfigError(f"unknown model_path {model_path!r}: choose one of {', '.join(PATHS)}")
    folder = resolve(path_or_id)
    config = read_config(folder)
    _check_rope(config, max_model_len)
    where = parse_device(device)
    reason = applies(config)
    if model_path == "native" and reason is not None:
        raise ConfigError(f"the native path does not run {folder}: {reason}")
    native = model_path != "hf" and reason is None
    if not native and quantization is not None:
        raise ConfigError(
            f"quantization {quantization!r} of {path_or_id} needs the native path: {reason or 'model_path is hf'}"
        )
    wanted = invariant if invariant is not None else where.type == "cpu"

    def build(padded: bool) -> Model:
        module = _read_module(folder, config, parse_dtype(dtype, config), where)
        ids = eos_ids(folder, config)
        name = str(path_or_id)
        if native:
            return NativeModel(
                module, name=name, eos_ids=ids, invariant=padded, weights=weights, quantization=quantization
            )
        return HFModel(module, name=name, eos_ids=ids, invariant=padded, weights=weights)

    model = build(wanted)
    if invariant is None and model.tiles is not None and model.tiles.together < ENOUGH:
        warnings.warn(
            f"invariant mode is off: in {model.info.architecture} ({model.info.path}) at most {model.tiles.together} "
            "rows keep their bits side by side, so that drafts could not pay; invariant=True runs it so",
            RuntimeWarning,
            stacklevel=2,
        )
        del model
        model = build(False)
    return model

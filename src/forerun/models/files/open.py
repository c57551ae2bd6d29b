"""Stage one, open: from a name to a model's files, its config, and its tensors by name, memory-mapped.

A model is a folder with safetensors (``checkpoint.py``) or a GGUF file (``gguf.py``, ``gguf_config.py``). It may be
bundled, fetched, or on a hub. ``sanity.py`` checks a config before anything is built. Remote code never runs.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from forerun import pretrained
from forerun.core.errors import ConfigError, ModelError
from forerun.core.folders import Record, expanded
from forerun.models.architectures import gguf_config
from forerun.models.architectures.families import ARCHITECTURES
from forerun.models.architectures.spec import is_sized, refusal
from forerun.models.files import checkpoint, gguf, hub
from forerun.models.files.fetch import KNOWN, fetched
from forerun.models.weights import lora as adapter
from forerun.models.weights import sanity

BUNDLED = "forerun:"
Files = checkpoint.Safetensors | gguf.GGUFFile
"""Open files: ``tensors`` are descriptions by name, ``values(name)`` is one tensor."""
SAMPLES, SAMPLE_BYTES = 64, 4096
"""How much of each file a fingerprint is made of."""


def resolve(path_or_id: str | Path, *, revision: str | None = None, download_dir: str | None = None) -> Path:
    """A model's folder or GGUF file, by what ``--model`` takes.

    That is a local folder or GGUF file (a folder with a GGUF file and no config stands for the file), a bundled model
    (``forerun:target``), a fetched one (``smollm2``; a folder of that name is ``./smollm2``), or one of a hub
    (``hf:OWNER/NAME[:QUANTIZATION or FILE]``, or a repository's bare id), which is downloaded. Raises ModelError, and
    ConfigError where ``revision`` or ``download_dir`` is given for a model that is not the hub's.
    """
    text = str(path_or_id)
    if "\0" in text:
        raise ModelError(f"{text!r} is not a folder name")
    if text.startswith(hub.PREFIX):
        return checkpoint.find(hub.download(hub.parse(text), revision, download_dir))
    path = expanded(text)
    local = text.startswith(BUNDLED) or text in KNOWN or gguf.is_gguf(path) or path.is_dir()
    if local and (revision or download_dir):
        raise ConfigError(f"revision and download_dir apply to hub models, but {text} is local: remove them")
    if text.startswith(BUNDLED):
        return pretrained.path(text.removeprefix(BUNDLED))
    if text in KNOWN:
        return fetched(text)
    if path.is_dir() or (path.is_file() and gguf.is_gguf(path)):
        return checkpoint.find(path)
    if gguf.is_gguf(path) or path.exists() or text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise ModelError(f"no {'GGUF file' if gguf.is_gguf(path) else 'checkpoint folder'} at {text}")
    try:
        return checkpoint.find(hub.download(hub.ModelSource(text, None), revision, download_dir))
    except ModelError as error:
        similar = difflib.get_close_matches(text, KNOWN, n=1)
        hint = f" (did you mean {similar[0]}?)" if similar else ""
        raise ModelError(f"no folder {text!r} here{hint}, and {error}") from error


def open_files(path: Path, *, packed: bool = False) -> Files:
    """Open a GGUF file, or a folder, whose weights must be floating-point numbers unless ``packed``. Raises
    ModelError."""
    return gguf.open_gguf(path) if gguf.is_gguf(path) else checkpoint.Safetensors(path, packed=packed)


def weight_sizes(folder: Path) -> tuple[int, int]:
    """Bytes and number of a model's weights. Raises ModelError."""
    tensors = open_files(folder, packed=True).tensors.values()
    return sum(tensor.nbytes for tensor in tensors), sum(tensor.numel for tensor in tensors)


def files(folder: Path, lora: Sequence[str] | str | None = None) -> list[Path]:
    """The files that hold a model's weights, those of its adapters included. Raises ModelError if there are none."""
    result = gguf.shards_of(folder) if folder.is_file() else sorted(folder.glob("*.safetensors"))
    if not result:
        raise ModelError(f"{folder} has no safetensors weights")
    return result + [
        folder / name for folder, _ in adapter.parse(lora) for name in (checkpoint.ADAPTER, adapter.WEIGHTS)
    ]


def fingerprint(folder: Path, lora: Sequence[str] | str | None = None, file_name: str | None = None) -> str:
    """A hash of a model's weights: 16 hexadecimal digits, made of the size of each file and of samples of it. Adapters
    and their weights count too.

    Training changes every matrix, so it changes the fingerprint; so does another dtype, and another name of a file.
    ``file_name``: what a renamed GGUF file was called. At most 256 KiB are read per file. Raises ModelError if there
    are no weights or they cannot be read.
    """
    paths, weights = tuple(files(folder, lora)), [weight for _, weight in adapter.parse(lora)]
    try:
        return _fingerprint(paths, _versions(paths), f"{weights}\n" if weights else "", file_name)
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error.strerror}") from error


def _versions(paths: Iterable[Path]) -> tuple[tuple[int, int], ...]:
    """When each file was written, and its size: what was read of them holds while these stay. Raises OSError."""
    return tuple((result.st_mtime_ns, result.st_size) for result in (path.stat() for path in paths))


@lru_cache(maxsize=16)
def _fingerprint(
    paths: tuple[Path, ...], versions: tuple[tuple[int, int], ...], head: str, file_name: str | None
) -> str:
    digest = hashlib.sha256(head.encode())
    for path, (_, size) in zip(paths, versions, strict=True):
        digest.update(f"{file_name or path.name} {size}\n".encode())
        with path.open("rb") as file:
            for index in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * index // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


class CachedConfig(SimpleNamespace):
    """A described decoder's config, with transformers' defaults filled in at an earlier start. It stands in for
    transformers' own, whose import takes longer than loading a small model."""

    def get_text_config(self) -> CachedConfig:
        return self

    def to_json_string(self) -> str:
        return json.dumps(vars(self), sort_keys=True)


def quick_config(folder: Path) -> Any:
    """``read_config``, or where the native path runs the model a ``CachedConfig`` with the same values. The files are
    read once while they stay the same. Raises ModelError."""
    path = folder if gguf.is_gguf(folder) else folder / checkpoint.CONFIG
    return copy.deepcopy(_quick_config(folder, _versions([path] if path.is_file() else ())))


@lru_cache(maxsize=8)
def _quick_config(folder: Path, versions: tuple[tuple[int, int], ...]) -> Any:
    raw = _raw_config(folder)
    record = Record("configs", json.dumps(raw, sort_keys=True), version("transformers"), version("forerun"))
    values = record.read()
    if not isinstance(values, dict):
        config = read_config(folder)
        values = _json_values(config) if refusal(config) is None else None
        if values is None:
            return config
        record.write(values)
    config = CachedConfig(**values)
    if gguf.is_gguf(folder):
        sanity.check_fit(config, gguf.open_gguf(folder).tensors, folder)
    return config


def _json_values(config: Any) -> dict[str, Any] | None:
    """A config's values under all their names; None where JSON or a ``CachedConfig`` cannot hold them."""
    rope = getattr(config, "rope_parameters", None) or {}
    if config.get_text_config() is not config or is_sized(config) or not _is_plain_rope(rope):
        return None
    names = {*config.to_dict(), *config.attribute_map, "num_hidden_layers"}
    names -= {"id2label", "label2id", "transformers_version"}
    values = {name: getattr(config, name) for name in names if hasattr(config, name)}
    values["dtype"] = None if config.dtype is None else str(config.dtype).removeprefix("torch.")
    try:
        return values if json.loads(json.dumps(values)) == values else None
    except (TypeError, ValueError):
        return None


def _is_plain_rope(rope: Mapping[str, Any]) -> bool:
    """Whether frequencies are computed without transformers' functions of the config."""
    return all(
        _is_plain_rope(v) if isinstance(v, Mapping) else k != "rope_type" or v == "default" for k, v in rope.items()
    )


def _raw_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's ``config.json``, or what a GGUF file's metadata give in its place. Raises ModelError."""
    if gguf.is_gguf(folder):
        return gguf_config.read_config(gguf.open_gguf(folder))
    path = folder / checkpoint.CONFIG
    raw = checkpoint.read_object(path)
    sanity.check_given(raw, path)
    sanity.check_depth(raw, path)
    return raw


def read_config(folder: Path) -> Any:
    """A model's config as a transformers object. Raises ModelError."""
    from transformers import AutoConfig

    raw = _raw_config(folder)
    if gguf.is_gguf(folder):
        config = as_config(folder, raw)
        sanity.check_fit(config, gguf.open_gguf(folder).tensors, folder)
        return config
    path = folder / checkpoint.CONFIG
    with checkpoint.library(f"{path} cannot be used"), quiet():
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        sanity.check_config(config, path)
    return _text_config(config)


def _text_config(config: Any) -> Any:
    """The decoder's part of a multimodal model's config, where a description covers that decoder."""
    text = config.get_text_config()
    described = ARCHITECTURES.get(text.model_type)
    if text is config or described is None or not described.prefixes:
        return config
    text.dtype = text.dtype or config.dtype
    if getattr(config, "tie_word_embeddings", False):
        text.tie_word_embeddings = True  # an output layer in the files is read all the same
    if getattr(config, "quantization_config", None) is not None:
        text.quantization_config = config.quantization_config
    return text


def as_config(path: Path, raw: dict[str, Any]) -> Any:
    """The config of a GGUF file as a transformers object. ``raw`` comes from ``gguf_config.read_config``. Raises
    ModelError."""
    from transformers import CONFIG_MAPPING

    with checkpoint.library(f"{path} cannot be used"), quiet():
        config = CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
        sanity.check_config(config, path)
    return config


def eos_ids(folder: Path, config: Any) -> frozenset[int]:
    """Ids of the tokens that end a text: the generation config's, or else the config's. Raises ModelError."""
    text = config.get_text_config()
    if gguf.is_gguf(folder):
        return sanity.check_ids(text.eos_token_id, text.vocab_size, folder)
    path = folder / "generation_config.json"
    result = checkpoint.read_object(path).get("eos_token_id") if path.is_file() else None
    if result is None:
        path, result = folder / checkpoint.CONFIG, getattr(text, "eos_token_id", None)
    return sanity.check_ids(result, text.vocab_size, path)


@contextmanager
def quiet() -> Iterator[None]:
    """Silences transformers' warnings about what is checked here anyway."""
    from transformers import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)

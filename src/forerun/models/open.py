"""Stage one, open: from a name to the files of a model, its config, and its tensors by name, mapped.

A model is a folder with safetensors (``checkpoint.py``), a GGUF file (``gguf.py``; its config: ``gguf_config.py``), a
bundled, a fetched or a hub's one. ``sanity.py`` checks a config before anything is built. Remote code never runs.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from forerun import pretrained
from forerun.core.errors import ConfigError, ModelError
from forerun.core.folders import Record, expanded
from forerun.models import checkpoint, gguf, gguf_config, hub, sanity
from forerun.models import lora as adapter
from forerun.models.architectures.families import ARCHITECTURES
from forerun.models.architectures.spec import is_sized, refusal
from forerun.models.fetch import KNOWN, fetched

BUNDLED = "forerun:"
Files = checkpoint.Safetensors | gguf.GGUFFile
"""Open: ``tensors`` by name, and their ``values``, which are mapped."""
PLACES, BYTES = 64, 4096
"""Of a file, that a fingerprint is made of."""


def resolve(path_or_id: str | Path, *, revision: str | None = None, download_dir: str | None = None) -> Path:
    """The checkpoint's folder, or a model's GGUF file: a local one (a folder that holds a GGUF file and no config is
    that file), a bundled one (``forerun:target``), a fetched one (``smollm2``; a folder of that name is ``./smollm2``),
    or a hub's (``hf:OWNER/NAME[:QUANTIZATION or FILE]``, or the bare id of a repository), of a ``revision`` and to a
    folder where those are given. Raises ModelError, and ConfigError for a revision of what is here already."""
    text = str(path_or_id)
    if text.startswith(hub.PREFIX):
        return checkpoint.find(hub.download(hub.parse(text), revision, download_dir))
    here = text.startswith(BUNDLED) or text in KNOWN or text.endswith(gguf.SUFFIX)
    here = here or ("\0" not in text and expanded(text).is_dir())
    if here and (revision or download_dir):
        raise ConfigError(f"revision and download_dir are for models of the hub; {text} is here: leave them out")
    if text.startswith(BUNDLED):
        return pretrained.path(text.removeprefix(BUNDLED))
    if text in KNOWN:
        return fetched(text)
    if "\0" in text:
        raise ModelError(f"{text!r} is not the name of a folder")
    folder = expanded(text)
    if folder.is_file() and gguf.is_gguf(folder):
        return folder
    if not folder.is_dir():
        named = gguf.is_gguf(folder)
        if named or folder.exists() or text.startswith((".", "/", "~")) or text.count("/") > 1:
            what = "GGUF file" if named else "checkpoint folder"
            raise ModelError(f"no {what} at {text}")
        folder = _download(text, revision, download_dir)
    return checkpoint.find(folder)


def _download(name: str, revision: str | None, download_dir: str | None) -> Path:
    try:
        return hub.download(hub.ModelSource(name, None), revision, download_dir)
    except ModelError as error:
        meant = difflib.get_close_matches(name, KNOWN, n=1)
        hint = f" (did you mean {meant[0]}?)" if meant else ""
        raise ModelError(f"no folder {name!r} here{hint}, and {error}") from error


def open_files(path: Path, *, packed: bool = False) -> Files:
    """A folder, whose weights must be plain numbers unless they may be ``packed``, or a GGUF file. Raises
    ModelError."""
    return gguf.open_gguf(path) if gguf.is_gguf(path) else checkpoint.Safetensors(path, packed=packed)


def weight_sizes(folder: Path) -> tuple[int, int]:
    """Bytes of a checkpoint's weights, and how many numbers its tensors hold. Raises ModelError."""
    tensors = open_files(folder, packed=True).tensors.values()
    return sum(tensor.nbytes for tensor in tensors), sum(tensor.numel for tensor in tensors)


def files(folder: Path, lora: Sequence[str] | str | None = None) -> list[Path]:
    """What holds the weights. Raises ModelError if there are none."""
    result = gguf.shards_of(folder) if folder.is_file() else sorted(folder.glob("*.safetensors"))
    if not result:
        raise ModelError(f"{folder} has no safetensors weights")
    return result + [
        folder / name for folder, _ in adapter.parse(lora) for name in (checkpoint.ADAPTER, adapter.WEIGHTS)
    ]


def fingerprint(folder: Path, lora: Sequence[str] | str | None = None) -> str:
    """A hash, 16 hexadecimal digits, of the sizes of a checkpoint's safetensors files, or of a GGUF file, and of
    ``PLACES`` spots of each; with LoRA adapters merged, of theirs and their weights too.

    Training changes every matrix, so it changes the fingerprint; so does another dtype. At most 256 KiB are read per
    file. Raises ModelError if the folder has no safetensors or they cannot be read.
    """
    digest = hashlib.sha256()
    paths, adapters = files(folder, lora), adapter.parse(lora)
    if adapters:
        digest.update(f"{[weight for _, weight in adapters]}\n".encode())
    try:
        for path in paths:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                for index in range(PLACES):
                    file.seek(max(0, size - BYTES) * index // (PLACES - 1))
                    digest.update(file.read(BYTES))
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error.strerror}") from error
    return digest.hexdigest()[:16]


class KeptConfig(SimpleNamespace):
    """A described decoder's config with the defaults that transformers filled in at an earlier start. It stands in for
    transformers' own, whose import takes longer than loading a small model."""

    def get_text_config(self) -> KeptConfig:
        return self

    def to_json_string(self) -> str:
        return json.dumps(vars(self), sort_keys=True)


def quick_config(folder: Path) -> Any:
    """``read_config``, or a ``KeptConfig`` with the same values where the native path runs the model. Raises
    ModelError."""
    given = _given_config(folder)
    record = Record("configs", json.dumps(given, sort_keys=True), version("transformers"), version("forerun"))
    kept = record.read()
    if not isinstance(kept, dict):
        config = read_config(folder)
        kept = _values(config) if refusal(config) is None else None
        if kept is None:
            return config
        record.write(kept)
    config = KeptConfig(**kept)
    if gguf.is_gguf(folder):
        sanity.check_fit(config, gguf.open_gguf(folder).tensors, folder)
    return config


def _values(config: Any) -> dict[str, Any] | None:
    """A config's values by all names that they have, as JSON holds them; None if it cannot hold them."""
    if (
        config.get_text_config() is not config
        or is_sized(config)
        or not _plain_rope(getattr(config, "rope_parameters", None) or {})
    ):
        return None
    names = {*config.to_dict(), *config.attribute_map, "num_hidden_layers"} - {
        "id2label",
        "label2id",
        "transformers_version",
    }
    values = {name: getattr(config, name) for name in names if hasattr(config, name)}
    values["dtype"] = None if config.dtype is None else str(config.dtype).removeprefix("torch.")
    try:
        same = json.loads(json.dumps(values)) == values
    except (TypeError, ValueError):
        return None
    return values if same else None


def _plain_rope(rope: Mapping[str, Any]) -> bool:
    """Whether frequencies are computed here, without transformers' functions of the config."""
    return all(
        _plain_rope(v) if isinstance(v, Mapping) else k != "rope_type" or v == "default" for k, v in rope.items()
    )


def _given_config(folder: Path) -> dict[str, Any]:
    """What a checkpoint or a GGUF file says itself. Raises ModelError."""
    if gguf.is_gguf(folder):
        return gguf_config.read_config(gguf.open_gguf(folder))
    path = folder / checkpoint.CONFIG
    given = checkpoint.read_object(path)
    sanity.check_given(given, path)
    sanity.check_depth(given, path)
    return given


def read_config(folder: Path) -> Any:
    """The config of a checkpoint or a GGUF file, as transformers has it. Raises ModelError."""
    from transformers import AutoConfig

    given = _given_config(folder)
    if gguf.is_gguf(folder):
        config = as_config(folder, given)
        sanity.check_fit(config, gguf.open_gguf(folder).tensors, folder)
        return config
    path = folder / checkpoint.CONFIG
    with checkpoint.library(f"{path} cannot be used"), quiet():
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        sanity.check_config(config, path)
    return _decoder(config)


def _decoder(config: Any) -> Any:
    """The config of the decoder alone, where one is described that stands in models which read pictures too."""
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


def as_config(path: Path, given: dict[str, Any]) -> Any:
    """What ``gguf_config.read_config`` says of a GGUF file, as transformers has it. Raises ModelError."""
    from transformers import CONFIG_MAPPING

    with checkpoint.library(f"{path} cannot be used"), quiet():
        config = CONFIG_MAPPING[given["model_type"]].from_dict(given)
        sanity.check_config(config, path)
    return config


def eos_ids(folder: Path, config: Any) -> frozenset[int]:
    """Every id that ends a text: the generation config's, else the model config's. Raises ModelError."""
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
    """Keep transformers from remarking on what is checked, and refused, here."""
    from transformers import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)

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
from functools import cached_property, lru_cache
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
from forerun.sampling.params import SamplingParams

BUNDLED = "forerun:"
Files = checkpoint.Safetensors | gguf.GGUFFile
"""Open files: ``tensors`` are descriptions by name, ``values(name)`` is one tensor."""
GENERATION = "generation_config.json"
SAMPLING_KEYS = {
    "temperature": "general.sampling.temp", "top_k": "general.sampling.top_k", "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p", "repetition_penalty": "general.sampling.penalty_repeat",
}  # fmt: skip
"""Fields of ``SamplingParams`` and the GGUF keys that set them. In JSON, a key is named as its field."""
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


class Checkpoint:
    """A model's files, opened once: all that is known of it before its weights are laid out. Every member raises
    ModelError for files that cannot be used."""

    def __init__(self, path: Path, file: gguf.GGUFFile | None = None) -> None:
        """``path``: a folder with safetensors, or a GGUF file, which may be open already."""
        self.path = path
        self.gguf = gguf.open_gguf(path) if file is None and gguf.is_gguf(path) else file

    @classmethod
    def open(cls, path_or_id: str | Path) -> Checkpoint:
        """The model of a name, as ``resolve`` takes it."""
        return cls.at(resolve(path_or_id))

    @staticmethod
    def at(path: Path) -> Checkpoint:
        """The model of a path that ``resolve`` has found. What is read of its files holds while they stay the same."""
        present = gguf.shards_of(path) if gguf.is_gguf(path) else [*path.glob("*.json"), *path.glob("*.safetensors")]
        return _opened(path, _versions(each for each in present if each.is_file()))

    def files(self, *, packed: bool = False) -> Files:
        """The open tensors. A folder's weights must be floating-point numbers unless ``packed``."""
        return self.gguf or checkpoint.Safetensors(self.path, packed=packed)

    def weight_sizes(self) -> tuple[int, int]:
        """Bytes and number of the weights."""
        tensors = self.files(packed=True).tensors.values()
        return sum(tensor.nbytes for tensor in tensors), sum(tensor.numel for tensor in tensors)

    def weight_files(self, lora: Sequence[str] | str | None = None) -> list[Path]:
        """The files that hold the weights, those of adapters included; at least one."""
        result = gguf.shards_of(self.path) if self.gguf is not None else sorted(self.path.glob("*.safetensors"))
        if not result:
            raise ModelError(f"{self.path} has no safetensors weights")
        names = (checkpoint.ADAPTER, adapter.WEIGHTS)
        return result + [folder / name for folder, _ in adapter.parse(lora) for name in names]

    def fingerprint(self, lora: Sequence[str] | str | None = None, file_name: str | None = None) -> str:
        """A hash of the weights and of ``lora``: 16 hexadecimal digits, from each file's size and samples of it.

        Training changes every matrix, so it changes the fingerprint; so does another dtype, and another name of a file.
        ``file_name``: what a renamed GGUF file was called. At most 256 KiB are read per file.
        """
        paths, weights = tuple(self.weight_files(lora)), [weight for _, weight in adapter.parse(lora)]
        try:
            return _fingerprint(paths, _versions(paths), f"{weights}\n" if weights else "", file_name)
        except OSError as error:
            raise ModelError(f"{self.path} cannot be read: {error.strerror}") from error

    @cached_property
    def raw_config(self) -> dict[str, Any]:
        """The content of ``config.json``, or what a GGUF file's metadata give in its place."""
        if self.gguf is not None:
            return gguf_config.read_config(self.gguf)
        path = self.path / checkpoint.CONFIG
        raw = checkpoint.read_object(path)
        sanity.check_given(raw, path)
        sanity.check_depth(raw, path)
        return raw

    @property
    def config(self) -> Any:
        """``transformers_config``, or on the native path a ``CachedConfig`` with the same values; the caller's own."""
        return copy.deepcopy(self._config)

    @cached_property
    def _config(self) -> Any:
        record = Record(
            "configs", json.dumps(self.raw_config, sort_keys=True), version("transformers"), version("forerun")
        )
        values = record.read()
        if not isinstance(values, dict):
            config = self.transformers_config()
            values = _json_values(config) if refusal(config) is None else None
            if values is None:
                return config
            record.write(values)
        return self._checked(CachedConfig(**values))

    def transformers_config(self) -> Any:
        """The config as an object of transformers."""
        from transformers import CONFIG_MAPPING, AutoConfig

        raw, path = self.raw_config, self.path if self.gguf is not None else self.path / checkpoint.CONFIG
        with checkpoint.library(f"{path} cannot be used"), quiet():
            if self.gguf is not None:
                config = CONFIG_MAPPING[raw["model_type"]].from_dict(copy.deepcopy(raw))
            else:
                config = AutoConfig.from_pretrained(self.path, trust_remote_code=False, local_files_only=True)
            sanity.check_config(config, path)
        return self._checked(_text_config(config))

    def _checked(self, config: Any) -> Any:
        """A config that does not ask for more than a GGUF file holds; a folder's is checked when its weights are."""
        if self.gguf is not None:
            sanity.check_fit(config, self.gguf.tensors, self.path)
        return config

    @cached_property
    def generation(self) -> dict[str, Any]:
        """The content of ``generation_config.json``; empty if there is none."""
        path = self.path / GENERATION
        return checkpoint.read_object(path) if path.is_file() else {}

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids of the tokens that end a text: the generation config's, or else the config's."""
        text, given = self._config.get_text_config(), self.generation.get("eos_token_id")
        path = self.path if self.gguf is not None else self.path / (checkpoint.CONFIG if given is None else GENERATION)
        return sanity.check_ids(getattr(text, "eos_token_id", None) if given is None else given, text.vocab_size, path)

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of ``SamplingParams`` that the model sets, as vLLM takes them."""
        given = self.generation
        if self.gguf is not None:
            values = ((name, self.gguf.metadata.get(key)) for name, key in SAMPLING_KEYS.items())
            given = {name: float(f"{v:.7g}") if isinstance(v, float) else v for name, v in values}  # 0.6 in float32
        result = {name: given[name] for name in SAMPLING_KEYS if given.get(name) is not None}
        try:
            SamplingParams(**result)
        except ConfigError as error:
            source = self.path if self.gguf is not None else self.path / GENERATION
            raise ModelError(f"{source} has unusable sampling settings: {error}") from None
        return result

    def require_decoder(self, command: str) -> None:
        """Raises ModelError if a command that works on decoders gets an encoder-decoder."""
        if sanity.has_encoder(self._config):
            raise ModelError(f"{self.path} is an encoder-decoder, but {command} supports decoders only")


@lru_cache(maxsize=4)
def _opened(path: Path, versions: tuple[tuple[int, int], ...]) -> Checkpoint:
    return Checkpoint(path)


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

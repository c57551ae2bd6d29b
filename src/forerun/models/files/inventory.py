"""Models on this machine: lists and describes them, finds drafts for them, and removes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from forerun.core.errors import ForerunError, ModelError
from forerun.core.folders import expanded
from forerun.models.files import fetch, hub
from forerun.models.files.fetch import KNOWN, model_file, named, num_fetched_parts, partial_file
from forerun.models.files.gguf import DRAFTERS, NO_MODEL, SUFFIX, GGUFFile, is_gguf, shards_of
from forerun.models.files.open import Checkpoint, resolve
from forerun.models.formats import weight_cache
from forerun.models.formats.gguf_types import larger_in_memory
from forerun.models.text.tokenizer import read_vocabulary


@dataclass(frozen=True)
class StoredModel:
    """One model. ``name`` is what --model takes, ``size`` is in bytes."""

    name: str
    format: str
    size: int
    path: Path
    whole: bool = True
    """Whether all parts have been fetched."""


def on_disk() -> list[StoredModel]:
    """Models fetched by name, then those of the hub's cache."""
    return [*_fetched(), *(each for repository in hub.repositories() for each in _of_repository(repository))]


def _fetched() -> Iterator[StoredModel]:
    for name, known in KNOWN.items():
        path, partial = model_file(name), partial_file(name)
        if path.is_file():
            yield StoredModel(name, f"GGUF {hub.quantization(known.file_name)}", known.size, path)
        elif count := num_fetched_parts(name):
            progress = f"{count} of {len(known.parts)} parts"
            yield StoredModel(name, progress, partial.stat().st_size, partial, whole=False)


def _of_repository(repository: Any) -> Iterator[StoredModel]:
    """The models of a repository, each in the newest revision that has it."""
    name, listed = hub.PREFIX + repository.repo_id, set()
    for revision in sorted(repository.revisions, key=lambda each: each.last_modified, reverse=True):
        sizes = {file: each.size_on_disk for file, each in hub.files_of(revision).items()}
        if hub.is_checkpoint(sizes) and name not in listed:
            listed.add(name)
            size = sum(size for file, size in sizes.items() if not file.endswith(SUFFIX))
            yield StoredModel(name, "safetensors", size, revision.snapshot_path)
        for first, files in hub.ggufs(sizes).items():
            if first not in listed:
                listed.add(first)
                kind, path = hub.quantization(first), revision.snapshot_path / first
                whole = all(shard.exists() for shard in shards_of(path))
                size = sum(sizes[file] for file in files)
                yield StoredModel(f"{name}:{first}", f"GGUF {kind}" if kind else "GGUF", size, path, whole)


def known_draft(model: str | Path) -> Path | None:
    """The draft of a known model, if it is on this machine: in the folder of its file, fetched, or in the hub's cache.

    ``model`` is recognised by its name, its repository's or folder's, or a GGUF file's metadata, in any quantization.
    """
    for draft in drafts_of(model):
        found = [path for path in _beside(model) if _name_of_file(path) == draft]
        found += [path for path in [model_file(draft)] if path.is_file()]
        hub_models = (each for each in on_disk() if each.whole and each.name.startswith(hub.PREFIX))
        found += [each.path for each in hub_models if known_name(each.name) == draft]
        for path in found:
            if not path.name.lower().startswith((*DRAFTERS, *NO_MODEL)):
                return path
    return None


def _beside(model: str | Path) -> list[Path]:
    """The GGUF files in the folder of a GGUF file that is named by its path."""
    path = expanded(str(model))
    by_path = str(model) not in KNOWN and path.is_file() and is_gguf(path)
    return sorted(path.absolute().parent.glob(f"*{SUFFIX}")) if by_path else []


def _name_of_file(path: Path) -> str | None:
    try:
        return known_name(path)
    except ModelError:  # a broken file beside a model is not its draft
        return None


def drafts_of(model: str | Path) -> tuple[str, ...]:
    """Names of known draft models for it, fetched or not."""
    name = known_name(model)
    return KNOWN[name].drafts if name else ()


def known_name(model: str | Path) -> str | None:
    """Which known model it is, whatever its quantization."""
    model = str(model)
    if model in KNOWN:
        return model
    if model.startswith(hub.PREFIX):
        return named(hub.parse(model).repository.rpartition("/")[2])
    path = expanded(model)
    if path.is_file() and (file := Checkpoint.at(path).gguf) is not None:
        return named(str(file.metadata.get("general.name", "")))
    repository = path.parents[1].name if path.parent.name == "snapshots" else path.name  # of the hub's cache
    return named(repository.rpartition("--")[2])


def here(name: str) -> Path:
    """A model's file or folder, never downloaded. Raises ModelError unless it is on this machine."""
    if name.startswith(hub.PREFIX):
        result = hub.cached(hub.parse(name))
        if result is None:
            raise ModelError(f"{name} is not in the hub's cache: run `forerun fetch {name}`, and see `forerun ls`")
        return result
    path = expanded(name)
    if name not in KNOWN and not name.startswith("forerun:") and not path.exists():
        raise ModelError(f"no model is called {name!r}: `forerun ls` lists those on this machine")
    return resolve(name)


def describe(name: str) -> dict[str, Any]:
    """What ``forerun show`` prints of a model on this machine. Raises ModelError."""
    path = here(name)
    checkpoint = Checkpoint.at(path)
    config, files = checkpoint.config, checkpoint.files(packed=True)
    text = config.get_text_config()
    if isinstance(files, GGUFFile):
        size = sum(shard.stat().st_size for shard in shards_of(path))
        kind = f"GGUF {_file_type(files.metadata.get('general.file_type'))}"
        types = files.types()
    else:
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        kind = f"safetensors {max(files.tensors.values(), key=lambda each: each.nbytes).kind}"
        types = {}
    packed = getattr(config, "quantization_config", None)
    return {
        "name": name,
        "architecture": (config.architectures or [config.model_type])[0],
        "parameters": None if packed else sum(tensor.numel for tensor in files.tensors.values()),
        "format": kind,
        "types": types,
        "held": larger_in_memory(types),
        "context": getattr(text, "max_position_embeddings", None),
        "vocabulary": text.vocab_size,
        "size": size,
        "path": str(path),
        "drafts": _drafts(name, path, size),
    }


def _file_type(value: Any) -> str:
    try:
        return gguf.LlamaFileType(value).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return "of an unnamed kind"


def _drafts(name: str, path: Path, size: int) -> list[dict[str, Any]]:
    """Known drafts, fetched or not, then smaller models on this machine that have the same vocabulary."""
    known = drafts_of(name if name in KNOWN else path)
    result = [{"name": each, "here": model_file(each).is_file()} for each in known]
    smaller = [each for each in on_disk() if each.whole and each.size < size and each.name not in drafts_of(name)]
    if smaller:
        vocabulary = read_vocabulary(path)
        result += [{"name": each.name, "here": True} for each in smaller if _vocabulary(each) == vocabulary]
    return result


def _vocabulary(model: StoredModel) -> dict[str, int] | None:
    try:
        return read_vocabulary(model.path)
    except ForerunError:  # not a model that can be run
        return None


def remove(name: str) -> int:
    """Remove a fetched model, a repository of the hub's cache, or one GGUF model of it. Returns the bytes freed.

    Raises ModelError for anything else, which is never removed.
    """
    if name in KNOWN:
        return fetch.remove(name) + weight_cache.clear(model_file(name))
    if not name.startswith(hub.PREFIX):
        raise ModelError(f"{name} was not fetched: remove it yourself if it is yours (`forerun ls` lists the others)")
    freed, paths = hub.remove(hub.parse(name))
    return freed + sum(map(weight_cache.clear, paths))

"""Models on this machine: which there are, what they are, what drafts for them; and how they go."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from forerun.core.errors import ForerunError, ModelError
from forerun.core.folders import expanded
from forerun.models import hub
from forerun.models.fetch import KNOWN, held_parts, home, named, partial, place
from forerun.models.formats.gguf_types import described
from forerun.models.formats.kept import forget
from forerun.models.gguf import SUFFIX, GGUFFile, is_gguf, open_gguf, shards_of
from forerun.models.open import open_files, quick_config, resolve
from forerun.models.tokenizer import read_vocabulary


@dataclass(frozen=True)
class StoredModel:
    """One model: ``name`` is what --model takes."""

    name: str
    format: str
    size: int
    """Its bytes."""
    path: Path
    whole: bool = True
    """Whether all parts have been fetched."""


def on_disk() -> list[StoredModel]:
    """What was fetched, then what the hub's cache holds."""
    return [*_fetched(), *(each for repository in hub.repositories() for each in _of(repository))]


def _fetched() -> Iterator[StoredModel]:
    for name, known in KNOWN.items():
        kind = f"GGUF {hub.quantization(known.file_name)}"
        if place(name).is_file():
            yield StoredModel(name, kind, known.size, place(name))
        elif held_parts(name):
            about = f"{held_parts(name)} of {known.parts} parts"
            yield StoredModel(name, about, partial(name).stat().st_size, partial(name), whole=False)


def _of(repository: Any) -> Iterator[StoredModel]:
    """The models of a repository's newest revision."""
    revision = max(repository.revisions, key=lambda each: each.last_modified, default=None)
    if revision is None:
        return
    sizes = {name: file.size_on_disk for name, file in hub.files_of(revision).items()}
    name, folder = hub.PREFIX + repository.repo_id, revision.snapshot_path
    if hub.is_checkpoint(sizes):
        held = sum(size for file, size in sizes.items() if not file.endswith(SUFFIX))
        yield StoredModel(name, "safetensors", held, folder)
    for files in hub.ggufs(sizes):
        kind, whole = hub.quantization(files[0]), all(file in sizes for file in files)
        held = sum(sizes.get(file, 0) for file in files)
        yield StoredModel(f"{name}:{files[0]}", f"GGUF {kind}" if kind else "GGUF", held, folder / files[0], whole)


def known_draft(model: str | Path) -> Path | None:
    """The draft of a known model, if it is on this machine. ``model`` is known by its name, by that of its repository
    or folder, or by what its GGUF file says that it is, whatever its quantization."""
    for draft in drafts_of(model):
        if place(draft).is_file():
            return place(draft)
        for each in on_disk():
            if each.whole and each.name.startswith(hub.PREFIX) and _named(each.name) == draft:
                return each.path
    return None


def drafts_of(model: str | Path) -> tuple[str, ...]:
    """Names of known models that draft for it, here or not."""
    name = _named(str(model))
    return KNOWN[name].drafts if name else ()


def _named(model: str) -> str | None:
    """Which known model it is."""
    if model in KNOWN:
        return model
    if model.startswith(hub.PREFIX):
        return named(hub.parse(model).repository.rpartition("/")[2])
    path = expanded(model)
    if is_gguf(path) and path.is_file():
        return named(str(open_gguf(path).metadata.get("general.name", "")))
    repository = path.parents[1].name if path.parent.name == "snapshots" else path.name  # of the hub's cache
    return named(repository.rpartition("--")[2])


def here(name: str) -> Path:
    """A model's file or folder without any download. Raises ModelError."""
    if name.startswith(hub.PREFIX):
        result = hub.held(hub.parse(name))
        if result is None:
            raise ModelError(f"{name} is not in the hub's cache: run `forerun fetch {name}`, and see `forerun ls`")
        return result
    path = expanded(name)
    if name not in KNOWN and not name.startswith("forerun:") and not path.exists():
        raise ModelError(f"no model is called {name!r}: `forerun ls` lists those on this machine")
    return resolve(name)


def describe(name: str) -> dict[str, Any]:
    """What a model on this machine is. Raises ModelError."""
    path = here(name)
    config = quick_config(path)
    text = config.get_text_config()
    files = open_files(path, packed=True)
    if isinstance(files, GGUFFile):
        size = sum(part.stat().st_size for part in shards_of(path))
        kind = f"GGUF {_file_type(files.metadata.get('general.file_type'))}"
        types, held = files.types(), described(files.types())
    else:
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        kind = f"safetensors {max(files.tensors.values(), key=lambda each: each.nbytes).kind}"
        types, held = {}, ""
    packed = getattr(config, "quantization_config", None)
    return {
        "name": name,
        "architecture": (config.architectures or [config.model_type])[0],
        "parameters": None if packed else sum(tensor.numel for tensor in files.tensors.values()),
        "format": kind,
        "types": types,
        "held": held,
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
    """Known drafts, here or not, then smaller models here that have the same vocabulary."""
    result = [{"name": each, "here": place(each).is_file()} for each in drafts_of(path if name not in KNOWN else name)]
    smaller = [each for each in on_disk() if each.whole and each.size < size and each.name not in drafts_of(name)]
    if smaller:
        words = read_vocabulary(path)
        result += [{"name": each.name, "here": True} for each in smaller if _vocabulary(each) == words]
    return result


def _vocabulary(kept: StoredModel) -> dict[str, int] | None:
    try:
        return read_vocabulary(kept.path)
    except ForerunError:  # it is no model that can be run
        return None


def remove(name: str) -> int:
    """Take a fetched model, a repository or one GGUF model of it off this machine; the bytes that are free then.

    Raises ModelError for what is none of these, and nothing else is ever removed."""
    if name in KNOWN:
        kept = [each for each in _fetched() if each.name == name]
        if not home(name).is_dir():
            raise ModelError(f"{name} is not on this machine")
        shutil.rmtree(home(name))
        return sum(each.size for each in kept) + forget(place(name))
    if not name.startswith(hub.PREFIX):
        raise ModelError(f"{name} was not fetched: remove it yourself if it is yours (`forerun ls` lists the others)")
    freed = sum(forget(each.path) for each in on_disk() if f"{each.name}:".startswith(f"{name}:"))
    return freed + hub.remove(hub.parse(name))
